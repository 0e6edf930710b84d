"""The last terms with their leaders, and the last backups, as a record for people. It is only in this node's memory
(ADR 207).

The node that knows tells the others: a new leader why it asked for votes, a former leader why it left, a node how a
backup of its files ended. Notes may be lost, so a node may not know; no promise rests on this.
"""

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from hadelay.handout.dispatcher import TakeOver
from hadelay.platform.runtime import Runtime
from hadelay.raft.node import RaftNode
from hadelay.server.clustertime import ClusterClock
from hadelay.server.link import Link, Reply

#: Limits of the number of remembered terms, and of remembered backups; the newest are kept.
TERMS, BACKUPS = 20, 5
#: Text in a note, of limited length in characters; and time in a note, in Unix ms up to the year 9999. A note with
#: other values is ignored.
_Text = Annotated[str, Meta(max_length=300)]
_Ms = Annotated[int, Meta(ge=0, le=253_402_300_799_999)]
_Number = Annotated[int, Meta(ge=0)]
Outcome = Literal["running", "complete", "incomplete"]


class TermSeen(Struct, array_like=True):
    term: _Number
    leader: _Text
    since_ms: _Ms
    #: Reasons in words: why the leader asked for votes, and why it gave leadership up; "": unknown, or it still leads.
    why: _Text = ""
    left: _Text = ""
    #: How the leader resumed, as the fields of handout.dispatcher.TakeOver; None: it has not found all overdue messages
    #: yet.
    took_over: tuple[_Number, _Number, _Number, _Number, _Number, _Number] | None = None


class BackupSeen(Struct, array_like=True):
    """A snapshot that a node opened for a backup."""

    node: _Text
    snapshot: _Text
    #: Cluster time at which the snapshot was opened.
    at_ms: _Ms
    #: Size of the snapshot, and number of bytes that were read from the node.
    bytes: _Number
    read_bytes: _Number = 0
    outcome: Outcome = "running"


_NOTE = tuple[list[TermSeen], list[BackupSeen]]


class Logbook:
    def __init__(self, runtime: Runtime, raft: RaftNode, link: Link, clock: ClusterClock) -> None:
        self._runtime, self._raft, self._link, self._clock = runtime, raft, link, clock
        self._terms: dict[int, TermSeen] = {}
        self._backups: dict[tuple[str, str], BackupSeen] = {}
        #: Term in which this node leads; 0: it does not.
        self._leads = 0
        link.handlers["logbook"] = self._hear

    def on_leader(self, term: int) -> None:
        self._leads = term
        self._add_term(TermSeen(term, self._raft.name, self._now_ms(), self._cause(term)))
        self._tell(self._raft.peers)

    def on_follower(self) -> None:
        row, raft = self._terms.get(self._leads), self._raft
        self._leads = 0
        if row is not None:
            why = "stopped" if raft.is_leader else raft.core.left or "stepped down: another node has a later term"
            row.left = f"{raft.name} {why}"
            self._tell(raft.peers)

    def took_over(self, taken: TakeOver) -> None:
        """Note how this node resumed hand-outs as the leader."""
        if (row := self._terms.get(self._leads)) is not None:
            row.took_over = taken
            self._tell(self._raft.peers)

    def leader_heard(self) -> None:
        """Note the present leader if its term is not noted yet. (A leader of an earlier version does not report itself
        why it leads.)"""
        leader, term = self._raft.leader, self._raft.term
        if term not in self._terms and leader not in (None, self._raft.name):
            self._add_term(TermSeen(term, str(leader), self._now_ms()))

    def link_up(self, peer: str) -> None:
        self._tell([peer])

    def terms(self) -> list[tuple[TermSeen, str]]:
        """Terms with a leader, the newest first, each with the reason of the change in words; "": this node does not
        know the reason."""
        rows = sorted(self._terms.values(), key=lambda row: -row.term)
        left = [*(row.left for row in rows[1:]), ""]
        return [(row, left[n] or row.why) for n, row in enumerate(rows)]

    def backups(self) -> list[BackupSeen]:
        """Backups that this node served, or that other nodes reported to it, the newest first."""
        return sorted(self._backups.values(), key=lambda row: (-row.at_ms, row.node, row.snapshot))

    def backup_began(self, snapshot: str, at_ms: int, size: int) -> BackupSeen:
        """Note that a backup of this node's files began. The caller adds to `read_bytes` of the returned row."""
        row = BackupSeen(self._raft.name, snapshot, at_ms, size)
        self._add_backup(row)
        return row

    def backup_ended(self, snapshot: str, *, complete: bool) -> None:
        """Note the end of a backup, unless its end is noted already. A backup that was complete stays complete."""
        row = self._backups.get((self._raft.name, snapshot))
        if row is not None and (row.outcome == "running" or (complete and row.outcome != "complete")):
            row.outcome = "complete" if complete else "incomplete"
            self._tell(self._raft.peers)

    def _cause(self, term: int) -> str:
        lost, asked, silent_s = self._raft.elections.cause
        name = self._raft.name
        if self._raft.membership.sole_voter:
            return f"{name} is the only voter"
        if not lost:
            return "first election" if term == 1 else f"{name} has heard no leader since it started"
        if lost == name:
            return f"{name} had stepped down, and no other node took over"
        if asked:
            return f"{lost} handed over"
        if math.isinf(silent_s):
            return f"{lost} closed its connections, as a process does that ends"
        return f"{lost} was not heard for {silent_s * 1000:.0f} ms"

    def _now_ms(self) -> int:
        return self._clock.read(self._runtime.monotonic()) if self._clock.ready else self._runtime.wall_ms()

    def _tell(self, peers: Iterable[str]) -> None:
        ended = [row for row in self._backups.values() if row.outcome != "running"]
        if self._terms or ended:
            note = msgspec.to_builtins((list(self._terms.values()), ended))
            for peer in peers:
                self._link.note(peer, "logbook", note)

    def _hear(self, peer: str, payload: Any, reply: Reply) -> None:
        terms, backups = msgspec.convert(payload, _NOTE)
        for row in terms:
            self._add_term(row)
        for backup in backups:
            self._add_backup(backup)

    def _add_term(self, row: TermSeen) -> None:
        known = self._terms.get(row.term)
        if known is not None:  # keep what the leader itself noted about its term
            left, taken = known.left or row.left, known.took_over or row.took_over
            row = known if known.why else row
            row.left, row.took_over = left, taken
        self._terms[row.term] = row
        if len(self._terms) > TERMS:
            del self._terms[min(self._terms)]

    def _add_backup(self, row: BackupSeen) -> None:
        known = self._backups.get((row.node, row.snapshot))
        if known is None or (row.outcome == "complete" and row.node != self._raft.name):
            self._backups[row.node, row.snapshot] = row
        if len(self._backups) > BACKUPS:
            oldest = min(self._backups, key=lambda key: self._backups[key].at_ms)
            del self._backups[oldest]
