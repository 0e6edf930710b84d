"""A directory that is not ours is refused, in words, before anything in it is touched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import IDENTITY, Loop, checkpoint, messages, open_storage

from hadelay.errors import ConfigError, DamagedFile
from hadelay.platform.disk import Disk
from hadelay.storage.identity import encode_identity, read_identity, write_identity
from hadelay.version import LAST_DEVELOPMENT


def files(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (replace(IDENTITY, cluster_id="other"), "belongs to cluster 'other', and this is cluster 'test'"),
        (replace(IDENTITY, group=4), "group 4"),
        (replace(IDENTITY, node="n2"), "node 'n2'"),
        (replace(IDENTITY, format_version=2), "format version 2; this hadelay reads up to 1: use a newer one"),
        (replace(IDENTITY, feature_level=99), "feature level 99"),
    ],
)
def test_somebody_elses_directory(tmp_path: Path, stored: object, words: str) -> None:
    loop = Loop()
    storage = open_storage(Disk(), str(tmp_path), loop)
    storage.hours.append(*messages(490_000, sizes=[10]))
    checkpoint(storage, loop, 1)
    storage.close()
    write_identity(Disk(), str(tmp_path), stored)  # type: ignore[arg-type]
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=words):
        open_storage(Disk(), str(tmp_path), loop)
    assert files(tmp_path) == before


def test_a_development_versions_directory(tmp_path: Path) -> None:
    open_storage(Disk(), str(tmp_path), Loop()).close()
    path = tmp_path / "identity"
    path.write_bytes(b"HDID" + path.read_bytes()[4:])
    before = files(tmp_path)
    with pytest.raises(ConfigError, match=f"development version .* commit {LAST_DEVELOPMENT} "):
        open_storage(Disk(), str(tmp_path), Loop())
    assert files(tmp_path) == before


def test_two_nodes_on_one_directory(tmp_path: Path) -> None:
    first = open_storage(Disk(), str(tmp_path), Loop())
    with pytest.raises(ConfigError, match="another node runs in"):
        open_storage(Disk(), str(tmp_path), Loop())
    first.close()
    open_storage(Disk(), str(tmp_path), Loop()).close()


def test_refusing_lets_go_of_the_directory(tmp_path: Path) -> None:
    open_storage(Disk(), str(tmp_path), Loop()).close()
    with pytest.raises(ConfigError, match="belongs to cluster"):
        open_storage(Disk(), str(tmp_path), Loop(), identity=replace(IDENTITY, cluster_id="x"))
    open_storage(Disk(), str(tmp_path), Loop()).close()


@pytest.mark.parametrize("at", [0, 5, 20])
def test_a_flipped_byte(tmp_path: Path, at: int) -> None:
    path = tmp_path / "identity"
    data = bytearray(encode_identity(IDENTITY))
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFile, match="identity"):
        read_identity(Disk(), str(tmp_path))


def test_an_identity_is_there_after_opening_again(tmp_path: Path) -> None:
    storage = open_storage(Disk(), str(tmp_path), Loop())
    storage.set_identity(incarnation=7)
    storage.close()
    storage = open_storage(Disk(), str(tmp_path), Loop())
    assert storage.identity == replace(IDENTITY, incarnation=7)
    storage.close()
