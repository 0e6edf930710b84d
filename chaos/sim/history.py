"""What clients of a simulated run saw: requests, answers and hand-outs with their true times; and the faults meanwhile.

The checks (chaos/sim/promises.py) read nothing else for what is promised to users. Times are true seconds since the
start unless a name says `_ms`, which is cluster time as a node reported it.
"""

import struct
from collections import deque
from dataclasses import dataclass, field

from hadelay.codec.meta import Filter
from hadelay.model import KEEP, REPLACE

_NUMBER = struct.Struct("<I")


class Violation(AssertionError):
    """A broken promise. ids: messages concerned; who: name of the node."""

    def __init__(self, invariant: str, text: str, ids: frozenset[int] = frozenset(), who: str = "") -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant, self.ids, self.who = invariant, ids, who


@dataclass(slots=True, eq=False)
class Message:
    """One message of a producer. `number` is in the message's body, so that a receiver can identify the message."""

    number: int
    topic: str
    relative: bool
    #: Delay in ms if `relative`; otherwise due time in Unix ms.
    when_ms: int
    padding: int
    invoked: float
    #: First answer that confirmed the publish: its time, and the id and due time in it.
    stored: float | None = None
    id: int | None = None
    deliver_at_ms: int | None = None
    #: True if the publish was refused, or its outcome will stay unknown: consumers need not get the message.
    refused: bool = False
    #: True if the publish was repeated when its idempotency key may have been forgotten.
    repeated_late: bool = False
    #: True if the message was certainly never stored: every request for it was refused definitely.
    absent: bool = False
    cancel_invoked: float | None = None
    cancelled: float | None = None
    client_key: bytes | None = None
    on_conflict: int = KEEP
    max_wait_ms: int = 0
    #: Id of the message that this message replaced, from the receipt.
    replaces: int | None = None
    #: TTL after the due time, in ms; 0: unlimited.
    ttl_ms: int = 0
    #: Whether the message may have been rescheduled.
    rescheduled: bool = False
    #: Whether the due time of the message may differ from `deliver_at_ms`.
    unsure: bool = False
    #: True if the first receipt may name another message, which had this message's client key (on_conflict=keep).
    kept_other: bool = False
    tags: tuple[str, ...] = ()
    group: str | None = None

    @property
    def body(self) -> bytes:
        return _NUMBER.pack(self.number) + bytes([self.number & 0xFF]) * self.padding


def number_of(body: bytes) -> int | None:
    """Number of the message that the body belongs to; None for a damaged body."""
    if len(body) < _NUMBER.size or body.count(body[:1], _NUMBER.size) != len(body) - _NUMBER.size:
        return None
    return int(_NUMBER.unpack_from(body)[0])


@dataclass(slots=True, eq=False)
class HandOut:
    id: int
    attempt: int
    term: int
    seq: int
    position: int
    lease: str
    node: str
    consumer: str
    request_id: bytes
    #: Time of the node's answer; `received` is None if the answer never reached the consumer.
    answered: float
    now_ms: int
    until_ms: int
    deliver_at_ms: int
    redelivered: bool
    #: Raft term in which the node that handed the message out was leader.
    leading: int
    body: bytes
    received: float | None = None
    #: True if an earlier receive with the same request id may have got the message.
    again: bool = False
    nack_invoked: float | None = None
    #: True if the consumer gave the message back without counting the attempt.
    excused: bool = False
    #: Whether the consumer asked to make the message a dead letter.
    given_up: bool = False
    #: Time at which the cluster confirmed that it made the message a dead letter.
    dead: float | None = None
    ack_invoked: float | None = None
    #: Time of the answer `acked` or `already_acked` to the ack; None without such an answer.
    acked: float | None = None
    #: Result that the consumer's ack carried.
    result: bytes | None = None
    #: Whether the ack was answered `acked`: then the cluster has to keep the result.
    result_taken: bool = False
    extend_invoked: float | None = None
    #: Webhook calls only: time at which the receiver had handled the call.
    ended: float = 0.0
    #: Webhook calls only: Retry-After in the receiver's answer to the node.
    retry_after_ms: int = 0
    #: `tags`: tags in the message's record. `wanted`: tag filter of the receive.
    tags: tuple[str, ...] = ()
    wanted: Filter | None = None
    #: Limit of messages of one group that the receive asked for.
    group_max: int = 1


@dataclass(slots=True, eq=False)
class Order:
    """An administrator's request to purge or redrive a topic, or to begin a bulk job. Until the request is answered, it
    may take effect at any time after `invoked`."""

    kind: str
    topic: str
    invoked: float
    #: States that a purge names, as bits of ledger/topics/topicchanges.py.
    states: int = 0
    #: Ids that a redrive names; None: all dead letters.
    ids: frozenset[int] | None = None
    answered: float | None = None

    def may_mean(self, message: Message, message_id: int) -> bool:
        """Whether the order may have affected this message."""
        named = self.ids is None or message_id in self.ids
        return self.topic == message.topic and named and (self.answered is None or message.invoked < self.answered)

    def between(self, start: float, end: float) -> bool:
        """Whether the order may have taken effect between the times `start` and `end`."""
        return self.invoked < end and (self.answered is None or self.answered > start)


