"""Instants of a node's work, noted in the node's process, for `python -m bench waterfall`.

`install` wraps functions of the node at the ends of each stage. The nodes load it by bench/probe/sitecustomize.py, and
write what they noted as JSON into the directory BENCH_INSTANTS when they end. All instants are monotonic seconds, which
the processes of one machine share. What a row of each list means says `Instants`.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from bench.cluster import Void

ROOT = Path(__file__).resolve().parents[1]
#: Number of nodes of a cluster.
NODES = 3


@dataclass
class Instants:
    """What one node noted; each row of a list is one event."""

    node: str = ""
    #: Offer of messages to a poll: grant's number, id of the first message, instant at which the poll came, instant of
    #: the offer, due times of the messages in Unix ms.
    offers: list[tuple[int, str, float, float, list[int]]] = field(default_factory=list)
    #: Entry of the log, at the leader: its index, instant at which its batch left the queue, instant at which apply had
    #: answered, numbers of its grants, seconds that each publish waited in the queue, bytes.
    entries: list[tuple[int, float, float, list[int], list[float], int]] = field(default_factory=list)
    #: Sync of the journal that counts: index of its last entry, instants of its begin and of its end.
    syncs: list[tuple[int, float, float]] = field(default_factory=list)
    #: System call of a sync of the journal: instants of its begin and of its end.
    calls: list[tuple[float, float]] = field(default_factory=list)
    #: Entries that a follower got: index of the last one, instant.
    received: list[tuple[int, float]] = field(default_factory=list)
    #: Answer of a follower, at the leader: the follower, last index on its disk, instant.
    replies: list[tuple[str, int, float]] = field(default_factory=list)
    #: Commit index that has advanced: the index, instant.
    commits: list[tuple[int, float]] = field(default_factory=list)
    #: Number of a grant → instant: apply had decided it; its answer was released; the answer was encoded for writing.
    decided: dict[int, float] = field(default_factory=dict)
    released: dict[int, float] = field(default_factory=dict)
    written: dict[int, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Instants:
        found = cls(**json.loads(path.read_text()))
        for name in ("decided", "released", "written"):
            setattr(found, name, {int(number): at for number, at in getattr(found, name).items()})
        return found


def environment(directory: Path) -> dict[str, str]:
    """Environment of nodes that note their instants and write them into the directory."""
    path = os.pathsep.join(map(str, (ROOT / "bench" / "probe", ROOT)))
    return {"PYTHONPATH": path, "BENCH_INSTANTS": str(directory)}


def collected(directory: Path) -> list[Instants]:
    """What the nodes wrote, the leader first: the node that proposed the most entries."""
    found = [Instants.read(path) for path in sorted(directory.glob("*.json"))]
    if len(found) < NODES:
        raise Void(f"{len(found)} of {NODES} nodes noted their instants")
    return sorted(found, key=lambda one: -len(one.entries))


def install() -> None:
    noted = Instants()
    _hand_outs(noted)
    _entries(noted)
    _raft(noted)
    atexit.register(_save, noted)


def _save(noted: Instants) -> None:
    if noted.node:  # the nodes' supervisor has none
        Path(os.environ["BENCH_INSTANTS"], f"{os.getpid()}.json").write_text(json.dumps(asdict(noted)))


def _wrap(owner: type, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method by a function that gets the method, then the method's arguments."""

    def replace(by: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **named: by(original, *args, **named))

    return replace


def _hand_outs(noted: Instants) -> None:
    from hadelay.model import encode_id
    from hadelay.server.delivery.grants import Grants
    from hadelay.server.delivery.loop import DeliveryLoop
    from hadelay.server.delivery.modes import CommitHandout

    @_wrap(CommitHandout, "hand_out")
    def hand_out(original: Any, self: Any, offers: Any, now_ms: int) -> None:
        at = monotonic()
        original(self, offers, now_ms)
        for one in offers:
            came, first = one.poll.deadline - one.poll.wait_ms / 1000, encode_id(int(one.rows["first_id"][0]))
            noted.offers.append((one.seq, first, came, at, one.rows["deliver_at_ms"].tolist()))

    @_wrap(CommitHandout, "_decided")
    def decided(original: Any, self: Any, offer: Any, *args: Any) -> None:
        noted.decided[offer.seq] = monotonic()
        original(self, offer, *args)

    @_wrap(Grants, "deliver")
    def deliver(original: Any, self: Any, poll: Any, delivery: Any) -> None:
        noted.released[delivery.seq] = monotonic()
        original(self, poll, delivery)

    @_wrap(DeliveryLoop, "answered")
    def answered(original: Any, self: Any, term: int, seq: int, *args: Any) -> None:
        noted.written[seq] = monotonic()
        original(self, term, seq, *args)


def _entries(noted: Instants) -> None:
    from hadelay.server.delivery.grants import Grants
    from hadelay.server.outlet import Outlet

    #: id(command of a grant) → the command, which keeps the id taken, and the grant's number.
    grants: dict[int, tuple[bytes, int]] = {}

    @_wrap(Grants, "grant")
    def grant(original: Any, self: Any, offer: Any, *args: Any, **named: Any) -> bytes:
        command: bytes = original(self, offer, *args, **named)
        grants[id(command)] = command, offer.seq
        return command

    @_wrap(Outlet, "send")
    def send(original: Any, self: Any, way: Any, commands: list[bytes], done: Any) -> None:
        at = monotonic()
        waits = [at - publish.since for publish in done.__self__.taken]
        numbers = [grants.pop(id(command))[1] for command in commands if id(command) in grants]
        index = self._raft.journal.last_index + 1

        def answered(results: Any, error: Any) -> None:
            if way.term and error is None:
                noted.entries.append((index, at, monotonic(), numbers, waits, sum(map(len, commands))))
            done(results, error)

        original(self, way, commands, answered)


def _raft(noted: Instants) -> None:
    from hadelay.platform.disk import File
    from hadelay.raft.follower import Follower
    from hadelay.raft.journalsync import JournalSync
    from hadelay.raft.messages import OK
    from hadelay.raft.node import RaftNode
    from hadelay.raft.replication import Replication
    from hadelay.raft.segment import SUFFIX

    @_wrap(RaftNode, "start")
    def start(original: Any, self: Any) -> None:
        noted.node = self.name
        original(self)

    @_wrap(JournalSync, "_count")
    def count(original: Any, self: Any, sync: Any) -> None:
        noted.syncs.append((sync.index, sync.started, monotonic()))
        original(self, sync)

    @_wrap(File, "sync")
    def sync(original: Any, self: Any) -> None:
        began = monotonic()
        original(self)
        if self.path.endswith(SUFFIX):
            noted.calls.append((began, monotonic()))

    @_wrap(Follower, "on_append")
    def on_append(original: Any, self: Any, *args: Any) -> None:
        at, before = monotonic(), self._journal.last_index
        original(self, *args)
        if self._journal.last_index > before:
            noted.received.append((self._journal.last_index, at))

    @_wrap(Replication, "on_reply")
    def on_reply(original: Any, self: Any, peer: Any, reply: Any, *args: Any) -> None:
        if reply.status == OK:
            noted.replies.append((peer.name, reply.match, monotonic()))
        original(self, peer, reply, *args)

    @_wrap(RaftNode, "_advance")
    def advance(original: Any, self: Any, *args: Any) -> None:
        before = self.core.commit_index
        original(self, *args)
        if self.core.commit_index > before:
            noted.commits.append((self.core.commit_index, monotonic()))
