"""What a node says about the archive of its hours: read in a thread, at most once a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hadelay.server.service import archive
from hadelay.server.service.archive import ArchiveService
from tests.server.test_maintenance import FIRST, SECOND, archive_hour


class Reader:
    """The service, with a clock that the test moves and a thread whose job the test runs."""

    def __init__(self, loop: asyncio.Runner, where: str) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any, Any], None]]] = []
        self.now_s = 1_000.0
        self.loop = loop
        runtime = SimpleNamespace(
            monotonic=lambda: self.now_s, in_thread=lambda _, fn, done: self.jobs.append((fn, done))
        )
        config = SimpleNamespace(retention=SimpleNamespace(archive=where))
        self.service = ArchiveService(SimpleNamespace(config=config, runtime=runtime))  # type: ignore[arg-type]

    def work(self) -> int:
        count = len(self.jobs)
        while self.jobs:
            fn, done = self.jobs.pop()
            try:
                done(fn(), None)
            except Exception as error:
                done(None, error)
        return count

    def look(self) -> tuple[list[bool], str]:
        hours, state = self.loop.run(self.service.look())
        return [FIRST in hours, SECOND in hours], state


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Runner]:
    monkeypatch.setattr(archive, "_WAIT_S", 0.01)
    with asyncio.Runner() as running:
        yield running


def test_a_node_without_an_archive_reads_none(loop: asyncio.Runner) -> None:
    reader = Reader(loop, "")
    assert reader.look() == ([False, False], "")
    assert not reader.jobs


def test_archived_hours_are_read_at_most_once_a_minute(loop: asyncio.Runner, tmp_path: Path) -> None:
    archive_hour(tmp_path, FIRST)
    reader = Reader(loop, str(tmp_path))
    assert [reader.look(), reader.look()] == [([False, False], "reading")] * 2
    assert reader.work() == 1, "one job, however many look while it runs"
    archive_hour(tmp_path, SECOND)
    assert reader.look() == ([True, False], "known")
    assert not reader.jobs
    reader.now_s += 60
    assert reader.look() == ([True, False], "known"), "what was read before, while the archive is read again"
    assert reader.work() == 1
    assert reader.look() == ([True, True], "known")


def test_an_archive_that_cannot_be_read_leaves_what_was_read_before(loop: asyncio.Runner, tmp_path: Path) -> None:
    *_, catalogue = archive_hour(tmp_path, FIRST)
    reader = Reader(loop, str(tmp_path))
    reader.look()
    reader.work()
    catalogue.unlink()
    (tmp_path / "_catalogue" / "0000000002-00000000.json").write_bytes(b"damaged")
    reader.now_s += 60
    reader.look()
    reader.work()
    assert reader.look() == ([True, False], "unreadable")
    fresh = Reader(loop, str(tmp_path))
    fresh.look()
    fresh.work()
    assert fresh.look() == ([False, False], "unreadable")
