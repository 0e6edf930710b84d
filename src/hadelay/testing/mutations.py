"""Deliberate bugs, switched on one at a time: each has to be noticed by the check named beside it.

A check that cannot fail is no check. Each mutation breaks the shipped classes in place for the time of a run; `faults`
are the families that give it a chance to matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from pyroaring import BitMap

from hadelay.core import idempotency, keys, leases, owed, places, publish, ttl
from hadelay.core.clustertime import ClusterClock
from hadelay.core.commands import Command, decode, decode_entry, encode_entry
from hadelay.core.dispatch import Dispatcher
from hadelay.core.filters import Filter
from hadelay.core.keys import Decision
from hadelay.core.lifecycle import settle
from hadelay.core.results import LeaseOutcome, LeaseResult
from hadelay.core.topics import Topics
from hadelay.model import Event
from hadelay.raft.admission import Admission
from hadelay.raft.follower import Follower
from hadelay.raft.journal import Journal
from hadelay.raft.leader import Leader
from hadelay.raft.membership import Membership
from hadelay.raft.peer import Peer
from hadelay.raft.ports import FOUNDING
from hadelay.raft.reads import Reads
from hadelay.server import batcher, cursor
from hadelay.server.ahead import HeldBack
from hadelay.server.batcher import Batcher
from hadelay.server.dispatcher import LeaderDispatcher
from hadelay.server.expiry import Expiry
from hadelay.server.node import Node
from hadelay.storage.disk import RealDisk, RealFile
from hadelay.storage.heads import HeadsCache
from hadelay.storage.tables import Tables
from hadelay.testing import invariants
from hadelay.testing.disk import SimDisk, SimFile


@dataclass(frozen=True)
class Mutation:
    what: str
    #: Beginnings of the invariants' names, any of which counts.
    caught_by: tuple[str, ...]
    faults: tuple[str, ...]
    apply: Callable[[], Iterator[None]]

    @property
    def families(self) -> dict[str, float]:
        """For the nemesis: these faults, all of them, and no others."""
        return dict.fromkeys(self.faults, 1.0)


@contextmanager
def broken(name: str) -> Iterator[Mutation]:
    """While this context is open, the bug is in."""
    mutation = MUTATIONS[name]
    with contextmanager(mutation.apply)():
        yield mutation


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    saved = owner.__dict__[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, saved)


def _no_sync() -> Iterator[None]:
    with (
        _patched(SimDisk, "sync", lambda disk, settle: None),
        _patched(RealFile, "sync", lambda file: None),
        _patched(RealDisk, "sync_dir", lambda disk, path: None),
        _patched(RealDisk, "sync_files", lambda disk, paths, root: None),
    ):
        yield


def _skipped_sync() -> Iterator[None]:
    """Every fifth."""
    sync = SimDisk.sync

    def sometimes(disk: SimDisk, settle: Callable[[], None]) -> None:
        sync(disk, (lambda: None) if disk.syncs % 5 == 4 else settle)

    with _patched(SimDisk, "sync", sometimes):
        yield


def _swallowed_sync_error() -> Iterator[None]:
    def careless(sync: Callable[[Any], None]) -> Callable[[Any], None]:
        def careless(file: Any) -> None:
            with suppress(OSError):
                sync(file)

        return careless

    with (
        _patched(SimFile, "sync", careless(SimFile.sync)),
        _patched(RealFile, "sync", careless(RealFile.sync)),
    ):
        yield


def _answer_before_sync() -> Iterator[None]:
    """A follower's yes leaves before its disk has the entries."""

    def answer(follower: Follower, message: Any) -> None:
        journal = follower.node.journal
        journal.synced_index = max(journal.synced_index, follower.verified)
        follower._send_ok(message.round)

    with _patched(Follower, "_answer", answer):
        yield


def _commit_alone() -> Iterator[None]:
    """The leader counts every peer as soon as its own disk has the entry."""

    def synced(leader: Leader) -> None:
        node = leader.node
        for peer in node.peers.values():
            node.core.acknowledged(peer.name, node.journal.synced_index)
        node.advance()

    with _patched(Leader, "synced", synced):
        yield


def _answered_before_commit() -> Iterator[None]:
    """A consumer is told `acked` as soon as its ack is on its way."""
    propose = Batcher.propose

    def at_once(self: Batcher, command: bytes, done: Any, term: int = 0) -> None:
        if command[0] != Command.ACK:
            propose(self, command, done, term)
            return
        propose(self, command, lambda result, error: None)
        ((kind, body),) = decode_entry(encode_entry(0, [command]))[2]
        done(LeaseResult(np.full(len(decode(kind, body).rows), LeaseOutcome.DONE, np.uint8)), None)

    with _patched(Batcher, "propose", at_once):
        yield


