"""Append frames on a follower: entries are verified and deduplicated before PySyncObj gets them.

PySyncObj would delete all entries behind `prevLogIdx`, even matching ones. So known entries are skipped, a conflict
is cut off (never a committed entry), and PySyncObj gets only entries that follow directly on the last one. The commit
index advances only as far as the log is verified against this leader's. Answers wait for the disk.
"""

import logging

from hadelay.errors import FatalError
from hadelay.raft import messages
from hadelay.raft.apply import Applier
from hadelay.raft.election import Elections
from hadelay.raft.membership import Membership
from hadelay.raft.messages import Append, BadFrame, encode_append_reply
from hadelay.raft.part import Notice, Peer, RaftPart, Ready, Shared
from hadelay.raft.records import decode_entries
from hadelay.raft.segment import Entry
from hadelay.raft.snapshot import Snapshots

log = logging.getLogger(__name__)


class Follower(RaftPart):
    def __init__(
        self, shared: Shared, members: Membership, elections: Elections, snapshots: Snapshots, applier: Applier
    ) -> None:
        super().__init__(shared)
        self._members, self._elections, self._snapshots, self._applier = members, elections, snapshots, applier
        #: Leader that this node follows, as (name, term); and index of the last entry known to be equal in this log and
        #: the leader's log.
        self._leader: tuple[str, int] = ("", 0)
        self.verified = 0
        #: Number of the heartbeat round that this node has to answer after the next sync; None: it owes no answer.
        self._owed: int | None = None

    def on_append(self, peer: Peer, m: Append, now: float, ready: Ready) -> None:
        name, core = peer.name, self._core
        if m.term < core.term:
            self._reply(name, messages.AppendReply(messages.HIGHER_TERM, core.term, 0, 0, 0), ready)
            return
        if (name, m.term) != self._leader or core.leader != name:
            self._follow(name, m.term, now, ready)
        self._elections.heard_leader(now)
        if m.info:
            self._elections.rtt_ms = m.rtt_ms
            self._machine.on_heartbeat_info(m.info)
        if self._applier.installing:
            self._reply(name, messages.AppendReply(messages.INSTALLING, m.term, 0, 0, m.round), ready)
            return
        if m.prev_index:
            hint = self._mismatch(m)
            if hint:
                self._reply(name, messages.AppendReply(messages.MISMATCH, m.term, 0, hint, m.round), ready)
                return
            self._take(name, m, now, ready)
        if m.commit_index > core.commit_index:
            commit = min(m.commit_index, self.verified)
            if commit > core.commit_index:
                core.heard(name, m.term, commit)
        ready.sync = ready.apply = True
        if not m.flags & messages.NO_REPLY:
            self._answer(m, ready)

    def _follow(self, name: str, term: int, now: float, ready: Ready) -> None:
        """Follow the leader `name` of `term`; a new leader's log must be verified anew."""
        if self._core.leads and term == self._core.term:
            raise FatalError(f"{name} claims to lead term {term}, which this node leads")
        self._core.heard(name, term, 0)
        if (name, term) != self._leader:  # `verified` stays valid if the same leader returns after a silence
            self._leader, self.verified, self._owed = (name, term), 0, None
            self._elections.followed = name
            self._snapshots.leader_changed(ready)
            log.info("follows", extra={"leader": name, "term": term})
            ready.notify(Notice.FOLLOWS)

    def reset(self) -> None:
        """Called after a snapshot replaced the log: the comparison with the leader's log begins anew."""
        self._leader, self._owed = ("", 0), None

    def _mismatch(self, m: Append) -> int:
        """Compare this log with an append frame. Returns 0 if the log has the entry before the frame's entries, else
        the index that the leader should try next."""
        journal, committed = self._journal, max(self._journal.base_index, self._core.commit_index)
        if m.prev_index > journal.last_index:
            return journal.last_index + 1
        if m.prev_index <= committed:
            return 0  # no mismatch: the entry before the frame's entries is committed, so equal on all nodes
        if journal.term_at(m.prev_index) == m.prev_term:
            return 0
        # Let the leader skip all entries of the conflicting term, except committed entries.
        wrong, hint = journal.term_at(m.prev_index), m.prev_index
        while hint > committed + 1 and journal.term_at(hint - 1) == wrong:
            hint -= 1
        return hint

    def _take(self, name: str, m: Append, now: float, ready: Ready) -> None:
        if len(m.frame) <= m.records:
            self.verified = max(self.verified, m.prev_index)
            return
        try:
            entries: list[Entry] = list(decode_entries(m.frame, m.records))
        except ValueError as error:
            raise BadFrame(f"malformed append frame: {error}") from error
        if any(entry[1] != index for index, entry in enumerate(entries, m.prev_index + 1)):
            raise BadFrame("append: the entries do not follow directly on the frame's prev_index, and on one another")
        self.verified = max(self.verified, m.prev_index)
        if m.prev_index < self._journal.last_index:
            entries = self._skip_known(entries, now, ready)
        if entries:
            last = entries[-1][1]
            self._core.append(name, m.term, min(m.commit_index, last), entries)
            self.verified = max(self.verified, last)

    def _skip_known(self, entries: list[Entry], now: float, ready: Ready) -> list[Entry]:
        journal = self._journal
        for at, (_, index, term, _) in enumerate(entries):
            if index > journal.last_index:
                return entries[at:]
            if index > journal.base_index and journal.term_at(index) != term:
                if index <= max(self._core.commit_index, self._applier.applied):
                    raise FatalError(
                        f"entry {index} has term {term} at the leader, but was committed here with term "
                        f"{journal.term_at(index)}: this node's log differs from the cluster's"
                    )
                log.warning("journal_cut", extra={"index": index, "last_index": journal.last_index, "term": term})
                journal.truncate(index)
                self._members.truncated(index, now, ready)
                return entries[at:]
            self.verified = max(self.verified, index)
        return []

    def _answer(self, m: Append, ready: Ready) -> None:
        """Answer an append frame: at once if it is a heartbeat; if it has entries, as soon as they are on disk."""
        done = self._journal.synced_index >= self.verified or not m.prev_index
        if done and self._journal.term_is_durable:
            self._send_ok(m.round, ready)
        else:
            self._owed = max(self._owed or 0, m.round)

    def synced(self, ready: Ready) -> None:
        if self._owed is not None and self._journal.term_is_durable:
            self._send_ok(self._owed, ready)

    def _send_ok(self, round: int, ready: Ready) -> None:
        # This answer covers synced entries only: another one follows once all verified entries are on disk.
        self._owed = None if self._journal.synced_index >= self.verified else 0
        name, term = self._leader
        if term == self._core.term:
            match = min(self.verified, self._journal.synced_index)
            self._reply(name, messages.AppendReply(messages.OK, term, match, 0, round), ready)

    def _reply(self, name: str, reply: messages.AppendReply, ready: Ready) -> None:
        ready.send(name, encode_append_reply(*reply))
