"""Messages of kombu as messages of a cluster, and back."""

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
    """The time from which the time to live of a task counts. The helper for tests replaces this function."""
    return datetime.now(UTC)


def draft_of(message: dict[str, Any], topic: str, queue: str, expiry_ms: int | None) -> Put:
    """The draft that publishes a message of kombu. expiry_ms: time after which messages of a temporary queue expire.
    Headers such as `eta` have a meaning only in messages of tasks."""
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
    """Client keys, the preferred one first, of which the message gets one that is free; none if it is of no task."""
    headers = message.get("headers") or {}
    return list(_keys(str(headers.get("id")), headers.get("retries") or 0)) if "task" in headers else []


def _keys(task: str, retries: int) -> Iterator[str]:
    """A retry is published while the attempt before is leased, so the two have different keys, which alternate. Further
    messages with the same task id have numbered keys."""
    yield id_of(task) + ".r" * (retries % 2)
    yield from further_keys_of(task)


def further_keys_of(task: str) -> list[str]:
    """Further keys for messages with one task id, beside the two that alternate: a task that replaces itself has the id
    of the running one, and a program may publish one id twice."""
    return [f"{id_of(task)}.c{copy}" for copy in range(1, COPIES)]


def received(message: AsyncMessage) -> dict[str, Any]:
    """The message as kombu knows it, without the ETA of its task: the task is due, and the worker shall run it now."""
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
    """The time in a header, read as Celery's worker reads it: without a time zone it is UTC, whatever `timezone` is.
    None for an invalid time: the worker then refuses the task."""
    with suppress(ValueError, TypeError, AttributeError):
        return maybe_make_aware(maybe_iso8601(given)) if given else None
    return None
