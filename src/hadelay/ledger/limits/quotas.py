"""Quotas of a PUBLISH: pending messages and bytes of topics and subscriptions, and publishes per second.

Apply decides, so that quotas hold for the whole cluster, also after a failover. Refused rows do not count.
"""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from hadelay.codec.formats import Mask
from hadelay.codec.results import RowCode
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.ledger.limits.flow import PLENTY, publish_bucket
from hadelay.ledger.messages.keys import Batch, Decision
from hadelay.ledger.messages.subscriptions import FanOut
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import SEPARATOR

#: Number that stands for "no limit" of messages or bytes: more than there can be.
_NO_BOUND = 1 << 62


class Room:
    """Room that a topic or a subscription has for further messages, by its quotas, while apply judges a PUBLISH."""

    def __init__(self, topic: TopicState) -> None:
        settings = topic.settings
        self.number, self._subscribed = topic.number, SEPARATOR in topic.name
        #: Whether the subscription drops copies for which it has no room (on_full "drop"); otherwise the message is
        #: refused.
        self.drops = settings.on_full == "drop"
        self.messages = _NO_BOUND if settings.max_messages is None else settings.max_messages - topic.pending
        self.bytes = _NO_BOUND if settings.max_bytes is None else settings.max_bytes - topic.bytes

    def refusal(self, size: int, replaced: Collection[int]) -> RowCode:
        """Reason to refuse a message of this size for lack of room; OK if there is room. replaced: numbers of the
        topics in whose queues the message replaces another one, which makes room there."""
        if self.messages <= 0 and self.number not in replaced:
            return RowCode.SUBSCRIPTION_FULL if self._subscribed else RowCode.TOO_MANY_MESSAGES
        if size > self.bytes:
            return RowCode.SUBSCRIPTION_FULL if self._subscribed else RowCode.TOO_MANY_BYTES
        return RowCode.OK

    def take(self, size: int, replaced: Collection[int]) -> None:
        self.messages -= self.number not in replaced
        self.bytes -= size


class _Row(NamedTuple):
    """A row of a PUBLISH, with all that quotas depend on."""

    #: Number of the row in the command.
    at: int
    size: int
    keyed: bool
    #: Row of the same command whose message this row replaces; or numbers of the topics in whose queues it replaces an
    #: earlier message.
    replaced: int | Collection[int]
    #: Room of each queue in which the row and its copies are to be filed.
    rooms: list[Room]


def refuse_beyond_quotas(
    ledger: Ledger, batch: Batch, keys: Decision | None, fan: FanOut | None, limited: bool
) -> None:
    """Refuse rows beyond the quotas of their topics, and rows for which a subscription has no room; drop the copies for
    full subscriptions with on_full "drop". limited: whether publish_rate applies.

    Rows that replace another message need no room among the messages of its queues. Once a row with a client key was
    refused, the topic's later rows with keys are refused as well: one of them may replace or repeat the refused
    message.
    """
    command, take = batch.command, batch.take
    copies: dict[str, list[tuple[TopicState, Mask]]] = {}
    for to, mask in () if fan is None else fan.copies:
        if _is_bounded(to):
            copies.setdefault(to.name.partition(SEPARATOR)[0], []).append((to, mask))
    bounded: set[int] = set()
    for at, number in enumerate(batch.topics.tolist()):
        topic = ledger.topics[number] if number < len(ledger.topics.all) else None
        if topic is None:
            continue
        if topic.settings.publish_rate is not None or _is_bounded(topic) or topic.name in copies:
            bounded.add(at)
    if not bounded:
        return
    keyed, replaced = set(command.named["row"].tolist()), {} if keys is None else keys.replaced()
    at_rows = np.flatnonzero(take)
    for at, where in rows_by_value(command.rows["topic"][at_rows]):
        if at not in bounded:
            continue
        mine, topic = at_rows[where], ledger.topics[int(batch.topics[at])]
        own, others = Room(topic), [(Room(to), mask) for to, mask in copies.get(topic.name, ())]
        rows = []
        for row, size in zip(mine.tolist(), command.sizes[mine].tolist(), strict=True):
            wanted = [own] if fan is None or fan.own[row] else []
            wanted += [room for room, mask in others if mask[row]]
            rows.append(_Row(row, size, row in keyed, replaced.get(row, ()), wanted))
        refused = _judge(ledger, own, rows, fan, limited)
        batch.result.codes[mine] = refused
        take[mine] = np.array(refused) == RowCode.OK


def _is_bounded(topic: TopicState) -> bool:
    return topic.settings.max_messages is not None or topic.settings.max_bytes is not None


def _judge(ledger: Ledger, own: Room, rows: list[_Row], fan: FanOut | None, limited: bool) -> list[RowCode]:
    """Judge rows of one topic in order; returns a RowCode per row. own: room of the topic's queue. Removes the copies
    for full subscriptions from `fan`, for accepted rows."""
    topic = ledger.topics[own.number]
    verdicts, key_refused = [], RowCode.OK
    rate = topic.settings.publish_rate if limited else None
    bucket = None if rate is None else publish_bucket(rate, topic.spent_ns)
    tokens = PLENTY if bucket is None else bucket.available(ledger.now_ms)
    #: Accepted row → numbers of the topics in whose queues it is filed.
    filed: dict[int, Collection[int]] = {}
    for row in rows:
        replaced = filed.get(row.replaced, ()) if isinstance(row.replaced, int) else row.replaced
        full = {room.number for room in row.rooms if room.drops and room.refusal(row.size, replaced)}
        rooms = [room for room in row.rooms if room.number not in full]
        if full and fan is not None and fan.has_only(row.at, full):
            rooms = [own]
        verdict = key_refused if row.keyed else RowCode.OK
        for room in rooms:
            verdict = verdict or room.refusal(row.size, replaced)
        if not verdict and tokens <= 0:
            verdict = RowCode.TOO_FAST
        if not verdict:
            tokens -= 1
            for room in rooms:
                room.take(row.size, replaced)
            filed[row.at] = {room.number for room in rooms}
            if full and fan is not None:
                fan.drop(row.at, full)
        if row.keyed:
            key_refused = verdict
        verdicts.append(verdict)
    if bucket is not None:
        bucket.take(verdicts.count(RowCode.OK), ledger.now_ms)
        topic.spent_ns = bucket.spent_ns
    return verdicts
