"""A damaged copy is refused with file, hour and offset of the damage, by both engines: never exit code 0, never a
traceback."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgpack
import numpy as np
import pytest

from hadelay.cli.app import run as command
from hadelay.codec.formats import DISPATCH_SIZE, HOUR_ROW, INDEX_SIZE, NAME_SIZE
from hadelay.errors import DamagedFile, HadelayError
from hadelay.model import hour_from_name
from hadelay.pipeline import reconcile
from hadelay.pipeline.jobs import ReconcileOptions
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.tables import CHECKPOINT, HOURS, ROW
from tests.ledger.world import World
from tests.pipeline import exact_oracle, test_archived
from tests.pipeline.support import options, write

NAME, OTHER = "2026112018", "2026112020"
KEY = hour_from_name(NAME).to_bytes(4, "big")
IDX, DSP, LOG = (f"hours/{NAME}.{suffix}" for suffix in ("idx", "dsp", "log"))
TABLES = "state.mdb"

Change = Callable[[bytes], bytes]


class Defect(NamedTuple):
    """file: what is changed; named: what has to be named, with its offset; bare: without a checkpoint."""

    title: str
    file: str
    change: Change
    named: str
    offset: int | None
    bare: bool = False


def flip(at: int) -> Change:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def rows(*order: int, size: int) -> Change:
    """These rows, in this order, then all that come after the largest."""
    return lambda data: b"".join(data[n * size : (n + 1) * size] for n in order) + data[(max(order) + 1) * size :]


def cut(size: int) -> Change:
    return lambda data: data[:-size]


def pieces(*order: int) -> Change:
    """Of a .log or `names`, whose pieces have any size: these, then all that come after the largest."""

    def change(data: bytes) -> bytes:
        found = records(data) if data[:2] == b"HD" else entries(data)
        return b"".join(found[n] for n in order) + b"".join(found[max(order) + 1 :])

    return change


def records(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = 48 + int.from_bytes(data[4:8], "little") + int.from_bytes(data[8:12], "little")
        found.append(data[:size])
        data = data[size:]
    return found


def entries(data: bytes) -> list[bytes]:
    found = []
    while data:
        size = NAME_SIZE + int.from_bytes(data[2:4], "little")
        found.append(data[:size])
        data = data[size:]
    return found


def gone(_: bytes) -> bytes:
    """The file is deleted."""
    raise FileNotFoundError


def sized(size: int, ends: int, suffix: str) -> list[Defect]:
    """Of a file of rows: `ends` of them."""
    file = f"hours/{NAME}.{suffix}"
    found = [
        Defect("flipped", file, flip(3 * size + 9), file, 3 * size),
        Defect("zeroed", file, lambda data: data[: 3 * size] + bytes(size) + data[4 * size :], file, 3 * size),
        Defect("removed", file, rows(0, 1, 2, 4, size=size), file, 3 * size),
        Defect("duplicated", file, rows(0, 1, 2, 3, 3, size=size), file, 4 * size),
        Defect("swapped", file, rows(0, 3, 2, 1, size=size), file, size),
        Defect("one byte removed", file, lambda data: data[: 3 * size + 9] + data[3 * size + 10 :], file, 3 * size),
        Defect("one byte inserted", file, lambda data: data[: 3 * size] + b"x" + data[3 * size :], file, 3 * size),
        Defect("cut amid a row", file, cut(5), file, (ends - 1) * size),
    ]
    found += [defect._replace(bare=True) for defect in found]
    return [
        *found,
        Defect("cut by a row", file, cut(size), file, (ends - 1) * size),
        Defect("empty", file, lambda data: b"", file, 0),
        Defect("deleted", file, gone, file, 0),
        Defect("padded, without a checkpoint", file, lambda data: data + b"x" * size, file, ends * size, bare=True),
    ]


def of_log(sizes: list[int]) -> list[Defect]:
    at = [sum(sizes[:n]) for n in range(len(sizes))]
    found = [
        Defect("body flipped", LOG, flip(at[3] + sizes[3] - 1), LOG, at[3]),
        Defect("header flipped", LOG, flip(at[3] + 17), LOG, at[3]),
        Defect("removed", LOG, pieces(0, 1, 2, 4), LOG, at[3]),
        Defect("duplicated", LOG, pieces(0, 1, 2, 3, 3), LOG, at[4]),
        Defect("swapped", LOG, pieces(0, 3, 2, 1), LOG, at[1]),
        Defect("cut amid a record", LOG, cut(5), LOG, at[-1]),
        Defect("cut by a record", LOG, cut(sizes[-1]), LOG, at[-1]),
        Defect("empty", LOG, lambda data: b"", LOG, 0),
        Defect("deleted", LOG, gone, LOG, 0),
    ]
    return found + [defect._replace(bare=True) for defect in found]


def of_names(sizes: list[int]) -> list[Defect]:
    at = [sum(sizes[:n]) for n in range(len(sizes))]
    found = [
        Defect("flipped", "names", flip(at[1] + NAME_SIZE), "names", at[1]),
        Defect("removed", "names", pieces(1), "names", 0),
        Defect("duplicated", "names", pieces(0, 0), "names", at[1]),
        Defect("swapped", "names", pieces(1, 0), "names", 0),
        Defect("cut amid a name", "names", cut(1), "names", at[-1]),
    ]
    return [
        *found, *(defect._replace(bare=True) for defect in found),
        Defect("cut by a name", "names", cut(sizes[-1]), "names", at[-1]),
        Defect("deleted", "names", gone, "names", 0),
        Defect("deleted, without a checkpoint", "names", gone, "names", 0, bare=True),
    ]  # fmt: skip


def committed(change: Callable[[LmdbBackend], None]) -> Change:
    """What somebody did to the tables who knows how to write them."""

    def apply(data: bytes) -> bytes:
        path = f"/tmp/hadelay-damage-{os.getpid()}.mdb"
        try:
            Path(path).write_bytes(data)
            backend = LmdbBackend(path, map_bytes=1 << 20)
            change(backend)
            backend.close()
            return Path(path).read_bytes()
        finally:
            for name in (path, f"{path}-lock"):
                Path(name).unlink(missing_ok=True)

    return apply


def put(key: bytes, **changed: int) -> Callable[[LmdbBackend], None]:
    """The hour's row, changed, under that key."""

    def change(backend: LmdbBackend) -> None:
        row = np.frombuffer(backend.get(HOURS, KEY) or b"", HOUR_ROW).copy()
        for name, value in changed.items():
            row[name] = value
        backend.commit([], [(HOURS, key, row.tobytes())])

    return change


