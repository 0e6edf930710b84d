"""Handing out in commit mode: only what apply granted, to one consumer, with enough of its lease left."""

from __future__ import annotations

from itertools import pairwise

import pytest

from hadelay.codec.commands import encode_ack, encode_audited, encode_purge, encode_topic_delete, encode_topic_put
from hadelay.codec.commandtypes import MAX_SEQ, Command
from hadelay.codec.results import LeaseOutcome
from hadelay.errors import Conflict, LimitReached, NoLeader, OutcomeUnknown, Overloaded
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from tests.handout.desk import Desk


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.lead()
    desk.run(5)
    return desk


def test_a_poll_that_waits_is_answered_when_something_falls_due(desk: Desk) -> None:
    poll = desk.poll()
    desk.publish("a", delay=3_000)
    desk.run(2_900)
    assert desk.answer(poll) is None
    desk.run(200)
    answer = desk.answer(poll)
    assert answer is not None
    assert answer.names == ["a"]
    d = answer.delivery
    assert d is not None
    assert (d.attempts[0], d.redelivered[0], d.positions[0]) == (1, False, 0)
    assert 29_990 <= d.until_ms[0] - d.now_ms <= 30_000


def test_ready_messages_come_at_once_even_without_waiting(desk: Desk) -> None:
    desk.publish("a", "b", "c")
    desk.run(5)
    first, second = desk.poll(max=2, wait=0), desk.poll(wait=0)
    desk.run(5)
    assert desk.answer(first).names == ["a", "b"]  # type: ignore[union-attr]
    assert desk.answer(second).names == ["c"]  # type: ignore[union-attr]


def test_nothing_comes_in_time(desk: Desk) -> None:
    polls = [desk.poll(wait=0), desk.poll(wait=500)]
    desk.run(1)
    assert desk.answer(polls[0]).names == []  # type: ignore[union-attr]
    desk.run(490)
    assert desk.answer(polls[1]) is None
    desk.run(20)
    assert desk.answer(polls[1]).names == []  # type: ignore[union-attr]
    assert desk.delivery.waiting_polls() == 0


def test_a_poll_for_a_topic_that_is_not_there_yet(desk: Desk) -> None:
    poll = desk.poll("new", "other")
    desk.publish("a", topic="new")
    desk.run(10)
    assert desk.answer(poll).names == ["a"]  # type: ignore[union-attr]


def test_a_message_has_one_consumer(desk: Desk) -> None:
    polls = [desk.poll() for _ in range(20)]
    desk.publish("a", delay=100)
    desk.run(500)
    assert [p for p in polls if desk.answer(p)] == polls[:1]


def test_two_messages_of_a_millisecond_go_to_the_first_in_line(desk: Desk) -> None:
    desk.poll(max=1, consumer="x")
    desk.poll(max=5, consumer="y")
    desk.publish("a", "b", "c", delay=100)
    desk.run(200)
    assert [(r.poll.consumer, r.names) for r in desk.received] == [("x", ["a"]), ("y", ["b", "c"])]


def test_handed_out_only_after_the_commit(desk: Desk) -> None:
    desk.stuck = True
    poll = desk.poll()
    desk.publish("a")
    desk.run(300)
    assert desk.answer(poll) is None
    desk.unstick()
    desk.run(1)
    assert desk.answer(poll).names == ["a"]  # type: ignore[union-attr]


def test_a_cancel_that_was_committed_first_wins(desk: Desk) -> None:
    desk.stuck = True
    poll = desk.poll()
    desk.publish("a")
    desk.run(10)
    desk.cancel("a")
    desk.unstick()
    desk.run(50)
    assert desk.answer(poll) is None
    desk.publish("b")
    desk.run(10)
    assert desk.answer(poll).names == ["b"]  # type: ignore[union-attr]


def test_a_cancelled_one_is_not_even_proposed(desk: Desk) -> None:
    desk.publish("a", "b", delay=100)
    desk.run(500)
    desk.cancel("a")
    desk.poll()
    desk.run(10)
    assert desk.delivered() == ["b"]
    assert desk.kinds().count(Command.GRANT) == 1


