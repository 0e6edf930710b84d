"""The overlay over either backend, against one dict."""

from __future__ import annotations

import errno
import itertools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chaos.sim.disk import SimDisk
from chaos.sim.tables import SimBackend
from hadelay.errors import DamagedFile, is_disk_full
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.tables import Backend, Tables

Open = Callable[[], Backend]


@pytest.fixture(params=["lmdb", "sim"])
def open_backend(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    disk = SimDisk(random.Random(1))
    if request.param == "sim":
        return lambda: SimBackend(disk, "/state.mdb")
    return lambda: LmdbBackend(str(tmp_path / "state.mdb"))


def commit(tables: Tables) -> None:
    layer = tables.freeze()
    tables.backend.commit(sorted(layer.dropped), layer.puts())
    tables.committed()


key = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])
table = st.sampled_from([b"t", b"u"])
step = st.one_of(
    st.tuples(st.just("put"), table, key, st.binary(max_size=3)),
    st.tuples(st.just("put new"), table, st.sets(key), st.binary(max_size=3)),
    st.tuples(st.just("delete many"), table, st.sets(key)),
    st.tuples(st.just("delete"), table, key),
    st.tuples(st.just("drop"), table),
    st.tuples(st.just("commit")),
    st.tuples(st.just("freeze")),
    st.tuples(st.just("scan"), table, key, st.none() | key, st.integers(1, 4)),
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(step, max_size=25))
def test_layers_read_as_one_dict(steps: list[tuple]) -> None:
    tables = Tables(SimBackend(SimDisk(random.Random(1)), "/state.mdb"))
    model: dict[bytes, dict[bytes, bytes]] = {b"t": {}, b"u": {}}
    frozen = None
    for what, *args in steps:
        if what == "put":
            tables.put(*args)
            model[args[0]][args[1]] = args[2]
        elif what == "put new":
            name, new = args[0], {k: args[2] for k in args[1] if k not in model[args[0]]}
            tables.put_new(name, new)
            model[name] |= new
        elif what == "delete many":
            tables.delete_many(*args)
            model[args[0]] = {k: v for k, v in model[args[0]].items() if k not in args[1]}
        elif what == "delete":
            tables.delete(*args)
            model[args[0]].pop(args[1], None)
        elif what == "drop":
            tables.drop_table(*args)
            model[args[0]].clear()
        elif what == "scan":
            name, start, end, limit = args
            wanted = [p for p in sorted(model[name].items()) if p[0] >= start and (end is None or p[0] < end)]
            assert tables.range(name, start, end, limit) == wanted[:limit]
            later, first = [k for k in sorted(model[name]) if k >= start], tables.next_key(name, start)
            assert first is None or first >= start
            assert not later or (first is not None and first <= later[0])
        elif frozen is None:
            frozen = tables.freeze()
        else:
            tables.backend.commit(sorted(frozen.dropped), frozen.puts())
            tables.committed()
            frozen = None
        for name, rows in model.items():
            assert {k: v for k in b"abcde" if (v := tables.get(name, k.to_bytes()))} == {
                k[0]: v for k, v in rows.items() if v
            }
            names = [k.to_bytes() for k in b"abcde"]
            assert tables.get_many(name, names) == [rows.get(k) for k in names]


CHANGES = ("put", "put new", "delete", "drop", "freeze", "commit")


