"""Applies PUBLISH: files the messages of a committed batch, whole columns at a time."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import I64, INDEX, RECORD, Mask, Rows
from hadelay.codec.meta import batch_in, callback_meta
from hadelay.codec.publishcommand import BATCHED, CALLBACK, RELATIVE, Publish
from hadelay.codec.results import PublishResult, RowCode
from hadelay.ledger.batches import members
from hadelay.ledger.groups import messagegroups
from hadelay.ledger.hours.transitions import FLAG_CALLBACK, FLAG_KEYED, FLAG_TTL, filed
from hadelay.ledger.limits import shares
from hadelay.ledger.limits.flow import publish_bucket
from hadelay.ledger.limits.quotas import refuse_beyond_quotas
from hadelay.ledger.messages import idempotency, ttl
from hadelay.ledger.messages.keys import Batch, Decision
from hadelay.ledger.messages.subscriptions import FanOut, fan_out, meta_of
from hadelay.ledger.messages.unique import Periods
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.shards import is_foreign
from hadelay.ledger.topics.topicchanges import name_topics, topic_or_new
from hadelay.ledger.topics.topics import TopicState, by_topic, by_topic_bytes
from hadelay.model import HOUR_MS, MAX_SUBSCRIPTIONS, NONE32
from hadelay.settings.kinds import TOPIC_NAME
from hadelay.settings.shardmap import ALONE


def apply_publish(ledger: Ledger, command: Publish, *, limited: bool = True, bounded: bool = True) -> PublishResult:
    """Apply PUBLISH: publish a batch. limited: whether the topics' publish_rate applies; bounded: whether their quotas,
    publish_rate included, apply at all."""
    count = len(command.rows)
    result = PublishResult.blank(count)
    idempotency.turn(ledger)
    new_keys: list[int] = []
    take = np.ones(count, bool)
    if len(command.keys):
        new_keys, take = idempotency.repeat(ledger, command.keys, result)
        if result.duplicate.any():
            idempotency.refuse_cancelled(ledger, command, result)
    deliver_at_ms, too_far = _resolve(ledger, command)
    batch = Batch(command, result, take, deliver_at_ms)
    if too_far.any():
        batch.refuse(too_far, RowCode.TOO_FAR)
    if ledger.shards is not ALONE:
        _refuse_foreign(ledger, batch)
    _refuse_callbacks(ledger, batch)
    _find_batches(ledger, batch)
    _find_topics(ledger, batch)
    if new_keys:
        new_keys = idempotency.within_share(ledger, batch, new_keys)
    periods = Periods(ledger, batch) if len(command.uniques) else None
    keys = Decision(ledger, batch) if len(command.named) else None
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


def _resolve(ledger: Ledger, command: Publish) -> tuple[I64, Mask]:
    """Compute due times: (deliver_at_ms of each row of the command, which rows are beyond max_delay). Times in the past
    become now, and negative delays become the topics' delays. Delays are compared before they are added, since a sum
    could overflow."""
    now_ms, rows = ledger.now_ms, command.rows
    when = rows["when_ms"]
    relative = rows["flags"] & RELATIVE != 0
    own = relative & (when < 0)
    if own.any():
        topics = map(ledger.topic, command.topics)
        delays = np.array([(topic and topic.settings.delay_ms) or 0 for topic in topics], np.int64)[rows["topic"]]
        when = np.where(own & (delays > 0), delays, when)
    delay = np.maximum(np.where(relative, when, np.maximum(when, now_ms) - now_ms), 0)
    too_far = delay > ledger.settings.max_delay_ms
    return np.where(too_far, 0, delay) + now_ms, too_far


def _refuse_foreign(ledger: Ledger, batch: Batch) -> None:
    """Refuse rows whose topic, or a topic of whose callbacks, this shard may not create. If another shard owns a topic,
    all rows of the request are refused: a part of the request that is stored would be remembered under its
    Idempotency-Key, and the sender has to send each shard its own part."""
    command = batch.command
    foreign = np.array([is_foreign(ledger, name) for name in command.topics], np.bool_)[command.rows["topic"]]
    foreign &= batch.take
    for first, count in zip(command.keys["first"].tolist(), command.keys["count"].tolist(), strict=True):
        foreign[first : first + count] |= foreign[first : first + count].any()
    batch.refuse(foreign, RowCode.OTHER_SHARD)
    callbacks = command.rows["flags"] & CALLBACK != 0
    wrong = []
    for row in np.flatnonzero(callbacks & batch.take).tolist():
        meta = callback_meta(bytes(meta_of(command, row)))
        if any(name and is_foreign(ledger, name) for name in (meta.os, meta.of)):
            wrong.append(row)
    batch.refuse_rows(wrong, RowCode.FOREIGN_TARGET)


def _refuse_callbacks(ledger: Ledger, batch: Batch) -> None:
    """Refuse messages with a webhook URL or topics of callbacks of their own, unless the topic allows them."""
    rows = batch.command.rows
    callbacks = rows["flags"] & CALLBACK != 0
    if not callbacks.any():
        return
    topics = map(ledger.topic, batch.command.topics)
    refusing = np.array([topic is None or not topic.names_own for topic in topics], np.bool_)
    batch.refuse(callbacks & refusing[rows["topic"]], RowCode.NO_CALLBACK)
    if not shares.is_bounded(ledger):
        return
    wrong = []
    for row in np.flatnonzero(callbacks & batch.take).tolist():
        meta = callback_meta(bytes(meta_of(batch.command, row)))
        if name_topics(ledger, [name for name in (meta.os, meta.of) if name and TOPIC_NAME.fullmatch(name)]):
            wrong.append(row)
    batch.refuse_rows(wrong, RowCode.SHARE_OF_TOPICS)


def _find_batches(ledger: Ledger, batch: Batch) -> None:
    """Note the batches that messages join; refuse messages whose batch is missing or takes no further member."""
    rows = batch.command.rows
    known: dict[str, int | RowCode] = {}
    refused: dict[RowCode, list[int]] = {}
    for row in np.flatnonzero(rows["flags"] & BATCHED).tolist():
        key = batch_in(meta_of(batch.command, row))
        found = known[key] = known[key] if key in known else members.to_join(ledger, key)
        if isinstance(found, RowCode):
            refused.setdefault(found, []).append(row)
        else:
            batch.joins[row] = found
    for code, which in refused.items():
        batch.refuse_rows(which, code)


def _refuse_full_hours(ledger: Ledger, batch: Batch, entries: int) -> None:
    """Refuse rows whose hours have no room for them. entries: maximum number of entries that one row makes."""
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
    refused: dict[RowCode, list[int]] = {}
    for at, name in enumerate(batch.command.topics):
        if not used[at]:
            continue
        topic = topic_or_new(ledger, name) if ledger.settings.auto_create_topics else ledger.topic(name)
        if topic is None:
            crowded = ledger.settings.auto_create_topics and ledger.known_topic(name) is None
            full = len(ledger.topics.all) >= ledger.settings.max_topics
            crowd = RowCode.TOO_MANY_TOPICS if full else RowCode.SHARE_OF_TOPICS
            refused.setdefault(crowd if crowded else RowCode.NO_TOPIC, []).append(at)
        else:
            batch.topics[at] = topic.number
    for code, which in refused.items():
        wrong = np.zeros(len(batch.topics), np.bool_)
        wrong[which] = True
        batch.refuse(wrong[local], code)


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
    blocked, row = None, None
    if len(command.groups) or batch.joins:
        row = np.flatnonzero(batch.take) if isinstance(at, slice) or copies is None else at
    if batch.joins and row is not None:
        members.join(ledger, into, entries, [batch.joins.get(n, 0) for n in row.tolist()])
    if len(command.groups) and row is not None:
        blocked = _grouped(ledger, batch, into, entries, row)
    filed(ledger, into, entries, blocked)


def _grouped(ledger: Ledger, batch: Batch, into: int | I64, entries: Rows, row: NDArray[np.intp]) -> Mask | None:
    """Put the filed messages into their groups; returns which entries are blocked. row: command row of each entry."""
    groups = batch.command.groups
    at = np.flatnonzero(np.isin(row, groups["row"]))
    if not len(at):
        return None
    of = groups["group"][groups["row"].searchsorted(row[at])]
    return messagegroups.publish(ledger, into, entries, at, of.tolist())


def _flags(command: Publish) -> NDArray[np.uint16]:
    flags = np.zeros(len(command.rows), np.uint16)
    flags[command.rows["flags"] & CALLBACK != 0] = FLAG_CALLBACK
    if len(command.named):
        flags[command.named["row"]] |= FLAG_KEYED
    return flags


def _with_ttl(ledger: Ledger, rows: Rows, entries: Rows) -> list[tuple[int, int]]:
    """Find the rows that have a TTL, of their own or of their topic: (row, TTL in ms) of each; sets the flag of their
    entries."""
    ttl_ms = rows["ttl_ms"].copy()
    used = [number for number, _ in by_topic(entries["topic"])]
    if defaults := {n: default for n in used if (default := ledger.topics[n].settings.ttl_ms)}:
        own = np.array([defaults.get(n, 0) for n in used], ttl_ms.dtype)[np.searchsorted(used, entries["topic"])]
        ttl_ms = np.where((ttl_ms <= 0) & (own > 0), own, ttl_ms)
    limited = np.flatnonzero(ttl_ms > 0)
    if not len(limited):
        return []
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