def test_a_poll_known_to_be_gone_gets_no_grant(desk: Desk) -> None:
    gone, other = desk.poll(), desk.poll()
    desk.delivery.cancel_poll(gone)
    desk.publish("a")
    desk.run(10)
    assert desk.answer(gone) is None
    assert desk.answer(other).names == ["a"]  # type: ignore[union-attr]


def test_a_hang_up_after_the_proposal_does_not_release_it(desk: Desk) -> None:
    desk.stuck = True
    gone, other = desk.poll(lease=5_000), desk.poll()
    desk.publish("a")
    desk.run(10)
    desk.delivery.cancel_poll(gone)
    desk.unstick()
    desk.run(4_000)
    assert desk.received == []
    assert len(desk.ledger.grants) == 1
    desk.run(1_500)
    assert desk.answer(other).delivery.attempts[0] == 2  # type: ignore[union-attr]


def test_a_lease_runs_out_and_the_message_returns(desk: Desk) -> None:
    desk.publish("a")
    desk.poll(lease=2_000)
    desk.run(10)
    again = desk.poll()
    desk.run(1_950)
    assert desk.answer(again) is None
    desk.run(100)
    answer = desk.answer(again)
    assert answer.names == ["a"]  # type: ignore[union-attr]
    assert answer.delivery.attempts[0] == 2  # type: ignore[union-attr]
    assert answer.delivery.redelivered[0]  # type: ignore[union-attr]


def test_an_extended_lease_runs_out_later(desk: Desk) -> None:
    desk.publish("a")
    first = desk.poll(lease=2_000)
    desk.run(1_000)
    assert desk.extend(desk.answer(first), 5_000) == [LeaseOutcome.DONE]  # type: ignore[arg-type]
    again = desk.poll()
    desk.run(4_900)
    assert desk.answer(again) is None
    desk.run(200)
    assert desk.answer(again).names == ["a"]  # type: ignore[union-attr]


def test_leases_of_one_grant_may_end_at_different_times(desk: Desk) -> None:
    desk.publish("a", "b", at=0)
    first, again = desk.poll(max=2, lease=1_000), [desk.poll(lease=60_000, wait=20_000) for _ in range(2)]
    desk.run(100)
    assert desk.extend(desk.answer(first), 5_000, "a") == [LeaseOutcome.DONE]  # type: ignore[arg-type]
    desk.run(3_000)
    assert desk.answer(again[0]).names == ["b"]  # type: ignore[union-attr]
    assert desk.answer(again[1]) is None
    desk.run(3_000)
    assert desk.answer(again[1]).names == ["a"]  # type: ignore[union-attr]


def test_nacked_with_a_delay(desk: Desk) -> None:
    desk.publish("a", "b")
    desk.poll()
    desk.run(10)
    desk.nack(desk.received[0], "b", delay=1_500)
    desk.ack(desk.received[0], "a")
    again = desk.poll()
    desk.run(1_490)
    assert desk.answer(again) is None
    desk.run(30)
    assert desk.answer(again).names == ["b"]  # type: ignore[union-attr]
    assert desk.delivery.ready_counts() == {}


def test_the_same_request_gets_the_same_grant(desk: Desk) -> None:
    desk.publish("a", "b", "c")
    first = desk.poll(consumer="x", request=b"1", lease=20_000)
    desk.run(10)
    desk.ack(desk.answer(first), "b")  # type: ignore[arg-type]
    desk.run(8_000)
    again = desk.poll(consumer="x", request=b"1", lease=20_000)
    desk.run(10)
    one, two = desk.answer(first).delivery, desk.answer(again).delivery  # type: ignore[union-attr]
    assert one is not None
    assert two is not None
    assert (two.term, two.seq, two.positions.tolist()) == (one.term, one.seq, [0, 2])
    assert desk.answer(again).names == ["a", "c"]  # type: ignore[union-attr]
    assert two.attempts.tolist() == [1, 1]
    assert two.until_ms.min() - two.now_ms > 19_900, "a whole lease again"
    # Acked in full: the request is over, the same id is a new one.
    desk.ack(desk.answer(again))  # type: ignore[arg-type]
    desk.publish("d")
    third = desk.poll(consumer="x", request=b"1")
    desk.run(10)
    assert desk.answer(third).names == ["d"]  # type: ignore[union-attr]