@pytest.mark.parametrize("first", CHANGES)
def test_every_order_of_five_changes_of_one_row(first: str) -> None:
    """A new row may be one that was deleted a moment ago, in this layer or in the frozen one."""
    for rest in itertools.product(CHANGES, repeat=4):
        steps = (first, *rest)
        tables, known, frozen = Tables(SimBackend(SimDisk(random.Random(1)), "/state.mdb")), b"", False
        tables.put(b"t", b"a", known := b"0")
        commit(tables)
        for n, what in enumerate(steps):
            if what == "put":
                tables.put(b"t", b"a", known := b"%d" % (n + 1))
            elif what == "put new" and not known:
                tables.put_new(b"t", {b"a": (known := b"%d" % (n + 1))})
            elif what == "delete":
                tables.delete(b"t", b"a")
                known = b""
            elif what == "drop":
                tables.drop_table(b"t")
                known = b""
            elif what == "freeze" and not frozen:
                layer, frozen = tables.freeze(), True
            elif what == "commit" and frozen:
                tables.backend.commit(sorted(layer.dropped), layer.puts())
                tables.committed()
                frozen = False
            assert (tables.get(b"t", b"a") or b"") == known, steps[: n + 1]
        if frozen:
            tables.backend.commit(sorted(layer.dropped), layer.puts())
            tables.committed()
        commit(tables)
        assert (tables.get(b"t", b"a") or b"") == known, steps


KEYS = [b"a", b"b", b"c", b"d", b"e", b"f"]
layer = st.dictionaries(st.sampled_from(KEYS), st.none() | st.just(b"1"))


@settings(max_examples=100, deadline=None)
@given(committed=layer, frozen=layer, fresh=layer)
def test_every_range_of_three_layers(
    committed: dict[bytes, bytes | None], frozen: dict[bytes, bytes | None], fresh: dict[bytes, bytes | None]
) -> None:
    """Found by the simulator (seed 41650): among keys that were deleted since the last checkpoint, a short range was
    taken to be over when the backend's next key was behind its end. A redrive ended early, on one node of three."""
    tables, model = Tables(SimBackend(SimDisk(random.Random(1)), "/state.mdb")), dict[bytes, bytes]()
    for rows in (committed, frozen, fresh):
        for at, value in rows.items():
            if value is None:
                tables.delete(b"t", at)
                model.pop(at, None)
            else:
                tables.put(b"t", at, value)
                model[at] = value
        if rows is committed:
            commit(tables)
        elif rows is frozen:
            tables.freeze()
    for start in KEYS:
        for end in (None, *KEYS):
            wanted = [p for p in sorted(model.items()) if p[0] >= start and (end is None or p[0] < end)]
            for limit in range(1, len(KEYS) + 1):
                assert tables.range(b"t", start, end, limit) == wanted[:limit]


def test_a_table_that_is_consumed_from_its_head_stays_in_order_over_checkpoints() -> None:
    """An agenda: the first row is taken, and put again later, from the last taken key on; what is put meanwhile may be
    before that key."""
    chance, tables = random.Random(5), Tables(SimBackend(SimDisk(random.Random(1)), "/state.mdb"))
    model = {b"%06d" % (7919 * n % 2_000): b"" for n in range(0, 2_000, 2)}
    tables.put_many(b"t", model)
    start = b""
    for n in range(900):
        ((key, _),) = tables.range(b"t", start, None, 1)
        if n % 10 == 0:
            assert key == min(k for k in model if k >= start)
        for gone, new in ((key, b"%06d" % chance.randrange(3_000)),):
            tables.delete(b"t", gone)
            del model[gone]
            tables.put(b"t", new, b"")
            model[new] = b""
        start = min(key, new)
        if n in (200, 500):
            tables.freeze()
        if n in (400, 800):
            assert tables._frozen is not None
            tables.backend.commit(sorted(tables._frozen.dropped), tables._frozen.puts())
            tables.committed()
    assert [key for key, _ in tables.range(b"t", b"", None, 2_000)] == sorted(model)


def test_a_search_that_passes_over_many_deleted_keys_pauses() -> None:
    """The event loop goes on in the pauses, and the table may change in them."""
    tables = Tables(SimBackend(SimDisk(random.Random(1)), "/state.mdb"))
    keys = [b"%06d" % n for n in range(50_000)]
    tables.put_many(b"t", dict.fromkeys(keys, b""))
    tables.delete_many(b"t", keys[:-10])
    slices, pauses, found = tables.range_slices(b"t", b"", None, 20), 0, None
    while found is None:
        try:
            next(slices)
            pauses += 1
            if pauses == 20:
                tables.freeze()
                tables.delete(b"t", keys[-5])
        except StopIteration as done:
            found = done.value
    assert pauses > 40
    assert [key for key, _ in found] == [key for key in keys[-10:] if key != keys[-5]]


