"""Closed hours as Parquet: whole or not at all, and the same however often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hadelay.errors import DamagedFile
from hadelay.pipeline import archive
from hadelay.pipeline.archive import ArchiveOptions, Summary
from tests.core.world import World
from tests.pipeline.support import HOUR, MINUTE, message, options, write
from tests.pipeline.test_batches import NAME, read


def settled(directory: Path) -> World:
    """Hour 18 is over and settled, hour 19 is over and not, hour 21 is running."""
    world = World()
    ids = world.ids(*[message("t", MINUTE, b"body %d" % n, tags=["x"]) for n in range(10)], message("t", HOUR))
    world.now = MINUTE
    world.ack(world.lease(*ids[:9]))
    world.cancel(ids[9])
    world.now = 3 * HOUR
    world.ids(message("t", 3 * HOUR))
    write(world, directory)
    return world


def run(world: World, directory: Path, spark: Any = None, **source: Any) -> Summary:
    return archive.run(spark, ArchiveOptions(options(world, directory, **source), str(directory / "out")))


def contents(directory: Path) -> dict[str, bytes]:
    out = directory / "out"
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_what_is_closed_is_archived_whole_and_what_is_not_is_left(tmp_path: Path) -> None:
    world = settled(tmp_path)
    summary = run(world, tmp_path, splitRows=4)
    assert [(hour["hour"], hour["status"]) for hour in summary.hours] == [
        (2026112018, "archived"),
        (2026112019, "open"),
    ]
    out = tmp_path / "out"
    found = pq.read_table(out / "messages").to_pylist()
    # `hour` comes from the name of the directory; an archived hour has no scheduled, and no dead ones.
    shown = read(options(world, tmp_path, body="true", hour_to=2026112018))
    assert [row | {"dead": False} for row in found] == shown
    events = pq.read_table(out / "events").to_pylist()
    assert [row | {"dead": False} for row in events] == read(options(world, tmp_path, kind="events"))
    manifest = json.loads((out / "_manifest" / f"{NAME}.json").read_text())
    assert manifest["source"]["entries"] == 10
    assert sum(part["rows"] for part in manifest["files"]) == len(found) + len(events)
    assert {part["path"] for part in manifest["files"]} | {f"_manifest/{NAME}.json"} == contents(tmp_path).keys()


def test_run_again_it_changes_nothing_and_repairs_what_is_not_as_it_was(tmp_path: Path) -> None:
    world = settled(tmp_path)
    run(world, tmp_path)
    before = contents(tmp_path)
    assert run(world, tmp_path).hours[0]["status"] == "unchanged"
    assert contents(tmp_path) == before
    (part,) = (tmp_path / "out" / "messages").rglob("*.parquet")
    part.write_bytes(part.read_bytes()[:-100])
    (part.parent / "part-of-another-run.parquet.123").write_bytes(b"left")
    assert run(world, tmp_path).hours[0]["status"] == "archived"
    assert contents(tmp_path) == before


def test_a_damaged_hour_has_no_manifest_and_is_named(tmp_path: Path) -> None:
    world = settled(tmp_path)
    path = tmp_path / "hours" / f"{NAME}.log"
    data = bytearray(path.read_bytes())
    data[data.index(b"body 3")] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match=f"hour {NAME}, entry 3"):
        run(world, tmp_path)
    assert list((tmp_path / "out" / "_manifest").iterdir()) == []


def test_when_the_disk_is_full_there_is_no_manifest_and_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = settled(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run(world, tmp_path)
    assert contents(tmp_path) == {}
    assert run(world, tmp_path).hours[0]["status"] == "archived"
