"""Schedules in apply: what one command does to rows, messages and counts. The leader's part is played by plan.fire."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from chaos.sim import ledgercheck
from hadelay.codec import commands, schedules
from hadelay.codec.commandtypes import Command
from hadelay.codec.meta import Meta, pack, unpack
from hadelay.codec.publishcommand import encode_publish
from hadelay.codec.records import decode_record
from hadelay.codec.results import Done, FireOutcome, FireResult, Refused
from hadelay.codec.schedules import ANY_VERSION, KEPT_MS, Firing, Spec, State, Stored
from hadelay.ledger.schedules import schedules as ledger_schedules
from hadelay.ledger.views.describe import describe
from hadelay.model import Draft, encode_id
from hadelay.settings.cluster import Settings
from hadelay.timing import plan
from tests.ledger.world import START_MS, World

AHEAD_MS = 10_000
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000


def stored(spec: Spec, body: bytes = b"x", name: str = "s", creator: str = "me", node: str = "n1") -> Stored:
    meta = schedules.template_meta(pack(Meta(sch=name)))
    return Stored(creator, spec, encode_publish(node, [Draft(spec.topic, 0, True, 0, 0, meta, body)]))


def every(seconds: float = 1, **more: Any) -> Spec:
    return Spec("t", every_ms=int(seconds * SECOND), start_ms=START_MS + SECOND, **more)


class Owner(World):
    """A world with schedules, whose leader fires when asked."""

    def put(
        self, spec: Spec, name: str = "s", *, body: bytes = b"x", expected: int = ANY_VERSION, paused: int = 0
    ) -> Any:
        return self.one(schedules.encode_put(name, expected, paused, stored(spec, body, name)))

    def found(self, name: str = "s") -> ledger_schedules.Found:
        found = ledger_schedules.find(self.ledger, name)
        assert found is not None
        return found

    def state(self, name: str = "s") -> State:
        return self.found(name).state

    def plan(self, name: str = "s", ahead_ms: int = AHEAD_MS) -> Firing | None:
        stored, state = self.found(name)
        return plan.fire(name, stored.spec, state, START_MS + self.now, ahead_ms)

    def fire(self, *firings: Firing | None) -> list[int]:
        result = self.one(schedules.encode_fire([firing for firing in firings if firing is not None]))
        assert isinstance(result, FireResult)
        return result.outcomes.tolist()

    def lead(self, name: str = "s", ahead_ms: int = AHEAD_MS) -> None:
        """Fire until nothing is to be done."""
        for _ in range(1_000):
            if ledger_schedules.find(self.ledger, name) is None or self.state(name).paused:
                return
            if self.state(name).finished or (firing := self.plan(name, ahead_ms)) is None:
                return
            assert self.fire(firing) == [FireOutcome.DONE]
        raise AssertionError("it goes on for ever")

    def times(self, name: str = "s") -> list[float]:
        """Seconds since START_MS of the remembered messages."""
        return [(made.occurrence - START_MS) / SECOND for made in self.state(name).ring]

    def counts(self, name: str = "s") -> tuple[int, ...]:
        state = self.state(name)
        return state.made, state.missed, state.overlapped, state.refused, state.manual

    def agenda(self) -> list[tuple[int, str]]:
        return [(next_ms, name) for _, next_ms, name in ledger_schedules.agenda(self.ledger, b"", 1 << 62, 1_000)]


@pytest.fixture
def world() -> Owner:
    return Owner()


def test_occurrences_are_ordinary_messages_that_say_where_they_are_from(world: Owner) -> None:
    world.put(every())
    world.lead()
    assert world.times() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    ids = [made.id for made in world.state().ring]
    assert world.states(*ids) == ["scheduled"] * 10
    found = describe(world.ledger, ids[4])
    assert found is not None
    assert (found.topic, found.deliver_at_ms) == ("t", START_MS + 5 * SECOND)
    meta = unpack(found.meta)
    assert (meta.sch, meta.oc) == ("s", START_MS + 5 * SECOND)
    assert world.store.record(*where(world, ids[4]), verify=True)  # its checksum is right
    world.now = 7 * SECOND
    world.lead()
    assert world.counts() == (17, 0, 0, 0, 0)
    world.restart()


def where(world: World, message_id: int) -> tuple[int, int, int]:
    hour, index = world.place(message_id)
    row = world.store.entries(hour, slice(index, index + 1))[0]
    return hour, int(row["offset"]), int(row["size"])


def test_a_firing_counts_once(world: Owner) -> None:
    world.put(every())
    firing = world.plan()
    assert world.fire(firing) == [FireOutcome.DONE]
    before = world.state()
    assert world.fire(firing) == [FireOutcome.STALE]
    assert world.fire(firing, firing) == [FireOutcome.STALE] * 2
    assert world.state() == before
    assert world.topic().published == 10


def test_a_firing_of_an_older_version_is_stale(world: Owner) -> None:
    world.put(every())
    firing = world.plan()
    world.put(every(), body=b"another")
    assert world.fire(firing) == [FireOutcome.STALE]
    world.put(every(5))
    assert world.fire(firing) == [FireOutcome.STALE]
    assert world.topic() is None


def test_a_firing_twice_in_one_command_counts_once(world: Owner) -> None:
    world.put(every())
    firing = world.plan()
    assert world.fire(firing, firing) == [FireOutcome.DONE, FireOutcome.STALE]


@pytest.mark.parametrize("change", ["behind", "disorder", "beyond_end", "too_many", "next_behind", "newer_than_last"])
def test_a_faulty_leader_is_refused(world: Owner, change: str) -> None:
    world.put(every(end_ms=START_MS + 8 * SECOND, max_occurrences=6))
    firing = world.plan()
    assert firing is not None
    at = [START_MS + n * SECOND for n in range(1, 10)]
    wrong = {
        "behind": replace(firing, times=[(START_MS - 1, START_MS)]),
        "disorder": replace(firing, times=[(at[1], at[1]), (at[0], at[0])], last=at[1]),
        "beyond_end": replace(firing, times=[(at[8], at[8])], last=at[8], next=at[8] + 1),
        "too_many": replace(firing, times=[(t, t) for t in at[:7]], last=at[6], next=at[7]),
        "next_behind": replace(firing, next=firing.last),
        "newer_than_last": replace(firing, last=at[0]),
    }[change]
    before = world.state()
    assert world.fire(wrong) == [FireOutcome.REFUSED]
    assert world.state() == before
    assert world.fire(firing) == [FireOutcome.DONE]


def test_an_identical_put_changes_nothing(world: Owner) -> None:
    assert world.put(every()) == Done()
    world.lead()
    before = world.state()
    assert world.put(every()) == Done(False)
    assert world.state() == before
    assert world.put(every(), paused=schedules.RUN) == Done(False)
    world.one(schedules.encode_put("s", ANY_VERSION, 0, stored(every(), creator="somebody else")))
    assert (world.state(), world.found().stored.creator) == (before, "me")


def test_a_new_message_replaces_what_is_filed_at_the_same_times(world: Owner) -> None:
    world.put(every(jitter_ms=900))
    world.lead()
    world.now = 4 * SECOND + 500
    before = world.state()
    due = {made.occurrence: describe(world.ledger, made.id).deliver_at_ms for made in before.ring}  # type: ignore[union-attr]
    world.put(every(jitter_ms=900), body=b"new")
    after = world.state()
    assert (after.version, after.next, after.last, after.made) == (2, before.next, before.last, before.made)
    assert [made.occurrence for made in after.ring] == [made.occurrence for made in before.ring]
    for old, new in zip(before.ring, after.ring, strict=True):
        ahead = due[old.occurrence] > START_MS + world.now
        assert (old.id != new.id) == ahead
        assert world.states(old.id) == ["cancelled" if ahead else "ready"]
        found = describe(world.ledger, new.id)
        assert found is not None
        assert found.deliver_at_ms == due[old.occurrence]
    world.restart()


@pytest.mark.parametrize("end", [{"end_ms": START_MS + 3 * SECOND}, {"max_occurrences": 3}])
def test_a_new_message_replaces_the_last_one_that_is_filed(world: Owner, end: dict[str, int]) -> None:
    """Also behind its occurrence, which its jitter makes due later: a finished schedule makes no other."""
    spec = every(jitter_ms=900, **end)
    world.put(spec)
    world.lead()
    last = world.state().ring[-1]
    due_ms = plan.jitter_ms(spec, "s", last.occurrence) + last.occurrence
    assert (world.state().finished, due_ms - last.occurrence > 100) == (True, True)
    world.now = last.occurrence + 50 - START_MS
    world.put(spec, body=b"new")
    world.lead()
    assert (world.state().finished, world.times(), world.counts()) == (True, [1, 2, 3], (3, 0, 0, 0, 0))
    found = describe(world.ledger, world.state().ring[-1].id, body=True)
    assert found is not None
    assert (world.states(last.id), found.deliver_at_ms, found.body) == (["cancelled"], due_ms, b"new")
    assert len(world.agenda()) == 1


def test_new_times_begin_now(world: Owner) -> None:
    world.put(every())
    world.lead()
    world.now = 4 * SECOND + 500
    before = world.state()
    leased = world.lease(before.ring[0].id)
    world.put(every(3))
    assert world.states(*[made.id for made in before.ring]) == ["leased"] + ["ready"] * 3 + ["cancelled"] * 6
    assert (world.state().next, world.state().made) == (0, 4)
    world.lead()
    assert world.times()[-3:] == [7, 10, 13]
    assert world.ack(leased) == [0]


#: The first occurrences of `jittered`, after 20, 40 and 60 s, are due up to 19 s later.
def jittered(**more: Any) -> Spec:
    return Spec("t", **{"every_ms": 20 * SECOND, "jitter_ms": 19 * SECOND, "start_ms": START_MS + 20 * SECOND, **more})


#: Changes of a schedule's times that leave the occurrences up to the change as they were.
CHANGES: dict[str, dict[str, Any]] = {
    "end": {"end_ms": START_MS + DAY},
    "no jitter": {"jitter_ms": 0},
    "start": {"start_ms": START_MS + HOUR},
    "every": {"every_ms": HOUR},
    "cron": {"every_ms": None, "cron": "0 9 * * *", "timezone": "Europe/Vienna"},
    "at": {"every_ms": None, "start_ms": None, "at": [START_MS + DAY]},
}


def between(world: Owner) -> Any:
    """Make the clock stand between the time of the first occurrence and the due time of its message; returns it."""
    world.put(jittered())
    world.lead(ahead_ms=MINUTE)
    first = world.state().ring[0]
    found = describe(world.ledger, first.id)
    assert found is not None
    assert found.deliver_at_ms > START_MS + 21 * SECOND
    world.now = 20 * SECOND + 500
    return first


@pytest.mark.parametrize("change", CHANGES)
def test_an_occurrence_whose_time_has_come_survives_a_change_of_times(world: Owner, change: str) -> None:
    first = between(world)
    made = world.state().made
    world.put(jittered(**CHANGES[change]))
    assert world.states(first.id) == ["scheduled"]
    assert world.times() == [20]
    assert world.counts()[:2] == (1, 0)
    assert made == 3
    world.restart()


def test_an_occurrence_whose_time_has_come_gets_a_new_message_with_the_new_times(world: Owner) -> None:
    first = between(world)
    due = describe(world.ledger, first.id)
    world.put(jittered(end_ms=START_MS + DAY), body=b"new")
    (made,) = world.state().ring
    found = describe(world.ledger, made.id)
    assert found is not None
    assert due is not None
    body = decode_record(world.store.record(*where(world, made.id), verify=True)).body
    assert (body, found.deliver_at_ms, made.occurrence) == (b"new", due.deliver_at_ms, first.occurrence)
    assert world.states(first.id, made.id) == ["cancelled", "scheduled"]
    assert world.counts() == (1, 0, 0, 0, 0)


def test_a_pause_counts_what_it_takes_away_and_a_resumption_takes_nothing(world: Owner) -> None:
    first = between(world)
    world.one(schedules.encode_state("s", True))
    assert world.states(first.id) == ["cancelled"]
    assert world.counts()[:2] == (0, 1)
    world.one(schedules.encode_state("s", False))
    world.lead(ahead_ms=20 * SECOND)
    assert world.counts()[:2] == (1, 1)


@pytest.mark.parametrize(
    ("spec", "missed"),
    [
        (every(), 5),
        (every(end_ms=START_MS + 3 * SECOND), 3),
        (Spec("t", at=[START_MS + SECOND, START_MS + 2 * SECOND, START_MS + HOUR]), 2),
        (Spec("t", cron="* * * * * *"), 1),
    ],
)
@pytest.mark.parametrize("by", ["change", "pause"])
def test_occurrences_that_an_outage_left_out_count_as_missed_at_a_change(
    world: Owner, spec: Spec, missed: int, by: str
) -> None:  # fmt: skip
    """Apply computes no cron pattern: it counts one occurrence for all that are overdue."""
    world.put(spec)
    world.fire(world.plan(ahead_ms=0))  # only the next time
    assert world.counts()[:2] == (0, 0)
    world.now = 5 * SECOND + 500
    if by == "pause":
        world.one(schedules.encode_state("s", True))
    else:
        world.put(every(3_600))
    assert world.counts()[:2] == (0, missed)
    world.restart()


def test_leased_occurrences_are_never_cancelled(world: Owner) -> None:
    """A message in backoff waits, and is not one that was never due; neither is one that its owner rescheduled."""
    world.put(every())
    world.lead()
    first, second, third, *_ = [made.id for made in world.state().ring]
    world.now = 3 * SECOND
    world.nack(world.lease(first), 3_600_000)
    world.one(commands.encode_reschedule("n1", 3_600_000, True, [second]))
    world.one(schedules.encode_delete("s"))
    assert world.states(first, second, third) == ["scheduled", "scheduled", "ready"]


def test_the_expected_version_is_compared(world: Owner) -> None:
    assert world.put(every(), expected=1).code == "schedule_changed"
    assert world.put(every(), expected=0) == Done()
    assert world.put(every(2), expected=0).code == "schedule_changed"
    assert world.put(every(2), expected=1) == Done()
    assert world.put(every(3), expected=1).code == "schedule_changed"


def test_a_put_whose_answer_was_lost_may_be_repeated(world: Owner) -> None:
    for expected, spec in ((0, every()), (1, every(2))):
        assert world.put(spec, expected=expected) == Done()
        before = world.state()
        assert world.put(spec, expected=expected) == Done(False)
        assert world.state() == before
    assert world.put(every(), expected=0).code == "schedule_changed"
    world.one(schedules.encode_state("s", True))
    assert world.put(every(2), expected=1).code == "schedule_changed"  # somebody changed the schedule since then


@pytest.mark.parametrize("expected", [ANY_VERSION, 0])
def test_two_first_puts_at_two_nodes_are_one(expected: int) -> None:
    """Each node encoded its message before it had applied the command of the other."""
    world = Owner()
    assert world.put(every(), expected=expected) == Done()
    before = world.state()
    assert world.one(schedules.encode_put("s", expected, 0, stored(every(), node="n2"))) == Done(False)
    assert world.state() == before
    assert world.one(schedules.encode_put("s", ANY_VERSION, 0, stored(every(), b"other", node="n2"))) == Done()


def test_a_pause_makes_nothing_and_leaves_its_time_out(world: Owner) -> None:
    world.put(every())
    world.lead()
    world.now = 4 * SECOND + 500
    ids = [made.id for made in world.state().ring]
    assert world.one(schedules.encode_state("s", True)) == Done()
    assert world.states(*ids) == ["ready"] * 4 + ["cancelled"] * 6
    assert world.agenda() == []
    assert world.one(schedules.encode_state("s", True)) == Done(False)
    world.now = 100 * SECOND + 500
    world.one(schedules.encode_state("s", False))
    world.lead()
    assert world.times()[-10:] == [101, 102, 103, 104, 105, 106, 107, 108, 109, 110]
    assert world.counts() == (14, 0, 0, 0, 0)


def test_a_message_delivered_early_counts_as_made(world: Owner) -> None:
    world.put(every())
    world.lead()
    early = world.state().ring[6].id
    world.one(commands.encode_reschedule("n1", 0, True, [early]))
    world.now = 3 * SECOND
    world.one(schedules.encode_state("s", True))
    world.one(schedules.encode_state("s", False))
    world.lead()
    assert world.times() == [1, 2, 3, 7, 8, 9, 10, 11, 12, 13]


def test_deletion_cancels_what_is_not_due_and_leaves_no_row(world: Owner) -> None:
    world.put(every())
    world.lead()
    ids = [made.id for made in world.state().ring]
    world.now = 2 * SECOND
    world.one(schedules.encode_delete("s"))
    assert world.states(*ids) == ["ready"] * 2 + ["cancelled"] * 8
    tables = world.tables.rows
    assert not any(tables[table] for table in (b"sched", b"schedst", b"schednext", b"schedof"))
    assert (world.ledger.schedules.count, world.ledger.schedules.bytes) == (0, 0)
    assert world.one(schedules.encode_delete("s")).code == "no_schedule"


@pytest.mark.parametrize(
    ("catch_up", "times", "missed"),
    [(0, [3600], 60), (1, [], 61), (2, [n * 60 for n in range(51, 61)], 0)],
)
def test_an_outage_is_caught_up_by_policy(world: Owner, catch_up: Any, times: list[int], missed: int) -> None:
    world.put(Spec("t", every_ms=MINUTE, catch_up=catch_up))
    world.now = HOUR + MINUTE + SECOND  # more than a minute after the last
    world.one(schedules.encode_fire([]))
    # the occurrence at one minute ago is still on time
    world.lead(ahead_ms=0)
    fresh = [3660]
    made = (61 if catch_up == 2 else 1) + 0
    assert world.times()[-1:] == fresh
    assert world.counts()[:2] == (made if catch_up == 2 else 1, {0: 60, 1: 60, 2: 0}[catch_up])


@pytest.mark.parametrize(("catch_up", "made", "missed"), [(0, 1, 9), (1, 0, 10), (2, 10, 0)])
def test_an_outage_without_a_later_occurrence(world: Owner, catch_up: Any, made: int, missed: int) -> None:
    world.put(Spec("t", every_ms=HOUR, catch_up=catch_up))
    world.now = 10 * HOUR + 30 * MINUTE
    world.lead()
    assert world.counts()[:2] == (made, missed)
    if made:
        assert world.times()[-1] == 10 * 3600
        assert world.states(world.state().ring[-1].id) == ["ready"]


def test_the_window_of_catching_up(world: Owner) -> None:
    world.put(Spec("t", every_ms=HOUR, catch_up=2, window_ms=3 * HOUR))
    world.now = 10 * HOUR + 30 * MINUTE
    world.lead()
    assert world.counts()[:2] == (3, 7)
    world.put(Spec("t", every_ms=HOUR, catch_up=0, window_ms=10 * MINUTE), "late")
    world.now += 10 * HOUR
    world.lead("late")
    assert world.counts("late")[:2] == (0, 10)


def test_all_makes_the_newest_thousand(world: Owner) -> None:
    world.checking = False
    world.put(Spec("t", cron="* * * * * *", catch_up=2))
    world.now = 5_000 * SECOND
    world.lead()
    made, missed, *_ = world.counts()
    assert (made + missed, made) == (5_010, 1_000 + 60 + 10)


@pytest.mark.parametrize(("catch_up", "made"), [(0, 60 + 10), (1, 60 + 10), (2, 1_000 + 60 + 10)])
def test_a_long_outage_is_walked_in_small_steps(
    world: Owner, monkeypatch: pytest.MonkeyPatch, catch_up: Any, made: int
) -> None:
    """No firing computes more than some hundred occurrences beside those that it may make."""
    asked: list[int] = []
    after = plan.cron.after

    def counted(*args: Any) -> Any:
        asked.append(0)
        for at_ms in after(*args):
            asked[-1] += 1
            yield at_ms

    monkeypatch.setattr(plan.cron, "after", counted)
    world.checking = False
    world.put(Spec("t", cron="* * * * * *", catch_up=catch_up))
    world.now = 5_000 * SECOND
    world.lead()
    assert (sum(world.counts()[:2]), world.counts()[0]) == (5_010, made)
    assert max(asked) <= (1_000 if catch_up == 2 else 1) + plan.FIRED + 300


def test_large_messages_are_made_in_small_numbers(world: Owner) -> None:
    world.put(every(catch_up=2), body=b"x" * 60_000)
    found = world.found()
    most = ledger_schedules.at_once(found.stored.template)
    assert most * len(found.stored.template) <= 4 << 20
    world.now = 120 * SECOND
    firing = plan.fire("s", found.stored.spec, found.state, START_MS + world.now, AHEAD_MS, most)
    assert firing is not None
    assert len(firing.times) == most
    assert ledger_schedules.at_once(b"x" * (8 << 20)) == 1
    assert ledger_schedules.at_once(b"x") == schedules.MAX_RUN


def test_a_long_outage_of_an_interval_is_not_walked(world: Owner) -> None:
    world.checking = False
    world.put(Spec("t", every_ms=SECOND, catch_up=2, window_ms=400 * DAY))
    world.now = 365 * DAY
    world.lead()
    made, missed, *_ = world.counts()
    assert (made + missed, made) == (365 * 86_400 + 10, 1_000 + 60 + 10)


def test_a_successor_within_a_minute_files_at_once_under_every_policy(world: Owner) -> None:
    world.put(Spec("t", every_ms=10 * SECOND, catch_up=1))
    world.now = 59 * SECOND
    world.lead()
    assert world.times() == [10, 20, 30, 40, 50, 60]


def test_no_overlap(world: Owner) -> None:
    world.put(every(overlap=1))
    world.lead(ahead_ms=100)
    assert world.times() == []
    for now in (950, 1_950, 2_950):
        world.now = now
        world.lead(ahead_ms=100)
    assert (world.times(), world.counts()) == ([1], (1, 0, 2, 0, 0))
    world.now = 3_000
    assert world.ack(world.lease(world.state().ring[-1].id)) == [0]
    world.now = 3_950
    world.lead(ahead_ms=100)
    assert (world.times(), world.counts()) == ([1, 4], (2, 0, 2, 0, 0))
    # several at once, after an outage of a leader: the first is made, the others overlap with it
    world.cancel(world.state().ring[-1].id)
    world.now = 9_000
    world.lead(ahead_ms=100)
    assert (world.times(), world.counts()) == ([1, 4, 5], (3, 0, 6, 0, 0))


@pytest.mark.parametrize("count", [1, 30, 300])
def test_a_backfill_hides_no_pending_message(world: Owner, count: int) -> None:
    """No message is made beside an older one that is pending, also if the newer messages of a backfill have ended."""
    world.checking = count < 100
    world.put(every(overlap=1))
    world.now = 950
    world.lead(ahead_ms=100)
    (first,) = [made.id for made in world.state().ring]
    world.now = 1_500
    times = [(START_MS - n * SECOND, 0) for n in range(count, 0, -1)]
    backfilled = world.one(schedules.encode_run("s", 1, times)).ids.tolist()
    world.one(commands.encode_cancel("n1", backfilled))
    world.now = 1_950
    world.lead(ahead_ms=100)
    assert (world.times()[-1], world.counts()) == (-1, (1, 0, 1, 0, count))
    refused = world.one(schedules.encode_run("s", ANY_VERSION, [(0, 0)]))
    assert (refused.code, refused.detail) == ("overlap", encode_id(first))
    world.cancel(first)
    world.now = 2_950
    world.lead(ahead_ms=100)
    assert (world.times()[-1], world.counts()) == (3, (2, 0, 1, 0, count))


def test_one_may_wait_behind_a_pending_one(world: Owner) -> None:
    world.one(commands.encode_topic_put("t", {"group_concurrency": 1, "max_attempts": 3}))
    world.put(every(overlap=2, group="schedule.s"))
    for now in (950, 1_950, 2_950, 3_950):
        world.now = now
        world.lead(ahead_ms=100)
    first, second = [made.id for made in world.state().ring]
    assert (world.times(), world.counts()) == ([1, 2], (2, 0, 2, 0, 0))
    assert world.states(first, second) == ["ready", "blocked"]
    refused = world.one(schedules.encode_run("s", ANY_VERSION, [(0, 0)]))
    assert (refused.code, refused.detail) == ("overlap", encode_id(second))
    world.ack(world.lease(first))
    assert world.states(first, second) == ["acked", "ready"]
    world.now = 4_950
    world.lead(ahead_ms=100)
    assert (world.times(), world.counts()) == ([1, 2, 5], (3, 0, 2, 0, 0))
    world.restart()


def test_messages_of_a_schedule_may_have_a_group(world: Owner) -> None:
    world.one(commands.encode_topic_put("t", {"group_concurrency": 1, "max_attempts": 3}))
    world.put(every(group="customer"))
    world.lead()
    world.now = 3_500
    ids = [made.id for made in world.state().ring]
    assert world.states(*ids[:4]) == ["ready", "blocked", "blocked", "blocked"]
    world.one(schedules.encode_delete("s"))
    assert world.states(*ids[3:]) == ["cancelled"] * 7


def test_the_end(world: Owner) -> None:
    world.put(every(end_ms=START_MS + 3 * SECOND))
    world.lead()
    assert (world.times(), world.state().finished) == ([1, 2, 3], True)
    world.now = 30 * SECOND
    remove = Firing("s", world.state().version, world.state().next, 0, world.state().last, 0, schedules.REMOVE, [])
    assert world.fire(remove) == [FireOutcome.STALE]  # not yet
    world.now += KEPT_MS
    assert world.fire(remove) == [FireOutcome.DONE]
    assert world.agenda() == []
    assert (world.ledger.schedules.count, world.ledger.schedules_finished) == (0, 1)


def test_a_finished_schedule_stays_finished(world: Owner) -> None:
    """It is removed in its time, also if somebody pauses it, or deletes its topic."""
    world.put(every(end_ms=START_MS + 3 * SECOND))
    world.lead()
    finished = world.state()
    assert world.one(schedules.encode_state("s", True)) == Done(False)
    assert world.one(commands.encode_topic_delete("t", True)) == Done()
    assert world.state() == finished
    assert len(world.agenda()) == 1


def test_max_occurrences(world: Owner) -> None:
    world.put(every(max_occurrences=3))
    world.lead()
    assert (world.times(), world.state().finished) == ([1, 2, 3], True)
    world.now = 5 * SECOND
    world.put(every(max_occurrences=5))
    world.lead()
    assert (world.times(), world.state().finished) == ([1, 2, 3, 6, 7], True)
    world.put(every(max_occurrences=2))
    assert world.state().finished
    assert world.ledger.schedules_finished == 2, "the last PUT found it finished"


def test_given_times(world: Owner) -> None:
    world.put(Spec("t", at=[START_MS - 5, START_MS + 2 * SECOND, START_MS + HOUR]))
    world.lead()
    assert (world.times(), world.state().next) == ([2], START_MS + HOUR)
    world.now = HOUR - SECOND
    world.lead()
    assert (world.times(), world.state().finished) == ([2, 3600], True)


def test_a_trigger_is_an_occurrence_of_its_own(world: Owner) -> None:
    world.put(every(overlap=1))
    world.lead(ahead_ms=100)
    world.now = 500
    trigger = schedules.encode_run("s", ANY_VERSION, [(0, 0)], b"k")
    (first,) = world.one(trigger).ids.tolist()
    again = world.one(trigger)
    assert (again.ids.tolist(), again.duplicate.tolist()) == ([first], [True])
    found = describe(world.ledger, first)
    assert found is not None
    assert (unpack(found.meta).oc, found.deliver_at_ms) == (START_MS + 500, START_MS + 500)
    assert world.counts() == (0, 0, 0, 0, 1)
    refused = world.one(schedules.encode_run("s", ANY_VERSION, [(0, 0)]))
    assert isinstance(refused, Refused)
    assert refused.code == "overlap"
    world.now = 950
    world.lead(ahead_ms=100)
    assert world.counts() == (0, 0, 1, 0, 1)


def test_a_trigger_whose_key_is_forgotten_by_then_is_a_new_one(world: Owner) -> None:
    """Its key is dropped as it is applied, and the policy has to be asked: the message of its first time is pending."""
    world.put(every(DAY, overlap=1))
    trigger = schedules.encode_run("s", ANY_VERSION, [(0, 0)], b"k")
    (first,) = world.one(trigger).ids.tolist()
    world.now = 30 * DAY
    refused = world.one(trigger)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.detail, world.counts()[-1]) == ("overlap", encode_id(first), 1)


def test_a_backfill_makes_what_is_asked_for(world: Owner) -> None:
    world.put(every(10))
    world.lead()
    world.now = 100 * SECOND
    past = [START_MS + n * SECOND for n in (11, 21, 31)]
    result = world.one(schedules.encode_run("s", 1, [(at, 0) for at in past]))
    assert len(set(result.ids.tolist())) == 3
    assert not result.codes.any()
    assert world.counts() == (1, 0, 0, 0, 3)
    world.lead()
    assert world.one(schedules.encode_run("s", 9, [(past[0], 0)])).code == "schedule_changed"
    assert world.one(schedules.encode_run("none", 9, [(past[0], 0)])).code == "no_schedule"


def test_a_backfill_does_not_push_out_what_is_filed(world: Owner) -> None:
    world.put(every())
    world.lead(ahead_ms=60_000)
    times = [(START_MS - n, 0) for n in range(50, 0, -1)]
    world.one(schedules.encode_run("s", 1, times))
    world.one(schedules.encode_state("s", True))
    assert world.topic().pending == 50


def test_a_full_topic_refuses_and_is_counted(world: Owner) -> None:
    world.one(commands.encode_topic_put("t", {"max_messages": 4, "publish_rate": 0.001}))
    world.put(every())
    world.lead()
    assert (world.times(), world.counts()) == ([1, 2, 3, 4], (4, 0, 0, 6, 0))


def test_a_topic_with_schedules_is_deleted_by_force_alone(world: Owner) -> None:
    world.put(every())
    world.put(Spec("tt", every_ms=1_000), "other")
    world.lead()
    refused = world.one(commands.encode_topic_delete("t"))
    assert isinstance(refused, Refused)
    assert refused.code == "topic_has_schedules"
    assert "'t': s" in refused.detail
    assert world.one(commands.encode_topic_delete("t", force=True)) == Done()
    assert (world.state().paused, world.state("other").paused) == (True, False)


def test_a_topic_is_deleted_without_a_look_at_the_messages_of_its_schedules(
    world: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand of 64 KiB would take each node a second."""
    world.checking = 0
    world.put(every())
    world.put(every(), "paused", paused=schedules.PAUSE)
    world.publish()
    with monkeypatch.context() as patch:
        patch.setattr(Stored, "unpack", None)
        assert world.one(commands.encode_topic_delete("t", force=True)) == Done()
    assert [world.state(name).flags for name in ("s", "paused")] == [schedules.PAUSED, schedules.PAUSED]
    assert [world.state(name).version for name in ("s", "paused")] == [2, 1]
    ledgercheck.check(world.ledger)