def test_the_same_request_gets_nothing_that_is_acked_meanwhile(desk: Desk) -> None:
    desk.publish("a", "b", "c")
    first = desk.poll(consumer="x", request=b"1")
    desk.run(10)
    received = desk.answer(first)
    assert received is not None
    outcomes: list[int] = []
    # The leader finds "b" leased when it proposes to renew; the ack is before that in the log.
    desk.ask(encode_ack("n1", received.leases("b")), lambda result, error: outcomes.extend(result.outcomes.tolist()))
    again = desk.poll(consumer="x", request=b"1")
    desk.run(10)
    assert outcomes == [LeaseOutcome.DONE]
    assert desk.answer(again).names == ["a", "c"]  # type: ignore[union-attr]


def test_the_same_request_replaces_a_waiting_one(desk: Desk) -> None:
    first = desk.poll(consumer="x", request=b"1")
    second = desk.poll(consumer="x", request=b"1")
    other = desk.poll(consumer="x", request=b"2")
    desk.run(1)
    assert isinstance(desk.answer(first).error, Conflict)  # type: ignore[union-attr]
    desk.publish("a", "b")
    desk.run(10)
    assert desk.answer(second).names == ["a", "b"]  # type: ignore[union-attr]
    assert desk.answer(other) is None


def test_the_same_request_while_its_grant_is_on_its_way(desk: Desk) -> None:
    desk.publish("a", "b")
    desk.stuck = True
    first = desk.poll(consumer="x", request=b"1")
    desk.run(10)
    second = desk.poll(consumer="x", request=b"1")
    third = desk.poll(consumer="x", request=b"1")
    desk.unstick()
    desk.run(10)
    assert isinstance(desk.answer(first).error, Conflict)  # type: ignore[union-attr]
    assert isinstance(desk.answer(second).error, Conflict)  # type: ignore[union-attr]
    assert desk.answer(third).names == ["a", "b"]  # type: ignore[union-attr]
    assert len(desk.ledger.grants) == 1


@pytest.mark.parametrize("sync", ["commit", "interval"])
@pytest.mark.parametrize("moment", ["taken", "on its way", "waiting"])
def test_the_same_request_gets_nothing_of_topics_it_does_not_name(sync: str, moment: str) -> None:
    desk = Desk(sync=sync)
    desk.lead()
    desk.run(5)
    desk.stuck = moment == "on its way"
    mine = desk.poll("a", "b", consumer="x", request=b"1")
    if moment == "waiting":
        assert isinstance(desk.answer(desk.poll("b", consumer="x", request=b"1")).error, Conflict)  # type: ignore[union-attr]
    desk.publish("secret", topic="a")
    desk.run(5)
    other = desk.poll("b", "c", consumer="x", request=b"1")
    desk.unstick()
    desk.run(100)
    assert isinstance(desk.answer(other).error, Conflict)  # type: ignore[union-attr]
    assert desk.answer(mine).names == ["secret"]  # type: ignore[union-attr]
    again = desk.poll("c", "b", "a", consumer="x", request=b"1")
    desk.run(100)
    assert desk.answer(again).names == ["secret"]  # type: ignore[union-attr]
    desk.ack(desk.answer(again))  # type: ignore[arg-type]
    over = desk.poll("b", consumer="x", request=b"1")
    desk.run(10)
    assert desk.answer(over) is None


def test_too_little_of_a_lease_is_not_answered_but_renewed(desk: Desk) -> None:
    desk.publish("a")
    desk.stuck = True
    poll = desk.poll(lease=1_000)
    desk.run(600)
    desk.unstick()
    assert desk.answer(poll) is None
    desk.run(10)
    delivery = desk.answer(poll).delivery  # type: ignore[union-attr]
    assert delivery is not None
    assert delivery.until_ms[0] - delivery.now_ms >= 990
    assert desk.kinds()[-1] == Command.EXTEND


def test_a_proposal_that_could_not_be_made_is_made_again(desk: Desk) -> None:
    desk.publish("a", "b")
    desk.refuse_with = Overloaded("full")
    poll = desk.poll(max=1)
    desk.run(200)
    assert desk.answer(poll) is None
    desk.refuse_with = None
    desk.run(50)
    assert desk.answer(poll).names == ["a"]  # type: ignore[union-attr]
    desk.poll()
    desk.run(10)
    assert desk.delivered() == ["a", "b"]


