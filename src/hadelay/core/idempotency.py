"""Idempotency-Keys: the first answer of a publish, kept for a window, so that a retry is harmless.

Two tables by *epoch* (state.now ÷ window): the running one is written, it and the one before are asked. A key lives at
least one window and at most two. When the running table is half of the limit an epoch ends early, so the oldest keys
go first; `state.keys_dropped_early` counts them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hadelay.core.results import PublishResult, RowCode

if TYPE_CHECKING:
    from hadelay.core.state import DelayState

#: fingerprint, rows; then ids u8[], deliver_at_ms i8[], codes u1[]
_HEAD = struct.Struct("<QI")
_ONE = struct.Struct("<QIQqB")


def table(epoch: int) -> bytes:
    return b"idem:%d" % epoch


def turn(state: DelayState) -> None:
    """Begin a new epoch when the window is over, or when the running table is full."""
    settings = state.settings
    over = state.now_ms >= state.key_epoch_ends_ms
    if not over and state.key_count < settings.idempotency_max_keys // 2:
        return
    if not over:
        state.keys_dropped_early += state.key_count_before
    long_ago = state.now_ms >= state.key_epoch_ends_ms + settings.idempotency_window_ms
    if long_ago and state.key_count:
        state.tables.drop_table(table(state.key_epoch))
        state.key_count = 0
    if state.key_count_before:
        state.tables.drop_table(table(state.key_epoch - 1))
    state.key_epoch += 1
    state.key_count_before, state.key_count = state.key_count, 0
    state.key_epoch_ends_ms = state.now_ms + settings.idempotency_window_ms


def repeat(state: DelayState, keys: NDArray[np.void], result: PublishResult, take: NDArray[np.bool_]) -> list[int]:
    """Answer the rows of keys that were seen before, and clear them in `take`. Returns the keys that are new.

    A key that comes twice within one command counts as seen the second time: `remember` copies it from the first.
    """
    new: list[int] = []
    here: set[bytes] = set()
    get = state.tables.get
    running, before = table(state.key_epoch), table(state.key_epoch - 1)
    firsts, counts, prints = keys["first"].tolist(), keys["count"].tolist(), keys["fingerprint"].tolist()
    digests = _digests(keys)
    # The key of a whole request before those of its rows: if it was seen, they do not matter any more.
    for at in sorted(range(len(counts)), key=lambda at: -counts[at]):
        first, count, digest = firsts[at], counts[at], digests[at]
        if not count or not take[first : first + count].all():
            continue  # the request's key answered these rows already
        stored = get(running, digest) if state.key_count else None
        if stored is None and state.key_count_before:
            stored = get(before, digest)
        if stored is not None:
            take[first : first + count] = False
            _answer(stored, prints[at], first, count, result)
        else:
            if digest in here:
                take[first : first + count] = False
            here.add(digest)
            new.append(at)
    return new


def remember(state: DelayState, keys: NDArray[np.void], new: list[int], result: PublishResult) -> None:
    """Keep the answers of the keys that `repeat` found to be new."""
    running = table(state.key_epoch)
    firsts, counts, prints = keys["first"].tolist(), keys["count"].tolist(), keys["fingerprint"].tolist()
    digests = _digests(keys)
    here: dict[bytes, bytes] = {}
    # The key of a whole request last: its answer includes what the keys of rows still have to fill in.
    for at in sorted(new, key=counts.__getitem__):
        first, count, digest = firsts[at], counts[at], digests[at]
        if digest in here:
            _answer(here[digest], prints[at], first, count, result)
            continue
        rows = slice(first, first + count)
        if count == 1:
            code = int(result.codes[first])
            value = _ONE.pack(prints[at], 1, int(result.ids[first]), int(result.deliver_at_ms[first]), code)
        else:
            value = b"".join(
                (_HEAD.pack(prints[at], count), result.ids[rows].tobytes(), result.deliver_at_ms[rows].tobytes(),
                 result.codes[rows].tobytes())
            )  # fmt: skip
        here[digest] = value
        if (result.codes[rows] == RowCode.OK).any():
            # What was refused altogether may be tried again, and is refused again for as long as it has to be.
            state.tables.put(running, digest, value)
            state.key_count += 1


def _digests(keys: NDArray[np.void]) -> list[bytes]:
    raw = keys["hash"].tobytes()
    return [raw[at : at + 16] for at in range(0, len(raw), 16)]


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
