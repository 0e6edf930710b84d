"""The one place where a node is put together, and what happens when it leads, follows, applies and checkpoints.

Callbacks over Runtime, Disk and Network: the simulator runs this very class. `server.service` gives it the async face
that HTTP calls, `server.main` the real world.
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hadelay.codec.commands import (
    Command,
    encode_entry,
    encode_feature,
    encode_incarnation,
    encode_members,
    encode_settings,
    is_whole,
    kind_of,
    members_in,
)
from hadelay.codec.formats import INDEX_SIZE
from hadelay.codec.publishcommand import Draft
from hadelay.codec.results import Refused
from hadelay.errors import Conflict, DamagedFile, DiskFull, HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.idempotency import is_known
from hadelay.ledger.quotas import retry_after_ms
from hadelay.ledger.state import Ledger
from hadelay.members import Member, Members
from hadelay.platform.disk import Disk, Lock
from hadelay.platform.network import Network
from hadelay.platform.runtime import Runtime
from hadelay.raft.journal import FIRST, Journal
from hadelay.raft.node import RaftNode
from hadelay.raft.ports import Done, Installer, RaftConfig
from hadelay.server.api import PublishDone
from hadelay.server.batcher import Batcher
from hadelay.server.checkpoints import Checkpoints
from hadelay.server.clustertime import ClusterClock
from hadelay.server.dispatcher import LeaderDispatcher
from hadelay.server.link import Link, Reply
from hadelay.server.members import Changes
from hadelay.server.mending import Mender
from hadelay.server.peers import Peer, Peers, local_peer
from hadelay.server.readahead import ReadAhead
from hadelay.server.webhooks.push import Push
from hadelay.settings.node import Config
from hadelay.storage.identity import note_damage
from hadelay.storage.manifest import Manifest
from hadelay.storage.store import Storage
from hadelay.version import FEATURE_LEVEL

log = logging.getLogger(__name__)

#: Between two lines about the clocks; a node that starts has heard of the others by then.
_ALARMS_S = 5.0
#: Cluster time, and the term of the leader who says it.
_TIME = struct.Struct("<qQ")


class Node:
    """One member of one group. Construct (recovers from disk), `start`, `stop`; `on_fatal` ends the process."""

    def __init__(
        self,
        config: Config,
        disk: Disk,
        network: Network,
        runtime: Runtime,
        on_fatal: Callable[[BaseException], None],
        *,
        storage: Storage,
        journal: Journal,
    ) -> None:
        self.config, self.disk, self.runtime = config, disk, runtime
        self.name = config.node.name
        self.on_fatal = on_fatal
        #: Records read for consumers, from memory or disk.
        self.records_read: Counter[str] = Counter()
        self._load(storage)
        self.clock = ClusterClock(
            self.name,
            config.members,
            floor_ms=self.ledger.now_ms,
            skew_ms=config.limits.max_clock_skew_ms,
        )
        #: The term this node leads and may propose in: cluster time is known, and everything before it is applied.
        self.leading = 0
        self._elected = 0
        self._transferring = False
        #: What was said last of the clocks, and when.
        self._alarms: list[str] = []
        self._alarms_said = runtime.monotonic()
        self.stopped = False
        #: What keeps other processes out of this node's directories.
        self.locks: Sequence[Lock] = ()
        self.raft = RaftNode(
            self.name,
            [name for name in config.members if name != self.name],
            config.cluster.group,
            config.cluster.id,
            journal,
            network,
            runtime,
            self,
            raft_config(config),
            on_fatal,
            tuple(Member(name, address) for name, address in sorted(config.members.items())),
        )
        self.raft.set_applied(*(storage.applied_index, storage.applied_term) if storage.applied_index else FIRST)
        self.link = Link(runtime, self.raft.send)
        self.link.handlers |= {
            "submit": self._on_submit, "ready": self._on_ready, "consumers": self._on_consumers,
            "transfer": lambda peer, to, reply: self.transfer(to, partial(reply, None)),
            "drain": lambda peer, drained, reply: self.drain(bool(drained), partial(reply, None)),
        }  # fmt: skip
        self.peers = Peers(list(config.members), runtime, self.link, self.clock, self._me, self._clock_changed)
        self.batcher = Batcher(
            self.name,
            runtime,
            _Outlet(self),
            max_entry_bytes=config.raft.max_entry_bytes,
            max_queue_bytes=config.limits.publish_queue_bytes,
            leaderless_wait_s=config.http.no_leader_wait_ms / 1000,
            commit_timeout_s=config.limits.commit_timeout_ms / 1000,
            retry_after_ms=self._retry_after_ms,
            is_known=lambda drafts, request_key: is_known(self.ledger, drafts, request_key),
        )
        self.push = Push(self)
        self._make_dispatcher()
        self.mender = Mender(self)
        self.changes = Changes(self)
        self.checkpoints = Checkpoints(self)

    def __repr__(self) -> str:
        return f"<Node {self.name} {'leads' if self.leading else 'follows'} term {self.raft.term} {self.ledger!r}>"

    def start(self) -> None:
        self.raft.start()
        self.peers.start()
        self.checkpoints.start()

    def stop(self) -> None:
        """At once and without a checkpoint: what is acknowledged is in the journal."""
        self.stopped = True
        self.push.on_follower()
        self.dispatcher.on_follower()
        self.raft.stop()
        self.storage.close()
        for lock in self.locks:
            lock.close()

    # what users ask for

    def publish(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone) -> None:
        if self.leading and self.peers.full:
            done(None, DiskFull(self._no_space(), retry_after_ms=5_000))
            return
        self.batcher.publish(drafts, request_key, done)

    def _no_space(self) -> str:
        where = ", ".join(self.peers.full)
        return f"no space is left for new messages at {where}: free some there, or consume; consuming goes on"

    def _retry_after_ms(self, topic: str) -> int:
        return retry_after_ms(self.ledger.topic(topic), self.clock.read(self.runtime.monotonic()))

    def propose(self, command: bytes, done: Done) -> None:
        """Ack, nack, extend, cancel and the topics' commands, on any node. In interval mode hand-outs go first."""
        self.dispatcher.before_settlement()
        command = self.dispatcher.settling(command)
        self.batcher.propose(command, self.dispatcher.in_order(command, done))

    def transfer(self, to: str | None, done: Callable[[HadelayError | None], None]) -> None:
        """A planned hand-over (S2): hand out nothing more, commit the dispatch state, then let go. Leader only."""
        if not self.leading:
            done(NoLeader("this node does not lead"))
            return
        if self._transferring:
            done(Overloaded("a transfer is already under way", retry_after_ms=1_000))
            return
        self._transferring = True

        def held() -> None:
            self.batcher.hold(True)
            self.raft.transfer(to, over)

        def over(error: HadelayError | None) -> None:
            self._transferring = False
            self.batcher.hold(False)
            if self.leading:
                self.dispatcher.resume()
            done(error)

        self.dispatcher.hold(held)

    def transfer_anywhere(self, to: str | None, done: Callable[[HadelayError | None], None]) -> None:
        """`transfer`, asked of whoever leads."""
        leader = self.raft.leader
        if self.leading or leader is None or leader == self.name:
            self.transfer(to, done)
        else:
            self.link.call(leader, "transfer", to, _TRANSFER_S, lambda _, error: done(error))

    @property
    def drained(self) -> bool:
        """It takes no publishes and no polls, unless it has to lead after all."""
        return self.raft.gives_way and not self.leading

    def drain(self, drained: bool, done: Callable[[HadelayError | None], None]) -> None:
        """Hand over, and take nothing new; or end that. A restart ends it, too."""
        if drained and self.raft.alone:
            done(Conflict(f"{self.name} is the only voter; draining it would stop the cluster"))
            return
        log.info("drained" if drained else "undrained")
        self.raft.gives_way = drained
        if drained and self.leading:
            self.transfer(None, lambda error: self._handed_over(error, done))
        else:
            done(None)

    def _handed_over(self, error: HadelayError | None, done: Callable[[HadelayError | None], None]) -> None:
        if error is not None:
            self.raft.gives_way = False
        done(error)

    def serves(self) -> bool:
        """A leader is known, and what was committed before this node started is applied here."""
        leads = bool(self.leading)
        follows = self.raft.leader not in (None, self.name) and self.clock.ready
        return (leads or follows) and self.raft.applied_index >= self.raft.commit_index

    # hadelay.raft.ports.Machine

    def apply(self, index: int, term: int, command: bytes) -> Any:
        try:
            results = apply_entry(self.ledger, index, term, command)
        except DamagedFile as damage:
            # Half an entry may be applied by now, and a replay would meet the same bytes again: the next start begins
            # anew, from the other nodes.
            note_damage(self.disk, self.storage.directory, str(damage))
            raise
        self.clock.raise_floor(self.ledger.now_ms)
        if self.ledger.level > self.storage.identity.feature_level:
            # An older program refuses the directory in words from now on.
            self.storage.set_identity(feature_level=self.ledger.level)
        self.checkpoints.applied(len(command))
        return results

    def on_leader(self, term: int) -> None:
        self._elected = term
        self.clock.lead(self.ledger.now_ms, self.runtime.monotonic())
        self.peers.tell()  # so the others keep to its clock at once
        self._clock_changed()

    def on_follower(self) -> None:
        self._elected = self.leading = 0
        self.clock.follow(self.runtime.monotonic())
        self.push.on_follower()
        self.dispatcher.on_follower()
        self.batcher.kick()

    def incarnation(self, node: str) -> int | None:
        return self.ledger.incarnations.get(node)

    def incarnation_command(self, node: str, incarnation: int) -> bytes:
        return encode_entry(self.clock.read(self.runtime.monotonic()), [encode_incarnation(node, incarnation)])

    def members(self) -> tuple[int, Members]:
        return self.ledger.members_index, self.ledger.members

    def members_in(self, command: bytes) -> Members | None:
        return members_in(command)

    def members_command(self, members: Members) -> bytes:
        now_ms = self.clock.read(self.runtime.monotonic())
        return encode_entry(now_ms, [encode_members(members)], self.ledger.level)

    def on_members(self) -> None:
        membership = self.raft.membership
        voters = [member.name for member in membership.members if member.voter]
        self.clock.set_voters(voters)
        self.peers.set_members(sorted({self.name, *membership.linked()}), voters)

    def on_incarnation(self, incarnation: int) -> None:
        self.storage.set_identity(incarnation=incarnation)

    def heartbeat_info(self) -> bytes:
        return _TIME.pack(self.clock.read(self.runtime.monotonic()), self.raft.term) if self.clock.ready else b""

    def on_heartbeat_info(self, info: bytes) -> None:
        if len(info) == _TIME.size:
            now_ms, _ = _TIME.unpack(info)
            self.clock.observe_leader(self.raft.leader or "", now_ms, self.runtime.monotonic())
        self.batcher.kick()  # it may be the first sign of a new leader

    def on_message(self, peer: str, kind: int, payload: bytes) -> None:
        self.link.on_message(peer, kind, payload)

    def on_link(self, peer: str, up: bool) -> None:
        log.info("link_up" if up else "link_down", extra={"peer": peer})
        if up:
            self.peers.greet(peer)
            self.batcher.kick()
        else:
            self.link.link_down(peer)

    def manifest(self) -> Manifest | None:
        return self.storage.manifest()

    def read_chunk(self, manifest: Manifest, name: str, offset: int, size: int) -> bytes:
        return self.storage.exports.read(name, offset, size)

    def release(self, manifest: Manifest) -> None:
        self.storage.exports.release(manifest)

    def install(self, manifest: Manifest) -> Installer:
        return self.storage.install(manifest, self._installed)

    # inside

    def _load(self, storage: Storage) -> None:
        self.storage = storage
        self.ledger = Ledger(self.config.cluster.group, storage.hours, storage.tables, storage.names)
        if storage.core_blob:
            checkpoint.load(self.ledger, storage.core_blob, storage.hour_blobs())

    def _make_dispatcher(self) -> None:
        self.dispatcher = LeaderDispatcher(
            ledger=self.ledger,
            runtime=self.runtime,
            clock=self.clock,
            propose=self._propose_as_leader,
            config=self.config,
            on_damage=self._damaged,
            surely_leads=self.raft.surely_leads,
            watch=self.push.on_topic,
            read_ahead=ReadAhead(self.storage.disk, self.runtime, self.storage.hours.path),
        )

    def _propose_as_leader(self, command: bytes, done: Done) -> None:
        """The dispatcher's: a grant of a term that is over must not reach the next leader, for nobody waits for it."""
        if self.leading:
            self.batcher.propose(command, done, self.leading)
        else:
            self.runtime.call_soon(done, None, NoLeader("this node does not lead (any more)"))

    def _damaged(self, hour: int, index: int, what: str) -> None:
        """A second's chain is broken at that entry, or its record: have both mended, then walk on."""

        def mended(data: bytes | None) -> None:
            if data is not None:
                self.dispatcher.repaired(hour)

        def entry_mended(data: bytes | None) -> None:
            store = self.storage.hours  # a snapshot may have come meanwhile
            if data is None or not store.count(hour):
                return
            row = store.entries(hour, slice(index, index + 1))[0]
            try:
                store.record(hour, int(row["offset"]), int(row["size"]), verify=True)
            except DamagedFile as damage:
                self.mender.mend(hour, ".log", damage.offset, damage.size, mended)
            else:
                mended(data)

        self.mender.mend(hour, ".idx", index * INDEX_SIZE, INDEX_SIZE, entry_mended)

    def _installed(self) -> None:
        """A snapshot was installed: go on from its state. Only a follower installs, so nothing waits here."""
        self.checkpoints.bytes_since = 0
        self.dispatcher.on_follower()
        try:
            self._load(self.storage.reopen())
        except Exception as error:  # of its disk, say: there is no state to go on with
            self.raft.fatal(error)
            return
        self._make_dispatcher()
        self.clock.raise_floor(self.ledger.now_ms)

    def _me(self) -> Peer:
        return local_peer(
            self.name, self.config.advertise, FEATURE_LEVEL, self.raft.applied_index, self.checkpoints.has_space()
        )

    def _clock_changed(self) -> None:
        """Elected, and cluster time is known: now this node leads. Until then it proposes nothing of its own."""
        self._say_what_clocks_do()
        if self._elected and not self.leading and self.clock.ready:
            self.leading = self._elected
            self._agree_on_settings()
            self._agree_on_level()
            self.dispatcher.on_leader(self.leading)
            self.push.on_leader()
            self.batcher.kick()
        elif self.leading:
            self.dispatcher.clock_changed()
            self._agree_on_level()

    def _agree_on_level(self) -> None:
        if (level := self.peers.common_level()) > self.ledger.level:
            self.batcher.propose(encode_feature(level), _ignore, self.leading)

    def _say_what_clocks_do(self) -> None:
        """A line when it changes, and not one a second when a clock is just about too far off."""
        alarms, mono = sorted(self.clock.alarms), self.runtime.monotonic()
        if alarms == self._alarms or mono < self._alarms_said + _ALARMS_S:
            return
        skews = {name: round(ms) for name, ms in sorted(self.clock.skews(mono).items())}
        if alarms:
            log.warning("clock_alarm", extra={"alarms": alarms, "skews_ms": skews})
        else:
            log.info("clock_fine", extra={"skews_ms": skews})
        self._alarms, self._alarms_said = alarms, mono

    def _agree_on_settings(self) -> None:
        """What apply decides by must be the same everywhere, whatever each node's file says: the leader's counts."""
        limits = self.config.limits
        wanted = {
            "max_delay_ms": limits.max_delay_ms,
            "idempotency_window_ms": limits.idempotency_window_ms,
            "idempotency_max_keys": limits.idempotency_keys,
            "auto_create_topics": limits.auto_create_topics,
            "max_lease_ms": self.config.http.max_lease_ms,
        }
        if not wanted.items() <= self.ledger.settings.to_map().items():
            self.batcher.propose(encode_settings(wanted), _ignore, self.leading)

    def _on_submit(self, peer: str, commands: Any, reply: Reply) -> None:
        """A follower's batch: its commands join the next entry here, and of this term: a node that was paused must not
        pass on what it was asked as leader, when others have answered that and forgotten its keys. Who asked does."""
        if not self.leading:
            reply(None, NoLeader("this node does not lead (any more)", retry_after_ms=50))
            return
        if self.batcher.queued_bytes > self.config.limits.publish_queue_bytes:
            reply(None, Overloaded("too many publishes are waiting for their commit", retry_after_ms=200))
            return
        if not isinstance(commands, list) or not all(map(is_whole, commands)) or any(c[0] in _NEVER for c in commands):
            # Before any of it is in an entry, where one that ends elsewhere would spoil the others.
            raise ValueError("a batch is a list of whole commands")
        self.dispatcher.before_settlement()
        gather = _Replies(len(commands), reply)
        full = self._no_space() if self.peers.full else ""
        for n, command in enumerate(commands):
            if kind_of(command) in _LEADERS:
                gather.take(n, Refused("malformed", "no other node than the leader asks for that"), None)
            elif full and command[0] == Command.PUBLISH:
                gather.take(n, Refused("disk_full", full), None)
            else:
                done = self.dispatcher.in_order(command, partial(gather.take, n))
                self.batcher.propose(self.dispatcher.settling(command), done, self.leading)

    def _on_ready(self, peer: str, payload: Any, reply: Reply) -> None:
        if self.leading:
            reply(self.dispatcher.topic_reports(), None)
        else:
            reply(None, NoLeader("this node does not lead (any more)", retry_after_ms=50))

    def _on_consumers(self, peer: str, topic: Any, reply: Reply) -> None:
        reply(self.dispatcher.askers.of(str(topic)) if self.leading else None, None)


