"""Idempotency-Keys: the first answer of a publish, kept for a window, so that a retry is harmless.

There is a table per *epoch* of one window: new keys go to the running table, and look-ups read the running one and the
one before. A key lives at least one window and at most two. When the running table has half of the permitted keys, the
epoch ends early, and the oldest keys go first; `ledger.keys_dropped_early` counts them.
"""

import struct
from collections.abc import Sequence

import msgpack
import numpy as np

from hadelay.codec.formats import Mask, Rows
from hadelay.codec.publishcommand import Publish, hash_client_key, hash_key
from hadelay.codec.results import RETRYABLE, PublishResult, Refused, RowCode
from hadelay.ledger.hours.lookup import state_of
from hadelay.ledger.limits import shares
from hadelay.ledger.limits.flow import PLENTY
from hadelay.ledger.messages.copies import family
from hadelay.ledger.messages.keys import Batch, find_key
from hadelay.ledger.messages.unique import is_unique
from hadelay.ledger.state import Ledger
from hadelay.model import Draft, State, unpack_id

#: Stored answer: fingerprint, number of rows; then ids u8[], deliver_at_ms i8[], codes u1[], and, if there are any, ids
#: of other messages u8[] (PublishResult.others). Of a refused command the number of rows is 0, and MessagePack [code,
#: detail] follows.
_HEAD = struct.Struct("<QI")
#: Layout of a stored answer for a single row that names no other message.
_ONE = struct.Struct("<QIQqB")
_USES_ITS_SHARE = (
    "uses its share of limits.idempotency_keys: try later, when some end, or send the request without a key"
)


def table(epoch: int) -> bytes:
    return b"idem:%d" % epoch


def turn(ledger: Ledger) -> None:
    """Begin a new table (epoch) of Idempotency-Keys if the present one is too old or full; drop the oldest one."""
    settings = ledger.settings
    over = ledger.now_ms >= ledger.key_epoch_ends_ms
    if not over and ledger.key_count < _room(ledger):
        return
    if not over:
        ledger.keys_dropped_early += ledger.key_count_before
    long_ago = ledger.now_ms >= ledger.key_epoch_ends_ms + settings.idempotency_window_ms
    if long_ago and ledger.key_count:
        ledger.tables.drop_table(table(ledger.key_epoch))
        ledger.key_count = 0
        shares.begin_epoch(ledger)
    if ledger.key_count_before:
        ledger.tables.drop_table(table(ledger.key_epoch - 1))
    ledger.key_epoch += 1
    ledger.key_count_before, ledger.key_count = ledger.key_count, 0
    shares.begin_epoch(ledger)
    ledger.key_epoch_ends_ms = ledger.now_ms + settings.idempotency_window_ms