def _plain_library() -> Iterator[None]:
    """Rows 1 and 2: a success sets `next` back, so that batches are sent twice; and what follows the first entry of a
    batch is cut, even where it matches."""
    matched = Peer.matched

    def back(peer: Peer, index: int) -> None:
        matched(peer, index)
        peer.next = peer.match + 1

    def take_all(follower: Follower, entries: list[Any]) -> list[Any]:
        journal = follower.node.journal
        if entries[0][1] > journal.base_index and entries[0][1] <= journal.last_index:
            journal.truncate(entries[0][1])
        return entries

    with _patched(Follower, "_skip_known", take_all), _patched(Peer, "matched", back):
        yield


def _forgotten_vote() -> Iterator[None]:
    vote = Journal.vote

    def forget(journal: Journal, term: int, voted_for: str | None) -> None:
        vote(journal, term, None)
        journal.voted_for = voted_for

    with _patched(Journal, "vote", forget):
        yield


def _dispatch_before_commit() -> Iterator[None]:
    """Commit mode hands out like interval mode."""
    become = LeaderDispatcher.on_leader

    def at_once(dispatcher: LeaderDispatcher, term: int) -> None:
        dispatcher.interval = True
        become(dispatcher, term)

    with _patched(LeaderDispatcher, "on_leader", at_once):
        yield


def _unfenced_grant() -> Iterator[None]:
    """What a leader did not get into the log goes to the next one."""

    def anyhow(node: Node, command: bytes, done: Any) -> None:
        node.batcher.propose(command, done)

    with _patched(Node, "_propose_as_leader", anyhow):
        yield


def _five_ms_early() -> Iterator[None]:
    encode = vars(batcher)["encode_publish"]

    def early(node: str, drafts: Any, key: bytes | None = None) -> bytes:
        sooner = [replace(d, when_ms=d.when_ms - 5) if d.relative else d for d in drafts]
        command: bytes = encode(node, sooner, key)
        return command

    with _patched(batcher, "encode_publish", early):
        yield


def _not_held_back() -> Iterator[None]:
    def at_once(held: HeldBack, poll: Any, delivery: Any, release: Callable[[Any], None]) -> None:
        release(delivery._replace(now_ms=held._clock.read(held._runtime.monotonic())))

    with _patched(HeldBack, "until_due", at_once):
        yield


def _wall_clock_stamps() -> Iterator[None]:
    """Every node follows its own wall clock whenever it leads."""
    observe = ClusterClock.observe_wall

    def believe(clock: ClusterClock, node: str, wall_ms: int, mono: float, *more: Any) -> None:
        observe(clock, node, wall_ms, mono, *more)
        if clock.leading and node == clock.node:
            clock._anchor(float(wall_ms), mono)

    with _patched(ClusterClock, "observe_wall", believe):
        yield


def _reused_attempt() -> Iterator[None]:
    """What returns to waiting keeps its attempt number."""
    lease = leases._lease

    def again(state: Any, hour: int, rows: Any, *more: Any) -> None:
        lease(state, hour, rows, *more)
        rows["attempt"] = 1

    with _patched(leases, "_lease", again):
        yield


def _dropped_ack() -> Iterator[None]:
    """An ack is answered and, for some messages, the lease runs on."""
    settle = vars(leases)["settle"]

    def forget(state: Any, hour: int, rows: Any, event: Any, **more: Any) -> None:
        if int(rows["index"][0]) % 7:
            settle(state, hour, rows, event, **more)
        else:
            state.hour_state(hour).leased -= BitMap(rows["index"])
            state.listener.on_filed(hour, state.store.entries(hour, rows["index"]))

    with _patched(leases, "settle", forget):
        yield


def _dropped_message() -> Iterator[None]:
    """What is acknowledged is stored, but for some it is over at once."""
    filed = vars(publish)["filed"]

    def drop(state: Any, hours: Any, rows: Any) -> None:
        filed(state, hours, rows)
        lost = rows["index"] % 29 == 28
        for hour, where in leases.groups(np.broadcast_to(hours, len(rows))[lost]):
            settle(state, hour, rows[lost][where], Event.CANCELLED, leased=False)

    with _patched(publish, "filed", drop):
        yield


def _ignored_purge() -> Iterator[None]:
    with _patched(Topics, "end", lambda topics, topic: topics.note_chores(topic)):
        yield


