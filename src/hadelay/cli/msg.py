"""`hadelay msg`: commands put, get, list, cancel, reschedule, deliver, receive."""

import base64
import secrets
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from hadelay import paths
from hadelay.cli.output import (
    Limit,
    MessageId,
    OfKey,
    OfTopic,
    Remote,
    Several,
    Stale,
    Topic,
    emit_json,
    fields,
    note,
    show,
    show_pages,
    table,
)
from hadelay.cli.remote import call
from hadelay.errors import BadRequest, Conflict, HadelayError, NotFound
from hadelay.paths import segment

_COLUMNS = ("id", "state", "deliver_at", "attempt", "key", "tags", "size")
_OUTCOME = ("id", "topic", "key", "outcome", "outcomes", "detail")
_HISTORY = ("event", "at", "attempt", "consumer", "node", "reason", "from", "to")


#: Timeout of a request, in seconds, besides the time for which it waits.
_TIMEOUT_S = 15.0


def put(
    topic: str, body: str | None = None, /, *, delay: str | None = None, deliver_at: str | None = None,
    key: str | None = None, on_conflict: Literal["keep", "replace", "reject"] | None = None,
    max_wait: str | None = None, unique_for: str | None = None, ttl: str | None = None, tag: Several = (),
    callback: str | None = None, group: str | None = None, forward: Several = (),
    on_success: str | None = None, on_failure: str | None = None,
    file: Annotated[Path | None, Parameter(name=("--file", "-f"))] = None,
    content_type: str | None = None, meta: Several = (), idempotency_key: str | None = None,
    remote: Remote = Remote(),
) -> None:  # fmt: skip
    """Publish one message, and print its id.

    Args:
        topic: Name of the topic. The first publish creates it.
        body: The payload. Without a body and --file, standard input is read.
        delay: Time until the message is due: 250ms, 15m, 2h30m, 7d.
        deliver_at: Due time instead of a delay: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
        key: Your name for the message within the topic, to find, cancel, reschedule or replace it.
        on_conflict: If a message with this key is pending: keep it (the default), replace it, or reject the new one.
        max_wait: With --on-conflict replace: limit of the total delay since the first of the replaced messages.
        unique_for: With --key: drop this publish if the key was published within this time, at most 7d, also if that
            message is settled. The time of the first publish counts.
        ttl: Time after which the message expires, counted from its due time.
        tag: Tag that consumers can filter by. May be repeated.
        callback: Webhook URL for this message, if the topic allows one.
        group: Message group: the topic hands out at most group_concurrency messages of a group at once.
        forward: NAME=VALUE, a header of the message's webhook calls. May be repeated.
        on_success: Topic of the callback about this message's ack, if the topic allows one.
        on_failure: Topic of the callback about this message's death, if the topic allows one.
        file: Read the payload from a file.
        content_type: Content type, stored and given to the consumer.
        meta: NAME=VALUE, stored with the message. May be repeated.
        idempotency_key: Key that makes a repetition of this command harmless. Default: a random key.
    """
    if body is not None and file is not None:
        raise BadRequest("give either a body or --file, not both")
    if body is None and file is None and sys.stdin.isatty():
        note("Type the payload; Ctrl-D ends it:")
    payload = body.encode() if body is not None else file.read_bytes() if file else sys.stdin.buffer.read()
    headers = {"Idempotency-Key": secrets.token_hex(16) if idempotency_key is None else idempotency_key}
    headers["Content-Type"] = content_type or ("text/plain; charset=utf-8" if body else "application/octet-stream")
    headers |= _named("meta", meta) | _named("forward", forward)
    query = {
        "delay": delay, "deliver_at": deliver_at, "key": key, "on_conflict": on_conflict, "max_wait": max_wait,
        "unique_for": unique_for, "ttl": ttl, "tags": ",".join(tag) or None, "callback": callback, "group": group,
        "on_success": on_success, "on_failure": on_failure,
    }  # fmt: skip
    path = f"/v1/topics/{segment(topic)}/messages"
    show(call(remote, "POST", path, payload, needs="deliver_at", query=query, headers=headers), remote)


def _named(option: str, pairs: Several) -> dict[str, str]:
    """Headers from an option's NAME=VALUE pairs."""
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not name.isascii():
            raise BadRequest(f"--{option} {pair}: expected NAME=VALUE, the name in ASCII")
        headers[f"Hadelay-{option.title()}-{name}"] = value
    return headers


def get(
    id: MessageId = None, /, *, topic: OfTopic = None, key: OfKey = None, body: bool = False, stale: Stale = False,
    wait: float = 0, remote: Remote = Remote(),
) -> None:  # fmt: skip
    """Show a message: its state, times and history, and the result that its ack carried.

    Args:
        body: Print only the payload, as bytes; with -o json, add the payload.
        wait: Seconds to wait for the end of a message that is pending; at most 60.
    """
    query = {"body": body, "stale": stale, "wait": wait or None}
    path, timeout_s = message_path(id, topic, key), _TIMEOUT_S + wait
    found = call(remote, "GET", path, needs="deliver_at", query=query, timeout_s=timeout_s)
    if remote.output == "json":
        emit_json(found)
    elif body:
        sys.stdout.buffer.write(base64.b64decode(found["body_base64"]))
        sys.stdout.buffer.flush()
    else:
        history = found.pop("history", [])
        fields(found)
        if history:
            table(history, _HISTORY)


