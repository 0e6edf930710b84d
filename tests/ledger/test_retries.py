"""Messages that wait after a failed attempt: the topic's count, the list, and the job that means them. After each
command `World` recounts them from the index (chaos/sim/ledgercheck.py)."""

from __future__ import annotations

import pytest

from hadelay.codec import commands
from hadelay.codec.commands import DEAD_NOW, uncounted
from hadelay.codec.commandtypes import Job
from hadelay.codec.jobcommands import LAST, JobSpec
from hadelay.codec.results import Refused, TargetOutcome
from hadelay.ledger.jobs.bulkscan import JobScan
from hadelay.ledger.topics import topicchanges
from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS, PENDING, Event, State
from tests.ledger.test_bulk import begin, counts, run
from tests.ledger.test_listing import listed, pages, query
from tests.ledger.world import START_HOUR, START_MS, World, draft

NOBODY: frozenset[State] = frozenset()


def failed(world: World, count: int = 1, *, delay_ms: int = 60_000, topic: str = "t") -> list[int]:
    """Messages that wait after a nack."""
    ids = world.ids(*[draft(topic)] * count)
    assert world.nack(world.lease(*ids), delay_ms, "HTTP 503") == [0] * count
    return ids


def retrying(world: World, topic: str = "t") -> list[int]:
    """Ids of the retrying messages in due order; their number is the topic's count."""
    found = [message_id for message_id, _ in listed(world, query(world, NOBODY, topic=topic, retrying=True))]
    assert len(found) == world.topic(topic).retrying
    return found


def test_a_message_is_retrying_between_its_attempts() -> None:
    world = World()
    (message,) = failed(world)
    world.ids(draft(), draft(in_ms=5_000))
    assert retrying(world) == [message]
    assert world.states(message) == ["scheduled"], "retrying is no state of its own"
    world.now += 60_000
    assert world.states(message) == ["ready"]
    leases = world.lease(message)
    assert retrying(world) == []
    world.now += 30_000
    world.expire((world.term, world.seq))
    assert retrying(world) == [message], "a lease that ran out is a failed attempt"
    world.restart()
    assert retrying(world) == [message]
    assert world.ack(leases) == [0], "a late ack"
    assert retrying(world) == []


def test_a_message_given_back_untried_is_not_retrying() -> None:
    world = World()
    (snoozed,) = world.ids(draft())
    for _ in range(2):
        assert world.nack(world.lease(snoozed), uncounted(0)) == [0]
    assert (retrying(world), describe(world.ledger, snoozed).attempt) == ([], 2)
    assert world.nack(world.lease(snoozed), 0) == [0]
    assert world.nack(world.lease(snoozed), uncounted(0)) == [0]
    assert retrying(world) == [snoozed], "the failure before stays one"


def test_retrying_messages_that_end_or_move() -> None:
    world = World()
    cancelled, moved, far, expired = failed(world, 4)
    world.cancel(cancelled)
    world.one(commands.encode_reschedule("n1", 2 * HOUR_MS, True, [moved, far]))
    assert retrying(world) == [expired, moved, far]
    world.now += HOUR_MS
    while not world.maintain(Job.ROLL_FORWARD, START_HOUR).done:
        pass
    assert retrying(world) == [expired, moved, far], "rolled forward"
    world.now += 2 * HOUR_MS
    assert sorted(retrying(world)) == sorted([expired, moved, far])
    assert world.nack(world.lease(moved), DEAD_NOW) == [0]
    assert moved not in retrying(world), "dead"
    world.one(commands.encode_redrive("n1", "t", [moved]))
    assert moved not in retrying(world), "its attempts begin anew"


