"""What a follower does with append frames: verify and deduplicate before the library sees anything.

The library would delete everything behind `prevLogIdx`, even what matches. So what is already here is skipped, a real
conflict is cut off (never at or below what is committed), and the library gets only what follows directly on the last
entry. The commit index goes no further than this leader's log was verified. Answers wait for the disk.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from hadelay.errors import FatalError
from hadelay.raft import messages
from hadelay.raft.messages import Append, BadFrame, encode_append_reply
from hadelay.raft.records import decode_entries
from hadelay.raft.segment import Entry

if TYPE_CHECKING:
    from hadelay.raft.node import RaftNode

log = logging.getLogger(__name__)


class Follower:
    def __init__(self, node: RaftNode) -> None:
        self.node = node
        #: Whom and in which term `verified` is about.
        self._leader: tuple[str, int] = ("", 0)
        #: The last entry known to be the same as that leader's.
        self.verified = 0
        #: Its last sign of life that has to be answered when the disk is done.
        self._owed: int | None = None
        self.rtt_ms = 0

    def on_append(self, name: str, data: bytes) -> None:
        node = self.node
        m = messages.decode_append(data)
        if m.term < node.term:
            self._reply(name, messages.HIGHER_TERM, node.term, 0, 0, 0)
            return
        if (name, m.term) != self._leader or node.core.leader != name:
            self._follow(name, m.term)
        node.elections.heard_leader()
        if m.info:
            self.rtt_ms = m.rtt_ms
            node.machine.on_heartbeat_info(m.info)
        if node.snapshots.installing:
            self._reply(name, messages.INSTALLING, m.term, 0, 0, m.round)
            return
        if m.prev_index:
            hint = self._mismatch(m)
            if hint:
                self._reply(name, messages.MISMATCH, m.term, 0, hint, m.round)
                return
            self._take(name, m, data)
        if m.commit_index > node.core.raftCommitIndex:
            commit = min(m.commit_index, self.verified)
            if commit > node.core.raftCommitIndex:
                node.core.heard(name, m.term, commit)
        # First the disk: the leader waits for it, and nobody for what is applied here.
        if not node.flush_soon():
            node.applier.run()
        if not m.flags & messages.NO_REPLY:
            self._answer(m)

    def _follow(self, name: str, term: int) -> None:
        """A leader not heard of before: the library learns the term and forgets who led."""
        node = self.node
        if node.is_leader and term == node.term:
            raise FatalError(f"{name} claims to lead term {term}, which this node leads")
        node.core.heard(name, term, 0)
        if (name, term) != self._leader:  # else heard again after a silence: what was verified still is
            self._leader, self.verified, self._owed = (name, term), 0, None
            node.snapshots.new_leader()
            node.stats.leader_changes += 1
            log.info("follows", extra={"leader": name, "term": term})
            node.membership.arrived()

    def reset(self) -> None:
        """The log was replaced by a snapshot: nothing is verified but what the snapshot holds."""
        self._leader, self._owed = ("", 0), None

    def _mismatch(self, m: Append) -> int:
        """0 if the entry before the new ones is here; else which one the leader should try."""
        journal = self.node.journal
        if m.prev_index > journal.last_index:
            return journal.last_index + 1
        if m.prev_index <= max(journal.base_index, self.node.core.raftCommitIndex):
            return 0  # committed: the same everywhere
        if journal.term_at(m.prev_index) == m.prev_term:
            return 0
        # Back over the whole term that conflicts, but never into what is committed.
        wrong, hint = journal.term_at(m.prev_index), m.prev_index
        floor = max(journal.base_index, self.node.core.raftCommitIndex) + 1
        while hint > floor and journal.term_at(hint - 1) == wrong:
            hint -= 1
        return hint

    def _take(self, name: str, m: Append, data: bytes) -> None:
        node, journal = self.node, self.node.journal
        if len(data) <= m.records:
            self.verified = max(self.verified, m.prev_index)
            return
        try:
            entries: list[Entry] = list(decode_entries(data, m.records))
        except ValueError as error:
            raise BadFrame(f"append: {error}") from error
        if entries[0][1] != m.prev_index + 1 or entries[-1][1] != m.prev_index + len(entries):
            raise BadFrame("append: entries do not follow on the index that the frame names")
        self.verified = max(self.verified, m.prev_index)
        if m.prev_index < journal.last_index:
            entries = self._skip_known(entries)
        if entries:
            last = entries[-1][1]
            node.core.append(name, m.term, min(m.commit_index, last), entries)
            self.verified = max(self.verified, last)

    def _skip_known(self, entries: list[Entry]) -> list[Entry]:
        journal = self.node.journal
        for at, (_, index, term, _) in enumerate(entries):
            if index > journal.last_index:
                return entries[at:]
            if index > journal.base_index and journal.term_at(index) != term:
                if index <= max(self.node.core.raftCommitIndex, self.node.applier.applied):
                    raise FatalError(
                        f"the leader's entry {index} is of term {term}, and the one committed here of term "
                        f"{journal.term_at(index)}: this node's log and the cluster's have parted"
                    )
                log.warning("journal_cut", extra={"index": index, "last_index": journal.last_index, "term": term})
                journal.truncate(index)
                self.node.membership.truncated(index)
                return entries[at:]
            self.verified = max(self.verified, index)
        return []

    def _answer(self, m: Append) -> None:
        """Now if the disk has it all, or if it is only a sign of life; else when the disk has it."""
        journal = self.node.journal
        done = journal.synced_index >= self.verified or not m.prev_index
        if done and journal.term_is_durable:
            self._send_ok(m.round)
        else:
            self._owed = max(self._owed or 0, m.round)

    def synced(self) -> None:
        if self._owed is not None and self.node.journal.term_is_durable:
            self._send_ok(self._owed)

    def _send_ok(self, round: int) -> None:
        # A sign of life is answered while entries wait for the disk: they are owed an answer of their own.
        self._owed = None if self.node.journal.synced_index >= self.verified else 0
        name, term = self._leader
        if term == self.node.term:
            match = min(self.verified, self.node.journal.synced_index)
            self._reply(name, messages.OK, term, match, 0, round)

    def _reply(self, name: str, status: int, term: int, match: int, hint: int, round: int) -> None:
        self.node.network.send(name, encode_append_reply(status, term, match, hint, round), True)
