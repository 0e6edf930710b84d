"""Encodes the answers to publishes."""

from collections.abc import Iterator
from itertools import islice

import msgspec
import numpy as np
from msgpack import Packer
from numpy.typing import NDArray

from hadelay.api.publishing import BatchResult
from hadelay.api.service import Receipts
from hadelay.api.text import format_instant
from hadelay.errors import HadelayError
from hadelay.http.bodies import ITEM, RequestTurns
from hadelay.model import Draft, encode_id

#: Limit of results encoded before other requests have their turn.
_RESULTS = 250
_JSON = (b'{"id":"', b'","deliver_at":"', b'"},', b'{"results":[', b"]}")
# Parts of MessagePack answers: maps {id: 13 characters, deliver_at: 24 characters}, in a list `results`.
_MSGPACK = (b"\x82\xa2id\xad", b"\xaadeliver_at\xb8", b"", b"\x81\xa7results", b"")
#: One packer for all answers, because a packer has a buffer of 1 MiB.
_array_header = Packer().pack_array_header


def one(draft: Draft, receipts: Receipts) -> tuple[int, str, bytes]:
    """Answer to one published message: (HTTP status, message id, JSON body). Raises the error of a refused message."""
    if receipts.problems:
        raise receipts.problems[0]
    message_id = encode_id(receipts.ids[0])
    tail = ',"key":null' if draft.key is None else f',"key":{msgspec.json.encode(draft.key.decode()).decode()}'
    status = 201
    if receipts.duplicates:
        status, tail = 200, tail + ',"duplicate":true'
    if receipts.replaced:
        tail += f',"replaced":"{encode_id(receipts.replaced[0])}"'
    at = format_instant(receipts.deliver_at_ms[0])
    return status, message_id, f'{{"id":"{message_id}","topic":"{draft.topic}","deliver_at":"{at}"{tail}}}'.encode()


async def batch(
    receipts: Receipts, problems: dict[int, HadelayError], total: int, msgpack: bool, turns: RequestTurns
) -> bytes:
    """Encode the answer to a batch of `total` items. problems: refusals before the commit, by position in the batch."""
    if not problems and not receipts.problems and not receipts.duplicates and not receipts.replaced:
        return _plain(receipts, msgpack)
    return await encoded(mixed(receipts, problems, total), total, msgpack, turns)


async def encoded(results: Iterator[BatchResult[str]], total: int, msgpack: bool, turns: RequestTurns) -> bytes:
    """Encode the results of the `total` items of a batch."""
    encode = msgspec.msgpack.encode if msgpack else msgspec.json.encode
    parts: list[bytes] = []
    while some := [encode(result) for result in islice(results, _RESULTS)]:
        parts += some
        turns.count(ITEM * len(some) + sum(map(len, some)))
        if len(parts) < total:
            await turns.next()
    if msgpack:
        return b"".join((_MSGPACK[3], _array_header(total), *parts))
    return b"%b%b%b" % (_JSON[3], b",".join(parts), _JSON[4])


def _plain(receipts: Receipts, msgpack: bool) -> bytes:
    """Encode receipts without refusals and duplicates: all have the same width, so the answer is a matrix of bytes."""
    lead, middle, tail, head, end = _MSGPACK if msgpack else _JSON
    count, width = len(receipts.ids), len(lead) + ID_CHARS + len(middle) + INSTANT_CHARS + len(tail)
    rows = np.empty((count, width), np.uint8)
    at = 0
    for piece in (lead, ids_text(receipts.ids), middle, instants_text(receipts.deliver_at_ms), tail):
        columns = np.frombuffer(piece, np.uint8) if isinstance(piece, bytes) else piece
        rows[:, at : at + columns.shape[-1]] = columns
        at += columns.shape[-1]
    if msgpack:
        return head + _array_header(count) + rows.tobytes()  # type: ignore[no-any-return]
    return head + rows.tobytes()[: -1 if count else None] + end


def mixed(receipts: Receipts, problems: dict[int, HadelayError], total: int) -> Iterator[BatchResult[str]]:
    """Results of the items of a batch, in their order. problems: see `batch`."""
    row = 0
    for place in range(total):
        error = problems.get(place)
        if error is None:
            error = receipts.problems.get(row)
            if error is None:
                replaced = receipts.replaced.get(row)
                result = BatchResult(
                    encode_id(receipts.ids[row]),
                    format_instant(receipts.deliver_at_ms[row]),
                    row in receipts.duplicates,
                    None if replaced is None else encode_id(replaced),
                )
            row += 1
        if error is not None:
            result = BatchResult(error=error.document())
        yield result


_LETTERS = np.frombuffer(b"0123456789ABCDEFGHJKMNPQRSTVWXYZ", np.uint8)
_SHIFTS = np.arange(60, -1, -5, dtype=np.uint64)
ID_CHARS = 13
INSTANT_CHARS = 24
_TWO = np.frombuffer("".join(f"{n:02d}" for n in range(60)).encode(), np.uint8).reshape(60, 2)
_THREE = np.frombuffer("".join(f"{n:03d}" for n in range(1000)).encode(), np.uint8).reshape(1000, 3)


def ids_text(ids: list[int]) -> NDArray[np.uint8]:
    """Text of the ids: an array of n × 13 characters."""
    values = np.array(ids, np.uint64)
    return _LETTERS[((values[:, None] >> _SHIFTS) & np.uint64(31)).astype(np.intp)]


def instants_text(times_ms: list[int]) -> NDArray[np.uint8]:
    """RFC 3339 text of the times: an array of n × 24 characters."""
    hours, rest = np.divmod(np.array(times_ms, np.int64), 3_600_000)
    distinct, which = np.unique(hours, return_inverse=True)
    text = np.datetime_as_string(distinct.astype("datetime64[h]"), unit="h").astype("S13")
    out = np.empty((len(times_ms), INSTANT_CHARS), np.uint8)
    out[:, :13] = text.view(np.uint8).reshape(-1, 13)[which]
    out[:, 13] = out[:, 16] = ord(":")
    out[:, 14:16] = _TWO[rest // 60_000]
    out[:, 17:19] = _TWO[rest // 1000 % 60]
    out[:, 19] = ord(".")
    out[:, 20:23] = _THREE[rest % 1000]
    out[:, 23] = ord("Z")
    return out
