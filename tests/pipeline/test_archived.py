"""Hours that were archived and deleted are judged and counted as if they were still there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from hadelay.cli.app import run as cli
from hadelay.codec import commands
from hadelay.codec.checksums import crc32c
from hadelay.errors import DamagedFile, NotFound
from hadelay.pipeline import archive, audit, lateness, load, reconcile
from hadelay.pipeline.jobs import ArchiveOptions, AuditOptions, JobOptions, ReconcileOptions
from hadelay.pipeline.schema import Options
from tests.ledger.test_subscriptions import subscribed
from tests.ledger.world import World
from tests.pipeline.support import HOUR, MINUTE, SECOND, message, options, write
from tests.pipeline.test_reconcile import offending

FIRST = "2026112018"


def two_hours(directory: Path) -> World:
    """Hour 18: delivered, late, twice, cancelled, and one that was retried in hour 20, of two topics."""
    world = World()
    ids = world.ids(*[message("tu"[n % 2], 10 * SECOND + n) for n in range(8)])
    world.cancel(ids[0])
    world.now = 10 * SECOND + 20
    world.ack(world.lease(*ids[1:4]))
    world.nack(world.lease(ids[4]), 2 * HOUR)
    leased = world.lease(ids[5])
    world.now = MINUTE
    world.one(commands.encode_expire([(int(leased["term"][0]), int(leased["seq"][0]))]))
    world.now = 3 * MINUTE
    world.ack(world.lease(ids[5]))
    world.ack(world.lease(ids[6], ids[7]))
    world.now = 2 * HOUR + MINUTE
    world.ack(world.lease(ids[4]))
    world.ids(message("u", 5 * HOUR))
    world.now = 4 * HOUR
    write(world, directory)
    return world


def delete_first(world: World, directory: Path) -> Options:
    """Archive what is closed, delete the first hour, and say where to read."""
    given = options(world, directory)
    summary = archive.run(None, ArchiveOptions(given, str(directory / "archive")))
    assert [hour["status"] for hour in summary.hours] == ["archived"] * len(summary.hours)
    for path in (directory / "hours").glob(f"{FIRST}.*"):
        path.unlink()
    return given


def where(directory: Path) -> dict[str, str]:
    return {"archive": str(directory / "archive"), "out": str(directory / "out")}


def test_every_job_says_of_a_deleted_hour_what_it_said_before(tmp_path: Path) -> None:
    world = two_hours(tmp_path)
    given = options(world, tmp_path)
    jobs: list[Any] = [(reconcile.run, ReconcileOptions), (lateness.run, JobOptions), (load.run, JobOptions)]
    before = [run(None, kind(given, out=str(tmp_path / "out"))) for run, kind in jobs]
    assert before[0].verdicts | {"ok": 3, "late": 3, "duplicate": 1, "cancelled": 1, "pending": 1} == before[0].verdicts
    named = offending(tmp_path)
    assert delete_first(world, tmp_path) == given
    # Without the archive the retried one is judged by what is left of it, and the others are not there.
    assert reconcile.run(None, ReconcileOptions(given)).messages == 2
    for verify in (False, True):
        given = options(world, tmp_path, verify=str(verify))
        after = [run(None, kind(given, **where(tmp_path))) for run, kind in jobs]
        assert after == before
        assert offending(tmp_path) == named
    only = options(world, tmp_path, hour_to=FIRST)
    assert reconcile.run(None, ReconcileOptions(only, **where(tmp_path))).messages == 8


def fanned_out(directory: Path) -> World:
    """Hour 18: three messages, each with a copy for a subscription; a copy was cancelled, another one was late."""
    world = World()
    subscribed(world, "billing")
    ids = world.ids(*[message("orders", 10 * SECOND, key=f"k{n}", group="7") for n in range(3)])
    world.now = 10 * SECOND
    world.ack(world.lease(*ids, ids[0] + 1))
    world.cancel(ids[1] + 1)
    world.now = 3 * MINUTE
    world.ack(world.lease(ids[2] + 1))
    world.now = 4 * HOUR
    write(world, directory)
    return world


def without_subscriptions(table: pa.Table) -> pa.Table:
    """The rows as archives had them before the column: `topic` is the name of the queue."""
    both = zip(table["topic"].to_pylist(), table["subscription"].to_pylist(), strict=True)
    queue = [of if own is None else f"{of}~{own}" for of, own in both]
    at = table.schema.get_field_index("topic")
    return table.set_column(at, "topic", pa.array(queue, pa.string())).drop_columns(["subscription"])


@pytest.mark.parametrize("old", [False, True])
def test_copies_in_an_archive_are_those_of_their_subscription(old: bool, tmp_path: Path) -> None:
    """Also in archives that have no column for it."""
    world = fanned_out(tmp_path)
    given = options(world, tmp_path)
    jobs: list[Any] = [(reconcile.run, ReconcileOptions), (lateness.run, JobOptions), (load.run, JobOptions)]
    before = [run(None, kind(given, out=str(tmp_path / "out"))) for run, kind in jobs]
    reported = {(row["topic"], row["verdict"]): row["count"] for row in before[0].table}
    assert reported == {
        ("orders", "ok"): 3, ("orders~billing", "ok"): 1, ("orders~billing", "cancelled"): 1,
        ("orders~billing", "late"): 1,
    }  # fmt: skip
    delete_first(world, tmp_path)
    rows = pq.read_table(tmp_path / "archive" / "messages").to_pylist()
    families = [(m["subscription"], m["published_id"] or m["id"], m["group"], m["key"]) for m in rows]
    assert families == [(own, rows[n]["id"], "7", f"k{n // 2}") for n in (0, 2, 4) for own in (None, "billing")]
    if old:
        for kind in ("messages", "events"):
            (part,) = (tmp_path / "archive" / kind / f"hour={FIRST}").iterdir()
            rewritten(part, without_subscriptions)
    assert [run(None, kind(given, **where(tmp_path))) for run, kind in jobs] == before
    assert not audited(tmp_path)[0]


def test_mistakes_of_an_archive_are_named(tmp_path: Path) -> None:
    world = two_hours(tmp_path)
    given = delete_first(world, tmp_path)
    with pytest.raises(NotFound, match="no directory _manifest/"):
        reconcile.run(None, ReconcileOptions(given, archive=str(tmp_path / "hours")))
    (part,) = (tmp_path / "archive" / "events" / f"hour={FIRST}").iterdir()
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    for verify in ("false", "true"):
        with pytest.raises(DamagedFile, match=f"hour={FIRST}/part-.*hour {FIRST}: "):
            reconcile.run(None, ReconcileOptions(options(world, tmp_path, verify=verify), **where(tmp_path)))
    manifest = tmp_path / "archive" / "_manifest" / f"{FIRST}.json"
    manifest.write_text("{")
    with pytest.raises(NotFound, match=rf"{FIRST}\.json: no manifest that can be read"):
        reconcile.run(None, ReconcileOptions(given, **where(tmp_path)))


def test_a_manifest_that_is_missing_is_missed(tmp_path: Path) -> None:
    world = two_hours(tmp_path)
    given = delete_first(world, tmp_path)
    asked = ReconcileOptions(given, **where(tmp_path))
    whole = reconcile.run(None, asked).messages
    manifest = tmp_path / "archive" / "_manifest" / f"{FIRST}.json"
    data = manifest.read_bytes()
    manifest.unlink()
    with pytest.raises(NotFound, match=rf"the catalogue names 1 hours without a manifest: {FIRST}\. Restore"):
        reconcile.run(None, asked)
    left_out = ReconcileOptions(options(world, tmp_path, on_torn="skip"), **where(tmp_path))
    assert reconcile.run(None, left_out).messages == 2
    manifest.write_bytes(data.replace(b'"events"', b'"event"'))
    with pytest.raises(DamagedFile, match=rf"{FIRST}\.json.*the catalogue names another manifest"):
        reconcile.run(None, asked)
    manifest.write_bytes(data)
    assert reconcile.run(None, asked).messages == whole
    (catalogue,) = (tmp_path / "archive" / "_catalogue").iterdir()
    named = catalogue.read_bytes()
    catalogue.write_bytes(named.replace(b'"revision": 2', b'"revision": 3'))
    with pytest.raises(DamagedFile, match="the catalogue cannot be read: the file's CRC differs"):
        reconcile.run(None, asked)
    catalogue.unlink()
    with pytest.raises(NotFound, match="the archive's catalogue is missing"):
        reconcile.run(None, asked)
    # An archive of 0.1.0 has no catalogue.
    for file in manifest.parent.iterdir():
        file.write_bytes(file.read_bytes().replace(b'"version": 2', b'"version": 1'))
    assert reconcile.run(None, asked).messages == whole


def audited(directory: Path) -> tuple[bool, dict[int, tuple[str, str]]]:
    """(whether it fails, status and detail of each hour that is not ok)"""
    found = audit.run(None, AuditOptions(str(directory / "archive")))
    wrong = [reported for reported in found.hours if reported["status"] != "ok"]
    return found.failed, {reported["hour"]: (reported["status"], reported["detail"]) for reported in wrong}


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """A Parquet file with other rows, and a manifest and a catalogue that agree with it, as 0.1.0 may have left it."""
    pq.write_table(change(pq.ParquetFile(path).read()), path)
    out, name = path.parents[2], path.parent.name.removeprefix("hour=")
    manifest = out / "_manifest" / f"{name}.json"
    body = json.loads(manifest.read_text()) | {"version": 1}
    for part in body["files"]:
        if path.match(part["path"]):
            part |= {"bytes": path.stat().st_size, "crc32c": f"{crc32c(path.read_bytes()):08x}"}
    manifest.write_text(json.dumps(body))
    shutil.rmtree(out / "_catalogue")
    (out / "_catalogue").mkdir()


def test_the_audit_says_which_hours_are_damaged_or_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = two_hours(tmp_path)
    delete_first(world, tmp_path)
    words = ["pipeline", "archive", "--audit", "--out", str(tmp_path / "archive"), "--master", "none"]
    assert (cli(words), capsys.readouterr().err) == (0, "2 of 2 archived hours are ok: 10 messages, 21 events\n")
    out, shown = tmp_path / "archive", int(FIRST)
    manifest = out / "_manifest" / f"{FIRST}.json"
    parts = {kind: next((out / kind / f"hour={FIRST}").iterdir()) for kind in ("messages", "events")}
    (catalogue,) = (out / "_catalogue").iterdir()
    kept = {path: path.read_bytes() for path in (manifest, *parts.values(), catalogue)}
    middle = len(kept[parts["events"]]) // 2
    wrong: list[tuple[Path, Any, str, str]] = [
        (manifest, None, "missing", f"{FIRST}.json is missing"),
        (manifest, lambda data: data[:-9], "damaged", f"{FIRST}.json: "),
        (manifest, lambda data: data.replace(b"event", b"EVENT"), "damaged", f"{FIRST}.json"),
        (parts["messages"], None, "damaged", f"{parts['messages']}: the file is missing"),
        (parts["messages"], lambda data: data + b"x", "damaged", " bytes, not "),
        (parts["events"], lambda d: d[:middle] + bytes([d[middle] ^ 1]) + d[middle + 1 :], "damaged", "the file's CRC"),
        (parts["events"].with_name("x.parquet"), lambda _: b"PAR1", "damaged", "x.parquet is not in the manifest"),
    ]
    for path, change, status, detail in wrong:
        if change is None:
            path.unlink()
        else:
            path.write_bytes(change(kept.get(path, b"")))
        code, found = audited(tmp_path)
        assert (code, found.keys(), found[shown][0]) == (True, {shown}, status)
        assert detail in found[shown][1]
        path.unlink(missing_ok=True)
        if path in kept:
            path.write_bytes(kept[path])
    manifest.unlink()
    assert (cli(words), FIRST in capsys.readouterr().out) == (1, True)
    catalogue.unlink()
    # Nobody knows which hours there should be, but the hour's files are still there.
    failed, found = audited(tmp_path)
    assert (failed, found[shown][0], "has no manifest; readers" in found[shown][1]) == (True, "damaged", True)
    (out / "messages" / "foreign.parquet").write_bytes(b"PAR1")
    assert "messages/foreign.parquet is no hour" in audit.run(None, AuditOptions(str(out))).problem


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("messages", lambda t: t.set_column(t.schema.get_field_index("topic"), "topic", pa.nulls(len(t), "string")),
         "9 rows have no topic, the first is entry 0"),
        ("messages", lambda t: pa.concat_tables([t.slice(0, 3), t.slice(4), t.slice(0, 1)]), "entry 3 is 4"),
        ("events", lambda t: t.set_column(t.schema.get_field_index("id"), "id", pa.nulls(len(t), "string")),
         "rows have no id, the first is number 0"),
        ("events", lambda t: t.set_column(t.schema.get_field_index("entry"), "entry", pc.add(t["entry"], 4)),
         "of an entry that the hour does not have"),
    ],
)  # fmt: skip
def test_the_audit_reads_the_rows_that_0_1_0_did_not_look_at(tmp_path: Path, kind: str, change: Any, said: str) -> None:
    delete_first(two_hours(tmp_path), tmp_path)
    (part,) = (tmp_path / "archive" / kind / f"hour={FIRST}").iterdir()
    rewritten(part, change)
    failed, found = audited(tmp_path)
    assert failed
    assert said in found[int(FIRST)][1]
