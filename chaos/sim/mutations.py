"""Deliberate bugs, switched on one at a time: each has to be noticed by the check named beside it.

A check that cannot fail is no check. Each mutation breaks the shipped classes in place for the time of a run; `faults`
are the families that give it a chance to matter.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec.structs import replace
from pyroaring import BitMap

from chaos.sim import promises
from chaos.sim.disk import SimDisk, SimFile
from hadelay.codec.commands import decode
from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import decode_entry, encode_entry
from hadelay.codec.results import GrantResult, LeaseOutcome, LeaseResult
from hadelay.handout.dispatcher import Dispatcher
from hadelay.handout.filters import Filter
from hadelay.ledger import grant, idempotency, keys, leases, lookup, publish, ttl, views
from hadelay.ledger.apply import _APPLY
from hadelay.ledger.hourstate import groups
from hadelay.ledger.keys import Decision
from hadelay.ledger.topics import Topics
from hadelay.ledger.transitions import settle
from hadelay.model import Event
from hadelay.platform.disk import RealDisk, RealFile
from hadelay.raft import messages
from hadelay.raft.apply import Applier
from hadelay.raft.election import Elections
from hadelay.raft.follower import Follower
from hadelay.raft.journal import Journal
from hadelay.raft.library import NO_OP, Core
from hadelay.raft.membership import Membership
from hadelay.raft.messages import AppendReply
from hadelay.raft.node import RaftNode
from hadelay.raft.peer import Peer
from hadelay.raft.ports import FOUNDING
from hadelay.raft.reads import Reads
from hadelay.raft.ready import Ready
from hadelay.raft.replication import Replication
from hadelay.raft.snapshot import Snapshots
from hadelay.server import groupcommit
from hadelay.server.clustertime import ClusterClock
from hadelay.server.delivery import cursor, interval
from hadelay.server.delivery.deferred import DeferredDeliveries
from hadelay.server.delivery.interval import IntervalHandout
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.delivery.term import Term
from hadelay.server.groupcommit import GroupCommit
from hadelay.server.leadership import Leadership
from hadelay.server.maintenance.leases import LeaseExpiry
from hadelay.server.node import Node
from hadelay.server.webhooks.call import Answer
from hadelay.server.webhooks.pool import Pool
from hadelay.server.webhooks.queues import WebhookQueue
from hadelay.storage.heads import HeadsCache
from hadelay.storage.tables import Tables

#: What stands in for methods and functions of the server while the bug is in.
Bug = list[AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutation:
    what: str
    #: Beginnings of the invariants' names, any of which counts.
    caught_by: tuple[str, ...]
    faults: tuple[str, ...]
    apply: Callable[[], Bug]
    #: Noticed by the simulator of Raft alone (chaos/sim/raftsim.py), whose faults these are.
    raft: bool = False
    #: The mode of hand-outs in which it matters; empty: either.
    sync: str = ""

    @property
    def families(self) -> dict[str, float]:
        """For the nemesis: these faults, all of them, and no others."""
        return dict.fromkeys(self.faults, 1.0)


@contextmanager
def broken(name: str) -> Iterator[Mutation]:
    """While this context is open, the bug is in."""
    mutation = MUTATIONS[name]
    with ExitStack() as patches:
        for one in mutation.apply():
            patches.enter_context(one)
        yield mutation


def _instead(*stand_ins: tuple[Any, str, Callable[..., Any]]) -> Callable[[], Bug]:
    """Of bugs that need no more: (what it is of, its name, what it is instead)."""
    return lambda: [patch.object(*one) for one in stand_ins]


def _skipped_sync() -> Bug:
    """Every fifth."""
    sync = SimDisk.sync

    def sometimes(disk: SimDisk, settle: Callable[[], None]) -> None:
        sync(disk, (lambda: None) if disk.syncs % 5 == 4 else settle)

    return [patch.object(SimDisk, "sync", sometimes)]


def _swallowed_sync_error() -> Bug:
    def careless(sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def careless(file: Any) -> None:
            with suppress(OSError):
                sync(file)

        return careless

    return [
        patch.object(SimFile, "sync", careless(SimFile.sync)),
        patch.object(RealFile, "sync", careless(RealFile.sync)),
    ]


def _answer_before_sync() -> Bug:
    """A follower's yes leaves before its disk has the entries."""

    def answer(follower: Follower, message: Any, ready: Ready) -> None:
        journal = follower._journal
        journal.synced_index = max(journal.synced_index, follower.verified)
        follower._send_ok(message.round, ready)

    return [patch.object(Follower, "_answer", answer)]