#: A planned transfer, asked of another node: longer than it takes, whether it works or not.
_TRANSFER_S = 5.0
#: Members are changed by the leader alone, which looks first whether they may be.
_NEVER = frozenset({Command.MEMBERS})
#: What a leader knows by itself. A FEATURE that this program doesn't have would end every node, at each start again.
_LEADERS = frozenset({Command.FEATURE, Command.INCARNATION})


def _ignore(result: Any, error: HadelayError | None) -> None:
    """A leader that fails here is none any more; the next one proposes it again."""


class _Replies:
    """The results of a follower's commands, answered together."""

    def __init__(self, count: int, reply: Reply) -> None:
        self.results: list[Any] = [None] * count
        self.missing, self.reply = count, reply
        self.errors: list[HadelayError] = []

    def take(self, n: int, result: Any, error: HadelayError | None) -> None:
        self.results[n] = result
        self.errors += [error] if error is not None else []
        self.missing -= 1
        if self.missing:
            return
        if not self.errors:
            self.reply(self.results, None)
        elif len(self.errors) == len(self.results) and all(isinstance(e, NoLeader) for e in self.errors):
            self.reply(None, self.errors[0])
        else:
            # NoLeader would make the follower send all of it again, and a part of it may be in the log.
            self.reply(None, OutcomeUnknown("leadership changed before all commands finished"))


