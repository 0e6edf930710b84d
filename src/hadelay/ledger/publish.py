"""PUBLISH: a committed batch is one numpy pass, from its columns to the hours' logs and linked indexes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import INDEX, RECORD
from hadelay.codec.publishcommand import CALLBACK, RELATIVE, Publish
from hadelay.codec.results import PublishResult, RowCode
from hadelay.ledger import idempotency, ttl
from hadelay.ledger.keys import Decision
from hadelay.ledger.quotas import refuse_beyond_quotas
from hadelay.ledger.state import Ledger
from hadelay.ledger.topicchanges import topic_or_new
from hadelay.ledger.topics import by_topic
from hadelay.ledger.transitions import FLAG_CALLBACK, FLAG_KEYED, FLAG_TTL, filed
from hadelay.model import HOUR_MS, NONE32


def apply_publish(ledger: Ledger, command: Publish) -> PublishResult:
    rows = command.rows
    count = len(rows)
    result = PublishResult(
        np.zeros(count, np.uint64), np.zeros(count, np.int64), np.zeros(count, np.uint8), np.zeros(count, bool)
    )
    idempotency.turn(ledger)
    new_keys: list[int] = []
    take = np.ones(count, bool)
    if len(command.keys):
        new_keys, take = idempotency.repeat(ledger, command.keys, result)
    deliver_at_ms = _resolve(ledger, rows, result.codes, take)
    take &= result.codes == RowCode.OK
    if (callbacks := rows["flags"] & CALLBACK != 0).any():
        _refuse_callbacks(ledger, command, callbacks, result.codes, take)
    topics = _topics(ledger, command, result.codes, take)
    keys = Decision(ledger, command, topics, deliver_at_ms, take, result) if len(command.client_keys) else None
    hours = deliver_at_ms // HOUR_MS
    _refuse_full_hours(ledger, hours, result.codes, take)
    refuse_beyond_quotas(ledger, command, topics, keys, result.codes, take)
    _count(ledger, command, topics, take)
    if take.all():
        _file(ledger, command, slice(None), deliver_at_ms, hours, topics, result)
    elif take.any():
        _file(ledger, command, take, deliver_at_ms, hours, topics, result)
    if keys is not None:
        keys.finish()
    if new_keys:
        idempotency.remember(ledger, command.keys, new_keys, result)
    return result


def _resolve(
    ledger: Ledger, rows: NDArray[np.void], codes: NDArray[np.uint8], take: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """deliver_at of each row: past is now, and too far is refused. Delays first, since a sum could overflow."""
    now_ms = ledger.now_ms
    when = rows["when_ms"]
    relative = rows["flags"] & RELATIVE != 0
    delay = np.maximum(np.where(relative, when, np.maximum(when, now_ms) - now_ms), 0)
    too_far = delay > ledger.settings.max_delay_ms
    if too_far.any():
        codes[too_far & take] = RowCode.TOO_FAR
        delay[too_far] = 0
    return delay + now_ms


def _refuse_callbacks(
    ledger: Ledger, command: Publish, callbacks: NDArray[np.bool_], codes: NDArray[np.uint8], take: NDArray[np.bool_]
) -> None:
    """Only a topic that pushes, and says so, takes messages with a webhook URL of their own."""
    for at, name in enumerate(command.topics):
        topic = ledger.topic(name)
        webhook = topic.settings.webhook if topic is not None else None
        if webhook is None or not webhook.allow_per_message:
            wrong = take & callbacks & (command.rows["topic"] == at)
            codes[wrong] = RowCode.NO_CALLBACK
            take &= ~wrong


def _refuse_full_hours(
    ledger: Ledger, hours: NDArray[np.int64], codes: NDArray[np.uint8], take: NDArray[np.bool_]
) -> None:
    # As if the whole batch went into each of its hours: close to the limit is soon enough.
    if len(hours) > 1 and (hours != hours[0]).any():
        full = ledger.store.counts(hours).astype(np.int64) + len(hours) >= NONE32
    elif ledger.store.count(int(hours[0])) + len(hours) >= NONE32:
        full = np.ones(len(hours), bool)
    else:
        return
    if full.any():
        codes[full & take] = RowCode.HOUR_FULL
        take &= ~full


def _topics(ledger: Ledger, command: Publish, codes: NDArray[np.uint8], take: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """Number of each of the command's topics, made if need be; rows of one that cannot be are refused."""
    numbers = np.zeros(len(command.topics), np.uint32)
    local = command.rows["topic"]
    used = np.bincount(local[take], minlength=len(command.topics)).tolist()
    for at, name in enumerate(command.topics):
        if not used[at]:
            continue
        topic = topic_or_new(ledger, name) if ledger.settings.auto_create_topics else ledger.topic(name)
        if topic is None:
            crowded = ledger.settings.auto_create_topics and ledger.known_topic(name) is None
            codes[take & (local == at)] = RowCode.TOO_MANY_TOPICS if crowded else RowCode.NO_TOPIC
            take &= local != at
            continue
        numbers[at] = topic.number
    return numbers


