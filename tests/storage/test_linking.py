"""Linking against a model too simple to be wrong: dicts and a loop."""

from __future__ import annotations

from collections import defaultdict

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadelay.codec.checksums import RowCrc, crc32c, masked
from hadelay.codec.formats import DISPATCH, INDEX, RECORD
from hadelay.codec.linking import Heads, catch_up, chain, link, no_heads, place
from hadelay.model import NONE32

seconds = st.lists(st.integers(0, 5) | st.integers(0, 3599), min_size=1, max_size=60)


def model(all_seconds: list[int]) -> list[tuple[int, int]]:
    """(local, pre) of each."""
    seen: dict[int, list[int]] = defaultdict(list)
    links = []
    for index, second in enumerate(all_seconds):
        links.append((len(seen[second]), seen[second][-1] if seen[second] else NONE32))
        seen[second].append(index)
    return links


def rows_of(batch: list[int], first: int) -> np.ndarray:
    rows = np.zeros(len(batch), INDEX)
    rows["second"], rows["index"] = batch, np.arange(first, first + len(batch))
    return rows


@given(st.lists(seconds, min_size=1, max_size=5))
def test_links_in_batches_as_one_by_one(batches: list[list[int]]) -> None:
    heads, linked, n = no_heads(), [], 0
    for batch in batches:
        rows = rows_of(batch, n)
        link(rows, heads)
        linked += list(zip(rows["local"].tolist(), rows["pre"].tolist(), strict=True))
        n += len(batch)
    everything = [second for batch in batches for second in batch]
    assert linked == model(everything)
    for second in range(3600):
        assert heads.count[second] == everything.count(second)


@given(seconds, st.integers(0, 60))
def test_heads_are_rebuilt_from_any_point(everything: list[int], known: int) -> None:
    rows = rows_of(everything, 0)
    whole = no_heads()
    link(rows, whole)
    rebuilt = no_heads()
    link(rows_of(everything[:known], 0), rebuilt) if everything[:known] else None
    rest = rows[known:]
    catch_up(rest["second"], rest["index"], *rebuilt)
    assert (rebuilt.last == whole.last).all()
    assert (rebuilt.count == whole.count).all()


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), min_size=1, max_size=50))
def test_things_are_placed_one_after_another_per_file(things: list[tuple[int, int]]) -> None:
    ends = np.arange(10, dtype=np.int64) * 1000
    expected, model_ends = [], ends.tolist()
    for key, size in things:
        expected.append(model_ends[key])
        model_ends[key] += size
    keys, sizes = (np.array(column, np.int64) for column in zip(*things, strict=True))
    assert place(keys, sizes, ends).tolist() == expected
    assert ends.tolist() == model_ends


def test_chain_keeps_numbers_in_their_dtype() -> None:
    heads = Heads(np.full(4, NONE32, np.uint32), np.zeros(4, np.uint32))
    rank, previous = chain(np.array([1, 1, 2]), np.array([7, 8, 9], np.uint32), *heads)
    assert rank.dtype == previous.dtype == np.uint32
    assert (rank.tolist(), previous.tolist()) == ([0, 1, 0], [NONE32, 7, NONE32])


@pytest.mark.parametrize("dtype", [INDEX, DISPATCH, RECORD])
@pytest.mark.parametrize("n", [1, 95, 96, 1500])
@pytest.mark.parametrize("alike", [0, 7, 64])
def test_row_crcs_are_crc32c_of_the_bytes_before(dtype: np.dtype, n: int, alike: int) -> None:
    crc = RowCrc(dtype)
    rows = np.frombuffer(np.random.default_rng(n).bytes(n * dtype.itemsize), dtype).copy()
    rows.view(np.uint8).reshape(n, -1)[:, :alike] = 5
    crc.seal(rows)
    name = dtype.names[-1]
    assert [masked(google_crc32c.value(row.tobytes()[:-4])) for row in rows] == rows[name].tolist()
    assert not len(crc.bad(rows))
    rows.view(np.uint8)[n // 2 * dtype.itemsize + 5] ^= 4
    assert crc.bad(rows).tolist() == [n // 2]


@pytest.mark.parametrize("dtype", [INDEX, DISPATCH, RECORD])
def test_a_checksum_of_rows_tells_what_is_in_them(dtype: np.dtype) -> None:
    """Unmasked, rows that end with their own CRC have one checksum, whatever they are."""
    sums = set()
    for seed in range(20):
        rows = np.frombuffer(np.random.default_rng(seed).bytes(10 * dtype.itemsize), dtype).copy()
        RowCrc(dtype).seal(rows)
        sums.add(crc32c(rows.tobytes()))
    assert len(sums) == 20


@given(st.binary(max_size=200), st.integers(0, 200))
def test_crc_goes_on_over_any_kind_of_bytes(data: bytes, at: int) -> None:
    assert crc32c(bytearray(data[at:]), crc32c(memoryview(data)[:at])) == google_crc32c.value(data)
