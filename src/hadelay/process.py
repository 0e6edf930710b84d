"""Runs a Node as a process: uvloop, sockets, signals, log lines. `serve` blocks until the node has ended.

SIGTERM and SIGINT end it in order: a leader hands over first, polls are answered, a checkpoint makes the next start
quick. A second signal does not wait. A fatal error of the node ends the process at once, with code 70: the
journal has everything that was acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
import uvloop
from msgspec.structs import replace
from structlog.typing import EventDict, Processor, WrappedLogger

from hadelay.errors import WAY_OUT, ConfigError, is_disk_full, shortened
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime
from hadelay.platform.tcp import AsyncioNetwork
from hadelay.platform.tls import Certificates
from hadelay.server.checkpoints import ENDS
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.server.service.cluster import ready_checks
from hadelay.server.service.node import NodeService
from hadelay.server.webhooks.pool import Pool, Webhooks
from hadelay.server.webhooks.sender import Sender
from hadelay.settings.node import Config, LogConfig
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.manifests import open_archive
from hadelay.version import VERSION

if TYPE_CHECKING:
    from hadelay.console.site import Console
    from hadelay.http.routes import Routes

#: Exit code (EX_SOFTWARE) of a node that ended itself because going on could have broken a guarantee.
FATAL = 70
#: Timeout of handing leadership over when a leader stops, in seconds.
_HAND_OVER_S = 3.0
#: Timeout of running webhook calls when the node stops, in seconds.
_CALLS_S = 5.0
#: Interval of checking whether the webhook calls have ended, in seconds.
_LOOK_S = 0.02
#: Time after which the log first says why the node is not ready, and interval of its repetitions, in seconds.
_PATIENCE_S, _REMIND_S = 3.0, 60.0
#: Timeout of the last checkpoint, in seconds. Without this checkpoint the next start replays more of the journal.
_CHECKPOINT_S = 10.0
#: Limit of the whole stop, in seconds: less than supervisors wait before they kill the process (60 s). On a starved
#: machine, the steps of a stop take far longer than their own timeouts.
_STOP_S = 45.0
#: Timeout of writing the last log line before the process ends, in seconds.
_TELL_S = 1.0
#: Interval of looking for changed certificate files, in seconds; SIGHUP looks at once.
_CERTIFICATES_S = 10.0
#: Days before a certificate expires from which on a daily log line warns; the alert HadelayCertificate warns as early.
_SOON_DAYS, _DAY_S = 14, 86_400
#: Thresholds of Python's garbage collector. A batch makes many objects without reference cycles; with the default
#: threshold of 700, the collector would scan each of these objects twice, in vain.
_GC = (20_000, 20, 50)
#: Python's switch interval of threads, in seconds: longest wait of a thread for the interpreter after its sync has
#: ended. The default of 5 ms is longer than most syncs.
_SWITCH_S = 0.0005
#: Number of file descriptors kept for everything but sockets of clients and webhooks: journal, hours, LMDB, links,
#: backups, connections before HELLO on the node link (256) and spares of health routes (64).
RESERVE = 1_024
#: Number of file descriptors kept, like RESERVE, when the process may open few files: the same connections and spares,
#: and 192 for the node's own files.
_SMALL_RESERVE = 512
#: Smallest limit of open files with which a node starts: _SMALL_RESERVE, and some sockets for clients.
LEAST = 768
#: Fields of log lines that are never shortened, because clients have no influence on them.
_WHOLE = frozenset(("event", "exception", "stack"))

log = structlog.get_logger("hadelay")


def serve(config: Config, ready: Callable[[dict[str, Any]], None] = lambda node: None) -> int:
    """Run one node until a signal stops it. `ready` is called once, as soon as the node can serve. Returns the exit
    code."""
    set_up_logs(config.log, config.node.name)
    log.info("starting", version=VERSION, cluster=config.cluster.id, data_dir=config.node.data_dir)
    config, sockets = divide(config, raise_limit())
    if config.retention.archive:
        open_archive(config.retention.archive)  # load the archive's library now: later it would block the event loop
    gc.set_threshold(*_GC)
    sys.setswitchinterval(_SWITCH_S)
    return uvloop.run(_serve(config, sockets, ready))


def _end_at_once(error: BaseException) -> None:
    """End the process after an error that the node cannot survive."""
    full = {"next": ENDS} if is_disk_full(error) else {}
    if isinstance(error, FileNotFoundError) and error.filename:  # name the file: repr(error) does not
        full = {"file": str(error.filename), "next": WAY_OUT}
    log.critical("fatal", error=repr(error), exc_info=error, **full)
    # Exit without clean-up, because any further write might break a guarantee of the cluster.
    os._exit(FATAL)


async def _serve(config: Config, sockets: int, ready: Callable[[dict[str, Any]], None]) -> int:
    from hadelay.http.app import HttpServer

    loop = asyncio.get_running_loop()
    runtime = Runtime(loop)
    ending = _end_on_signals(loop)
    network = node_link(config, runtime)
    backend = partial(LmdbBackend, map_bytes=config.storage.map_bytes)
    node = open_node(config, Disk(), network, runtime, _end_at_once, backend=backend)
    hooks = config.webhooks
    files = hooks.tls_cert, hooks.tls_key, hooks.tls_ca
    identity = Certificates("webhooks", *files, caller=True) if hooks.tls_cert else None
    sender = Sender(node.guard, hooks.user_agent, certificates=identity)
    webhooks = Webhooks(node, sender.call)
    service = NodeService(node, webhooks)
    console = open_console(config, service)
    http = HttpServer(
        service, config.http, config.limits.max_delay_ms, config.security, sockets=sockets,
        more=None if console is None else console.routes, doors=open_doors(config, service),
    )  # fmt: skip
    certificates = http.metrics.certificates = [tls for tls in (network.tls, http.tls, identity) if tls is not None]
    node.certificate_s = lambda: min((tls.expires_s for tls in certificates), default=0.0)
    await http.start()
    _watch(http.metrics.certificates, runtime)
    node.start()
    if console is not None:
        console.start()
    try:
        await _ready(node, ending)
        if not ending.is_set():
            service.access.knows_tokens = True
            # Objects that exist now live as long as the process, so the garbage collector need not look at them again.
            gc.freeze()
            log.info("ready", http=config.advertise, raft=config.raft.listen, leader=node.raft.leader)
            notify("READY=1")
            ready({"name": node.name, "pid": os.getpid(), "http": config.advertise, "raft": config.raft.listen})
        await ending.wait()
        log.info("stopping", leads=bool(node.leading))
        notify("STOPPING=1")
        await _hand_over(node)
        await _calls_over(webhooks.pool)
        await _within(_CHECKPOINT_S, node.checkpoints.begin, "checkpoint_unfinished")
    finally:
        if console is not None:
            await console.stop()
        await http.stop()
        node.stop()
        await sender.close()
        runtime.close()
    log.info("stopped")
    return 0


def open_console(config: Config, service: NodeService) -> Console | None:
    """Make the node's console. None if it is switched off or its packages are missing: a node works without a
    console."""
    if not config.http.console:
        return None
    try:
        from hadelay.console.site import Console
    except ImportError as error:
        log.warning("console_off", reason=str(error))
        return None
    return Console(service, secure=bool(config.http.tls_cert))


def open_doors(config: Config, service: NodeService) -> Routes | None:
    """Make the HTTP routes for AWS SDKs (SQS, EventBridge Scheduler). None if `http.aws` switches them off."""
    if not config.http.aws:
        return None
    from hadelay.aws.mount import doors

    return doors(service, tokens=config.security.tokens)


def _end_on_signals(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    """Event that the first SIGTERM or SIGINT sets; a second signal ends the process at once. If the process has not
    stopped after _STOP_S, a thread ends it: everything acknowledged is in the journal."""
    ending = asyncio.Event()

    def overdue() -> None:
        # Log in another thread: if nobody reads the log any more, writing to it blocks.
        telling = threading.Thread(
            target=log.warning, args=("stop_unfinished",), kwargs={"after_s": _STOP_S}, daemon=True
        )
        telling.start()
        telling.join(_TELL_S)
        os._exit(0)

    def on_signal() -> None:
        if ending.is_set():
            os._exit(130)
        ending.set()
        limit = threading.Timer(_STOP_S, overdue)
        limit.daemon = True
        limit.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return ending


def notify(state: str) -> None:
    """Send `state` to systemd, if systemd started this process and asked for such messages (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)


