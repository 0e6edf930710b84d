"""Transfers: a bulk job moves waiting messages to another topic, under their ids, with attempt 0.

Without a topic that gets them, each goes back to the topic whose `dead_letter` routed it away: its number is in table
`place`. In the new topic a message begins anew: its TTL runs again, and if it dies, that topic's `dead_letter` holds.
Its client key is free, as after routing; its group and its batch stay. A message whose due time is over is due now.

A copy for a subscription that is not back in its subscription keeps FLAG_ROUTED: it is no copy any more
(ledger/messages/copies.py), and the topic that has it keeps it as a dead letter.
"""

import numpy as np

from hadelay.codec.formats import U32
from hadelay.ledger.hours.transitions import FLAG_KEYED, FLAG_ROUTED, ID_KEY, PLACE, PLACE_VALUE, SOURCE, Leaving
from hadelay.ledger.leases.dead import file_in
from hadelay.ledger.limits.quotas import Room
from hadelay.ledger.messages import fills
from hadelay.ledger.messages.keys import leave_key
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState, by_topic
from hadelay.model import NONE32, SEPARATOR, Event


def transfer(ledger: Ledger, leaving: Leaving, into: str) -> int:
    """Move waiting messages (INDEX rows of one hour) to the topic `into`; if `into` is "", back to the topics in which
    they died. Returns the number of moved messages: a message stays if its new topic is missing or full, or is its
    present topic."""
    fills.copy_before_move(ledger, leaving.hour, leaving.rows)
    rows = leaving.rows
    places = ledger.tables.get_many(PLACE, [ID_KEY.pack(first_id) for first_id in rows["first_id"].tolist()])
    sources = np.array(
        [NONE32 if one is None else SOURCE.unpack_from(one, PLACE_VALUE.size)[0] for one in places], np.uint32
    )
    named = ledger.topic(into) if into else None
    targets = sources if not into else np.full(len(rows), NONE32 if named is None else named.number, np.uint32)
    moved = 0
    for number, _ in by_topic(targets):
        to = None if number == NONE32 else ledger.topics[number]
        if to is None or not to.exists:
            continue
        moves = (targets == number) & (rows["topic"] != number)
        room = Room(to)
        for at in np.flatnonzero(moves).tolist():
            size = int(rows["size"][at])
            if moves[at] and room.refusal(size, ()):
                moves[at] = False
            else:
                room.take(size, ())
        for origin, _ in by_topic(rows["topic"][moves]) if moves.any() else ():
            some = moves & (rows["topic"] == origin)
            _move(ledger, leaving.some(some), ledger.topics[origin], to, sources[some])
        moved += int(moves.sum())
    return moved


def _move(ledger: Ledger, leaving: Leaving, topic: TopicState, to: TopicState, sources: U32) -> None:
    rows = leaving.rows
    for first_id in rows["first_id"][rows["flags"] & FLAG_KEYED != 0].tolist():
        leave_key(ledger, topic.name, first_id)
    copies = SEPARATOR in topic.name
    subscribed = np.array([copies or _is_subscription(ledger, source) for source in sources.tolist()], np.bool_)
    away = subscribed & (sources != to.number)
    flags = rows["flags"] & np.uint16(0xFFFF ^ (FLAG_KEYED | FLAG_ROUTED))
    flags[away] |= np.uint16(FLAG_ROUTED)
    to.published += len(rows)
    due_ms = rows["deliver_at_ms"]
    source = topic.number if copies else None
    file_in(ledger, leaving, to, flags, Event.TRANSFERRED, attempts=rows["attempt"], due_ms=due_ms, source=source)


def _is_subscription(ledger: Ledger, number: int) -> bool:
    return number != NONE32 and SEPARATOR in ledger.topics[number].name
