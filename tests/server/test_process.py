"""A process between its start and the moment at which it can serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from hadelay import process
from hadelay.errors import HadelayError, NoLeader


def catching_up(read_index: Callable[[Callable[[HadelayError | None], None]], None]) -> Any:
    """A node that follows a leader and has not applied all that the leader has committed."""
    raft = SimpleNamespace(read_index=read_index)
    runtime, leadership = SimpleNamespace(monotonic=time.monotonic), SimpleNamespace(serves=lambda: True)
    return SimpleNamespace(raft=raft, runtime=runtime, leadership=leadership)


async def test_a_node_that_catches_up_ends_at_the_first_signal() -> None:
    """It may catch up for minutes, or wait for a leader that stopped before it."""
    ending, asked = asyncio.Event(), list[Callable[[HadelayError | None], None]]()
    waiting = asyncio.create_task(process._ready(catching_up(asked.append), ending))
    await asyncio.sleep(0.1)
    assert len(asked) == 1
    ending.set()
    async with asyncio.timeout(5):
        await waiting
    asked[0](None)


async def test_a_node_that_catches_up_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(process, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(process, "ready_checks", lambda node: [])
    ending = asyncio.Event()
    waiting = asyncio.create_task(process._ready(catching_up(lambda done: None), ending))
    await asyncio.sleep(0.2)
    ending.set()
    await waiting
    shown = capsys.readouterr()
    assert "it is catching up" in shown.out + shown.err


async def test_a_node_is_ready_when_it_has_applied_what_was_committed() -> None:
    answers: list[HadelayError | None] = [NoLeader("gone"), None]
    node = catching_up(lambda done: done(answers.pop(0)))
    async with asyncio.timeout(5):
        await process._ready(node, asyncio.Event())
    assert not answers
