"""Subscriptions that begin with pending messages: each gets one copy, whatever happens before the job reaches it."""

from __future__ import annotations

from typing import Any

import pytest

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.jobcommands import LAST, FillBegin, JobBegin, JobSpec
from hadelay.codec.publishcommand import hash_group
from hadelay.codec.results import Done, JobBegun, Refused, TargetOutcome
from hadelay.ledger import checkpoint
from hadelay.ledger.groups.messagegroups import find_group
from hadelay.ledger.hours.lookup import find_entry
from hadelay.ledger.jobs.bulkjob import BulkJob
from hadelay.ledger.jobs.bulkscan import JobScan
from hadelay.ledger.messages.copies import copies_of, published_id
from hadelay.model import DEAD_HOURS, HOUR_MS, KEEP, REPLACE, pack_id
from tests.ledger.test_subscriptions import message, record_of, subscribed, topics_of
from tests.ledger.world import START_HOUR, START_MS, World

LATER = 30 * 24 * HOUR_MS
SOON = 600_000
MINUTE = 60_000
GROUP = hash_group("1")


def fill(world: World, name: str = "late", of: str = "orders", **config: Any) -> Any:
    if world.ledger.topic(of) is None:
        world.one(commands.encode_topic_put(of, {}))
    return world.one(commands.encode_subscription_fill(FillBegin("n1", "", of, name, config)))


def the_job(world: World) -> BulkJob:
    return next(reversed(world.ledger.jobs.values()))


def run(world: World, most: int = 500) -> BulkJob:
    """Let the job run to its end, `most` messages per step."""
    job = the_job(world)
    while not job.ended_ms:
        scan = JobScan(world.ledger, job.spec, job.topics, job.began_ms, job.cursor)
        hour, rows = scan.step(world.ledger.now_ms)
        cursor = scan.cursor if len(rows) <= most else (hour, int(rows["index"][most]))
        entries = [pack_id(0, hour, index) for index in rows["index"][:most].tolist()]
        assert world.one(commands.encode_job_step(job.number, job.cursor, cursor, entries)) == Done()
    return job


def found_by(world: World) -> tuple[BulkJob, list[int]]:
    """The job, and the entries that its search finds now, as a leader remembers them until it proposes a step."""
    job = the_job(world)
    scan, entries = JobScan(world.ledger, job.spec, job.topics, job.began_ms, job.cursor), list[int]()
    while scan.cursor != LAST:
        hour, rows = scan.step(world.ledger.now_ms)
        entries += [pack_id(0, hour, index) for index in rows["index"].tolist()]
    return job, entries


def pass_hours(world: World, hours: int) -> None:
    """Let hours pass, with their maintenance."""
    world.now += hours * HOUR_MS
    world.apply(commands.encode_noop())
    for hour in world.store.hours():
        world.maintain(Job.ROLL_FORWARD, hour)
        for _ in range(3):
            world.maintain(Job.DROP_DEAD if hour >= DEAD_HOURS else Job.RETIRE, hour)


def copy_of(world: World, message_id: int) -> int:
    (copy,) = copies_of(world.ledger, message_id)
    assert published_id(world.ledger, copy) == message_id
    return copy


def test_pending_messages_are_copied_once_and_later_ones_as_usual() -> None:
    world = World()
    before = world.ids(message(SOON, body=b"one"), message(2 * HOUR_MS, body=b"two"), message(0, body=b"three"))
    assert isinstance(fill(world), Done)
    (after,) = world.ids(message(SOON))
    assert copies_of(world.ledger, after) == [after + 1]
    job = run(world, most=1)
    assert (job.done, job.settled, job.refused, job.stopped) == (3, 0, 0, False)
    assert copies_of(world.ledger, after) == [after + 1]
    for published, body, due in zip(before, (b"one", b"two", b"three"), (SOON, 2 * HOUR_MS, 0), strict=True):
        copy = copy_of(world, published)
        place, record = find_entry(world.ledger, copy), record_of(world, copy)
        assert place is not None
        assert int(place.rows["deliver_at_ms"][0]) == record.deliver_at_ms == START_MS + due
        assert (record.first_id, record.body, record.published_at_ms) == (copy, body, START_MS)
    assert world.topic("orders~late").pending == 4
    world.restart()
    assert topics_of(world, before[0]).keys() == {"orders", "orders~late"}