def test_a_schedule_of_a_deleted_topic_goes_on_with_its_next_times(world: Owner) -> None:
    world.put(every())
    world.lead()
    ids = [made.id for made in world.state().ring]
    world.now = 2 * SECOND
    world.one(commands.encode_topic_delete("t", force=True))
    assert world.states(*ids) == ["cancelled"] * 10
    assert world.agenda() == []
    world.now = 20 * SECOND
    assert world.one(schedules.encode_state("s", False)) == Done()
    world.lead()
    assert world.times()[-10:] == list(range(21, 31))
    assert world.counts() == (20, 0, 0, 0, 0)
    world.restart()


def test_a_moved_schedule_no_longer_holds_its_topic(world: Owner) -> None:
    world.put(every())
    world.put(Spec("tt", every_ms=1_000))
    assert ledger_schedules.of_topic(world.ledger, "t", 9) == []
    assert ledger_schedules.of_topic(world.ledger, "tt", 9) == ["s"]


def test_limits(world: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_schedules, "MAX_SCHEDULES", 2)
    world.put(every(), "a")
    world.put(every(), "b")
    assert world.put(every(), "c").code == "too_many_schedules"
    monkeypatch.setattr(ledger_schedules, "MAX_BYTES", world.ledger.schedules.bytes + 10)
    assert world.put(every(), "b", body=b"x" * 20).code == "too_many_schedules"
    assert world.put(every(), "b", body=b"x" * 11) == Done()
    assert world.put(every(), "b", body=b"x" * 70_000).code == "bad_config"


