"""Decodes a batch of messages in slices, between which other requests have their turn (ADR 190).

A decoder holds the interpreter until it has finished, in a thread too. So a large batch is first cut at the ends of its
items, which can pause anywhere and counts the items; then a few items at a time are decoded. A large item is cut again,
into its members: only its payload may be large.

The cuts are not trusted: each group between two cuts is decoded as a list of its own, so a wrong cut is refused.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from codecs import getincrementaldecoder
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgpack
import msgspec
import numpy as np

from hadelay.api.publishrequest import BatchItem, UsualItem
from hadelay.errors import BadRequest, HadelayError, TooLarge, UnsupportedMediaType
from hadelay.http.answers import JSON, MSGPACK, NDJSON
from hadelay.http.bodies import ITEM
from hadelay.http.decoding import MSGPACK_NAMES
from hadelay.rules.documents import decoded

#: Limits of one step of decoding: bytes of JSON to cut into items, bytes of MessagePack to cut into items, bytes of
#: items to decode, and number of items to decode.
_CUT_JSON, _CUT_MSGPACK, _DECODE, _ITEMS = 64 << 10, 256 << 10, 128 << 10, 500
#: Weight limit of a JSON batch that is decoded in one step; weight: number of bytes, plus _COMMA for each comma.
_LIGHT, _COMMA = 1 << 20, 100
#: Limit of the number of members (fields) of a large batch item; an item with more is refused.
_MEMBERS = 32
#: Number of JSON characters that one byte of text takes at most: six, as a Unicode escape.
_GROWTH = 6
#: Size limit (bytes) of an item's members other than the payload, and of MessagePack payloads to convert to JSON.
_BESIDES = 128 << 10
#: Divisors of work where decoding is fast: of the weight of JSON batches up to _LIGHT; and of the bytes of items above
#: _DECODE.
_FRACTION, _LARGE = 4, 32


class Slice(NamedTuple):
    """Result of one slice of work: items in order, with an error in the place of an item that is not decoded."""

    items: list[Any]
    #: Work that the slice took: bytes decoded (for a large payload a fraction of them), plus ITEM for each item.
    work: int
    #: Whether another slice follows.
    more: bool = True


Slices = Iterator[Slice]
#: Generator that finds the end of each value in a batch: yields a Slice per part searched; returns the ends' offsets.
_Cut = Generator[Slice, None, list[int]]


class _JsonItem(BatchItem):
    """Batch item that keeps the JSON of `body` as sent: 1e3 stays 1e3, and nothing is parsed twice."""

    body: msgspec.Raw = msgspec.Raw(b"")


_decode_json = msgspec.json.Decoder(list[_JsonItem]).decode
_decode_lines = msgspec.json.Decoder(_JsonItem).decode_lines
_decode_usual = msgspec.msgpack.Decoder(list[UsualItem]).decode
_decode_any = msgspec.msgpack.Decoder(list[BatchItem]).decode
_skim_json = msgspec.json.Decoder(list[msgspec.Raw]).decode
_skim_lines = msgspec.json.Decoder(msgspec.Raw).decode_lines


def _decode_msgpack(data: bytes) -> list[Any]:
    try:
        return _decode_usual(data)
    except msgspec.DecodeError:
        return _decode_any(data)


def slices(data: bytes, kind: str, max_items: int, max_body_bytes: int) -> Slices:
    """Decode a batch in slices. kind: media type of the batch. Raises TooLarge, BadRequest, UnsupportedMediaType."""
    lines = kind in (NDJSON, "application/ndjson", "application/jsonl")
    if lines or kind == JSON or kind.endswith("+json"):
        if len(data) <= _LIGHT and (weight := _weight(data, lines)) <= _LIGHT:
            return _passed(_light_json(data, max_items, lines), weight // _FRACTION, last=True)
        return _json(data, max_items, max_body_bytes, lines)
    if kind in MSGPACK_NAMES:
        if len(data) <= _DECODE:
            return _passed(_light_msgpack(data, max_items), len(data), last=True)
        return _msgpack(data, max_items)
    sent = repr(kind) if kind else "a body without Content-Type"
    raise UnsupportedMediaType(f"a batch is {JSON}, {NDJSON} or {MSGPACK}, not {sent}")


def _weight(data: bytes, lines: bool) -> int:
    return len(data) + _COMMA * (data.count(b",") + (data.count(b"}") if lines else 0))


def _passed(items: list[Any], work: int, *, last: bool = False) -> Slices:
    """Split decoded items into slices. work: work of decoding all of them, which counts for the first slice. last:
    whether no further items of the batch follow."""
    for first in range(0, max(len(items), 1), _ITEMS):
        some = items[first : first + _ITEMS]
        yield Slice(some, (0 if first else work) + ITEM * len(some), not last or first + _ITEMS < len(items))


def _work(size: int) -> int:
    """Work of decoding `size` bytes, as in Slice. More than _DECODE bytes are one item, which is mostly payload: that
    decodes faster, so it counts as less work."""
    return size if size <= _DECODE else size // _LARGE


def _check_count(items: int, at_most: int) -> None:
    if items > at_most:
        raise TooLarge(f"{items} items; a batch has at most {at_most}")


def _groups(ends: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield groups of items to decode together: (first item's number, begin and end as offsets, number of items)."""
    first = 0
    while first < len(ends) - 1:
        fit = bisect_right(ends, ends[first] + _DECODE) - 1
        last = max(first + 1, min(fit, first + _ITEMS))
        yield first, ends[first], ends[last], last - first
        first = last


