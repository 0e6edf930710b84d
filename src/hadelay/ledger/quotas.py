"""Quotas of a topic: pending messages, pending bytes, and publishes per second. Apply decides row by row, so that a
limit is the cluster's: the same on every node, through whichever node a message came, and after a failover.
"""

from __future__ import annotations

import numpy as np

from hadelay.codec.results import RowCode
from hadelay.ledger.batch import Batch
from hadelay.ledger.flow import PLENTY, publish_bucket
from hadelay.ledger.keys import Decision
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import Topic

#: No limit: more than there can be.
_NO_BOUND = 1 << 62


def refuse_beyond_quotas(ledger: Ledger, batch: Batch, keys: Decision | None) -> None:
    """Refuse rows that their topics have no room for. A refused row takes no room from the next.

    Rows that replace another message need no room among the messages. Once a row with a client key was refused, the
    topic's later rows with keys are too: they may build on it.
    """
    command, take = batch.command, batch.take
    for at, number in enumerate(batch.topics.tolist()):
        if number >= len(ledger.topics.all):
            continue
        settings = ledger.topics[number].settings
        if settings.publish_rate is None and settings.max_messages is None and settings.max_bytes is None:
            continue
        mine = np.flatnonzero(take & (command.rows["topic"] == at))
        if not len(mine):
            continue
        keyed, replacing = set(command.client_keys["row"].tolist()), keys.replacing() if keys is not None else set()
        rows = [(row in keyed, row in replacing) for row in mine.tolist()]
        refused = _judge(ledger, ledger.topics[number], command.sizes[mine].tolist(), rows)
        batch.result.codes[mine] = refused
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
    """Time in ms until the topic's publish rate lets the next message through; 0: now."""
    if topic is None or topic.settings.publish_rate is None:
        return 0
    bucket = publish_bucket(topic.settings.publish_rate, topic.spent_ns)
    return 0 if bucket.available(now_ms) else bucket.next_ms() - now_ms
