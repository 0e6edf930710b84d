"""The leader's part of schedules: when it looks, what it proposes, and what a new leader goes on with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hadelay.codec import schedules
from hadelay.codec.commandtypes import Command
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import encode_publish
from hadelay.codec.results import FireResult
from hadelay.errors import OutcomeUnknown
from hadelay.ledger.schedules import schedules as ledger_schedules
from hadelay.ledger.schedules.schedules import Found
from hadelay.model import Draft
from hadelay.server.delivery import schedules as firing
from hadelay.timing import plan, zones
from tests.handout.desk import START_MS, Desk

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


def put(desk: Desk, spec: schedules.Spec, name: str = "s") -> None:
    template = encode_publish(
        "n1", [Draft(spec.topic, 0, True, 0, 0, schedules.template_meta(pack(Meta(sch=name))), b"")]
    )
    command = schedules.encode_put(name, schedules.ANY_VERSION, 0, schedules.Stored("", spec, template))
    desk.propose(command, lambda result, error: None)
    desk.run(5)


def every(ms: int, **more: Any) -> schedules.Spec:
    return schedules.Spec("t", every_ms=ms, **more)


def found(desk: Desk, name: str = "s") -> Found:
    one = ledger_schedules.find(desk.ledger, name)
    assert one is not None
    return one


def counts(desk: Desk, name: str = "s") -> tuple[int, int, int]:
    state = found(desk, name).state
    return state.made, state.missed, state.overlapped


def fires(desk: Desk) -> int:
    return sum(kind == Command.SCHEDULE_FIRE for _, kind in desk.log)


@pytest.fixture
def desk() -> Desk:
    desk = Desk()
    desk.lead()
    desk.run(10)
    return desk


def test_occurrences_are_filed_ahead_several_at_once(desk: Desk) -> None:
    put(desk, every(SECOND))
    for _ in range(60):
        desk.run(SECOND)
        ahead_ms = found(desk).state.last - (START_MS + desk.now)
        assert firing.LEAD_MS - SECOND <= ahead_ms <= firing.LEAD_MS + firing.MORE_MS
    assert fires(desk) <= 60 / 5 + 3
    assert counts(desk) == (70, 0, 0)


def test_an_idle_schedule_writes_nothing(desk: Desk) -> None:
    put(desk, schedules.Spec("t", cron="0 9 1 1 *", timezone="Europe/Vienna"))
    desk.run(HOUR)
    assert fires(desk) == 1


def test_nothing_is_proposed_for_a_group_without_schedules(desk: Desk) -> None:
    desk.run(HOUR)
    assert fires(desk) == 0
    assert desk.ledger.schedules.tzdata == ""


def test_no_overlap_is_judged_just_before_the_time(desk: Desk) -> None:
    put(desk, every(10 * SECOND, overlap=1))
    desk.run_to(10 * SECOND - 110)
    assert counts(desk) == (0, 0, 0)
    desk.run_to(10 * SECOND - 80)
    assert counts(desk) == (1, 0, 0)
    desk.run_to(35 * SECOND)
    assert counts(desk) == (1, 0, 2)


def test_a_new_leader_goes_on_where_the_old_one_ended(desk: Desk) -> None:
    put(desk, every(SECOND))
    desk.run(3 * SECOND)
    desk.depose()
    desk.run(20 * SECOND)  # beyond what was filed
    assert counts(desk)[0] < 20
    desk.new_leader()
    desk.run(SECOND)
    made, missed, _ = counts(desk)
    assert missed == 0
    assert found(desk).state.last == START_MS + made * SECOND >= START_MS + desk.now


def test_an_outage_of_an_hour_is_caught_up_by_policy(desk: Desk) -> None:
    put(desk, every(10 * MINUTE, catch_up=1), "none")
    put(desk, every(10 * MINUTE, catch_up=2), "all")
    put(desk, every(10 * MINUTE), "one")
    desk.depose()
    desk.run(HOUR + 5 * MINUTE)
    desk.new_leader()
    desk.run(SECOND)
    assert [counts(desk, name)[:2] for name in ("none", "all", "one")] == [(0, 6), (6, 0), (1, 5)]


def test_an_unknown_outcome_is_proposed_again_and_counts_once(desk: Desk) -> None:
    put(desk, every(SECOND))
    propose, lost = desk.delivery._grants.term._propose, []  # type: ignore[union-attr]

    def forgetful(command: bytes, done: Any) -> None:
        if command[0] == Command.SCHEDULE_FIRE and len(lost) < 5:
            lost.append(command)
            propose(command, lambda result, error: done(None, OutcomeUnknown("lost")))
        else:
            propose(command, done)

    desk.delivery._grants.term._propose = forgetful  # type: ignore[union-attr]
    desk.run(60 * SECOND)
    assert len(lost) == 5
    state = found(desk).state
    assert state.made == (state.last - START_MS) // SECOND
    assert desk.ledger.topic("t").published == state.made  # type: ignore[union-attr]


def test_occurrences_that_were_never_committed_are_proposed_again(desk: Desk) -> None:
    put(desk, every(SECOND))
    desk.run(SECOND)
    before = found(desk).state
    desk.refuse_with = OutcomeUnknown("lost")
    desk.run(before.last - firing.LEAD_MS - START_MS - desk.now + 3 * SECOND)
    assert found(desk).state == before, "nothing was committed"
    desk.refuse_with = None
    desk.run(SECOND)
    state = found(desk).state
    assert state.last - (START_MS + desk.now) >= firing.LEAD_MS - SECOND
    assert (state.made, state.missed) == ((state.last - START_MS) // SECOND, 0)


def test_nothing_is_fired_while_a_disk_is_full(desk: Desk) -> None:
    full = True
    desk.delivery.has_space = lambda: not full
    desk.depose()
    desk.new_leader(lead=False)
    desk.delivery.has_space = lambda: not full
    desk.lead()
    put(desk, every(SECOND))
    desk.run(5 * SECOND)
    assert counts(desk) == (0, 0, 0)
    full = False
    desk.run(2 * SECOND)
    assert counts(desk)[0] >= 7


def test_a_crowd_is_filed_before_its_instant(desk: Desk) -> None:
    """As many as take 15 s at the pace that is allowed."""
    desk.checking = False
    for n in range(30_000 // 10):
        put_at = schedules.Spec("t", at=[START_MS + 90 * SECOND])
        template = encode_publish("n1", [Draft("t", 0, True, 0, 0, schedules.template_meta(pack(Meta(sch="c"))), b"")])
        desk.propose(
            schedules.encode_put(f"c{n}", 0, 0, schedules.Stored("", put_at, template)), lambda result, error: None
        )
    desk.run(SECOND)
    pace = firing.PACE
    try:
        firing.PACE = 200
        desk.run_to(89 * SECOND)
        assert desk.ledger.topic("t").published == 3_000  # type: ignore[union-attr]
    finally:
        firing.PACE = pace
    assert desk.delivery.schedule_delay_ms() == 0


def test_commits_do_not_slow_the_pace_at_which_a_crowd_is_filed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that computes slowly proposes few at a time, and waits for each commit."""
    monkeypatch.setattr(firing, "PACE", 200)
    monkeypatch.setattr(firing, "_OCCURRENCES", 10)
    desk = Desk(commit_ms=20, checking=False)
    desk.lead()
    desk.run(10)
    for n in range(3_000):
        spec = schedules.Spec("t", at=[START_MS + 90 * SECOND])
        template = encode_publish("n1", [Draft("t", 0, True, 0, 0, schedules.template_meta(pack(Meta(sch="c"))), b"")])
        desk.propose(schedules.encode_put(f"c{n}", 0, 0, schedules.Stored("", spec, template)), lambda *answer: None)
    desk.run_to((90 - firing.LEAD_MS // SECOND + 1) * SECOND)
    assert desk.ledger.topic("t").published == 3_000  # type: ignore[union-attr]


@pytest.mark.parametrize("apart_s", [0, 1, 6])
def test_each_schedule_of_a_crowd_counts_once(desk: Desk, monkeypatch: pytest.MonkeyPatch, apart_s: int) -> None:
    """A crowd is counted in pages, and made within seconds or not: three schedules at one per second are filed three
    seconds earlier than one."""
    monkeypatch.setattr(firing, "_COUNTED", 2)
    monkeypatch.setattr(firing, "PACE", 1)
    for name in "abc":
        desk.run(apart_s * SECOND)
        put(desk, schedules.Spec("t", at=[START_MS + 40 * SECOND]), name)
    desk.run_to(40 * SECOND - firing.LEAD_MS - 3_500)
    assert [counts(desk, name)[0] for name in "abc"] == [0, 0, 0]
    desk.run_to(40 * SECOND - firing.LEAD_MS - 2_500)
    assert [counts(desk, name)[0] for name in "abc"] == [1, 1, 1]


def test_a_crowd_behind_a_single_schedule_is_filed_before_its_instant(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The single schedule is counted alone, a minute before it is due: the crowd is still too far away then."""
    monkeypatch.setattr(firing, "PACE", 1)
    monkeypatch.setattr(firing, "_OCCURRENCES", 5)
    put(desk, schedules.Spec("t", at=[START_MS + 200 * SECOND]), "single")
    crowd = [f"c{n}" for n in range(20)]
    for name in crowd:
        put(desk, schedules.Spec("t", at=[START_MS + 202 * SECOND]), name)
    desk.run_to(201 * SECOND)
    assert [counts(desk, name)[0] for name in crowd] == [1] * len(crowd)


class PassedOver:
    """Counts rows of the agenda that were deleted before, and over which searches pass: until the next checkpoint, each
    costs some microseconds."""

    def __init__(self, desk: Desk) -> None:
        tables = desk.ledger.tables
        self._range, self._delete = tables.range, tables.delete
        self.deleted: set[bytes] = set()
        self.count = 0
        tables.range, tables.delete = self.range, self.delete  # type: ignore[method-assign]

    def delete(self, table: bytes, key: bytes) -> None:
        if table == ledger_schedules.AGENDA:
            self.deleted.add(key)
        self._delete(table, key)

    def range(self, table: bytes, start: bytes = b"", end: bytes | None = None, limit: int = 1000) -> Any:
        rows = self._range(table, start, end, limit)
        last = rows[-1][0] if len(rows) == limit else end
        if table == ledger_schedules.AGENDA:
            self.count += sum(start <= key and (last is None or key < last) for key in self.deleted)
        return rows


def test_a_change_does_not_pass_over_all_that_was_fired(desk: Desk) -> None:
    for n in range(20):
        put(desk, every(SECOND), f"s{n:02}")
    desk.run(2 * SECOND)
    passed, desk.checking = PassedOver(desk), False
    desk.run(60 * SECOND)
    assert len(passed.deleted) >= 200
    for change in ("put", "resume", "stale", "unknown"):
        passed.count = 0
        if change == "put":
            put(desk, every(HOUR), "new")
        elif change == "resume":
            desk.do(schedules.encode_state("s07", True))
            desk.do(schedules.encode_state("s07", False))
        elif change == "stale":
            desk.delivery._schedules._fired(  # type: ignore[union-attr]
                [firing.Firing("s03", 1, found(desk, "s03").state.next, 0, 0, 0, 0, ())],
                FireResult(np.ones(1, np.uint8)), None,
            )  # fmt: skip
        else:
            desk.refuse_with = OutcomeUnknown("lost")
            desk.run(6 * SECOND)
            desk.refuse_with = None
        desk.run(10)
        assert passed.count < 60, change
    desk.run(10 * SECOND)
    assert all(found(desk, f"s{n:02}").state.last > START_MS + desk.now for n in range(20))
    assert found(desk, "new").state.next > 0


def test_a_zone_that_this_node_lacks_is_reported_and_tried_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    put(desk, schedules.Spec("t", cron="* * * * *", timezone="Mars/Olympus"))
    put(desk, every(SECOND), "other")
    desk.run(SECOND)
    assert desk.delivery.invalid_schedules() == 1
    assert counts(desk, "other")[0] > 0
    with monkeypatch.context() as patched:
        patched.setattr("hadelay.timing.cron.zone", lambda name: zones.zone("UTC"))
        patched.setattr("hadelay.timing.zones.offset_ms", lambda name, at_ms: 0)
        patched.setattr("hadelay.timing.zones.next_change", lambda name, after_ms: None)
        desk.run(firing._SLEEP_MS + SECOND)
    assert desk.delivery.invalid_schedules() == 0
    assert counts(desk)[0] > 0


def test_newer_tzdata_moves_what_is_not_filed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    daily = schedules.Spec("t", cron="0 9 * * *", timezone="Europe/Vienna")
    put(desk, daily)
    put(desk, every(HOUR), "hourly")
    assert desk.ledger.schedules.tzdata == zones.VERSION
    before = found(desk).state.next
    occurrences = plan.occurrences
    monkeypatch.setattr(zones, "VERSION", "2099a")
    monkeypatch.setattr(
        plan, "occurrences",
        lambda spec, after: (t + MINUTE * (spec.cron is not None) for t in occurrences(spec, after)),
    )  # fmt: skip
    desk.depose()
    desk.new_leader()
    desk.run(SECOND)
    assert found(desk).state.next == before + MINUTE
    assert desk.ledger.schedules.tzdata == "2099a"
    monkeypatch.setattr(zones, "VERSION", "2026a")
    desk.depose()
    desk.new_leader()
    desk.run(SECOND)
    assert desk.ledger.schedules.tzdata == "2099a"


def test_a_finished_schedule_is_removed_after_a_week(desk: Desk) -> None:
    put(desk, schedules.Spec("t", at=[START_MS + 5 * SECOND]))
    desk.run(10 * SECOND)
    assert found(desk).state.finished
    desk.suspend(schedules.KEPT_MS - MINUTE)
    desk.run(30 * SECOND)
    assert ledger_schedules.find(desk.ledger, "s") is not None
    desk.run(MINUTE)
    assert ledger_schedules.find(desk.ledger, "s") is None
