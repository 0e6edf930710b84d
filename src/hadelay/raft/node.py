"""RaftNode: one member of a Raft group, and the only interface to Raft for the rest of hadelay.

RaftNode connects the parts and receives events: frames, timers, proposals, finished syncs. A part handles an event and
writes its effects into a `Ready` (part.py), which is carried out at the end of the event (events.py). Any unexpected
error stops the node: a missing replica is better than a wrong one.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Any

from hadelay.errors import DiskFull, FatalError, HadelayError, NoLeader, OutcomeUnknown, Overloaded, TooLarge
from hadelay.members import Members
from hadelay.platform.network import Buffer, Network
from hadelay.platform.runtime import Runtime
from hadelay.raft import messages
from hadelay.raft.admission import Admission
from hadelay.raft.apply import Applier, Reads
from hadelay.raft.election import Elections
from hadelay.raft.events import Events
from hadelay.raft.follower import Follower
from hadelay.raft.journal import Journal
from hadelay.raft.library import Core
from hadelay.raft.membership import Membership
from hadelay.raft.part import Notice, Peer, ReadDone, Ready, Shared, Step
from hadelay.raft.ports import Done, Finished, Machine, RaftStats, RaftTuning
from hadelay.raft.records import RECORD_OVERHEAD, SEGMENT_HEADER_BYTES
from hadelay.raft.replication import Replication
from hadelay.raft.snapshot import Snapshots
from hadelay.raft.transfer import Transfers

log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.25
#: Delay, in seconds, before the link to a removed node ends.
_FAREWELL_S = 1.0
_SYNC_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, float("inf"))


class RaftNode(Events):
    """A Raft node. Construct it, call `set_applied`, then `start`. All calls are on the event loop."""

    def __init__(
        self,
        journal: Journal,
        network: Network,
        runtime: Runtime,
        machine: Machine,
        config: RaftTuning,
        *,
        members: Members,
        on_fatal: Callable[[BaseException], None],
    ) -> None:
        """members: the members in the configuration file, this node included. on_fatal: called at most once; the
        process has to end then."""
        if journal.config.segment_bytes < config.max_entry_bytes + RECORD_OVERHEAD + SEGMENT_HEADER_BYTES:
            raise FatalError("a journal segment has no room for the largest entry: raise segment_bytes")
        super().__init__(journal, network, runtime, on_fatal)
        self.name, self.machine, self.config = journal.identity.node, machine, config
        self.stats = RaftStats(sync_buckets=dict.fromkeys(_SYNC_BUCKETS_S, 0))
        #: Whether `start` was called; and the term for which `on_leader` was called, 0 for none.
        self._started, self._announced = False, 0
        self.core = Core(self.name, sorted({member.name for member in members} - {self.name}), journal, self)
        shared = Shared(
            core=self.core,
            journal=journal,
            network=network,
            runtime=runtime,
            machine=machine,
            config=config,
            stats=self.stats,
            propose=self.propose,
            event=self.event,
        )
        self.membership = known = Membership(shared, members, lambda: self.transfers.target is not None)
        self.applier = applier = Applier(shared, known)
        self.snapshots = Snapshots(shared, known, applier)
        self.elections = Elections(shared, known, applier)
        self.admission = Admission(shared, known)
        self.replication = Replication(shared, known, self.elections, self.admission, self.snapshots)
        self.follower = Follower(shared, known, self.elections, self.snapshots, applier)
        self.transfers = Transfers(shared, known, self.replication)
        self.reads = Reads(shared, known, applier, self.replication.read)
        #: Members that the network links with: name → address.
        self._linked = known.linked()
        journal.on_fatal, journal.on_synced = self.fatal, partial(self.event, self._synced)
        self._handlers = self._frame_handlers()

    def _frame_handlers(self) -> dict[int, tuple[messages.Shape, Step]]:
        """Table of Raft frames: kind → (types of the frame's fields, handler)."""
        return {
            messages.GREETING: (messages.Greeting, self.admission.on_greeting),
            messages.REWOUND: ((int, int, int), self.admission.on_rewound),
            messages.APPEND: (messages.decode_append, self.follower.on_append),
            messages.APPEND_REPLY: (messages.decode_append_reply, self.replication.on_reply),
            messages.PRE_VOTE: ((int, int, int), self.elections.on_pre_vote),
            messages.PRE_VOTE_REPLY: ((int, bool, int), self.elections.on_pre_vote_reply),
            messages.VOTE: (messages.Vote, self.elections.on_vote),
            messages.VOTE_REPLY: ((int,), self.elections.on_vote_reply),
            messages.TIMEOUT_NOW: ((int,), self.elections.on_timeout_now),
            messages.READ: ((int,), self.reads.on_read),
            messages.READ_REPLY: ((int, bool, int), self.reads.on_reply),
            messages.SNAPSHOT: (messages.SnapshotOffer, self.snapshots.on_offer),
            messages.CHUNK: (messages.Chunk, self.snapshots.on_chunk),
            messages.CHUNK_REPLY: (messages.ChunkReply, self.snapshots.on_chunk_reply),
            messages.SNAPSHOT_DONE: ((int,), self.snapshots.on_done),
            messages.SEEN: ((dict,), self.admission.on_seen),
            messages.MEMBERS: ((int, list), self.membership.on_members),
        }

    def set_applied(self, index: int, term: int) -> None:
        """Set the last entry that the state machine has applied, before `start`; (1, 0) for an empty state machine."""
        journal = self.journal
        if index < journal.base_index:
            raise FatalError(
                f"the journal begins after entry {journal.base_index}, but the data ends at entry {index}: the two "
                "directories are of different times; put back both as they were at one time, or start with both empty"
            )
        if index > journal.last_index or journal.term_at(index) != term:
            if journal.installing < index:
                raise FatalError(
                    f"the data holds entry {index} of term {term}, but the journal does not: an old copy of the "
                    "journal was put back; start with both directories empty: the node then joins as a new incarnation"
                )
            journal.reset(index, term)
        self.core.jump(index)
        self.applier.jump(index, term)

    def start(self) -> None:
        if self.applier.applied < self.journal.base_index:
            self.set_applied(self.journal.base_index, self.journal.base_term)
        self._started = True
        ready = self._ready  # do not run `start` as a Raft event: its errors have to reach the caller
        self.membership.load(self.applier.applied, self.runtime.monotonic(), ready)
        self.journal.want_spare()
        self.elections.start(self.runtime.monotonic(), ready)
        self.network.start(self)
        self.event(lambda now, ready: ready.later(_HOUSEKEEPING_S, self._housekeeping))

    def stop(self) -> None:
        """End timers, frames and callbacks; answer waiting calls with `OutcomeUnknown`; close the journal."""
        if self.stopped:
            return
        self.stopped = True
        self.network.close()
        self.applier.end(OutcomeUnknown("the node stopped"))
        self.journal.close()

    @property
    def peers(self) -> dict[str, Peer]:
        return self.membership.peers

    @property
    def is_leader(self) -> bool:
        """Whether this node believes that it leads; only a committed entry proves it."""
        return self.core.leads

    @property
    def leader(self) -> str | None:
        return self.core.leader

    @property
    def term(self) -> int:
        return self.core.term

    @property
    def commit_index(self) -> int:
        return self.core.commit_index

    @property
    def applied_index(self) -> int:
        return self.applier.applied

    @property
    def last_index(self) -> int:
        return self.journal.last_index

    def propose(self, command: bytes, done: Done) -> None:
        """Propose one entry, 2 to max_entry_bytes bytes. done(result of apply, None) once applied on this node, or
        done(None, error): NoLeader, Overloaded, TooLarge, DiskFull (nothing happened), OutcomeUnknown."""
        config, transfers = self.config, self.transfers
        error: HadelayError | None = None
        if not self.core.leads or self.stopped:
            error = NoLeader("this node does not lead", retry_after_ms=50)
        elif not 2 <= len(command) <= config.max_entry_bytes:
            error = TooLarge(f"the entry has {len(command)} bytes; {config.max_entry_bytes} are allowed")
        elif transfers.target is not None:
            transfers.hold(command, done)
            return
        elif len(self.applier.waiters) >= config.max_waiting:
            error = Overloaded("too many proposals wait for their commit", retry_after_ms=100)
        elif not self.journal.has_space and self.journal.room < len(command) + (64 << 10):
            error = DiskFull("the Raft journal has no space left", retry_after_ms=1_000)
        if error is not None:
            done(None, error)
        else:
            self.event(self._propose, command, done)

    def _propose(self, command: bytes, done: Done, now: float, ready: Ready) -> None:
        self.stats.proposals += 1
        self.applier.wait(self.journal.last_index + 1, self.journal.term, done, now, ready)
        self.core.propose(command)
        ready.sync = True

    def read_index(self, done: Finished) -> None:
        """Call done(None) once this node has applied all entries that were committed in the cluster before this
        call."""
        self.event(self.reads.read, done)

    def has_leader_lease(self) -> bool:
        """Whether no other node can lead yet: a majority has answered within the shortest election timeout, on links
        that are still up, and no transfer is in doubt. Assumes that clocks run at the same rate and that both ends see
        the reset of a link; only committed entries are proof."""
        if not self.is_leader or self.transfers.in_doubt:
            return False
        age_s = self.runtime.monotonic() - self.replication.confirmed_at
        return self.membership.sole_voter or age_s < self.config.election_min_ms / 1000

    def transfer(self, to: str | None, done: Finished, why: str = "it was asked to") -> None:
        """Hand leadership to `to` (None: the follower with the longest log). Proposals wait, at most transfer_ms. why:
        the reason in words."""
        self.event(self.transfers.begin, to, done, why)

    def compact(self, index: int) -> None:
        """Delete whole journal segments up to `index`, the position of a durable checkpoint. Entries that a connected
        follower still needs stay, up to four times journal_keep_bytes; a follower further behind gets a snapshot."""
        keep = self.config.journal_keep_bytes
        if self.is_leader:
            for peer in self.peers.values():
                if peer.manifest is not None:
                    index = min(index, peer.manifest.index)
                elif peer.up and self.journal.size_bytes < 4 * keep:
                    index = min(index, max(peer.match, self.journal.base_index))
        self.journal.compact(index, keep)

    def send(self, peer: str, kind: int, payload: Buffer) -> bool:
        """Send a frame of the node's own traffic, `kind` 64 to 255. False if the peer is not linked or too slow."""
        assert messages.FIRST_APP_KIND <= kind <= 255
        return self.membership.connected(peer) and self.network.send(peer, [bytes((kind,)), payload])

    def _advance(self, now: float, ready: Ready) -> None:
        before = self.core.commit_index
        self.core.tick()
        if self.core.commit_index != before:
            self.replication.committed(now, ready)
            ready.apply = True
        if self.transfers.target is not None:
            self.transfers.progress(ready)

    def _apply(self, now: float, ready: Ready) -> None:
        self.applier.run(now, ready)
        if self.core.leads and self._announced != self.journal.term and self.applier.applied >= self.core.no_op:
            self._announced = self.journal.term
            self.machine.on_leader(self.journal.term)
        if not self.journal.admitted and not self.applier.installing:
            self.admission.applied(ready)

    def _notice(self, notice: Notice, about: Any, now: float, ready: Ready) -> None:
        if notice is Notice.LINK_UP:
            self._link_ready(about, now, ready)
        elif notice is Notice.FOLLOWS:
            self.stats.leader_changes += 1
            self.membership.leader_seen(now, ready)
        elif notice is Notice.PUMP:
            self.replication.send_entries(about, now, ready)
        elif notice is Notice.MEMBERS:
            if self.is_leader:
                self.replication.count_all(ready)
                ready.advance = True
            ready.later(0.0, self._relink)
        elif notice is Notice.HAND_OVER:
            self.transfers.give_away(about, now, ready)
        elif notice is Notice.INSTALLED:
            self.membership.installed(about.index, now, ready)
            self.follower.reset()
            self.admission.applied(ready)

    # Methods of network.Receiver, which the network calls.
    def link_up(self, peer: str) -> None:
        if peer in self.peers:
            self.event(lambda now, ready: self.admission.greet(self.peers[peer], ready))

    def link_down(self, peer: str, reset: bool) -> None:
        self.event(self._link_down, peer, reset)

    def _link_down(self, name: str, reset: bool, now: float, ready: Ready) -> None:
        peer = self.peers.get(name)
        if peer is None:
            return
        if self.is_leader:
            self.admission.remember(peer, self.term)
        was_up, peer.up = peer.up, False
        self.snapshots.release(peer)
        self.snapshots.link_lost(name, ready)
        if not was_up:
            return
        self.core.link(name, False)
        if self.is_leader:
            peer.probe(peer.match + 1)
            # After a reset of its link, a peer may campaign at once: its earlier answers no longer prove this leader's
            # lease.
            if reset:
                peer.round = 0
        elif self.core.leader == name:
            self.reads.leader_lost(now, ready)
            if reset:
                self.elections.leader_lost(now, ready)
        self.machine.on_link(name, False)

    def _link_ready(self, peer: Peer, now: float, ready: Ready) -> None:
        """Called when the peer's greeting was accepted: from now on, its frames count."""
        if not peer.up:
            peer.up = True
            self.core.link(peer.name, True)
            self.machine.on_link(peer.name, True)
            self.membership.tell(peer, ready)
            if self.is_leader:
                self.replication.send_entries(peer, now, ready)

    def frame(self, peer: str, data: bytes) -> None:
        self.event(self._frame, peer, data)

    def _frame(self, name: str, data: bytes, now: float, ready: Ready) -> None:
        peer = self.peers.get(name)
        if peer is None:
            return
        kind = data[0]
        if not peer.up and kind not in (messages.GREETING, messages.REWOUND):
            return
        try:
            if kind >= messages.FIRST_APP_KIND:
                self.machine.on_message(name, kind, data[1:])
            elif kind in self._handlers:
                shape, handler = self._handlers[kind]
                handler(peer, *messages.values(shape, data), now, ready)
            # Ignore unknown frame kinds: nodes of later versions may send them to this node.
        except messages.BadFrame as error:
            log.warning("bad_frame", extra={"peer": name, "kind": kind, "error": str(error)})
            self.network.disconnect(name)

    def _synced(self, seconds: float, now: float, ready: Ready) -> None:
        stats = self.stats
        stats.syncs += 1
        stats.sync_seconds += seconds
        stats.sync_buckets[_SYNC_BUCKETS_S[bisect_left(_SYNC_BUCKETS_S, seconds)]] += 1
        if not self._started:
            return
        if self.core.leads:
            self.replication.count_all(ready)
        else:
            self.follower.synced(ready)
        ready.sync = ready.apply = True

    def _housekeeping(self, now: float, ready: Ready) -> None:
        self.applier.expire(now)
        if self.core.leader is None:
            self.applier.expire_reads(now)
        self.journal.want_spare()
        ready.later(_HOUSEKEEPING_S, self._housekeeping)

    def _relink(self, now: float, ready: Ready) -> None:
        linked = self.membership.linked()
        leaving = [name for name in self.peers if name not in linked]
        if leaving:
            ready.later(_FAREWELL_S, self._part)
        self._link_with({name: self._linked.get(name, "") for name in leaving} | linked)
        for peer in self.peers.values():
            if peer.up and peer.incarnation < self.membership.min_incarnation(peer.name):
                # Reconnect: the greeting on the new connection contains the peer's present incarnation
                self.network.disconnect(peer.name)

    def _part(self, now: float, ready: Ready) -> None:
        """End the links to removed nodes. This is done with a delay, in which these nodes can learn of their removal
        and get answers."""
        linked = self.membership.linked()
        for name in [name for name in self.peers if name not in linked]:
            self._link_down(name, False, now, ready)
            self.membership.peers = {peer: known for peer, known in self.peers.items() if peer != name}
        self._link_with(linked)

    def _link_with(self, linked: dict[str, str]) -> None:
        if linked != self._linked:
            self._linked = linked
            self.network.set_members(linked)
        self.machine.on_members()

    # Methods of RaftListener, which PySyncObj calls.
    def on_appended(self, index: int, command: bytes) -> None:
        members = self.machine.members_in(command)
        if members is not None:
            self.membership.appended(index, members, self.runtime.monotonic(), self._ready)

    def on_state(self, leads: bool) -> None:
        """Called inside PySyncObj when leadership changes: change only this object's state; the other parts follow in
        the next turn of the loop."""
        now, ready = self.runtime.monotonic(), self._ready
        log.info("leads" if leads else "deposed", extra={"term": self.term})
        self.elections.followed = self.name
        if leads:
            self.stats.leader_changes += 1
            self.replication.begin(now, ready)
            ready.later(0.0, self.membership.leader_seen)
        else:
            self._announced = 0
            self.applier.deposed(now)
            ready.later(0.0, self._deposed, self.replication.end())

    def _deposed(self, reads: list[ReadDone], now: float, ready: Ready) -> None:
        self.machine.on_follower()
        self.transfers.deposed(ready)
        for done in reads:
            done(0, NoLeader("this node stopped leading", retry_after_ms=50), ready)

    def on_vote_request(self, peer: str, term: int, last_index: int, last_term: int) -> None:
        self.elections.ask_vote(peer, term, last_index, last_term, self._ready)

    def on_vote(self, peer: str, term: int) -> None:
        self.elections.vote(peer, term, self._ready)

    def on_entries(self) -> None:
        self.replication.pump(self.runtime.monotonic(), self._ready)

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> None:
        """Call `fn` after `delay_s` seconds, unless the node stops before. An error of `fn` stops the node."""
        self.runtime.call_later(delay_s, self.event, lambda now, ready: fn(*args))