class _Outlet:
    """Where this node's batches go: into the log when it leads, over the link to the leader when another does."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def ready(self) -> bool:
        node = self.node
        if node.leading:
            return True
        leader = node.raft.leader
        return leader is not None and leader != node.name and node.raft.connected(leader)

    def term(self) -> int:
        return self.node.leading

    def to(self) -> str | None:
        return self.node.name if self.node.leading else self.node.raft.leader

    def send(self, commands: list[bytes], done: Callable[[Sequence[Any] | None, HadelayError | None], None]) -> None:
        node = self.node
        if node.leading:
            now_ms = node.clock.read(node.runtime.monotonic())
            node.raft.propose(encode_entry(now_ms, commands, node.ledger.level), done)
            return
        leader = node.raft.leader
        if leader is None:
            done(None, NoLeader("no leader"))
            return
        node.link.call(leader, "submit", commands, node.config.limits.commit_timeout_ms / 1000, done)


def raft_config(config: Config) -> RaftConfig:
    raft = config.raft
    return RaftConfig(
        election_min_ms=raft.election_min_ms,
        election_max_ms=raft.election_max_ms,
        heartbeat_ms=raft.heartbeat_ms,
        slow_sync_ms=raft.max_sync_ms,
        # A batch is closed once it is over max_entry_bytes: by one publish, at most as large again.
        max_entry_bytes=min(4 << 20, raft.segment_bytes // 4),
        window_bytes=raft.max_inflight_bytes,
        survivor=config.cluster.survivor,
        by_the_clock=config.dispatch.sync == "interval",
    )
