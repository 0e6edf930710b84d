"""What is shipped to executors; that it is enough is what `make spark-cluster` shows."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from hadelay.errors import BadRequest, ConfigError
from hadelay.pipeline import pack


def test_an_archive_has_hadelay_and_what_is_needed_with_what_that_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {
        "hadelay",
        "pyarrow",
        "numpy",
        "msgpack",
        "lmdb",
        "google-crc32c",
        "aiohttp",
        "yarl",
    } <= pack._needed().keys()
    monkeypatch.setattr(pack, "_ROOTS", ("google-crc32c",))
    out = str(tmp_path / "x.zip")
    packed = pack.pack(out)
    assert packed.packages.keys() == {"hadelay", "google-crc32c"}
    names = zipfile.ZipFile(out).namelist()
    assert {"hadelay/__main__.py", "hadelay/pipeline/source.py", "google_crc32c/__init__.py"} <= set(names)
    assert len(names) == len(set(names))
    assert not [name for name in names if name.endswith(".pyc") or name.startswith((".", "/")) or "bin/" in name]


def test_rows_that_cannot_be_packed_are_named_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadRequest, match=r"x\.tar\.gz: .* must end with \.zip"):
        pack.pack(str(tmp_path / "x.tar.gz"))
    monkeypatch.setattr(pack, "_ROOTS", ("no-such-package",))
    with pytest.raises(ConfigError, match="no-such-package is not installed: pip install 'hadelay"):
        pack.pack(str(tmp_path / "x.zip"))
    assert list(tmp_path.iterdir()) == []
