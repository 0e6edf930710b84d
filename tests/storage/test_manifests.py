"""Manifests of an archive name files of their own hour, and nothing outside the archive."""

from __future__ import annotations

import json

import pytest

from hadelay.storage.manifests import PartFile, SourceFiles, decode_manifest, encode_manifest

HOUR = 498_667
SOURCE = SourceFiles(1, 1, 1, (1, 2, 3))


def encoded(path: str) -> bytes:
    return encode_manifest(HOUR, SOURCE, [PartFile(path=path, rows=1, bytes=1, crc32c="00000000")])


def directory(kind: str = "messages") -> str:
    return f"{kind}/hour={json.loads(encoded('x'))['hour']}"


@pytest.mark.parametrize("name", ["part-00000.parquet", "part=1_0.zstd.parquet", "a..b", "-"])
def test_files_of_the_hour_are_accepted(name: str) -> None:
    for kind in ("messages", "events"):
        (part,) = decode_manifest(encoded(f"{directory(kind)}/{name}"), HOUR)["files"]
        assert part["path"] == f"{directory(kind)}/{name}"


@pytest.mark.parametrize(
    "path",
    [
        "{}/..", "{}/.", "{}/...", "{}/.hidden", "{}/../../../etc/passwd", "{}/a/b", "{}/", "/{}/a", "../{}/a",
        "/etc/passwd",
        "messages/../hour/a", "messages/hour=../a", "messages/hour=..", "other/hour=2026112011/a", "{}/a\n",
        "{}/a\x00", "{}/ä",
        "{}//a", "{}\\..\\a", "s3://bucket/{}/a", "",
    ],
)  # fmt: skip
def test_paths_that_lead_elsewhere_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match=r"path|manifest"):
        decode_manifest(encoded(path.format(directory())), HOUR)