def _decoded(decode: Callable[[bytes], list[Any]], data: bytes, number: int, at: int) -> list[Any]:
    """Decode items. number, at: number and offset of the first item in the batch; errors name the items by both."""
    try:
        return decoded(decode, data, BatchItem)  # type: ignore[no-any-return]
    except BadRequest as error:
        detail = _NUMBER.sub(lambda found: str(int(found[0]) + number), error.detail, count=1)
        raise BadRequest(_OFFSET.sub(lambda found: str(int(found[0]) + at), detail)) from None


_NUMBER, _OFFSET = re.compile(r"(?<=body\[)\d+|(?<=\$\[)\d+"), re.compile(r"(?<=\(byte )\d+(?=\))")


def _light_json(data: bytes, max_items: int, lines: bool) -> list[Any]:
    decode, skim = (_decode_lines, _skim_lines) if lines else (_decode_json, _skim_json)

    def checked(data: bytes) -> list[Any]:
        data.decode()  # check UTF-8 here: msgspec does not check it in Raw fields
        if data.count(b"{") > max_items:
            _check_count(len(skim(data)), max_items)
        return decode(data)

    return decoded(checked, data, BatchItem)  # type: ignore[no-any-return]


def _json(data: bytes, max_items: int, max_body_bytes: int, lines: bool) -> Slices:
    ends = yield from _cut_json(data, b"" if lines else b"[", max_items, f"a batch has at most {max_items}")
    largest, total = _GROWTH * max_body_bytes + _BESIDES, 0
    for number, start, end, count in _groups(ends):
        piece = data[start + 1 : end]
        problem = None
        if len(ends) == 2 and len(piece) <= _DECODE and not piece.strip(_SPACE):
            return  # the batch is empty: nothing is left to decode
        if len(piece) > _DECODE:
            problem = yield from _problem_of_large_json(piece, number, largest)
        if problem is not None:
            items = [problem]
        elif lines:
            items = _decoded(_decode_lines, piece, number, start + 1)
        else:
            items = _decoded(_decode_json, b"[%b]" % piece, number, start)
            if len(items) != count:
                raise BadRequest(f"body: JSON is malformed: an item is missing before byte {end}")
        total += len(items)
        _check_count(total, max_items)  # count again: a line may have several items
        yield from _passed(items, _work(len(piece)) if problem is None else 0, last=end == ends[-1])


def _problem_of_large_json(item: bytes, number: int, largest: int) -> Generator[Slice, None, HadelayError | None]:
    """Check a large JSON item before it is decoded: returns the error for it, or None."""
    if len(item) > largest:
        return TooLarge(f"an item has {len(item)} bytes; at most {largest} are allowed (derived from max_body_bytes)")
    if item.lstrip(_SPACE)[:1] != b"{":
        return None  # the item is not an object: the decoder reports that
    ends = yield from _cut_json(item, b"{", _MEMBERS, f"body[{number}] has at most {_MEMBERS}")
    for start, end in pairwise(ends):
        if end - start > _BESIDES and not _PAYLOAD.match(item, start + 1):
            return TooLarge(f"a member has {end - start} bytes; only body and body_base64 may exceed {_BESIDES}")
    return None


