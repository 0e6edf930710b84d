"""Basic types: ids, hours, events, states and drafts of messages. Imports no other module of hadelay.

A message id is a u64: group (8 bits) · hour since 1970 UTC (24) · globalIndex (32), written as 13 upper-case
characters of Crockford base32, big-endian. Ids never change and are never reused: the id names the index entry that the
message was first filed as.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum, StrEnum

from msgspec import Struct

HOUR_MS = 3_600_000
#: Time in ms that stands for never.
NEVER_MS = 1 << 62
#: Limit of every rate that users set, in messages per second.
MAX_RATE = 1_000_000
#: Value that means "none" in a u32 field, for example no previous event or no other hour.
NONE32 = 0xFFFFFFFF
#: Smallest hour number of dead letters. Dead letters are filed under DEAD_HOURS + the UTC hour in which their retention
#: ends.
DEAD_HOURS = 1 << 23
_DEAD = "dead-"
#: Actions for a publish if a pending message has the same client key.
KEEP, REPLACE, REJECT = 0, 1, 2
#: Fourth action for equal client keys: the key serves only the publish option `unique_for`, and is not stored.
PERIOD = 3
#: Value for the delay of a draft that means: use the topic's setting `delay`.
OWN_DELAY = -1
#: Character between the names of a topic and of a subscription, in the name of the subscription's queue.
SEPARATOR = "~"
#: Limit of the subscriptions of a topic, and so of the copies of a message.
MAX_SUBSCRIPTIONS = 16
#: Limits of the reason of a nack, and of the name of a message group, in bytes.
MAX_REASON = MAX_GROUP = 128
#: Limit of messages of one group in one grant, which a receive asks for by `group_max`.
MAX_RUN = 100
#: Limit of the publish option `unique_for`, in ms.
MAX_UNIQUE_MS = 7 * 24 * HOUR_MS
#: Limits in bytes: size of an ack's result, as JSON; and size of the part of a webhook's answer or of a result that a
#: success callback contains.
MAX_RESULT, MAX_REPLY = 64 << 10, 16 << 10

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_VALUE = {c: i for i, c in enumerate(_ALPHABET)} | {c.lower(): i for i, c in enumerate(_ALPHABET)}
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]


class Event(IntEnum):
    """Event of a message: the `event` byte of a dispatch log entry. Values are on disk: never renumber."""

    LEASED = 1
    ACKED = 2
    NACKED = 3
    LEASE_EXPIRED = 4
    TTL_EXPIRED = 5
    CANCELLED = 6
    MOVED = 7
    DEAD = 8
    REDRIVEN = 9
    TRANSFERRED = 10


#: Events that move the message to a new index entry. In such an event, `other_hour` is the hour of the new entry, and
#: `consumer` is the entry's number instead of a consumer's.
MOVES = (Event.MOVED, Event.DEAD, Event.REDRIVEN, Event.TRANSFERRED)


class State(StrEnum):
    """State of a message, as the API names it."""

    SCHEDULED = "scheduled"
    READY = "ready"
    #: The message waits behind other messages of its group; its due time may be over.
    BLOCKED = "blocked"
    LEASED = "leased"
    ACKED = "acked"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD = "dead"


#: States of a message that may still be handed out or acked.
PENDING = frozenset((State.SCHEDULED, State.READY, State.BLOCKED, State.LEASED))

#: Position of a message in a listing: (due_ms, id). A page of a listing begins after such a position.
Key = tuple[int, int]
FIRST: Key = (-1, 0)


@dataclass(slots=True)
class PastEvent:
    event: Event
    at_ms: int
    attempt: int
    consumer: str | None
    node: str | None
    #: Reason that the consumer gave for a failed attempt.
    reason: str | None = None
    #: For an event that moved the message (MOVES): hours of its index entry before and after the move.
    from_hour: int | None = None
    to_hour: int | None = None
    #: Due time of this attempt, for LEASED events only; the message itself has only the due time of its latest attempt.
    due_ms: int | None = None
    #: For MOVED events that changed the due time: due times before and after; None if one of the hours is deleted.
    moved_ms: tuple[int, int] | None = None


@dataclass(slots=True)
class Retry:
    """The next attempt of a message that waits after a failed attempt."""

    #: Number of the next attempt, and limit of attempts (`max_attempts`); None: no limit. Attempts that do not count
    #: are left out.
    attempt: int
    most: int | None
    #: The last failed attempt; None if it is not known, as after a failover in interval mode.
    failure: PastEvent | None


@dataclass(slots=True)
class Description:
    """One message with its history."""

    id: int
    topic: str
    state: State
    deliver_at_ms: int
    published_at_ms: int
    #: Number of hand-outs of the message so far.
    attempt: int
    #: Meta of the message: the msgpack map in its record.
    meta: bytes
    #: Size of the message's body, in bytes.
    size: int
    history: list[PastEvent]
    #: Body of the message; None unless requested.
    body: bytes | None = None
    #: Location of the message's current index entry: hour, and number of the entry in the hour.
    hour: int = 0
    index: int = 0
    #: JSON that the message's ack carried; None without a result.
    result: bytes | None = None
    #: Progress that the handler of a leased message reported.
    progress: str | None = None
    retry: Retry | None = None


class Draft(Struct, frozen=True, gc=False):
    """One message to publish, checked by the HTTP API."""

    topic: str
    #: Due time in Unix ms, or a delay in ms when `relative`. Times in the past and zero mean now, a negative delay
    #: (OWN_DELAY) the delay of the topic.
    when_ms: int
    relative: bool
    tag_mask: int
    #: TTL in ms, counted from the due time; 0: the topic's TTL.
    ttl_ms: int
    #: Meta of the message's record: a msgpack map, or empty
    meta: bytes
    body: bytes
    #: Idempotency-Key of this message alone, from its batch item
    idem: bytes | None = None
    #: Client key. It is in `meta`, too, except with PERIOD.
    key: bytes | None = None
    #: Action if a pending message has the same client key: KEEP, REPLACE, REJECT or PERIOD.
    on_conflict: int = KEEP
    #: Only with REPLACE: longest time, in ms, from the first of the replaced publishes to the due time; 0: no limit.
    max_wait_ms: int = 0
    #: Whether `meta` has a webhook URL of this message, or topics of its callbacks.
    callback: bool = False
    #: Hash of the message's group (publishcommand.hash_group); the name is in `meta`.
    group: int | None = None
    #: `unique_for` in ms: for this time publishes with a `unique_ms` and the same client key are dropped, whether this
    #: message is pending or settled; 0: none.
    unique_ms: int = 0
    #: Whether `meta` names a batch that the message joins.
    batched: bool = False


def pack_id(group: int, hour: int, index: int) -> int:
    return group << 56 | hour << 32 | index


def unpack_id(message_id: int) -> tuple[int, int, int]:
    """Split a message id into group, hour, and number of its first index entry in the hour (globalIndex)."""
    return message_id >> 56, message_id >> 32 & 0xFFFFFF, message_id & 0xFFFFFFFF


def proves_record(message_id: int, record_id: int, hour: int, index: int) -> bool:
    """Whether an index entry may point to a record. The entry has the number `index` in `hour` and is of the message
    `message_id`; the record has the id `record_id`. True for the message's own record. Also true for a copy for a
    subscription that has moved, if the record is that of the published message, whose id is just before the copy's. A
    copy that moved may be back in the hour of its first entry."""
    moved = unpack_id(message_id)[1:] != (hour, index)
    return 0 <= message_id - record_id <= MAX_SUBSCRIPTIONS * moved


def encode_id(message_id: int) -> str:
    pairs = _PAIRS
    v = message_id
    return (
        _ALPHABET[v >> 60]
        + pairs[v >> 50 & 1023]
        + pairs[v >> 40 & 1023]
        + pairs[v >> 30 & 1023]
        + pairs[v >> 20 & 1023]
        + pairs[v >> 10 & 1023]
        + pairs[v & 1023]
    )


def decode_id(text: str) -> int:
    """Decode a message id from its 13 characters, in either case. Raises ValueError for any other text."""
    if len(text) != 13:
        raise ValueError(f"a message id has 13 characters, not {len(text)}")
    v = 0
    for c in text:
        digit = _VALUE.get(c)
        if digit is None:
            raise ValueError(f"{c!r} cannot be part of a message id")
        v = v << 5 | digit
    if v >> 64:
        raise ValueError("the first character of a message id is 0 to F")
    return v


def hour_name(hour: int) -> str:
    """Name of an hour in UTC: `2026112018`, or `dead-2026122018` for an hour of dead letters."""
    if hour >= DEAD_HOURS:
        return _DEAD + hour_name(hour - DEAD_HOURS)
    return datetime.fromtimestamp(hour * 3600, UTC).strftime("%Y%m%d%H")


def hour_from_name(name: str) -> int:
    """Number of an hour from its name in UTC. ValueError unless `name` is YYYYMMDDHH, or `dead-` and YYYYMMDDHH."""
    if name.startswith(_DEAD):
        return DEAD_HOURS + hour_from_name(name.removeprefix(_DEAD))
    try:
        if len(name) != 10 or not name.isdigit():
            raise ValueError
        return int(datetime.strptime(name, "%Y%m%d%H").replace(tzinfo=UTC).timestamp()) // 3600
    except ValueError:
        raise ValueError(f"an hour is written YYYYMMDDHH, not {name!r}") from None
