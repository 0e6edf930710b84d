"""Hour files and archives where only pyarrow.fs reaches them: file:// goes the way that s3:// and hdfs:// go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hadelay.errors import BadRequest, DamagedFile, NotFound
from hadelay.pipeline import archive, places, reconcile
from hadelay.pipeline.archive import ArchiveOptions
from hadelay.pipeline.reconcile import ReconcileOptions
from hadelay.pipeline.schema import Options, parse_options
from tests.pipeline import test_archive, test_archived
from tests.pipeline.support import at_random, options, write
from tests.pipeline.test_batches import NAME, read


def remote(given: Options) -> Options:
    return replace(given, path=f"file://{given.path}")


def test_what_is_read_is_the_same(tmp_path: Path) -> None:
    world, _ = at_random(5)
    given = options(world, write(world, tmp_path / "node"), body="true", verify="true", batchRows="7")
    assert read(remote(given)) == read(given)
    group = replace(remote(given), path=f"file://{tmp_path}/")
    assert read(group) == read(given)
    log = tmp_path / "node" / "hours" / f"{NAME}.log"
    log.write_bytes(log.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=NAME):
        read(remote(given))


@pytest.fixture(params=["rename", "upload"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "upload":
        monkeypatch.setattr(places, "_UPLOADS", {"local"})


@pytest.mark.usefixtures("kind")
def test_what_is_archived_is_the_same_and_nothing_is_left_of_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = test_archive.settled(tmp_path)
    given = options(world, tmp_path, splitRows="4")
    archive.run(None, ArchiveOptions(given, str(tmp_path / "out")))
    here = test_archive.contents(tmp_path)
    away = ArchiveOptions(remote(given), f"file://{tmp_path}/away/out")
    with monkeypatch.context() as patched:

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        patched.setattr("pyarrow.parquet.ParquetWriter.write_table", full)
        with pytest.raises(OSError, match="No space left"):
            archive.run(None, away)
    assert test_archive.contents(tmp_path / "away") == {}
    for status in ("archived", "unchanged"):
        assert archive.run(None, away).hours[0]["status"] == status
        assert test_archive.contents(tmp_path / "away") == here


def test_archived_hours_are_read_back(tmp_path: Path) -> None:
    world = test_archived.two_hours(tmp_path)
    before = reconcile.run(None, ReconcileOptions(options(world, tmp_path)))
    given = test_archived.delete_first(world, tmp_path)
    for verify in (False, True):
        asked = replace(remote(given), verify=verify)
        found = reconcile.run(None, ReconcileOptions(asked, archive=f"file://{tmp_path}/archive"))
        assert found == before


def test_what_is_not_there_is_said_in_words(tmp_path: Path) -> None:
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
