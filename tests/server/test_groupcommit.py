"""Group commit: what shares an entry, what is split, and which answers are definite."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hadelay.api.service import Receipts
from hadelay.codec.commands import encode_noop, encode_publish
from hadelay.codec.entries import decode_entry, encode_entry
from hadelay.codec.publishcommand import decode_body
from hadelay.codec.results import Done, PublishResult, RowCode
from hadelay.errors import HadelayError, Impossible, NoLeader, OutcomeUnknown, Overloaded
from hadelay.model import Draft
from hadelay.server.groupcommit import GroupCommit
from hadelay.server.guard import Guard
from hadelay.server.outlet import Way
from hadelay.server.publishing import Publishing
from hadelay.server.refusals import Refusals
from tests.ledger.world import World as Log


class Timers:
    """A Runtime without time: `turn` runs what is due at once, `later` the timers."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []
        self.timers: list[list[Any]] = []
        self.random = random.Random(1)
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        self.soon.append(lambda: fn(*args))

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Any:
        timer = [delay_s, lambda: fn(*args)]
        self.timers.append(timer)

        class Handle:
            def cancel(_) -> None:
                timer[1] = lambda: None

        return Handle()

    def turn(self) -> None:
        while self.soon:
            self.soon.pop(0)()

    def later(self) -> None:
        timers, self.timers = self.timers, []
        for _, fn in timers:
            fn()
        self.turn()


class Wire:
    """An outlet that keeps batches until the test answers them."""

    def __init__(self) -> None:
        self.up = True
        self.leads = 0
        self.leader = "n2"
        self.disk_is_slow = False
        self.sent: list[tuple[list[bytes], Callable[..., None]]] = []

    def way(self) -> Way:
        return Way(self.leads, self.leader, self.up)

    def slow(self) -> bool:
        return self.disk_is_slow

    def send(self, way: Way, commands: list[bytes], done: Callable[..., None]) -> None:
        self.sent.append((commands, done))

    def rows(self, batch: int) -> list[int]:
        """Rows of each PUBLISH in that batch."""
        _, _, commands = decode_entry(encode_entry(0, self.sent[batch][0]))
        return [len(decode_body(body).rows) for kind, body in commands if kind == 1]

    def commit(self, batch: int, **columns: Any) -> None:
        commands, done = self.sent[batch]
        done(
            [published(n, **columns) for n in self.rows(batch)] + [Done()] * (len(commands) - len(self.rows(batch))),
            None,
        )


def published(n: int, codes: list[int] | None = None, duplicate: list[bool] | None = None) -> PublishResult:
    return PublishResult(
        np.arange(1, n + 1, dtype=np.uint64),
        np.arange(1_000, 1_000 + n),
        np.array(codes or [0] * n, np.uint8),
        np.array(duplicate or [False] * n),
    )


class Answers(list[Any]):
    def __call__(self, receipts: Receipts | None, error: HadelayError | None) -> None:
        self.append(error if error is not None else receipts)


def draft(body: bytes = b"x", idem: bytes | None = None) -> Draft:
    return Draft("orders", 0, True, 0, 0, b"", body, idem)


def group_commit(timers: Any, wire: Any, max_entry_bytes: int = 10_000) -> GroupCommit:
    refusals = Refusals(timers.monotonic, lambda topic: 0)
    return GroupCommit(
        "n1", timers, wire, refusals, max_entry_bytes=max_entry_bytes, leaderless_wait_s=2, commit_timeout_s=10
    )


def door(batcher: GroupCommit, copies: int = 0) -> Publishing:
    """The door to that queue, of a node that has space."""
    peers: Any = SimpleNamespace(full=[], link=SimpleNamespace(handlers={}))
    leadership: Any = SimpleNamespace(drained=False, leading=0, level=0)
    delivery: Any = None
    topics = SimpleNamespace(subscriptions={"orders": dict.fromkeys(range(copies))})
    replica: Any = SimpleNamespace(ledger=SimpleNamespace(topics=topics, known_topic=lambda topic: object()))
    return Publishing(leadership, batcher, delivery, peers, replica, guard=Guard(), max_queue_bytes=50_000)


