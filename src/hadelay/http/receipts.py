"""Answers to publishes, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import msgspec
import numpy as np

from hadelay.errors import HadelayError
from hadelay.http.turns import ITEM, Turns
from hadelay.http.types import BatchResult
from hadelay.http.values import ID_CHARS, INSTANT_CHARS, format_instant, ids_text, instants_text
from hadelay.model import encode_id
from hadelay.server.api import Receipts

#: Results that are encoded in one slice.
_RESULTS = 250
_JSON = (b'{"id":"', b'","deliver_at":"', b'"},', b'{"results":[', b"]}")
# fixmap of 2, fixstr of 2, fixstr of 13 … fixstr of 10, fixstr of 24
_MSGPACK = (b"\x82\xa2id\xad", b"\xaadeliver_at\xb8", b"", b"\x81\xa7results", b"")


def one(topic: str, key: bytes | None, receipts: Receipts) -> tuple[int, str, bytes]:
    """(status, id, JSON) of a publish of one message. Raises what the row was refused for."""
    if receipts.problems:
        raise receipts.problems[0]
    message_id = encode_id(receipts.ids[0])
    tail = ',"key":null' if key is None else f',"key":{msgspec.json.encode(key.decode()).decode()}'
    status = 201
    if receipts.duplicates:
        status, tail = 200, tail + ',"duplicate":true'
    if receipts.replaced:
        tail += f',"replaced":"{encode_id(receipts.replaced[0])}"'
    at = format_instant(receipts.deliver_at_ms[0])
    return status, message_id, f'{{"id":"{message_id}","topic":"{topic}","deliver_at":"{at}"{tail}}}'.encode()


async def batch(
    receipts: Receipts, problems: dict[int, HadelayError], total: int, msgpack: bool, turns: Turns
) -> bytes:
    """The answer to a batch of `total`. `problems`: items refused before they got to the log, by their place."""
    if not problems and not receipts.problems and not receipts.duplicates and not receipts.replaced:
        return _plain(receipts, msgpack)
    encode = msgspec.msgpack.encode if msgpack else msgspec.json.encode
    parts: list[bytes] = []
    results = _mixed(receipts, problems, total)
    while some := [encode(result) for result in islice(results, _RESULTS)]:
        parts += some
        turns.count(ITEM * len(some) + sum(map(len, some)))
        if len(parts) < total:
            await turns.next()
    if msgpack:
        return b"".join((_MSGPACK[3], _array_header(total), *parts))
    return b"%b%b%b" % (_JSON[3], b",".join(parts), _JSON[4])


def _plain(receipts: Receipts, msgpack: bool) -> bytes:
    """Every item has the same width: the whole answer is one matrix of bytes."""
    lead, middle, tail, head, end = _MSGPACK if msgpack else _JSON
    count, width = len(receipts.ids), len(lead) + ID_CHARS + len(middle) + INSTANT_CHARS + len(tail)
    rows = np.empty((count, width), np.uint8)
    at = 0
    for piece in (lead, ids_text(receipts.ids), middle, instants_text(receipts.deliver_at_ms), tail):
        columns = np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else piece
        rows[:, at : at + columns.shape[-1]] = columns
        at += columns.shape[-1]
    if msgpack:
        return head + _array_header(count) + rows.tobytes()
    return head + rows.tobytes()[: -1 if count else None] + end


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    return b"\xdc" + count.to_bytes(2, "big") if count < 1 << 16 else b"\xdd" + count.to_bytes(4, "big")


def _mixed(receipts: Receipts, problems: dict[int, HadelayError], total: int) -> Iterator[BatchResult]:
    row = 0
    for place in range(total):
        error = problems.get(place)
        if error is None:
            error = receipts.problems.get(row)
            if error is None:
                result = BatchResult(encode_id(receipts.ids[row]), format_instant(receipts.deliver_at_ms[row]))
                if row in receipts.duplicates:
                    result.duplicate = True
                if row in receipts.replaced:
                    result.replaced = encode_id(receipts.replaced[row])
            row += 1
        if error is not None:
            result = BatchResult(error=error.document())
        yield result
