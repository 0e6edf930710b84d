"""Hour files and archives where only pyarrow.fs reaches them: file://, and s3:// of a server."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hadelay.cli.app import run as cli
from hadelay.errors import BadRequest, DamagedFile, NotFound
from hadelay.pipeline import archive, audit, reconcile, schedule
from hadelay.pipeline.jobs import ArchiveOptions, AuditOptions, ReconcileOptions
from hadelay.pipeline.publish import _Aside
from hadelay.pipeline.schedule import ScheduleOptions
from hadelay.pipeline.schema import Options, WriteOptions, parse_options
from hadelay.settings.node import Config, RetentionConfig
from hadelay.settings.rules import problems
from hadelay.storage.locations import Location
from hadelay.storage.manifests import Directory
from tests.pipeline import test_archive, test_archived
from tests.pipeline.support import at_random, options, write
from tests.pipeline.test_batches import NAME, read
from tests.s3 import ENVIRONMENT, Store, serve


def test_names_of_a_directory_come_in_order(tmp_path: Path) -> None:
    names = [f"{n * 7919 % 97:02}" for n in range(97)]
    for name in names:
        (tmp_path / name).touch()
    for files in (Directory(str(tmp_path)), Location(str(tmp_path)), Location(f"file://{tmp_path}")):
        assert files.list("") == sorted(names)


def remote(given: Options) -> Options:
    return replace(given, path=f"file://{given.path}")


def test_messages_read_from_every_location_are_the_same(tmp_path: Path) -> None:
    world, _ = at_random(5)
    given = options(world, write(world, tmp_path / "node"), body="true", verify="true", batchRows="7")
    assert read(remote(given)) == read(given)
    group = replace(remote(given), path=f"file://{tmp_path}/")
    assert read(group) == read(given)
    log = tmp_path / "node" / "hours" / f"{NAME}.log"
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=NAME):
        read(remote(given))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with serve(tmp_path / "s3") as store:
        yield store


def archived(store: Store, path: str) -> dict[str, bytes]:
    return {name: data for name, data in store.objects(path).items() if not name.startswith("_catalogue/")}


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_archives_of_every_location_are_the_same_and_nothing_is_left_of_failed_ones(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    world = test_archive.settled(tmp_path)
    given = options(world, tmp_path, splitRows="4")
    archive.run(None, ArchiveOptions(given, str(tmp_path / "out")))
    here = test_archive.contents(tmp_path)
    out = store.uri("away/out") if kind == "s3" else f"file://{store.bucket}/away/out"
    away = ArchiveOptions(remote(given), out)
    with monkeypatch.context() as patched:
        patched.setattr("pyarrow.parquet.ParquetWriter.write_table", full)
        with pytest.raises(OSError, match=f"hour {NAME} was not archived, and nothing was deleted: .*No space left"):
            archive.run(None, away)
    assert archived(store, "away/out") == {}
    for status in ("archived", "unchanged"):
        assert archive.run(None, away).hours[0]["status"] == status
        assert archived(store, "away/out") == here
    # What is there stays until what replaces it is whole.
    part = next(name for name in here if name.endswith(".parquet"))
    (store.bucket / "away/out" / part).write_bytes(b"damaged")
    with monkeypatch.context() as patched:
        patched.setattr("pyarrow.parquet.ParquetWriter.write_table", full)
        with pytest.raises(OSError, match="run it again"):
            archive.run(None, away)
    assert archived(store, "away/out") == here | {part: b"damaged"}
    assert archive.run(None, away).hours[0]["status"] == "archived"
    assert archived(store, "away/out") == here


@pytest.mark.parametrize(
    ("fault", "which", "where"), [(500, "POST", "_manifest"), (403, "POST", ""), (403, "PUT", ".parquet")]
)
def test_a_store_that_fails_in_the_middle_leaves_no_manifest(
    tmp_path: Path, store: Store, fault: int, which: str, where: str
) -> None:
    world = test_archive.settled(tmp_path)
    given = options(world, tmp_path, splitRows="4")
    away = ArchiveOptions(given, store.uri("archive"))
    # The last request but a few; from the first one on, as a key that has expired does; and the first bytes of a file.
    store.fault = lambda method, path: fault if method == which and where in path else 0
    with pytest.raises(OSError, match=r"was not (archived|written), .*AWS Error.*run it again") as refused:
        archive.run(None, away)
    assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in str(refused.value)
    assert not [name for name in store.objects("archive") if name.startswith("_manifest/")]
    assert (tmp_path / "hours" / f"{NAME}.log").exists()
    store.fault = lambda method, path: 0
    assert archive.run(None, away).hours[0]["status"] == "archived"


def test_a_store_that_does_not_answer_has_no_damaged_files(tmp_path: Path, store: Store) -> None:
    world = test_archived.two_hours(tmp_path)
    given = test_archived.delete_first(world, tmp_path)
    shutil.copytree(tmp_path / "archive", store.bucket / "archive")
    asked = ReconcileOptions(given, archive=store.uri("archive"))
    store.fault = lambda method, path: 403 if ".parquet" in path else 0
    with pytest.raises(OSError, match="AWS Error ACCESS_DENIED"):
        reconcile.run(None, asked)
    store.fault = lambda method, path: 0
    for name in store.objects("archive/messages"):
        (store.bucket / "archive/messages" / name).write_bytes(b"PAR1 damaged PAR1")
    with pytest.raises(DamagedFile):
        reconcile.run(None, asked)


def test_a_key_in_a_uri_is_refused_and_not_repeated(tmp_path: Path) -> None:
    for uri in ("s3://key:hush@bucket/a", "s3://bucket/a?secret_key=hush&access_key=key"):
        with pytest.raises(BadRequest, match=r"s3://…/a: a URI must not contain secrets: set AWS_") as refused:
            read(parse_options({"path": uri}))
        assert "hush" not in str(refused.value)


@pytest.mark.parametrize("kind", ["file", "s3"])
def test_archived_hours_are_read_back(tmp_path: Path, store: Store, kind: str) -> None:
    world = test_archived.two_hours(tmp_path)
    before = reconcile.run(None, ReconcileOptions(options(world, tmp_path)))
    given = test_archived.delete_first(world, tmp_path)
    shutil.copytree(tmp_path / "hours", store.bucket / "copy/g0/hours")
    shutil.copy(tmp_path / "names", store.bucket / "copy/g0/names")
    shutil.copytree(tmp_path / "archive", store.bucket / "archive")
    path, archived = remote(given).path, f"file://{tmp_path}/archive"
    if kind == "s3":
        path, archived = store.uri("copy"), store.uri("archive")  # its only group is found
    for verify in (False, True):
        asked = replace(given, path=path, verify=verify)
        found = reconcile.run(None, ReconcileOptions(asked, archive=archived))
        assert found == before


def test_missing_locations_are_refused_in_words(tmp_path: Path) -> None:
    for path, kind, said in (
        (f"file://{tmp_path}/none", NotFound, "none: no such directory"),
        (f"file://{tmp_path}", NotFound, "no directory hours/ in it"),
        ("gopher://x/y", BadRequest, "gopher://x/y: .*filesystem"),
    ):
        with pytest.raises(kind, match=said):
            read(parse_options({"path": path}))
    (tmp_path / "hours").mkdir()
    with pytest.raises(NotFound, match="no directory _manifest/"):
        reconcile.run(None, ReconcileOptions(parse_options({"path": str(tmp_path)}), archive=f"file://{tmp_path}"))


@pytest.mark.parametrize(("job", "files"), [
    ("reconcile", {"summary.json", "report.html", "offending.parquet"}),
    ("lateness", {"summary.json", "report.html"}),
    ("load", {"summary.json", "report.html", "seconds.parquet"}),
    ("forecast", {"summary.json", "report.html"}),
])  # fmt: skip
def test_reports_go_to_an_object_store(
    tmp_path: Path, store: Store, job: str, files: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = test_archive.settled(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["--path", str(tmp_path), "--as-of", str(options(world, tmp_path).as_of), "--master", "none"]
    cli(["pipeline", job, *words, "--out", store.uri("reports/a")])
    assert store.objects("reports/a").keys() == files
    assert list(tmp_path.glob("here/*")) == []  # no directory that is called s3:


@pytest.mark.parametrize(("out", "said"), [
    ("s3:/bucket/a", "s3:/bucket/a: a URI has two slashes, s3://…"),
    ("s3a://bucket/a", "s3a://bucket/a: no filesystem is known for s3a://; write s3://…"),
    ("S3://bucket/a", "no filesystem is known for S3://; write s3://…"),
    ("ftp://host/a", "no filesystem is known for ftp://; known are s3://, gs://"),
])  # fmt: skip
def test_invalid_uris_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: str, said: str
) -> None:
    world = test_archive.settled(tmp_path)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["--path", str(tmp_path), "--as-of", str(options(world, tmp_path).as_of), "--master", "none"]
    for job in ("archive", "reconcile", "lateness", "load", "forecast"):
        assert cli(["pipeline", job, *words, "--out", out]) == 2
        assert said in capsys.readouterr().err
    assert cli(["backup", "create", out]) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.glob("here/*")) == []
    (problem,) = problems(Config(retention=RetentionConfig(archive=out)))
    assert (problem[0], said in problem[1]) == ("retention.archive", True)


def test_a_table_in_an_object_store_is_published_and_its_rejected_rows_go_there(store: Store) -> None:
    (store.bucket / "orders.csv").write_text("id,delay\n1,1h\n2,soon\n")
    write = WriteOptions(endpoint="x", topic="t", key_column="id", rejected=store.uri("rejected"))
    found = schedule.batches(ScheduleOptions(write, store.uri("orders.csv")))
    assert [row for batch in found for row in batch.to_pylist()] == [
        {"delay": "1h", "id": "1"},
        {"delay": "soon", "id": "2"},
    ]
    for failed in (False, True):
        with contextlib.suppress(ZeroDivisionError), _Aside(write.rejected, f"of-{failed}") as aside:
            aside.put(pa.RecordBatch.from_pylist([{"id": "2"}]), ["why"])
            assert 1 / (not failed)
    (rejected,) = store.objects("rejected").values()
    assert pq.read_table(pa.BufferReader(rejected)).to_pylist() == [{"id": "2", "reason": "why"}]


@pytest.fixture(params=["directory", "file", "s3"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "s3":
        with serve(tmp_path / "s3") as store:
            yield store.uri("archive")
    else:
        yield f"{'file://' if request.param == 'file' else ''}{tmp_path}/archive"


def test_one_of_two_archives_at_once_writes_the_hour(
    tmp_path: Path, anywhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second begins when the first has written a file, and has other files in mind."""
    monkeypatch.setattr("hadelay.pipeline.lease._TOGETHER_MS", -1)  # it tries once
    world = test_archive.settled(tmp_path)
    seconds: list[dict[str, Any]] = []
    write = archive._write

    def meanwhile(*words: Any) -> Any:
        part = write(*words)
        if not seconds:
            monkeypatch.setattr(archive, "_write", write)
            given = options(world, tmp_path, splitRows="3")
            seconds.extend(archive.run(None, ArchiveOptions(given, anywhere)).hours)
        return part

    monkeypatch.setattr(archive, "_write", meanwhile)
    first = archive.run(None, ArchiveOptions(options(world, tmp_path, splitRows="4"), anywhere))
    assert [hour["status"] for hour in first.hours] == ["archived", "open"]
    assert [hour["status"] for hour in seconds] == ["busy", "open"]
    assert re.match(
        rf"another run writes it: process {os.getpid()} of .*, since .* UTC; when that", seconds[0]["detail"]
    )
    found = audit.run(None, AuditOptions(anywhere))
    assert [(hour["status"], hour["messages"]) for hour in found.hours] == [("ok", 10)]
    assert Location(anywhere).list("_lease") == []