def test_a_topic_that_is_not_there() -> None:
    world = Owner(Settings(auto_create_topics=False))
    assert world.put(every()).code == "no_topic"


def test_the_newest_tzdata_is_remembered(world: Owner) -> None:
    world.one(schedules.encode_fire([], "2026f"))
    world.one(schedules.encode_fire([], "2026b"))
    assert world.ledger.schedules.tzdata == "2026f"
    world.restart()
    assert world.ledger.schedules.tzdata == "2026f"


def test_a_restore_pauses_what_was_active(world: Owner) -> None:
    world.put(every())
    world.put(every(), "paused", paused=schedules.PAUSE)
    world.put(every(max_occurrences=1), "finished")
    world.lead()
    world.lead("finished")
    restored(world)
    ledgercheck.check(world.ledger)
    assert [name for _, name in world.agenda()] == ["finished"]
    flags = [world.state(name).flags & schedules.RESTORED for name in ("s", "paused", "finished")]
    assert flags == [schedules.RESTORED, 0, 0]
    world.now = HOUR
    world.one(schedules.encode_state("s", False))
    world.lead()
    assert world.times()[-1] == 3610
    assert world.state().flags == 0
    assert world.state("finished").finished


def test_a_restored_schedule_that_had_finished_is_removed_in_its_time(world: Owner) -> None:
    world.put(every(max_occurrences=1))
    world.lead()
    finished = world.state()
    restored(world)
    assert world.state() == finished
    assert world.agenda() == [(finished.next, "s")]
    ledgercheck.check(world.ledger)