def _one_attempt_more() -> Iterator[None]:
    """max_attempts allows one more."""
    limits = leases._GivingBack._limits

    def more(giving: Any, held: Any) -> Any:
        return limits(giving, held) + 1

    with _patched(leases._GivingBack, "_limits", more):
        yield


def _no_ttl() -> Iterator[None]:
    """What is over is handed out all the same."""

    def never(state: Any, rows: Any, now_ms: int) -> Any:
        return np.zeros(len(rows), np.bool_)

    with _patched(leases, "expired", never), _patched(owed, "expired", never), _patched(ttl, "_expire", lambda *_: 0):
        yield


def _no_max_wait() -> Iterator[None]:
    """The first publish of a chain counts for no other."""
    decide = Decision._decide

    def forget(decision: Decision, row: int, *more: Any) -> None:
        decide(decision, row, *more)
        decision._starts.pop(row, None)

    with _patched(Decision, "_decide", forget):
        yield


def _miscounted() -> Iterator[None]:
    """A batch counts as one message more."""
    count = publish._count

    def more(state: Any, command: Any, numbers: Any, take: Any) -> None:
        count(state, command, numbers, take)
        state.topics[int(numbers[0])].published += int(len(take) > 4)

    with _patched(publish, "_count", more):
        yield


def _boastful_metrics() -> Iterator[None]:
    """/metrics shows twice as many acks."""
    measured = invariants.measured

    def more(node: Node) -> dict[str, Any]:
        shown = measured(node)
        shown["settled_messages_total"]["acked",] *= 2
        return shown

    with _patched(invariants, "measured", more):
        yield


def _cursor_ahead() -> Iterator[None]:
    """The cursor is moved before what it stands for is handed out."""
    encode = vars(cursor)["encode_cursor"]

    def ahead(hour: int, second: int, local: int) -> bytes:
        hours, seconds = divmod(second + 8, 3600)
        command: bytes = encode(hour + hours, seconds, local)
        return command

    with _patched(cursor, "encode_cursor", ahead):
        yield


def _deaf_wheel() -> Iterator[None]:
    """The wheel is not told of what is filed under a second that it has loaded."""
    with _patched(Dispatcher, "on_filed", lambda *_: None):
        yield


def _wrong_local_index() -> Iterator[None]:
    """After a restart a second's chain is thought to end one entry before it does."""
    scan = HeadsCache._scan

    def short(heads: HeadsCache, hour: int, derived: Any, entries: int) -> None:
        scan(heads, hour, derived, entries - 1 if entries > derived.entries + 1 else entries)
        derived.entries = entries

    with _patched(HeadsCache, "_scan", short):
        yield


def _keys_ahead() -> Iterator[None]:
    """Idempotency keys reach the disk before the checkpoint that they belong to."""
    put = Tables.put

    def early(tables: Tables, table: bytes, key: bytes, value: bytes) -> None:
        put(tables, table, key, value)
        if table.startswith(b"idem:"):
            tables.backend.commit([], [(table, key, value)])

    with _patched(Tables, "put", early):
        yield


def _ignored_cancel() -> Iterator[None]:
    with _patched(places, "settle", lambda *args, **more: None):
        yield


def _forgotten_key() -> Iterator[None]:
    """A retry under the same Idempotency-Key is stored again."""
    with _patched(idempotency, "remember", lambda *args: None):
        yield


def _blind_key() -> Iterator[None]:
    """A publish under a client key does not see the message that is pending under it."""
    with _patched(keys, "_pending", lambda state, message_id: (None, False)):
        yield


def _lost_timer() -> Iterator[None]:
    """Nobody watches the leases."""
    with _patched(Expiry, "add", lambda expiry, until_ms, key: None):
        yield


def _local_apply() -> Iterator[None]:
    """What apply computes depends on the process, and on what it hashes strings to: due times are up to 50 ms late."""
    resolve = publish._resolve
    processes: dict[int, int] = {}

    def rounded(state: Any, *rest: Any) -> Any:
        return resolve(state, *rest) + (processes.setdefault(id(state), len(processes)) + hash("late")) % 50

    with _patched(publish, "_resolve", rounded):
        yield


def _wiped_node_votes() -> Iterator[None]:
    note = Journal.create.__func__  # type: ignore[attr-defined]

    def trusted(cls: type[Journal], *args: Any, **more: Any) -> Journal:
        journal: Journal = note(cls, *args, **more)
        journal.admitted = True
        return journal

    with _patched(Journal, "create", classmethod(trusted)):
        yield


