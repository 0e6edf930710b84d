"""Fills: a new subscription gets copies of the messages that were pending in its topic when it was created (ADR 229).

SUBSCRIPTION_FILL creates the subscription and begins a bulk job in the same apply, which gives the topic a new
generation: publishes from then on are copied as usual, and the job means the entries of older generations. Each message
gets its copy once, whatever comes first:

- a step of the job reaches its entry, which waits or is leased, or was acked meanwhile (HourState.unfilled);
- its entry ends because the message is retried, rescheduled or dies: the copy is filed in the same apply, before.

The table `copies` (ledger/messages/copies.py) says which messages have theirs. A message that is cancelled or expires
earlier gets none. A copy has a record of its own, with the copy's id: a repair then accepts the record without these
tables.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import INDEX, RECORD, RECORD_SIZE, Mask, Rows
from hadelay.codec.meta import CopiedMeta, copied_meta
from hadelay.codec.publishcommand import hash_group
from hadelay.codec.records import decode_record
from hadelay.ledger.groups import messagegroups
from hadelay.ledger.hours.hourstate import bitmap, indexes_of, is_in, rows_by_value
from hadelay.ledger.hours.lookup import find_entries
from hadelay.ledger.hours.transitions import FLAG_CALLBACK, FLAG_KEYED, FLAG_ROUTED, FLAG_TTL, ID_KEY, filed
from hadelay.ledger.jobs.bulkjob import BulkJob
from hadelay.ledger.limits.quotas import Room
from hadelay.ledger.messages import ttl
from hadelay.ledger.messages.copies import COPIES, COPY, COPYOF, FilledCopy, filled_copies, published_id
from hadelay.ledger.messages.keys import has_key
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState
from hadelay.ledger.views.listing import states_of
from hadelay.model import DEAD_HOURS, HOUR_MS, NONE32, PENDING, Event, State, unpack_id

_PENDING = np.array([state in PENDING for state in (*State, None)])


def meant(ledger: Ledger, rows: Rows) -> Mask:
    """Mask of the INDEX rows that running fills have to copy."""
    found = np.zeros(len(rows), np.bool_)
    for job in ledger.fills.values():
        found |= _meant_by(ledger, job, rows)
    return found


def _meant_by(ledger: Ledger, job: BulkJob, rows: Rows) -> Mask:
    """Mask of the INDEX rows that a fill has to copy: messages of its topic from before it began, but not from before
    the topic's last deletion, which may still be leased. A dead letter that was routed to the topic is left out: it was
    not published there."""
    ((number, generation),) = job.topics.items()
    routed = rows["flags"] & np.uint16(FLAG_ROUTED) != 0
    older = (rows["generation"] < generation) & (rows["generation"] >= ledger.topics[number].born)
    return np.asarray((rows["topic"] == number) & older & ~routed)


def holds(ledger: Ledger, hour: int) -> bool:
    """Whether a running fill still needs the hour: for acked messages that it may have to copy, for entries that their
    messages have left, or for copies. If the hour of a copy were deleted, the tables would forget the copy, and the
    fill would copy the message again when it meets the message after a CARRY."""
    hour_state = ledger.hours.get(hour)
    if hour_state is None:
        return False
    # Keep entries that messages have left: the next step may name such an entry, found before its message moved.
    left = hour < DEAD_HOURS and hour_state.others.get(Event.MOVED)
    return bool(hour_state.unfilled or (ledger.fills and (hour_state.filled or left)))


def copy_before_move(ledger: Ledger, hour: int, rows: Rows) -> None:
    """File the missing copies of pending messages (INDEX rows) that are about to be filed anew elsewhere."""
    if not ledger.fills or hour >= DEAD_HOURS:
        return
    rows = rows[meant(ledger, rows)]
    for number, where in rows_by_value(rows["topic"]):
        _copy(ledger, ledger.fills[number], hour, rows[where])


def step(ledger: Ledger, job: BulkJob, found: list[tuple[int, Rows]]) -> None:
    """Copy the next messages of a fill. found: the entries of these messages, as (hour, INDEX rows)."""
    for hour, rows in found:
        acts = _meant_by(ledger, job, rows) & open_for(ledger, job.topics, hour, rows)
        job.settled += int((~acts).sum())
        _copy(ledger, job, hour, rows[acts])


def open_for(ledger: Ledger, topics: Iterable[int], hour: int, rows: Rows, now_ms: int | None = None) -> Mask:
    """Which of these messages (INDEX rows of the topics) are pending, or were acked since the topic's fill began."""
    found: Mask = _PENDING[states_of(ledger, hour, rows, ledger.now_ms if now_ms is None else now_ms)]
    hour_state = ledger.hours.get(hour)
    for number in topics:
        if hour_state is not None and (acked := hour_state.unfilled.get(number)) is not None:
            found |= is_in(rows["index"], acked)
    return found


