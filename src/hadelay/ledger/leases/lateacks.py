"""Late acks: acks of leases that are no longer open, because they ran out or were never replicated (ADR 33)."""

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.commandtypes import SettleLeases
from hadelay.codec.formats import Rows
from hadelay.codec.results import LeaseOutcome
from hadelay.ledger.hours.lookup import find_entry
from hadelay.ledger.hours.transitions import FLAG_LEASE_EXPIRED, MOVE_BYTES, Leaving, failures_of, settle
from hadelay.ledger.leases.callbacks import read_bytes
from hadelay.ledger.leases.grantrows import NamedLeases
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, Event


def late_acks(
    ledger: Ledger, command: SettleLeases, outcomes: NDArray[np.uint8], found: list[NamedLeases], node: int
) -> None:
    """Ack the leases that are no longer open, and set their outcomes: AGAIN for leases beyond MOVE_BYTES of records
    that callbacks have to read."""
    late = np.flatnonzero(outcomes == LeaseOutcome.LEASE_LOST).tolist()
    left = MOVE_BYTES
    if late:
        left -= sum(int(read_bytes(ledger, grant.rows[positions]).sum()) for grant, positions, _ in found)
    for at in late:
        outcomes[at] = _late_ack(ledger, command.rows[at], node) if left > 0 else LeaseOutcome.AGAIN
        if outcomes[at] == LeaseOutcome.DONE:
            left -= int(read_bytes(ledger, command.rows[at : at + 1])[0])


def _late_ack(ledger: Ledger, lease: np.void, node: int) -> LeaseOutcome:
    """Ack a lease that is not open any more. The ack counts until the message is leased again.

    Such an ack counts in two cases: the lease ran out and the message waits again; or an earlier leader handed the
    message out and failed before the grant was replicated (interval mode), so that apply knows no lease of it.
    """
    hour, index = int(lease["hour"]), int(lease["index"])
    if hour >= DEAD_HOURS or index >= ledger.store.count(hour):
        return LeaseOutcome.LEASE_LOST
    ended, is_leased = ledger.outcome_of(hour, index)
    if ended is Event.ACKED:
        return LeaseOutcome.ALREADY_ACKED
    if is_leased or ended not in (None, Event.MOVED):
        return LeaseOutcome.LEASE_LOST
    leased = ledger.store.entries(hour, slice(index, index + 1))
    place = find_entry(ledger, int(leased["first_id"][0]))
    if place is None:
        return LeaseOutcome.LEASE_LOST
    ended, is_leased = ledger.outcome_of(place.hour, place.index)
    attempts = int(place.rows["attempt"][0]) - int(leased["attempt"][0])
    ran_out = attempts == 1 and bool(int(place.rows["flags"][0]) & FLAG_LEASE_EXPIRED)
    unseen = (
        attempts == 0
        and int(lease["term"]) < ledger.term
        and (int(lease["term"]), int(lease["seq"])) not in ledger.grants
        and int(place.rows["deliver_at_ms"][0]) <= ledger.now_ms
    )
    if not (ran_out or unseen) or _failed_since(ledger, leased) > int(ran_out):
        return LeaseOutcome.LEASE_LOST
    now_at = ledger.hour_state(place.hour)
    if place.index in now_at.late:
        return LeaseOutcome.ALREADY_ACKED
    if ended is not None or is_leased or not ledger.topics.owed(place.rows)[0]:
        return LeaseOutcome.LEASE_LOST
    now_at.late.add(place.index)
    settle(ledger, Leaving(place.hour, place.rows, node=node), Event.ACKED, attempts=leased["attempt"] + 1)
    return LeaseOutcome.DONE


def _failed_since(ledger: Ledger, entry: Rows) -> int:
    """Number of failed attempts of a message since its due time, those of this entry included. The attempt number is no
    substitute: after a redrive, it restarts at 0."""
    due_ms = int(entry["deliver_at_ms"][0])
    return sum(at_ms > due_ms for at_ms, *_ in failures_of(ledger, int(entry["first_id"][0])))
