"""What a leader does: send, count answers, give signs of life, confirm reads, and notice that it no longer leads.

The library keeps match indexes and the commit rule. It is told of a follower's answer only as far as this node's own
disk has the entries too, so its commit index never passes it; how much a follower was sent, and where
to try next, is kept here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from hadelay.errors import DamagedFile, HadelayError
from hadelay.raft import messages
from hadelay.raft.library import DISK
from hadelay.raft.messages import encode_append
from hadelay.raft.peer import Peer
from hadelay.raft.records import ENTRY, encode_record

if TYPE_CHECKING:
    from hadelay.platform.network import Buffer
    from hadelay.raft.node import RaftNode

#: done(index, error)
ReadDone = Callable[[int, HadelayError | None], None]
#: A follower that has nothing else coming hears of a new commit index after this.
_TELL_COMMIT_S = 0.005


class Leader:
    def __init__(self, node: RaftNode) -> None:
        self.node = node
        self.active = False
        #: The term it leads, or led last: the node's own may already be a later one when it learns that it is over.
        self.term = 0
        #: Index of the no-op that began this term.
        self.no_op = 0
        #: Number of the last sign of life; an answer to it says who led when it was sent.
        self.round = 0
        self._round_sent: deque[tuple[int, float]] = deque(maxlen=16)
        #: (round needed, commit index then, done), and those that wait for the no-op.
        self._reads: deque[tuple[int, int, ReadDone]] = deque()
        self._early_reads: list[ReadDone] = []
        self._round_wanted = False
        self._telling = False
        self._beats = 0
        self._doubt = False

    # -- beginning and end
    def begin(self) -> None:
        """Called by the library's change of state, before the no-op is in the log."""
        node = self.node
        self.active, self.term, self._doubt = True, node.term, False
        self.no_op = node.journal.last_index + 1
        now = node.runtime.monotonic()
        for peer in node.peers.values():
            peer.begin(self.no_op, now)
        self._beats += 1
        node.call_later(0.0, self._beat, self._beats, now)

    def end(self) -> list[ReadDone]:
        """Called by the library's change of state. Returns the reads that nobody can confirm any more."""
        for peer in self.node.peers.values():
            self.node.admission.remember(peer)
        self.active = False
        self._beats += 1
        reads = [done for _, _, done in self._reads] + self._early_reads
        self._reads.clear()
        self._early_reads = []
        for peer in self.node.peers.values():
            self.node.snapshots.release(peer)
        return reads

    # -- sending
    def pump(self) -> None:
        """Send every follower what its window has room for."""
        if self.active:
            for peer in self.node.peers.values():
                if peer.up:
                    self.send_entries(peer)

    def send_entries(self, peer: Peer) -> None:
        node, journal, config = self.node, self.node.journal, self.node.config
        while not peer.probe_sent or not peer.probing:
            if peer.manifest is not None:
                return
            if peer.next <= journal.base_index:
                node.snapshots.offer(peer)
                return
            room = config.window_bytes - peer.in_flight_bytes
            if (peer.next > journal.last_index and not peer.probing) or room <= 0:
                return
            prev = peer.next - 1
            last, size = prev, 0
            commit = node.core.raftCommitIndex
            try:
                prev_term = journal.term_at(prev)
                more = peer.next <= journal.last_index
                entries = journal.entries(peer.next, min(config.append_bytes, room)) if more else []
            except DamagedFile as damage:
                node.snapshots.offer(peer, damage)
                return
            parts: list[Buffer] = [encode_append(node.term, prev, prev_term, commit, self.round)]
            for command, index, term, record in entries:
                parts.append(record or encode_record(ENTRY, index, term, command))
                last, size = index, size + len(command) + 64
            if not node.network.send(peer.name, parts):
                return
            peer.told_commit = commit
            if size:
                peer.sent(last, size)
            if peer.probing:
                peer.probe_sent, peer.probe_prev = True, prev
                return

    def _beat(self, beats: int, due: float) -> None:
        if beats != self._beats:
            return
        node = self.node
        now = node.runtime.monotonic()
        late = now - due
        interval = node.config.heartbeat_ms / 1000
        self._broadcast()
        node.admission.beat()
        if late < interval:  # else it was this node that slept, and the answers have not been read yet
            self._check_quorum(now)
        if self.active:
            due = max(due + interval, now + interval / 2)
            node.call_later(due - now, self._beat, beats, due)

    def _broadcast(self) -> None:
        node = self.node
        self._round_wanted = False
        self.round += 1
        self._round_sent.append((self.round, node.runtime.monotonic()))
        info = node.machine.heartbeat_info()
        commit = node.core.raftCommitIndex
        frame = encode_append(node.term, 0, 0, commit, self.round, info=info, rtt_ms=self._rtt_ms())
        for peer in node.peers.values():
            if peer.up and node.network.send(peer.name, frame, True):
                peer.told_commit = commit
                self.send_entries(peer)

    def _rtt_ms(self) -> int:
        """The round trip of the fastest majority."""
        voters = self.node.membership.voters
        rtts = sorted(peer.rtt for peer in self.node.peers.values() if peer.name in voters)
        return int(rtts[(len(rtts) - 1) // 2] * 1000) if rtts else 0

    def tell_commit(self) -> None:
        """The commit index moved: followers hear of it with the next entries, or soon without."""
        if not self._telling and self.active and self.node.peers:
            self._telling = True
            self.node.call_later(_TELL_COMMIT_S, self._tell_commit)

    def _tell_commit(self) -> None:
        self._telling = False
        if not self.active:
            return
        node = self.node
        commit = node.core.raftCommitIndex
        frame = encode_append(node.term, 0, 0, commit, 0, flags=messages.NO_REPLY)
        for peer in node.peers.values():
            if peer.up and peer.told_commit < commit and node.network.send(peer.name, frame, True):
                peer.told_commit = commit

    # -- answers
    def on_reply(self, peer: Peer, reply: messages.AppendReply) -> None:
        node = self.node
        if reply.status == messages.HIGHER_TERM:
            if reply.term > node.term:
                node.core.step_down(reply.term)
                node.flush_soon()
            return
        # Row 7: an answer to an earlier leadership says nothing about this one.
        if not self.active or reply.term != node.term:
            return
        now = node.runtime.monotonic()
        peer.heard = now
        if reply.round > peer.round:
            peer.round = reply.round
            self._measure(peer, now)
            self._confirm_reads()
        if reply.status == messages.OK:
            peer.matched(min(reply.match, node.journal.last_index))
            if self.count(peer):
                node.advance()
            self.send_entries(peer)
        elif reply.status == messages.MISMATCH:
            peer.probe(min(peer.next, reply.hint))
            self.send_entries(peer)
        elif peer.manifest is None:
            peer.probe(peer.next)  # what it was sent it dropped: again at the next sign of life
        else:
            peer.pulled = now  # it pulls files, or puts them in place: minutes, of a large state

    def _measure(self, peer: Peer, now: float) -> None:
        for round, sent in self._round_sent:
            if round == peer.round:
                peer.rtt += (now - sent - peer.rtt) / 8

    def count(self, peer: Peer) -> bool:
        """Let the commit rule see what `peer` has, as far as this disk has it too. True if that is news."""
        index = min(peer.match, self.node.journal.synced_index)
        if index <= peer.counted or not peer.admitted or peer.name not in self.node.membership.voters:
            return False
        peer.counted = index
        self.node.core.acknowledged(peer.name, index)
        return True

    def synced(self) -> None:
        """This node's own disk has caught up with something."""
        node = self.node
        if self._count_all():
            node.advance()

    def _count_all(self) -> int:
        node = self.node
        if node.alone:
            node.core.acknowledged(DISK, node.journal.synced_index)
            return True
        return sum(self.count(peer) for peer in node.peers.values())

    def reconfigured(self, added: list[str]) -> None:
        """Other voters count from now on."""
        node = self.node
        for name in added:
            if name in node.peers:
                node.peers[name].counted = 0
        # Not from inside the library, which has just been given the entry that says so.
        node.call_soon(self._recount, self._beats)

    def _recount(self, beats: int) -> None:
        if beats == self._beats:
            self._count_all()
            self.node.advance()

    # -- still leading?
    @property
    def confirmed_at(self) -> float:
        """When the newest sign of life left here that a majority has answered: nobody else led before that."""
        node = self.node
        for round, sent in reversed(self._round_sent):
            if node.agreed(peer for peer in node.peers.values() if peer.round >= round):
                return sent
        return float("-inf")

    def _check_quorum(self, now: float) -> None:
        """Row 13: without a majority for one election timeout this node leads no longer, and says so."""
        node = self.node
        limit = node.elections.least_timeout()
        if node.agreed(peer for peer in node.peers.values() if now - peer.heard <= limit):
            self._doubt = False
        elif not self._doubt:
            self._doubt = True  # answers may be waiting to be read: decide at the next beat
        else:
            node.core.step_down()
            return
        started = node.journal.sync_started
        if started is not None and now - started > node.config.slow_sync_ms / 1000 and not node.alone:
            node.transfers.give_away("slow_sync")

    def hears(self, name: str) -> bool:
        """That voter is there, and counts."""
        node = self.node
        peer = node.peers.get(name)
        if peer is None or not (peer.up and peer.admitted):
            return False
        return node.runtime.monotonic() - peer.heard <= node.elections.least_timeout()

    # -- reads
    def read(self, done: ReadDone) -> None:
        """done(index, None): everything committed anywhere before this call is at or before `index`."""
        node = self.node
        if node.core.raftCommitIndex < self.no_op:
            self._early_reads.append(done)
        elif node.alone:
            done(node.core.raftCommitIndex, None)
        else:
            self._reads.append((self.round + 1, node.core.raftCommitIndex, done))
            if not self._round_wanted:
                self._round_wanted = True
                node.call_soon(self._extra_round)

    def _extra_round(self) -> None:
        if self.active and self._round_wanted:
            self._broadcast()

    def committed(self) -> None:
        if self._early_reads and self.node.core.raftCommitIndex >= self.no_op:
            early, self._early_reads = self._early_reads, []
            for done in early:
                self.read(done)
        self.tell_commit()

    def _confirm_reads(self) -> None:
        while self._reads:
            needed, index, done = self._reads[0]
            if not self.node.agreed(peer for peer in self.node.peers.values() if peer.round >= needed):
                return
            self._reads.popleft()
            done(index, None)