_SPACE = b" \t\r\n"
_PAYLOAD = re.compile(rb'[ \t\r\n]{0,1000}"body(?:_base64)?"')
#: Limit of the depth of nested values, about that of the decoder; deeper batches are refused.
_DEEPEST = 1_000
#: Tables: JSON byte → its kind, if it ends or nests values (_KINDS); kind → change of the nesting depth (_STEPS).
_QUOTE, _OPEN, _CLOSE, _COMMA_KIND, _NEWLINE = 1, 2, 3, 4, 5
_KINDS = np.zeros(256, np.uint8)
for _bytes, _kind in (b'"', _QUOTE), (b"[{", _OPEN), (b"]}", _CLOSE), (b",", _COMMA_KIND):
    _KINDS[list(_bytes)] = _kind
_KINDS_OF_LINES = _KINDS.copy()
_KINDS_OF_LINES[ord("\n")] = _NEWLINE
_STEPS = np.array([0, 0, 1, -1, 0, 0], np.int8)


def _cut_json(data: bytes, opening: bytes, at_most: int, limit: str) -> _Cut:
    """Find the ends of JSON values. With `opening`: offsets of the opening bracket, of the commas between its values
    and of the closing bracket. Without: offsets of the newlines between values, and of the bytes before the first and
    behind the last value.

    Raises TooLarge as soon as there are more than `at_most` values, and BadRequest.
    """
    ends: list[int] = [] if opening else [-1]
    at = depth = inside = 0
    utf8 = getincrementaldecoder("utf-8")()
    while at < len(data):
        piece = data[at : at + _CUT_JSON]
        if (len(piece) - len(piece.rstrip(b"\\"))) & 1:  # the piece ends inside an escape: add the escaped byte
            piece = data[at : at + _CUT_JSON + 1]
        _check_utf8(utf8, piece)
        where, kinds, inside = _outside_strings(piece, inside, _KINDS if opening else _KINDS_OF_LINES)
        depths = np.cumsum(_STEPS[kinds], dtype=np.int32) + depth
        if len(depths) and int(depths.max()) > _DEEPEST:
            raise BadRequest(f"body: values are nested deeper than {_DEEPEST}")
        if opening and not ends:
            ends += [at + place for place in _opening(piece, where, opening)]
        ending = (kinds == _COMMA_KIND) & (depths == 1) if opening else (kinds == _NEWLINE) & (depths == 0)
        closed = np.flatnonzero((depths == 0) & (kinds == _CLOSE))[:1] if opening else depths[:0]
        if len(closed):
            ending[closed], ending[closed[0] + 1 :] = True, False
        found = where[ending]
        if not opening and len(found):  # skip empty lines
            found = found[np.diff(found, prepend=-2) > 1]
        if len(ends) + len(found) > at_most + 1 + (not opening):
            raise TooLarge(f"more than {at_most} {'members' if opening == b'{' else 'items'}: {limit}")
        ends += (found + at).tolist()
        at += len(piece)
        if len(closed):
            if data[ends[-1]] != opening[0] + 2:  # must match: in ASCII, ] is [ + 2, and } is { + 2
                raise BadRequest(f"body: JSON is malformed: wrong closing bracket (byte {ends[-1]})")
            for rest in range(ends[-1] + 1, len(data), _CUT_JSON):
                if data[rest : rest + _CUT_JSON].strip(_SPACE):
                    raise BadRequest(f"body: JSON is malformed: trailing characters (byte {ends[-1] + 1})")
                yield Slice([], _CUT_JSON)
            return ends
        depth = int(depths[-1]) if len(depths) else depth
        yield Slice([], len(piece))
    if opening:
        raise BadRequest("body: Input data was truncated")
    return [*ends, len(data)]


def _check_utf8(decoder: Any, piece: bytes) -> None:
    try:
        decoder.decode(piece)
    except UnicodeDecodeError as error:
        raise BadRequest(f"body: {error}") from None


def _opening(piece: bytes, where: np.ndarray, opening: bytes) -> list[int]:
    """Offset of the first bracket, in a list; [] if all is whitespace. Raises BadRequest for other text."""
    first = int(where[0]) if len(where) else len(piece)
    if piece[:first].strip(_SPACE) or piece[first : first + 1] not in (opening, b""):
        raise BadRequest("body: expected `array`: a batch is a list of messages")
    return [first] if len(where) else []


