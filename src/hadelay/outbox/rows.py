"""Rows of an outbox: makes the columns of a row from the arguments of a publish, and the publish from a row."""

import time
import uuid
from typing import Any, Literal, NamedTuple, Unpack

import msgspec

from hadelay.api.publishoptions import OPTIONS
from hadelay.api.text import parse_instant
from hadelay.client.putoptions import Put, PutOptions
from hadelay.client.types import Body, Delay, When
from hadelay.client.wire import options_of, own_or_new_key, payload_of, seconds_of, when_of
from hadelay.errors import BadRequest

Action = Literal["put", "cancel", "reschedule"]
#: Limit of a payload in bytes. The default limit of a node (limits.max_body_bytes) is lower.
MAX_BODY = 8 << 20


class Row(NamedTuple):
    """A row of the outbox, as the relay reads it."""

    id: int
    #: Idempotency-Key of the publish.
    request: str
    action: Action
    topic: str
    message_key: str | None
    body: str | None
    body_bytes: bytes | None
    due_ms: int | None
    options: str | None
    tries: int
    #: Size of body and options in bytes, measured by the database. A row larger than MAX_BODY is read without body and
    #: options.
    size: int = 0


#: Columns that the relay reads.
COLUMNS = Row._fields[:-1]


def put_columns(message: str | Put, body: Body = b"", **options: Unpack[PutOptions]) -> dict[str, Any]:
    """Columns of the row that publishes a message: the arguments are those of `Client.put`, or a Put, such as
    `task.message(…)` makes.

    `delay` counts from now, not from the commit or the relay. ValueError or TypeError for what no row can have.
    """
    put = message if isinstance(message, Put) else Put(topic=message, body=body, **options)
    data, kind = payload_of(put.body, put.content_type)
    fields = options_of(put)
    due = _due_ms(put.delay, put.at) if put.delay is not None or put.at is not None else None
    for column in ("delay", "deliver_at", "key", "idempotency_key"):
        fields.pop(column, None)
    if put.content_type or not isinstance(put.body, bytes):
        fields["content_type"] = kind
    return _columns("put", put.topic, put.key, due) | {
        **_payload(data, put.body),
        "request": put.idempotency_key or str(uuid.uuid4()),
        "options": msgspec.json.encode(fields).decode() if fields else None,
    }


def cancel_columns(topic: str, key: str) -> dict[str, Any]:
    """Columns of the row that cancels the message published last with a key. A message that is no longer pending stays
    as it is."""
    return _columns("cancel", topic, key, None)


def reschedule_columns(topic: str, key: str, *, delay: Delay | None = None, at: When | None = None) -> dict[str, Any]:
    """Columns of the row that makes the message published last with a key due at another time. A message that is no
    longer pending stays as it is."""
    if (delay is None) == (at is None):
        raise ValueError("give either delay or at")
    return _columns("reschedule", topic, key, _due_ms(delay, at))


def _columns(action: Action, topic: str, key: str | None, due_ms: int | None) -> dict[str, Any]:
    if not isinstance(topic, str) or not topic:
        raise ValueError("a row of the outbox needs a topic")
    if action != "put" and not key:
        raise ValueError(f"to {action} a message, the outbox needs its key")
    return {"action": action, "topic": topic, "message_key": key, "due_ms": due_ms, "created_ms": _now_ms()}


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _due_ms(delay: Delay | None, at: When | None) -> int:
    if delay is not None and at is not None:
        raise ValueError("give either delay or at")
    if delay is not None:
        # Round up, so that a message is never early.
        return _now_ms() + 1 + round(seconds_of(delay) * 1000)
    try:
        return parse_instant("at", when_of(at))
    except BadRequest as error:
        raise ValueError(error.detail) from None


def _payload(data: bytes, body: Body) -> dict[str, Any]:
    """Column of a payload: `body` for text, which people can read in the table; `body_bytes` for bytes, and for text
    with the character NUL, which PostgreSQL's text cannot have."""
    if isinstance(body, bytes | bytearray | memoryview) or b"\0" in data:
        return {"body_bytes": data}
    return {"body": data.decode()}


#: Name of an option in the column `options` → argument of `put`. All other options have columns of their own.
_IN_OPTIONS = {
    name: row.put or name
    for name, row in OPTIONS.items()
    if name not in ("delay", "deliver_at", "key", "idempotency_key")
}


def check_texts(row: Row) -> None:
    """Raise ValueError, with the column's name, for a text that is not UTF-8. SQLite stores such texts."""
    for name, value in row._asdict().items():
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise ValueError(f"{name} is no UTF-8" + (": write it into body_bytes" if name == "body" else ""))


def put_of(row: Row) -> Put:
    """Make the publish from a row. ValueError or TypeError, with an explanation, if the row is invalid."""
    if row.size > MAX_BODY:
        raise ValueError(f"body and options have {row.size} bytes; an outbox relays at most {MAX_BODY}")
    if row.body is not None and row.body_bytes is not None:
        raise ValueError("a row may have body or body_bytes, not both")
    if isinstance(row.body_bytes, str):
        raise ValueError("body_bytes is a text: write it into body")
    body: Body = row.body if row.body is not None else bytes(row.body_bytes or b"")
    own_or_new_key(row.request)
    try:
        given = msgspec.json.decode(row.options or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"options: {error}") from None
    if unknown := min(given.keys() - _IN_OPTIONS.keys(), default=""):
        raise ValueError(f"options: unknown field {unknown!r}; there are {', '.join(_IN_OPTIONS)}")
    fields = {_IN_OPTIONS[name]: value for name, value in given.items()}
    put = Put(topic=row.topic, body=body, at=row.due_ms, key=row.message_key, idempotency_key=row.request, **fields)
    if isinstance(body, str) and isinstance(put.content_type, str):
        put.body = body.encode()
    options_of(put)
    return put
