"""Closed hours as Parquet: whole or not at all, and the same however often."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hadelay.codec.formats import DISPATCH, INDEX
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.errors import DamagedFile, NotFound
from hadelay.model import hour_from_name, hour_name
from hadelay.pipeline import archive, audit
from hadelay.pipeline.jobs import ArchiveOptions, AuditOptions, JobSummary
from hadelay.storage import manifests
from hadelay.storage.manifests import Directory
from tests.ledger.world import World
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


def run(world: World, directory: Path, spark: Any = None, **source: Any) -> JobSummary:
    return archive.run(spark, ArchiveOptions(options(world, directory, **source), str(directory / "out")))


def contents(directory: Path) -> dict[str, bytes]:
    """What was archived: an archive without hours has a catalogue that says so."""
    out = directory / "out"
    found = {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}
    return {name: data for name, data in found.items() if not name.startswith("_catalogue/")}


def test_closed_hours_are_archived_whole_and_open_ones_are_left(tmp_path: Path) -> None:
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


def test_a_full_disk_leaves_no_manifest_and_nothing_half_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = settled(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            run(world, tmp_path)
    assert contents(tmp_path) == {}
    assert run(world, tmp_path).hours[0]["status"] == "archived"


def lines(path: Path, change: Any) -> None:
    """Rewrite a file."""
    path.write_bytes(bytes(change(bytearray(path.read_bytes()))))


def sealed(row: bytes, crc: Any, **values: int) -> bytes:
    """A row with other values, and the CRC that goes with them."""
    dtype = INDEX if crc is INDEX_CRC else DISPATCH
    rows = np.frombuffer(row, dtype).copy()
    for name, value in values.items():
        rows[name] = value
    crc.seal(rows)
    return rows.tobytes()


def index(n: int, **values: int) -> Any:
    at = n * INDEX.itemsize
    return lambda data: data[:at] + sealed(data[at : at + 64], INDEX_CRC, **values) + data[at + 64 :]


def event(n: int, **values: int) -> Any:
    at = n * DISPATCH.itemsize
    return lambda data: data[:at] + sealed(data[at : at + 32], DISPATCH_CRC, **values) + data[at + 32 :]


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        ("names", None, rf"names, offset 0: the file ends here, and entry 0 of hour {NAME} is of topic number 0"),
        ("names", lambda data: data[:-14], rf"names, offset 26: .* event 0 of hour {NAME} is of node number 0"),
        ("names", lambda data: data[:-27], rf"names, offset 13: .* event 0 of hour {NAME} is of consumer number 0"),
        ("idx", index(4, topic=7), rf"names, offset 40: .* entry 4 of hour {NAME} is of topic number 7"),
        ("dsp", event(3, node=7), rf"names, offset 40: .* event 3 of hour {NAME} is of node number 7"),
        ("dsp", event(12, event=3, other_hour=2), r"names, offset 40: .* event 12 .* is of reason number 2"),
        ("dsp", event(3, event=77), rf"{NAME}\.dsp, offset 96: hour {NAME}, event 3: there is no event of kind 77"),
        ("idx", lambda data: data[:-64], rf"{NAME}\.dsp, offset 576: hour {NAME}, event 18: entry 9 is not in the"),
        (
            "idx",
            lambda data: data[:128] + data[192:],
            rf"{NAME}\.idx, offset 128: hour {NAME}, entry 2: entry 3 is at this position",
        ),
        ("dsp", event(3, index=10), rf"{NAME}\.dsp, offset 96: hour {NAME}, event 3: the events around it do not"),
        ("dsp", lambda data: data[:70] + b"?" + data[71:], rf"{NAME}\.dsp, offset 64: hour {NAME}, event 2: .*CRC"),
    ],
)
def test_rows_that_say_less_than_they_should_are_not_archived(
    tmp_path: Path, file: str, change: Any, said: str
) -> None:
    world = settled(tmp_path)
    path = tmp_path / (file if file == "names" else f"hours/{NAME}.{file}")
    if change is None:
        path.unlink()
    else:
        lines(path, change)
    with pytest.raises(DamagedFile, match=said):
        run(world, tmp_path)
    assert not [name for name in contents(tmp_path) if NAME in name]


def test_an_entry_without_events_is_missed_by_its_record(tmp_path: Path) -> None:
    world = World()
    world.ids(*[message("t", MINUTE, b"body %d" % n) for n in range(3)])
    world.now = 3 * HOUR
    write(world, tmp_path)
    files = {suffix: tmp_path / "hours" / f"{NAME}.{suffix}" for suffix in ("idx", "log")}
    lines(files["log"], lambda data: data + bytes(4096))  # as a file that was mapped ends
    assert run(world, tmp_path).hours[0]["status"] == "open"
    files["idx"].write_bytes(b"")
    with pytest.raises(DamagedFile, match=rf"{NAME}\.idx, offset 0: .* belong to no entry"):
        run(world, tmp_path)


def test_one_damaged_hour_does_not_keep_others_from_the_archive(tmp_path: Path) -> None:
    world = World()
    for _ in range(3):
        (message_id,) = world.ids(message("t", world.now + MINUTE))
        world.now += MINUTE
        world.ack(world.lease(message_id))
        world.now += HOUR
    write(world, tmp_path)
    lines(tmp_path / "hours" / f"{NAME}.dsp", event(1, event=77))
    with pytest.raises(DamagedFile, match=f"hour {NAME}, event 1: .*; this hour is not archived$"):
        run(world, tmp_path)
    catalogue = manifests.load_catalogue(Directory(str(tmp_path / "out")))
    assert sorted(map(hour_name, catalogue.hours)) == ["2026112019", "2026112020"]


def test_an_archive_of_the_version_before_is_written_again_and_catalogued(tmp_path: Path) -> None:
    world, out = settled(tmp_path), tmp_path / "out"
    run(world, tmp_path)
    shutil.rmtree(out / "_catalogue")
    manifest = out / "_manifest" / f"{NAME}.json"
    with pytest.raises(NotFound, match="the archive's catalogue is missing"):
        run(world, tmp_path)
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 1'))
    assert run(world, tmp_path).hours[0]["status"] == "archived"
    assert json.loads(manifest.read_text())["version"] == 2
    catalogue = manifests.load_catalogue(Directory(str(out)))
    (row,) = catalogue.hours.values()
    assert (row["messages"], row["events"]) == (10, 19)
    assert catalogue.lists(hour_from_name(NAME), manifest.read_bytes())
    shutil.rmtree(out / "_catalogue")
    source = options(world, tmp_path)
    archive.run(None, ArchiveOptions(source, str(out), new_catalogue=True))
    assert manifests.load_catalogue(Directory(str(out))).hours == {hour_from_name(NAME): row | {"revision": 1}}


def test_an_archive_reports_its_progress(tmp_path: Path) -> None:
    world = settled(tmp_path)
    reported: list[tuple[int, int]] = []
    given = ArchiveOptions(options(world, tmp_path, splitRows="4"), str(tmp_path / "out"))
    archive.run(None, given, lambda done, total: reported.append((done, total)))
    assert reported == [(1, 2), (2, 2)]
    reported.clear()
    audit.run(None, AuditOptions(given.out), lambda done, total: reported.append((done, total)))
    assert reported == [(1, 1)]
