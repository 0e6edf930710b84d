"""Messages of kombu as messages of a cluster, and back."""

import uuid
from datetime import UTC, datetime
from typing import Any

from celery import current_app
from kombu.utils.json import dumps, loads

from hadelay.celery.bindings import tag_of
from hadelay.client import AsyncMessage, Put

#: Limit of a task's id that becomes a client key, in bytes.
_KEY_BYTES = 250


def draft_of(message: dict[str, Any], topic: str, queue: str, expiry_ms: int | None) -> Put:
    """The draft that publishes a message of kombu. expiry_ms: time after which messages of a temporary queue expire."""
    headers = message.get("headers") or {}
    draft = Put(topic=topic, body=dumps(message).encode(), content_type="application/json")
    now = datetime.now(UTC)
    draft.at = at = _time(headers.get("eta"))
    if (expires := _time(headers.get("expires"))) is not None:
        draft.ttl = max((expires - max(at or now, now)).total_seconds(), 0.001)
    if expiry_ms:
        draft.tags, draft.ttl = [tag_of(queue)], draft.ttl or expiry_ms / 1000
    elif "task" in headers:
        key = key_of(str(headers.get("id")), headers.get("retries") or 0)
        if len(key.encode()) <= _KEY_BYTES:
            draft.key, draft.on_conflict = key, "reject"
    return draft


def key_of(task: str, retries: int) -> str:
    """Client key of a task's message. A retry is published while the attempt before is leased, so the two have
    different keys. Two alternating keys are enough to find the pending message of a task."""
    return task + ".r" * (retries % 2)


def received(message: AsyncMessage) -> dict[str, Any]:
    """The message as kombu knows it, without the ETA of its task: the task is due, and the worker shall run it now."""
    raw: dict[str, Any] = loads(message.body)
    properties, headers = raw["properties"], raw.get("headers") or {}
    properties["delivery_tag"] = message.lease
    properties.setdefault("delivery_info", {})["redelivered"] = message.redelivered
    if headers.get("eta"):
        headers["eta"] = None
    if message.schedule is not None:
        task = str(uuid.uuid5(uuid.NAMESPACE_OID, message.id))
        headers["id"] = headers["root_id"] = properties["correlation_id"] = task
    return raw


def _time(given: object) -> datetime | None:
    """The time in a header: a datetime, its text or a Unix time. A time without a time zone is in the app's zone."""
    if not given:
        return None
    if isinstance(given, int | float):
        return datetime.fromtimestamp(given, UTC)
    time = given if isinstance(given, datetime) else datetime.fromisoformat(str(given))
    return time if time.tzinfo else time.replace(tzinfo=current_app.timezone)
