"""Check B2 of batches: the callback comes exactly once, never before the last member has ended, and only if the batch
asks for one.

B2  Of each batch, one callback is stored in the log entry that settled the last member, if its outcome asks for one;
    else none. The members, their ends and the callbacks are those in records and histories, not in the tables of
    batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hadelay.codec.batches import CANCELLED, ENDED, EXPIRED, SEALED, On
from hadelay.codec.meta import unpack
from hadelay.codec.records import decode_record
from hadelay.ledger.batches import batches
from hadelay.ledger.views.describe import describe
from hadelay.model import DEAD_HOURS, HOUR_MS, Event

if TYPE_CHECKING:
    from chaos.sim.cluster import SimCluster
    from hadelay.ledger.state import Ledger

#: Names of the topic of the batches' members, and of the topic of the callbacks.
MEMBERS, CALLBACKS = "batched", "completed"
_ENDS = {Event.ACKED, Event.TTL_EXPIRED, Event.CANCELLED, Event.DEAD}


class Seen(NamedTuple):
    """A batch as found in records and histories of messages: ends of its members, and its callbacks."""

    #: For each member: (time in Unix ms, event) of its first end; None while the member is pending.
    ends: list[tuple[int, Event] | None]
    #: Times, in Unix ms, at which callbacks were stored.
    callbacks: list[int]


def on_of(key: str) -> On:
    """Outcome at which the batch asks for its callback: the first part of the batch's key is the name of this
    outcome."""
    return On[key.partition("-")[0].upper()]


def batches_called_back(cluster: SimCluster) -> None:
    """Check B2 of all batches on every running node."""
    for node in cluster.nodes():
        for key, seen in _seen(node.ledger).items():
            found = batches.find(node.ledger, key)
            # Skip a batch if it or its entries are gone: after a suspension of hours, a batch may be forgotten, and
            # hours with members or with the callback deleted.
            if found is not None and len(seen.ends) == found.state.joined and _keeps_callback(node.ledger, found):
                judge(cluster, key, seen, found.state.flags)


def _keeps_callback(ledger: Ledger, found: batches.Found) -> bool:
    """Whether the hour in which the callback of a batch is filed still exists; True if the batch has no callback."""
    due_ms = found.state.ended_ms + found.stored.spec.delay_ms
    return not found.state.callback or due_ms // HOUR_MS in ledger.store.hours()


def judge(cluster: SimCluster, key: str, seen: Seen, flags: int) -> None:
    """Check B2 of one batch. flags: flags of the batch's state in the ledger."""
    over = [end for end in seen.ends if end is not None]
    complete = len(over) == len(seen.ends) and bool(flags & SEALED) and not flags & EXPIRED
    outcomes = {event for _, event in over}
    succeeded = outcomes <= {Event.ACKED} and not flags & CANCELLED
    asked = {On.SUCCESS: succeeded, On.DEATH: Event.DEAD in outcomes}.get(on_of(key), True)
    text = f"batch {key}, flags {flags}: callbacks at {seen.callbacks}, members ended at {over} of {len(seen.ends)}"
    decide = cluster.history.decide
    if not (complete and asked):
        decide("B2 batches, without", bool(seen.callbacks), text)
        return
    decide("B2 batches, once", len(seen.callbacks) != 1 or not flags & ENDED, text)
    last_ms = max((at_ms for at_ms, _ in over), default=0)
    decide("B2 batches, last member", any(at_ms < last_ms for at_ms in seen.callbacks), text)


def _seen(ledger: Ledger) -> dict[str, Seen]:
    names = {MEMBERS, CALLBACKS}
    topics = {topic.number: topic.name for topic in ledger.topics.all if topic.name in names}
    found: dict[str, Seen] = {}
    known: set[int] = set()
    for hour in ledger.store.hours() if len(topics) == len(names) else ():
        rows = ledger.store.entries(hour, slice(None))
        for row in rows if hour < DEAD_HOURS else ():
            first_id, name = int(row["first_id"]), topics.get(int(row["topic"]))
            if name is None or first_id in known:
                continue
            known.add(first_id)
            record = decode_record(ledger.store.record(hour, int(row["offset"]), int(row["size"])))
            meta = unpack(record.meta)
            key = meta.batch if name == MEMBERS else meta.meta.get("batch")
            if key is None:
                continue
            seen = found.setdefault(key, Seen([], []))
            message = describe(ledger, first_id)
            assert message is not None, f"{first_id:x} has an entry, and no description"
            if name == CALLBACKS:
                seen.callbacks.append(message.published_at_ms)
            else:
                ends = [(event.at_ms, event.event) for event in message.history if event.event in _ENDS]
                seen.ends.append(ends[0] if ends else None)
    return found