def node_link(config: Config, runtime: Runtime) -> AsyncioNetwork:
    """Create the node's network link to the other members. ConfigError if the certificate can't be used."""
    raft = config.raft
    files = (raft.tls_cert, raft.tls_key, raft.tls_ca)
    return AsyncioNetwork(
        config.node.name,
        raft.listen,
        config.members,
        cluster_id=config.cluster.id,
        group=config.cluster.group,
        runtime=runtime,
        tls=Certificates("raft", *files, mutual=True) if all(files) else None,
    )


def _watch(certificates: list[Certificates], runtime: Runtime) -> None:
    def tell(one: Certificates) -> None:
        days = (one.expires_s - runtime.wall_ms() / 1000) / _DAY_S
        if days < _SOON_DAYS:
            log.warning("certificate_expires", path=one.paths["tls_cert"], days=round(days, 1))

    def refresh() -> None:
        for one in certificates:
            if one.refresh():
                log.info("certificate_read", path=one.paths["tls_cert"])
                tell(one)

    def repeat(seconds: float, look: Callable[[], None]) -> None:
        look()
        runtime.call_later(seconds, repeat, seconds, look)

    if certificates:
        runtime.loop.add_signal_handler(signal.SIGHUP, refresh)
        runtime.call_later(_CERTIFICATES_S, repeat, _CERTIFICATES_S, refresh)
        for one in certificates:
            repeat(_DAY_S, partial(tell, one))


