"""A node is stopped while a checkpoint is being taken. In the thread that commits it: LMDB closed under a transaction
leaves its write lock locked for good, and the node never ends. Between two slices: no other comes."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from hadelay.errors import Overloaded
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.tables import Put

from .support import NOW, Loop, checkpoint, events, messages, open_storage


class Slow(LmdbBackend):
    """Commits until it is interrupted. May not be closed while it does."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.committing, self.interrupted = threading.Event(), threading.Event()

    def commit(self, dropped: Iterable[bytes], puts: Iterable[Put]) -> None:
        self.committing.set()
        assert self.interrupted.wait(30)
        super().commit(dropped, puts)
        self.committing.clear()

    def interrupt(self) -> None:
        super().interrupt()
        self.interrupted.set()

    def close(self) -> None:
        assert not self.committing.is_set()
        super().close()


def test_a_commit_under_way_is_waited_for(tmp_path: Path) -> None:
    async def stop_during() -> None:
        runtime = Runtime(asyncio.get_running_loop())
        storage = open_storage(Disk(), str(tmp_path / "data"), runtime, backend=Slow)
        backend = storage.tables.backend
        assert isinstance(backend, Slow)
        for n in range(10_000):  # more than one transaction takes
            storage.tables.put(b"t", n.to_bytes(4, "big"), b"1")
        storage.checkpoint(7, 1, b"core", {}, lambda error: None)
        await asyncio.to_thread(backend.committing.wait, 30)
        storage.close()
        runtime.close()

    async def seen() -> None:
        runtime = Runtime(asyncio.get_running_loop())
        storage = open_storage(Disk(), str(tmp_path / "data"), runtime)
        assert storage.applied_index == 7
        assert all(storage.tables.get(b"t", n.to_bytes(4, "big")) == b"1" for n in range(10_000))
        storage.close()
        runtime.close()

    asyncio.run(stop_during())
    asyncio.run(seen())


def test_a_slice_that_comes_after_the_end_writes_nothing(tmp_path: Path) -> None:
    loop, directory = Loop(), tmp_path / "data"
    storage = open_storage(Disk(), str(directory), loop)
    checkpoint(storage, loop, 1)
    far = NOW + 100 + np.arange(2_000)  # more than one slice writes
    storage.hours.append(*messages(far, sizes=[100] * len(far)))
    outcome: list[BaseException | None] = []
    storage.checkpoint(2, 1, b"core", {}, outcome.append)
    storage.write_out(outcome.append)
    storage.close()

    def written() -> dict[Path, int]:
        return {path: path.stat().st_size for path in directory.rglob("*") if path.is_file()}

    before = written()
    loop.run()
    assert written() == before
    assert all(isinstance(error, Overloaded) for error in outcome)
    assert len(outcome) == 2, "who waits is told"
    storage = open_storage(Disk(), str(directory), loop)
    assert storage.applied_index == 1
    storage.close()


def test_a_reader_of_a_closed_store_neither_reads_nor_writes_its_successors_files(tmp_path: Path) -> None:
    """A list that was begun before a snapshot was switched to: the files have the same names."""
    loop, directory, far = Loop(), tmp_path / "data", NOW + 100
    storage = open_storage(Disk(), str(directory), loop)
    for hour in (NOW, far):
        storage.hours.append(*messages(hour, sizes=[100] * 9))
        storage.hours.append_events(hour, events([0]))
    storage.tables.put(b"t", b"k", b"1")
    checkpoint(storage, loop, 1)
    storage.hours.append(*messages(far, sizes=[100] * 9))  # waits
    storage.hours._heads.worth_writing = 0
    storage.hours.heads(NOW)
    hours, tables = storage.hours, storage.tables
    record = hours.entries(NOW, slice(1))[0]
    storage.close()
    another = open_storage(Disk(), str(directory), loop, mapped=False)

    def there() -> tuple[dict[Path, bytes], list[str]]:
        files = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
        return files, os.listdir("/proc/self/fd")

    before = there()
    for hour in (NOW, far):
        for look in (
            lambda hour=hour: hours.entries(hour, slice(None)),
            lambda hour=hour: hours.entries(hour, np.array([0, 8])),
            lambda hour=hour: hours.index_view(hour),
            lambda hour=hour: hours.pre_view(hour),
            lambda hour=hour: hours.events(hour),
            lambda hour=hour: hours.read_file(hour, ".log", 0, 10),
            lambda hour=hour: hours.record(hour, int(record["offset"]), int(record["size"])),
            lambda hour=hour: hours.written_minutes(hour),
            lambda: hours.heads(far),
            hours.checksums,
            lambda: tables.get(b"t", b"k"),
            lambda: tables.get_many(b"t", [b"k"]),
            lambda: tables.range(b"t"),
        ):
            with pytest.raises(Overloaded, match="closed"):
                look()
    hours._heads.save(limit=8)
    assert there() == before
    another.close()
    storage.close()  # once more does no harm
