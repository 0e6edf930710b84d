"""A restart finds what the last checkpoint says, wherever the process ended, and costs nothing for what is old."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import NOW, Loop, checkpoint, events, hour_states, messages, open_storage

from hadelay.errors import DamagedFile
from hadelay.model import hour_name
from hadelay.platform.disk import Disk
from hadelay.storage.names import CONSUMER, TOPIC
from hadelay.storage.store import Storage

FAR = NOW + 100


@pytest.fixture
def loop() -> Loop:
    return Loop()


def fill(storage: Storage, seed: int = 0) -> None:
    storage.hours.append(*messages(NOW, sizes=[30] * 20, seed=seed))
    storage.hours.append(*messages(FAR, sizes=[30] * 20, seed=seed + 1))
    hours = np.array([NOW, FAR, FAR + 1] * 5)
    storage.hours.append(*messages(hours, sizes=[9] * 15, seed=seed + 2, copies=[0, 1, 2] * 5))
    storage.hours.append_events(NOW, events([0, 1]))
    storage.names.register(TOPIC, f"topic {seed}")
    storage.tables.put(b"keys", b"%d" % seed, b"value")


def seen(storage: Storage) -> tuple:
    store = storage.hours
    sums = store.checksums()
    entries = {hour: store.entries(hour, slice(None)).tobytes() for hour in store.hours()}
    return sums, entries, storage.names.all(), storage.tables.range(b"keys")


def reopen(storage: Storage, loop: Loop) -> Storage:
    storage.close()
    return open_storage(storage.disk, storage.directory, loop)


def test_everything_is_as_at_the_checkpoint(tmp_path: Path, loop: Loop) -> None:
    storage = open_storage(Disk(), str(tmp_path), loop)
    assert (storage.applied_index, storage.core_blob) == (0, b"")
    fill(storage)
    checkpoint(storage, loop, 7, core=b"core", hours={NOW: b"now", FAR: b"far"})
    at_checkpoint = seen(storage)
    fill(storage, 10)
    storage = reopen(storage, loop)
    assert (storage.applied_index, storage.applied_term, storage.core_blob) == (7, 1, b"core")
    assert hour_states(storage) == {NOW: b"now", FAR: b"far"}
    assert seen(storage) == at_checkpoint
    storage.close()


def test_replay_after_recovery_gives_the_same_bytes(tmp_path: Path, loop: Loop) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    straight = open_storage(Disk(), str(tmp_path / "a"), loop)
    fill(straight)
    fill(straight, 10)
    storage = open_storage(Disk(), str(tmp_path / "b"), loop)
    fill(storage)
    checkpoint(storage, loop, 1)
    fill(storage, 10)
    storage.hours.checksums()  # written, but in no checkpoint
    storage = reopen(storage, loop)
    fill(storage, 10)
    assert seen(storage) == seen(straight)
    checkpoint(storage, loop, 2)
    checkpoint(straight, loop, 2)
    a, b = ({p.name: p.read_bytes() for p in Path(s.directory, "hours").iterdir()} for s in (straight, storage))
    for name, (length, _) in storage.hours.checksums().items():
        assert a[name][:length] == b[name][:length]
    straight.close()
    storage.close()


def test_arrivals_during_a_checkpoint_are_not_part_of_it(tmp_path: Path, loop: Loop) -> None:
    storage = open_storage(Disk(), str(tmp_path), loop)
    fill(storage)
    at_sample = None
    outcome: list[object] = []
    storage.checkpoint(1, 1, b"", {}, outcome.append)
    fill(storage, 10)  # near ones are written at once, far ones wait anew
    storage.hours.entries(FAR, slice(None))  # and this writes both parts of one hour
    loop.run()
    assert outcome == [None]
    reference = open_storage(Disk(), str(tmp_path / "reference"), loop)
    fill(reference)
    at_sample = seen(reference)
    reference.close()
    storage = reopen(storage, loop)
    assert seen(storage) == at_sample
    storage.checkpoint(2, 1, b"", {}, outcome.append)
    with pytest.raises(AssertionError, match="one checkpoint"):
        storage.checkpoint(2, 1, b"", {}, outcome.append)
    storage.close()


def test_checksums_go_on_where_the_checkpoint_left_them(tmp_path: Path, loop: Loop) -> None:
    from hadelay.codec.checksums import crc32c

    storage = open_storage(Disk(), str(tmp_path), loop)
    for seed in range(4):
        fill(storage, seed * 10)
        checkpoint(storage, loop, seed + 1)
        storage = reopen(storage, loop)
        for name, (length, crc) in storage.hours.checksums().items():
            assert crc32c((tmp_path / "hours" / name).read_bytes()[:length]) == crc, name
    storage.close()


def test_an_hour_that_was_never_in_a_checkpoint_leaves_nothing(tmp_path: Path, loop: Loop) -> None:
    storage = open_storage(Disk(), str(tmp_path), loop)
    fill(storage)
    storage.hours.checksums()
    storage = reopen(storage, loop)
    assert storage.hours.hours() == []
    assert list((tmp_path / "hours").iterdir()) == []
    storage.close()


@pytest.mark.parametrize("suffix", ["log", "idx", "dsp"])
def test_a_file_shorter_than_its_checkpoint_is_damage(tmp_path: Path, loop: Loop, suffix: str) -> None:
    storage = open_storage(Disk(), str(tmp_path), loop)
    fill(storage)
    checkpoint(storage, loop, 1)
    storage.close()
    path = tmp_path / "hours" / f"{hour_name(NOW)}.{suffix}"
    data = path.read_bytes()
    for damaged in (data[: len(data) - 1], None):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        with pytest.raises(DamagedFile, match=rf"{path.name}, offset \d+: the file ends here; the checkpoint says"):
            open_storage(Disk(), str(tmp_path), loop)


def test_a_retired_hour_goes_with_the_next_checkpoint_and_no_pin(tmp_path: Path, loop: Loop) -> None:
    storage = open_storage(Disk(), str(tmp_path), loop)
    fill(storage)
    checkpoint(storage, loop, 1, hours={FAR: b"x"})
    paths = [tmp_path / "hours" / f"{hour_name(hour)}.idx" for hour in (NOW, FAR)]
    storage.hours.retire(NOW)
    storage.hours.retire(FAR)
    assert storage.hours.hours() == [FAR + 1]
    assert all(path.exists() for path in paths)
    again = reopen(storage, loop)  # the retirement was not durable
    assert again.hours.hours() == [NOW, FAR, FAR + 1]
    again.hours.retire(NOW)
    again.hours.retire(FAR)
    again.hours.pins += 1
    checkpoint(again, loop, 2)
    assert all(path.exists() for path in paths)
    again.hours.pins -= 1
    checkpoint(again, loop, 3)
    assert not any(path.exists() for path in paths)
    again = reopen(again, loop)
    assert again.hours.hours() == [FAR + 1]
    assert hour_states(again) == {}
    again.close()


def test_an_hour_retired_during_a_checkpoint_stays_whole_in_it(tmp_path: Path, loop: Loop) -> None:
    storage = open_storage(Disk(), str(tmp_path), loop)
    fill(storage)
    outcome: list[object] = []
    storage.checkpoint(1, 1, b"", {}, outcome.append)
    storage.hours.retire(FAR)
    loop.run()
    assert outcome == [None]
    storage = reopen(storage, loop)
    assert storage.hours.count(FAR) == 30
    assert len(storage.hours.entries(FAR, slice(None))) == 30
    storage.close()


def test_many_hours_open_at_once(tmp_path: Path, loop: Loop) -> None:
    """Opening looks at sizes only: no index is read, whatever it holds."""
    storage = open_storage(Disk(), str(tmp_path), loop)
    hours = np.random.default_rng(2).integers(NOW + 5, NOW + 3000, 4000)
    storage.hours.append(*messages(hours, sizes=[4] * 4000))
    checkpoint(storage, loop, 1)
    storage.close()
    opened: list[str] = []

    class Watched(Disk):
        def open(self, path: str, *, create: bool = False):  # type: ignore[no-untyped-def]
            opened.append(path)
            return super().open(path, create=create)

    storage = open_storage(Watched(), str(tmp_path), loop)
    assert storage.hours.counts(hours).sum() >= 4000
    assert not [path for path in opened if "/hours/" in path]
    storage.close()


def test_names_keep_their_numbers(tmp_path: Path, loop: Loop) -> None:
    storage = open_storage(Disk(), str(tmp_path), loop)
    names = storage.names
    assert [names.register(TOPIC, t) for t in ("a", "b", "ä", "a")] == [0, 1, 2, 0]
    assert names.register(CONSUMER, "a") == 0
    checkpoint(storage, loop, 1)
    storage.names.register(TOPIC, "late")
    storage = reopen(storage, loop)
    assert storage.names.name(TOPIC, 2) == "ä"
    assert storage.names.number(CONSUMER, "a") == 0
    with pytest.raises(KeyError):
        storage.names.number(TOPIC, "late")
    with pytest.raises(KeyError):
        storage.names.name(TOPIC, 3)
    assert storage.names.register(TOPIC, "other") == 3
    storage.close()
