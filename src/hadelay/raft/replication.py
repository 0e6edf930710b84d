"""Replication by a leader: send entries, count answers, send heartbeats, confirm reads, step down without a majority.

PySyncObj keeps match indexes and the commit rule. It learns of a follower's answer only as far as this node's own
disk has the entries, so the commit index never passes the last entry on this disk. Send windows and next indexes are
kept here.
"""

from collections import deque

from hadelay.errors import DamagedFile
from hadelay.platform.network import Buffer
from hadelay.raft import messages
from hadelay.raft.admission import Admission
from hadelay.raft.election import Elections
from hadelay.raft.journal import FIRST
from hadelay.raft.library import DISK
from hadelay.raft.membership import Membership
from hadelay.raft.messages import encode_append
from hadelay.raft.part import Notice, Peer, RaftPart, ReadDone, Ready, Shared
from hadelay.raft.records import ENTRY, encode_record
from hadelay.raft.snapshot import Snapshots

#: Delay, in seconds, before followers that get no new entries get a new commit index in a frame of its own.
_TELL_COMMIT_S = 0.005


class Replication(RaftPart):
    """Replication by a leader. Append frames go to the link at once, not at the end of the event: so if a link is full,
    no further entries are read from the journal."""

    def __init__(
        self, shared: Shared, members: Membership, elections: Elections, admission: Admission, snapshots: Snapshots
    ) -> None:
        super().__init__(shared)
        self._members, self._elections, self._admission, self._snapshots = members, elections, admission, snapshots
        #: Term that this node leads, or led last; the node's current term may be later.
        self.term = 0
        #: Number of the last heartbeat round. An answer confirms that this node led when it sent that round.
        self.round = 0
        self._round_sent: deque[tuple[int, float]] = deque(maxlen=16)
        #: Waiting linearizable reads, as (heartbeat round to be answered, commit index, done); and reads that wait
        #: until this term's no-op is committed.
        self._reads: deque[tuple[int, int, ReadDone]] = deque()
        self._early_reads: list[ReadDone] = []
        self._round_wanted = False
        self._telling = False
        self._beats = 0
        self._doubt = False

    def begin(self, now: float, ready: Ready) -> None:
        """Called when this node becomes leader, before the no-op is in the log."""
        self.term, self._doubt = self._core.term, False
        self._snapshots.release_old(now)
        for peer in self._members.peers.values():
            peer.begin(self._core.no_op, now)
        self._beats += 1
        ready.later(0.0, self._beat, self._beats, now)

    def end(self) -> list[ReadDone]:
        """Called when this node stops leading. Returns the reads that can no longer be confirmed."""
        self._beats += 1
        for peer in self._members.peers.values():
            # Keep the snapshot that was offered to the peer: the peer may still pull its last file from this node.
            self._admission.remember(peer, self.term)
        reads = [done for _, _, done in self._reads] + self._early_reads
        self._reads.clear()
        self._early_reads = []
        return reads

    def pump(self, now: float, ready: Ready) -> None:
        """Send entries to every follower whose window of unacknowledged bytes has room."""
        if self._core.leads:
            for peer in self._members.peers.values():
                if peer.up:
                    self.send_entries(peer, now, ready)

    def send_entries(self, peer: Peer, now: float, ready: Ready) -> None:
        journal, config, commit = self._journal, self._config, self._core.commit_index
        while not peer.probe_sent or not peer.probing:
            if peer.manifest is not None:
                return
            if peer.next <= journal.base_index:
                self._snapshots.offer(peer, now, ready)
                return
            if peer.next == FIRST[0] + 1 and self._snapshots.offer_to_empty(peer, now, ready):
                return
            room = config.window_bytes - peer.in_flight_bytes
            if (peer.next > journal.last_index and not peer.probing) or room <= 0:
                return
            prev = peer.next - 1
            last, size = prev, 0
            try:
                prev_term = journal.term_at(prev)
                more = peer.next <= journal.last_index
                entries = journal.entries(peer.next, min(config.append_bytes, room)) if more else []
            except DamagedFile as damage:
                self._snapshots.offer(peer, now, ready, damage)
                return
            parts: list[Buffer] = [encode_append(self._core.term, prev, prev_term, commit, self.round)]
            for command, index, term, record in entries:
                parts.append(record or encode_record(ENTRY, index, term, command))
                last, size = index, size + len(command) + 64
            if not self._network.send(peer.name, parts):
                return
            peer.sent_commit = commit
            if size:
                peer.sent(last, size)
            if peer.probing:
                peer.probe_sent, peer.probe_prev = True, prev
                return

    def _beat(self, beats: int, due: float, now: float, ready: Ready) -> None:
        if beats != self._beats:
            return
        late = now - due
        interval = self._config.heartbeat_ms / 1000
        self._broadcast(now, ready)
        self._admission.beat(ready)
        # Skip the quorum check after a late heartbeat: this process was paused, and answers of peers may wait unread
        if late < interval:
            self._check_quorum(now, ready)
        if self._core.leads:
            due = max(due + interval, now + interval / 2)
            ready.later(due - now, self._beat, beats, due)

    def _broadcast(self, now: float, ready: Ready) -> None:
        self._round_wanted = False
        self.round += 1
        self._round_sent.append((self.round, now))
        info, commit = self._machine.heartbeat_info(), self._core.commit_index
        frame = encode_append(self._core.term, 0, 0, commit, self.round, info=info, rtt_ms=self._rtt_ms())
        for peer in self._members.peers.values():
            if peer.up and self._network.send(peer.name, frame, True):
                peer.sent_commit = commit
                self.send_entries(peer, now, ready)

    def _rtt_ms(self) -> int:
        """Time in ms in which the fastest majority of voters answers, as a round trip."""
        voters = self._members.voters
        rtts = sorted(peer.rtt for peer in self._members.peers.values() if peer.name in voters)
        return int(rtts[(len(rtts) - 1) // 2] * 1000) if rtts else 0

    def _tell_commit(self, now: float, ready: Ready) -> None:
        self._telling = False
        if not self._core.leads:
            return
        commit = self._core.commit_index
        frame = encode_append(self._core.term, 0, 0, commit, 0, flags=messages.NO_REPLY)
        for peer in self._members.peers.values():
            if peer.up and peer.sent_commit < commit and self._network.send(peer.name, frame, True):
                peer.sent_commit = commit

    def on_reply(self, peer: Peer, reply: messages.AppendReply, now: float, ready: Ready) -> None:
        if reply.status == messages.HIGHER_TERM:
            if reply.term > self._core.term:
                self._core.step_down(reply.term)
                ready.sync = True
            return
        # Ignore answers to append frames that this node sent in an earlier term.
        if not self._core.leads or reply.term != self._core.term:
            return
        peer.heard = now
        if reply.round > peer.round:
            peer.round = reply.round
            self._measure(peer, now)
            self._confirm_reads(ready)
        if reply.status == messages.OK:
            peer.matched(min(reply.match, self._journal.last_index))
            if self.count(peer):
                ready.advance = True
            # At the end of the event, when the commit index may have advanced, send more entries to the peer
            ready.notify(Notice.PUMP, peer)
        elif reply.status == messages.MISMATCH:
            peer.probe(min(peer.next, reply.hint))
            self.send_entries(peer, now, ready)
        elif peer.manifest is None:
            # The peer dropped the entries of this append frame: the next heartbeat sends them again
            peer.probe(peer.next)
        else:
            # The peer still fetches or installs a snapshot, which may take minutes: restart the snapshot's timeout
            peer.pulled = now

    def _measure(self, peer: Peer, now: float) -> None:
        # Limit this time: this process may have been paused, and the election timeout is ten times the round trip.
        longest = self._elections.least_timeout()
        for round, sent in self._round_sent:
            if round == peer.round:
                peer.rtt += (min(now - sent, longest) - peer.rtt) / 8

    def count(self, peer: Peer) -> bool:
        """Pass the last index that both `peer` and this node have on disk to PySyncObj's commit rule. Returns whether
        the index has grown."""
        index = min(peer.match, self._journal.synced_index)
        if index <= peer.counted or not peer.admitted or peer.name not in self._members.voters:
            return False
        peer.counted = index
        self._core.acknowledged(peer.name, index)
        return True

    def count_all(self, ready: Ready) -> None:
        """Pass the synced index of every peer to PySyncObj's commit rule: this node's disk has advanced, or the voters
        have changed."""
        if self._members.sole_voter:
            self._core.acknowledged(DISK, self._journal.synced_index)
            ready.advance = True
        elif sum(self.count(peer) for peer in self._members.peers.values()):
            ready.advance = True

    @property
    def confirmed_at(self) -> float:
        """Send time of the newest heartbeat that a majority answered: until then, no other node led a later term."""
        for round, sent in reversed(self._round_sent):
            if self._answered(round):
                return sent
        return float("-inf")

    def _answered(self, round: int) -> bool:
        return self._members.agreed(peer for peer in self._members.peers.values() if peer.round >= round)

    def _check_quorum(self, now: float, ready: Ready) -> None:
        """Step down after one election timeout without a majority; hand leadership over if this node's disk is slow."""
        limit = self._elections.least_timeout()
        if self._members.agreed(peer for peer in self._members.peers.values() if now - peer.heard <= limit):
            self._doubt = False
        elif not self._doubt:
            # Step down at the next heartbeat, not now: until then, answers of peers that wait unread are read
            self._doubt = True
        else:
            self._core.left = f"stepped down: no majority answered within {limit * 1000:.0f} ms"
            self._core.step_down()
            return
        started = self._journal.sync_started
        slow = started is not None and now - started > self._config.slow_sync_ms / 1000
        if slow and not self._members.sole_voter:
            ready.notify(Notice.HAND_OVER, "slow_sync")

    def hears(self, name: str) -> bool:
        """Whether `name` is connected and admitted, and answered within one election timeout."""
        peer = self._members.peers.get(name)
        if peer is None or not (peer.up and peer.admitted):
            return False
        return self._runtime.monotonic() - peer.heard <= self._elections.least_timeout()

    def read(self, done: ReadDone, now: float, ready: Ready) -> None:
        if self._core.commit_index < self._core.no_op:
            self._early_reads.append(done)
        elif self._members.sole_voter:
            done(self._core.commit_index, None, ready)
        else:
            self._reads.append((self.round + 1, self._core.commit_index, done))
            if not self._round_wanted:
                self._round_wanted = True
                ready.later(0.0, self._extra_round)

    def _extra_round(self, now: float, ready: Ready) -> None:
        if self._core.leads and self._round_wanted:
            self._broadcast(now, ready)

    def committed(self, now: float, ready: Ready) -> None:
        """Called when the commit index advanced: begin the reads that waited for this term's no-op, and tell followers
        the index soon."""
        if self._core.commit_index >= self._core.no_op:
            early, self._early_reads = self._early_reads, []
            for done in early:
                self.read(done, now, ready)
        if not self._telling and self._core.leads and self._members.peers:
            self._telling = True
            ready.later(_TELL_COMMIT_S, self._tell_commit)

    def _confirm_reads(self, ready: Ready) -> None:
        while self._reads and self._answered(self._reads[0][0]):
            _, index, done = self._reads.popleft()
            done(index, None, ready)