def test_a_poll_whose_proposal_could_not_be_made_stays_first_in_line(desk: Desk) -> None:
    desk.publish("a", "b")
    desk.refuse_with = Overloaded("full")
    first, second = desk.poll(max=1), desk.poll(max=1)
    desk.run(60)
    desk.refuse_with = None
    desk.run(200)
    assert (desk.answer(first).names, desk.answer(second).names) == (["a"], ["b"])  # type: ignore[union-attr]


def test_a_proposal_that_could_not_be_made_is_made_again_whatever_else_wakes_the_leader(desk: Desk) -> None:
    desk.publish("a")
    desk.run(100)
    desk.refuse_with = Overloaded("full")
    desk.poll("other", wait=5)
    poll = desk.poll()
    desk.run(1)
    desk.refuse_with = None
    desk.run(100)
    assert desk.answer(poll).names == ["a"]  # type: ignore[union-attr]


def test_a_proposal_that_could_not_be_made_in_time(desk: Desk) -> None:
    desk.publish("a")
    desk.refuse_with = Overloaded("full")
    poll = desk.poll(wait=100)
    desk.run(200)
    assert desk.answer(poll).names == []  # type: ignore[union-attr]


def test_an_unknown_outcome_is_called_so(desk: Desk) -> None:
    desk.publish("a")
    desk.refuse_with = OutcomeUnknown()
    poll = desk.poll(consumer="x", request=b"7")
    desk.run(1)
    desk.refuse_with = None
    assert isinstance(desk.answer(poll).error, OutcomeUnknown)  # type: ignore[union-attr]
    again = desk.poll(consumer="x", request=b"7")
    desk.run(50)
    assert desk.answer(again).names == ["a"]  # type: ignore[union-attr]


def test_no_leader_no_grant(desk: Desk) -> None:
    waiting = desk.poll()
    desk.publish("a", topic="other")
    desk.stuck = True
    proposed = desk.poll("other")
    desk.run(10)
    desk.depose()
    assert isinstance(desk.answer(waiting).error, NoLeader)  # type: ignore[union-attr]
    assert isinstance(desk.answer(proposed).error, OutcomeUnknown)  # type: ignore[union-attr]
    late = desk.poll()
    assert isinstance(desk.answer(late).error, NoLeader)  # type: ignore[union-attr]
    desk.unstick()  # the grant is committed after all: nobody is told
    desk.run(100)
    assert len(desk.received) == 3


def test_the_cursor_is_proposed_while_it_changes_and_then_no_more(desk: Desk) -> None:
    for n in range(100):
        desk.publish(f"m{n}", at=2_000 + n * 10)
    desk.run_to(2_550)
    assert abs(desk.ledger.cursor[2] - 52) <= 6
    hour, second, local = desk.core.cursor
    assert second == 2
    assert local in (55, 56)
    desk.run_to(3_500)
    sent = [at for at, kind in desk.log if kind == Command.CURSOR]
    assert all(b - a >= 49 for a, b in pairwise(sent))
    assert 16 <= len(sent) <= 20
    assert desk.ledger.cursor == (hour, 2, 100)
    written = desk.index
    desk.run(9 * 60_000)
    assert desk.index == written


def test_lateness_is_counted(desk: Desk) -> None:
    desk.publish("a", delay=100)
    desk.poll()
    desk.run(200)
    desk.publish("b", delay=100)
    desk.run(1_100)
    desk.poll()
    desk.run(10)
    assert desk.delivery.handed_out == 2
    assert sum(desk.delivery.lateness.counts) == 2
    assert 1_000 <= desk.delivery.lateness.sum_ms <= 1_010


def test_only_what_the_cluster_took_counts_as_its_delay(desk: Desk) -> None:
    """A message that nobody asked for is late, and the cluster has no part in that; nor has it in a topic's limit, nor
    in the lease of a consumer that never answered."""
    desk.publish("unasked", delay=100)
    desk.run(60_000)
    desk.poll(max=1)
    desk.run(10)
    delays = desk.delivery.delays.histogram
    assert (sum(delays.counts), delays.sum < 0.05) == (1, True)
    assert desk.delivery.lateness.sum_ms > 59_000
    desk.put("slow", rate=0.1)
    desk.publish("first", "second", topic="slow")
    desk.poll("slow", max=1)
    desk.poll("slow", max=1)
    desk.poll(wait=60_000)  # gets "unasked" when its lease is over
    desk.run(40_000)
    assert len(desk.received) == 4
    assert (sum(delays.counts), delays.sum < 0.05) == (1, True)
    desk.publish("stuck", delay=1_000)
    desk.poll()
    desk.stuck = True
    desk.run(4_000)
    desk.unstick()
    desk.run(10)
    assert sum(delays.counts) == 2
    assert 2.9 < delays.sum < 3.1


