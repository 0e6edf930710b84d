"""Putting together what a consumer gets."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import INDEX
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.results import GrantResult
from hadelay.handout.matching import Offer
from hadelay.handout.polls import Delivery
from hadelay.ledger.grants import HeldGrant
from hadelay.ledger.hourstate import groups
from hadelay.ledger.ports import HourStore
from hadelay.ledger.transitions import FLAG_WAS_DUE


def empty(now_ms: int) -> Delivery:
    """Nothing came in time."""
    u4 = np.zeros(0, np.uint32)
    return Delivery(
        0, 0, np.zeros(0, np.uint16), u4, u4, np.zeros(0, np.uint16), np.zeros(0, INDEX), np.zeros(0, np.int64),
        np.zeros(0, np.bool_), now_ms,
    )  # fmt: skip


def first_time(term: int, offer: Offer, result: GrantResult, suspect_ms: int, now_ms: int) -> Delivery:
    """What apply granted of an offer. suspect_ms: whatever was due by then may have been handed out before, by a
    leader that fell before it could say so (interval mode; else 0), as may what was due before it was rescheduled."""
    count, rows = len(offer.rows), offer.rows
    suspect = (rows["deliver_at_ms"] <= suspect_ms) | (rows["flags"] & FLAG_WAS_DUE != 0) & bool(suspect_ms)
    delivery = Delivery(
        term, offer.seq, np.arange(count, dtype=np.uint16), offer.hours, offer.indexes, result.attempts, rows,
        np.full(count, result.until_ms, np.int64), (result.attempts > 1) | suspect, now_ms,
    )  # fmt: skip
    return delivery if result.granted.all() else delivery.only(result.granted)


def again(grant: HeldGrant, store: HourStore) -> tuple[Delivery, NDArray[np.void]]:
    """What is still held of a grant, and the LEASE rows that name it."""
    positions = np.flatnonzero(grant.rows["open"] == 1)
    held = grant.rows[positions]
    rows = np.zeros(len(held), INDEX)
    for hour, mine in groups(held["hour"]):
        rows[mine] = store.entries(hour, held["index"][mine])
    leases = np.zeros(len(held), LEASE)
    leases["term"], leases["seq"], leases["pos"] = grant.term, grant.seq, positions
    leases["hour"], leases["index"] = held["hour"], held["index"]
    delivery = Delivery(
        grant.term, grant.seq, positions.astype(np.uint16), held["hour"].copy(), held["index"].copy(),
        held["attempt"].copy(), rows, held["until_ms"].copy(), np.ones(len(held), np.bool_), 0,
    )  # fmt: skip
    return delivery, leases
