"""Lease tokens: what a consumer sends back to ack, nack or extend.

29 characters of Crockford base32, big-endian, of 18 bytes {group u8, term u32, seq u32, position u16, hour u24,
index u32} and one zero bit at the end. Grant and position are what it means; hour and index let a later leader settle
a message whose grant it never saw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

#: A lease as ACK, NACK and EXTEND carry it.
LEASE = np.dtype([("term", "<u4"), ("seq", "<u4"), ("pos", "<u4"), ("hour", "<u4"), ("index", "<u4")])

#: What a token's bytes are; `hour` begins with the last byte of `pos`, which does not belong to it.
_TOKEN = np.dtype(
    {
        "names": ["group", "term", "seq", "pos", "hour", "index", "spare"],
        "formats": ["u1", ">u4", ">u4", ">u2", ">u4", ">u4", "u1"],
        "offsets": [0, 1, 5, 9, 10, 14, 18],
    }
)

TOKEN_CHARS = 29
_ALPHABET = b"0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LETTERS = np.frombuffer(_ALPHABET, np.uint8)
_VALUES = np.full(256, 255, np.uint8)
_VALUES[_LETTERS] = np.arange(32)
_VALUES[np.frombuffer(_ALPHABET.lower(), np.uint8)] = np.arange(32)


def encode_leases(
    group: int, term: int, seq: int, positions: Sequence[int] | NDArray[np.integer],
    hours: Sequence[int] | NDArray[np.integer], indexes: Sequence[int] | NDArray[np.integer],
) -> list[str]:  # fmt: skip
    """One token per position of the grant {term, seq}."""
    raw = np.zeros((len(positions), 19), np.uint8)
    raw[:, 0] = group
    raw[:, 1:5] = _big_endian([term], ">u4")
    raw[:, 5:9] = _big_endian([seq], ">u4")
    raw[:, 9:11] = _big_endian(positions, ">u2")
    raw[:, 11:14] = _big_endian(hours, ">u4")[:, 1:]
    raw[:, 14:18] = _big_endian(indexes, ">u4")
    bits = np.unpackbits(raw, axis=1)[:, : TOKEN_CHARS * 5].reshape(-1, TOKEN_CHARS, 5)
    text = _LETTERS[np.packbits(bits, axis=2)[:, :, 0] >> 3].tobytes().decode()
    return [text[at : at + TOKEN_CHARS] for at in range(0, len(text), TOKEN_CHARS)]


def _big_endian(values: Sequence[int] | NDArray[np.integer], layout: str) -> NDArray[np.uint8]:
    array = np.asarray(values).astype(layout)
    return array.view(np.uint8).reshape(len(array), array.itemsize)


def decode_leases(group: int, tokens: Sequence[str]) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
    """(LEASE rows, ok): ok is False, and the row zero, where the token is malformed or of another group."""
    rows = np.zeros(len(tokens), LEASE)
    ok = np.fromiter((len(t) == TOKEN_CHARS and t.isascii() for t in tokens), bool, len(tokens))
    if ok.any():
        good = tokens if ok.all() else [t for t, fine in zip(tokens, ok, strict=True) if fine]
        parsed, fine = _parse(group, "".join(good).encode())
        rows[ok] = parsed
        ok[ok] = fine
        rows[~ok] = 0
    return rows, ok


def _parse(group: int, text: bytes) -> tuple[NDArray[np.void], NDArray[np.bool_]]:
    values = _VALUES[np.frombuffer(text, np.uint8)].reshape(-1, TOKEN_CHARS)
    bits = np.unpackbits(values[:, :, None], axis=2)[:, :, 3:].reshape(len(values), -1)
    raw = np.packbits(bits, axis=1)  # 145 bits: 18 bytes, and a last byte that holds the spare bit
    rows = np.zeros(len(raw), LEASE)
    fields = raw.view(_TOKEN)[:, 0]
    for name in ("term", "seq", "pos", "index"):
        rows[name] = fields[name]
    rows["hour"] = fields["hour"] & 0xFFFFFF
    fine = (values < 32).all(axis=1) & (fields["group"] == group) & (fields["spare"] == 0)
    return rows, fine
