"""Records that are on the disk alone: the loop never waits for them, and what falls due soon is read ahead."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import INDEX, RECORD, RECORD_SIZE
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Runtime
from hadelay.server import reading
from hadelay.storage.identity import Identity
from hadelay.storage.store import Storage

HOUR = 490_000
ALL, COUNT, BODY = 8_000, 1_000, 4_096


def drop(path: str) -> None:
    """Out of memory; what is read from now on comes from the disk."""
    with open(path, "rb+") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(autouse=True)
def a_disk(tmp_path: Path) -> None:
    """Looking at the log itself would have it read ahead."""
    file = Disk().open(str(tmp_path / "probe"), create=True)
    file.pwrite(bytes(1 << 20), 0)
    drop(file.path)
    if file.pread_cached(4_096, 0) is not None:
        pytest.skip("this file system keeps everything in memory, or cannot tell")
    file.close()


class Rig:
    """A reader over a real disk whose cache can be dropped."""

    def __init__(self, directory: Path, hour: int) -> None:
        self.disk, self.runtime = Disk(), Runtime(asyncio.get_running_loop())
        self.storage = Storage(self.disk, str(directory), self.runtime, Identity("c", 0, "n1"))
        replica: Any = SimpleNamespace(storage=self.storage)
        nobody: Any = None
        self.reader = reading.VerifiedReader(replica, self.runtime, nobody)
        self.hours = np.full(COUNT, hour)
        rows, headers = np.zeros(ALL, INDEX), np.zeros(ALL, RECORD)
        rows["deliver_at_ms"], rows["size"] = hour * 3_600_000, RECORD_SIZE + BODY
        headers["body_size"] = BODY
        self.storage.hours.set_clock(HOUR)
        headers["payload_crc"] = crc32c(bytes(BODY))
        self.storage.hours.append(hour, rows, bytearray((RECORD_SIZE + BODY) * ALL), headers)
        #: All over the log, in no order.
        self.rows = self.storage.hours.entries(hour, np.random.default_rng(1).choice(ALL, COUNT, replace=False))
        self.log = self.storage.hours.path(hour) + ".log"
        self.storage.hours.read_file(hour, ".log", 0, 1)

    def drop(self) -> None:
        drop(self.log)

    def close(self) -> None:
        self.storage.close()
        self.runtime.close()

    async def read(self) -> list[bytes]:
        return await self.reader.records(self.hours, self.rows)

    async def reads_from_memory(self) -> None:
        """Await a read that asks no thread. The system may drop pages of files at any time, so a few come back from
        the disk now and then."""
        async with asyncio.timeout(20):
            while True:
                self.reader.counts.clear()
                await self.read()
                if self.reader.counts == {"memory": COUNT}:
                    return


@pytest.fixture(params=[HOUR, HOUR - 5], ids=["mapped", "far"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path, request.param)
    yield made
    made.close()


def waits() -> int:
    """How often this thread has waited: for pages of a map, and for anything else."""
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_majflt + usage.ru_nvcsw


async def test_the_loop_does_not_wait_for_the_disk(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    on_loop = Counter[str]()
    record, cached = rig.storage.hours.record, rig.storage.hours.cached_record
    monkeypatch.setattr(rig.storage.hours, "record", lambda *a, **k: on_loop.update(["may wait"]) or record(*a, **k))
    monkeypatch.setattr(rig.storage.hours, "cached_record", lambda *a: on_loop.update(["does not"]) or cached(*a))
    rig.drop()
    before = waits()
    found = await rig.read()
    assert on_loop["may wait"] == 0, "records that the loop may have waited for"
    assert on_loop["does not"] <= COUNT / 2, "what the loop looked at in one slice"
    assert waits() - before < 20, "the loop waited for the disk"
    assert [len(record) for record in found] == [RECORD_SIZE + BODY] * COUNT
    assert rig.reader.counts["disk"] > COUNT / 2
    assert await rig.read() == found
    await rig.reads_from_memory()


async def test_a_list_does_not_hold_up_hand_outs(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a list reads is up to a page of 16 MiB, and leases run while a hand-out is read."""
    go_on, lists = threading.Event(), list[str]()
    read = reading._read_file

    def leased_up(*asked: Any) -> None:
        if not lists:
            lists.append(threading.current_thread().name)
            go_on.wait(20)
        read(*asked)

    monkeypatch.setattr(reading, "_read_file", leased_up)
    rig.drop()
    extents = reading.extents_of(rig.hours, rig.rows)
    listing = asyncio.create_task(rig.reader.read_off_loop(extents[:500], reading.LISTS))
    async with asyncio.timeout(10):
        while not lists:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        assert None not in await rig.reader.read_off_loop(extents[500:])
    assert not listing.done()
    go_on.set()
    assert None not in await listing


async def test_messages_that_fall_due_soon_are_in_memory(rig: Rig) -> None:
    rig.drop()
    ahead = reading.ReadAhead(rig.disk, rig.runtime, rig.storage.hours.path)
    ahead.records(int(rig.hours[0]), rig.rows, reading.AHEAD_S)
    await asyncio.sleep(0)
    extents = reading.extents_of(rig.hours, rig.rows)
    async with asyncio.timeout(20):
        while None in rig.reader._cached(extents):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await rig.reads_from_memory()


def test_neighbours_are_read_together() -> None:
    starts = np.array([1_000_000, 0, 4_096, 40_000])
    assert reading.spans(starts, starts + 4_096) == [(0, 44_096), (1_000_000, 1_004_096)]