def test_a_new_row_that_is_deleted_leaves_nothing_to_write() -> None:
    tables = Tables(SimBackend(SimDisk(random.Random(1)), "/state.mdb"))
    rows = {b"%d" % n: b"value" for n in range(2_000)}
    for table in (b"t", b"ordered"):
        tables.put_new(table, rows)
        assert len(tables.range(b"ordered")) == 1_000 * (table == b"ordered")
        tables.put(table, b"7", b"another value")
        tables.delete_many(table, rows)
    assert tables.range(b"ordered") == []
    assert tables.overlay_bytes == 0
    tables.put_new(b"t", rows)
    frozen = tables.freeze()
    tables.delete(b"t", b"7")
    assert tables.get(b"t", b"7") is None
    tables.backend.commit(sorted(frozen.dropped), frozen.puts())
    tables.committed()
    assert (tables.get(b"t", b"7"), tables.get(b"t", b"8")) == (None, b"value")


def test_committed_rows_are_there_after_opening_again(open_backend: Open) -> None:
    tables = Tables(open_backend())
    for i in range(3000):
        tables.put(b"numbers", i.to_bytes(4, "big"), b"%d" % i)
    tables.put(b"other", b"k", b"v")
    assert tables.overlay_bytes > 3000 * 8
    commit(tables)
    assert tables.overlay_bytes == 0
    tables.put(b"numbers", bytes(4), b"never committed")
    tables.backend.close()
    tables = Tables(open_backend())
    assert tables.backend.tables() == [b"numbers", b"other"]
    assert tables.get(b"numbers", bytes(4)) == b"0"
    assert tables.get(b"numbers", b"none") is None
    assert tables.get(b"no table", b"k") is None
    assert [v for _, v in tables.range(b"numbers", (2998).to_bytes(4, "big"))] == [b"2998", b"2999"]
    assert len(tables.range(b"numbers", limit=10)) == 10
    tables.backend.close()


def test_tables_come_and_go_for_ever(open_backend: Open) -> None:
    tables = Tables(open_backend())
    for epoch in range(200):
        tables.put(b"epoch:%d" % epoch, b"k", b"%d" % epoch)
        if epoch >= 2:
            tables.drop_table(b"epoch:%d" % (epoch - 2))
            assert tables.get(b"epoch:%d" % (epoch - 2), b"k") is None
        commit(tables)
    assert tables.get(b"epoch:199", b"k") == b"199"
    assert len(tables.backend.tables()) == 2
    tables.backend.close()


def test_a_dropped_table_can_be_filled_in_the_same_commit(open_backend: Open) -> None:
    tables = Tables(open_backend())
    tables.put(b"t", b"old", b"1")
    commit(tables)
    tables.drop_table(b"t")
    tables.put(b"t", b"new", b"2")
    commit(tables)
    assert tables.range(b"t") == [(b"new", b"2")]
    tables.backend.close()