def _outside_strings(piece: bytes, inside: int, table: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Find the bytes outside strings that end or nest values in a piece of JSON: (their offsets, their kinds, whether
    the piece ends inside a string). inside: whether the piece begins inside a string."""
    if b"\\" in piece:
        piece = piece.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    kinds = table[np.frombuffer(piece, np.uint8)]
    where = np.flatnonzero(kinds)
    kinds = kinds[where]
    quotes = kinds == _QUOTE
    odd = (np.cumsum(quotes, dtype=np.int32) + inside) & 1
    outside = (odd == 0) & ~quotes
    return where[outside], kinds[outside], int(odd[-1]) if len(odd) else inside


def _light_msgpack(data: bytes, max_items: int) -> list[Any]:
    if data[:1] == _ARRAY_32:
        _check_count(int.from_bytes(data[1:5]), max_items)
    items = decoded(_decode_msgpack, data, BatchItem)
    _check_count(len(items), max_items)
    return items  # type: ignore[no-any-return]


_ARRAY_32 = b"\xdd"


def _msgpack(data: bytes, max_items: int) -> Slices:
    ends = yield from _cut_msgpack(data, msgpack.Unpacker.read_array_header, 1, lambda n: _check_count(n, max_items))
    for number, start, end, count in _groups(ends):
        problem = None
        if end - start > _DECODE:
            problem = yield from _problem_of_large_msgpack(data[start:end], number)
        if problem is not None:
            items = [problem]
        else:
            packed = _ARRAY_32 + count.to_bytes(4) + data[start:end]
            items = _decoded(_decode_msgpack, packed, number, start - 5)
        yield from _passed(items, _work(end - start) if problem is None else 0, last=end == ends[-1])


def _problem_of_large_msgpack(item: bytes, number: int) -> Generator[Slice, None, HadelayError | None]:
    """Check a large MessagePack item before it is decoded: returns the error for it, or None."""

    def check(members: int) -> None:
        if members > _MEMBERS:
            raise TooLarge(f"more than {_MEMBERS} members: body[{number}] has at most {_MEMBERS}")

    if item[0] & 0xF0 != 0x80 and item[0] not in b"\xde\xdf":
        return None  # the item is not a map: the decoder reports that
    ends = yield from _cut_msgpack(item, msgpack.Unpacker.read_map_header, 2, check)
    for key, value, end in zip(ends[:-1:2], ends[1::2], ends[2::2], strict=True):
        size, name = end - value, item[key:value]
        if max(size, len(name)) <= _BESIDES:
            continue
        if name not in _PAYLOADS:
            return TooLarge(f"a member has {end - key} bytes; only body and body_base64 may exceed {_BESIDES}")
        if name == _PAYLOADS[0] and item[value] not in _BYTES_OR_TEXT:
            return TooLarge(f"body: {size} bytes of MessagePack to turn into JSON; at most {_BESIDES}, or send bytes")
    return None


_PAYLOADS = (msgspec.msgpack.encode("body"), msgspec.msgpack.encode("body_base64"))
#: First bytes of the MessagePack types bin 8 to 32 and str 8 to 32.
_BYTES_OR_TEXT = b"\xc4\xc5\xc6\xd9\xda\xdb"


def _cut_msgpack(
    data: bytes, header: Callable[[msgpack.Unpacker], int], values_each: int, check: Callable[[int], None]
) -> _Cut:
    """Offsets of the first MessagePack value after the array or map header, and of the end of each value. check: raises
    if the header's count is not allowed."""
    unpacker, ends, values = msgpack.Unpacker(max_buffer_size=len(data)), list[int](), 0
    skip, tell = unpacker.skip, unpacker.tell
    for at in range(0, len(data), _CUT_MSGPACK):
        unpacker.feed(data[at : at + _CUT_MSGPACK])
        try:
            if not ends:
                count = header(unpacker)
                check(count)
                values = values_each * count
                ends.append(unpacker.tell())
            for _ in range(values + 1 - len(ends)):
                skip()
                ends.append(tell())
        except msgpack.OutOfData:
            yield Slice([], len(data[at : at + _CUT_MSGPACK]))
            continue
        except (ValueError, msgpack.UnpackException) as error:
            raise BadRequest(f"body: MessagePack is malformed: {error or type(error).__name__}") from None
        if ends[-1] != len(data):
            raise BadRequest(f"body: MessagePack data is malformed: trailing characters (byte {ends[-1]})")
        return ends
    raise BadRequest("body: Input data was truncated")