def of_another_directory(backend: LmdbBackend) -> None:
    row = msgpack.unpackb(backend.get(CHECKPOINT, ROW) or b"")
    backend.commit([], [(CHECKPOINT, ROW, msgpack.packb(row | {"names_crc": 7}))])


def every(wanted: bytes, put: bytes) -> Change:
    def change(data: bytes) -> bytes:
        assert wanted in data
        return data.replace(wanted, put)

    return change


OF_TABLES = [
    Defect("value flipped", TABLES, lambda data: every(b"names_length", b"names_lengtI")(data), TABLES, None),
    Defect("a table's name flipped", TABLES, every(b"hours\x00", b"hourt\x00"), TABLES, 0),
    Defect("row removed", TABLES, committed(lambda b: b.commit([], [(HOURS, KEY, None)])), TABLES, 0),
    Defect("row duplicated", TABLES, committed(put(b"\x00\x07\x9b\xf9")), "hours/2026112109.idx", 0),
    Defect("row wrong", TABLES, committed(put(KEY, log_crc=1, idx_crc=2, dsp_crc=3)), TABLES, 0),
    Defect("of another directory", TABLES, committed(of_another_directory), TABLES, 0),
    Defect("cut", TABLES, lambda data: data[: len(data) // 2], TABLES, None),
    Defect("all but the head cut", TABLES, lambda data: data[:8192], TABLES, None),
    Defect("empty", TABLES, lambda data: b"", TABLES, 0),
    Defect("overwritten", TABLES, lambda data: b"x" * len(data), TABLES, 0),
    Defect("pages overwritten", TABLES, lambda data: data[:8192] + b"\xff" * (len(data) - 8192), TABLES, 0),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    directory = tmp_path_factory.mktemp("sound")
    world = test_archived.two_hours(directory)
    return world, write(world, directory, checkpoint=True)


def planted(sound: tuple[World, Path], defect: Defect, directory: Path) -> Path:
    shutil.copytree(sound[1], directory, dirs_exist_ok=True)
    if defect.bare:
        (directory / TABLES).unlink()
    path = directory / defect.file
    try:
        path.write_bytes(defect.change(path.read_bytes()))
    except FileNotFoundError:
        path.unlink()
    return directory


DEFECTS = [
    *sized(INDEX_SIZE, 9, "idx"),
    *sized(DISPATCH_SIZE, 19, "dsp"),
    *of_log([49] * 8),
    *of_names([13, 13, 14, 13]),
    *OF_TABLES,
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d.file.rpartition('.')[2]} {d.title}{' bare' * d.bare}")
def test_damaged_files_are_named(
    defect: Defect, sound: tuple[World, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = planted(sound, defect, tmp_path)
    as_of = options(sound[0], directory).as_of
    words = ["pipeline", "reconcile", "--master", "none", "--path", str(directory), "--as-of", str(as_of)]
    code = command(words)
    said = capsys.readouterr().err
    assert code == 1, said
    offset = r"\d+" if defect.offset is None else defect.offset
    assert re.match(rf"hadelay: {directory}/{re.escape(defect.named)}, offset {offset}: ", said), said
    if defect.named.startswith("hours/"):
        assert f"hour {Path(defect.named).stem}" in said
    given = ReconcileOptions(options(sound[0], directory))
    with pytest.raises(DamagedFile, match=re.escape(said.removeprefix("hadelay: ").strip())):
        exact_oracle.run(None, given)  # before it asks anything of Spark


@pytest.fixture(scope="module")
def archived(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, Path]:
    """A copy whose first hour is in the archive alone."""
    directory = tmp_path_factory.mktemp("archived")
    world = test_archived.two_hours(directory)
    test_archived.delete_first(world, directory)
    return world, directory


MANIFEST, CATALOGUE = f"archive/_manifest/{NAME}.json", "archive/_catalogue"
PARTS = {kind: f"archive/{kind}/hour={NAME}/part-" for kind in ("messages", "events")}


def of_archive() -> list[tuple[str, str, Change]]:
    """(what, file, change)"""
    found: list[tuple[str, str, Change]] = []
    for file in PARTS.values():
        found += [
            ("flipped", file, flip(100)),
            ("cut", file, cut(1)),
            ("empty", file, lambda data: b""),
            ("padded", file, lambda data: data + b"x"),
            ("duplicated", file, lambda data: data + data),
            ("deleted", file, gone),
        ]
    return [
        *found,
        ("flipped", MANIFEST, lambda data: data.replace(b'"rows": 9', b'"rows": 8')),
        ("cut", MANIFEST, cut(20)),
        ("deleted", MANIFEST, gone),
        ("deleted", CATALOGUE, gone),
    ]


@pytest.mark.parametrize(("title", "file", "change"), of_archive(), ids=lambda v: v if isinstance(v, str) else "")
def test_damaged_files_of_an_archive_are_named(
    title: str, file: str, change: Change, archived: tuple[World, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    world, directory = archived
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (path,) = tmp_path.glob(f"{file}*") if file != CATALOGUE else (tmp_path / CATALOGUE).iterdir()
    assert change is gone or change(path.read_bytes()) != path.read_bytes()
    try:
        path.write_bytes(change(path.read_bytes()))
    except FileNotFoundError:
        path.unlink()
    words = ["pipeline", "reconcile", "--master", "none", "--path", str(tmp_path), "--archive", f"{tmp_path}/archive"]
    code = command([*words, "--as-of", str(options(world, tmp_path).as_of)])
    said = capsys.readouterr().err
    assert code in (1, 3), said
    named = str(path)
    if change is gone and file in (MANIFEST, CATALOGUE):
        named = str(path.parent)  # of what is not there, the directory is named
    assert said.startswith(f"hadelay: {named}"), said
    assert NAME in said or file == CATALOGUE
    given = ReconcileOptions(options(world, tmp_path), archive=f"{tmp_path}/archive")
    with pytest.raises(HadelayError, match=re.escape(said.removeprefix("hadelay: ").strip())):
        exact_oracle.run(None, given)


@pytest.mark.parametrize("file", [IDX, DSP, LOG, "names"])
def test_bytes_behind_a_checkpoint_are_no_damage(file: str, sound: tuple[World, Path], tmp_path: Path) -> None:
    before = reconcile.run(None, ReconcileOptions(options(sound[0], sound[1])))
    assert not before.failed
    for tail in (bytes(4096), b"x" * 100):
        directory = planted(sound, Defect("", file, lambda data, tail=tail: data + tail, file, 0), tmp_path)
        assert reconcile.run(None, ReconcileOptions(options(sound[0], directory))) == before
    (tmp_path / TABLES).unlink()
    (tmp_path / file).write_bytes((sound[1] / file).read_bytes())
    assert reconcile.run(None, ReconcileOptions(options(sound[0], tmp_path))) == before