def _commit_alone() -> Bug:
    """The leader counts every peer as soon as its own disk has the entry."""

    def synced(leader: Replication, ready: Ready) -> None:
        for peer in leader._members.peers.values():
            leader._core.acknowledged(peer.name, leader._journal.synced_index)
        ready.advance = True

    return [patch.object(Replication, "count_all", synced)]


def _answered_before_commit() -> Bug:
    """A consumer is told `acked` as soon as its ack is on its way."""
    propose = GroupCommit.propose

    def at_once(self: GroupCommit, command: bytes, done: Any, term: int = 0) -> None:
        ((kind, body),) = decode_entry(encode_entry(0, [command]))[2]
        leases = decode(kind, body)[1] if kind == Command.SETTLE else None
        if kind == Command.ACK:
            leases = decode(kind, body)
        if leases is None or (kind == Command.SETTLE and body[0] != Command.ACK):
            propose(self, command, done, term)
            return
        propose(self, command, lambda result, error: None)
        done(LeaseResult(np.full(len(leases.rows), LeaseOutcome.DONE, np.uint8)), None)

    return [patch.object(GroupCommit, "propose", at_once)]


def _plain_library() -> Bug:
    """Rows 1 and 2: a success sets `next` back, so that batches are sent twice; and what follows the first entry of a
    batch is cut, even where it matches."""
    matched = Peer.matched

    def back(peer: Peer, index: int) -> None:
        matched(peer, index)
        peer.next = peer.match + 1

    def take_all(follower: Follower, entries: list[Any], now: float, ready: Ready) -> list[Any]:
        journal = follower._journal
        if entries[0][1] > journal.base_index and entries[0][1] <= journal.last_index:
            journal.truncate(entries[0][1])
        return entries

    return [patch.object(Follower, "_skip_known", take_all), patch.object(Peer, "matched", back)]


def _forgotten_vote() -> Bug:
    vote = Journal.vote

    def forget(journal: Journal, term: int, voted_for: str | None) -> None:
        vote(journal, term, None)
        journal.voted_for = voted_for

    return [patch.object(Journal, "vote", forget)]


def _dispatch_before_commit() -> Bug:
    """Commit mode hands out like interval mode."""

    def at_once(loop: DeliveryLoop, term: Term) -> IntervalHandout:
        return IntervalHandout(term, loop.config, loop.has_leader_lease)

    return [patch.object(DeliveryLoop, "_make_handout", at_once)]


def _unfenced_grant() -> Bug:
    """What a leader did not get into the log goes to the next one."""

    def anyhow(leadership: Leadership, command: bytes, done: Any) -> None:
        leadership._group_commit.propose(command, done)

    return [patch.object(Leadership, "propose", anyhow)]


def _five_ms_early() -> Bug:
    encode = vars(groupcommit)["encode_publish"]

    def early(node: str, drafts: Any, key: bytes | None = None) -> bytes:
        sooner = [replace(d, when_ms=d.when_ms - 5) if d.relative else d for d in drafts]
        command: bytes = encode(node, sooner, key)
        return command

    return [patch.object(groupcommit, "encode_publish", early)]


def _published_as(change: Callable[[Any], Any]) -> Callable[[], Bug]:
    """What is stored is not what was published. change: of each Draft."""
    encode = vars(groupcommit)["encode_publish"]

    def other(node: str, drafts: Any, key: bytes | None = None) -> bytes:
        command: bytes = encode(node, [change(draft) for draft in drafts], key)
        return command

    return lambda: [patch.object(groupcommit, "encode_publish", other)]


def _short_leases() -> Bug:
    """Leases end half a second before the time that consumers are told."""
    apply_grant = _APPLY[Command.GRANT]

    def shorter(ledger: Any, command: Any) -> Any:
        known = set(ledger.grants)
        result = apply_grant(ledger, command)
        for key in ledger.grants.keys() - known:
            ledger.grants[key].rows["until_ms"] -= 500
        return result

    add = LeaseExpiry.add
    return [
        patch.dict(_APPLY, {Command.GRANT: shorter}),
        patch.object(LeaseExpiry, "add", lambda expiry, until_ms, key: add(expiry, until_ms - 500, key)),
    ]


def _unmarked() -> Bug:
    """Interval mode: what may have been handed out before is not marked."""
    first_time = vars(interval)["first_time"]

    def unmarked(*args: Any) -> Any:
        delivery = first_time(*args)
        return delivery._replace(redelivered=np.zeros(len(delivery.redelivered), np.bool_))

    return [patch.object(interval, "first_time", unmarked)]


def _second_answer() -> Bug:
    """Who asks again under an idempotency key is told another id."""
    answer = idempotency._answer

    def other(stored: bytes, fingerprint: int, first: int, count: int, result: Any) -> None:
        answer(stored, fingerprint, first, count, result)
        result.ids[first : first + count] += np.uint64(1)

    return [patch.object(idempotency, "_answer", other)]