@pytest.fixture
def world() -> tuple[Timers, Wire, GroupCommit]:
    timers, wire = Timers(), Wire()
    return timers, wire, group_commit(timers, wire)


World = tuple[Timers, Wire, GroupCommit]


def test_publishes_of_one_turn_share_a_command(world: World) -> None:
    timers, wire, batcher = world
    answers = Answers()
    for _ in range(5):
        door(batcher).publish([draft()], None, answers)
    timers.turn()
    assert wire.rows(0) == [5]
    wire.commit(0)
    assert [a.ids for a in answers] == [[1], [2], [3], [4], [5]]
    assert batcher.queued_bytes == 0


def test_the_time_of_a_commit_is_counted_once_per_batch(world: World) -> None:
    timers, wire, batcher = world
    for _ in range(3):
        door(batcher).publish([draft()], None, Answers())
    timers.turn()
    timers.now = 0.03
    wire.sent[0][1](None, OutcomeUnknown("the link broke"))
    batcher.propose(b"ack", Answers())
    timers.turn()
    timers.now += 0.03
    wire.sent[1][1](["done"], None)
    assert (sum(batcher.commits.counts), batcher.commits.sum) == (1, 0.03)


def test_two_entries_at_most_are_on_their_way_and_the_next_collects(world: World) -> None:
    timers, wire, batcher = world
    for _ in range(4):
        door(batcher).publish([draft()], None, Answers())
        timers.turn()
    assert len(wire.sent) == 2
    wire.commit(0)
    timers.turn()
    assert len(wire.sent) == 3
    assert wire.rows(2) == [2]


def test_commands_to_a_leader_wait_for_no_publishes_and_collect_when_too_many_are_on_their_way(world: World) -> None:
    timers, wire, batcher = world
    for n in range(10):
        door(batcher).publish([draft()], None, Answers())
        batcher.propose(encode_noop(), lambda *_: None)
        timers.turn()
        assert len(wire.sent) == min(n + 1, 8)
    assert [wire.rows(batch) for batch in range(3)] == [[1], [1], []]
    wire.commit(3)
    timers.turn()
    assert wire.rows(8) == []
    assert len(wire.sent[8][0]) == 2
    wire.commit(0)
    timers.turn()
    assert wire.rows(9) == [8]


def test_another_nodes_publishes_count_as_publishes_and_commands_do_not_wait_for_them(world: World) -> None:
    timers, wire, batcher = world
    wire.leader, forwarded = "n1", encode_publish("n2", [draft()], None)
    for command in (forwarded, forwarded, encode_noop(), forwarded, encode_noop()):
        batcher.propose(command, lambda *_: None)
        timers.turn()
    assert [wire.rows(batch) for batch in range(len(wire.sent))] == [[1], [1], [], []]
    wire.commit(0)
    timers.turn()
    assert wire.rows(4) == [1]


def test_another_nodes_publishes_have_their_turn_among_this_nodes_own_however_large_those_are(world: World) -> None:
    timers, wire, batcher = world
    wire.leader, answers = "n1", Answers()
    for n in range(6):
        door(batcher).publish([draft(b"z" * 9_999)], None, Answers())
        if n == 2:
            batcher.propose(encode_publish("n2", [draft()], None), answers)
    timers.turn()
    for n in range(4):
        wire.commit(n)
        timers.turn()
    assert len(answers) == 1


def test_another_nodes_publishes_are_tried_again_with_the_others(world: World) -> None:
    timers, wire, batcher = world
    wire.leader, answers, own = "n1", Answers(), Answers()
    door(batcher).publish([draft()], None, own)
    batcher.propose(encode_noop(), answers)
    batcher.propose(encode_publish("n2", [draft(), draft()], None), answers)
    timers.turn()
    wire.sent[0][1](None, NoLeader("deposed before it was proposed"))
    wire.leader = "n3"
    timers.timers = [t for t in timers.timers if t[0] < 1]
    timers.later()
    assert wire.rows(1) == [1, 2]
    assert len(wire.sent[1][0]) == 3
    wire.commit(1)
    assert [len(a) for a in (own, answers)] == [1, 2]
    assert batcher.queued_bytes == 0


