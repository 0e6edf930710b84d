"""One flipped bit, in any file: detected on reading, named with file and offset, and mended from a good copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import NOW, Loop, checkpoint, events, messages, open_storage

from hadelay.codec.formats import INDEX, INDEX_SIZE
from hadelay.errors import BadRequest, DamagedFile
from hadelay.model import hour_name
from hadelay.platform.disk import Disk
from hadelay.storage.heads import HeadsCache
from hadelay.storage.names import TOPIC
from hadelay.storage.store import Storage

SIZE = 48 + 40


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))


@pytest.fixture(params=[NOW, NOW + 30], ids=["mapped", "far"])
def hour(request: pytest.FixtureRequest) -> int:
    found: int = request.param
    return found


@pytest.fixture
def storage(tmp_path: Path, hour: int) -> Iterator[Storage]:
    loop = Loop()
    storage = open_storage(Disk(), str(tmp_path), loop)
    storage.hours.append(*messages(hour, sizes=[40] * 30))
    storage.hours.append_events(hour, events([1, 2, 3]))
    storage.names.register(TOPIC, "orders")
    checkpoint(storage, loop, 1)
    yield storage
    storage.close()


def file(storage: Storage, hour: int, suffix: str) -> Path:
    return Path(storage.directory, "hours", hour_name(hour) + suffix)


@pytest.mark.parametrize("at", [3, 44, 60])
def test_a_record(storage: Storage, hour: int, at: int) -> None:
    good = storage.hours.record(hour, SIZE, SIZE)
    flip(file(storage, hour, ".log"), SIZE + at)
    with pytest.raises(DamagedFile, match=rf"\.log, offset {SIZE}: the record's") as caught:
        storage.hours.record(hour, SIZE, SIZE, verify=True)
    assert caught.value.offset == SIZE
    assert storage.hours.record(hour, 0, SIZE, verify=True)
    storage.hours.repair(hour, ".log", SIZE, good)
    assert storage.hours.record(hour, SIZE, SIZE, verify=True) == good


@pytest.mark.parametrize("at", [0, 16, 44, 63])
def test_an_index_entry(storage: Storage, hour: int, at: int) -> None:
    good = storage.hours.entries(hour, slice(7, 8)).tobytes()
    flip(file(storage, hour, ".idx"), 7 * INDEX_SIZE + at)
    with pytest.raises(DamagedFile, match=rf"\.idx, offset {7 * INDEX_SIZE}:"):
        storage.hours.entries(hour, np.array([2, 7, 3]))
    with pytest.raises(DamagedFile):
        storage.hours.entries(hour, slice(7, 8))
    assert len(storage.hours.entries(hour, np.array([7]), verify=False)) == 1
    assert len(storage.hours.entries(hour, np.array([6, 8]))) == 2
    storage.hours.repair(hour, ".idx", 7 * INDEX_SIZE, good)
    assert storage.hours.entries(hour, slice(7, 8)).tobytes() == good


def test_an_event(storage: Storage, hour: int) -> None:
    good = storage.hours.events(hour, slice(1, 2)).tobytes()
    flip(file(storage, hour, ".dsp"), 32 + 5)
    with pytest.raises(DamagedFile, match=r"\.dsp, offset 32:"):
        storage.hours.events(hour)
    storage.hours.repair(hour, ".dsp", 32, good)
    assert storage.hours.events(hour, slice(1, 2)).tobytes() == good


def test_a_repair_that_does_not_verify_changes_nothing(storage: Storage, hour: int) -> None:
    hours = storage.hours
    record, entry = hours.record(hour, 0, SIZE), hours.entries(hour, slice(0, 1)).tobytes()
    before = file(storage, hour, ".log").read_bytes(), file(storage, hour, ".idx").read_bytes()
    for suffix, offset, data in [
        (".log", 0, record[:-1] + b"x"),
        (".log", 0, record[:-1]),
        (".idx", 0, entry[:-1] + b"x"),
        (".idx", INDEX_SIZE, entry),  # sound, but it belongs elsewhere
        (".idx", 0, entry[:10]),
        (".dsp", 0, b""),
    ]:
        with pytest.raises(BadRequest):
            hours.repair(hour, suffix, offset, data)
    with pytest.raises(BadRequest, match="no index entry points to this record"):
        hours.repair(hour, ".log", SIZE, record)  # sound, but it belongs elsewhere
    assert (file(storage, hour, ".log").read_bytes(), file(storage, hour, ".idx").read_bytes()) == before


def test_a_repaired_place_is_synced_by_the_next_checkpoint(storage: Storage, hour: int) -> None:
    assert storage.hours.unsynced() == []
    storage.hours.repair(hour, ".log", 0, storage.hours.record(hour, 0, SIZE))
    assert storage.hours.unsynced() == [str(file(storage, hour, ".log"))]


def test_the_names(storage: Storage) -> None:
    storage.close()
    flip(Path(storage.directory, "names"), 13)
    with pytest.raises(DamagedFile, match="names, offset 0: the name's CRC is wrong"):
        storage.reopen()


def test_heads_are_not_derived_from_a_damaged_entry(storage: Storage, hour: int) -> None:
    """Its second may be another one: what is linked next would belong to no chain of this node's, and its files would
    not be those of the others. From seed 148 of `python -m chaos sim --fault rot`."""
    flip(file(storage, hour, ".idx"), 7 * INDEX_SIZE + INDEX.fields["second"][1])
    fresh = HeadsCache(Disk(), storage.hours.path, storage.hours._read_rows)  # as a restart makes it
    with pytest.raises(DamagedFile, match="the entry's CRC is wrong") as caught:
        fresh.get(hour, 30)
    assert (caught.value.offset, caught.value.size) == (7 * INDEX_SIZE, INDEX_SIZE)


@pytest.mark.parametrize("hour", [NOW + 30], indirect=True)
def test_nothing_is_linked_after_a_damaged_entry_of_a_far_hour(storage: Storage, hour: int) -> None:
    """From seed 5013 of `python -m chaos sim --fault rot`."""
    storage.hours._heads.forget(hour)
    flip(file(storage, hour, ".idx"), 7 * INDEX_SIZE + INDEX.fields["second"][1])
    storage.hours.append(*messages(hour, sizes=[40]))
    with pytest.raises(DamagedFile, match="the entry's CRC is wrong") as caught:
        storage.hours.entries(hour, slice(None))
    assert (caught.value.offset, caught.value.size) == (7 * INDEX_SIZE, INDEX_SIZE)
    flip(file(storage, hour, ".idx"), 7 * INDEX_SIZE + INDEX.fields["second"][1])  # back
    assert len(storage.hours.entries(hour, slice(None))) == 31
