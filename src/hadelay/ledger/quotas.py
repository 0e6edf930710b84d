"""What a topic takes: messages and bytes that are pending, and publishes per second. Judged by apply, row by row, so
that the limit is the cluster's: the same on every node, through whichever node a message came, and after a failover.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.publishcommand import Publish
from hadelay.codec.results import RowCode
from hadelay.ledger.flow import PLENTY, publish_bucket
from hadelay.ledger.keys import Decision
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import Topic
from hadelay.settings.topic import TopicSettings

#: More than there can be.
_NO_BOUND = 1 << 62


def has_quota(settings: TopicSettings) -> bool:
    limits = (settings.publish_rate, settings.max_messages, settings.max_bytes)
    return any(limit is not None for limit in limits)


def refuse_beyond_quotas(
    ledger: Ledger, command: Publish, numbers: NDArray[np.uint32], keys: Decision | None, codes: NDArray[np.uint8],
    take: NDArray[np.bool_],
) -> None:  # fmt: skip
    """Take rows that their topics have no room for out of `take`. One that is refused takes no room from the next.

    numbers: of the command's topics. What replaces another message needs no room among them, and once a row with a
    client key was refused, the topic's later ones with keys are too: they may build on it.
    """
    for at, number in enumerate(numbers.tolist()):
        if number >= len(ledger.topics.all) or not has_quota(ledger.topics[number].settings):
            continue
        mine = np.flatnonzero(take & (command.rows["topic"] == at))
        if not len(mine):
            continue
        keyed, replacing = set(command.client_keys["row"].tolist()), keys.replacing() if keys is not None else set()
        rows = [(row in keyed, row in replacing) for row in mine.tolist()]
        refused = _judge(ledger, ledger.topics[number], command.sizes[mine].tolist(), rows)
        codes[mine] = refused
        take[mine] = np.array(refused) == RowCode.OK


def _judge(ledger: Ledger, topic: Topic, sizes: list[int], rows: list[tuple[bool, bool]]) -> list[RowCode]:
    settings, verdicts, key_refused = topic.settings, [], RowCode.OK
    bucket = None if settings.publish_rate is None else publish_bucket(settings.publish_rate, topic.spent_ns)
    tokens = PLENTY if bucket is None else bucket.available(ledger.now_ms)
    messages = _NO_BOUND if settings.max_messages is None else settings.max_messages - topic.pending
    room = _NO_BOUND if settings.max_bytes is None else settings.max_bytes - topic.bytes
    for size, (keyed, replacing) in zip(sizes, rows, strict=True):
        verdict = RowCode.OK
        if keyed and key_refused:
            verdict = key_refused
        elif messages <= 0 and not replacing:
            verdict = RowCode.TOO_MANY_MESSAGES
        elif size > room:
            verdict = RowCode.TOO_MANY_BYTES
        elif tokens <= 0:
            verdict = RowCode.TOO_FAST
        else:
            messages, room, tokens = messages - (not replacing), room - size, tokens - 1
        if keyed:
            key_refused = verdict
        verdicts.append(verdict)
    if bucket is not None:
        bucket.take(verdicts.count(RowCode.OK), ledger.now_ms)
        topic.spent_ns = bucket.spent_ns
    return verdicts


def retry_after_ms(topic: Topic | None, now_ms: int) -> int:
    """In how long the topic's publish rate lets the next message through; 0: now."""
    if topic is None or topic.settings.publish_rate is None:
        return 0
    bucket = publish_bucket(topic.settings.publish_rate, topic.spent_ns)
    return 0 if bucket.available(now_ms) else bucket.next_ms() - now_ms
