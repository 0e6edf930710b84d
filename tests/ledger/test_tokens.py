from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadelay.codec.leasetokens import TOKEN_CHARS, decode_leases, encode_leases

u32 = st.integers(0, 2**32 - 1)
positions = st.lists(st.tuples(st.integers(0, 65_535), st.integers(0, 2**24 - 1), u32), min_size=1, max_size=20)


@given(group=st.integers(0, 255), term=u32, seq=u32, rows=positions)
def test_tokens_there_and_back(group: int, term: int, seq: int, rows: list[tuple[int, int, int]]) -> None:
    tokens = encode_leases(group, term, seq, *(list(column) for column in zip(*rows, strict=True)))
    assert all(len(token) == TOKEN_CHARS for token in tokens)
    found, ok = decode_leases(group, [t.lower() for t in tokens])
    assert ok.all()
    assert found.tolist() == [(term, seq, *row) for row in rows]
    assert not decode_leases(group ^ 1, tokens)[1].any()


@given(st.lists(st.text(max_size=40), max_size=5))
def test_any_text_is_a_token_or_not(tokens: list[str]) -> None:
    rows, ok = decode_leases(0, tokens)
    assert len(rows) == len(ok) == len(tokens)
    assert not rows[~ok].view(np.uint8).any()


@pytest.mark.parametrize("bad", ["", "0" * 28, "0" * 30, "0" * 28 + "1", "I" + "0" * 28, "é" * 29, "0" * 28 + "\n"])
def test_malformed(bad: str) -> None:
    good = encode_leases(0, 1, 2, [3], [4], [5])[0]
    rows, ok = decode_leases(0, [bad, good, bad])
    assert ok.tolist() == [False, True, False]
    assert rows[1].tolist() == (1, 2, 3, 4, 5)


def test_the_layout() -> None:
    # group 01, term 2, seq 3, position 4, hour 5, index 6
    (token,) = encode_leases(1, 2, 3, [4], [5], [6])
    bits = "".join(f"{'0123456789ABCDEFGHJKMNPQRSTVWXYZ'.index(c):05b}" for c in token)
    assert int(bits, 2) << 7 >> 8 == int("01 00000002 00000003 0004 000005 00000006".replace(" ", ""), 16)
