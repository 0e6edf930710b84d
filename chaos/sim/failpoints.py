"""Crash points: a real process kills itself, as by SIGKILL, before, within or after a named step of its work.

The program knows nothing of them. `python -m chaos.sim.faulty` wraps the methods below in its own process, before
the server starts. Which point is armed stands in a file, so that it can be chosen while the node runs; and the process
notes there which points it came by.
"""

import mmap
import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from importlib import import_module
from itertools import compress
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple

#: Kind of node that reaches a crash point. any: any node under load; some: a node that clients happen to use; election:
#: a node in an election or a leadership transfer; start, empty: a node that starts, with data or with an empty disk.
Reached = Literal["any", "some", "leader", "follower", "election", "start", "empty"]
#: Layout of the points file: name of the armed crash point, padded with zeroes to this length in bytes; then one byte
#: per point of POINTS, 1 once a process has reached it.
ARMED_BYTES = 64
#: Sizes, in bytes, for a small journal: its segments fill within seconds, and an empty node gets a snapshot instead of
#: log entries.
_SEGMENT_BYTES, _KEEP_BYTES, _ENTRY_BYTES = 4 << 20, 4 << 20, 1 << 20


class Step(NamedTuple):
    #: Function whose call is the step, as module:attribute below `hadelay`. The module is that of the caller, in which
    #: the function is replaced.
    where: str
    reached: Reached = "any"
    #: Positions of the crash: before or after the step, or `within` it, after half of a write.
    when: tuple[str, ...] = ("before", "after")


STEPS = {
    "journal.append": Step("raft.journal:Journal.append"),
    "journal.write": Step("raft.segment:Segment.write"),
    "journal.pwritev": Step("platform.disk:File.pwritev", when=("within",)),
    "journal.sync": Step("platform.disk:File.sync"),
    "journal.synced": Step("raft.node:RaftNode._synced"),
    "journal.mark": Step("raft.journal:Journal._mark"),
    "journal.roll": Step("raft.journal:Journal._roll"),
    "journal.vote": Step("raft.journal:Journal.vote", "election"),
    "journal.compact": Step("raft.journal:Journal.compact"),
    "journal.unlink": Step("raft.journal:Journal._unlink"),
    "journal.begin": Step("raft.journal:Journal._begin_anew", "start"),
    "journal.build": Step("raft.journal:build", "start"),
    "journal.reset": Step("raft.journal:Journal.reset", "empty"),
    "raft.frame": Step("raft.node:RaftNode._frame"),
    "raft.send": Step("platform.tcp:AsyncioNetwork.send"),
    "raft.entries": Step("raft.replication:Replication.send_entries", "leader"),
    "raft.take": Step("raft.follower:Follower._take", "follower"),
    "raft.answer": Step("raft.follower:Follower._send_ok", "follower"),
    "raft.commit": Step("raft.replication:Replication.committed", "leader"),
    "raft.ask-vote": Step("raft.election:Elections.ask_vote", "election"),
    "raft.lead": Step("server.leadership:Leadership.on_leader", "election"),
    "raft.transfer": Step("server.leadership:Leadership.transfer", "election"),
    "apply.entry": Step("raft.apply:Applier._apply"),
    "apply.state": Step("server.node:apply_entry"),
    "apply.publish": Step("ledger.messages.publish:_file"),
    "apply.file": Step("storage.near:NearHour.append"),
    "apply.settle": Step("ledger.leases.settling:settle"),
    "apply.return": Step("ledger.leases.settling:move"),
    "publish.send": Step("server.groupcommit:GroupCommit._send_batch", "some"),
    "publish.forwarded": Step("server.publishing:Publishing._on_submit", "leader"),
    "publish.answer": Step("server.groupcommit:_answer", "some"),
    "settle.ask": Step("server.publishing:Publishing.propose", "some"),
    "dispatch.match": Step("handout.dispatcher:Dispatcher.match", "leader"),
    "dispatch.grant": Step("server.delivery.grants:Grants.grant", "leader"),
    "dispatch.decided": Step("server.delivery.modes:CommitHandout._decided", "leader"),
    "dispatch.hold": Step("server.delivery.grants:DeferredDeliveries.until_due", "leader"),
    "dispatch.answer": Step("server.delivery.grants:Grants.answer", "leader"),
    "dispatch.cursor": Step("server.delivery.cursor:CursorKeeper._command", "leader"),
    "dispatch.expired": Step("server.delivery.maintenance:LeaseExpiry._expired", "leader"),
    "checkpoint.begin": Step("server.checkpoints:Checkpoints.begin"),
    "checkpoint.write": Step("storage.hours:DiskHourStore.write_some"),
    "checkpoint.sync": Step("platform.disk:Disk.sync_files"),
    "checkpoint.commit": Step("storage.lmdbtables:LmdbBackend.commit"),
    "checkpoint.sort-in": Step("storage.lmdbtables:LmdbBackend._sort_in"),
    "checkpoint.committed": Step("storage.hours:DiskHourStore.committed"),
    "snapshot.verify": Step("storage.snapshots:Installer._complete", "empty"),
    "snapshot.switch": Step("storage.store:roll_forward", "start"),
    "snapshot.finish": Step("raft.snapshot:Snapshots._finish", "empty"),
    "disk.rename": Step("platform.disk:Disk.rename", "start"),
    "disk.sync-dir": Step("platform.disk:Disk.sync_dir", "start"),
    "disk.identity": Step("storage.identity:write_identity", "empty"),
}
POINTS = tuple(f"{name}:{when}" for name, step in STEPS.items() for when in step.when)