def _room(ledger: Ledger) -> int:
    """Limit of the Idempotency-Keys in one table. Periods of `unique_for` count towards the same setting, and cannot be
    forgotten early. At most half of the setting is subtracted for periods, even if there are more of them because the
    setting was lowered."""
    most = ledger.settings.idempotency_max_keys
    return (most - min(ledger.unique_count, most // 2)) // 2


def _share(ledger: Ledger) -> int:
    """Number of new keys that the present request may store. There is no limit while all keys in the tables are of
    tokens with this token's name: a full table then forgets only keys of these tokens early."""
    mine = shares.made_by(ledger, shares.KEYS) + shares.made_by(ledger, shares.KEYS_BEFORE)
    if not shares.is_bounded(ledger) or mine == ledger.key_count + ledger.key_count_before:
        return PLENTY
    return max(shares.room(ledger, shares.KEYS, 0, _room(ledger)), 0)


def within_share(ledger: Ledger, batch: Batch, new: list[int]) -> list[int]:
    """Refuse rows whose new keys are beyond the share of the request's token; returns the other new keys (positions in
    the command)."""
    left = _share(ledger)
    for at in new[left:]:
        first, count = int(batch.command.keys["first"][at]), int(batch.command.keys["count"][at])
        beyond = np.zeros(len(batch.take), np.bool_)
        beyond[first : first + count] = True
        batch.refuse(beyond, RowCode.SHARE_OF_KEYS)
    return new[:left]


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


def refuse_cancelled(ledger: Ledger, command: Publish, result: PublishResult) -> None:
    """Refuse the repeated rows whose messages were cancelled or purged since: as duplicates, they would look stored,
    and nothing would be delivered. A message that a later one with its client key replaced counts as stored."""
    at_key = {int(row["row"]): row for row in command.client_keys} if len(command.client_keys) else {}
    for at in result.duplicate.nonzero()[0].tolist():
        message_id = int(result.ids[at])
        if not _is_cancelled(ledger, message_id):
            continue
        if at in at_key:
            topic = command.topics[int(command.rows["topic"][at])]
            later = find_key(ledger, topic, at_key[at]["hash"].tobytes())
            if later not in (message_id, None) and not _is_cancelled(ledger, later):
                continue
        _refuse_row(result, at)


def _refuse_row(result: PublishResult, at: int) -> None:
    """Refuse a repeated row, because its message was cancelled or purged."""
    message_id = int(result.ids[at])
    result.codes[at], result.duplicate[at] = RowCode.KEY_CANCELLED, False
    result.ids[at] = result.deliver_at_ms[at] = 0
    result.note_others(at, message_id)


def _is_cancelled(ledger: Ledger, message_id: int) -> bool:
    """Whether the message and all of its copies were cancelled, also by a purge of their topic or of their dead
    letters."""
    states = [state_of(ledger, place, ledger.now_ms) for _, place in family(ledger, message_id)]
    if not states:
        # No entry is found. If the hour of the message's id still exists, the dead letter was purged; otherwise the
        # message was settled, and its hour is deleted.
        _, hour, index = unpack_id(message_id)
        return index < ledger.store.count(hour)
    return all(state is State.CANCELLED for state in states)


def is_known_hash(ledger: Ledger, digest: bytes) -> bool:
    """Whether the answer under this hash of an Idempotency-Key is remembered."""
    epochs = (ledger.key_epoch, ledger.key_epoch - 1)
    return any(ledger.tables.get(table(epoch), digest) is not None for epoch in epochs)


def is_known(ledger: Ledger, drafts: Sequence[Draft], request_key: bytes | None) -> bool:
    """Whether this node has stored an answer under an Idempotency-Key of the publish, perhaps for an earlier try."""
    rows = [draft.idem for draft in drafts if draft.idem is not None]
    # server/publishing.py may have stored a request's key for the whole request, for the first part (0:) of a large
    # batch, or for its only row.
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
        else:
            rows = slice(first, first + count)
            columns = result.ids[rows], result.deliver_at_ms[rows], result.codes[rows]
            value = _HEAD.pack(prints[at], count) + b"".join(column.tobytes() for column in columns)
        if result.others is not None and (others := result.others[first : first + count]).any():
            value += others.tobytes()
        here[digest] = value
        if _is_final(ledger, codes[first : first + count]):
            ledger.tables.put(running, digest, value)
            ledger.key_count += 1
            shares.took(ledger, shares.KEYS)


def answered_before(
    ledger: Ledger, digest: bytes, fingerprint: int, conflict: Refused
) -> PublishResult | Refused | None:
    """The answer that a command with this Idempotency-Key got; None if there was none. conflict: the answer if the key
    was used for a command with another fingerprint."""
    for epoch in (ledger.key_epoch, ledger.key_epoch - 1):
        stored = ledger.tables.get(table(epoch), digest)
        if stored is None:
            continue
        kept_print, count = _HEAD.unpack_from(stored)
        if kept_print != fingerprint:
            return conflict
        if not count:
            return Refused(*msgpack.unpackb(stored[_HEAD.size :]))
        result = PublishResult.blank(count)
        _answer(stored, fingerprint, 0, count, result)
        for at in result.duplicate.nonzero()[0].tolist():
            if _is_cancelled(ledger, int(result.ids[at])):
                _refuse_row(result, at)
        return result
    return None


def remember_refusal(ledger: Ledger, digest: bytes, fingerprint: int, refused: Refused) -> Refused:
    """Store a refusal that no retry could change under the new Idempotency-Key of its command, and return this refusal.
    Without room for the key, return a refusal that may be retried: nobody may rely on an answer that is not stored."""
    if refused.retryable or is_known_hash(ledger, digest):
        return refused
    if not _share(ledger):
        return Refused("share_of_keys", f"the token {ledger.by!r} {_USES_ITS_SHARE}")
    value = _HEAD.pack(fingerprint, 0) + msgpack.packb([refused.code, refused.detail])
    ledger.tables.put(table(ledger.key_epoch), digest, value)
    ledger.key_count += 1
    shares.took(ledger, shares.KEYS)
    return refused


def _is_final(ledger: Ledger, codes: list[int]) -> bool:
    """Whether a repetition gets this answer again: a row is stored, or no row may be retried. Such a refusal must be
    remembered: an earlier try of the same publish may still lie in a stalled node, and be applied later. If all rows
    are refused and one may be retried, the repetition is judged anew. So is a request of which another shard gets a
    part: nothing of it is stored here (messages/publish.py)."""
    return RowCode.OTHER_SHARD not in codes and (RowCode.OK in codes or RETRYABLE.isdisjoint(codes))


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
