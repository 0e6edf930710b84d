"""One request to a cluster, for commands that make one and end.

Standard library only: a command should answer before a client library is imported. Servers are tried in turn; what
is sent more than once carries an Idempotency-Key, a request_id, or is harmless to repeat.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from hadelay import errors
from hadelay.cli.output import Remote
from hadelay.errors import HadelayError

#: How long a node may take to accept a connection; the answer has as long as the request may need.
_CONNECT_S = 3.0
_KINDS = {
    kind.type: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, HadelayError) and kind is not errors.DamagedFile
}


def call(
    remote: Remote,
    method: str,
    path: str,
    body: Any = None,
    *,
    query: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 15.0,
    decode: Callable[[bytes], Any] = msgspec.json.decode,
) -> Any:
    """The decoded answer: JSON, if nothing else is said. `body`: bytes as they are, anything else as JSON. Refusals are
    raised as errors.*"""
    asked = {key: value for key, value in (query or {}).items() if value is not None}
    target = f"{path}?{urlencode(asked)}" if asked else path
    sent = dict(headers or {})
    if remote.token:
        sent["Authorization"] = f"Bearer {remote.token}"
    if body is not None and not isinstance(body, bytes):
        try:
            body = json.dumps(body, allow_nan=False).encode()
        except ValueError:
            raise errors.BadRequest("nan and inf are not numbers that can be sent") from None
        sent["Content-Type"] = "application/json"
    problem: Exception = ConnectionError("no server was named: --servers")
    for url in remote.addresses():
        try:
            status, answer = _exchange(url, method, target, body, sent, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            problem = _unreachable(url, error)
            continue
        except ValueError as error:
            raise errors.BadRequest(f"it cannot be sent: {error}") from None
        if 200 <= status < 300:
            return read_answer(url, method, answer, decode) if answer else None
        problem = refusal(status, answer)
        if status not in (503, 504):
            break
    raise problem


def read_answer(url: str, method: str, answer: bytes, decode: Callable[[bytes], Any] = msgspec.json.decode) -> Any:
    """Of whatever listens there: of something else than a node nobody knows what it did."""
    try:
        return decode(answer)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        kind = HadelayError if method == "GET" else errors.OutcomeUnknown
        raise kind(f"{url} does not answer like a node: {answer[:200].decode(errors='replace')!r}") from None


def segment(text: str) -> str:
    """`text` as one segment of a path, slashes and all."""
    return quote(text, safe="")


def _exchange(
    url: str,
    method: str,
    target: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
    redirects: int = 3,
) -> tuple[int, bytes]:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise errors.BadRequest(f"{url!r}: expected a URL such as http://127.0.0.1:8400 (--servers, HADELAY_SERVERS)")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_CONNECT_S)
    try:
        # What cannot be sent is refused before anybody is connected to.
        connection.putrequest(method, target)
        for name, text in headers.items():
            connection.putheader(name, text.encode())
        if body is not None or method != "GET":
            connection.putheader("Content-Length", str(len(body or b"")))
        connection.connect()
        connection.sock.settimeout(timeout_s)
        connection.endheaders(body)
        answer = connection.getresponse()
        if answer.status == 307 and redirects and (location := answer.getheader("Location")):
            answer.read()
            there = urlsplit(location)
            if parts.scheme == "https" != there.scheme:
                raise errors.Forbidden(f"{url} redirects to {location[:200]}, which is not encrypted")
            path = there.path + (f"?{there.query}" if there.query else "")
            return _exchange(f"{there.scheme}://{there.netloc}", method, path, body, headers, timeout_s, redirects - 1)
        return answer.status, answer.read()
    finally:
        connection.close()


def _unreachable(url: str, error: Exception) -> Exception:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"its certificate is not accepted: {error.verify_message}"
        return ConnectionError(f"{url}: {why} (SSL_CERT_FILE names a file of authorities; --servers names the nodes)")
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{url} did not answer in time")
    return ConnectionError(f"{url}: {getattr(error, 'strerror', None) or error or type(error).__name__}")


def refusal(status: int, answer: bytes) -> HadelayError:
    """The problem document as the error it was made from."""
    try:
        problem = msgspec.json.decode(answer, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return HadelayError(f"status {status}: {answer[:200].decode(errors='replace')}")
    name = str(problem.get("type", "")).rpartition("/")[2]
    kind = _KINDS.get(name) or next((k for k in _KINDS.values() if k.http_status == status), HadelayError)
    known = ("type", "title", "status", "detail", "retryable", "outcome_known", "retry_after_ms")
    extra = {name: value for name, value in problem.items() if name not in known}
    return kind(problem.get("detail") or problem.get("title") or f"status {status}", **extra)
