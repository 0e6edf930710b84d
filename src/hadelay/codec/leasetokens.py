"""Lease tokens, which a consumer sends back to ack, nack or extend.

A token has 29 characters of Crockford base32, big-endian, of 18 bytes {group u8, term u32, seq u32, position u16, hour
u24, index u32} and one zero bit at the end. Grant and position name the lease; hour and index let a later leader settle
a message whose grant that leader never saw.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import Mask, Rows

#: Layout of a lease in an ACK, NACK or EXTEND.
LEASE = np.dtype([("term", "<u4"), ("seq", "<u4"), ("pos", "<u4"), ("hour", "<u4"), ("index", "<u4")])

#: Layout of a token's 18 bytes. `hour` (3 bytes) is read as 4 bytes, of which the first is the last byte of `pos` and
#: is masked.
_TOKEN = np.dtype(
    {
        "names": ["group", "term", "seq", "pos", "hour", "index"],
        "formats": ["u1", ">u4", ">u4", ">u2", ">u4", ">u4"],
        "offsets": [0, 1, 5, 9, 10, 14],
    }
)

TOKEN_CHARS = 29
_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
#: Table: value of ten bits → the two base32 characters for this value.
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
#: Table: character of a token → the digit that Python's int() reads in base 32, or "!", which int() refuses.
_DIGITS = bytearray(b"!" * 256)
for _letters in (_ALPHABET, _ALPHABET.lower()):
    for _letter, _digit in zip(_letters.encode(), b"0123456789abcdefghijklmnopqrstuv", strict=True):
        _DIGITS[_letter] = _digit
_NO_TOKEN = bytes(_TOKEN.itemsize)


def encode_leases(
    group: int,
    term: int,
    seq: int,
    positions: Sequence[int] | NDArray[np.integer],
    hours: Sequence[int] | NDArray[np.integer],
    indexes: Sequence[int] | NDArray[np.integer],
) -> list[str]:
    """Encode one lease token for each of these positions of the grant {term, seq}."""
    pairs, letters = _PAIRS, _ALPHABET
    # A token is 144 bits and a zero bit, 5 bits a character, encoded as three integers: `first`, 60 bits that all
    # tokens of the grant share; `v`, the next 60 bits; `w`, the last 24 bits and the zero bit.
    first = group << 52 | term << 20 | seq >> 12
    head = (
        f"{pairs[first >> 50]}{pairs[first >> 40 & 1023]}{pairs[first >> 30 & 1023]}{pairs[first >> 20 & 1023]}"
        f"{pairs[first >> 10 & 1023]}{pairs[first & 1023]}"
    )
    tokens = []
    columns = np.asarray(positions).tolist(), np.asarray(hours).tolist(), np.asarray(indexes).tolist()
    for place, hour, index in zip(*columns, strict=True):
        v = (seq & 0xFFF) << 48 | place << 32 | hour << 8 | index >> 24
        w = (index & 0xFFFFFF) << 1
        tokens.append(
            f"{head}{pairs[v >> 50]}{pairs[v >> 40 & 1023]}{pairs[v >> 30 & 1023]}{pairs[v >> 20 & 1023]}"
            f"{pairs[v >> 10 & 1023]}{pairs[v & 1023]}{pairs[w >> 15]}{pairs[w >> 5 & 1023]}{letters[w & 31]}"
        )
    return tokens


def decode_leases(group: int, tokens: Sequence[str]) -> tuple[Rows, Mask]:
    """Decode tokens into (LEASE rows, ok). For an invalid token, or a token of another Raft group, ok is False and the
    row is zero."""
    raw = [_parse(group, token) for token in tokens]
    fields = np.frombuffer(b"".join(raw), _TOKEN)
    rows = np.zeros(len(tokens), LEASE)
    for name in ("term", "seq", "pos", "index"):
        rows[name] = fields[name]
    rows["hour"] = fields["hour"] & 0xFFFFFF
    return rows, np.array([found is not _NO_TOKEN for found in raw], np.bool_)


def group_of(token: str) -> int | None:
    """Number of the Raft group that issued a token; None for a text that has not the length of a token, or whose
    first two characters are no base32 digits."""
    if len(token) == TOKEN_CHARS:
        try:
            return int(token[:2].encode("ascii").translate(_DIGITS), 32) >> 2
        except ValueError:
            pass
    return None


def _parse(group: int, token: str) -> bytes:
    if len(token) == TOKEN_CHARS:
        try:
            value = int(token.encode("ascii").translate(_DIGITS), 32)
        except ValueError:
            return _NO_TOKEN
        if value >> 137 == group and not value & 1:
            return (value >> 1).to_bytes(_TOKEN.itemsize, "big")
    return _NO_TOKEN