def test_ready_is_what_is_due_and_not_leased(desk: Desk) -> None:
    desk.publish("a", "b", "c", delay=100)
    due_ms = desk.ledger.now_ms + 100
    desk.publish("d", delay=60_000)
    desk.run(200)
    number = desk.ledger.topic("t").number  # type: ignore[union-attr]
    assert desk.delivery.ready_counts()[number] == (3, due_ms)
    desk.poll(max=1)
    desk.run(10)
    desk.cancel("b", "d")
    assert desk.delivery.ready_counts()[number][0] == 1
    desk.nack(desk.received[0], delay=0)
    desk.run(2)
    assert desk.delivery.ready_counts()[number][0] == 2


def test_the_oldest_of_many_topics(desk: Desk) -> None:
    due = {}
    for n, topic in enumerate("tuv"):
        desk.publish(f"{topic}1", topic=topic, delay=100 + n)
        due[topic] = desk.ledger.now_ms + 1_000 + n
        desk.publish(f"{topic}2", topic=topic, delay=1_000 + n)
    desk.run(2_000)
    first = desk.delivery.ready_counts()
    # The first one of two topics is gone, and still stands in the window.
    desk.cancel("t1", "v1")
    numbers = {topic: desk.ledger.topic(topic).number for topic in "tuv"}  # type: ignore[union-attr]
    counts = desk.delivery.ready_counts()
    assert counts[numbers["t"]] == (1, due["t"])
    assert counts[numbers["u"]] == (2, first[numbers["u"]][1]) == (2, due["u"] - 900)
    assert counts[numbers["v"]] == (1, due["v"])
    assert desk.delivery.ready_counts([numbers["u"], 99]) == {numbers["u"]: counts[numbers["u"]]}


def test_a_deleted_topic_is_over_at_once(desk: Desk) -> None:
    from hadelay.codec.commands import encode_topic_delete

    desk.publish("a", "b", delay=100)
    desk.publish("c", delay=5_000)
    desk.run(200)
    desk.do(encode_topic_delete("t", force=True))
    poll = desk.poll()
    desk.publish("new", delay=7_000)
    desk.run(6_000)
    assert desk.answer(poll) is None
    desk.run(2_000)
    assert desk.answer(poll).names == ["new"]  # type: ignore[union-attr]
    assert desk.delivery.ready_counts() == {}


def test_ten_thousand_waiting_polls_cost_nothing_per_message() -> None:
    desk = Desk(checking=False)
    desk.lead()
    polls = [desk.poll(f"quiet{n % 500}") for n in range(10_000)]
    desk.run(10)
    desk.consume()
    before = desk.world.events
    for n in range(50):
        desk.publish(f"m{n}", delay=10 + n * 10)
    desk.run(1_000)
    assert len(desk.delivered()) == 50
    assert desk.world.events - before < 2_000
    for poll in polls:
        desk.delivery.cancel_poll(poll)
    assert desk.delivery.waiting_polls() == 1


def test_answered_polls_leave_no_deadlines_behind() -> None:
    desk = Desk(checking=False, commit_ms=0)
    desk.lead()
    for _ in range(5_000):
        desk.delivery.cancel_poll(desk.poll())
    deadlines = desk.core.waiting.deadlines
    assert len(deadlines) == 0
    assert len(deadlines._heap) <= 1_100


def test_a_grant_that_is_committed_after_it_was_given_up_runs_out(desk: Desk) -> None:
    """Found by the simulator (seed 17): nobody waited for it any more, so nobody watched its lease."""
    desk.stuck = True
    poll = desk.poll(lease=500)
    desk.publish("a")
    desk.run(50)
    (stamp, command, done), *_ = list(desk._waiting)
    desk._waiting.clear()
    done(None, OutcomeUnknown("no majority in time"))
    desk.stuck = False
    desk._commit(stamp, command, None)
    assert len(desk.ledger.grants) == 1
    desk.run(2_000)
    assert not desk.ledger.grants
    assert Command.EXPIRE in desk.kinds()
    assert isinstance(desk.answer(poll).error, OutcomeUnknown)