def entries_of(ledger: Ledger, entries: NDArray[np.uint64]) -> list[tuple[int, Rows]]:
    """Look up the entries of a fill's step, named by ids made from hour and globalIndex: (hour, INDEX rows). If a
    message has left its entry, perhaps by a CARRY since the search, its present entry is returned."""
    places = np.array([unpack_id(entry)[1:] for entry in entries.tolist()], np.int64).reshape(-1, 2)
    found, moved = [], list[int]()
    for hour, where in rows_by_value(places[:, 0]):
        indexes = places[where, 1]
        indexes = indexes[indexes < ledger.store.count(hour)]
        if len(indexes) and hour < DEAD_HOURS:
            rows = ledger.store.entries(hour, indexes.astype(np.uint32))
            hour_state = ledger.hours.get(hour)
            if hour_state is not None and (bits := hour_state.others.get(Event.MOVED)):
                left = is_in(rows["index"], bits)
                moved += rows["first_id"][left].tolist()
                rows = rows[~left]
            found.append((hour, rows))
    hours, indexes = find_entries(ledger, list(dict.fromkeys(moved)))
    for hour, where in rows_by_value(hours):
        if 0 <= hour < DEAD_HOURS:
            found.append((hour, ledger.store.entries(hour, indexes[where].astype(np.uint32))))
    return found


def _copy(ledger: Ledger, job: BulkJob, hour: int, rows: Rows) -> None:
    """File copies of these messages (INDEX rows of one hour) for the subscription of the fill, where they are missing
    and their tags pass the filter."""
    to = ledger.topic(job.spec.subscription)
    assert to is not None, "a fill ends with its subscription"
    room, chosen, metas = Room(to), [], list[CopiedMeta]()
    blob = bytearray()
    for at, (first_id, offset, size) in enumerate(rows[["first_id", "offset", "size"]].tolist()):
        if any(copy.topic == to.number and copy.lives == to.lives for copy in filled_copies(ledger, first_id)):
            continue
        record = ledger.store.record(hour, offset, size, verify=True)
        meta = copied_meta(decode_record(record).meta)
        if to.filter is not None and not to.filter.matches(meta.tags):
            continue
        if room.drops and room.refusal(size, ()):
            to.dropped += 1
            job.refused += 1
            continue
        room.take(size, ())
        chosen.append(at)
        metas.append(meta)
        blob += record
    if chosen:
        _file(ledger, job, to, rows[chosen], metas, blob)