def test_a_request_key_over_several_drafts_keeps_its_own_command(world: World) -> None:
    timers, wire, batcher = world
    door(batcher).publish([draft()], b"one", Answers())
    door(batcher).publish([draft(), draft()], b"two", Answers())
    door(batcher).publish([draft()], None, Answers())
    timers.turn()
    assert wire.rows(0) == [2, 2]


def test_the_key_of_an_item_counts_whatever_key_its_request_has(world: World) -> None:
    timers, wire, batcher = world
    log, answers = Log(), Answers()
    for request_key in (b"one", b"two"):
        door(batcher).publish([draft(idem=b"item")], request_key, answers)
        timers.turn()
        ((command,), done) = wire.sent.pop()
        done([log.one(command)], None)
    assert answers[0].ids == answers[1].ids


LARGE = b"y" * 3_000


@pytest.mark.parametrize(
    ("first", "then", "same"),
    [
        ([b"a"], [b"a", b"b"], True), ([b"a", b"b"], [b"a"], True), ([b"a"], [b"c", b"b"], False),
        ([b"a", b"b"], [b"c"], False), ([LARGE] * 5, [LARGE], True), ([LARGE], [LARGE] * 5, True),
        ([LARGE] * 5, [b"a"], False),
    ],
)  # fmt: skip
def test_a_request_key_is_one_of_whatever_size_the_request_is(
    world: World, first: list[bytes], then: list[bytes], same: bool
) -> None:
    """A producer whose retry has more messages than its first try: what both have in common is not doubled."""
    timers, wire, batcher = world
    log, answers = Log(), Answers()
    for bodies in (first, then):
        door(batcher).publish([draft(body) for body in bodies], b"k", answers)
        timers.turn()
        while wire.sent:
            commands, done = wire.sent.pop(0)
            done([log.one(command) for command in commands], None)
            timers.turn()
    before, after = answers
    assert (0 in after.duplicates, 0 in after.problems) == (same, not same)
    assert (after.ids[0] == before.ids[0]) is same


def test_a_request_and_one_of_its_items_may_have_the_same_key(world: World) -> None:
    timers, wire, batcher = world
    log, answers = Log(), Answers()
    for _ in range(2):
        door(batcher).publish([draft(b"a"), draft(b"b", idem=b"k")], b"k", answers)
        timers.turn()
        ((command,), done) = wire.sent.pop()
        done([log.one(command)], None)
    assert [(len(set(a.ids)), sorted(a.duplicates), a.problems) for a in answers] == [(2, [], {}), (2, [0, 1], {})]


def test_a_large_batch_is_split_and_answered_as_one(world: World) -> None:
    timers, wire, batcher = world
    answers = Answers()
    door(batcher).publish([draft(b"y" * 3_000) for _ in range(7)], b"big", answers)
    timers.turn()
    while any(True for _ in wire.sent) and not answers:
        wire.commit(0)
        wire.sent.pop(0)
        timers.turn()
    assert len(answers[0].ids) == 7
    assert batcher.queued_bytes == 0


def test_an_entry_makes_few_topics_and_takes_few_keys(world: World) -> None:
    """Apply takes some 15 µs for a new topic, and some µs for a key, on every node."""
    timers, wire, batcher = world
    door(batcher).publish([Draft(f"t{n}", 0, True, 0, 0, b"", b"x", None) for n in range(30)], None, Answers())
    door(batcher).publish(
        [Draft("t", 0, True, 0, 0, b"", b"x", b"i%d" % n, b"k%d" % n) for n in range(40)], None, Answers()
    )
    while batcher.waiting_publishes or batcher.inflight:
        timers.turn()
        for n in range(len(wire.sent)):
            wire.commit(n)
        rows = [wire.rows(n) for n in range(len(wire.sent))]
        assert all(sum(entry) <= 15 for entry in rows), rows
        wire.sent.clear()
    assert batcher.queued_bytes == 0


