"""`hadelay msg`: commands put, get, list, cancel, reschedule, deliver, receive."""

import base64
import secrets
import sys
from collections.abc import Iterator, Sequence
from inspect import Parameter as Argument
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from hadelay.api.publishoptions import HEADERS, OPTIONS
from hadelay.cli.output import (
    Limit,
    MessageId,
    OfKey,
    OfTopic,
    OptionalTopic,
    Partial,
    Remote,
    Several,
    Stale,
    emit_bytes,
    emit_json,
    fields,
    note,
    option,
    say,
    show,
    show_pages,
    table,
    takes,
)
from hadelay.cli.remote import call
from hadelay.client import paths
from hadelay.client.paths import segment
from hadelay.errors import BadRequest, Conflict, HadelayError, NotFound

_COLUMNS = ("id", "state", "deliver_at", "attempt", "retry", "key", "tags", "size")
_OUTCOME = ("id", "topic", "key", "outcome", "outcomes", "detail")
_HISTORY = ("event", "at", "attempt", "consumer", "node", "reason", "old_deliver_at", "new_deliver_at", "from", "to")


#: Timeout of a request, in seconds, in addition to the time for which the request waits for messages.
_TIMEOUT_S = 15.0


#: Options of a publish: name of the command-line option → (name in the API, its row in api/publishoptions.py).
_OPTIONS = {row.command or name: (name, row) for name, row in OPTIONS.items() if row.command is not None}


def _options() -> Iterator[Argument]:
    for command, (_, row) in _OPTIONS.items():
        kind: Any = Several if row.repeated else str | None
        if row.kind.choices:
            kind = Literal[row.kind.choices] | None
        again = " May be repeated." if row.repeated else ""
        yield option(command, kind, () if row.repeated else None, row.help + again)


@takes(_options())
def put(
    topic: str,
    body: str | None = None,
    /,
    *,
    file: Annotated[Path | None, Parameter(name=("--file", "-f"))] = None,
    remote: Remote = Remote(),
    **given: Any,
) -> None:
    """Publish one message, and print its id.

    Args:
        topic: Name of the topic. The first publish creates it.
        body: The payload. Without a body and --file, standard input is read.
        file: Read the payload from a file.
    """
    if body is not None and file is not None:
        raise BadRequest("give either a body or --file, not both")
    if body is None and file is None and sys.stdin.isatty():
        note("Type the payload; Ctrl-D ends it:")
    payload = body.encode() if body is not None else file.read_bytes() if file else sys.stdin.buffer.read()
    headers = {
        "Idempotency-Key": secrets.token_hex(16),
        "Content-Type": "text/plain; charset=utf-8" if body else "application/octet-stream",
    }
    query = dict[str, str]()
    for command, (name, row) in _OPTIONS.items():
        value, header = given.get(command), HEADERS[name]
        if value is None or value == ():
            continue
        if row.query:
            query[name] = ",".join(value) if row.repeated else value
        else:
            headers |= _named(command, header[:-1], value) if row.repeated else {header: value}
    path = f"/v1/topics/{segment(topic)}/messages"
    show(call(remote, "POST", path, payload, needs="deliver_at", query=query, headers=headers), remote)


def _named(option: str, prefix: str, pairs: Several) -> dict[str, str]:
    """HTTP headers from an option's NAME=VALUE pairs. prefix: text before each name."""
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or not name.isascii():
            raise BadRequest(f"--{option} {pair}: expected NAME=VALUE, the name in ASCII")
        headers[prefix + name] = value
    return headers


def get(
    id: MessageId = None,
    /,
    *,
    topic: OfTopic = None,
    key: OfKey = None,
    body: bool = False,
    stale: Stale = False,
    wait: float = 0,
    remote: Remote = Remote(),
) -> None:
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
        emit_bytes(base64.b64decode(found["body_base64"]))
    else:
        history = found.pop("history", [])
        fields(found)
        if history:
            table(history, _HISTORY)


def list_(
    topic: OptionalTopic = None,
    /,
    *,
    prefix: str | None = None,
    state: str = "pending",
    start: Annotated[str | None, Parameter(name="--from")] = None,
    to: str | None = None,
    tag: Several = (),
    limit: Limit = 100,
    stale: Stale = False,
    partial: Partial = False,
    remote: Remote = Remote(),
) -> None:
    """List the messages of a topic, or of all topics, in due order. As JSON, a line each.

    Args:
        prefix: Without a topic: beginning of the names of the topics whose messages to list.
        state: scheduled, ready, blocked, leased, acked, cancelled, expired, dead, with commas; pending: the first four;
            retrying: those that wait after a failed attempt.
        start: Earliest due time: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
        to: End of the due times, exclusive.
        tag: Only messages with this tag. May be repeated: with all of these tags.
    """
    if topic is not None and prefix is not None:
        raise BadRequest("give either a topic or --prefix")
    path = "/v1/messages" if topic is None else f"/v1/topics/{segment(topic)}/messages"
    query = {"prefix": prefix, "state": state, "from": start, "to": to, "tag": ",".join(tag) or None, "stale": stale}
    if topic is None:
        query["partial"] = partial

    def page(size: int, cursor: str | None) -> Any:
        asked = {**query, "limit": size, "cursor": cursor}
        return call(remote, "GET", path, needs="messages", query=asked)

    show_pages(page, limit, remote, _COLUMNS, row=_row)