def _fast_clock() -> Bug:
    """A leader's clock runs a hundredth fast."""

    def hasten(clock: ClusterClock, agreed: float | None, mono: float) -> None:
        clock._anchor(clock.exact(mono), mono)
        clock._rate = 1.01

    return [patch.object(ClusterClock, "_slew", hasten)]


def _other_entry() -> Bug:
    """A follower applies something else than what is committed."""
    apply = Applier._apply

    def other(applier: Applier, entry: Any, *rest: Any) -> None:
        command, index, term, record = entry
        if command != NO_OP and not index % 50 and applier._members.name == "n2":
            command = encode_entry(0, [])
        apply(applier, (command, index, term, record), *rest)

    return [patch.object(Applier, "_apply", other)]


def _other_results() -> Bug:
    """What a node answers depends on its name."""
    apply_grant = _APPLY[Command.GRANT]

    def other(ledger: Any, command: Any) -> Any:
        result = apply_grant(ledger, command)
        if isinstance(result, GrantResult):
            result.until_ms += id(ledger) % 97
        return result

    return [patch.dict(_APPLY, {Command.GRANT: other})]


def _two_votes() -> Bug:
    """Who has voted votes again."""
    request = Core.vote_requested

    def again(core: Core, *args: Any) -> None:
        core._SyncObj__votedForNodeId = None
        request(core, *args)

    return [patch.object(Core, "vote_requested", again)]


def _one_vote_elects() -> Bug:
    """A candidate counts the first vote that it gets for all."""
    reply = Elections.on_vote_reply

    def elected(elections: Elections, peer: Peer, term: int, now: float, ready: Ready) -> None:
        reply(elections, peer, term, now, ready)
        for name in elections._members.others:
            elections._core.voted(name, term)

    return [patch.object(Elections, "on_vote_reply", elected)]


def _forgotten_term() -> Bug:
    """A term in which this node has not voted is not written down."""
    vote = Journal.vote

    def forget(journal: Journal, term: int, voted_for: str | None) -> None:
        if voted_for is None:
            journal.term, journal.voted_for = term, None
        else:
            vote(journal, term, voted_for)

    return [patch.object(Journal, "vote", forget)]


def _commit_index_back() -> Bug:
    """A follower takes its commit index from a new leader's first heartbeat, also if that is lower."""
    follow = Follower._follow

    def back(follower: Follower, *args: Any) -> None:
        follow(follower, *args)
        core = follower._core
        core._SyncObj__raftCommitIndex = max(follower._journal.base_index, core.commit_index - 1)

    return [patch.object(Follower, "_follow", back)]


def _applied_before_sync() -> Bug:
    """A follower applies what is committed before its own disk has it."""
    run = Applier.run

    def ahead(applier: Applier, now: float, ready: Ready) -> None:
        journal = applier._journal
        synced, journal.synced_index = journal.synced_index, journal.last_index
        try:
            run(applier, now, ready)
        finally:
            journal.synced_index = min(synced, journal.last_index)

    return [patch.object(Applier, "run", ahead)]


def _lost_tail() -> Bug:
    """A journal that is opened forgets its last entry."""
    begin = Journal._begin_anew

    def shorter(journal: Journal, durable: tuple[int, int]) -> None:
        begin(journal, durable)
        if journal.last_index > journal.base_index + 1:
            journal.truncate(journal.last_index)
            journal._write_all()

    return [patch.object(Journal, "_begin_anew", shorter)]


def _goes_on() -> Bug:
    """A node whose sync failed goes on."""
    fatal = RaftNode.fatal

    def ignore(node: RaftNode, error: BaseException) -> None:
        if not isinstance(error, OSError) or error.errno != errno.EIO:
            fatal(node, error)

    return [patch.object(RaftNode, "fatal", ignore)]


def _few_waiting() -> Bug:
    """/metrics shows half of what waits."""
    measured = promises.measured

    def fewer(node: Node) -> dict[str, Any]:
        shown = measured(node)
        shown["messages"]["waiting",] //= 2
        return shown

    return [patch.object(promises, "measured", fewer)]


def _not_held_back() -> Bug:
    def at_once(held: DeferredDeliveries, poll: Any, delivery: Any, release: Callable[[Any], None]) -> None:
        release(delivery._replace(now_ms=held._clock.read(held._runtime.monotonic())))

    return [patch.object(DeferredDeliveries, "until_due", at_once)]


def _wall_clock_stamps() -> Bug:
    """Every node follows its own wall clock whenever it leads."""
    observe = ClusterClock.observe_wall

    def believe(clock: ClusterClock, node: str, wall_ms: int, mono: float, *more: Any) -> None:
        observe(clock, node, wall_ms, mono, *more)
        if clock.leading and node == clock.node:
            clock._anchor(float(wall_ms), mono)

    return [patch.object(ClusterClock, "observe_wall", believe)]