def knowing_how_long_grants_take(desk: Desk) -> None:
    """The next grants are proposed some 48 ms ahead of their time."""
    desk.commit_ms = 12
    desk.publish("first")
    desk.poll()
    desk.run(20)
    desk.received.clear()
    desk.commit_ms = 1


def test_a_lease_renewed_while_its_delivery_is_deferred_does_not_end_before_it_is_due(desk: Desk) -> None:
    knowing_how_long_grants_take(desk)
    desk.publish("a", at=2_000)
    gone = desk.poll(consumer="x", request=b"1", lease=10)
    desk.run_to(1_960)
    assert desk.ledger.grants
    desk.delivery.cancel_poll(gone)
    again = desk.poll(consumer="x", request=b"1", lease=10)
    desk.poll()
    desk.run_to(1_999)
    assert desk.received == []
    desk.run_to(2_002)
    answer = desk.answer(again)
    assert answer.names == ["a"]  # type: ignore[union-attr]
    assert answer.delivery.until_ms[0] - answer.delivery.now_ms >= 8  # type: ignore[union-attr]


def test_a_leader_that_slept_over_a_lease_renews_it_before_it_answers(desk: Desk) -> None:
    knowing_how_long_grants_take(desk)
    desk.publish("a", at=2_000)
    poll = desk.poll(lease=1_000)
    desk.run_to(1_990)
    assert desk.ledger.grants
    desk.runtime.pause()
    desk.run_to(5_000)
    desk.runtime.resume()
    desk.run(20)
    answer = desk.answer(poll)
    assert answer.names == ["a"]  # type: ignore[union-attr]
    assert answer.delivery.until_ms[0] - answer.delivery.now_ms > 900  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "command",
    [
        encode_topic_put("t", {"paused": True}),
        encode_purge("t", SCHEDULED | READY),
        encode_topic_delete("t", force=True),
        encode_audited("n1", "", "", "topic.pause", "t", encode_topic_put("t", {"paused": True})),
    ],
)
@pytest.mark.parametrize("deposed", [False, True])
def test_nothing_is_handed_out_once_a_pause_or_a_purge_is_answered(command: bytes, deposed: bool) -> None:
    """What was granted ahead of its time and held back goes out before the answer."""
    desk = Desk(commit_ms=12)
    desk.lead()
    desk.publish("first")
    desk.poll()
    desk.run(20)
    answers: list[float] = []
    first, second = desk.poll(max=1), desk.poll(max=1)
    desk.publish("a", at=2_000)
    desk.publish("b", at=2_009)
    desk.publish("c", at=2_030)
    desk.run_to(1_976)
    desk.ask(command, lambda result, error: answers.append(desk.now))
    desk.run_to(1_999)
    assert answers == []
    if deposed:
        desk.depose()
        assert len(answers) == 1
        return
    desk.poll()
    desk.run_to(3_000)
    assert [desk.answer(poll).names for poll in (first, second)] == [["a"], ["b"]]  # type: ignore[union-attr]
    assert len(answers) == 1
    assert [r.at for r in desk.received if r.names and r.at > answers[0]] == []
    assert answers[0] < 2_015
    # With nothing held back it is answered when it is applied.
    desk.ask(encode_topic_put("t", {"paused": None}), lambda result, error: answers.append(desk.now))
    desk.run(13)
    assert len(answers) == 2


def test_a_pause_is_answered_behind_the_latest_of_the_deferred_deliveries(desk: Desk) -> None:
    """The delivery that was granted last goes out before the other."""
    knowing_how_long_grants_take(desk)
    late = desk.poll(max=1)
    desk.publish("late", at=2_040)
    desk.run_to(1_996)
    early = desk.poll(max=1)
    desk.publish("early", at=2_020)
    desk.run_to(2_000)
    assert len(desk.ledger.grants) == 3, "both are granted; the third grant is that of the first message"
    answers: list[float] = []
    desk.ask(encode_topic_put("t", {"paused": True}), lambda result, error: answers.append(desk.now))
    desk.run_to(3_000)
    assert [desk.answer(poll).names for poll in (late, early)] == [["late"], ["early"]]  # type: ignore[union-attr]
    assert desk.answer(early).at < desk.answer(late).at <= answers[0] < 2_042  # type: ignore[union-attr]