def list_(
    topic: Topic, /, *, state: str = "pending", start: Annotated[str | None, Parameter(name="--from")] = None,
    to: str | None = None, tag: Several = (), limit: Limit = 100, stale: Stale = False, remote: Remote = Remote(),
) -> None:  # fmt: skip
    """List the messages of a topic in due order. As JSON, a line each.

    Args:
        state: scheduled, ready, blocked, leased, acked, cancelled, expired, dead, with commas; pending: the first four.
        start: Earliest due time: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
        to: End of the due times, exclusive.
        tag: Only messages with this tag. May be repeated: with all of these tags.
    """
    query = {"state": state, "from": start, "to": to, "tag": ",".join(tag) or None, "stale": stale}

    def page(size: int, cursor: str | None) -> Any:
        asked = {**query, "limit": size, "cursor": cursor}
        return call(remote, "GET", f"/v1/topics/{segment(topic)}/messages", needs="messages", query=asked)

    show_pages(page, limit, remote, _COLUMNS)


def cancel(*ids: str, topic: OfTopic = None, key: OfKey = None, remote: Remote = Remote()) -> int:
    """Cancel messages that have not been handed out. Exit code 1 if one could not be cancelled.

    Args:
        ids: Ids of messages.
    """
    if len(ids) < 2:
        name = {"id": ids[0]} if ids else {"topic": topic, "key": key}
        answer = call(remote, "DELETE", message_path(ids[0] if ids else None, topic, key), needs="outcome")
        show([{**name, **answer}], remote, _OUTCOME)
        return 0
    targets = [message_path(id, topic, key) for id in ids]
    code, done = 0, []
    try:
        for id, path in zip(ids, targets, strict=True):
            try:
                done.append({"id": id, **call(remote, "DELETE", path, needs="outcome")})
            except (BadRequest, Conflict, NotFound) as error:
                code, per_queue = 1, {"outcomes": error.outcomes} if error.outcomes else {}
                done.append({"id": id, "outcome": error.outcome or error.type, **per_queue, "detail": error.detail})
    finally:  # report the finished cancels, also when the next request fails
        if done:
            show(done, remote, _OUTCOME)
    return code


def reschedule(
    id: MessageId = None, /, *, topic: OfTopic = None, key: OfKey = None, delay: str | None = None,
    deliver_at: str | None = None, remote: Remote = Remote(),
) -> None:  # fmt: skip
    """Make a message due at another time; its id stays. Exit code 1 if the message is not pending, or leased.

    Args:
        delay: Delay from now: 250ms, 15m, 2h30m, 7d.
        deliver_at: Due time instead of a delay: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
    """
    if (delay is None) == (deliver_at is None):
        raise BadRequest("give either --delay or --deliver-at")
    wish = {"deliver_at": deliver_at} if delay is None else {"delay": delay}
    show(call(remote, "PATCH", message_path(id, topic, key), wish, needs="deliver_at"), remote)


def deliver(id: MessageId = None, /, *, topic: OfTopic = None, key: OfKey = None, remote: Remote = Remote()) -> None:
    """Make a message due now. Exit code 1 if the message is not pending, or leased."""
    show(call(remote, "PATCH", message_path(id, topic, key), {"delay": 0}, needs="deliver_at"), remote)


def message_path(id: str | None, topic: str | None, key: str | None) -> str:
    try:
        return paths.message_path(id, topic, key)
    except ValueError:
        raise BadRequest("name the message: by its id, or by --topic and --key") from None


def receive(
    *topics: str, most: Annotated[int, Parameter(name=("--max", "-n"))] = 10, wait: str = "0s",
    lease: str | None = None, tag: Several = (), any_tag: Several = (), keep: bool = False, remote: Remote = Remote(),
) -> int:  # fmt: skip
    """Receive due messages, print them, and ack them. Exit code 3 if no message was due.

    Args:
        topics: Names of topics.
        most: Limit of messages.
        wait: Time to wait for the first message, such as 30s; at most 60s.
        lease: Length of the lease.
        tag: Only messages with this tag. May be repeated: with all of these tags.
        any_tag: Only messages with one of these tags. May be repeated.
        keep: Do not ack: print the leases, and let them expire.
    """
    if not topics:
        raise BadRequest("name at least one topic")
    wish: dict[str, Any] = {"topics": topics, "max": most, "wait": wait, "request_id": secrets.token_hex(8)}
    given = {"lease": lease, "tags": tag or None, "any_tags": any_tag or None}
    wish |= {name: value for name, value in given.items() if value is not None}
    messages = call(remote, "POST", "/v1/receive", wish, needs="messages", timeout_s=75)["messages"]
    for message in messages:
        _print(message, remote, keep)
    if messages and not keep:
        leases = {"leases": [message["lease"] for message in messages]}
        outcomes = call(remote, "POST", "/v1/leases:ack", leases, needs="results")["results"]
        lost = [result["lease"] for result in outcomes if result["outcome"] == "lease_lost"]
        if lost:
            many = f"{len(lost)} of {len(messages)}"
            raise HadelayError(f"{many} leases expired before the ack: their messages will be delivered again")
    if not messages:
        note("nothing is due")
    return 0 if messages else 3


def _print(message: dict[str, Any], remote: Remote, keep: bool) -> None:
    if remote.output == "json":
        emit_json(message)
        return
    data = base64.b64decode(message["body_base64"])
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = f"{len(data):,} bytes"
    again = " again" if message["redelivered"] else ""
    lease = f"  lease {message['lease']}" if keep else ""
    print(f"{message['id']}  {message['topic']}  late {message['late_ms']:,} ms{again}{lease}  {text}")