def _count(ledger: Ledger, command: Publish, numbers: NDArray[np.uint32], take: NDArray[np.bool_]) -> None:
    local, width = command.rows["topic"][take], len(command.topics)
    counts, sizes = np.bincount(local, minlength=width), np.bincount(local, command.sizes[take], minlength=width)
    for number, count, size in zip(numbers.tolist(), counts.tolist(), sizes.tolist(), strict=True):
        if count:
            topic = ledger.topics[number]
            topic.open += count
            topic.published += count
            topic.bytes += int(size)


def _file(
    ledger: Ledger, command: Publish, take: slice | NDArray[np.bool_], deliver_at_ms: NDArray[np.int64],
    hours: NDArray[np.int64], topics: NDArray[np.uint32], result: PublishResult,
) -> None:  # fmt: skip
    rows, deliver, hours = command.rows[take], deliver_at_ms[take], hours[take]
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
    # deliver_at is never before now here, so it is filed under its own second.
    entries["second"] = deliver // 1000 % 3600
    entries["generation"] = ledger.topics.generations[numbers]
    one = int(hours[0])
    into: int | NDArray[np.int64] = one if len(hours) == 1 or (hours == one).all() else hours
    limited = _with_ttl(ledger, rows, entries)
    ledger.store.append(into, entries, _records(command, take), headers)
    for at, ttl_ms in limited:
        ttl.begin(ledger, int(entries["first_id"][at]), int(deliver[at]), ttl_ms)
    result.ids[take] = entries["first_id"]
    result.deliver_at_ms[take] = deliver
    filed(ledger, into, entries)


def _flags(command: Publish) -> NDArray[np.uint16]:
    flags = np.zeros(len(command.rows), np.uint16)
    flags[command.rows["flags"] & CALLBACK != 0] = FLAG_CALLBACK
    if len(command.client_keys):
        flags[command.client_keys["row"]] |= FLAG_KEYED
    return flags


def _with_ttl(ledger: Ledger, rows: NDArray[np.void], entries: NDArray[np.void]) -> list[tuple[int, int]]:
    """(row, TTL) of those that have one, of their own or their topic's; sets their flag."""
    ttl_ms = rows["ttl_ms"].copy()
    for number, _ in by_topic(entries["topic"]):
        if default := ledger.topics[number].settings.ttl_ms:
            ttl_ms[(entries["topic"] == number) & (ttl_ms <= 0)] = default
    limited = np.flatnonzero(ttl_ms > 0)
    entries["flags"][limited] |= FLAG_TTL
    return [(at, min(int(ttl_ms[at]), ledger.settings.max_delay_ms)) for at in limited.tolist()]


def _records(command: Publish, take: slice | NDArray[np.bool_]) -> bytearray:
    if isinstance(take, slice):
        return bytearray(command.blob)
    spans = zip(command.starts[take].tolist(), command.sizes[take].tolist(), strict=True)
    return bytearray(b"".join([command.blob[start : start + size] for start, size in spans]))
