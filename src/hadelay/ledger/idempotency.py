"""Idempotency-Keys: the first answer of a publish, kept for a window, so that a retry is harmless.

There is a table per *epoch* of one window: new keys go to the running table, and look-ups read the running one and the
one before. A key lives at least one window and at most two. When the running table has half of the permitted keys, the
epoch ends early, and the oldest keys go first; `ledger.keys_dropped_early` counts them.
"""

import struct
from collections.abc import Sequence

import numpy as np

from hadelay.codec.formats import Mask, Rows
from hadelay.codec.publishcommand import hash_client_key, hash_key
from hadelay.codec.results import PublishResult, RowCode
from hadelay.ledger.keys import find_key
from hadelay.ledger.state import Ledger
from hadelay.ledger.unique import is_unique
from hadelay.model import Draft

#: Stored answer: fingerprint, number of rows; then ids u8[], deliver_at_ms i8[], codes u1[], maybe ids of others u8[].
_HEAD = struct.Struct("<QI")
#: Layout of a stored answer with a single row and without `others`.
_ONE = struct.Struct("<QIQqB")


def table(epoch: int) -> bytes:
    return b"idem:%d" % epoch


def turn(ledger: Ledger) -> None:
    """Begin a new table (epoch) of Idempotency-Keys if the present one is too old or full; drop the oldest one."""
    settings = ledger.settings
    over = ledger.now_ms >= ledger.key_epoch_ends_ms
    # Periods of `unique_for` count in the limit, and cannot be forgotten early. They take half of it at most; after the
    # limit was lowered, there may be more of them.
    room = settings.idempotency_max_keys - min(ledger.unique_count, settings.idempotency_max_keys // 2)
    if not over and ledger.key_count < room // 2:
        return
    if not over:
        ledger.keys_dropped_early += ledger.key_count_before
    long_ago = ledger.now_ms >= ledger.key_epoch_ends_ms + settings.idempotency_window_ms
    if long_ago and ledger.key_count:
        ledger.tables.drop_table(table(ledger.key_epoch))
        ledger.key_count = 0
    if ledger.key_count_before:
        ledger.tables.drop_table(table(ledger.key_epoch - 1))
    ledger.key_epoch += 1
    ledger.key_count_before, ledger.key_count = ledger.key_count, 0
    ledger.key_epoch_ends_ms = ledger.now_ms + settings.idempotency_window_ms


def repeat(ledger: Ledger, keys: Rows, result: PublishResult) -> tuple[list[int], Mask]:
    """Answer the rows whose Idempotency-Key was seen before. Returns (new keys, rows still to be filed).

    A key that comes twice within one command counts as seen the second time: `remember` copies the first answer.
    """
    new: list[int] = []
    here: set[bytes] = set()
    to_file = bytearray(b"\1" * len(result.ids))
    get = ledger.tables.get
    running, before = table(ledger.key_epoch), table(ledger.key_epoch - 1)
    firsts, counts, prints, digests = _columns(keys)
    # Look at the key of a whole request first: if this key was seen, the keys of the request's rows do not matter.
    for at in sorted(range(len(counts)), key=lambda at: -counts[at]):
        first, count, digest = firsts[at], counts[at], digests[at]
        if not count or not to_file[first]:
            continue
        stored = get(running, digest) if ledger.key_count else None
        if stored is None and ledger.key_count_before:
            stored = get(before, digest)
        if stored is None:
            new.append(at)
            if digest not in here:
                here.add(digest)
                continue
        else:
            _answer(stored, prints[at], first, count, result)
        to_file[first : first + count] = bytes(count)
    return new, np.frombuffer(to_file, bool)


def is_known_hash(ledger: Ledger, digest: bytes) -> bool:
    """Whether the answer under this hash of an Idempotency-Key is remembered."""
    epochs = (ledger.key_epoch, ledger.key_epoch - 1)
    return any(ledger.tables.get(table(epoch), digest) is not None for epoch in epochs)


def is_known(ledger: Ledger, drafts: Sequence[Draft], request_key: bytes | None) -> bool:
    """Whether this node knows a key of the publish, so that the answer may come from an earlier publish."""
    rows = [draft.idem for draft in drafts if draft.idem is not None]
    # Keys as in server/publishing.py: each part of a large batch has a key, a single row has the request's.
    requests = [] if request_key is None else [request_key, b"0:" + request_key]
    digests = [hash_key(b"row", key) for key in [*rows, *requests[:1]]] + [hash_key(b"request", k) for k in requests]
    if any(is_known_hash(ledger, digest) for digest in digests):
        return True
    keys = ((draft.topic, hash_client_key(draft.key)) for draft in drafts if draft.key is not None)
    return any(find_key(ledger, *key) is not None or is_unique(ledger, *key) for key in keys)


def remember(ledger: Ledger, keys: Rows, new: list[int], result: PublishResult) -> None:
    """Store the answers of the Idempotency-Keys that `repeat` found to be new."""
    running = table(ledger.key_epoch)
    firsts, counts, prints, digests = _columns(keys)
    ids, deliver_at_ms, codes = result.ids.tolist(), result.deliver_at_ms.tolist(), result.codes.tolist()
    here: dict[bytes, bytes] = {}
    # Store the key for all rows last: its answer includes the answers that this loop writes for single rows.
    for at in sorted(new, key=counts.__getitem__):
        first, count, digest = firsts[at], counts[at], digests[at]
        if digest in here:
            _answer(here[digest], prints[at], first, count, result)
            continue
        if count == 1:
            value = _ONE.pack(prints[at], 1, ids[first], deliver_at_ms[first], codes[first])
            refused = codes[first] != RowCode.OK
        else:
            rows = slice(first, first + count)
            columns = result.ids[rows], result.deliver_at_ms[rows], result.codes[rows]
            value = _HEAD.pack(prints[at], count) + b"".join(column.tobytes() for column in columns)
            refused = bool(columns[2].all())
        if result.others is not None and (others := result.others[first : first + count]).any():
            value += others.tobytes()
        here[digest] = value
        if not refused:
            # The answer is not stored if all rows are refused: a retry is judged anew.
            ledger.tables.put(running, digest, value)
            ledger.key_count += 1


def _columns(keys: Rows) -> tuple[list[int], list[int], list[int], list[bytes]]:
    """Columns of KEY_ROW as Python values: first, count, fingerprint and hash of each key."""
    raw = keys["hash"].tobytes()
    digests = [raw[at : at + 16] for at in range(0, len(raw), 16)]
    return keys["first"].tolist(), keys["count"].tolist(), keys["fingerprint"].tolist(), digests


def _answer(stored: bytes, fingerprint: int, first: int, count: int, result: PublishResult) -> None:
    rows = slice(first, first + count)
    kept_print, kept_count = _HEAD.unpack_from(stored)
    if kept_print != fingerprint or kept_count != count:
        result.codes[rows] = RowCode.KEY_CONFLICT
        return
    at = _HEAD.size
    result.ids[rows] = np.frombuffer(stored, np.uint64, count, at)
    result.deliver_at_ms[rows] = np.frombuffer(stored, np.int64, count, at + 8 * count)
    result.codes[rows] = np.frombuffer(stored, np.uint8, count, at + 16 * count)
    result.duplicate[rows] = result.codes[rows] == RowCode.OK
    at += 17 * count
    if at < len(stored):
        result.note_others(rows, np.frombuffer(stored, np.uint64, count, at))