async def _ready(node: Node, ending: asyncio.Event) -> None:
    """Wait until a leader is known and this node has applied all entries committed before now (ReadIndex), or until
    `ending` is set: catching up may take minutes."""
    say_at = node.runtime.monotonic() + _PATIENCE_S
    caught_up: asyncio.Future[bool] | None = None
    while not ending.is_set():
        if node.runtime.monotonic() >= say_at:
            say_at += _REMIND_S
            why = [check.detail for check in ready_checks(node) if not check.ok]
            log.warning("not_ready", why=why or ["it is catching up"])
        if caught_up is None and node.leadership.serves():
            caught_up = asyncio.get_running_loop().create_future()
            node.raft.read_index(lambda error, asked=caught_up: asked.set_result(error is None))  # type: ignore[misc]
        if caught_up is not None and caught_up.done():
            if caught_up.result():
                return
            caught_up = None
        await asyncio.sleep(0.02)


async def _hand_over(node: Node) -> None:
    if not node.leading or node.raft.membership.sole_voter:
        return

    def begin(over: Callable[[], None]) -> None:
        node.leadership.transfer(None, lambda error: over(), "it is stopping")

    await _within(_HAND_OVER_S, begin, "hand_over_failed")


async def _calls_over(pool: Pool) -> None:
    """Wait until webhook calls have ended and the leader has their outcomes. Unfinished calls are repeated when their
    leases have run out."""
    for _ in range(int(_CALLS_S / _LOOK_S)):
        if not pool.busy:
            return
        await asyncio.sleep(_LOOK_S)
    log.warning("calls_unfinished", after_s=_CALLS_S)


async def _within(seconds: float, start: Callable[[Callable[[], None]], None], failure: str) -> None:
    """Call start(done), then wait up to `seconds` until done() is called. A timeout is only logged."""
    over = asyncio.Event()
    start(over.set)
    try:
        await asyncio.wait_for(over.wait(), seconds)
    except TimeoutError:
        log.warning(failure, after_s=seconds)


def raise_limit() -> int:
    """Raise this process's limit of open files to its hard limit; returns the new limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


def divide(config: Config, limit: int) -> tuple[Config, int]:
    """Divide `limit` file descriptors. Returns (configuration that fits, number of sockets for clients and relayed
    polls). Lowers http.max_connections and webhooks.max_calls if necessary, and logs that. ConfigError below LEAST."""
    if limit < LEAST:
        raise ConfigError(
            f"this process may open {limit} files; a node needs {LEAST} at least, and some for each client: raise the "
            "limit (LimitNOFILE= in the systemd unit, ulimit -n in a shell, ulimits in a compose file)"
        )
    http, webhooks = config.http, config.webhooks
    left = limit - min(RESERVE, max(limit // 2, _SMALL_RESERVE))
    calls = min(webhooks.max_calls, left // 4)
    sockets = left - calls
    connections = min(http.max_connections, sockets)
    if (connections, calls) != (http.max_connections, webhooks.max_calls):
        log.warning(
            "few_descriptors",
            may_have=limit,
            needed=RESERVE + http.max_connections + webhooks.max_calls,
            max_connections=f"{connections} instead of {http.max_connections}",
            max_calls=f"{calls} instead of {webhooks.max_calls}",
        )
        config = replace(
            config, http=replace(http, max_connections=connections), webhooks=replace(webhooks, max_calls=calls)
        )
    return config, sockets


def set_up_logs(config: LogConfig, node: str = "") -> None:
    """Set up logging; call this once per process, before anything logs. Log lines go to stderr: an event and its
    fields, for changes of state, never per message; JSON unless stderr is a terminal.

    Parts that also run in the simulator log through `logging`, with fields in `extra`; others log through structlog.
    Both kinds of lines look alike and carry the node's name."""

    def named(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event.setdefault("node", node)
        return event

    def short(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        for name, value in event.items():
            if isinstance(value, str) and name not in _WHOLE:
                event[name] = shortened(value)
        return event

    pretty = config.format == "text" or (config.format == "auto" and sys.stderr.isatty())
    level = getattr(logging, config.level.upper())
    now = structlog.processors.TimeStamper(fmt="iso", utc=True)
    common: list[Processor] = [short, structlog.processors.add_log_level, now, *([named] if node else [])]
    written: list[Processor] = (
        [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)]
        if pretty
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[*common, *written],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *written],
        )
    )
    # Libraries such as aiohttp log warnings only.
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[handler], force=True)
    logging.getLogger("hadelay").setLevel(level)
