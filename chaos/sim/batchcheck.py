"""Check B1: the counts of batches agree with their members, and a batch ends, with its callback, if and only if its
last member is settled (ledger/batches)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from hadelay.codec.batches import CANCELLED, ENDED, EXPIRED, MAX_FAILURES, REFUSED, SEALED
from hadelay.ledger.batches.batches import BATCH, BATCHEND, END_KEY, Found, found_by
from hadelay.ledger.batches.members import (
    BATCHFAIL,
    BATCHKEY,
    BATCHOF,
    BLOCK,
    BLOCK_KEY,
    FAILURE_KEY,
    NUMBER,
    RUN,
    number_in,
)

if TYPE_CHECKING:
    from hadelay.ledger.state import Ledger


def check(ledger: Ledger) -> None:
    """Check all batches of a ledger. Raises AssertionError with the first inconsistency."""
    members = _open_members(ledger)
    rows = [number_in(key) for key, _ in ledger.tables.range(BATCH, limit=1 << 30)]
    assert rows == sorted(ledger.batch_states, reverse=True), "batches without state"
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


def _open_members(ledger: Ledger) -> Counter[int]:
    """Count the unsettled members of each batch in table `batchof`. Also check that the runs in a row do not overlap,
    that each hour has as many rows as HourState.batched says, and that grants have the batch numbers of the table."""
    found, blocks, by_entry = Counter[int](), Counter[int](), dict[tuple[int, int], int]()
    for key, row in ledger.tables.range(BATCHOF, limit=1 << 30):
        hour, block = BLOCK_KEY.unpack(key)
        blocks[hour] += 1
        behind = 0
        for first, last, number in np.frombuffer(row, RUN).tolist():
            assert behind <= first <= last, f"members {first} to {last} of row {hour}/{block}, behind {behind}"
            behind = last + 1
            for index in range(block * BLOCK + first, block * BLOCK + last + 1):
                by_entry[hour, index] = number
                if ledger.outcome_of(hour, index)[0] is None:
                    topic = ledger.topics[int(ledger.store.entries(hour, slice(index, index + 1))["topic"][0])]
                    assert topic.batched, f"{topic.name} has a member of batch {number}, and does not know"
                    found[number] += 1
    batched = {hour: state.batched for hour, state in ledger.hours.items() if state.batched}
    assert blocks == batched, f"rows of members by hour: {dict(blocks)}, counted {batched}"
    for grant in ledger.grants.values():
        for row in grant.rows[grant.rows["open"] == 1]:
            number = by_entry.get((int(row["hour"]), int(row["index"])), 0)
            assert int(row["batch"]) == number, f"grant {grant.key}: {row}, of batch {number}"
    return found


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
