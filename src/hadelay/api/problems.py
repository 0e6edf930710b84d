"""Turns HTTP answers into exceptions, for client and command line: a node's refusals, and answers of proxies."""

import http.client
import ssl
import time
from collections.abc import Iterator, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from hadelay import errors
from hadelay.errors import HadelayError, OutcomeUnknown

#: Exceptions raised by decoding an answer that no node sent.
NONSENSE = (msgspec.MsgspecError, ValueError, RecursionError)
_OF_A_PROBLEM = ("type", "title", "status", "detail", "retryable", "outcome_known", "retry_after_ms")
#: Signs in an answer, as Python shows bytes, that a request went to a wrong address: text that a node link answers
#: (docs/spec/node-link.md), and first bytes of a TLS alert.
_NODE_LINK, _TLS_ALERT = "hadelay-link", r"\x15\x03"
#: OpenSSL's error reasons if a server answers a TLS handshake with plain text.
_NOT_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"}
#: Headers of an answer; names of headers match in any case.
Headers = Mapping[str, str] | http.client.HTTPMessage
#: Status codes with which a proxy refuses a request before it reaches a node.
_REFUSED_BEFORE = {400, 401, 403, 408, 413, 429}
#: Errors that refuse a request or its token. After a retry, such an error does not tell whether an earlier try took
#: effect.
NO_NEWS = (errors.BadRequest, errors.Unauthorized, errors.Forbidden, errors.TooLarge)


class Unreachable(errors.NoLeader):
    """No node answered; the request had no effect."""

    type, title = "unreachable", "No node answers"
    of_a_node = False


class NotANode(OutcomeUnknown):
    """The answer came from something other than a node: a proxy, a login page, another service.

    outcome_known: True for a GET, and if a proxy refused the request (3xx, 4xx). retryable: True for a status 5xx.
    """

    type, title, retryable = "not-a-node", "The answer is not from a node", False
    of_a_node = False


def not_a_node(
    url: str, method: str, status: int, headers: Headers, body: bytes, why: str = "", **extra: Any
) -> NotANode:
    """The error for an answer that no node sent. why: what is wrong with the answer's body."""
    seen = f"HTTP {status}, {headers.get('Content-Type') or 'no content type'}: {body[:200].decode(errors='replace')!r}"
    advice = "Check the address, and any proxy in between"
    error = NotANode(f"{url}: the answer is not from a hadelay node: {seen}{why and f' ({why})'}. {advice}", **extra)
    error.outcome_known = method in ("GET", "HEAD") or 300 <= status < 500  # type: ignore[misc]
    error.retryable = status >= 500  # type: ignore[misc]
    return error


def not_http(url: str, method: str, shown: str) -> NotANode:
    """The error for an answer that is not HTTP. shown: beginning of the answer, as Python shows bytes."""
    if _NODE_LINK in shown:
        error = NotANode(f"{url} is the node link of a node (raft.listen): use the node's HTTP address (http.listen)")
    elif shown[2:].startswith(_TLS_ALERT):
        error = NotANode(f"{url}: the server speaks TLS: try https://")
    else:
        error = NotANode(f"{url}: the answer is not HTTP: {shown[:80]}. Check the address")
        error.outcome_known = method in ("GET", "HEAD")  # type: ignore[misc]
        return error
    error.outcome_known = True  # type: ignore[misc]
    return error


def without_tls(error: BaseException | None) -> bool:
    """Whether an https connection failed because the server does not speak TLS."""
    return isinstance(error, ssl.SSLError) and error.reason in _NOT_TLS


def unsettled(idempotency_key: str | None) -> str:
    """Text for the user of a command whose outcome is unknown, with advice if the request had an Idempotency-Key."""
    words = f": repeat the command with --idempotency-key {idempotency_key} to find out, without a second message"
    return f"It may or may not have happened{words if idempotency_key else ''}."


def retry_after_ms(said: str, longest_s: float = 86_400.0, now_s: float | None = None) -> int | None:
    """Wait in ms that a Retry-After header asks for, as seconds or a date (RFC 9110, 10.2.3), at most `longest_s`; None
    for an invalid header."""
    said = said.strip()
    try:
        if said.isascii() and said.isdecimal():
            seconds = float(said)
        else:
            until = parsedate_to_datetime(said)
            # A Retry-After date without a time zone is GMT.
            at_s = (until if until.tzinfo else until.replace(tzinfo=UTC)).timestamp()
            seconds = at_s - (time.time() if now_s is None else now_s)
    except (ValueError, OverflowError):
        return None
    return round(1000 * min(max(seconds, 0.0), longest_s))


def refusal(url: str, method: str, status: int, headers: Headers, body: bytes) -> HadelayError:
    """The error for an answer with a status other than 2xx."""
    try:
        document = msgspec.json.decode(body, type=dict[str, Any])
    except NONSENSE:
        document = {}
    if "outcome_known" in document:  # only a node adds the field outcome_known to its errors
        return error_of(document, status)
    extra = {name: value for name, value in document.items() if name not in _OF_A_PROBLEM}
    error: HadelayError = not_a_node(url, method, status, headers, body, **extra)
    if status in _REFUSED_BEFORE:
        error = _BY_STATUS[status](error.detail)
        error.of_a_node = False  # type: ignore[misc]
    error.retry_after_ms = retry_after_ms(headers.get("Retry-After", ""))
    return error


def error_of(document: Mapping[str, Any], status: int) -> HadelayError:
    """The exception for a problem document. Its class follows from `type`; for an unknown type, from the status."""
    kind = _BY_TYPE.get(str(document.get("type", ""))) or _BY_STATUS.get(status, HadelayError)
    if issubclass(kind, errors.DamagedFile):
        kind = HadelayError
    extra = {name: value for name, value in document.items() if name not in _OF_A_PROBLEM}
    error = kind(document.get("detail", ""), retry_after_ms=document.get("retry_after_ms"), **extra)
    # The document's `retryable` and `outcome_known` override the class's values: a node of another version may differ.
    for name in ("retryable", "outcome_known"):
        if name in document:
            setattr(error, name, bool(document[name]))
    return error


def _all_errors(kind: type[HadelayError]) -> Iterator[type[HadelayError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _all_errors(child)


# Exception classes for errors of nodes: those in errors.py, not those that client and commands add.
_KINDS = [kind for kind in _all_errors(HadelayError) if kind.__module__ == errors.__name__]
_BY_TYPE = {kind.type: kind for kind in _KINDS}
_BY_STATUS = {kind.http_status: kind for kind in reversed(_KINDS)}
