"""What an answer means that is no success, or that no node gave: for the client and the command line alike."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from hadelay import errors
from hadelay.errors import HadelayError, OutcomeUnknown

#: What decoding the answer of something else than a node may raise.
NONSENSE = (msgspec.MsgspecError, ValueError, RecursionError)
_OF_A_PROBLEM = ("type", "title", "status", "detail", "retryable", "outcome_known", "retry_after_ms")
#: Whatever the case of their names.
Headers = Mapping[str, str] | http.client.HTTPMessage
#: Said by who stands before a node, it is a refusal too: the request got no further.
_REFUSED_BEFORE = {400, 401, 403, 408, 413, 429}
#: Refusals of the request, or of who asks: they tell nothing about an earlier try of it.
NO_NEWS = (errors.BadRequest, errors.Unauthorized, errors.Forbidden, errors.TooLarge)


class Unreachable(errors.NoLeader):
    """None of the addresses answers; nothing happened."""

    type, title = "unreachable", "No node answers"
    of_a_node = False


class NotANode(OutcomeUnknown):
    """Something else answered: a proxy, a login page, another service.

    outcome_known: of a GET, and when it refused (3xx, 4xx). retryable: when it says that a node failed it (5xx).
    """

    type, title, retryable = "not-a-node", "What answered is no node", False
    of_a_node = False


def not_a_node(
    url: str, method: str, status: int, headers: Headers, body: bytes, why: str = "", **extra: Any
) -> NotANode:
    """why: what is wrong with the body."""
    seen = f"HTTP {status}, {headers.get('Content-Type') or 'no content type'}: {body[:200].decode(errors='replace')!r}"
    what_to_do = "Check the address, and what stands between"
    error = NotANode(f"{url}: what answered is no hadelay node: {seen}{why and f' ({why})'}. {what_to_do}", **extra)
    error.outcome_known = method in ("GET", "HEAD") or 300 <= status < 500  # type: ignore[misc]
    error.retryable = status >= 500  # type: ignore[misc]
    return error


def unsettled(idempotency_key: str | None) -> str:
    """What to tell somebody at a terminal whose command had no definite answer."""
    words = f": the same command with --idempotency-key {idempotency_key} finds out, and makes no second message"
    return f"It may or may not have happened{words if idempotency_key else ''}."


def retry_after_ms(said: str, longest_s: float = 86_400.0, now_s: float | None = None) -> int | None:
    """What a Retry-After asks for, seconds or a date (RFC 9110, 10.2.3); a day, or `longest_s`, at most. None:
    nothing legible."""
    said = said.strip()
    try:
        if said.isascii() and said.isdecimal():
            seconds = float(said)
        else:
            until = parsedate_to_datetime(said)
            # Of a form without a zone, which is GMT too.
            at_s = (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp()
            seconds = at_s - (time.time() if now_s is None else now_s)
    except (ValueError, OverflowError):
        return None
    return round(1000 * min(max(seconds, 0.0), longest_s))


def refusal(url: str, method: str, status: int, headers: Headers, body: bytes) -> HadelayError:
    """Of an answer other than 2xx."""
    try:
        document = msgspec.json.decode(body, type=dict[str, Any])
    except NONSENSE:
        document = {}
    if "outcome_known" in document:  # every node says that
        return error_of(document, status)
    extra = {name: value for name, value in document.items() if name not in _OF_A_PROBLEM}
    error: HadelayError = not_a_node(url, method, status, headers, body, **extra)
    if status in _REFUSED_BEFORE:
        error = _BY_STATUS[status](error.detail)
        error.of_a_node = False  # type: ignore[misc]
    error.retry_after_ms = retry_after_ms(headers.get("Retry-After", ""))
    return error


def error_of(document: Mapping[str, Any], status: int) -> HadelayError:
    """The exception that a problem document stands for; for a type this version does not know, by its status."""
    kind = _BY_TYPE.get(str(document.get("type", ""))) or _BY_STATUS.get(status, HadelayError)
    if issubclass(kind, errors.DamagedFile):
        kind = HadelayError
    extra = {name: value for name, value in document.items() if name not in _OF_A_PROBLEM}
    error = kind(document.get("detail", ""), retry_after_ms=document.get("retry_after_ms"), **extra)
    # The server knows better than our table what may be retried.
    for name in ("retryable", "outcome_known"):
        if name in document:
            setattr(error, name, bool(document[name]))
    return error


def _all_errors(kind: type[HadelayError]) -> Iterator[type[HadelayError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all_errors(child)


# Those of errors.py: what others derive from them is never answered by a node.
_KINDS = [kind for kind in _all_errors(HadelayError) if kind.__module__ == errors.__name__]
_BY_TYPE = {kind.type: kind for kind in _KINDS}
_BY_STATUS = {kind.http_status: kind for kind in reversed(_KINDS)}
