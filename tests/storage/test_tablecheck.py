"""The check of the tables' file beside a node that has it open."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.tablecheck import TableCheck

MARK = b"find me on the disk"


@pytest.fixture
def open_file(tmp_path: Path) -> Iterator[LmdbBackend]:
    with closing(LmdbBackend(str(tmp_path / "state.mdb"), map_bytes=1 << 26)) as backend:
        rows = [(b"t%d" % (n % 3), b"%06d" % n, b"value of %d" % n) for n in range(3_000)]
        backend.commit([], [*sorted(rows), (b"z", b"key", MARK)])
        yield backend


def overwrite(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)
        os.fsync(file.fileno())


def test_sound_tables_are_read_whole_while_they_are_written(open_file: LmdbBackend) -> None:
    open_file.commit([b"t1"], [(b"t2", b"more", b"1")])
    size, damage = TableCheck(open_file.path, 1 << 30).run()
    assert (damage, size > 2_000 * 20) == ("", True)


def test_a_wrong_byte_of_a_value_is_found(open_file: LmdbBackend) -> None:
    at = Path(open_file.path).read_bytes().index(MARK)
    overwrite(open_file.path, at + 3, b"!")
    _, damage = TableCheck(open_file.path, 1 << 30).run()
    assert "the value of key b'key' in table b'z' does not verify" in damage


def test_a_page_of_garbage_ends_the_check_and_not_the_node(open_file: LmdbBackend) -> None:
    at = Path(open_file.path).read_bytes().index(MARK)
    page = at - at % 4096
    overwrite(open_file.path, page + 10, b"\xff" * 300)
    _, damage = TableCheck(open_file.path, 1 << 30).run()
    assert damage
    open_file.forget_readers()


def test_a_check_that_is_stopped_ends_at_once(open_file: LmdbBackend) -> None:
    check, found = TableCheck(open_file.path, 1), list[tuple[int, str]]()
    thread = threading.Thread(target=lambda: found.append(check.run()))
    thread.start()
    check.stop()
    thread.join(20)
    assert found == [(0, "")]