def _reused_attempt() -> Bug:
    """What returns to waiting keeps its attempt number."""
    lease = grant._lease

    def again(ledger: Any, hour: int, rows: Any, *more: Any) -> None:
        lease(ledger, hour, rows, *more)
        rows["attempt"] = 1

    return [patch.object(grant, "_lease", again)]


def _dropped_ack() -> Bug:
    """An ack is answered and, for some messages, the lease runs on."""
    settle = vars(leases)["settle"]

    def forget(ledger: Any, hour: int, rows: Any, event: Any, **more: Any) -> None:
        if int(rows["index"][0]) % 7:
            settle(ledger, hour, rows, event, **more)
        else:
            ledger.hour_state(hour).leased -= BitMap(rows["index"])
            ledger.listener.on_filed(hour, ledger.store.entries(hour, rows["index"]))

    return [patch.object(leases, "settle", forget)]


def _dropped_message() -> Bug:
    """What is acknowledged is stored, but for some it is over at once."""
    filed = vars(publish)["filed"]

    def drop(ledger: Any, hours: Any, rows: Any) -> None:
        filed(ledger, hours, rows)
        lost = rows["index"] % 29 == 28
        for hour, where in groups(np.broadcast_to(hours, len(rows))[lost]):
            settle(ledger, hour, rows[lost][where], Event.CANCELLED, leased=False)

    return [patch.object(publish, "filed", drop)]


def _one_attempt_more() -> Bug:
    """max_attempts allows one more."""
    limits = leases.ReturnedLeases._limits

    def more(giving: Any, held: Any) -> Any:
        return limits(giving, held) + 1

    return [patch.object(leases.ReturnedLeases, "_limits", more)]


def _no_ttl() -> Bug:
    """What is over is handed out all the same."""

    def never(ledger: Any, rows: Any, now_ms: int) -> Any:
        return np.zeros(len(rows), np.bool_)

    return [
        patch.object(grant, "expired", never),
        patch.object(leases, "expired", never),
        patch.object(views, "expired", never),
        patch.object(ttl, "_expire", lambda *_: 0),
    ]


def _no_max_wait() -> Bug:
    """The first publish of a chain counts for no other."""
    decide = Decision._decide

    def forget(decision: Decision, row: int, *more: Any) -> None:
        decide(decision, row, *more)
        decision._starts.pop(row, None)

    return [patch.object(Decision, "_decide", forget)]


def _miscounted() -> Bug:
    """A batch counts as one message more."""
    count = publish._count

    def more(ledger: Any, command: Any, numbers: Any, take: Any) -> None:
        count(ledger, command, numbers, take)
        ledger.topics[int(numbers[0])].published += int(len(take) > 4)

    return [patch.object(publish, "_count", more)]


def _boastful_metrics() -> Bug:
    """/metrics shows twice as many acks."""
    measured = promises.measured

    def more(node: Node) -> dict[str, Any]:
        shown = measured(node)
        shown["settled_messages_total"]["acked",] *= 2
        return shown

    return [patch.object(promises, "measured", more)]


def _cursor_ahead() -> Bug:
    """The cursor is moved before what it stands for is handed out."""
    encode = vars(cursor)["encode_cursor"]

    def ahead(hour: int, second: int, local: int) -> bytes:
        hours, seconds = divmod(second + 8, 3600)
        command: bytes = encode(hour + hours, seconds, local)
        return command

    return [patch.object(cursor, "encode_cursor", ahead)]


def _wrong_local_index() -> Bug:
    """After a restart a second's chain is thought to end one entry before it does."""
    scan = HeadsCache._scan

    def short(heads: HeadsCache, hour: int, derived: Any, entries: int) -> None:
        scan(heads, hour, derived, entries - 1 if entries > derived.entries + 1 else entries)
        derived.entries = entries

    return [patch.object(HeadsCache, "_scan", short)]


def _keys_ahead() -> Bug:
    """Idempotency keys reach the disk before the checkpoint that they belong to."""
    put = Tables.put

    def early(tables: Tables, table: bytes, key: bytes, value: bytes) -> None:
        put(tables, table, key, value)
        if table.startswith(b"idem:"):
            tables.backend.commit([], [(table, key, value)])

    return [patch.object(Tables, "put", early)]


def _local_apply() -> Bug:
    """What apply computes depends on the process, and on what it hashes strings to: due times are up to 50 ms late."""
    resolve = publish._resolve
    processes: dict[int, int] = {}

    def rounded(ledger: Any, *rest: Any) -> Any:
        return resolve(ledger, *rest) + (processes.setdefault(id(ledger), len(processes)) + hash("late")) % 50

    return [patch.object(publish, "_resolve", rounded)]