def restored(world: Owner) -> None:
    for table, key, value in ledger_schedules.paused_by_restore(sorted(world.tables.rows[b"schedst"].items())):
        world.tables.delete(table, key) if value is None else world.tables.put(table, key, value)


def test_a_new_specification_leaves_a_restored_schedule_as_one(world: Owner) -> None:
    """A program that sets its schedules at each start must not hide them from `resume --restored`."""
    world.put(every())
    restored(world)
    world.put(every(2), body=b"new")
    assert world.state().flags == schedules.PAUSED | schedules.RESTORED
    world.put(every(2), body=b"new", paused=schedules.RUN)
    assert world.state().flags == 0


@pytest.mark.parametrize("by_put", [False, True])
def test_a_pause_by_a_user_outlives_the_resumption_after_a_restore(world: Owner, by_put: bool) -> None:
    world.put(every())
    restored(world)
    if by_put:
        assert world.put(every(), paused=schedules.PAUSE) == Done()
    else:
        assert world.one(schedules.encode_state("s", True)) == Done()
    assert world.state().flags == schedules.PAUSED
    assert world.one(schedules.encode_state("s", True)) == Done(False)
    assert world.put(every(), paused=schedules.PAUSE) == Done(False)


def test_a_cluster_without_schedules_writes_nothing_of_them() -> None:

    world = World()
    world.publish()
    assert not any(table.startswith(b"sched") for table in world.tables.rows)


@pytest.mark.parametrize(
    "spec",
    [
        Spec("t"), Spec("t", cron="* * * * *", every_ms=1_000), Spec("t", every_ms=999), Spec("t", at=[]),
        Spec("t", at=[2, 1]), Spec("t", at=[1, 1]), Spec("t", at=list(range(1_001))), Spec("", every_ms=1_000),
        Spec("t", every_ms=1_000, jitter_ms=3_600_001), Spec("t", every_ms=1 << 62), Spec("t", at=[-1]),
        Spec("t", cron="x" * 300),
    ],
)  # fmt: skip
def test_a_specification_without_sense_is_malformed(world: Owner, spec: Spec) -> None:
    refused = world.raw(Command.SCHEDULE_PUT, "s", ANY_VERSION, 0, ["me", spec, stored(every()).template])
    assert (refused.code, "invalid specification" in refused.detail) == ("malformed", True)
    assert world.ledger.schedules.count == 0