def _file(ledger: Ledger, job: BulkJob, to: TopicState, rows: Rows, metas: list[CopiedMeta], blob: bytearray) -> None:
    """File copies of these messages (INDEX rows), with their due times. blob: records of the messages."""
    published, sizes = rows["first_id"].tolist(), rows["size"].astype(np.int64)
    filing_ms = np.maximum(rows["deliver_at_ms"], ledger.now_ms)
    hours = filing_ms // HOUR_MS
    if (ledger.store.counts(hours).astype(np.int64) + len(rows) >= NONE32).any():
        job.refused += len(rows)
        return
    lives = [meta.ttl if meta.ttl > 0 else to.settings.ttl_ms or 0 for meta in metas]
    keyed = [
        flags & FLAG_KEYED and has_key(ledger, one)
        for one, flags in zip(published, rows["flags"].tolist(), strict=True)
    ]
    new = np.zeros(len(rows), INDEX)
    for name in ("deliver_at_ms", "tag_mask", "size"):
        new[name] = rows[name]
    new["flags"] = rows["flags"] & np.uint16(FLAG_CALLBACK)
    new["flags"] |= np.where(keyed, np.uint16(FLAG_KEYED), np.uint16(0))
    new["flags"] |= np.where(lives, np.uint16(FLAG_TTL), np.uint16(0))
    new["topic"], new["generation"], new["second"] = to.number, to.generation, filing_ms % HOUR_MS // 1000
    starts = sizes.cumsum() - sizes
    heads = b"".join([blob[start : start + RECORD_SIZE] for start in starts.tolist()])
    headers = np.frombuffer(heads, RECORD).copy()
    headers["deliver_at_ms"] = rows["deliver_at_ms"]
    into = int(hours[0]) if (hours == hours[0]).all() else hours
    ledger.store.append(into, new, blob, headers)
    to.open += len(new)
    to.published += len(new)
    to.bytes += int(sizes.sum())
    job.done += len(new)
    _remember(ledger, to, published, hours.tolist(), new)
    for first_id, due_ms, ttl_ms in zip(new["first_id"].tolist(), new["deliver_at_ms"].tolist(), lives, strict=True):
        if ttl_ms:
            ttl.begin(ledger, first_id, due_ms, min(ttl_ms, ledger.settings.max_delay_ms))
    grouped = [at for at, meta in enumerate(metas) if meta.group is not None]
    names = [hash_group(metas[at].group or "") for at in grouped]
    blocked = messagegroups.publish(ledger, into, new, np.array(grouped, np.intp), names) if grouped else None
    filed(ledger, into, new, blocked)


def _remember(ledger: Ledger, to: TopicState, published: list[int], hours: list[int], new: Rows) -> None:
    """Note filed copies in the tables, and in HourState.filled, by which `forget_some` finds them when their hour is
    deleted."""
    every = ledger.topics.all
    for message_id, hour, copy, index in zip(
        published, hours, new["first_id"].tolist(), new["index"].tolist(), strict=True
    ):
        # Keep the message's table row short: leave out copies for subscriptions that were deleted.
        known = [each for each in filled_copies(ledger, message_id) if every[each.topic].lives == each.lives]
        _put(ledger, message_id, [*known, FilledCopy(to.number, to.lives, copy)])
        ledger.tables.put(COPYOF, ID_KEY.pack(copy), ID_KEY.pack(message_id))
        ledger.hour_state(hour).filled.add(index)
    ledger.filled_copies += len(published)


def _put(ledger: Ledger, message_id: int, copies: list[FilledCopy]) -> None:
    if copies:
        ledger.tables.put(COPIES, ID_KEY.pack(message_id), b"".join([COPY.pack(*copy) for copy in copies]))
    else:
        ledger.tables.delete(COPIES, ID_KEY.pack(message_id))


def forget_some(ledger: Ledger, hour: int, limit: int) -> int:
    """Delete the table rows of copies that fills made and whose entries are in an hour to be deleted, at most `limit`
    copies at a time; returns the number of these copies."""
    hour_state = ledger.hour_state(hour)
    some = indexes_of(hour_state.filled)[:limit]
    for copy in ledger.store.entries(hour, some)["first_id"].tolist() if len(some) else ():
        message_id = published_id(ledger, copy)
        ledger.tables.delete(COPYOF, ID_KEY.pack(copy))
        if message_id is not None:
            _put(ledger, message_id, [each for each in filled_copies(ledger, message_id) if each.id != copy])
    ledger.filled_copies -= len(some)
    hour_state.filled -= bitmap(some)
    return len(some)