def step_of(point: str) -> Step:
    """Step of a crash point. Raises KeyError for an unknown point."""
    if point not in POINTS:
        raise KeyError(point)
    return STEPS[point.partition(":")[0]]


def arm(path: str | os.PathLike[str], point: str) -> None:
    """Make the process that was started with this points file end at crash point `point`; "": at no point."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o640)
    try:
        os.ftruncate(handle, ARMED_BYTES + len(POINTS))
        os.pwrite(handle, point.encode().ljust(ARMED_BYTES, b"\0"), 0)
    finally:
        os.close(handle)


def passed(path: str | os.PathLike[str]) -> set[str]:
    """Names of the crash points that processes with this points file have reached."""
    with open(path, "rb") as file:
        return set(compress(POINTS, file.read()[ARMED_BYTES:]))


def install(path: str) -> None:
    """Wrap the functions of all steps that have crash points; call this before the process serves. Each step reads the
    points file when it runs.

    And make the journal small: by themselves, journals are long.
    """
    with open(path, "r+b") as file:
        armed = mmap.mmap(file.fileno(), ARMED_BYTES + len(POINTS))
    for name, step in STEPS.items():
        place, attribute = re.findall(r"(.+)[:.](\w+)", step.where)[0]
        owner = resolve_name(f"hadelay.{place}")
        wrap = _tearing if step.when == ("within",) else _ending
        setattr(owner, attribute, wrap(getattr(owner, attribute), name, armed))
    node: Any = import_module("hadelay.server.node")
    recover: Any = import_module("hadelay.server.recover")
    raft_config, settings = node.raft_config, recover._settings
    node.raft_config = lambda config: replace(
        raft_config(config), journal_keep_bytes=_KEEP_BYTES, max_entry_bytes=_ENTRY_BYTES
    )
    recover._settings = lambda config: replace(settings(config), segment_bytes=_SEGMENT_BYTES)


def _comes_by(armed: mmap.mmap, name: str, when: str) -> Callable[[], bool]:
    """Make a function that marks the crash point as reached, and returns whether the point is armed."""
    point = f"{name}:{when}"
    at, wanted = ARMED_BYTES + POINTS.index(point), point.encode() + b"\0"

    def comes_by() -> bool:
        armed[at] = 1
        return armed[: len(wanted)] == wanted

    return comes_by


def _ending(step: Callable[..., Any], name: str, armed: mmap.mmap) -> Callable[..., Any]:
    before, after = _comes_by(armed, name, "before"), _comes_by(armed, name, "after")

    @wraps(step)
    def wrapped(*args: Any, **more: Any) -> Any:
        if before():
            _end()
        result = step(*args, **more)
        if after():
            _end()
        return result

    return wrapped


def _tearing(step: Callable[..., Any], name: str, armed: mmap.mmap) -> Callable[..., Any]:
    """Wrap File.pwritev so that a crash comes after it wrote the first half of the bytes."""
    within = _comes_by(armed, name, "within")

    @wraps(step)
    def wrapped(file: Any, parts: list[Any], offset: int) -> Any:
        if within():
            data = b"".join(parts)
            os.pwrite(file.fd, data[: len(data) // 2], offset)
            _end()
        return step(file, parts, offset)

    return wrapped


def _end() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