def test_an_entry_files_as_many_messages_with_copies_as_without(world: World) -> None:
    timers, wire, batcher = world
    drafts = [draft() for _ in range(80)]
    rows = []
    for copies in (0, 3):
        door(batcher, copies).publish(drafts, None, Answers())
        while batcher.waiting_publishes or batcher.inflight:
            timers.turn()
            rows += [sum(wire.rows(n)) * (1 + copies) for n in range(len(wire.sent))]
            for n in range(len(wire.sent)):
                wire.commit(n)
            wire.sent.clear()
    assert sum(rows) == 80 + 4 * 80
    assert max(rows) <= 80


def test_a_part_that_failed_makes_the_whole_unknown(world: World) -> None:
    timers, wire, batcher = world
    answers = Answers()
    door(batcher).publish([draft(b"y" * 3_000) for _ in range(5)], b"big", answers)
    timers.turn()
    assert len(wire.sent) == 2
    wire.commit(0)
    wire.sent[1][1](None, Overloaded("full"))
    assert isinstance(answers[0], OutcomeUnknown)


def test_nothing_happened_is_tried_again(world: World) -> None:
    timers, wire, batcher = world
    answers = Answers()
    door(batcher).publish([draft()], None, answers)
    timers.turn()
    wire.sent[0][1](None, NoLeader("deposed before it was proposed"))
    assert not answers
    timers.timers = [t for t in timers.timers if t[0] < 1]  # only the retry, not the patience
    timers.later()
    wire.commit(1)
    assert answers[0].ids == [1]


def test_an_outlet_that_refuses_at_once_is_not_asked_again_in_the_same_turn(world: World) -> None:
    """Found by the simulator: the node span here for ever."""
    timers, wire, batcher = world
    wire.send = lambda way, commands, done: (wire.sent.append((commands, done)), done(None, NoLeader("gone")))  # type: ignore[method-assign]
    door(batcher).publish([draft()], None, Answers())
    timers.turn()
    assert len(wire.sent) == 1
    timers.timers = [t for t in timers.timers if t[0] < 1]
    timers.later()
    assert len(wire.sent) == 2


def test_the_answer_of_a_cluster_that_has_no_leader_is_a_definite_503_and_the_queue_is_empty(world: World) -> None:
    timers, wire, batcher = world
    wire.up = False
    answers, asked = Answers(), Answers()
    door(batcher).publish([draft()], None, answers)
    batcher.propose(encode_noop(), asked)
    timers.turn()
    timers.later()
    assert isinstance(answers[0], NoLeader)
    assert answers[0].outcome_known
    assert isinstance(asked[0], NoLeader)
    assert batcher.queued_bytes == 0


def test_no_answer_in_time_is_unknown_and_a_late_one_is_ignored(world: World) -> None:
    timers, wire, batcher = world
    answers = Answers()
    door(batcher).publish([draft()], None, answers)
    timers.turn()
    timers.later()
    assert isinstance(answers[0], OutcomeUnknown)
    wire.commit(0)
    assert len(answers) == 1


def test_a_request_that_waited_too_long_for_a_turn_is_refused_and_not_sent(world: World) -> None:
    """Whoever asked may have asked another node since, and the time of its key may be over (seed 71940)."""
    timers, wire, batcher = world
    for _ in range(2):
        door(batcher).publish([draft()], None, Answers())
        timers.turn()
    late, later = Answers(), Answers()
    door(batcher).publish([draft(idem=b"late")], None, late)
    timers.now += 6
    door(batcher).publish([draft(idem=b"later")], None, later)
    timers.now += 6
    wire.commit(0)
    timers.turn()
    assert isinstance(late[0], Overloaded)
    assert wire.rows(2) == [1]
    wire.commit(1)
    wire.commit(2)
    timers.turn()
    assert isinstance(later[0], Receipts)
    assert batcher.queued_bytes == 0


