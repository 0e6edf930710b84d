"""The model of schedules (chaos/sim/timetable.py) agrees with the leader's plan and with apply, whatever bounds a
schedule has, and notices each kind of violation."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from chaos.sim.history import History, Violation
from chaos.sim.run import run_seed
from chaos.sim.scheduler import _SPECS, GROUP, _bounded
from chaos.sim.timetable import SHAPES, Timetable
from hadelay.codec import schedules
from hadelay.codec.entries import decode_entry
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import encode_publish
from hadelay.codec.schedules import ANY_VERSION, KEEP_PAUSE, LAST, Firing, Spec, Stored
from hadelay.ledger.schedules import occurrences
from hadelay.ledger.schedules import schedules as ledger_schedules
from hadelay.model import Draft
from hadelay.server.service import schedules as service
from hadelay.timing import plan
from tests.ledger.test_schedules import SECOND, Owner, every
from tests.ledger.world import START_MS


class Followed(Owner):
    """A world with schedules, whose commands a model follows."""

    def __init__(self) -> None:
        super().__init__()
        self.checking, self.history = 0, History()
        sim = SimpleNamespace(decide=self.history.decide, history=self.history, naps_ms=[], rotten=())
        self.table = Timetable(sim)

    def apply(self, *encoded: bytes) -> list[Any]:
        results = super().apply(*encoded)
        for (kind, body), result in zip(decode_entry(self.entries[-1])[2], results, strict=True):
            self.table.committed(kind, body, result, self.ledger, alone=len(encoded) == 1)
        return results

    def set(self, spec: Spec, body: bytes = b"x") -> None:
        meta = schedules.template_meta(pack(Meta(sch="s", group=spec.group)))
        stored = Stored("", spec, encode_publish("n1", [Draft(spec.topic, 0, True, 0, 0, meta, body)]))
        self.one(schedules.encode_put("s", ANY_VERSION, KEEP_PAUSE, stored))

    def run(self, *occurrences: int, due_ms: int = 0, version: int = ANY_VERSION, key: bytes | None = None) -> Any:
        times = [(at_ms, due_ms) for at_ms in occurrences]
        return self.one(schedules.encode_run("s", version, times, key, span=(0, START_MS)))

    def planned(self) -> Firing:
        firing = self.plan()
        assert firing is not None
        return firing


@pytest.mark.parametrize("seed", range(30))
def test_the_model_agrees(seed: int) -> None:
    rng, world = random.Random(seed), Followed()
    specs = [spec for name in ("tick", "calm", "patient") for spec in _SPECS[name]]
    for _ in range(40):
        act = rng.choice(("set", "set", "run", "pause", "resume", "delete", "wait", "wait", "night"))
        now_ms = START_MS + world.now
        if act == "set":
            world.set(_bounded(rng, rng.choice(specs), now_ms), rng.choice((b"x", b"y")))
        elif act == "delete":
            world.one(schedules.encode_delete("s"))
        elif act == "run":
            world.run(*rng.choice(((0,), (now_ms - 2_000, now_ms - 1_000))))
        elif act in ("pause", "resume"):
            world.one(schedules.encode_state("s", act == "pause"))
        else:
            world.now += rng.choice((300, 1_500, 9_000)) if act == "wait" else 5 * 3_600_000
        found = ledger_schedules.find(world.ledger, "s")
        world.lead(ahead_ms=0 if found is not None and found.stored.spec.overlap else 10_000)


def test_a_repeated_backfill_gets_its_first_answer_from_any_version() -> None:
    """A node computes the range of a repetition anew, and may find other occurrences."""
    world, times = Followed(), [START_MS - 2_000, START_MS - 1_000]
    world.set(every())
    first = world.run(*times, version=1, key=b"k").ids.tolist()
    world.set(every(end_ms=START_MS + 60_000))
    assert world.table.known["s"].version == 2
    for again in (world.run(*times, version=1, key=b"k"), world.run(START_MS - 1_500, version=2, key=b"k")):
        assert (again.ids.tolist(), again.duplicate.all()) == (first, True)
    world.one(schedules.encode_delete("s"))
    assert world.run(*times, version=1, key=b"k").ids.tolist() == first


def test_every_bound_is_met() -> None:
    world = Followed()
    for spec in (every(max_occurrences=2, jitter_ms=5, group=GROUP, end_ms=START_MS + 60_000), _listed(1, 2)):
        world.set(spec)
        world.lead()
    assert all(world.history.counts[f"fired with {shape}"] for shape in SHAPES)
    assert world.history.counts["schedule ended"] == 2


def _listed(*at_s: int, **more: Any) -> Spec:
    return Spec("t", at=[START_MS + at * SECOND for at in at_s], **more)


Plant = Callable[[Followed], None]
#: Name of the promise's branch, and function that plants the violation.
CASES: list[tuple[str, Plant]] = []


def planted(branch: str) -> Callable[[Plant], Plant]:
    """Decorator: a violation of this branch."""

    def add(plant: Plant) -> Plant:
        CASES.append((branch, plant))
        return plant

    return add


def _fired(world: Followed, spec: Spec, **changes: Any) -> None:
    """Let the model see another firing than the one that apply carried out."""
    world.set(spec)
    firing = world.planned()
    with patch.object(world, "table", SimpleNamespace(committed=lambda *_, **more: None)):
        world.fire(firing)
    world.table._fired(replace(firing, **changes), world.ledger)


def _at(*at_s: float) -> Any:
    return [(START_MS + int(at * SECOND),) * 2 for at in at_s]


@planted("S2 schedules, counts")
def before_its_start(world: Followed) -> None:
    _fired(world, replace(every(), start_ms=START_MS + 2_000), times=_at(1, *range(2, 11)))


@planted("S2 schedules, counts")
def counted_from_another_start(world: Followed) -> None:
    _fired(world, replace(every(), start_ms=START_MS + 300), times=_at(*range(1, 11)))


@planted("S2 schedules, counts")
def after_its_end(world: Followed) -> None:
    _fired(world, every(end_ms=START_MS + 2_500), times=_at(1, 2, 3))


@planted("S2 schedules, counts")
def at_no_listed_time(world: Followed) -> None:
    _fired(world, _listed(1, 3), times=_at(1, 2))


@planted("S2 schedules, counts")
def listed_time_left_out(world: Followed) -> None:
    _fired(world, _listed(1, 2, 3), times=_at(1, 3))


@planted("S2 schedules, counts")
def ended_before_its_last_occurrence(world: Followed) -> None:
    _fired(world, every(), next=0, flags=LAST)


@planted("S2 schedules, counts")
def ended_beside_a_next_occurrence(world: Followed) -> None:
    _fired(world, every(), flags=LAST)


@planted("S2 schedules, counts")
def made_too_many(world: Followed) -> None:
    world.set(every(max_occurrences=2))
    world.table.known["s"].made = 1
    world.fire(world.planned())


@planted("S2 schedules, counts")
def ended_too_soon(world: Followed) -> None:
    world.set(every(max_occurrences=2))
    world.table.known["s"].made = -1
    world.fire(world.planned())


@planted("S2 schedules, counts")
def never_ended(world: Followed) -> None:
    with patch.object(ledger_schedules, "finished", lambda ledger, spec, state: state):
        world.set(every(max_occurrences=2))
        world.fire(world.planned())


@planted("S1 schedules")
def due_too_late(world: Followed) -> None:
    world.set(every(jitter_ms=400))
    firing = world.planned()
    (at_ms, _), *others = firing.times
    world.fire(replace(firing, times=[(at_ms, at_ms + 400), *others]))


@planted("S1 schedules")
def due_before_its_time(world: Followed) -> None:
    world.set(every())
    firing = world.planned()
    *others, (at_ms, due_ms) = firing.times
    world.fire(replace(firing, times=[*others, (at_ms, due_ms - 1)]))


@planted("S1 schedules")
def triggered_for_later(world: Followed) -> None:
    world.set(every())
    world.run(0, due_ms=START_MS + 5_000)


@planted("S1 schedules")
def backfilled_as_another(world: Followed) -> None:
    world.set(every())
    with patch.object(occurrences, "with_occurrence", lambda payload, size, at_ms: None):
        world.run(START_MS - 1_000)


@planted("S1 schedules")
def of_another_group(world: Followed) -> None:
    world.set(every())
    known = world.table.known["s"]
    known.stored = replace(known.stored, spec=replace(known.stored.spec, group=GROUP))
    world.fire(world.planned())


@planted("S4 schedules, version")
def backfilled_by_an_old_version(world: Followed) -> None:
    world.set(every())
    world.table.known["s"].version += 1
    world.run(START_MS - 1_000, version=1)


@planted("S4 schedules, version")
def triggered_when_deleted(world: Followed) -> None:
    world.set(every())
    del world.table.known["s"]
    world.run(0)


@pytest.mark.parametrize(("branch", "plant"), [pytest.param(*case, id=case[1].__name__) for case in CASES])
def test_a_violation_is_noticed_by_its_branch(branch: str, plant: Plant) -> None:
    with pytest.raises(Violation) as violation:
        plant(Followed())
    assert violation.value.invariant == branch


_until, _jitter_ms = service._until, plan.jitter_ms
#: Branch that notices a deliberate bug, the function that the bug replaces, and the bug.
BUGS: tuple[tuple[str, Any, str, Callable[..., Any]], ...] = (
    ("S2 schedules, counts", service, "_until", lambda times, end_ms: list(_until(times, end_ms))[1:]),
    ("S2 schedules, counts", ledger_schedules, "finished", lambda ledger, spec, state: state),
    ("S1 schedules", plan, "jitter_ms", lambda spec, name, at_ms: _jitter_ms(spec, name, at_ms) + spec.jitter_ms),
)
#: Seeds of runs with schedules that have all kinds of bounds.
SEEDS = (1, 3, 10, 14)


@pytest.mark.parametrize(("branch", "owner", "name", "bug"), BUGS)
def test_a_bug_is_noticed(branch: str, owner: Any, name: str, bug: Callable[..., Any]) -> None:
    """A backfill leaves its first occurrence out, a schedule goes on after max_occurrences, a jitter is too long."""
    with patch.object(owner, name, bug):
        assert branch in {run_seed(seed, {}).invariant for seed in SEEDS}
