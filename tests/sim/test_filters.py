"""The model of bulk jobs (chaos/sim/jobcheck.py) tells by each filter which messages a job means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from chaos.sim.cluster import Watch
from chaos.sim.history import History, Violation
from chaos.sim.jobcheck import FILTERS, left_over, not_meant
from hadelay.codec import commands
from hadelay.codec.commandtypes import Command
from hadelay.codec.jobcommands import LAST, JobStep
from hadelay.codec.meta import Meta, pack
from tests.ledger.test_bulk import begin
from tests.ledger.world import START_MS, World, draft

#: Filters, each of which passes the first of two messages only; `ids` stands for the id of this message.
CASES: tuple[dict[str, Any], ...] = (
    {"tags": ("red",)}, {"key_prefix": "c1"}, {"group": "a"}, {"schedule": "tick"}, {"to_ms": START_MS + 2_000},
    {"from_ms": START_MS + 1_000, "to_ms": START_MS + 1_001}, {"ids": ()}, {"error": "HTTP 503"},
    {"error": "HTTP 503", "ids": ()},
)  # fmt: skip


def test_every_filter_has_a_case() -> None:
    assert {name for case in CASES for name in case} == set(FILTERS)


@pytest.mark.parametrize("case", CASES)
def test_a_filter_means_one_of_two_messages(case: dict[str, Any]) -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    one, other = Meta(tags=["red"], key="c12", group="a", sch="tick"), Meta(tags=["blue"], key="d", group="b")
    ids = world.ids(replace(draft("t", 1_000), meta=pack(one)), replace(draft("t", 2_000), meta=pack(other)))
    if "error" in case:
        world.now += 2_000
        for message_id, reason in zip(ids, ("HTTP 500", ""), strict=True):
            world.nack(world.lease(message_id), reason=reason)
    spec = case | ({"ids": (ids[0],)} if "ids" in case else {})
    begin(world, "redrive" if "error" in case else "cancel", **spec)
    assert left_over(world.ledger, world.ledger.jobs[1]) == ids[:1]
    step = Command.JOB_STEP, memoryview(JobStep(1, (0, 0), LAST, ids).pack())
    assert not_meant(world.ledger, [step]) == {ids[1]}
    world.publish(draft("t"))  # which the job does not mean, because it is newer
    assert left_over(world.ledger, world.ledger.jobs[1]) == ids[:1]


def test_a_step_with_another_message_is_a_violation() -> None:
    watch, step = SimpleNamespace(_strays={1}, decide=History().decide), JobStep(7, (0, 0), (1, 0), [1])
    with pytest.raises(Violation, match="J2 jobs, complete: job 7 does not mean"):
        Watch._note_step(watch, step, None)  # type: ignore[arg-type]