def test_commands_for_the_published_id_and_the_key_reach_the_copy() -> None:
    world = World()
    first, second, third = world.ids(message(SOON), message(SOON, key="k"), message(SOON, key="l"))
    fill(world)
    run(world)
    copies = [copy_of(world, one) for one in (first, second, third)]
    world.cancel(first)
    world.one(commands.encode_reschedule("n1", 5_000, True, [], [("orders", b"k")]))
    place = find_entry(world.ledger, copies[1])
    assert place is not None
    assert int(place.rows["deliver_at_ms"][0]) == START_MS + 5_000
    world.publish(message(SOON, key="l", mode=REPLACE))
    assert world.states(*copies) == ["cancelled", "scheduled", "cancelled"]
    world.cancel(copies[1])
    assert world.states(second, copies[1]) == ["scheduled", "cancelled"]


def test_the_filter_the_ttl_and_the_group_hold() -> None:
    world = World()
    ids = world.ids(
        message(SOON, ("eu",), group=1), message(SOON, ("eu",), group=1), message(SOON, ("us",)),
        message(SOON, ("eu",), ttl_ms=1_000),
    )  # fmt: skip
    fill(world, tags=["eu"], group_concurrency=1, max_attempts=3)
    run(world, most=1)
    copies = [copies_of(world.ledger, one) for one in ids]
    assert [len(each) for each in copies] == [1, 1, 0, 1]
    assert world.states(copies[0][0], copies[1][0], copies[3][0]) == ["scheduled", "blocked", "scheduled"]
    world.now = SOON + 1_000
    world.maintain(Job.TTL_EXPIRE)
    assert world.states(copies[3][0]) == ["expired"]


