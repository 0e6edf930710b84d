"""Hours that are over go; where an archive is demanded, not before it holds all of them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hadelay.codec.commands import encode_maintain
from hadelay.codec.commandtypes import Job
from hadelay.ledger.state import BatchCounts
from hadelay.model import HOUR_MS, hour_name
from hadelay.server.delivery.maintenance import MaintenanceRunner
from hadelay.server.delivery.term import Alarm
from hadelay.settings.node import DAY, Config, RetentionConfig
from hadelay.settings.rules import problems
from hadelay.storage import manifests
from hadelay.storage.manifests import Catalogue, Directory, PartFile, SourceFiles
from tests.s3 import serve

FIRST, SECOND = 500_000, 500_001
SOURCE = SourceFiles(5, 7, 900, (1, 2, 3))


class Leader:
    """A runner of maintenance, and what it proposed."""

    def __init__(self, archive: str) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[[Any, Any], None]]] = []
        self.now_s = 0.0
        self.sums: tuple[Any, ...] | None = SOURCE
        ledger: Any = SimpleNamespace(
            store=SimpleNamespace(hours=lambda: [FIRST, SECOND], sums=lambda _: self.sums),
            open_entries=lambda _: 0, hours={}, unique_count=0, batches=BatchCounts(),
            topics=SimpleNamespace(with_work=(), unfinished=list, to_sweep=lambda: False),
        )  # fmt: skip
        runtime: Any = SimpleNamespace(
            monotonic=lambda: self.now_s, in_thread=lambda _, fn, done: self.jobs.append((fn, done)),
            call_later=lambda *_: SimpleNamespace(cancel=lambda: None),
        )  # fmt: skip
        self.proposed: list[bytes] = []
        now = (SECOND + 1) * HOUR_MS + DAY
        retention = RetentionConfig(archive=archive)
        term: Any = SimpleNamespace(
            ledger=ledger, runtime=runtime, over=False, now=lambda: now, alarm=partial(Alarm, runtime),
            propose_behind=lambda command, done: self.proposed.append(command),
        )  # fmt: skip
        self._runner = MaintenanceRunner(term, retention)

    def looks(self) -> list[bytes]:
        """What it proposes now: first it asks, then it knows."""
        self.proposed.clear()
        for _ in range(2):
            self._runner._look()
            while self.jobs:
                fn, done = self.jobs.pop(0)
                try:
                    done(fn(), None)
                except Exception as error:
                    done(None, error)
        return self.proposed


def archive_hour(directory: Path, hour: int, source: SourceFiles = SOURCE, version: int = 2) -> list[Path]:
    """As `pipeline archive` leaves it: manifest, files, catalogue."""
    name, parts = hour_name(hour), list[PartFile]()
    for kind, rows in (("messages", source.entries), ("events", source.events)):
        path = directory / kind / f"hour={name}" / "part-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"PAR1" + kind.encode())
        crc = "00000000"  # nobody reads them here
        parts.append({"path": str(path.relative_to(directory)), "rows": rows, "bytes": 4 + len(kind), "crc32c": crc})
    manifest = directory / manifests.manifest_name(hour)
    manifest.parent.mkdir(exist_ok=True)
    data = manifests.encode_manifest(hour, source, parts)
    manifest.write_bytes(data.replace(b'"version": 2', b'"version": %d' % version))
    before = manifests.load_catalogue(Directory(str(directory)))
    listed, data = before.encode({hour: before.row(hour, manifest.read_bytes())})
    (directory / "_catalogue").mkdir(exist_ok=True)
    (directory / listed).write_bytes(data)
    return [manifest, *(directory / part["path"] for part in parts), directory / listed]


def test_an_hour_goes_when_the_archive_holds_all_of_it(tmp_path: Path) -> None:
    leader = Leader(str(tmp_path))
    assert leader.looks() == []
    archive_hour(tmp_path, SECOND)
    assert leader.looks() == [encode_maintain(Job.RETIRE, SECOND)]
    archive_hour(tmp_path, FIRST)
    assert leader.looks() == [encode_maintain(Job.RETIRE, SECOND), encode_maintain(Job.RETIRE, FIRST)]
    leader.sums = None  # it has not written all of it yet
    assert leader.looks() == []
    assert Leader("").looks() == [encode_maintain(Job.RETIRE, FIRST)] * 2


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("how", ["gone", "cut", "flipped"])
def test_an_hour_stays_when_anything_of_its_archive_is_missing(tmp_path: Path, number: int, how: str) -> None:
    file = archive_hour(tmp_path, FIRST)[number]
    data = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if how == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    parquet = file.suffix == ".parquet"  # a leader compares their sizes; `archive --audit` reads them
    assert Leader(str(tmp_path)).looks() == (
        [encode_maintain(Job.RETIRE, FIRST)] if parquet and how == "flipped" else []
    )


def test_an_hour_stays_when_the_archive_is_of_other_bytes_or_of_an_older_version(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = [SOURCE._replace(events=8), SOURCE._replace(log_bytes=901), SOURCE._replace(crcs=(1, 2, 4))]
    for n, source in enumerate(other):
        archive_hour(tmp_path / str(n), FIRST, source)
        assert Leader(str(tmp_path / str(n))).looks() == []
    archive_hour(tmp_path / "old", FIRST, version=1)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        leader = Leader(str(tmp_path / "old"))
        assert leader.looks() == leader.looks() == []
    (line,) = (record for record in caplog.records if record.message == "not_archived")
    assert f"2 hours, the first of them {hour_name(FIRST)}: " in line.__dict__["stays"]
    assert "version 1, which proves too little" in line.__dict__["stays"]


def test_the_check_of_an_archive_does_not_hold_for_ever(tmp_path: Path) -> None:
    leader = Leader(str(tmp_path))
    file = archive_hour(tmp_path, FIRST)[1]
    assert leader.looks() == [encode_maintain(Job.RETIRE, FIRST)]
    file.unlink()
    leader.now_s += 61
    assert leader.looks() == []


def test_the_later_row_of_two_catalogues_counts(tmp_path: Path) -> None:
    files = Directory(str(tmp_path))
    archive_hour(tmp_path, FIRST)
    archive_hour(tmp_path, FIRST, SOURCE._replace(log_bytes=901))
    assert len(manifests.load_catalogue(files).names) == 2
    assert Leader(str(tmp_path)).looks() == []
    archive_hour(tmp_path, FIRST)
    assert Leader(str(tmp_path)).looks() == [encode_maintain(Job.RETIRE, FIRST)]
    catalogue = manifests.load_catalogue(files)
    assert (catalogue.revision, manifests.load_catalogue(files, catalogue)) == (3, catalogue)  # it is not read again
    assert Catalogue([], 0, {}).encode({})[0].startswith("_catalogue/0000000001-")


def test_an_archive_in_an_object_store_is_believed_alike(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="an archive in an object store needs pyarrow")
    archive_hour(tmp_path / "archive", FIRST)
    file = archive_hour(tmp_path / "archive", SECOND)[1]
    with serve(tmp_path / "s3") as store:
        leader = Leader(store.uri("a/archive"))
        assert leader.looks() == []
        shutil.copytree(tmp_path / "archive", store.bucket / "a/archive")
        (store.bucket / "a/archive" / file.relative_to(tmp_path / "archive")).write_bytes(b"PAR1")
        assert leader.looks() == [encode_maintain(Job.RETIRE, FIRST)]
        leader.now_s += 61
        store.fault = lambda method, path: 403
        assert leader.looks() == []
        store.fault = lambda method, path: 0
        shutil.copytree(tmp_path / "archive", store.bucket / "a/archive", dirs_exist_ok=True)
        assert leader.looks() == [encode_maintain(Job.RETIRE, FIRST)]
    assert Leader(f"file://{tmp_path}/archive").looks() == [encode_maintain(Job.RETIRE, FIRST)]


def test_a_node_without_pyarrow_refuses_an_archive_in_an_object_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadelay.settings.rules.find_spec", lambda _: None)
    assert list(problems(Config(retention=RetentionConfig(archive="/srv/archive")))) == []
    ((key, said),) = problems(Config(retention=RetentionConfig(archive="s3://bucket/archive")))
    assert (key, "pip install 'hadelay[archive]'" in said) == ("retention.archive", True)