def test_a_large_commit_is_whole_after_a_crash_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond the first few thousand changes is sorted in by later transactions: by the next one, if need be."""
    path = str(tmp_path / "state.mdb")
    tables = Tables(LmdbBackend(path))
    for n in range(10_000):
        tables.put(b"numbers", n.to_bytes(4, "big"), b"old")
    commit(tables)
    for n in range(0, 10_000, 2):
        tables.delete(b"numbers", n.to_bytes(4, "big"))
        tables.put(b"numbers", (n + 1).to_bytes(4, "big"), b"new")
    with monkeypatch.context() as patched:
        patched.setattr(LmdbBackend, "_sort_in", lambda self: None)
        commit(tables)
    tables.backend.close()
    with pytest.raises(DamagedFile, match="start the node once"):
        LmdbBackend(path, readonly=True)
    tables = Tables(LmdbBackend(path))
    assert tables.range(b"numbers", limit=20_000) == [(n.to_bytes(4, "big"), b"new") for n in range(1, 10_000, 2)]
    assert tables.backend.tables() == [b"numbers"]
    tables.backend.close()
    LmdbBackend(path, readonly=True).close()


def test_a_file_that_lost_every_page_but_the_first_two(tmp_path: Path) -> None:
    """The list of tables is beyond its end: an error, not a signal that ends the process without a word."""
    path = tmp_path / "state.mdb"
    tables = Tables(LmdbBackend(str(path)))
    tables.put(b"t", b"k", b"v")
    commit(tables)
    tables.backend.close()
    os.truncate(path, 2 * 4096)
    with pytest.raises(DamagedFile, match=str(path)):
        LmdbBackend(str(path))


def test_a_file_that_lost_its_list_of_free_pages(tmp_path: Path) -> None:
    """All that is in use can be read. The next commit looks for free pages: an error then, and not a signal."""
    path = tmp_path / "state.mdb"
    backend = LmdbBackend(str(path))
    backend.commit([], [(b"t", n.to_bytes(4, "big"), bytes(200)) for n in range(2000)])
    backend.commit([b"t"], [(b"u", b"k", b"v")])
    backend.close()
    os.truncate(path, path.stat().st_size - 4096)
    commit = (
        "import sys; from hadelay.storage.lmdbtables import *\n"
        "backend = LmdbBackend(sys.argv[1])\n"
        "assert backend.get(b'u', b'k') == b'v'\n"
        "backend.commit([], [(b'u', b'more', b'v')])\n"
    )
    done = subprocess.run([sys.executable, "-c", commit, str(path)], capture_output=True, text=True, check=False)
    assert "DamagedFile" in done.stderr, done


def test_a_full_map_is_a_full_disk(tmp_path: Path) -> None:
    tables = Tables(LmdbBackend(str(tmp_path / "state.mdb"), map_bytes=1 << 20))
    tables.put(b"t", b"k", b"kept")
    commit(tables)
    tables.put(b"t", b"big", bytes(2 << 20))
    layer = tables.freeze()
    with pytest.raises(OSError, match="map_bytes") as caught:
        tables.backend.commit([], layer.puts())
    assert caught.value.errno == errno.ENOSPC
    assert tables.backend.get(b"t", b"k") == b"kept"
    tables.backend.close()


@pytest.mark.parametrize("tiny_disk", ["3m"], indirect=True)
def test_a_disk_that_takes_a_part_of_a_write_is_full(tiny_disk: Path) -> None:
    """LMDB says "Input/output error" then, as it does of a disk that fails."""
    backend = LmdbBackend(str(tiny_disk / "state.mdb"))
    backend.commit([], [(b"t", b"k", b"kept")])
    with open(tiny_disk / "ballast", "wb") as ballast:
        os.posix_fallocate(ballast.fileno(), 0, os.statvfs(tiny_disk).f_bavail * 4096 - 100_000)
    with pytest.raises(OSError, match="Input/output error") as caught:
        backend.commit([], [(b"t", n.to_bytes(4, "big"), bytes(1000)) for n in range(1000)])
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tiny_disk) == ["ballast", "state.mdb", "state.mdb-lock"]
    os.unlink(tiny_disk / "ballast")
    backend.commit([], [(b"t", b"k2", b"kept")])
    assert len(backend.scan(b"t", b"", 10)) == 2
    backend.close()


@pytest.mark.parametrize(("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_a_disk_is_full_when_a_quota_is(tmp_path: Path, number: int, full: bool) -> None:
    backend = LmdbBackend(str(tmp_path / "state.mdb"))
    refuse = Mock(side_effect=OSError(number, os.strerror(number)))
    with patch("os.posix_fallocate", refuse), pytest.raises(OSError, match="LMDB") as caught:
        backend.commit([], [(b"t", b"a key that is too long" * 100, b"")])
    assert is_disk_full(caught.value) == full
    assert is_disk_full(refuse.side_effect) == full
    backend.close()
