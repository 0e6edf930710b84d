"""Bulk jobs, case by case: what is refused, what is meant, and what a purge in between does."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace

from hadelay.codec import commands, meta
from hadelay.codec.commandtypes import Command, Job
from hadelay.codec.jobcommands import LAST, JobBegin, JobSpec
from hadelay.codec.publishcommand import hash_group
from hadelay.codec.results import Done, JobBegun, JobResult, Refused
from hadelay.ledger.jobs import bulk
from hadelay.ledger.jobs.bulkscan import JobScan, passes
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from hadelay.ledger.views.describe import describe
from hadelay.model import DEAD_HOURS, HOUR_MS
from tests.ledger.world import START_HOUR, START_MS, World, draft

DAY_MS = 24 * HOUR_MS


def begin(world: World, action: Any, topic: str = "t", *, names: tuple[str, ...] = (), **spec: Any) -> Any:
    request = spec.pop("request", b"")
    begun = JobBegin("n1", "shop", request, list(names or (topic,)), JobSpec(action, topic, **spec))
    return world.one(commands.encode_job_begin(begun))


def run(world: World, number: int) -> Any:
    """All that a job means, in one step."""
    job = world.ledger.jobs[number]
    scan = JobScan(world.ledger, job.spec, job.topics, job.began_ms, job.cursor)
    ids: list[int] = []
    while scan.cursor != LAST:
        _, rows = scan.step(START_MS + world.now)
        ids += rows["first_id"].tolist()
    return world.one(commands.encode_job_step(number, job.cursor, LAST, ids))


def due(world: World, message_id: int) -> int:
    found = describe(world.ledger, message_id, START_MS + world.now)
    assert found is not None
    return found.deliver_at_ms - START_MS


def counts(world: World, number: int) -> list[int]:
    job = world.ledger.jobs[number]
    return [job.done, job.leased, job.settled, job.moved, job.refused]


@pytest.mark.parametrize(
    ("action", "spec", "code"),
    [
        ("reschedule", {}, "bad_job"), ("reschedule", {"shift_ms": 1, "delay_ms": 1}, "bad_job"),
        ("cancel", {"shift_ms": 1}, "bad_job"), ("redrive", {"delay_ms": 1}, "bad_job"),
        ("deliver_now", {"at_ms": 1}, "bad_job"), ("reschedule", {"shift_ms": 0}, "bad_job"),
        ("reschedule", {"delay_ms": -1}, "bad_job"), ("cancel", {"rate": 0.0}, "bad_job"),
        ("cancel", {"rate": float("nan")}, "bad_job"), ("cancel", {"rate": 2e6}, "bad_job"),
        ("cancel", {"tags": tuple(map(str, range(17)))}, "bad_job"), ("cancel", {"key_prefix": "x" * 1_025}, "bad_job"),
        ("cancel", {"tags": ("x" * 9_000,)}, "bad_job"), ("cancel", {"from_ms": 5, "to_ms": 5}, "bad_job"),
        ("cancel", {"to_ms": 1 << 63}, "bad_job"), ("cancel", {"from_ms": -1}, "bad_job"),
        ("reschedule", {"shift_ms": 1 << 60}, "too_far"), ("reschedule", {"shift_ms": -(1 << 60)}, "too_far"),
        ("reschedule", {"delay_ms": 1 << 60}, "too_far"), ("reschedule", {"at_ms": 1 << 60}, "too_far"),
        ("cancel", {"names": ("nobody",)}, "no_topic"), ("delete_dead", {"delay_ms": 1}, "bad_job"),
        ("redrive", {"retrying": True}, "bad_job"), ("redrive", {"ids": tuple(range(201))}, "bad_job"),
    ],
)  # fmt: skip
def test_a_job_that_nobody_may_have(action: str, spec: dict[str, Any], code: str) -> None:
    world = World()
    world.ids(draft())
    refused = begin(world, action, **spec)
    assert isinstance(refused, Refused)
    assert (refused.code, world.ledger.jobs, world.topic().generation) == (code, {}, 0)


def test_a_repeated_request_begins_no_second_job() -> None:
    world = World()
    world.ids(draft())
    assert begin(world, "cancel", request=b"r" * 16) == JobBegun(1, False)
    assert begin(world, "cancel", request=b"r" * 16) == JobBegun(1, True)
    assert begin(world, "deliver_now", request=b"r" * 16).code == "job_conflict"
    assert begin(world, "cancel") == JobBegun(2, False)
    assert world.topic().generation == 2


def test_only_the_latest_jobs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_JOBS", 2)
    world = World()
    world.one(commands.encode_token_create("shop", bytes(32), ["admin"], None))
    world.ids(draft())
    begin(world, "cancel")
    begin(world, "cancel")
    assert begin(world, "cancel").code == "too_many_jobs"
    assert run(world, 2) == Done()
    assert begin(world, "cancel") == JobBegun(3, False)
    assert list(world.ledger.jobs) == [1, 3]
    world.restart()
    assert list(world.ledger.jobs) == [1, 3]
    assert world.one(commands.encode_job_stop(2)).code == "no_job"
    assert world.one(commands.encode_job_stop(1)) == Done()
    assert world.one(commands.encode_job_stop(1)) == Done(False)
    assert begin(world, "cancel") == JobBegun(4, False)


def test_a_topic_that_was_purged_too_often() -> None:
    world = World()
    world.ids(draft())
    world.topic().generation = 0xFFFF
    world.ledger.topics.generations[0] = 0xFFFF
    assert begin(world, "cancel").code == "too_many_generations"


def test_a_step_of_another_cursor_changes_nothing() -> None:
    world = World()
    first, second = world.ids(draft(in_ms=50), draft(in_ms=60))
    begin(world, "cancel")
    one = commands.encode_job_step(1, (0, 0), (START_HOUR, 1), [first])
    assert world.one(one) == Done()
    assert world.one(one).code == "stale"
    assert world.one(commands.encode_job_step(7, (0, 0), LAST, [first])).code == "stale"
    assert world.raw(Command.JOB_STEP, 1, (START_HOUR, 1), (START_HOUR, 1), [second]).code == "malformed"
    assert world.raw(Command.JOB_STEP, 1, (START_HOUR, 1), LAST, [second, second]).code == "malformed"
    assert world.states(first, second) == ["cancelled", "scheduled"]
    assert world.one(commands.encode_job_step(1, (START_HOUR, 1), LAST, [second, 77])) == Done()
    assert (counts(world, 1), world.ledger.jobs[1].ended_ms) == ([2, 0, 1, 0, 0], START_MS)
    assert world.raw(Command.JOB_STEP, 1, LAST, (0xFFFFFFFF, 0xFFFFFFFF), []).code == "malformed"


def test_a_step_that_would_move_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_MOVED_BYTES", 60)
    world = World()
    ids = world.ids(draft(in_ms=50), draft(in_ms=60))
    begin(world, "reschedule", shift_ms=5)
    assert run(world, 1).code == "too_large"
    assert world.one(commands.encode_job_step(1, (0, 0), (START_HOUR, 1), ids[:1])) == Done()
    begin(world, "cancel", names=("t",))
    assert run(world, 1) == Done()
    assert run(world, 2) == Done()
    assert world.states(*ids) == ["cancelled"] * 2


def test_messages_that_a_job_means() -> None:
    world = World()
    waiting, far, leased, moved, other, gone = world.ids(
        draft(in_ms=50), draft(in_ms=5 * HOUR_MS), draft(), draft(in_ms=70), draft("u", in_ms=50), draft(in_ms=80)
    )
    rows = world.lease(leased)
    begin(world, "reschedule", shift_ms=DAY_MS)
    world.one(commands.encode_reschedule("n1", 90, True, [moved]))
    (newer,) = world.ids(draft(in_ms=50))
    world.cancel(gone)
    ids = [waiting, far, leased, moved, other, gone, newer]
    assert world.one(commands.encode_job_step(1, (0, 0), LAST, ids)) == Done()
    assert counts(world, 1) == [2, 1, 1, 3, 0]
    assert [due(world, i) for i in (waiting, far, moved, other, newer)] == [
        50 + DAY_MS,
        5 * HOUR_MS + DAY_MS,
        90,
        50,
        50,
    ]
    world.nack(rows)
    begin(world, "cancel")
    run(world, 2)
    assert world.states(waiting, far, leased, moved, other, newer) == [*["cancelled"] * 4, "scheduled", "cancelled"]


def test_times_of_a_reschedule() -> None:
    world = World()
    ready, soon, later = world.ids(draft(), draft(in_ms=5_000), draft(in_ms=HOUR_MS))
    world.now = 1_000
    begin(world, "reschedule", shift_ms=-6_000)
    run(world, 1)
    assert [due(world, i) for i in (ready, soon, later)] == [0, 1_000, HOUR_MS - 6_000]
    begin(world, "deliver_now")
    run(world, 2)
    assert [due(world, i) for i in (ready, soon, later)] == [0, 1_000, 1_000]
    begin(world, "reschedule", delay_ms=7_000)
    world.now = 3_000
    run(world, 3)
    assert [due(world, i) for i in (ready, soon, later)] == [8_000] * 3
    begin(world, "reschedule", at_ms=START_MS + 20_000)
    run(world, 4)
    assert [due(world, i) for i in (ready, soon, later)] == [20_000] * 3
    assert [counts(world, n)[0] for n in (1, 2, 3, 4)] == [2, 1, 3, 3]


def test_messages_that_a_shift_would_move_too_far_stay() -> None:
    world = World()
    near, far = world.ids(draft(in_ms=50), draft(in_ms=world.ledger.settings.max_delay_ms - 50))
    begin(world, "reschedule", shift_ms=100)
    run(world, 1)
    assert counts(world, 1) == [1, 0, 0, 0, 1]
    assert (due(world, near), due(world, far)) == (150, world.ledger.settings.max_delay_ms - 50)


@pytest.mark.parametrize("states", [READY, SCHEDULED])
def test_a_partial_purge_does_not_mean_what_a_job_moved_after_it(states: int) -> None:
    world = World()
    ready, scheduled = world.ids(draft(), draft(in_ms=5_000))
    world.now = 1_000
    if states == SCHEDULED:
        begin(world, "reschedule", delay_ms=9_000)
    else:
        begin(world, "deliver_now")
    world.one(commands.encode_purge("t", states))
    run(world, 1)
    expected = {READY: ["cancelled", "ready"], SCHEDULED: ["scheduled", "cancelled"]}[states]
    assert world.states(ready, scheduled) == expected
    begin(world, "cancel")
    assert bulk.queued(world.ledger, world.ledger.jobs[2]) is False
    run(world, 2)
    assert world.states(ready, scheduled) == ["cancelled"] * 2


def test_a_job_waits_for_one_that_moves_its_messages() -> None:
    world = World()
    world.ids(draft(in_ms=50), draft("u", in_ms=50))
    begin(world, "reschedule", shift_ms=10)
    begin(world, "cancel", "*", names=("t", "u"))
    begin(world, "cancel", "u", names=("u",))
    begin(world, "redrive")
    begin(world, "reschedule", "u", names=("u",), shift_ms=10)
    waits = [bulk.queued(world.ledger, job) for job in world.ledger.jobs.values()]
    assert waits == [False, True, False, False, True]
    assert world.one(commands.encode_job_step(2, (0, 0), LAST, [])).code == "stale"
    world.one(commands.encode_job_stop(1))
    assert run(world, 2) == Done()
    assert counts(world, 2)[0] == 2


def test_letters_are_redriven_but_for_keys_that_are_taken() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    letters = []
    for _ in range(2):
        letters += world.ids(replace(draft(), key=b"k"))
        world.nack(world.lease(letters[-1]))
    (late,) = world.ids(draft())
    rows = world.lease(late)
    begin(world, "redrive")
    world.now = 5
    world.nack(rows)
    run(world, 1)
    assert sorted(world.states(*letters)) == ["dead", "ready"]
    assert (world.states(late), counts(world, 1)) == (["dead"], [1, 0, 0, 0, 1])


def dead_letter(world: World, reason: str) -> int:
    (letter,) = world.ids(replace(draft(), key=b"k"))
    world.nack(world.lease(letter), reason=reason)
    return letter


def test_letters_are_deleted_by_error_and_by_id() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    slow, slower, refused, last = (dead_letter(world, text) for text in ("after 30 s", "after 31 s", "HTTP 500", ""))
    begin(world, "delete_dead", error="after 7 s")
    run(world, 1)
    assert world.states(slow, slower, refused, last) == ["gone", "gone", "dead", "dead"]
    begin(world, "delete_dead", ids=(refused, slow))
    run(world, 2)
    begin(world, "redrive", error="HTTP 500")
    begin(world, "redrive", error="nacked")
    run(world, 3)
    run(world, 4)
    assert world.states(refused, last) == ["gone", "ready"]
    assert [counts(world, n) for n in (1, 2, 3, 4)] == [[2, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0] * 5, [1, 0, 0, 0, 0]]
    assert world.topic().dead == 0
    world.restart()
    assert world.states(slow, refused, last) == ["gone", "gone", "ready"]


def test_a_deleted_letter_is_not_deleted_again_with_its_hour() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 1, "dead_retention_ms": HOUR_MS}))
    first, second = (dead_letter(world, "x") for _ in range(2))
    begin(world, "delete_dead", ids=(first,))
    run(world, 1)
    world.now = 3 * HOUR_MS
    (hour,) = [hour for hour in world.ledger.store.hours() if hour >= DEAD_HOURS]
    assert world.one(commands.encode_maintain(Job.DROP_DEAD, hour, limit=100)) == JobResult(True, 1)
    assert (world.states(first, second), world.topic().dead) == (["gone", "gone"], 0)


def test_ttls_begin_again() -> None:
    world = World()
    (message_id,) = world.ids(replace(draft(in_ms=1_000), ttl_ms=500))
    begin(world, "reschedule", shift_ms=10_000)
    run(world, 1)
    world.now = 11_400
    assert world.states(message_id) == ["ready"]
    world.now = 11_500
    assert world.states(message_id) == ["expired"]


def test_filters_of_columns_and_of_records() -> None:
    world = World()
    tagged = meta.pack(meta.Meta(tags=["a", "b"], key="7:1"))
    first, second = world.ids(
        replace(draft(in_ms=100), tag_mask=meta.mask_of(["a", "b"]), meta=tagged, key=b"7:1"), draft(in_ms=200)
    )

    def found(**spec: Any) -> list[int]:
        scan = JobScan(world.ledger, JobSpec("cancel", "t", **spec), {0: 1 << 16}, START_MS)
        return [*scan.step(START_MS)[1]["first_id"].tolist()]

    assert found() == [first, second]
    assert (found(tags=("a",)), found(tags=("a", "c"))) == ([first], [])
    assert (found(key_prefix="x"), found(from_ms=START_MS + 150)) == ([first], [second])
    assert found(to_ms=START_MS + 150) == [first]
    assert passes(JobSpec("cancel", "t", ("b", "a"), "7:"), tagged)
    assert not passes(JobSpec("cancel", "t", ("b",), "8:"), tagged)
    assert not passes(JobSpec("cancel", "t", ("c",)), tagged)
    assert not passes(JobSpec("cancel", "t", (), "7:"), b"")
    grouped = meta.pack(meta.Meta(group="g", sch="nightly"))
    assert passes(JobSpec("cancel", "t", group="g", schedule="nightly"), grouped)
    assert not passes(JobSpec("cancel", "t", group="h"), grouped)
    assert not passes(JobSpec("cancel", "t", schedule="daily"), grouped)


def test_bounds_of_due_times_hold_in_every_hour_also_for_what_was_rolled_forward() -> None:
    world, times = World(), [0, 1, HOUR_MS - 1, HOUR_MS, HOUR_MS + 1, 2 * HOUR_MS - 1, 2 * HOUR_MS, 3 * HOUR_MS]
    ids = dict(zip(times, world.ids(*(draft(in_ms=at) for at in times)), strict=True))
    world.now = 2 * HOUR_MS + 5
    world.apply(commands.encode_noop())
    world.maintain(Job.ROLL_FORWARD, START_MS // HOUR_MS)
    for since, until in product((None, *times), repeat=2):
        if since is not None and until is not None and since >= until:
            continue
        bounds = {name: START_MS + at for name, at in (("from_ms", since), ("to_ms", until)) if at is not None}
        scan = JobScan(world.ledger, JobSpec("cancel", "t", **bounds), {0: 1 << 16}, START_MS + world.now)
        found: list[int] = []
        while scan.cursor != LAST:
            found += scan.step(START_MS + world.now)[1]["first_id"].tolist()
        wanted = [at for at in times if at >= (since or 0) and (until is None or at < until)]
        assert sorted(found) == sorted(ids[at] for at in wanted), (since, until)


def test_a_job_gives_groups_their_new_order() -> None:
    """Of a group with a limit of one the earliest message is unblocked; G1 is checked after every entry."""
    world = World()
    world.one(commands.encode_topic_put("t", {"group_concurrency": 1, "max_attempts": 3}))
    ids = world.ids(
        *[replace(draft(in_ms=50 + n), group=hash_group("g"), meta=meta.pack(meta.Meta(group="g"))) for n in range(4)]
    )
    assert world.states(*ids) == ["scheduled", "blocked", "blocked", "blocked"]
    begin(world, "reschedule", shift_ms=HOUR_MS, to_ms=START_MS + 52)
    run(world, 1)
    assert (counts(world, 1)[0], world.states(*ids)) == (2, ["blocked", "blocked", "scheduled", "blocked"])
    begin(world, "cancel", from_ms=START_MS + 52, to_ms=START_MS + HOUR_MS)
    run(world, 2)
    assert world.states(*ids) == ["scheduled", "blocked", "cancelled", "cancelled"]
    world.restart()


def test_progress_goes_from_nothing_to_all() -> None:
    world = World()
    world.ids(*[draft(in_ms=50)] * 3, *[draft(in_ms=2 * HOUR_MS)] * 3)
    scan = JobScan(world.ledger, JobSpec("cancel", "t"), {0: 1 << 16}, START_MS)
    seen = [scan.progress()]
    while scan.cursor != LAST:
        scan.step(START_MS)
        seen.append(scan.progress())
    assert seen == [0.0, 0.5, 1.0, 1.0]


def test_blocked_messages_of_a_group_are_moved_and_cancelled() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {"group_concurrency": 1}))
    ids = world.ids(*[replace(draft(), group=7)] * 3)
    assert world.states(*ids) == ["ready", "blocked", "blocked"]
    run(world, begin(world, "reschedule", delay_ms=5_000).job)
    assert [due(world, i) for i in ids] == [5_000] * 3
    assert world.states(*ids) == ["scheduled", "blocked", "blocked"]
    run(world, begin(world, "cancel").job)
    assert world.states(*ids) == ["cancelled"] * 3
