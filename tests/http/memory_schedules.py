"""The services for schedules over a state machine in memory: the real ones, without Raft and without a leader."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from hadelay.errors import HadelayError
from hadelay.server.refusals import Refusals
from hadelay.server.service.schedules import ScheduleService
from tests.ledger.world import START_MS, World


def schedule_service(now_ms: Callable[[], int]) -> ScheduleService:
    world = World()

    def propose(command: bytes, done: Callable[..., None]) -> None:
        world.now = max(world.now, now_ms() - START_MS)
        done(world.one(command), None)

    def in_thread(lane: str, fn: Callable[[], Any], done: Callable[..., None]) -> None:
        try:
            done(fn(), None)
        except HadelayError as error:
            done(None, error)

    node: Any = SimpleNamespace(
        name="n1", ledger=world.ledger, now_ms=now_ms, propose=propose,
        runtime=SimpleNamespace(in_thread=in_thread), raft=SimpleNamespace(read_index=lambda done: done(None)),
        group_commit=SimpleNamespace(refusals=Refusals(lambda: 0.0, lambda topic: 0)),
        peers=SimpleNamespace(no_space=lambda: ""),
    )  # fmt: skip
    return ScheduleService(node)
