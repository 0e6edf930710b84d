"""Check B1: the counts of batches agree with their members, and a batch ends, with its callback, if and only if its
last member is settled (ledger/batches)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hadelay.codec.batches import CANCELLED, ENDED, EXPIRED, MAX_FAILURES, REFUSED, SEALED
from hadelay.ledger.batches.batches import BATCH, BATCHEND, END_KEY, Found, found_by
from hadelay.ledger.batches.members import BATCHFAIL, BATCHKEY, BATCHOF, BATCHST, FAILURE_KEY, NUMBER, number_in
from hadelay.ledger.hours.lookup import stored_entry
from hadelay.model import DEAD_HOURS

if TYPE_CHECKING:
    from hadelay.ledger.state import Ledger


def check(ledger: Ledger) -> None:
    """Check all batches. Raises AssertionError with the inconsistency."""
    members, by_topic = Counter[int](), Counter[int]()
    for key, packed in ledger.tables.range(BATCHOF, limit=1 << 30):
        (first_id,), (number,) = NUMBER.unpack(key), NUMBER.unpack(packed)
        entry = stored_entry(ledger, first_id)
        assert entry is not None, f"{first_id:x} is a member of batch {number}, but is gone"
        assert entry.hour < DEAD_HOURS, f"{first_id:x} is dead, and still a member of batch {number}"
        ended = ledger.outcome_of(entry.hour, entry.index)[0]
        assert ended is None, f"{first_id:x} is {ended!r}, and still a member of batch {number}"
        members[number] += 1
        by_topic[int(entry.rows["topic"][0])] += 1
    for topic in ledger.topics.all:
        assert topic.batched == by_topic[topic.number], f"{topic.name}: batched {topic.batched}"
    rows = [number_in(key) for key, _ in ledger.tables.range(BATCH, limit=1 << 30)]
    assert rows == [number_in(key) for key, _ in ledger.tables.range(BATCHST, limit=1 << 30)], "batches without state"
    assert len(rows) == ledger.batches.count, f"{ledger.batches.count} batches, {len(rows)} rows"
    found = [batch for number in rows if (batch := found_by(ledger, number)) is not None]
    keys = {batch.stored.key.encode(): NUMBER.pack(batch.number) for batch in found}
    assert dict(ledger.tables.range(BATCHKEY, limit=1 << 30)) == keys, "keys of batches"
    ends = sorted(END_KEY.pack(batch.state.until_ms, batch.number) for batch in found)
    stale = {END_KEY.pack(batch.state.opened_ms + batch.stored.spec.lifetime_ms, batch.number) for batch in found}
    rows_of_ends = {key for key, _ in ledger.tables.range(BATCHEND, limit=1 << 30)}
    assert set(ends) <= rows_of_ends <= {*ends, *stale}, "ends of batches"
    failures = Counter(FAILURE_KEY.unpack(key)[0] for key, _ in ledger.tables.range(BATCHFAIL, limit=1 << 30))
    assert failures == {batch.number: batch.state.failures for batch in found if batch.state.failures}, "failures"
    for batch in found:
        _check_batch(batch, members[batch.number])
    assert not ledger.complete, f"batches {ledger.complete} are complete, and have not ended"


def _check_batch(found: Found, members: int) -> None:
    number, stored, state = found
    name, flags = f"batch {number}", state.flags
    assert state.failures == min(state.joined and state.settled - state.acked, MAX_FAILURES), f"{name}: failures"
    assert not flags & CANCELLED or flags & SEALED, f"{name}: cancelled, and not sealed"
    if flags & EXPIRED:
        assert flags & ENDED, f"{name}: expired, and not ended"
        assert not state.callback, f"{name}: a callback of an expired batch"
        return
    assert state.joined - state.settled == members, f"{name}: {state}, and {members} members are not settled"
    assert bool(flags & ENDED) == state.complete, f"{name}: {state}"
    called = bool(state.callback or flags & REFUSED)
    assert called == bool(flags & ENDED and state.calls_back(stored.spec.on)), f"{name}: callback {state.callback:x}"
