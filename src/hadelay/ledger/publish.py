"""Applies PUBLISH: files the messages of a committed batch, whole columns at a time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import I64, INDEX, RECORD, Mask, Rows
from hadelay.codec.publishcommand import CALLBACK, RELATIVE, Publish
from hadelay.codec.results import PublishResult, RowCode
from hadelay.ledger import idempotency, messagegroups, ttl
from hadelay.ledger.flow import publish_bucket
from hadelay.ledger.keys import Batch, Decision
from hadelay.ledger.quotas import refuse_beyond_quotas
from hadelay.ledger.state import Ledger
from hadelay.ledger.subscriptions import FanOut, fan_out
from hadelay.ledger.topicchanges import topic_or_new
from hadelay.ledger.topics import TopicState, by_topic, by_topic_bytes
from hadelay.ledger.transitions import FLAG_CALLBACK, FLAG_KEYED, FLAG_TTL, filed
from hadelay.ledger.unique import Periods
from hadelay.model import HOUR_MS, MAX_SUBSCRIPTIONS, NONE32


def apply_publish(ledger: Ledger, command: Publish, *, limited: bool = True, bounded: bool = True) -> PublishResult:
    """Apply PUBLISH: publish a batch. limited: whether the topics' publish_rate applies; bounded: whether any of the
    topics' quotas do."""
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
    periods = Periods(ledger, batch) if len(command.uniques) else None
    keys = Decision(ledger, batch) if len(command.client_keys) else None
    if periods is not None:
        periods.admit()
    fan = fan_out(ledger, batch)
    _refuse_full_hours(ledger, batch, 1 if fan is None else 1 + MAX_SUBSCRIPTIONS)
    if bounded:
        refuse_beyond_quotas(ledger, batch, keys, fan, limited)
    if take.any():
        _file(ledger, batch, slice(None) if take.all() else take, fan)
    if keys is not None:
        keys.finish()
    if periods is not None:
        periods.finish(take)
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
    """Refuse messages with a webhook URL or topics of callbacks of their own, unless the topic allows them."""
    rows = batch.command.rows
    callbacks = rows["flags"] & CALLBACK != 0
    for at, name in enumerate(batch.command.topics) if callbacks.any() else ():
        topic = ledger.topic(name)
        if topic is None or not topic.names_own:
            batch.refuse(callbacks & (rows["topic"] == at), RowCode.NO_CALLBACK)


def _refuse_full_hours(ledger: Ledger, batch: Batch, entries: int) -> None:
    """Refuse rows whose hours have no room for them. entries: limit of the entries of one row."""
    # Add the whole batch to the count of each of its hours: near an hour's limit, refusing too early is good enough.
    hours = batch.deliver_at_ms // HOUR_MS
    if len(hours) > 1 and (hours != hours[0]).any():
        full = ledger.store.counts(hours).astype(np.int64) + len(hours) * entries >= NONE32
    elif ledger.store.count(int(hours[0])) + len(hours) * entries >= NONE32:
        full = np.ones(len(hours), bool)
    else:
        return
    if full.any():
        batch.refuse(full, RowCode.HOUR_FULL)


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


def _count(ledger: Ledger, entries: Rows) -> None:
    for number, count, size in by_topic_bytes(entries):
        topic = ledger.topics[number]
        topic.open += count
        topic.published += count
        topic.bytes += size


def _file(ledger: Ledger, batch: Batch, take: slice | Mask, fan: FanOut | None) -> None:
    """File the command's rows `take`, and their copies for subscriptions: append records, entries and TTLs to their
    hours, and set the results."""
    command, topics = batch.command, batch.topics
    rows, copies = command.rows[take], None
    at: slice | NDArray[Any] = take
    numbers = topics[rows["topic"]] if len(topics) > 1 else topics
    headers = np.zeros(len(rows), RECORD)
    headers["meta_size"], headers["body_size"] = rows["meta_size"], rows["body_size"]
    headers["topic"] = numbers
    headers["published_at_ms"] = ledger.now_ms
    headers["deliver_at_ms"] = batch.deliver_at_ms[take]
    headers["payload_crc"] = rows["payload_crc"]
    if fan is not None:
        at, numbers, copies = fan.entries(batch)
        rows = command.rows[at]
    deliver = batch.deliver_at_ms[at]
    hours = deliver // HOUR_MS
    entries = np.zeros(len(rows), INDEX)
    entries["deliver_at_ms"] = deliver
    entries["tag_mask"] = rows["tag_mask"]
    entries["flags"] = _flags(command)[at]
    entries["size"] = command.sizes[at]
    entries["topic"] = numbers
    # The due time is never before now here, so the entry is filed under the second of the due time.
    entries["second"] = deliver // 1000 % 3600
    entries["generation"] = ledger.topics.generations[numbers]
    _count(ledger, entries)
    one = int(hours[0])
    into: int | I64 = one if len(hours) == 1 or (hours == one).all() else hours
    limited = _with_ttl(ledger, rows, entries)
    ledger.store.append(into, entries, _records(command, take), headers, copies)
    for n, ttl_ms in limited:
        ttl.begin(ledger, int(entries["first_id"][n]), int(deliver[n]), ttl_ms)
    published = slice(None) if copies is None else ~copies
    batch.result.ids[take] = entries["first_id"][published]
    batch.result.deliver_at_ms[take] = deliver[published]
    blocked = None
    if len(command.groups):
        row = np.flatnonzero(batch.take) if isinstance(at, slice) or copies is None else at
        blocked = _grouped(ledger, batch, into, entries, row)
    filed(ledger, into, entries, blocked)


def _grouped(ledger: Ledger, batch: Batch, into: int | I64, entries: Rows, row: NDArray[np.intp]) -> Mask | None:
    """Put the filed messages into their groups; returns which entries are blocked. row: row of each entry."""
    groups = batch.command.groups
    at = np.flatnonzero(np.isin(row, groups["row"]))
    if not len(at):
        return None
    of = groups["group"][groups["row"].searchsorted(row[at])]
    return messagegroups.publish(ledger, into, entries, at, of.tolist())


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
