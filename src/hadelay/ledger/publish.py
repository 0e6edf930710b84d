"""Applies PUBLISH: files the messages of a committed batch, whole columns at a time."""

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import I64, INDEX, RECORD, Mask, Rows
from hadelay.codec.publishcommand import CALLBACK, RELATIVE, Publish
from hadelay.codec.results import PublishResult, RowCode
from hadelay.ledger import idempotency, messagegroups, ttl
from hadelay.ledger.flow import PLENTY, publish_bucket
from hadelay.ledger.keys import Batch, Decision
from hadelay.ledger.state import Ledger
from hadelay.ledger.topicchanges import topic_or_new
from hadelay.ledger.topics import TopicState, by_topic
from hadelay.ledger.transitions import FLAG_CALLBACK, FLAG_KEYED, FLAG_TTL, filed
from hadelay.model import HOUR_MS, NONE32

#: Number that stands for "no limit" of messages or bytes: more than there can be.
_NO_BOUND = 1 << 62


def apply_publish(ledger: Ledger, command: Publish, *, limited: bool = True) -> PublishResult:
    """Apply PUBLISH: publish a batch. limited: whether the topics' publish_rate applies."""
    count = len(command.rows)
    result = PublishResult(
        np.zeros(count, np.uint64), np.zeros(count, np.int64), np.zeros(count, np.uint8), np.zeros(count, bool)
    )
    idempotency.turn(ledger)
    new_keys: list[int] = []
    take = np.ones(count, bool)
    if len(command.keys):
        new_keys, take = idempotency.repeat(ledger, command.keys, result)
    deliver_at_ms, too_far = _resolve(ledger, command.rows)
    batch = Batch(command, result, take, deliver_at_ms)
    if too_far.any():
        batch.refuse(too_far, RowCode.TOO_FAR)
    _refuse_callbacks(ledger, batch)
    _find_topics(ledger, batch)
    keys = Decision(ledger, batch) if len(command.client_keys) else None
    _refuse_full_hours(ledger, batch)
    _refuse_beyond_quotas(ledger, batch, keys, limited)
    _count(ledger, batch)
    if take.any():
        _file(ledger, batch, slice(None) if take.all() else take)
    if keys is not None:
        keys.finish()
    if new_keys:
        idempotency.remember(ledger, command.keys, new_keys, result)
    return result


def _resolve(ledger: Ledger, rows: Rows) -> tuple[I64, Mask]:
    """(deliver_at_ms, which rows are beyond max_delay) of PUBLISH_ROWs; times in the past become now. Delays are
    compared before they are added, since a sum could overflow."""
    now_ms = ledger.now_ms
    when = rows["when_ms"]
    relative = rows["flags"] & RELATIVE != 0
    delay = np.maximum(np.where(relative, when, np.maximum(when, now_ms) - now_ms), 0)
    too_far = delay > ledger.settings.max_delay_ms
    return np.where(too_far, 0, delay) + now_ms, too_far


def _refuse_callbacks(ledger: Ledger, batch: Batch) -> None:
    """Refuse messages with a webhook URL of their own if the topic has no webhook or does not allow such URLs."""
    rows = batch.command.rows
    callbacks = rows["flags"] & CALLBACK != 0
    for at, name in enumerate(batch.command.topics) if callbacks.any() else ():
        topic = ledger.topic(name)
        webhook = topic.settings.webhook if topic is not None else None
        if webhook is None or not webhook.allow_per_message:
            batch.refuse(callbacks & (rows["topic"] == at), RowCode.NO_CALLBACK)


def _refuse_full_hours(ledger: Ledger, batch: Batch) -> None:
    # Add the whole batch to the count of each of its hours: near an hour's limit, refusing too early is good enough.
    hours = batch.deliver_at_ms // HOUR_MS
    if len(hours) > 1 and (hours != hours[0]).any():
        full = ledger.store.counts(hours).astype(np.int64) + len(hours) >= NONE32
    elif ledger.store.count(int(hours[0])) + len(hours) >= NONE32:
        full = np.ones(len(hours), bool)
    else:
        return
    if full.any():
        batch.refuse(full, RowCode.HOUR_FULL)