def test_a_copy_whose_ttl_was_over_before_ends_alike_on_every_node() -> None:
    """A node that restarts forgets how far it has been through the table of TTLs; what it applies must not differ."""
    ends = []
    for restarts in (False, True):
        world = World()
        overdue, _ = world.ids(message(group=1), message(topic="brief", ttl_ms=MINUTE))
        world.now = 2 * MINUTE
        assert world.maintain(Job.TTL_EXPIRE).count == 1
        fill(world, ttl_ms=MINUTE // 2, group_concurrency=1, max_attempts=3)
        run(world)
        if restarts:
            world.restart()
        assert world.maintain(Job.TTL_EXPIRE).count == 1
        assert world.states(copy_of(world, overdue)) == ["expired"]
        late = world.topic("orders~late")
        assert (late.pending, find_group(world.ledger, late, GROUP)) == (0, None)
        ends.append((checkpoint.dump(world.ledger), world.tables.rows))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("hours", [0, 3])
def test_a_message_that_is_acked_before_the_job_reaches_it_is_copied(hours: int) -> None:
    world = World()
    (acked,) = world.ids(message())
    lease = world.lease(acked, lease_ms=LATER)
    fill(world)
    world.now += hours * HOUR_MS
    assert world.ack(lease) == [0]
    world.restart()
    world.now += LATER
    world.apply(commands.encode_noop())
    assert world.maintain(Job.RETIRE, START_HOUR).code == "hour_open"
    run(world)
    copy = copy_of(world, acked)
    assert world.states(acked, copy) == ["acked", "ready"]
    assert world.maintain(Job.RETIRE, START_HOUR).done
    assert world.states(acked, copy) == ["gone", "ready"]
    world.cancel(acked)
    assert world.states(copy) == ["cancelled"], "the published id means the copy, also after the message is gone"


def test_a_message_that_is_moved_first_is_copied_before_and_the_copy_follows_a_reschedule() -> None:
    world = World()
    nacked, moved, shifted = world.ids(message(), message(SOON), message(2 * SOON))
    lease = world.lease(nacked)
    fill(world)
    world.nack(lease, delay_ms=HOUR_MS)
    world.one(commands.encode_reschedule("n1", 3 * HOUR_MS, True, [moved]))
    copies = [copy_of(world, one) for one in (nacked, moved)]
    assert world.states(*copies) == ["ready", "scheduled"]
    due = [int(find_entry(world.ledger, one).rows["deliver_at_ms"][0]) - START_MS for one in (moved, copies[1])]  # type: ignore[union-attr]
    assert due == [3 * HOUR_MS] * 2
    begun = world.one(
        commands.encode_job_begin(
            JobBegin("n1", "", b"", ["orders"], JobSpec("reschedule", "orders", shift_ms=HOUR_MS))
        )
    )
    assert isinstance(begun, JobBegun)
    place = world.place(shifted)
    world.one(commands.encode_job_step(begun.job, (0, 0), (place[0], place[1] + 1), [shifted]))
    copy = copy_of(world, shifted)
    assert int(find_entry(world.ledger, copy).rows["deliver_at_ms"][0]) == START_MS + 2 * SOON  # type: ignore[union-attr]
    job = world.ledger.jobs[1]
    world.one(commands.encode_job_step(job.number, (0, 0), LAST, [pack_id(0, START_HOUR, n) for n in range(3)]))
    assert (job.done, job.settled) == (3, 3)
    assert [len(copies_of(world.ledger, one)) for one in (nacked, moved, shifted)] == [1, 1, 1]


def test_a_message_that_is_carried_between_the_search_and_the_step_is_copied() -> None:
    world = World()
    waiting, acked = world.ids(message(), message())
    fill(world)
    world.now += 2 * HOUR_MS
    world.apply(commands.encode_noop())
    job, entries = found_by(world)
    world.maintain(Job.ROLL_FORWARD, START_HOUR)
    world.ack(world.lease(acked))
    world.one(commands.encode_job_step(job.number, (0, 0), LAST, entries))
    assert (job.done, job.settled) == (2, 0)
    assert world.states(copy_of(world, waiting), copy_of(world, acked)) == ["ready", "ready"]


@pytest.mark.parametrize("dies", [False, True])
def test_a_message_that_is_carried_while_its_copy_ends_gets_no_second_copy(dies: bool) -> None:
    world = World()
    (published,) = world.ids(message())
    fill(world, max_attempts=1, dead_retention_ms=HOUR_MS)
    job = the_job(world)
    world.one(commands.encode_job_step(job.number, (0, 0), (START_HOUR, 1), [pack_id(0, START_HOUR, 0)]))
    lease = world.lease(copy_of(world, published))
    (world.nack if dies else world.ack)(lease)
    pass_hours(world, 3)
    assert run(world).done == 1
    pass_hours(world, 1)
    assert world.ledger.filled_copies == 0, "now the copy is forgotten"


@pytest.mark.parametrize("acked", [False, True])
def test_a_message_of_the_topic_s_former_life_is_not_copied(acked: bool) -> None:
    world = World()
    (leased,) = world.ids(message())
    lease = world.lease(leased, lease_ms=LATER)
    world.one(commands.encode_topic_delete("orders", True))
    fill(world)
    if acked:
        world.ack(lease)
    assert run(world).done == 0
    assert copies_of(world.ledger, leased) == []


def test_a_purge_does_not_take_the_copies_of_acked_messages() -> None:
    world = World()
    before, after, cancelled = world.ids(message(), message(), message(SOON))
    leases = [world.lease(one) for one in (before, after)]
    fill(world)
    world.ack(leases[0])
    world.one(commands.encode_purge("orders", 3))
    world.ack(leases[1])
    run(world)
    assert world.states(copy_of(world, before), copy_of(world, after)) == ["ready", "ready"]
    assert copies_of(world.ledger, cancelled) == []


def test_a_message_that_dies_first_is_copied_and_one_that_is_cancelled_or_purged_is_not() -> None:
    world = World()
    world.one(commands.encode_topic_put("orders", {"max_attempts": 1}))
    dying, cancelled, purged = world.ids(message(), message(SOON), message(SOON))
    lease = world.lease(dying)
    fill(world)
    world.nack(lease)
    world.cancel(cancelled)
    world.one(commands.encode_purge("orders", 3))
    job = run(world)
    assert (job.done, world.states(dying, copy_of(world, dying))) == (1, ["dead", "ready"])
    assert copies_of(world.ledger, cancelled) == copies_of(world.ledger, purged) == []


def test_a_fill_that_costs_more_per_message_takes_fewer_messages_at_once() -> None:
    world = World()
    world.checking = False
    world.one(commands.encode_topic_put("orders", {"max_attempts": 1, "dead_retention_ms": HOUR_MS}))
    lease = world.lease(*world.ids(*(message() for _ in range(1_100))))
    fill(world)
    assert 0 < world.nack(lease).count(0) <= 1_024, "each is copied and moved"
    scan = JobScan(world.ledger, JobSpec("redrive", "orders", error="x"), {0: 1 << 16}, START_MS)
    dead, _ = scan.step(world.ledger.now_ms)
    assert scan.cursor == (dead, 512), "the last error of each letter is looked up"
    world.one(commands.encode_job_stop(1))
    world.now = LATER
    assert world.maintain(Job.DROP_DEAD, dead).count == 250, "the client key of each letter is looked for in the copies"


def test_a_key_that_another_message_has_by_then_stays_with_that_message() -> None:
    world = World()
    (acked,) = world.ids(message(key="k"))
    lease = world.lease(acked)
    fill(world)
    world.ack(lease)
    (other,) = world.ids(message(SOON, key="k", mode=KEEP))
    assert other != acked
    run(world)
    copy = copy_of(world, acked)
    again = world.publish(message(SOON, key="k", mode=KEEP))
    assert (int(again.ids[0]), bool(again.duplicate[0])) == (other, True)
    world.cancel(other)
    assert not world.publish(message(SOON, key="k", mode=KEEP)).duplicate[0]
    assert world.states(copy) == ["ready"]


def test_quotas_do_not_refuse_copies_but_count_them_and_a_dropping_subscription_drops() -> None:
    world = World()
    world.ids(*(message(SOON) for _ in range(3)))
    fill(world, max_messages=2)
    assert run(world).done == 3
    assert world.publish(message()).codes.tolist() == [13]
    world.one(commands.encode_topic_delete("orders~late", True))
    fill(world, max_messages=2, on_full="drop")
    job = run(world)
    assert (job.done, job.refused, world.topic("orders~late").dropped) == (2, 1, 1)


@pytest.mark.parametrize("ends", [False, True])
def test_a_copy_is_found_once_when_the_hour_of_its_message_is_deleted(ends: bool) -> None:
    """It was filed in the same hour, a few entries behind the message, where copies of new messages are."""
    world = World()
    (first,) = world.ids(message(SOON))
    fill(world)
    run(world)
    world.now += 4 * HOUR_MS
    world.apply(commands.encode_noop())
    for _ in range(3):
        world.maintain(Job.ROLL_FORWARD, START_HOUR)
        world.maintain(Job.RETIRE, START_HOUR)
    assert not world.store.count(START_HOUR)
    copy = copy_of(world, first)
    if ends:
        world.cancel(first)
        assert world.states(first, copy) == ["cancelled", "cancelled"]
    else:
        world.one(commands.encode_reschedule("n1", SOON, True, [first]))
        assert world.states(first, copy) == ["scheduled", "scheduled"]
    assert world.topic("orders~late").open == 1 - ends


def test_deleting_the_subscription_or_stopping_the_job_ends_the_fill() -> None:
    world = World()
    first, second = world.ids(message(), message(SOON))
    lease = world.lease(first)
    fill(world)
    world.ack(lease)
    world.one(commands.encode_topic_delete("orders~late", True))
    job = the_job(world)
    assert job.stopped
    assert not world.ledger.fills
    assert world.one(commands.encode_job_step(job.number, (0, 0), LAST, [])).code == "stale"
    assert isinstance(fill(world), Done)
    assert world.one(commands.encode_job_stop(2)) == Done()
    assert copies_of(world.ledger, first) == copies_of(world.ledger, second) == []
    assert isinstance(fill(world, "third"), Done), "a fill that was stopped does not keep others off"
    assert run(world).done == 1, "what was acked before this fill is not meant"


def test_a_new_life_of_a_subscription_gets_copies_of_its_own() -> None:
    world = World()
    (published,) = world.ids(message(SOON))
    for _ in range(3):
        fill(world)
        assert run(world).done == 1
        world.one(commands.encode_topic_delete("orders~late", True))
    fill(world)
    run(world)
    assert len(topics_of(world, published)) == 2
    assert world.cancel(published) == [TargetOutcome.DONE]


def test_refused_fills() -> None:
    world = World()
    world.one(commands.encode_topic_put("orders", {"own_queue": False}))
    assert fill(world).code == "no_own_queue"
    assert fill(world, "b", of="orders~late").code == "bad_config"
    world.one(commands.encode_topic_put("orders", {"own_queue": None}))
    assert fill(world, "a~b").code == "bad_config"
    assert not world.ledger.jobs
    assert isinstance(fill(world), Done)
    assert isinstance(fill(world), Done), "a repeated request"
    assert len(world.ledger.jobs) == 1
    assert fill(world, "other").code == "fill_running"
    spec = JobSpec("fill", "orders", subscription="orders~late")
    begin = commands.encode_job_begin(JobBegin("n1", "", b"", ["orders"], spec))
    assert world.one(begin).code == "bad_job"
    beyond = [pack_id(0, START_HOUR, 7), pack_id(0, DEAD_HOURS + START_HOUR, 0)]
    assert world.one(commands.encode_job_step(1, (0, 0), LAST, beyond)) == Done()


def test_the_tables_forget_copies_with_their_hours() -> None:
    world = World()
    world.one(commands.encode_topic_put("orders", {}))
    world.ids(*(message(SOON) for _ in range(3)))
    fill(world, max_attempts=1, dead_retention_ms=HOUR_MS)
    run(world)
    assert world.ledger.filled_copies == 3
    world.now = SOON
    copies = _copies(world, START_HOUR)
    world.ack(world.lease(copies[0]))
    world.nack(world.lease(copies[1]))
    world.cancel(copies[2])
    world.one(commands.encode_purge("orders", 3))
    world.maintain(Job.SWEEP)
    world.now += LATER
    world.apply(commands.encode_noop())
    for _ in range(3):
        world.maintain(Job.SWEEP)
        for hour in world.store.hours():
            world.maintain(Job.DROP_DEAD if hour >= DEAD_HOURS else Job.RETIRE, hour)
    assert world.store.hours() == []
    assert world.ledger.filled_copies == 0
    subscribed(world, "billing")
    (published,) = world.ids(message(SOON))
    assert len(copies_of(world.ledger, published)) == 2


def _copies(world: World, hour: int) -> list[int]:
    rows = world.store.entries(hour, slice(0, world.store.count(hour)))
    number = world.topic("orders~late").number
    return [int(row["first_id"]) for row in rows if row["topic"] == number]


def test_a_message_that_was_carried_since_the_search_keeps_its_old_hour() -> None:
    """Else the step names an entry that is gone: the fill ends, and the message has no copy."""
    world = World()
    (waiting,) = world.ids(message())
    fill(world)
    world.now += 25 * HOUR_MS
    world.apply(commands.encode_noop())
    job, entries = found_by(world)
    world.maintain(Job.ROLL_FORWARD, START_HOUR)
    refused = world.maintain(Job.RETIRE, START_HOUR)
    assert isinstance(refused, Refused)
    assert refused.code == "hour_open"
    world.one(commands.encode_job_step(job.number, (0, 0), LAST, entries))
    assert job.ended_ms
    assert len(copies_of(world.ledger, waiting)) == 1
    assert not isinstance(world.maintain(Job.RETIRE, START_HOUR), Refused)
