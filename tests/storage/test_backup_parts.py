"""Backups in an object store: parts that are never written twice, and what becomes of those that nobody needs."""

from __future__ import annotations

import pytest
from support import NOW
from test_backup import Broken, Source, hours

from hadelay.errors import ConfigError, NotFound
from hadelay.pipeline import objects
from hadelay.pipeline.objects import Objects
from hadelay.storage import backup
from hadelay.storage.backup import Archive, LocalBackups

#: So small that files have several.
PART = 64 << 10
DAY = 86_400_000


class Bucket:
    """A Location in memory, with a clock of its own."""

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.now = 0

    def path(self, name: str) -> str:
        return f"s3://b/{name}"

    def load(self, name: str) -> bytes:
        if name not in self.objects:
            raise FileNotFoundError(name)
        return self.objects[name][0]

    def put(self, name: str, data: bytes) -> None:
        self.objects[name] = data, self.now

    write = put

    def remove(self, name: str) -> None:
        del self.objects[name]

    def walk(self) -> dict[str, tuple[int, int]]:
        return {name: (len(data), modified) for name, (data, modified) in self.objects.items()}

    def flip(self, name: str, at: int) -> None:
        data, modified = self.objects[name]
        self.objects[name] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], modified

    def parts(self, name: str) -> list[str]:
        return sorted(part for part in self.objects if part.startswith(f"{name}/"))


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def source(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(objects, "PART", PART)
    monkeypatch.setattr(backup, "_READ", PART)
    source = Source()
    source.archive = Archive(Objects(bucket))
    source.fill(NOW, NOW + 50)
    return source


LOG = hours(NOW)[0]


def test_a_second_backup_copies_parts_that_are_new(source: Source, bucket: Bucket) -> None:
    first = source.back_up()
    assert source.read == {name: file.length for name, file in first.files.items() if file.length}
    before = dict(bucket.objects)
    source.read.clear()
    source.fill(NOW)
    second = source.back_up()
    whole = first.files[LOG].length // PART * PART
    assert source.read[LOG] == second.files[LOG].length - whole
    assert not any(source.read[name] for name in hours(NOW + 50))
    # Nothing that was there has changed: the first is as it was, whatever became of the second.
    assert bucket.objects | before == bucket.objects
    bucket.flip(bucket.parts(LOG)[-1], 5)
    assert (source.wrong(1), source.archive.read(1)) == ([], first)
    assert source.wrong(2) == [(LOG, second.files[LOG].length // PART * PART)]


@pytest.mark.parametrize("budget", [0, 9_000, 250_000, 500_000])
def test_an_interrupted_backup_is_none_and_goes_on_with_whole_parts(source: Source, budget: int) -> None:
    source.budget = budget
    with pytest.raises(Broken):
        source.back_up()
    with pytest.raises(NotFound, match="interrupted"):
        source.archive.read()
    source.budget, source.archive = 1 << 40, Archive(Objects(source.archive.files._location))  # type: ignore[attr-defined]
    made = source.back_up()
    assert made.size <= sum(source.read.values()) < made.size + PART
    assert source.wrong() == []


def test_a_part_that_is_cut_off_or_gone_is_named_and_copied_again(source: Source, bucket: Bucket) -> None:
    source.back_up()
    third = bucket.parts(LOG)[2]
    bucket.objects[third] = bucket.objects[third][0][:-1], 0
    source.archive = Archive(Objects(bucket))
    assert source.wrong() == [(LOG, 2 * PART)]
    source.fill(NOW)
    source.back_up()
    assert source.wrong() == source.wrong(1) == []
    bucket.flip(third, 7)  # of the right length: found when it is read back
    source.fill(NOW)
    source.back_up()
    assert source.wrong() == source.wrong(2) == []


def test_parts_that_nobody_needs_go_after_a_day(source: Source, bucket: Bucket) -> None:
    source.back_up()
    first = set(bucket.objects)
    for day in (1, 2):
        bucket.now = day * (DAY - 1)
        source.fill(NOW)
        source.back_up(keep=1)
        assert source.archive.indexes() == [day + 1]
        assert source.wrong() == []
        # It could belong to a backup that is under way; after a day it does not.
        last = bucket.parts(hours(NOW)[1])[0]
        assert (last in first) == (day == 1)
    assert "manifest-1.json" not in bucket.objects
    assert bucket.parts(hours(NOW + 50)[0])[0] in first


def test_there_is_no_manifest_when_parts_were_removed_meanwhile(source: Source, bucket: Bucket) -> None:
    finish = source.archive.finish

    def after(*words: object) -> None:
        del bucket.objects[bucket.parts(LOG)[0]]
        finish(*words)  # type: ignore[arg-type]

    source.archive.finish = after  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="removed meanwhile: run one backup at a time"):
        source.back_up()
    assert source.archive.indexes() == []


def test_a_directory_with_parts_is_refused_in_words(source: Source, bucket: Bucket) -> None:
    source.back_up()
    manifest = source.disk.open("/backup/manifest-1.json", create=True)
    manifest.pwrite(bucket.objects["manifest-1.json"][0], 0)
    with pytest.raises(ConfigError, match="read a backup where it was written"):
        Archive(LocalBackups(source.disk, "/backup")).read()
