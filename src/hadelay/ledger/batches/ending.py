"""Ends batches. When the last member is settled, the batch ends, and its callback is published in the same log entry.
When its lifetime is over, the batch ends without a callback. Also cancels the waiting members of cancelled batches,
once the leader has found them."""

from typing import Any

import numpy as np
from msgspec.structs import replace

from hadelay.codec.batches import ENDED, EXPIRED, KEPT_MS, REFUSED, On, Step
from hadelay.codec.commandtypes import Maintain
from hadelay.codec.meta import pack, unpack
from hadelay.codec.publishcommand import decode_body, encode_publish
from hadelay.codec.results import JobResult, RowCode
from hadelay.ledger.batches import batches
from hadelay.ledger.batches.batches import BATCHEND, END_KEY, Found
from hadelay.ledger.batches.members import is_cancelled, numbers_of, store_state
from hadelay.ledger.hours.hourstate import is_in, rows_by_value
from hadelay.ledger.hours.lookup import find_entries
from hadelay.ledger.hours.transitions import Leaving, settle
from hadelay.ledger.leases.callbacks import instant, to_json
from hadelay.ledger.messages.publish import apply_publish
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topicchanges import topic_or_new
from hadelay.model import DEAD_HOURS, Draft, Event

#: Limit of batches that one BATCHES command ends or forgets; the next command continues.
MAX_ENDED = 20


def end_complete(ledger: Ledger) -> None:
    """End the batches whose last members the present command settled, and publish their callbacks."""
    complete, ledger.complete = ledger.complete, []
    ledger.by = ""
    for number in dict.fromkeys(complete):
        found = batches.found_by(ledger, number)
        if found is not None:
            _end(ledger, found, 0)


def _end(ledger: Ledger, found: Found, flags: int) -> None:
    """End a batch, and add these flags to its state. Unless EXPIRED is among the flags, all members are settled, and
    the callback is published if the batch asks for a callback on this outcome."""
    number, stored, before = found
    state = replace(
        before, flags=before.flags | ENDED | flags, ended_ms=ledger.now_ms, until_ms=ledger.now_ms + KEPT_MS
    )
    # The table `batchend` still has the row for the end of the batch's lifetime. Leave that row until its time comes:
    # BATCHES reads the rows in order of time, and would have to pass over deleted rows.
    ledger.tables.put(BATCHEND, END_KEY.pack(state.until_ms, number), b"")
    if not flags & EXPIRED and state.calls_back(stored.spec.on):
        callback = _call_back(ledger, Found(number, stored, state))
        state = replace(state, callback=callback, flags=state.flags | (0 if callback else REFUSED))
    store_state(ledger, number, state)


def _call_back(ledger: Ledger, found: Found) -> int:
    """Publish the callback of a batch; returns the callback's message id, or 0 if the publish was refused."""
    spec, state = found.stored.spec, found.state
    counts = {name: getattr(state, name) for name in ("joined", "acked", "dead", "expired", "cancelled")}
    meta = unpack(spec.meta)
    added = {"callback": "batch", "batch": found.stored.key} | {f"batch-{name}": str(n) for name, n in counts.items()}
    body, kind = spec.body, meta.ct
    if body is None:
        body, kind = to_json(_document(found, counts)).encode(), "application/json"
    packed = pack(replace(meta, ct=kind, meta=meta.meta | added))
    delay_ms = min(spec.delay_ms, ledger.settings.max_delay_ms)
    ttl_ms = min(spec.ttl_ms, ledger.settings.max_delay_ms)
    draft = Draft(spec.topic, delay_ms, True, spec.tag_mask, ttl_ms, packed, body)
    topic = topic_or_new(ledger, spec.topic)  # the topic may have been deleted since the batch was opened
    codes = RowCode.NO_TOPIC
    if topic is not None:
        result = apply_publish(ledger, decode_body(encode_publish("", [draft])), bounded=False)
        codes = RowCode(int(result.codes[0]))
    ledger.callbacks["filed" if codes == RowCode.OK else "lost"] += 1
    return int(result.ids[0]) if codes == RowCode.OK else 0


def _document(found: Found, counts: dict[str, int]) -> dict[str, Any]:
    times = {name: instant(getattr(found.state, f"{name}_ms")) for name in ("opened", "sealed", "ended")}
    on = On(found.stored.spec.on).name.lower()
    return {"batch": found.stored.key, "on": on, **counts, **{f"{name}_at": at for name, at in times.items()}}


def maintain(ledger: Ledger, command: Maintain) -> JobResult:
    """Apply BATCHES: end batches whose lifetime is over, and forget old ones."""
    limit = min(max(command.limit, 1), MAX_ENDED)
    over = ledger.tables.range(BATCHEND, ledger.batchend_from, END_KEY.pack(ledger.now_ms + 1, 0), limit)
    for key, _ in over:
        ledger.tables.delete(BATCHEND, key)
        until_ms, number = END_KEY.unpack(key)
        found = batches.found_by(ledger, number)
        if found is None or found.state.until_ms != until_ms:
            continue  # an outdated row: the batch ended before its lifetime did
        if found.state.flags & ENDED:
            batches.forget(ledger, found)
        else:
            _end(ledger, found, EXPIRED)
    if over:
        ledger.batchend_from = over[-1][0] + b"\0"
    return JobResult(len(over) < limit, len(over))


def apply_step(ledger: Ledger, command: Step) -> JobResult:
    """Cancel members of cancelled batches that the leader found. Messages that are settled or leased by now, or are
    members of other batches, stay as they are."""
    counts = ledger.batches
    counts.searched = max(counts.searched, min(command.searched, counts.cancels))
    return JobResult(counts.searched == counts.cancels, _cancel(ledger, list(dict.fromkeys(command.ids))))


def _cancel(ledger: Ledger, ids: list[int]) -> int:
    """Cancel the messages, of these ids, that wait and are members of cancelled batches; returns the number of
    cancelled messages."""
    hours, indexes = find_entries(ledger, ids)
    count = 0
    for hour, where in rows_by_value(hours):
        if not 0 <= hour < DEAD_HOURS:
            continue
        numbers = numbers_of(ledger, hour, found := indexes[where].astype(np.uint32))
        rows = ledger.store.entries(hour, found[[is_cancelled(ledger, number) for number in numbers.tolist()]])
        if (hour_state := ledger.hours.get(hour)) is not None:
            rows = rows[~is_in(rows["index"], hour_state.settled, hour_state.leased)]
        # Leave out messages of deleted and purged topics: SWEEP cancels these.
        rows = rows[ledger.topics.owed(rows)]
        if len(rows):
            settle(ledger, Leaving(hour, rows), Event.CANCELLED)
            count += len(rows)
    return count
