"""A published message and its copies for subscriptions. Each is found from the others by ids and shared records (ADR
244); copies that a fill made later are found by tables (ADR 229):

    table `copies`  id of a published message u64  →  per copy {topic u32, lives u16, id u64}
    table `copyof`  id of a copy u64               →  id of the published message u64
"""

import struct
from itertools import takewhile
from typing import NamedTuple

from hadelay.codec.formats import RECORD_SIZE
from hadelay.codec.records import check_header, decode_record
from hadelay.ledger.hours.lookup import EntryRef, find_entry, state_of, stored_entry
from hadelay.ledger.hours.transitions import FLAG_ROUTED, ID_KEY
from hadelay.ledger.state import Ledger
from hadelay.model import MAX_SUBSCRIPTIONS, PENDING, SEPARATOR, State, unpack_id

COPIES, COPYOF = b"copies", b"copyof"
COPY = struct.Struct("<IHQ")


class FilledCopy(NamedTuple):
    """A copy that a fill made, and the subscription that it was made for."""

    topic: int
    lives: int
    id: int


def filled_copies(ledger: Ledger, message_id: int) -> list[FilledCopy]:
    """The copies of a published message that fills made, oldest first."""
    stored = ledger.tables.get(COPIES, ID_KEY.pack(message_id)) if ledger.filled_copies else None
    return [] if stored is None else [FilledCopy(*each) for each in COPY.iter_unpack(stored)]


def filled_from(ledger: Ledger, message_id: int) -> int | None:
    """Id of the published message of which a fill made this copy; None for a message that no fill made."""
    stored = ledger.tables.get(COPYOF, ID_KEY.pack(message_id)) if ledger.filled_copies else None
    return None if stored is None else int(ID_KEY.unpack(stored)[0])


def published_in(ledger: Ledger, copy: int, record: bytes) -> int:
    """Id of the published message of which this message is a copy for a subscription, read from its record: a copy
    shares the record of the published message, with its id, unless a fill made the copy."""
    return filled_from(ledger, copy) or int.from_bytes(record[16:24], "little")


def copies_of(ledger: Ledger, message_id: int) -> list[int]:
    """Ids of a published message's copies for subscriptions; none if the message is a copy itself. Copies that are gone
    may be left out."""
    if not ledger.topics.subscriptions:
        return []
    return [*_copies_behind(ledger, message_id), *(copy.id for copy in filled_copies(ledger, message_id))]


def _copies_behind(ledger: Ledger, message_id: int) -> list[int]:
    """Ids of the copies that the same PUBLISH filed directly behind the message."""
    _, hour, index = unpack_id(message_id)
    # Stop at the end of 64 bits: a command may name any number as an id, also one of no message.
    after = range(message_id + 1, min(message_id + MAX_SUBSCRIPTIONS + 1, 1 << 64))
    if index >= ledger.store.count(hour):
        own = (copy for copy in after if filled_from(ledger, copy) is None)
        return [copy for copy in own if published_id(ledger, copy) == message_id]
    # Copies were filed directly behind the message, and share its record: no other entry shares a record under a new
    # id.
    first = max(index - 1, 0)
    rows = ledger.store.entries(hour, slice(first, index + 1 + MAX_SUBSCRIPTIONS))
    offsets, ids, at = rows["offset"].tolist(), rows["first_id"].tolist(), index - first
    if ids[at] != message_id or (at and offsets[0] == offsets[1]):
        return []
    shared = zip(after, ids[at + 1 :], offsets[at + 1 :], strict=False)
    return [copy for copy, _, _ in takewhile(lambda one: one[0] == one[1] and one[2] == offsets[at], shared)]


def published_id(ledger: Ledger, message_id: int) -> int | None:
    """Id of the published message of which this message is a copy, or its own id; None for a message that is gone."""
    if (published := filled_from(ledger, message_id)) is not None:
        return published
    _, hour, index = unpack_id(message_id)
    if index < ledger.store.count(hour):
        first = max(index - MAX_SUBSCRIPTIONS, 0)
        rows = ledger.store.entries(hour, slice(first, index + 1))
        offsets, ids, at = rows["offset"].tolist(), rows["first_id"].tolist(), index - first
        if ids[at] != message_id:
            return None
        while at and (ids[at - 1], offsets[at - 1]) == (ids[at] - 1, offsets[at]):
            at -= 1
        return int(ids[at])
    place = stored_entry(ledger, message_id)
    if place is None:
        return None
    offset, size = int(place.rows["offset"][0]), int(place.rows["size"][0])
    header = ledger.store.record(place.hour, offset, RECORD_SIZE)
    if check_header(header):
        ledger.store.record(place.hour, offset, size, verify=True)  # raises DamagedFile, with the record's offset
    return decode_record(header).first_id


def family(ledger: Ledger, message_id: int) -> list[tuple[int, EntryRef]]:
    """Look up the message and its copies: (id, present entry) of each. Copies whose subscription was deleted or purged
    are left out, and so are copies that died and were routed to another topic. If the topic has no queue of its own
    (own_queue false), the first copy has the id of the message."""
    found = [(one, find_entry(ledger, one)) for one in (message_id, *copies_of(ledger, message_id))]
    return [
        (one, place)
        for one, place in found
        if place is not None
        and (is_copy(ledger, place) or (one == message_id and not _is_in_subscription(ledger, place)))
    ]


def _is_in_subscription(ledger: Ledger, place: EntryRef) -> bool:
    return SEPARATOR in ledger.topics[int(place.rows["topic"][0])].name


def is_copy(ledger: Ledger, place: EntryRef) -> bool:
    """Whether a message that was filed as a copy is still in its subscription: not routed away, deleted or purged."""
    routed = int(place.rows["flags"][0]) & FLAG_ROUTED
    return not routed and bool(ledger.topics.alive(place.rows)[0])


def pending(ledger: Ledger, message_id: int) -> list[tuple[EntryRef, State]]:
    """The message and its copies for subscriptions, as far as they are pending: (entry, state) of each."""
    states = [(place, state_of(ledger, place, ledger.now_ms)) for _, place in family(ledger, message_id)]
    return [(place, state) for place, state in states if state in PENDING]


def waiting(ledger: Ledger, message_id: int) -> list[EntryRef]:
    """Entries of the message and of its copies for subscriptions, as far as they are pending and not leased."""
    return [place for place, state in pending(ledger, message_id) if state is not State.LEASED]
