"""What was being written when the power failed is cut off, whatever it looks like: the journal has it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import NOW, Loop, checkpoint, events, messages, open_storage

from hadelay.model import hour_name
from hadelay.platform.disk import Disk
from hadelay.storage.names import TOPIC

FAR = NOW + 40


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"torn", bytes(range(256)) * 3])
@pytest.mark.parametrize("hour", [NOW, FAR])
def test_a_torn_end_is_cut_to_the_checkpoint(tmp_path: Path, hour: int, tail: bytes) -> None:
    loop = Loop()
    storage = open_storage(Disk(), str(tmp_path), loop)
    storage.hours.append(*messages(hour, sizes=[40] * 30))
    storage.hours.append_events(hour, events([1, 2, 3]))
    storage.names.register(TOPIC, "orders")
    checkpoint(storage, loop, 1)
    whole = {name: size for name, (size, _) in storage.hours.checksums().items()}
    names = storage.names.length
    storage.close()
    paths = {tmp_path / "hours" / name: size for name, size in whole.items()} | {tmp_path / "names": names}
    before = {path: path.read_bytes()[:size] for path, size in paths.items()}
    for path in paths:
        path.write_bytes(before[path] + tail)
    # An hour that began after the checkpoint, and heads that saw what is now cut off.
    (tmp_path / "hours" / f"{hour_name(FAR + 1)}.log").write_bytes(tail)
    (tmp_path / "hours" / f"{hour_name(hour)}.heads").write_bytes(tail)
    storage = open_storage(Disk(), str(tmp_path), loop, mapped=False)
    assert {path: path.read_bytes() for path in paths} == before
    assert sorted(path.name for path in (tmp_path / "hours").iterdir()) == sorted(whole)
    storage.hours.append(*messages(hour, sizes=[40], seed=9))
    assert storage.hours.entries(hour, slice(30, 31))["index"] == 30
    assert storage.names.register(TOPIC, "more") == 1
    storage.close()


def test_space_allocated_ahead_is_given_back_when_an_hour_is_unmapped(tmp_path: Path) -> None:
    storage = open_storage(Disk(), str(tmp_path), Loop())
    storage.hours.append(*messages(NOW, sizes=[40] * 30))
    path = tmp_path / "hours" / f"{hour_name(NOW)}.idx"
    assert path.stat().st_size > 30 * 64
    storage.hours.set_clock(NOW + 10)
    assert path.stat().st_size == 30 * 64
    storage.close()