def test_runs_that_begin_together_share_the_hours(tmp_path: Path, anywhere: str) -> None:
    world = test_archived.two_hours(tmp_path)
    runs = [ArchiveOptions(options(world, tmp_path, splitRows=str(rows)), anywhere) for rows in (2, 3, 4, 5)]
    with ThreadPoolExecutor(len(runs)) as pool:
        found = list(pool.map(lambda given: archive.run(None, given).hours, runs))
    for hours in zip(*found, strict=True):
        assert {hour["status"] for hour in hours} <= {"archived", "unchanged", "busy"}
        assert sum(hour["status"] == "archived" for hour in hours) <= 1
    archive.run(None, runs[0])  # what each of them left to the others
    audited = audit.run(None, AuditOptions(anywhere))
    assert ([hour["status"] for hour in audited.hours], audited.failed) == (["ok", "ok"], False)
    assert len(Location(anywhere).list("_catalogue") or ()) == 1


def test_a_lease_that_nobody_renews_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world, out = test_archive.settled(tmp_path), tmp_path / "out"
    left = out / "_lease" / f"{NAME}.0badf00d.1"
    left.parent.mkdir(parents=True)
    left.write_text("{}")
    os.utime(left, (time.time() - 60,) * 2)
    words = ["--path", str(tmp_path), "--as-of", str(options(world, tmp_path).as_of), "--master", "none"]
    assert cli(["pipeline", "archive", *words, "--out", str(out)]) == 1
    assert "another run writes 1 of them: run it again when that one has ended" in capsys.readouterr().err
    assert test_archive.contents(tmp_path) == {f"_lease/{left.name}": b"{}"}
    os.utime(left, (time.time() - 121,) * 2)
    assert cli(["pipeline", "archive", *words, "--out", str(out)]) == 0
    assert list(left.parent.iterdir()) == []


def test_a_run_that_stood_still_writes_no_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = test_archive.settled(tmp_path)
    now_s, write = time.monotonic(), archive._write
    monkeypatch.setattr("hadelay.pipeline.lease.time.monotonic", lambda: now_s)

    def stands_still(*words: Any) -> Any:
        nonlocal now_s
        now_s += 101
        return write(*words)

    monkeypatch.setattr(archive, "_write", stands_still)
    (hour, _) = test_archive.run(world, tmp_path).hours
    assert (hour["status"], "could not renew its lease" in hour["detail"]) == ("busy", True)
    assert not [name for name in test_archive.contents(tmp_path) if name.startswith("_manifest/")]