def _refuse_beyond_quotas(ledger: Ledger, batch: Batch, keys: Decision | None, limited: bool) -> None:
    """Refuse rows beyond the quotas of their topics: pending messages, pending bytes, publishes per second. Apply
    decides, so that quotas hold for the whole cluster, also after a failover. Refused rows do not count.

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
        refused = _judge(ledger, ledger.topics[number], command.sizes[mine].tolist(), rows, limited)
        batch.result.codes[mine] = refused
        take[mine] = np.array(refused) == RowCode.OK


def _judge(
    ledger: Ledger, topic: TopicState, sizes: list[int], rows: list[tuple[bool, bool]], limited: bool
) -> list[RowCode]:
    settings, verdicts, key_refused = topic.settings, [], RowCode.OK
    rate = settings.publish_rate if limited else None
    bucket = None if rate is None else publish_bucket(rate, topic.spent_ns)
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


def _find_topics(ledger: Ledger, batch: Batch) -> None:
    """Fill batch.topics, creating missing topics if that is allowed; refuse the rows of other missing topics."""
    local = batch.command.rows["topic"]
    used = np.bincount(local[batch.take], minlength=len(batch.topics)).tolist()
    for at, name in enumerate(batch.command.topics):
        if not used[at]:
            continue
        topic = topic_or_new(ledger, name) if ledger.settings.auto_create_topics else ledger.topic(name)
        if topic is None:
            crowded = ledger.settings.auto_create_topics and ledger.known_topic(name) is None
            batch.refuse(local == at, RowCode.TOO_MANY_TOPICS if crowded else RowCode.NO_TOPIC)
        else:
            batch.topics[at] = topic.number


def _count(ledger: Ledger, batch: Batch) -> None:
    command, take = batch.command, batch.take
    local, width = command.rows["topic"][take], len(batch.topics)
    counts, sizes = np.bincount(local, minlength=width), np.bincount(local, command.sizes[take], minlength=width)
    for number, count, size in zip(batch.topics.tolist(), counts.tolist(), sizes.tolist(), strict=True):
        if count:
            topic = ledger.topics[number]
            topic.open += count
            topic.published += count
            topic.bytes += int(size)


def _file(ledger: Ledger, batch: Batch, take: slice | Mask) -> None:
    """File the rows of the command that `take` selects: append records, entries and TTLs, and set the rows' results."""
    command, topics = batch.command, batch.topics
    rows, deliver = command.rows[take], batch.deliver_at_ms[take]
    hours = deliver // HOUR_MS
    numbers = topics[rows["topic"]] if len(topics) > 1 else topics
    headers = np.zeros(len(rows), RECORD)
    headers["meta_size"], headers["body_size"] = rows["meta_size"], rows["body_size"]
    headers["topic"] = numbers
    headers["published_at_ms"] = ledger.now_ms
    headers["deliver_at_ms"] = deliver
    headers["payload_crc"] = rows["payload_crc"]
    entries = np.zeros(len(rows), INDEX)
    entries["deliver_at_ms"] = deliver
    entries["tag_mask"] = rows["tag_mask"]
    entries["flags"] = _flags(command)[take]
    entries["size"] = command.sizes[take]
    entries["topic"] = numbers
    # The due time is never before now here, so the entry is filed under the second of the due time.
    entries["second"] = deliver // 1000 % 3600
    entries["generation"] = ledger.topics.generations[numbers]
    one = int(hours[0])
    into: int | I64 = one if len(hours) == 1 or (hours == one).all() else hours
    limited = _with_ttl(ledger, rows, entries)
    ledger.store.append(into, entries, _records(command, take), headers)
    for at, ttl_ms in limited:
        ttl.begin(ledger, int(entries["first_id"][at]), int(deliver[at]), ttl_ms)
    batch.result.ids[take] = entries["first_id"]
    batch.result.deliver_at_ms[take] = deliver
    filed(ledger, into, entries, _grouped(ledger, batch, into, entries) if len(command.groups) else None)


def _grouped(ledger: Ledger, batch: Batch, into: int | I64, entries: Rows) -> Mask | None:
    """Put the filed messages into their groups; returns which entries are blocked."""
    groups = batch.command.groups[batch.take[batch.command.groups["row"]]]
    if not len(groups):
        return None
    # Position of each row among the rows that were filed.
    at = np.cumsum(batch.take) - 1
    return messagegroups.publish(ledger, into, entries, at[groups["row"]], groups["group"].tolist())


def _flags(command: Publish) -> NDArray[np.uint16]:
    flags = np.zeros(len(command.rows), np.uint16)
    flags[command.rows["flags"] & CALLBACK != 0] = FLAG_CALLBACK
    if len(command.client_keys):
        flags[command.client_keys["row"]] |= FLAG_KEYED
    return flags


def _with_ttl(ledger: Ledger, rows: Rows, entries: Rows) -> list[tuple[int, int]]:
    """(row, TTL in ms) of rows that have a TTL, of their own or of their topic; sets the flag of their entries."""
    ttl_ms = rows["ttl_ms"].copy()
    for number, _ in by_topic(entries["topic"]):
        if default := ledger.topics[number].settings.ttl_ms:
            ttl_ms[(entries["topic"] == number) & (ttl_ms <= 0)] = default
    limited = np.flatnonzero(ttl_ms > 0)
    entries["flags"][limited] |= FLAG_TTL
    return [(at, min(int(ttl_ms[at]), ledger.settings.max_delay_ms)) for at in limited.tolist()]


def _records(command: Publish, take: slice | Mask) -> bytearray:
    if isinstance(take, slice):
        return bytearray(command.blob)
    spans = zip(command.starts[take].tolist(), command.sizes[take].tolist(), strict=True)
    return bytearray(b"".join([command.blob[start : start + size] for start, size in spans]))


def retry_after_ms(topic: TopicState | None, now_ms: int) -> int:
    """Time in ms until the topic's publish rate lets the next message through; 0: now."""
    if topic is None or topic.settings.publish_rate is None:
        return 0
    bucket = publish_bucket(topic.settings.publish_rate, topic.spent_ns)
    return 0 if bucket.available(now_ms) else bucket.next_ms() - now_ms
