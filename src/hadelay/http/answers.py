"""Complete HTTP answers: media types, and errors as `application/problem+json` (RFC 9457)."""

from collections.abc import Mapping
from html import escape
from http import HTTPStatus
from typing import Literal, NamedTuple

import msgspec

from hadelay.errors import HadelayError, Overloaded, is_disk_full

JSON, MSGPACK, NDJSON = "application/json", "application/msgpack", "application/x-ndjson"
JSON_TYPE, MSGPACK_TYPE = {"Content-Type": JSON}, {"Content-Type": MSGPACK}
PROBLEM = "application/problem+json"


class Answer(NamedTuple):
    """A whole HTTP response, except the headers that all responses have."""

    status: int
    headers: Mapping[str, str]
    body: bytes


NOTHING = Answer(204, {}, b"")


def header_lines(headers: Mapping[str, str]) -> bytes:
    lines = ""
    for name, value in headers.items():
        lines += f"{name}: {value}\r\n"
    return lines.encode("utf-8", "surrogateescape")


#: Header lines of answers whose body is JSON, which most answers are.
JSON_LINES = header_lines(JSON_TYPE)


class Problem(msgspec.Struct):
    """Problem document, the body of every refusal."""

    #: Stable name of the problem; docs/reference/errors.md lists the names.
    type: str
    title: str
    status: int
    #: What is wrong, and what the client can do.
    detail: str
    #: Whether the same request may succeed later, here or at another node.
    retryable: bool
    #: False if the request may or may not have had an effect: retry only with the same Idempotency-Key or request_id.
    outcome_known: bool
    retry_after_ms: int | msgspec.UnsetType | None = msgspec.UNSET
    #: For a conflict: the state that forbids the operation. Of a message also `partial`: only some of its copies were
    #: changed; and `moved`: the message is not due at the time that the request expects. Of a topic: pending (it has
    #: messages), scheduled (schedules publish to it), running (a subscription is being filled).
    outcome: (
        Literal[
            "pending", "leased", "acked", "cancelled", "expired", "dead", "partial", "moved", "scheduled", "running"
        ]
        | msgspec.UnsetType
    ) = msgspec.UNSET
    #: With the outcome `partial`: outcome of each copy, by topic and subscription.
    outcomes: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    #: With the outcome `moved`: the present due time of the message.
    deliver_at: str | msgspec.UnsetType = msgspec.UNSET
    #: For a backfill that stopped at a limit: number of occurrences that it made, and `from` of a backfill that
    #: continues it.
    made: int | msgspec.UnsetType = msgspec.UNSET
    go_on: str | msgspec.UnsetType = msgspec.UNSET
    #: In a conflict over a client key: id of the message that has the key.
    id: str | msgspec.UnsetType = msgspec.UNSET


def unexpected(error: BaseException | None, method: str) -> HadelayError:
    """Error to answer after an unexpected exception. Its outcome is unknown: the request may already be in the log. A
    read that failed on a full disk gets Overloaded, because another node may have space."""
    if is_disk_full(error) and method in ("GET", "HEAD"):
        what = "this node's disk is full, and reads need some space, too: ask another node"
        return Overloaded(what, retry_after_ms=1_000)
    found = HadelayError("internal error of this node; its log has the details")
    found.outcome_known = False  # type: ignore[misc]
    return found


def as_page(error: HadelayError) -> Answer:
    """Answer for an error as an HTML page, without style or scripts."""
    found = refusal(error)
    words = f"<h1>{escape(error.title)}</h1>\n<p>{escape(error.detail)}</p>"
    page = f'<!DOCTYPE html>\n<html lang="en"><meta charset="utf-8"><title>{escape(error.title)}</title>\n{words}\n'
    headers = {**found.headers, "Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store"}
    return Answer(found.status, headers, page.encode())


def refusal(error: HadelayError) -> Answer:
    """Answer for an error as a problem document. Retry-After is rounded up to seconds: an early retry would be refused
    again."""
    found = {"Content-Type": PROBLEM}
    if error.retry_after_ms is not None:
        found["Retry-After"] = str(-(-error.retry_after_ms // 1000))
    if error.http_status == HTTPStatus.UNAUTHORIZED:
        found["WWW-Authenticate"] = "Bearer"
    if "allow" in error.extra:
        found["Allow"] = error.extra["allow"]
    return Answer(error.http_status, found, msgspec.json.encode(error.document()))