def test_a_request_that_waited_too_long_behind_another_nodes_publish_is_refused_too(world: World) -> None:
    timers, wire, batcher = world
    wire.leader = "n1"
    for _ in range(2):
        door(batcher).publish([draft()], None, Answers())
        timers.turn()
    theirs, late = Answers(), Answers()
    batcher.propose(encode_publish("n2", [draft(idem=b"theirs")]), theirs)
    door(batcher).publish([draft(idem=b"late")], None, late)
    timers.now += 12
    wire.commit(0)
    timers.turn()
    assert isinstance(theirs[0], Overloaded)
    assert isinstance(late[0], Overloaded)
    assert len(wire.sent) == 2
    wire.commit(1)
    assert batcher.queued_bytes == 0


def test_requests_to_a_silent_leader_do_not_keep_the_next_one_waiting(world: World) -> None:
    timers, wire, batcher = world
    silent, next_one = Answers(), Answers()
    for _ in range(2):
        door(batcher).publish([draft()], None, silent)
        timers.turn()
    door(batcher).publish([draft()], None, next_one)
    timers.turn()
    assert len(wire.sent) == 2, "there is no room for a third"
    wire.leader = "n3"
    batcher.flush_soon()
    assert not silent, "the answer may still be on its way"
    timers.later()
    assert [type(answer) for answer in silent] == [OutcomeUnknown, OutcomeUnknown]
    wire.commit(2)
    assert len(next_one[0].ids) == 1


def test_a_proposal_of_this_node_waits_for_its_outcome_in_raft(world: World) -> None:
    timers, wire, batcher = world
    answers = Answers()
    wire.leader = "n1"
    door(batcher).publish([draft()], None, answers)
    timers.turn()
    wire.leader = "n3"
    batcher.flush_soon()
    assert [delay_s for delay_s, _ in timers.timers] == [10]
    wire.commit(0)
    assert len(answers[0].ids) == 1


def test_a_full_queue_refuses_at_once(world: World) -> None:
    _timers, _wire, batcher = world
    answers = Answers()
    for _ in range(6):
        door(batcher).publish([draft(b"z" * 9_000)], None, answers)
    assert isinstance(answers[0], Overloaded)
    assert answers[0].retry_after_ms
    assert len(answers) == 1


def test_rows_are_refused_in_their_place(world: World) -> None:
    timers, wire, batcher = world
    first, second = Answers(), Answers()
    door(batcher).publish([draft(), draft()], None, first)
    door(batcher).publish([draft()], None, second)
    timers.turn()
    wire.commit(0, codes=[RowCode.OK, RowCode.TOO_FAR, RowCode.OK], duplicate=[False, False, True])
    assert isinstance(first[0].problems[1], Impossible)
    assert second[0].problems == {}
    assert second[0].duplicates == frozenset({0})


def test_a_command_of_a_term_that_is_over_goes_nowhere(world: World) -> None:
    timers, wire, batcher = world
    wire.leads = 4
    grant, ack = Answers(), Answers()
    batcher.propose(encode_noop(), grant, term=4)
    batcher.propose(encode_noop(), ack)
    wire.leads = 5
    timers.turn()
    assert isinstance(grant[0], NoLeader)
    assert len(wire.sent[0][0]) == 1
    wire.commit(0)
    assert len(ack) == 1


def test_a_forwarded_request_goes_nowhere_when_the_leader_leads_no_more(world: World) -> None:
    timers, wire, batcher = world
    wire.leads = 4
    theirs, own = Answers(), Answers()
    batcher.hold(True)
    for command in (encode_publish("n2", [draft()], None), encode_noop()):
        batcher.propose(command, theirs, term=4)
        door(batcher).publish([draft()], None, own)
    wire.leads = 0
    batcher.hold(False)
    timers.turn()
    assert [type(answer) for answer in theirs] == [NoLeader, NoLeader]
    assert wire.rows(0) == [2]
    wire.commit(0)
    assert len(own) == 2


