"""A process between its start and the moment at which it can serve."""

from __future__ import annotations

import asyncio
import subprocess
import sys
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


def test_a_deleted_file_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    said: dict[str, object] = {}
    monkeypatch.setattr(process.log, "critical", lambda event, **fields: said.update(fields))
    monkeypatch.setattr(process.os, "_exit", lambda code: None)
    process._end_at_once(FileNotFoundError(2, "No such file or directory", "/data/hours/2026112906.log"))
    assert said["file"] == "/data/hours/2026112906.log"
    assert "check quorum" in str(said["next"])
    assert "two nodes at once" in str(said["next"])


@pytest.mark.parametrize("log", ["written", "blocked"])
def test_a_stop_that_takes_too_long_is_ended_by_a_thread(log: str) -> None:
    """A starved node's event loop gets no turn: the timeouts of the steps alone would not end the process. And a log
    whose reader has stopped blocks whoever writes to it."""
    blocked = "process.log.warning = lambda *_, **__: threading.Event().wait(100)\n"
    program = (
        "import asyncio, os, signal, threading, types\n"
        "from hadelay import process\n"
        f"{'process.log = types.SimpleNamespace()' if log == 'blocked' else ''}\n"
        f"{blocked if log == 'blocked' else ''}"
        "process._STOP_S = 0.2\n"
        "async def serve():\n"
        "    ending = process._end_on_signals(asyncio.get_running_loop())\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    await ending.wait()\n"
        "    threading.Event().wait(100)\n"
        "asyncio.run(serve())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert ("stop_unfinished" in done.stdout + done.stderr) == (log == "written")