def _members_when_applied() -> Iterator[None]:
    derive = Membership._derive

    def late(membership: Membership) -> None:
        appended, membership.appended_lists = membership.appended_lists, []
        derive(membership)
        membership.appended_lists = appended

    with _patched(Membership, "_derive", late):
        yield


def _two_lists_at_once() -> Iterator[None]:
    with _patched(Membership, "refusal", lambda membership, members: None):
        yield


def _kept_change() -> Iterator[None]:
    with _patched(Membership, "truncated", lambda membership, index: None):
        yield


def _founder_joins() -> Iterator[None]:
    def least(admission: Admission, name: str) -> int:
        return admission.node.machine.incarnation(name) or FOUNDING

    with _patched(Admission, "least", least):
        yield


_CRASHES = ("kill", "power_cut", "power_cut_all", "reset", "partition")
#: A journal that lost what it promised may notice by itself, and stop.
_LOG = ("I1 ", "I12", "I13", "I14", "I17")

#: Seeds that are tried before a bug counts as not noticed.
SEEDS = range(1, 61)


def _ignored_filter() -> Iterator[None]:
    def may(self: Filter, masks: Any) -> Any:
        return np.ones(len(masks), np.bool_)

    with _patched(Filter, "may", may), _patched(Filter, "matches", lambda self, tags: True):
        yield


def _unconfirmed_read() -> Iterator[None]:
    with _patched(Reads, "read", lambda self, done: done(None)):
        yield


MUTATIONS: dict[str, Mutation] = {
    "no_sync": Mutation("no sync reaches the disk", _LOG, ("power_cut_all", "kill"), _no_sync),
    "skipped_sync": Mutation("every fifth sync is skipped", _LOG, ("power_cut_all", "power_cut"), _skipped_sync),
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
        "rows 1 and 2 of PySyncObj: batches are sent twice, and matching entries are cut",
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
        _two_lists_at_once,
    ),
    "kept_change": Mutation(
        "a change of the members that is cut off from the log stays in force", ("I13",), ("members",), _kept_change
    ),
    "founder_joins": Mutation(
        "who is added is taken for a founder until that is committed", ("I12",), ("members",), _founder_joins
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
        "cluster time follows one wall clock", ("I9", "I6"), ("clock_step",), _wall_clock_stamps
    ),
    "cursor_ahead": Mutation("the cursor is ahead of what it stands for", ("I10",), ("kill", "stop"), _cursor_ahead),
    "deaf_wheel": Mutation("the wheel is not told of new messages", ("forgotten",), (), _deaf_wheel),
    "reused_attempt": Mutation("attempt numbers are used again", ("I6",), (), _reused_attempt),
    "dropped_ack": Mutation("an acked message is still owed", ("I5", "I6"), (), _dropped_ack),
    "dropped_message": Mutation("one message in 29 is never handed out", ("I1 ",), (), _dropped_message),
    "ignored_cancel": Mutation("a cancelled message is still owed", ("I3",), (), _ignored_cancel),
    "ignored_purge": Mutation("a purged message is still owed", ("I3",), (), _ignored_purge),
    "one_attempt_more": Mutation("max_attempts allows one attempt more", ("attempts",), (), _one_attempt_more),
    "no_ttl": Mutation("what is past its TTL is handed out", ("TTL",), ("kill", "pause"), _no_ttl),
    "no_max_wait": Mutation("max_wait counts from the last publish", ("max_wait",), (), _no_max_wait),
    "forgotten_key": Mutation("idempotency keys are forgotten", ("I8", "I1 "), ("reset", "kill"), _forgotten_key),
    "keys_ahead": Mutation("the key index is ahead of the checkpoint", ("I12", "I1 "), ("kill",), _keys_ahead),
    "blind_key": Mutation("two messages of one client key are pending", ("one per key",), (), _blind_key),
    "wrong_local_index": Mutation(
        "after a restart a second's chain ends too early", ("I12", "I15", "forgotten"), ("kill", "stop"),
        _wrong_local_index,
    ),
    "ignored_filter": Mutation("who asks for tags gets others as well", ("filters",), (), _ignored_filter),
    "unconfirmed_read": Mutation(
        "a read does not wait for what was committed before it", ("stale read",), ("pause", "partition", "slow_link"),
        _unconfirmed_read,
    ),
    "lost_timer": Mutation("no lease ever runs out", ("I15",), (), _lost_timer),
    "local_apply": Mutation("apply depends on the process", ("I12",), (), _local_apply),
    "miscounted": Mutation("a batch counts as one message more", ("I2",), (), _miscounted),
    "boastful_metrics": Mutation("/metrics shows twice as many acks", ("I18",), (), _boastful_metrics),
}  # fmt: skip