def _wiped_node_votes() -> Bug:
    note = Journal.create.__func__  # type: ignore[attr-defined]

    def trusted(cls: type[Journal], *args: Any, **more: Any) -> Journal:
        journal: Journal = note(cls, *args, **more)
        journal.admitted = True
        return journal

    return [patch.object(Journal, "create", classmethod(trusted))]


def _members_when_applied() -> Bug:
    derive = Membership._derive

    def late(membership: Membership) -> None:
        appended, membership.appended_lists = membership.appended_lists, []
        derive(membership)
        membership.appended_lists = appended

    return [patch.object(Membership, "_derive", late)]


def _error_in_apply() -> Bug:
    """Filing a message ends in an error of the disk that no disk had."""
    filed = vars(publish)["filed"]

    def fail(ledger: Any, hours: Any, rows: Any) -> None:
        if (rows["index"] % 97 == 96).any():
            raise FileNotFoundError(errno.ENOENT, "no such file", "hours/1")
        filed(ledger, hours, rows)

    return [patch.object(publish, "filed", fail)]


def _deaf_after_transfer() -> Bug:
    """Whoever was told to take over hears no leader until its next campaign."""
    heard, campaign = Elections.heard_leader, Elections.campaign
    deaf: set[Elections] = set()

    def told(elections: Elections, now: float, ready: Ready, *, called: bool = False) -> None:
        (deaf.add if called else deaf.discard)(elections)
        campaign(elections, now, ready, called=called)

    def hear(elections: Elections, now: float) -> None:
        deadline = elections._deadline
        heard(elections, now)
        if elections in deaf:
            elections._deadline = deadline

    return [patch.object(Elections, "campaign", told), patch.object(Elections, "heard_leader", hear)]


def _vote_before_sync() -> Bug:
    """A vote leaves before this disk has it."""

    def at_once(elections: Elections, name: str, term: int, ready: Ready) -> None:
        if elections._members.connected(name):
            ready.send(name, messages.encode(messages.VOTE_REPLY, term))

    return [patch.object(Elections, "vote", at_once)]


def _unsynced_name() -> Bug:
    """The name of the segment that a truncation begins is not synced."""
    truncate = Journal.truncate

    def forget(journal: Journal, index: int) -> None:
        names_changed = journal._names_changed
        truncate(journal, index)
        journal._names_changed = names_changed

    return [patch.object(Journal, "truncate", forget)]


def _kept_verified() -> Bug:
    """What was verified against one leader's log counts for the next one's."""
    follow = Follower._follow

    def keep(follower: Follower, *args: Any) -> None:
        verified = follower.verified
        follow(follower, *args)
        follower.verified = verified

    return [patch.object(Follower, "_follow", keep)]


def _read_before_no_op() -> Bug:
    """A new leader answers reads before an entry of its own term is committed."""
    begin = Replication.begin

    def early(leader: Replication, now: float, ready: Ready) -> None:
        begin(leader, now, ready)
        leader._core.no_op = 0

    return [patch.object(Replication, "begin", early)]


def _old_reply() -> Bug:
    """An answer to an append of an earlier term counts in this one."""
    on_reply = Replication.on_reply

    def count(leader: Replication, peer: Peer, reply: AppendReply, now: float, ready: Ready) -> None:
        if reply.status == messages.OK and reply.term < leader._core.term:
            reply = reply._replace(term=leader._core.term)
        on_reply(leader, peer, reply, now, ready)

    return [patch.object(Replication, "on_reply", count)]


def _commit_past_snapshot() -> Bug:
    """After a snapshot the commit index is one too high."""
    switch = Snapshots._switch

    def further(snapshots: Snapshots, *args: Any) -> None:
        switch(snapshots, *args)
        if snapshots._stats.snapshots_installed == 1:
            snapshots._core.jump(snapshots._core.commit_index + 1)

    return [patch.object(Snapshots, "_switch", further)]