def test_grants_go_on_when_a_long_term_has_used_up_their_numbers(desk: Desk) -> None:
    desk.publish("held")
    taken = desk.poll()
    desk.run(10)
    assert desk.answer(taken).delivery.seq == 1  # type: ignore[union-attr]
    grants = desk.delivery._grants
    assert grants is not None
    grants.seq = MAX_SEQ - 1
    polls = [desk.poll(max=1) for _ in range(3)]
    desk.publish("a", "b", "c")
    desk.run(10)
    answers = [desk.answer(poll) for poll in polls]
    assert [answer.delivery.seq for answer in answers] == [MAX_SEQ, 2, 3]  # type: ignore[union-attr]
    assert [desk.ack(answer) for answer in answers] == [[LeaseOutcome.DONE]] * 3  # type: ignore[arg-type]
    assert desk.ack(desk.answer(taken)) == [LeaseOutcome.DONE]  # type: ignore[arg-type]


def test_the_names_that_waiting_polls_give_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadelay.handout.waiting.MAX_NAMED", 10)
    monkeypatch.setattr("hadelay.handout.waiting.MAX_UNKNOWN", 4)
    desk.publish("a", "b", topic="t")
    desk.publish("c", topic="u")
    waiting = [desk.poll("x", "y", "z"), desk.poll("x", "y")]
    too_many = desk.poll("v", "w")
    assert isinstance(desk.answer(too_many).error, LimitReached)  # type: ignore[union-attr]
    served = desk.poll("x", "z", "t", "u")
    desk.run(10)
    assert desk.answer(served).names == ["a", "b", "c"]  # type: ignore[union-attr]
    waiting.append(desk.poll("t", "u", "x", "y", "z"))
    one_more = desk.poll("t", "u")
    assert isinstance(desk.answer(one_more).error, LimitReached)  # type: ignore[union-attr]
    # Who names one topic, as those do who push, is not shut out by who names many.
    waiting.append(desk.poll("t"))
    assert desk.answer(waiting[-1]) is None
    for poll in waiting:
        desk.delivery.cancel_poll(poll)
    assert desk.core.waiting.named == len(desk.core.waiting.queues) == 0
    assert not desk.core.windows.by_name.keys() - {"t", "u"}
    assert desk.answer(desk.poll("v", "w")) is None


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_repetition_gets_what_is_being_granted_to_a_poll_that_hung_up(desk: Desk, times: int) -> None:
    """As when a consumer stops: it drops the poll, and fetches at once what the poll may have been granted. The grant
    is not committed by then, and its messages would be leased to nobody."""
    desk.commit_ms = 50
    gone = desk.poll(consumer="c", request=b"r")
    desk.publish("a")
    desk.until(lambda: bool(desk.offers()))
    for _ in range(times):
        desk.delivery.cancel_poll(gone)
        gone = desk.poll(consumer="c", request=b"r", wait=0)
    desk.until(lambda: desk.answer(gone) is not None)
    answer = desk.answer(gone)
    assert answer is not None
    assert (answer.error, answer.names, len(desk.received)) == (None, ["a"], 1)
    assert desk.ack(answer) == [LeaseOutcome.DONE]
    assert not desk.delivery._grants._requests  # type: ignore[union-attr]


def test_a_poll_that_hung_up_during_its_grant_is_forgotten_afterwards(desk: Desk) -> None:
    desk.commit_ms = 50
    gone = desk.poll(consumer="c", request=b"r", lease=1_000)
    desk.publish("a")
    desk.until(lambda: bool(desk.offers()))
    desk.delivery.cancel_poll(gone)
    desk.run(60)
    assert not desk.delivery._grants._requests  # type: ignore[union-attr]
    later = desk.poll(consumer="c", request=b"r", wait=0)
    desk.until(lambda: desk.answer(later) is not None)
    assert desk.answer(later).names == ["a"]  # type: ignore[union-attr]