@dataclass(slots=True, eq=False)
class FannedOut:
    """A message published to a topic with subscriptions. `queues`: topic and subscriptions that must get it; those that
    may get it, too, are in `unsure`."""

    number: int
    tags: tuple[str, ...]
    queues: set[str]
    unsure: set[str] = field(default_factory=set)
    id: int = 0
    #: True once all copies of the message were cancelled by a confirmed request.
    cancelled: bool = False
    cancel_invoked: bool = False
    ttl_ms: int = 0
    #: Queue → id under which the message was handed out there.
    ids: dict[str, int] = field(default_factory=dict)
    acked: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Parcel:
    """A message of the client that transfers messages (chaos/sim/transferclient.py), or a copy for a subscription."""

    id: int
    #: TTL in ms; 0: unlimited.
    ttl_ms: int
    #: Whether a client's request may have ended the message.
    may_end: bool = False
    #: True time at which an ack of the message was confirmed.
    acked: float | None = None


@dataclass
class History:
    messages: list[Message] = field(default_factory=list)
    hand_outs: list[HandOut] = field(default_factory=list)
    #: Messages of the topic with subscriptions (chaos/sim/fanout.py).
    fanned_out: list[FannedOut] = field(default_factory=list)
    #: Message id → message of topics between which messages are transferred (chaos/sim/transfers.py).
    parcels: dict[int, Parcel] = field(default_factory=dict)
    #: Ids of the messages that were pending when a subscription was created that also gets pending messages.
    filled_from: set[int] = field(default_factory=set)
    #: Receives as (consumer, request_id) whose consumer hung up before messages were granted to them.
    hung_up: set[tuple[str, bytes]] = field(default_factory=set)
    #: Contradictory receipts: one idempotency key got two ids: (message number, first id, other id).
    second_ids: list[tuple[int, int, int]] = field(default_factory=list)
    #: (topic, client key) of messages that may have been cancelled.
    cancelled_keys: set[tuple[str, bytes]] = field(default_factory=set)
    #: (topic, client key) in reschedule requests, which may have affected any message with the key.
    moved_keys: set[tuple[str, bytes | None]] = field(default_factory=set)
    #: `orders`: purges and redrives by the administrator. `limited`: time at which the limit of attempts of the
    #: administrator's topic was confirmed.
    orders: list[Order] = field(default_factory=list)
    limited: float | None = None
    #: Topics whose `group_concurrency` was set with a confirmed request.
    grouped: set[str] = field(default_factory=set)
    #: Time at which the limit of hand-outs per group and second was confirmed.
    rated: float | None = None
    #: True after a suspension for hours: the cluster may have forgotten messages that ended.
    slept: bool = False
    #: True once the administrator slowed its topic down.
    slowed: bool = False
    notes: deque[tuple[float, str, str, frozenset[int]]] = field(default_factory=lambda: deque(maxlen=20_000))
    #: Event counts by name, such as faults, answers and checked cases.
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, n: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + n

    def decide(self, promise: str, broken: bool, text: str, *ids: int | None, who: str = "") -> None:
        """Count a case in which a promise was checked. Raises Violation if it is broken. ids: messages concerned."""
        self.count(f"checked {promise}")
        if broken:
            raise Violation(promise, text, frozenset(i for i in ids if i is not None), who)

    def message_of(self, body: bytes) -> Message | None:
        """Message with this body, found by the number in the body; None for a damaged body."""
        number = number_of(body)
        return self.messages[number] if number is not None and number < len(self.messages) else None

    def meant(self, kind: str, message: Message, message_id: int) -> list[Order]:
        """Orders of this kind ("purge" or "redrive") that may have affected the message."""
        return [order for order in self.orders if order.kind == kind and order.may_mean(message, message_id)]

    def may_be_replaced(self, message: Message, message_id: int) -> bool:
        """Whether another message with the same client key may have replaced the message: its receipt says so, or there
        is no receipt."""
        key = message.topic, message.client_key
        others = (m for m in self.messages if m.on_conflict == REPLACE and (m.topic, m.client_key) == key)
        unknown = any(m.replaces == message_id or m.repeated_late or not (m.absent or m.id) for m in others)
        return key[1] is not None and unknown

    def own_id(self, message: Message) -> bool:
        """Whether the receipt's id is surely the message's own, and not of another message with its client key."""
        return not message.kept_other or any(h.id == message.id and h.body == message.body for h in self.hand_outs)

    def moved(self, message: Message) -> bool:
        """Whether the message may have been rescheduled since its publish."""
        by_key = (message.topic, message.client_key) in self.moved_keys
        return message.rescheduled or by_key or bool(self.meant("job move", message, message.id or 0))

    def note(self, at: float, who: str, text: str, ids: frozenset[int] = frozenset()) -> None:
        self.notes.append((at, who, text, ids))