def _short_window() -> Bug:
    """Idempotency keys live for a sixtieth of their time."""
    turn = idempotency.turn

    def early(ledger: Any) -> None:
        window_ms = ledger.settings.idempotency_window_ms
        settings, ledger.settings = (
            ledger.settings,
            dataclasses.replace(ledger.settings, idempotency_window_ms=window_ms // 60),
        )
        try:
            turn(ledger)
        finally:
            ledger.settings = settings

    return [patch.object(idempotency, "turn", early)]


def _kept_ttl() -> Bug:
    """A reschedule leaves the end of the TTL where it was."""
    return [patch.object(ttl, "begin_again", lambda *_: None)]


def _silent_expiry() -> Bug:
    """What is given back behind its TTL is over, and nobody writes that down."""

    def quiet(giving: Any, hour: int, held: Any, previous: Any, event: Event) -> None:
        ledger = giving.ledger
        if event is Event.TTL_EXPIRED:
            ledger.hour_state(hour).leased -= BitMap(held["index"])
        else:
            end(giving, hour, held, previous, event)

    end = leases.ReturnedLeases._end
    return [patch.object(leases.ReturnedLeases, "_end", quiet)]


def _ignored_retry_after() -> Bug:
    """A receiver's Retry-After is not heard."""
    called = Pool._called

    def deaf(pool: Pool, feed: Any, job: Any, url: str, host: str, answer: Answer) -> None:
        called(pool, feed, job, url, host, answer._replace(retry_after_ms=None))

    return [patch.object(Pool, "_called", deaf)]


def _any_answer_is_yes() -> Bug:
    """A call that was answered counts as done, whatever the answer."""
    called = Pool._called

    def pleased(pool: Pool, feed: Any, job: Any, url: str, host: str, answer: Answer) -> None:
        called(pool, feed, job, url, host, answer._replace(reason="") if answer.status else answer)

    return [patch.object(Pool, "_called", pleased)]


def _long_calls() -> Bug:
    """A call may outlast its lease."""
    set_ = WebhookQueue.set

    def brief(queue: WebhookQueue, *args: Any) -> None:
        set_(queue, *args)
        queue.lease_ms, queue.needs_s = 100, 0.0

    return [patch.object(WebhookQueue, "set", brief)]


_CRASHES = ("kill", "power_cut", "power_cut_all", "reset", "partition")
#: A journal that lost what it promised may notice by itself, and stop.
_LOG = ("I1 ", "I12", "I13", "I14", "I17")

#: Seeds that are tried before a bug counts as not noticed.
SEEDS = range(1, 61)


MUTATIONS: dict[str, Mutation] = {
    "no_sync": Mutation(
        "no sync reaches the disk", _LOG, ("power_cut_all", "kill"),
        _instead(
            (SimDisk, "sync", lambda disk, settle: None), (RealFile, "sync", lambda file: None),
            (RealDisk, "sync_dir", lambda disk, path: None), (RealDisk, "sync_files", lambda disk, paths, root: None),
        ),
    ),
    "skipped_sync": Mutation("every fifth sync is skipped", _LOG, ("power_cut_all", "power_cut"), _skipped_sync),
    "error_in_apply": Mutation("apply raises an OSError that no disk raised", ("I17",), (), _error_in_apply),
    "swallowed_sync_error": Mutation(
        "an error of fdatasync is ignored", ("I17",), ("failed_sync",), _swallowed_sync_error
    ),
    "answer_before_sync": Mutation(
        "a follower acknowledges before its disk has it", _LOG, ("power_cut_all", "slow_sync"), _answer_before_sync
    ),
    "commit_alone": Mutation("the leader commits without a majority", ("I14",), _CRASHES, _commit_alone),
    "answered_before_commit": Mutation(
        "an ack is answered before its commit", ("I5", "I6"), _CRASHES, _answered_before_commit
    ),
    "plain_library": Mutation(
        "PySyncObj's own follower and sender: batches are sent twice, and matching entries are cut",
        _LOG,
        ("reset", "kill", "one_way"),
        _plain_library,
    ),
    "forgotten_vote": Mutation("a vote is not written down", ("I13", "I12", "I1 "), _CRASHES, _forgotten_vote),
    "wiped_node_votes": Mutation(
        "a node with an empty disk votes at once", _LOG, ("wipe", "kill", "partition"), _wiped_node_votes
    ),
    "members_when_applied": Mutation(
        "a change of the members is in force only when it is applied", _LOG, ("members",), _members_when_applied
    ),
    "two_lists_at_once": Mutation(
        "a leader changes the members before an entry of its own term is committed", _LOG, ("members",),
        _instead((Membership, "refusal", lambda membership, members: None)),
    ),
    "kept_change": Mutation(
        "a change of the members that is cut off from the log stays in force", ("I13 log safety, members",),
        ("members",),
        _instead((Membership, "truncated", lambda membership, index, now, ready: None)),
    ),
    "founder_joins": Mutation(
        "who is added is taken for a founder until that is committed", ("I12",), ("members",),
        _instead((Membership, "min_incarnation", lambda self, name: self._machine.incarnation(name) or FOUNDING)),
    ),
    "dispatch_before_commit": Mutation(
        "hand-outs precede their commit", ("I6",), ("partition", "pause", "kill"), _dispatch_before_commit
    ),
    "unfenced_grant": Mutation(
        "a grant of a leader that lost office reaches the next one", ("I16",), _CRASHES, _unfenced_grant
    ),
    "five_ms_early": Mutation("delays are 5 ms short", ("I9",), (), _five_ms_early),
    "not_held_back": Mutation("grants ahead of their time are answered at once", ("I9",), (), _not_held_back),
    # Messages come early, or leases end early: in true time, both.
    "wall_clock_stamps": Mutation(
        "cluster time follows one wall clock", ("I6 double lease, true time",), ("clock_step",), _wall_clock_stamps
    ),
    "cursor_ahead": Mutation("the cursor is ahead of what it stands for", ("I10",), ("kill", "stop"), _cursor_ahead),
    "deaf_wheel": Mutation(
        "the wheel is not told of new messages", ("forgotten",), (),
        _instead((Dispatcher, "on_filed", lambda *_: None)),
    ),
    "reused_attempt": Mutation("attempt numbers are used again", ("I6",), (), _reused_attempt),
    "dropped_ack": Mutation("an acked message is still owed", ("I5", "I6"), (), _dropped_ack),
    "dropped_message": Mutation("one message in 29 is never handed out", ("I1 ",), (), _dropped_message),
    "ignored_cancel": Mutation(
        "a cancelled message is still owed", ("I3",), (), _instead((lookup, "settle", lambda *args, **more: None))
    ),
    "ignored_purge": Mutation(
        "a purged message is still owed", ("I3",), (),
        _instead((Topics, "end", lambda topics, topic: topics.note_work(topic))),
    ),
    "one_attempt_more": Mutation("max_attempts allows one attempt more", ("attempts",), (), _one_attempt_more),
    "no_ttl": Mutation("what is past its TTL is handed out", ("TTL",), ("kill", "pause"), _no_ttl),
    "no_max_wait": Mutation("max_wait counts from the last publish", ("max_wait",), (), _no_max_wait),
    "forgotten_key": Mutation(
        "idempotency keys are forgotten", ("I8", "I1 "), ("reset", "kill"),
        _instead((idempotency, "remember", lambda *args: None)),
    ),
    "keys_ahead": Mutation("the key index is ahead of the checkpoint", ("I12", "I1 "), ("kill",), _keys_ahead),
    "blind_key": Mutation(
        "two messages of one client key are pending", ("one per key",), (),
        _instead((keys, "_pending", lambda ledger, message_id: (None, False))),
    ),
    "wrong_local_index": Mutation(
        "after a restart a second's chain ends too early", ("I12", "I15", "forgotten"), ("kill", "stop"),
        _wrong_local_index,
    ),
    "ignored_filter": Mutation(
        "who asks for tags gets others as well", ("filters",), (),
        _instead(
            (Filter, "may", lambda self, masks: np.ones(len(masks), np.bool_)),
            (Filter, "matches", lambda self, tags: True),
        ),
    ),
    "unconfirmed_read": Mutation(
        "a read does not wait for what was committed before it", ("stale read",), ("pause", "partition", "slow_link"),
        _instead((Reads, "read", lambda self, done, now, ready: done(None))),
    ),
    "deaf_after_transfer": Mutation(
        "who was told to take over does not wait for a healthy leader until its next campaign",
        ("campaigns",), ("transfer",), _deaf_after_transfer,
    ),
    "vote_before_sync": Mutation(
        "a vote leaves before its sync", ("I13",), ("power_at_send", "kill"), _vote_before_sync, raft=True
    ),
    "unsynced_name": Mutation(
        "the name of the segment that a truncation begins is not synced", _LOG, ("split", "power", "power_at_send"),
        _unsynced_name, raft=True,
    ),
    "unsynced_snapshot": Mutation(
        "the files of a snapshot are not synced", _LOG, ("power_at_send", "power_cut", "kill", "partition"),
        _instead((SimDisk, "sync_files", lambda disk, paths, root: None)),
    ),
    "kept_verified": Mutation(
        "what was verified against one leader's log counts for the next one's", ("what leaders count",),
        ("split", "reset", "kill"),
        _kept_verified, raft=True,
    ),
    "read_before_no_op": Mutation(
        "a new leader answers reads before an entry of its own term is committed", ("I17", "stale read"),
        ("kill", "slow"), _read_before_no_op, raft=True,
    ),
    "old_reply": Mutation(
        "an answer to an append of an earlier term counts", ("what leaders count",),
        ("split", "transfer", "oneway"), _old_reply,
        raft=True,
    ),
    "commit_past_snapshot": Mutation(
        "after a snapshot the commit index is one too high", ("I13",), ("kill", "cut"), _commit_past_snapshot,
        raft=True,
    ),
    "short_window": Mutation(
        "idempotency keys live for a sixtieth of their time", ("I8 duplicate, handed out",), _CRASHES, _short_window
    ),
    "kept_ttl": Mutation("a reschedule keeps the end of the TTL", ("TTL", "I1 "), ("kill",), _kept_ttl),
    "silent_expiry": Mutation(
        "what is given back behind its TTL is not written down", ("TTL, written",), ("kill",), _silent_expiry
    ),
    "foreign_body": Mutation(
        "a body is stored that nobody sent", ("I3 phantom",), (), _published_as(lambda d: replace(d, body=d.body[::-1]))
    ),
    "short_body": Mutation(
        "the last byte of a body is lost", ("I3 phantom, body",), (),
        _published_as(lambda d: replace(d, body=d.body[:-1]) if len(d.body) > 5 else d),
    ),
    "lost_tags": Mutation(
        "tags are stored for filters only", ("I3 phantom, tags",), (), _published_as(lambda d: replace(d, meta=b""))
    ),
    "early_time_of_day": Mutation(
        "a time of day is taken 600 ms early", ("I9 early, time of day",), (),
        _published_as(lambda d: d if d.relative else replace(d, when_ms=d.when_ms - 600)),
    ),
    "short_leases": Mutation("leases end half a second early", ("I6 double lease, overlap",), (), _short_leases),
    "unmarked": Mutation(
        "interval mode: what comes again after a take-over is not marked", ("I6 double lease, interval",), _CRASHES,
        _unmarked, sync="interval",
    ),
    "second_answer": Mutation("a repeated publish is told another id", ("I8 duplicate, told",), (), _second_answer),
    "fast_clock": Mutation("a leader's clock runs a hundredth fast", ("I9 early, clock",), (), _fast_clock),
    "other_entry": Mutation("a node applies another entry", ("I12 divergence, entries",), (), _other_entry),
    "other_results": Mutation("what a node answers depends on it", ("I12 divergence, results",), (), _other_results),
    "two_votes": Mutation(
        "who has voted votes again", ("I13 log safety, votes",), ("cut", "kill", "reset"), _two_votes, raft=True
    ),
    "one_vote_elects": Mutation(
        "the first vote that a candidate gets elects it", ("I13 log safety, leaders",), ("cut", "kill", "reset"),
        _one_vote_elects, raft=True,
    ),
    "forgotten_term": Mutation(
        "a term without a vote is not written down", ("I13 log safety, term",), _CRASHES, _forgotten_term
    ),
    "commit_index_back": Mutation(
        "a new leader's heartbeat sets the commit index back", ("I13 log safety, commit index back",), ("kill", "cut"),
        _commit_index_back, raft=True,
    ),
    "applied_before_sync": Mutation(
        "a follower applies before its own disk has the entry", ("I14 durability, applied",), ("slow_sync",),
        _applied_before_sync,
    ),
    "lost_tail": Mutation(
        "a journal that is opened forgets its last entry", ("I14 durability, restart",), ("kill", "stop"), _lost_tail
    ),
    "goes_on": Mutation(
        "a node whose sync failed goes on", ("I17 fail-stop, failed sync",), ("failed_sync",), _goes_on
    ),
    "few_waiting": Mutation(
        "/metrics shows half of what waits", ("I18 metrics honesty, waiting",), (), _few_waiting
    ),
    "always_sure": Mutation(
        "interval mode: whoever leads is sure that nobody else does", ("I16 fenced leader, interval",),
        ("partition", "pause", "one_way"), _instead((RaftNode, "has_leader_lease", lambda node: node.is_leader)),
        sync="interval",
    ),
    "kept_poll": Mutation(
        "the receive of a consumer that hung up goes on waiting", ("hang-ups",), (),
        _instead((DeliveryLoop, "cancel_poll", lambda dispatcher, poll: None)),
    ),
    "ignored_retry_after": Mutation(
        "a webhook's Retry-After is ignored", ("webhooks, Retry-After",), (), _ignored_retry_after
    ),
    "any_answer_is_yes": Mutation(
        "a webhook's message is done however the call was answered", ("I1 ",), (), _any_answer_is_yes
    ),
    "long_calls": Mutation(
        "a webhook's call may outlast its lease", ("webhooks, one at a time",), (), _long_calls
    ),
    "lost_timer": Mutation(
        "no lease ever runs out", ("I15",), (), _instead((LeaseExpiry, "add", lambda expiry, until_ms, key: None))
    ),
    "local_apply": Mutation("apply depends on the process", ("I12",), (), _local_apply),
    "miscounted": Mutation("a batch counts as one message more", ("I2",), (), _miscounted),
    "boastful_metrics": Mutation("/metrics shows twice as many acks", ("I18",), (), _boastful_metrics),
}  # fmt: skip
