"""Definite refusals under a request's key: a repetition gets the same answer, whatever has changed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from hadelay.codec import commands, schedules
from hadelay.codec.jobcommands import JobBegin, JobSpec
from hadelay.codec.results import RETRYABLE, JobBegun, PublishResult, Refused, RowCode
from hadelay.codec.schedules import ANY_VERSION
from hadelay.ledger.jobs import bulk
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from hadelay.model import NONE32, encode_id
from hadelay.server import refusals
from hadelay.settings.cluster import Settings
from tests.ledger.test_schedules import SECOND, Owner, every
from tests.ledger.world import World, draft


def trigger(world: World, key: bytes = b"k", name: str = "s") -> Any:
    return world.one(schedules.encode_run(name, ANY_VERSION, [(0, 0)], key))


def begin(world: World, topic: str = "t", request: bytes = b"r" * 16, **spec: Any) -> Any:
    begun = JobBegin("n1", "", request, [topic], JobSpec(spec.pop("action", "cancel"), topic, **spec))
    return world.one(commands.encode_job_begin(begun))


def test_a_trigger_refused_for_an_overlap_makes_no_message_later() -> None:
    world = Owner()
    world.put(every(1_000, overlap=1))
    (pending,) = trigger(world, b"first").ids.tolist()
    refused = trigger(world)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.detail) == ("overlap", encode_id(pending))
    assert world.cancel(pending) == [0]
    assert (trigger(world), world.counts()[-1]) == (refused, 1)
    assert isinstance(trigger(world, b"another"), PublishResult)


def test_a_trigger_of_no_schedule_makes_no_message_when_there_is_one() -> None:
    world = Owner()
    refused = trigger(world)
    assert refused.code == "no_schedule"
    world.put(every(1_000))
    assert (trigger(world), world.counts()[-1]) == (refused, 0)
    other = world.one(schedules.encode_run("s", 1, [(5 * SECOND, 0)], b"k"))
    assert other.code == "key_conflict"


def test_a_backfill_of_an_older_version_makes_no_messages_later() -> None:
    world = Owner()
    world.put(every(10))
    late = schedules.encode_run("s", 9, [(SECOND, 0)], b"k")
    refused = world.one(late)
    assert refused.code == "schedule_changed"
    for n in range(8):
        world.put(every(20 + n))
    assert world.state().version == 9
    assert (world.one(late), world.counts()[-1]) == (refused, 0)


def test_a_trigger_that_a_limit_refuses_is_judged_anew() -> None:
    world = Owner()
    world.put(every(1_000))
    world.one(commands.encode_topic_put("t", {"max_messages": 1}))
    (pending,) = world.ids(draft(in_ms=SECOND))
    assert trigger(world).codes.tolist() == [RowCode.TOO_MANY_MESSAGES]
    world.cancel(pending)
    assert (trigger(world).codes.tolist(), world.counts()[-1]) == ([RowCode.OK], 1)


def test_a_remembered_refusal_ends_with_its_window() -> None:
    world = Owner(Settings(idempotency_window_ms=1_000))
    assert trigger(world).code == "no_schedule"
    world.put(every(1_000))
    world.now = 2_500
    assert isinstance(trigger(world), PublishResult)


@pytest.mark.parametrize(
    ("topic", "spec", "code"),
    [("later", {}, "no_topic"), ("t", {"action": "reschedule", "at_ms": 1 << 60}, "too_far")],
)
def test_a_job_refused_for_good_begins_no_job_later(topic: str, spec: dict[str, Any], code: str) -> None:
    world = World()
    world.ids(draft())
    refused = begin(world, topic, **spec)
    assert refused.code == code
    world.ids(draft("later"))
    world.ledger.settings = Settings(max_delay_ms=1 << 62)
    assert (begin(world, topic, **spec), world.ledger.jobs) == (refused, {})
    assert begin(world, "t", action="deliver_now").code == "job_conflict"
    assert begin(world, topic, b"s" * 16, **spec) == JobBegun(1, False)


def test_a_job_that_a_limit_refuses_is_judged_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.ids(draft())
    with monkeypatch.context() as patch:
        patch.setattr(bulk, "MAX_JOBS", 0)
        assert begin(world).code == "too_many_jobs"
    assert begin(world) == JobBegun(1, False)


def test_a_purge_is_a_part_of_the_answer() -> None:
    """The message of the first answer was purged: nothing of it would be delivered, and the repetition says so."""
    world = Owner()
    world.put(every(1_000))
    (made,) = trigger(world).ids.tolist()
    world.one(commands.encode_purge("t", READY | SCHEDULED))
    again = trigger(world)
    assert (again.codes.tolist(), again.others.tolist()) == ([RowCode.KEY_CANCELLED], [made])


def test_remembered_refusals_are_those_answered_as_not_retryable() -> None:
    """A refusal that the API calls final must be remembered, and one that it calls retryable must not be."""
    limits = refusals.Refusals(lambda: 0.0, lambda topic: 0)
    for code in RowCode:
        if code != RowCode.OK:
            assert limits.problem(code, "t", NONE32).retryable == (code in RETRYABLE), code
    for kind in refusals._REFUSALS:
        # A level is raised once for all; the commands of a level remember nothing below it.
        if kind != "needs_upgrade":
            result = Refused(kind, "detail")
            assert refusals.refusal(result).retryable == result.retryable, kind