def test_another_nodes_batch_is_not_tried_again_when_a_part_of_it_is_stored(world: World) -> None:
    timers, wire, batcher = world
    wire.leads = 4
    handlers: dict[str, Any] = {}
    dispatcher: Any = SimpleNamespace(
        before_settlement=lambda: None, settling=lambda command: command, in_order=lambda command, done: done
    )
    leadership: Any = SimpleNamespace(leading=4)
    peers: Any = SimpleNamespace(full=[], no_space=lambda: "", link=SimpleNamespace(handlers=handlers))
    replica: Any = None
    Publishing(leadership, batcher, dispatcher, peers, replica, guard=Guard(), max_queue_bytes=50_000)
    replies = Answers()
    handlers["submit"]("n2", [encode_publish("n2", [draft(b"x" * 6_000)], None) for _ in range(2)], replies)
    timers.turn()
    assert [wire.rows(0), wire.rows(1)] == [[1], [1]]
    wire.commit(0)
    wire.leads = 0
    wire.sent[1][1](None, NoLeader("deposed"))
    timers.later()
    assert [type(answer) for answer in replies] == [OutcomeUnknown]


def test_requests_wait_during_a_transfer_and_are_sent_then(world: World) -> None:
    timers, wire, batcher = world
    batcher.hold(True)
    door(batcher).publish([draft()], None, Answers())
    timers.turn()
    assert not wire.sent
    batcher.hold(False)
    timers.turn()
    assert wire.rows(0) == [1]


def test_waiting_publishes_leave_before_a_sync_of_the_leader_unless_they_are_few(world: World) -> None:
    timers, wire, batcher = world
    wire.leads, wire.leader = 1, "n1"
    for _ in range(2):
        door(batcher).publish([draft()], None, Answers())
        door(batcher).publish([draft()], None, Answers())
        timers.turn()
    door(batcher).publish([draft()], None, Answers())
    batcher.between_syncs()
    assert len(wire.sent) == 2, "one publish beside four on their way waits"
    for rows in (2, 3):
        while batcher.waiting_publishes < rows:
            door(batcher).publish([draft()], None, Answers())
        batcher.between_syncs()
    assert [wire.rows(batch) for batch in range(2, 4)] == [[2], [3]]
    for _ in range(9):
        door(batcher).publish([draft()], None, Answers())
    batcher.between_syncs()
    assert len(wire.sent) == 4, "no more than four are on their way"
    timers.turn()
    wire.commit(0)
    wire.commit(1)
    timers.turn()
    assert len(wire.sent) == 4, "and beside the syncs no more than two"
    wire.commit(2)
    timers.turn()
    assert wire.rows(4) == [9]


def test_three_batches_of_publishes_are_on_their_way_on_a_slow_disk(world: World) -> None:
    timers, wire, batcher = world
    for slow, sent in ((False, 2), (True, 3)):
        wire.disk_is_slow = slow
        for _ in range(3):
            door(batcher).publish([draft()], None, Answers())
            timers.turn()
        assert len(wire.sent) == sent


def test_a_follower_and_a_stopped_queue_send_nothing_for_a_sync(world: World) -> None:
    _, wire, batcher = world
    door(batcher).publish([draft()], None, Answers())
    batcher.between_syncs()
    wire.leads, wire.leader = 1, "n1"
    batcher.hold(True)
    batcher.between_syncs()
    assert not wire.sent


def test_the_leader_takes_a_command_along_when_a_batch_closes(world: World) -> None:
    timers, wire, batcher = world
    reported: list[Any] = []
    riding = [(b"\x08first", lambda result, error: reported.append(result))]
    batcher.rider = lambda: riding.pop() if riding else None
    batcher.propose(encode_noop(), lambda result, error: None)
    timers.turn()
    assert wire.sent[0][0] == [encode_noop()], "a follower takes nothing along"
    wire.leads, wire.leader = 3, "n1"
    timers.turn()
    assert len(wire.sent) == 1, "nothing closes a batch for the rider alone"
    answers = Answers()
    door(batcher).publish([draft()], None, answers)
    timers.turn()
    assert wire.sent[1][0][1:] == [b"\x08first"]
    _, done = wire.sent[1]
    done([published(1), "taken along"], None)
    assert reported == ["taken along"]
    assert [a.ids for a in answers] == [[1]]
