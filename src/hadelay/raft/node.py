"""RaftNode: one member of one group, and the only face that the rest of hadelay sees of Raft.

It holds the parts together and lets events in: frames, timers, proposals, finished syncs. Each part has its own file:
library (PySyncObj), leader, follower, election, apply, reads, snapshot, admission, membership; below them stand journal
and network.
Whatever unexpected is raised anywhere stops the node: a missing replica is better than a wrong one.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from hadelay.errors import DiskFull, FatalError, NoLeader, OutcomeUnknown, Overloaded, TooLarge
from hadelay.members import Member, Members
from hadelay.platform.network import Buffer, Network
from hadelay.platform.runtime import Runtime
from hadelay.raft import messages
from hadelay.raft.admission import Admission
from hadelay.raft.apply import Applier
from hadelay.raft.election import Elections, Transfers
from hadelay.raft.follower import Follower
from hadelay.raft.journal import Journal
from hadelay.raft.leader import Leader, ReadDone
from hadelay.raft.library import Core
from hadelay.raft.membership import Membership
from hadelay.raft.peer import Peer
from hadelay.raft.ports import Done, Finished, Machine, RaftConfig, RaftStats
from hadelay.raft.reads import Reads
from hadelay.raft.records import RECORD_OVERHEAD, SEGMENT_HEADER_BYTES
from hadelay.raft.snapshot import Snapshots

log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 0.25
#: A link with a node that was removed ends after this.
_FAREWELL_S = 1.0
_SYNC_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, float("inf"))


class RaftNode:
    """Construct, `set_applied` to what the checkpoint holds, then `start`. Everything happens on the loop."""

    def __init__(
        self,
        name: str,
        peers: Iterable[str],
        group: int,
        cluster_id: str,
        journal: Journal,
        network: Network,
        runtime: Runtime,
        machine: Machine,
        config: RaftConfig,
        on_fatal: Callable[[BaseException], None],
        members: Members = (),
    ) -> None:
        """`peers`: the names of the *other* members, and `members` all of them with their addresses, if those are to be
        changed: what the configuration file says, and counts until the log says something else.

        `on_fatal` is called at most once; the node does nothing any more afterwards, and the process has to end.
        """
        identity = journal.identity
        if (identity.node, identity.group, identity.cluster_id) != (name, group, cluster_id):
            raise FatalError(f"the journal belongs to {identity.node}, group {identity.group}, {identity.cluster_id}")
        if journal.config.segment_bytes < config.max_entry_bytes + RECORD_OVERHEAD + SEGMENT_HEADER_BYTES:
            raise FatalError("a journal segment has no room for the largest entry: raise segment_bytes")
        self.name, self.journal, self.network, self.runtime = name, journal, network, runtime
        self.machine, self.config, self._on_fatal = machine, config, on_fatal
        self.peers = {peer: Peer(peer) for peer in sorted(peers)}
        self.stats = RaftStats(sync_buckets=dict.fromkeys(_SYNC_BUCKETS_S, 0))
        self.stopped = self._started = False
        self._flushing = False
        #: Others shall lead if they can: it lets them go first.
        self.gives_way = False
        #: The term whose `on_leader` was called, or 0.
        self._announced = 0
        self.leader_role = Leader(self)
        self.follower = Follower(self)
        self.applier = Applier(self)
        self.elections = Elections(self)
        self.transfers = Transfers(self)
        self.reads = Reads(self)
        self.snapshots = Snapshots(self)
        self.admission = Admission(self)
        self.membership = Membership(self, members or tuple(Member(n, "") for n in sorted([name, *self.peers])))
        #: Whom the network was told to link with last.
        self._linked = self.membership.linked()
        self.core = Core(self)
        journal.on_fatal = self.fatal
        journal.on_synced = self._on_synced
        self._handlers: dict[int, Callable[[Peer, bytes], None]] = {
            messages.GREETING: self.admission.on_greeting,
            messages.REWOUND: self.admission.on_rewound,
            messages.APPEND: lambda peer, data: self.follower.on_append(peer.name, data),
            messages.APPEND_REPLY: lambda peer, data: self.leader_role.on_reply(
                peer, messages.decode_append_reply(data)
            ),
            messages.PRE_VOTE: self.elections.on_pre_vote,
            messages.PRE_VOTE_REPLY: self.elections.on_pre_vote_reply,
            messages.VOTE: self.elections.on_vote,
            messages.VOTE_REPLY: self.elections.on_vote_reply,
            messages.TIMEOUT_NOW: self.elections.on_timeout_now,
            messages.READ: self.reads.on_read,
            messages.READ_REPLY: self.reads.on_read_reply,
            messages.SNAPSHOT: self.snapshots.on_snapshot,
            messages.CHUNK: self.snapshots.on_chunk,
            messages.CHUNK_REPLY: self.snapshots.on_chunk_reply,
            messages.SNAPSHOT_DONE: self.snapshots.on_done,
            messages.SEEN: self.admission.on_seen,
            messages.MEMBERS: self.membership.on_members,
        }

    def set_applied(self, index: int, term: int) -> None:
        """Before `start`: the machine already holds everything up to this entry ((1, 0) when it is empty)."""
        journal = self.journal
        if index < journal.base_index:
            raise FatalError(
                f"the journal begins after entry {journal.base_index}, and the data ends at {index}: "
                "they are not of one time; put both directories back as they were, or start with neither"
            )
        if index > journal.last_index or journal.term_at(index) != term:
            if journal.installing < index:
                raise FatalError(
                    f"the data holds entry {index} of term {term}, which the journal does not: it was rewound; "
                    "start with neither directory: the node then joins as a new incarnation"
                )
            journal.reset(index, term)
        self.core.jump(index)
        self.applier.jump(index, term)

    def start(self) -> None:
        if self.applier.applied < self.journal.base_index:
            self.set_applied(self.journal.base_index, self.journal.base_term)
        self._started = True
        self.membership.load()
        self.journal.want_spare()
        self.elections.start()
        self.network.start(self)
        self.call_later(_HOUSEKEEPING_S, self._housekeeping)

    def stop(self) -> None:
        """No more timers, frames or callbacks; what still waits is answered `OutcomeUnknown`. Closes the journal."""
        if self.stopped:
            return
        self.stopped = True
        self.network.close()
        self.applier.end(OutcomeUnknown("the node stopped"))
        self.journal.close()

    def fatal(self, error: BaseException) -> None:
        """The first unexpected thing is the last: nothing more leaves this node."""
        if not self.stopped:
            self.stopped = True
            log.critical("fatal", exc_info=error)
            self.journal.closed = True
            self.network.close()
            self._on_fatal(error)

    # -- what it knows
    @property
    def is_leader(self) -> bool:
        """What this node believes: another may have been elected. Only committed entries are proof."""
        return self.leader_role.active

    @property
    def leader(self) -> str | None:
        return self.core.leader

    @property
    def term(self) -> int:
        return int(self.core.raftCurrentTerm)

    @property
    def commit_index(self) -> int:
        return int(self.core.raftCommitIndex)

    @property
    def applied_index(self) -> int:
        return self.applier.applied

    @property
    def applied_term(self) -> int:
        return self.applier.applied_term

    @property
    def last_index(self) -> int:
        return self.journal.last_index

    @property
    def synced_index(self) -> int:
        """The last entry on this node's own disk. Nothing beyond it is ever applied here."""
        return self.journal.synced_index

    @property
    def alone(self) -> bool:
        """No other node votes."""
        return not self.membership.others

    def connected(self, name: str) -> bool:
        peer = self.peers.get(name)
        return peer is not None and peer.up

    def status(self) -> dict[str, object]:
        """For people: role, term, indexes, and per peer what is known of it (match and lag on the leader only)."""
        return {
            "role": "leader" if self.is_leader else "installing" if self.snapshots.installing else "follower",
            "term": self.term,
            "leader": self.leader,
            "commit_index": self.commit_index,
            "applied_index": self.applied_index,
            "last_index": self.last_index,
            "synced_index": self.synced_index,
            "incarnation": self.journal.incarnation,
            "admitted": self.journal.admitted,
            "peers": {
                peer.name: {
                    "up": peer.up,
                    "incarnation": peer.incarnation,
                    "admitted": peer.admitted,
                    "votes": peer.name in self.membership.voters,
                    "match": peer.match if self.is_leader else None,
                    "lag": max(0, self.commit_index - peer.match) if self.is_leader else None,
                    "rtt_ms": round(peer.rtt * 1000, 3),
                }
                for peer in self.peers.values()
            },
        }

    # -- what it does
    def propose(self, command: bytes, done: Done) -> None:
        """One call, one entry, 2 bytes to max_entry_bytes. done(result of apply, None) once applied here, or an error:
        NoLeader, Overloaded, TooLarge, DiskFull (nothing happened), OutcomeUnknown.
        """
        config = self.config
        if not self.is_leader or self.stopped:
            done(None, NoLeader("this node does not lead", retry_after_ms=50))
        elif not 2 <= len(command) <= config.max_entry_bytes:
            done(None, TooLarge(f"an entry of {len(command)} bytes; {config.max_entry_bytes} are allowed"))
        elif self.transfers.under_way:
            self.transfers.hold(command, done)
        elif self.applier.waiting >= config.max_waiting:
            done(None, Overloaded("too many proposals wait for their commit", retry_after_ms=100))
        elif not self.journal.has_space and self.journal.room < len(command) + (64 << 10):
            done(None, DiskFull("the Raft journal has no space left", retry_after_ms=1_000))
        else:
            self.stats.proposals += 1
            deadline = self.runtime.monotonic() + config.propose_timeout_ms / 1000
            self.applier.wait(self.journal.last_index + 1, self.term, done, deadline)
            self._guarded(self.core.propose, command)
            self.flush_soon()

    def read_index(self, done: Finished) -> None:
        """done(None) when this node has applied everything that was committed anywhere before this call (any node)."""
        self.reads.read(done)

    def surely_leads(self) -> bool:
        """Nobody else can lead yet, as far as clocks run alike and no link was reset at its other end alone: a majority
        has answered within the least time that its nodes wait before they elect another, on links that are still up,
        and nobody is told not to wait. Committed entries prove more, and take longer."""
        if not self.is_leader or self.transfers.in_doubt:
            return False
        age_s = self.runtime.monotonic() - self.leader_role.confirmed_at
        return self.alone or age_s < self.config.election_min_ms / 1000

    def transfer(self, to: str | None, done: Finished) -> None:
        """Hand leadership to `to` (None: whoever is furthest). Proposals wait meanwhile, at most transfer_ms."""
        self.transfers.begin(to, done)

    def compact(self, index: int) -> None:
        """A checkpoint of everything up to `index` is durable: whole segments before it may go.

        What a connected follower still needs stays, up to four times journal_keep_bytes; beyond that it gets files.
        """
        keep = self.config.journal_keep_bytes
        if self.is_leader:
            for peer in self.peers.values():
                if peer.manifest is not None:
                    index = min(index, peer.manifest.index)
                elif peer.up and self.journal.size_bytes < 4 * keep:
                    index = min(index, max(peer.match, self.journal.base_index))
        self.journal.compact(index, keep)

    def send(self, peer: str, kind: int, payload: Buffer) -> bool:
        """The node's own traffic, `kind` 64 to 255. False, and nothing sent, if the peer is not linked or too slow."""
        assert messages.FIRST_APP_KIND <= kind <= 255
        return self.connected(peer) and self.network.send(peer, [bytes((kind,)), payload])

    # -- events: frames (network.Receiver)
    def link_up(self, peer: str) -> None:
        if peer in self.peers:
            self.admission.greet(self.peers[peer])

    def link_down(self, peer: str, reset: bool) -> None:
        self._guarded(self._link_down, peer, reset)

    def _link_down(self, name: str, reset: bool) -> None:
        peer = self.peers.get(name)
        if peer is None or self.stopped:
            return
        self.admission.remember(peer)
        was_up, peer.up = peer.up, False
        self.snapshots.release(peer)
        self.snapshots.link_lost(name)
        if not was_up:
            return
        self.core.link(name, False)
        if self.is_leader:
            peer.probe(peer.match + 1)
            if reset:  # it may campaign at once: what it answered says no longer who leads (surely_leads)
                peer.round = 0
        elif self.core.leader == name:
            self.reads.leader_lost()
            if reset:
                self.elections.leader_lost()
        self.machine.on_link(name, False)

    def link_ready(self, peer: Peer) -> None:
        """Its greeting is accepted: from here on its frames count."""
        if not peer.up:
            peer.up = True
            self.core.link(peer.name, True)
            self.machine.on_link(peer.name, True)
            self.membership.tell(peer)
            if self.is_leader:
                self.leader_role.send_entries(peer)

    def frame(self, peer: str, data: bytes) -> None:
        self._guarded(self._frame, peer, data)

    def _frame(self, name: str, data: bytes) -> None:
        peer = self.peers.get(name)
        if peer is None or self.stopped:
            return
        kind = data[0]
        if not peer.up and kind not in (messages.GREETING, messages.REWOUND):
            return
        try:
            if kind >= messages.FIRST_APP_KIND:
                self.machine.on_message(name, kind, data[1:])
            elif (handler := self._handlers.get(kind)) is not None:
                handler(peer, data)  # else: of a later version, which knows that we may not know it
        except messages.BadFrame as error:
            # A new link starts from a known state.
            log.warning("bad_frame", extra={"peer": name, "kind": kind, "error": str(error)})
            self.network.disconnect(name)

    # -- events: syncs and timers
    def flush_soon(self) -> bool:
        """Write and sync what was queued: once for everything that this turn of the loop brings, after its frames. Then
        apply. False if nothing is queued."""
        if not self._flushing and not self.journal.all_synced:
            self._flushing = True
            self.call_soon(self._flush)
        return self._flushing

    def _flush(self) -> None:
        self._flushing = False
        self.journal.kick()
        self.applier.soon()

    def _on_synced(self, seconds: float) -> None:
        self._guarded(self._synced, seconds)

    def _synced(self, seconds: float) -> None:
        stats = self.stats
        stats.syncs += 1
        stats.sync_seconds += seconds
        stats.sync_buckets[_SYNC_BUCKETS_S[bisect_left(_SYNC_BUCKETS_S, seconds)]] += 1
        if not self._started or self.stopped:
            return
        if self.is_leader:
            self.leader_role.synced()
        else:
            self.follower.synced()
        self.applier.run()

    def _housekeeping(self) -> None:
        self.applier.expire(self.runtime.monotonic())
        self.journal.want_spare()
        self.call_later(_HOUSEKEEPING_S, self._housekeeping)

    def advance(self) -> None:
        """The library was told of something: let it move its commit index, and apply."""
        before = self.core.raftCommitIndex
        self.core.tick()
        if self.core.raftCommitIndex != before:
            self.leader_role.committed()
            self.applier.run()
        if self.transfers.under_way:
            self.transfers.progress()

    def applied(self) -> None:
        """Something was applied, or could have been."""
        if self.is_leader and self._announced != self.term and self.applier.applied >= self.leader_role.no_op:
            self._announced = self.term
            self.machine.on_leader(self.term)
        if not self.journal.admitted:
            self.admission.applied()

    def agreed(self, peers: Iterable[Peer]) -> bool:
        """Whether these, with this node, are a majority (of voters, counting none that is not admitted)."""
        membership = self.membership
        voters = membership.voters
        mine = self.journal.admitted and membership.votes
        return mine + sum(peer.admitted and peer.name in voters for peer in peers) >= membership.majority

    # -- members
    def reconfigured(self) -> None:
        """Others vote from now on, or are to be linked. In force at once; links follow when the loop comes round."""
        added = self.core.set_voters(self.membership.others, self.membership.votes)
        linked = self.membership.linked()
        new = [name for name in linked if name not in self.peers]
        if new:
            self.peers = {name: self.peers.get(name) or Peer(name) for name in sorted({*self.peers, *new})}
            for name in new:
                self.peers[name].begin(self.journal.last_index + 1, self.runtime.monotonic())
        if self.is_leader:
            self.leader_role.reconfigured(added)
        self.call_soon(self._relink)

    def _relink(self) -> None:
        linked = self.membership.linked()
        leaving = [name for name in self.peers if name not in linked]
        if leaving:
            self.call_later(_FAREWELL_S, self._part)
        self._link_with({name: self._linked.get(name, "") for name in leaving} | linked)
        for peer in self.peers.values():
            if peer.up and peer.incarnation < self.admission.least(peer.name):
                self.network.disconnect(peer.name)  # to be greeted anew

    def _part(self) -> None:
        """By now whoever was removed had the time to hear of it, and what it had asked for is answered."""
        linked = self.membership.linked()
        for name in [name for name in self.peers if name not in linked]:
            self._link_down(name, False)
            self.peers = {peer: known for peer, known in self.peers.items() if peer != name}
        self._link_with(linked)

    def _link_with(self, linked: dict[str, str]) -> None:
        if linked != self._linked:
            self._linked = linked
            self.network.set_members(linked)
        self.machine.on_members()

    # -- told by the library
    def on_appended(self, index: int, command: bytes) -> None:
        """An entry is in the log, on a leader or a follower."""
        members = self.machine.members_in(command)
        if members is not None:
            self.membership.appended(index, members)

    def on_state(self, leads: bool) -> None:
        """Became leader (before its no-op is in the log), or stopped being it. From inside the library: only our own
        state changes here, others hear of it when the loop comes round."""
        if leads:
            log.info("leads", extra={"term": self.term})
            self.stats.leader_changes += 1
            self.leader_role.begin()
            self.call_soon(self.membership.arrived)
        else:
            log.info("deposed", extra={"term": self.term})
            self._announced = 0
            self.applier.deposed()
            self.call_soon(self._deposed, self.leader_role.end())

    def _deposed(self, reads: list[ReadDone]) -> None:
        self.machine.on_follower()
        self.transfers.deposed()
        for done in reads:
            done(0, NoLeader("this node stopped leading", retry_after_ms=50))

    # -- the loop, guarded
    def _guarded(self, fn: Callable[..., None], *args: Any) -> None:
        if self.stopped:
            return
        try:
            fn(*args)
        except Exception as error:
            self.fatal(error)

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        self.runtime.call_soon(self._guarded, fn, *args)

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> None:
        self.runtime.call_later(delay_s, self._guarded, fn, *args)

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Callable[[Any, BaseException | None], None]) -> None:
        self.runtime.in_thread(lane, fn, lambda *ended: self._guarded(done, *ended))