def _row(message: dict[str, Any]) -> dict[str, Any]:
    """A message as a row of a table, with its next attempt in words, such as 9 of 84 after HTTP 503."""
    if (retry := message.get("retry")) is None:
        return message
    most, last = retry.get("max_attempts"), retry.get("last") or {}
    words = f"{retry['attempt']} of {most}" if most else f"{retry['attempt']}"
    why = last.get("reason") or last.get("event", "").replace("_", " ")
    return {**message, "retry": f"{words} after {why}" if why else words}


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
    id: MessageId = None,
    /,
    *,
    topic: OfTopic = None,
    key: OfKey = None,
    shift: str | None = None,
    delay: str | None = None,
    deliver_at: str | None = None,
    expected: str | None = None,
    remote: Remote = Remote(),
) -> None:
    """Make a message due at another time; its id stays. Exit code 1 if the message is leased, or not pending any more.

    Args:
        shift: Move the due time by this: 3h later, or --shift=-90m for an earlier time.
        delay: Delay from now: 250ms, 15m, 2h30m, 7d.
        deliver_at: Due time: 2026-11-20T18:00:00Z, with any offset, or Unix milliseconds.
        expected: Due time that the message has to have; otherwise nothing changes, and the exit code is 1. With
            --shift, the default is the due time that the message has now.
    """
    given = {"shift": shift, "delay": delay, "deliver_at": deliver_at}
    document = {name: text for name, text in given.items() if text is not None}
    if len(document) != 1:
        raise BadRequest("give one of --shift, --delay and --deliver-at")
    path = message_path(id, topic, key)
    if shift is not None and expected is None:
        expected = call(remote, "GET", path, needs="deliver_at")["deliver_at"]
    if expected is not None:
        document["expected_deliver_at"] = expected
    show(call(remote, "PATCH", path, document, needs="deliver_at"), remote)


def deliver(id: MessageId = None, /, *, topic: OfTopic = None, key: OfKey = None, remote: Remote = Remote()) -> None:
    """Make a message due now. Exit code 1 if the message is leased, or not pending any more."""
    show(call(remote, "PATCH", message_path(id, topic, key), {"delay": 0}, needs="deliver_at"), remote)


def message_path(id: str | None, topic: str | None, key: str | None) -> str:
    try:
        return paths.message_path(id, topic, key)
    except ValueError:
        raise BadRequest("name the message: by its id, or by --topic and --key") from None


def receive(
    *topics: str,
    most: Annotated[int, Parameter(name=("--max", "-n"))] = 10,
    wait: str = "0s",
    lease: str | None = None,
    tag: Several = (),
    any_tag: Several = (),
    group_max: int | None = None,
    keep: bool = False,
    remote: Remote = Remote(),
) -> int:
    """Receive due messages, print them, and ack them. Exit code 3 if no message was due.

    Args:
        topics: Names of topics.
        most: Limit of messages.
        wait: Time to wait for the first message, such as 30s; at most 60s.
        lease: Length of the lease.
        tag: Only messages with this tag. May be repeated: with all of these tags.
        any_tag: Only messages with one of these tags. May be repeated.
        group_max: Limit of messages of one group, in order, where topics hand out one at a time; default 1.
        keep: Do not ack: print the leases, and let them expire.
    """
    if not topics:
        raise BadRequest("name at least one topic")
    document: dict[str, Any] = {"topics": topics, "max": most, "wait": wait, "request_id": secrets.token_hex(8)}
    given = {"lease": lease, "tags": tag or None, "any_tags": any_tag or None, "group_max": group_max}
    document |= {name: value for name, value in given.items() if value is not None}
    messages = call(remote, "POST", "/v1/receive", document, needs="messages", timeout_s=75)["messages"]
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
        note("\n".join(["nothing is due", *_unknown(topics, remote)]))
    return 0 if messages else 3


def _unknown(topics: Sequence[str], remote: Remote) -> Iterator[str]:
    """Yields a sentence about each topic that does not exist. Stops early at a topic that the token may not read, or
    about which no node answers."""
    for topic in topics:
        try:
            call(remote, "GET", f"/v1/topics/{segment(topic)}", needs="scheduled")
        except NotFound as error:
            yield str(error)
        except (HadelayError, OSError):
            return


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
    say(f"{message['id']}  {message['topic']}  late {message['late_ms']:,} ms{again}{lease}  {text}")
