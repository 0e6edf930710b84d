"""`hadelay work`: starts worker processes, starts them again, and has the messages of a crashed worker given back.

A worker reports the leases that it has, so the worker that replaces a crashed one can give them back at once instead of
when they run out.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from hadelay.client.wire import seconds_of
from hadelay.errors import BadRequest
from hadelay.tasks.channel import LINE_BYTES, Report, Start, send
from hadelay.tasks.health import Counts, serve
from hadelay.tasks.worker import UNUSABLE

log = logging.getLogger(__name__)

#: A worker that crashes within _YOUNG_S seconds of its start is restarted after a pause. The pause is _PAUSE_S seconds,
#: and doubles with each crash, up to _LONGEST_PAUSE_S.
_YOUNG_S, _PAUSE_S, _LONGEST_PAUSE_S = 5.0, 1.0, 30.0
#: Interval, in seconds, of looking for changed Python files.
_LOOK_S = 0.3


def supervise(
    app: str,
    *,
    concurrency: int = 10,
    processes: int = 1,
    drain: str = "8s",
    lease: str = "30s",
    reload: bool = False,
    health: str | None = None,
    topics: Sequence[str] = (),
) -> int:
    """Run the workers of an app until a signal; returns the exit code. The arguments are the options of `hadelay work`;
    wrong ones raise BadRequest. topics: default: the topics of the app's tasks."""
    if concurrency < 1 or processes < 1:
        raise BadRequest("--concurrency and --processes are at least 1")
    if health is not None and not (re.fullmatch(r"(.+:)?\d{1,5}", health) and int(health.rpartition(":")[2]) < 1 << 16):
        raise BadRequest(f"--health {health}: expected HOST:PORT, such as 127.0.0.1:8081")
    try:
        start = Start(app, concurrency, seconds_of(drain), seconds_of(lease), list(topics))
    except ValueError as error:
        raise BadRequest(f"--drain, --lease: {error}") from None
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    async def run() -> int:
        supervisor = Supervisor(start, processes=processes, reload=reload)
        server = None if health is None else await serve(health, supervisor.counts, processes)
        try:
            return await supervisor.run()
        finally:
            if server is not None:
                server.close()

    return asyncio.run(run())


class Supervisor:
    """Runs `processes` workers, all started with `start`. reload: start them again when a Python file below the present
    directory changes."""

    def __init__(self, start: Start, *, processes: int = 1, reload: bool = False) -> None:
        self._start, self._processes, self._reload = start, processes, reload
        self.counts = Counts()
        self._stops = 0
        self._code = 0
        self._running: set[asyncio.subprocess.Process] = set()
        #: Event that makes the running workers end. After a change of the code, workers that start later get a new
        #: event.
        self._changed = asyncio.Event()
        # Workers write no bytecode: Python would run the bytecode of an old file instead of a new one that was written
        # in the same second and has the same length.
        self._environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"} if reload else None

    async def run(self) -> int:
        """Run the workers until SIGTERM or SIGINT; returns the exit code. A second signal gives unfinished messages
        back at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        watch = asyncio.create_task(self._watch()) if self._reload else None
        await asyncio.gather(*(self._keep(number) for number in range(self._processes)))
        if watch is not None:
            watch.cancel()
        return self._code

    def stop(self) -> None:
        self._stops += 1
        self._changed.set()
        self._terminate()

    def _terminate(self) -> None:
        for process in self._running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def _keep(self, number: int) -> None:
        """Run one worker, and restart it whenever it ends, until a stop."""
        orphans: set[str] = set()
        pause_s = 0.0
        while not self._stops or orphans:
            begun, only, changed = time.monotonic(), bool(self._stops), self._changed
            start = msgspec.structs.replace(self._start, orphans=sorted(orphans), only_orphans=only)
            code, orphans = await self._run(number, start, changed)
            if self._stops:
                if only:
                    break  # do not give the leases back again: they run out by themselves
                continue
            if code == UNUSABLE and not self._reload:
                self._code = code
                self.stop()
                break
            if not changed.is_set():
                log.error("worker %d ended with code %d, having %d messages", number, code, len(orphans))
                self.counts.restarts += 1
                young = time.monotonic() - begun < _YOUNG_S
                pause_s = min(max(2 * pause_s, _PAUSE_S), _LONGEST_PAUSE_S) if young else 0.0
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), None if code == UNUSABLE else pause_s)

    async def _run(self, number: int, start: Start, changed: asyncio.Event) -> tuple[int, set[str]]:
        """Run one worker until it ends; returns its exit code, and the leases that it had when it crashed. changed:
        event that is set when the worker should end."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "hadelay.tasks.worker",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                # a process group of its own: Ctrl-C in a terminal reaches only the supervisor, which stops the workers
                process_group=0,
                env=self._environment,
            )
        self._running.add(process)
        if changed.is_set() and not start.only_orphans:
            # End this process, too: it was being created when `_terminate` ended the others, after a signal or a change
            # of the code.
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        send(ours, start)
        # Include the leases of a crashed worker: this worker reports their end when it has given them back.
        leases = set(start.orphans)
        reader, writer = await asyncio.open_connection(sock=ours, limit=LINE_BYTES)
        try:
            with contextlib.suppress(ConnectionError):
                while line := await reader.readline():
                    self._note(number, msgspec.json.decode(line, type=Report), leases)
            code = await process.wait()
        finally:
            writer.close()
            self._running.discard(process)
            self.counts.ended(number)
        return code, leases if code else set()

    def _note(self, number: int, report: Report, leases: set[str]) -> None:
        if report.take:
            leases.add(report.take)
        elif report.end:
            leases.discard(report.end)
            if report.task:
                self.counts.attempt(report)
        self.counts.seen(number, len(leases))

    async def _watch(self) -> None:
        before = dict(_files())
        while True:
            await asyncio.sleep(_LOOK_S)
            now = dict(_files())
            if now != before:
                log.info("a file changed: starting the workers again")
                before = now
                self._changed.set()
                self._changed = asyncio.Event()
                self._terminate()


def _files() -> Iterator[tuple[str, int]]:
    """Python files below the present directory, with their modification times in ns."""
    for directory, names, files in os.walk("."):
        names[:] = [
            name for name in names if not name.startswith((".", "__pycache__", "node_modules", "site-packages"))
        ]
        for name in files:
            if name.endswith(".py"):
                path = Path(directory, name)
                with contextlib.suppress(OSError):
                    yield str(path), path.stat().st_mtime_ns
