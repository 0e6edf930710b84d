"""HTTP requests of commands to a cluster.

Standard library only, because importing a client library would delay commands. Servers are tried in turn, so every
request has an Idempotency-Key or a request_id, or is harmless to repeat.
"""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec

from hadelay import errors
from hadelay.api.problems import NO_NEWS, NONSENSE, Headers, NotANode, not_a_node, refusal
from hadelay.cli.output import Remote
from hadelay.errors import HadelayError

#: Timeout of connecting, in seconds; the answer has its own timeout.
_CONNECT_S = 3.0
#: Errors after which the next address is tried.
_ASK_ANOTHER = (errors.NoLeader, errors.Overloaded, NotANode)


def call(
    remote: Remote, method: str, path: str, body: Any = None, *, needs: str = "",
    query: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None, timeout_s: float = 15.0,
    decode: Callable[[bytes], Any] = msgspec.json.decode, node: str = "",
) -> Any:  # fmt: skip
    """Send a request; returns the decoded answer (default: JSON). Refusals are raised as errors.*

    body: bytes are sent unchanged, other values as JSON. needs: a member that every node's answer has, to recognise
    other servers; without `needs`, the answer is empty (204). Other content must have a node's header.
    node: name of the node that must answer; answers of other nodes are ignored.
    """
    asked = {key: value for key, value in (query or {}).items() if value is not None}
    target = f"{path}?{urlencode(asked)}" if asked else path
    sent = dict(headers or {})
    if token := remote.token.strip():
        if not token.isascii() or not token.isprintable():
            raise errors.BadRequest("--token, HADELAY_TOKEN: the token must be one line of ASCII")
        sent["Authorization"] = f"Bearer {token}"
    if body is not None and not isinstance(body, bytes):
        try:
            body = json.dumps(body, allow_nan=False).encode()
        except ValueError:
            raise errors.BadRequest("nan and inf cannot be sent as JSON numbers") from None
        sent["Content-Type"] = "application/json"
    problem: Exception = ConnectionError("no server was given: use --servers")
    silent: list[str] = []
    for url in remote.addresses():
        try:
            return _exchange(url, method, target, body, sent, timeout_s, needs, decode, node)
        except KeyboardInterrupt:
            if "Idempotency-Key" in sent:
                raise KeyboardInterrupt(sent["Idempotency-Key"]) from None
            raise
        except ValueError as error:
            raise errors.BadRequest(f"the request cannot be sent: {error}") from None
        except (HadelayError, OSError) as error:
            known = getattr(error, "outcome_known", True)
            settled = getattr(problem, "outcome_known", True)
            if known and isinstance(error, HadelayError) and not isinstance(error, _ASK_ANOTHER):
                if settled or not isinstance(error, NO_NEWS):
                    raise
                break
            # Keep an unknown outcome of an earlier address; else prefer a node's error to a connection error.
            if settled and (isinstance(error, HadelayError) or not isinstance(problem, HadelayError)):
                problem = error
            if isinstance(error, OSError):
                silent.append(str(error))
    if isinstance(problem, OSError) and silent:
        problem = type(problem)("; ".join(silent))
    if isinstance(problem, HadelayError) and not problem.outcome_known and "Idempotency-Key" in sent:
        problem.extra["idempotency_key"] = sent["Idempotency-Key"]
    raise problem


def call_member(remote: Remote, member: Mapping[str, Any], method: str, path: str, **options: Any) -> Any:
    """`call` to one member of GET /v1/cluster: at its advertised address, or at any of --servers where this member
    answers, because this machine may not resolve an advertised name."""
    servers = ",".join(filter(None, (member["http"], *remote.addresses())))
    return call(replace(remote, servers=servers), method, path, node=member["name"], **options)


def read_answer(
    url: str, method: str, status: int, headers: Headers, answer: bytes, needs: str = "",
    decode: Callable[[bytes], Any] = msgspec.json.decode,
) -> Any:  # fmt: skip
    """The decoded answer; refusals are raised. NotANode, with an unknown outcome, if another server has answered."""
    if not 200 <= status < 300:
        raise refusal(url, method, status, headers, answer)
    try:
        found = decode(answer) if answer else None
    except NONSENSE as error:
        raise not_a_node(url, method, status, headers, answer, str(error)) from None
    # Gateways may drop unknown headers, so JSON answers are recognised by their content.
    if decode is not msgspec.json.decode:
        wrong = "no header Hadelay-Node: does a gateway drop it?" if "Hadelay-Node" not in headers else ""
    elif needs:
        wrong = "" if isinstance(found, dict) and needs in found else f"no member {needs!r}"
    else:
        wrong = "" if status == http.HTTPStatus.NO_CONTENT else "a node answers 204"
    if wrong:
        raise not_a_node(url, method, status, headers, answer, wrong)
    return found


def _exchange(
    url: str, method: str, target: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float, needs: str,
    decode: Callable[[bytes], Any], node: str = "", redirects: int = 3,
) -> Any:  # fmt: skip
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise errors.BadRequest(f"{url!r}: expected a URL such as http://127.0.0.1:8400 (--servers, HADELAY_SERVERS)")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_CONNECT_S)
    asked = False
    try:
        # Build the request before connecting: an invalid one must not open a connection.
        connection.putrequest(method, target)
        for name, text in headers.items():
            connection.putheader(name, text.encode())
        if body is not None or method != "GET":
            connection.putheader("Content-Length", str(len(body or b"")))
        connection.connect()
        asked = True
        connection.sock.settimeout(timeout_s)
        connection.endheaders(body)
        answer = connection.getresponse()
        data = answer.read()
    except (OSError, http.client.HTTPException) as error:
        why = _unreachable(url, error)
        raise errors.OutcomeUnknown(str(why)) if asked and method != "GET" else why from None
    finally:
        connection.close()
    if answer.status == 307 and redirects and (location := answer.getheader("Location")):
        there = urlsplit(location)
        if parts.scheme == "https" != there.scheme:
            raise errors.Forbidden(f"{url} redirects to {location[:200]}, which is not encrypted")
        path = there.path + (f"?{there.query}" if there.query else "")
        leader = f"{there.scheme}://{there.netloc}"
        try:
            return _exchange(leader, method, path, body, headers, timeout_s, needs, decode, node, redirects - 1)
        except OSError:
            # The leader's advertised address is unreachable from this machine: let this node relay the request.
            relay = f"{target}{'&' if '?' in target else '?'}redirect=false"
            return _exchange(url, method, relay, body, headers, timeout_s, needs, decode, node, redirects=0)
    if node and (name := answer.getheader("Hadelay-Node", node)) != node:
        raise ConnectionError(f"{url} is {name}, not {node}")
    return read_answer(url, method, answer.status, answer.headers, data, needs, decode)


def _unreachable(url: str, error: Exception) -> Exception:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"the server's certificate is not accepted: {error.verify_message}"
        return ConnectionError(f"{url}: {why} (set SSL_CERT_FILE to the file of its CA, or correct --servers)")
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{url} did not answer in time")
    if isinstance(error, http.client.RemoteDisconnected) and url.startswith("http:"):
        return ConnectionError(f"{url}: the server closed the connection without an answer: try https://")
    return ConnectionError(f"{url}: {getattr(error, 'strerror', None) or error or type(error).__name__}")
