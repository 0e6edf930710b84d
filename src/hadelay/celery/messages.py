"""Conversion of kombu's messages to messages of the cluster, and back."""

import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.utils.json import dumps, loads

from hadelay.celery.bindings import tag_of
from hadelay.client import AsyncMessage, Put
from hadelay.client.queues import COPIES, id_of


def utc_now() -> datetime:
    """The present time, from which a task's TTL is computed. hadelay.celery.testing replaces this function."""
    return datetime.now(UTC)


def draft_of(message: dict[str, Any], topic: str, queue: str, expiry_ms: int | None) -> Put:
    """Convert a message of kombu to the `Put` that publishes it. expiry_ms: TTL of messages of a temporary queue; None
    for other queues. Headers such as `eta` are read only in messages of tasks."""
    headers = message.get("headers") or {}
    draft = Put(topic=topic, body=dumps(message).encode(), content_type="application/json")
    if "task" in headers:
        now = utc_now()
        draft.at = at = time_of(headers.get("eta"))
        if (expires := time_of(headers.get("expires"))) is not None:
            draft.ttl = max((expires - max(at or now, now)).total_seconds(), 0.001)
    if draft.ttl is None and (expiration := (message.get("properties") or {}).get("expiration")) is not None:
        draft.ttl = max(int(expiration), 1) / 1000  # kombu's expiration is in ms
    if expiry_ms:
        draft.tags, draft.ttl = [tag_of(queue)], draft.ttl or expiry_ms / 1000
    return draft


def keys_of(message: dict[str, Any]) -> list[str]:
    """Possible client keys of a message, best first; the publisher takes the first key that is free. Empty if the
    message is not of a task."""
    headers = message.get("headers") or {}
    return list(_keys(str(headers.get("id")), headers.get("retries") or 0)) if "task" in headers else []


def _keys(task: str, retries: int) -> Iterator[str]:
    """Client keys of a task's messages. A retry is published while the message of the previous attempt is still leased,
    so retries alternate between two keys. Further messages with the same task id have numbered keys."""
    yield id_of(task) + ".r" * (retries % 2)
    yield from further_keys_of(task)


def further_keys_of(task: str) -> list[str]:
    """Numbered keys for further messages with one task id: a task that replaces itself keeps its id, and a program may
    publish one id twice."""
    return [f"{id_of(task)}.c{copy}" for copy in range(1, COPIES)]


def received(message: AsyncMessage) -> dict[str, Any]:
    """Convert a received message to kombu's form. The ETA of its task is removed: the task is due, and the worker has
    to run it now."""
    raw: dict[str, Any] = loads(message.body)
    properties, headers = raw["properties"], raw.get("headers") or {}
    properties["delivery_tag"] = message.lease
    properties.setdefault("delivery_info", {})["redelivered"] = message.redelivered
    if "task" in headers and time_of(headers.get("eta")) is not None:
        headers["eta"] = None
    if message.schedule is not None:
        task = str(uuid.uuid5(uuid.NAMESPACE_OID, message.id))
        headers["id"] = headers["root_id"] = properties["correlation_id"] = task
    return raw


def time_of(given: Any) -> datetime | None:
    """Parse the time in a header as Celery's worker does: a time without a time zone is UTC, whatever the setting
    `timezone` is. None for an invalid time, with which the worker refuses the task."""
    with suppress(ValueError, TypeError, AttributeError):
        return maybe_make_aware(maybe_iso8601(given)) if given else None
    return None