def test_the_count_follows_a_purge_and_a_deletion() -> None:
    world = World()
    soon, later = [*failed(world, delay_ms=0), *failed(world, delay_ms=HOUR_MS)]
    world.one(commands.encode_purge("t", topicchanges.READY))
    while not world.maintain(Job.SWEEP).done:
        pass
    assert (retrying(world), world.states(soon)) == ([later], ["cancelled"])
    world.one(commands.encode_purge("t", topicchanges.READY | topicchanges.SCHEDULED))
    assert retrying(world) == []
    failed(world)
    world.one(commands.encode_topic_delete("t", True))
    while not world.maintain(Job.SWEEP).done:
        pass
    failed(world)
    assert len(retrying(world)) == 1


def test_topics_are_counted_apart() -> None:
    world = World()
    (message,) = failed(world)
    (other,) = failed(world, topic="u")
    assert (retrying(world), retrying(world, "u")) == ([message], [other])


def test_the_next_attempt_is_described_with_the_last_error() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 9}))
    (message,) = failed(world)
    retry = describe(world.ledger, message, START_MS).retry
    assert retry is not None
    assert (retry.attempt, retry.most) == (2, 9)
    assert retry.failure is not None
    assert (retry.failure.event, retry.failure.attempt, retry.failure.reason) == (Event.NACKED, 1, "HTTP 503")
    (fresh,) = world.ids(draft())
    assert describe(world.ledger, fresh, START_MS).retry is None


def test_lists_of_retrying_messages_have_pages_and_other_states() -> None:
    world = World()
    ids = failed(world, 5)
    (ready,) = world.ids(draft())
    question = query(world, frozenset((State.READY,)), retrying=True, limit=2)
    assert sorted(message for message, _ in listed(world, question)) == sorted([*ids, ready])
    assert [len(page.rows) for page in pages(world, question)][:3] == [2, 2, 2]
    assert len(listed(world, query(world, PENDING, retrying=True))) == 6, "none is listed twice"


def test_a_job_for_retrying_messages_with_an_error() -> None:
    world = World()
    ids = failed(world, 2)
    (other,) = world.ids(draft())
    world.nack(world.lease(other), 60_000, "timeout after 30 s")
    (fresh,) = world.ids(draft(in_ms=60_000))
    begin(world, "deliver_now", error="timeout after 7 s")
    run(world, 1)
    assert (counts(world, 1)[0], world.states(other, *ids, fresh)) == (1, ["ready", *["scheduled"] * 3])
    begin(world, "cancel", retrying=True)
    run(world, 2)
    assert (counts(world, 2)[0], world.states(other, *ids, fresh)) == (3, [*["cancelled"] * 3, "scheduled"])
    refused = begin(world, "redrive", retrying=True)
    assert isinstance(refused, Refused)
    assert refused.code == "bad_job"


def test_a_scan_for_retrying_messages_passes_over_other_hours() -> None:
    world = World()
    failed(world)
    world.ids(*[draft(in_ms=hour * HOUR_MS) for hour in range(1, 20)])
    scan = JobScan(world.ledger, JobSpec("cancel", "t", retrying=True), {0: 1 << 16}, START_MS)
    hours = []
    while scan.cursor != LAST:
        hours.append(scan.step(START_MS)[0])
    assert hours == [START_HOUR, 0], "one hour, and the end"


@pytest.mark.parametrize("repeated", [False, True])
def test_a_reschedule_expects_the_due_time_that_its_sender_saw(repeated: bool) -> None:
    world = World()
    (message,) = world.ids(draft(in_ms=10_000))
    old, new = START_MS + 10_000, START_MS + 20_000
    move = commands.encode_reschedule("n1", new, False, [message], expected_ms=old)
    for _ in range(1 + repeated):
        result = world.one(move)
        assert (result.outcomes.tolist(), result.deliver_at_ms.tolist()) == ([TargetOutcome.DONE], [new])
    again = world.one(commands.encode_reschedule("n1", 90_000, True, [message], expected_ms=old))
    assert (again.outcomes.tolist(), again.deliver_at_ms.tolist()) == ([TargetOutcome.MOVED], [new])
    assert describe(world.ledger, message, START_MS).deliver_at_ms == new
    assert [event.moved_ms for event in describe(world.ledger, message, START_MS).history] == [(old, new)]
