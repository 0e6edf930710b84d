"""One request to a cluster, for commands that make one and end.

Standard library only: a command should answer before a client library is imported. Servers are tried in turn; what
is sent more than once carries an Idempotency-Key, a request_id, or is harmless to repeat.
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

#: How long a node may take to accept a connection; the answer has as long as the request may need.
_CONNECT_S = 3.0
#: Errors of one address: the next one may do better.
_ASK_ANOTHER = (errors.NoLeader, errors.Overloaded, NotANode)


def call(
    remote: Remote, method: str, path: str, body: Any = None, *, needs: str = "",
    query: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None, timeout_s: float = 15.0,
    decode: Callable[[bytes], Any] = msgspec.json.decode, node: str = "",
) -> Any:  # fmt: skip
    """The decoded answer: JSON, if nothing else is said. Refusals are raised as errors.*

    body: bytes as they are, anything else as JSON. needs: a member of every node's answer to this, and of hardly
    anybody else's; without one it answers nothing (204). What is not JSON has the header that a node sends.
    node: the node that has to answer; the answer of another one is passed over.
    """
    asked = {key: value for key, value in (query or {}).items() if value is not None}
    target = f"{path}?{urlencode(asked)}" if asked else path
    sent = dict(headers or {})
    if token := remote.token.strip():
        if not token.isascii() or not token.isprintable():
            raise errors.BadRequest("--token, HADELAY_TOKEN: not a line of ASCII")
        sent["Authorization"] = f"Bearer {token}"
    if body is not None and not isinstance(body, bytes):
        try:
            body = json.dumps(body, allow_nan=False).encode()
        except ValueError:
            raise errors.BadRequest("nan and inf are not numbers that can be sent") from None
        sent["Content-Type"] = "application/json"
    problem: Exception = ConnectionError("no server was named: --servers")
    silent: list[str] = []
    for url in remote.addresses():
        try:
            return _exchange(url, method, target, body, sent, timeout_s, needs, decode, node)
        except KeyboardInterrupt:
            if "Idempotency-Key" in sent:
                raise KeyboardInterrupt(sent["Idempotency-Key"]) from None
            raise
        except ValueError as error:
            raise errors.BadRequest(f"it cannot be sent: {error}") from None
        except (HadelayError, OSError) as error:
            known = getattr(error, "outcome_known", True)
            settled = getattr(problem, "outcome_known", True)
            if known and isinstance(error, HadelayError) and not isinstance(error, _ASK_ANOTHER):
                if settled or not isinstance(error, NO_NEWS):
                    raise
                break
            # That nothing happened is true of this address, and not of an earlier one. And what a node says counts for
            # more than that another one is not there.
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
    """As `call`, of one member of GET /v1/cluster and no other: at the address that it advertises, or at whichever of
    --servers it answers, since an advertised name may mean nothing on this machine."""
    servers = ",".join(filter(None, (member["http"], *remote.addresses())))
    return call(replace(remote, servers=servers), method, path, node=member["name"], **options)


def read_answer(
    url: str, method: str, status: int, headers: Headers, answer: bytes, needs: str = "",
    decode: Callable[[bytes], Any] = msgspec.json.decode,
) -> Any:  # fmt: skip
    """Of whatever listens there: of something else than a node nobody knows what it did."""
    if not 200 <= status < 300:
        raise refusal(url, method, status, headers, answer)
    try:
        found = decode(answer) if answer else None
    except NONSENSE as error:
        raise not_a_node(url, method, status, headers, answer, str(error)) from None
    # Gateways drop headers that they don't know, so what can be seen from the answer itself is.
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
        # What cannot be sent is refused before anybody is connected to.
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
            # The leader cannot be reached from here under the address that it advertises: this node relays.
            relay = f"{target}{'&' if '?' in target else '?'}redirect=false"
            return _exchange(url, method, relay, body, headers, timeout_s, needs, decode, node, redirects=0)
    if node and (name := answer.getheader("Hadelay-Node", node)) != node:
        raise ConnectionError(f"{url} is {name}, not {node}")
    return read_answer(url, method, answer.status, answer.headers, data, needs, decode)


def _unreachable(url: str, error: Exception) -> Exception:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"its certificate is not accepted: {error.verify_message}"
        return ConnectionError(f"{url}: {why} (SSL_CERT_FILE names a file of authorities; --servers names the nodes)")
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{url} did not answer in time")
    if isinstance(error, http.client.RemoteDisconnected) and url.startswith("http:"):
        return ConnectionError(f"{url}: it hung up without a word: is it https://?")
    return ConnectionError(f"{url}: {getattr(error, 'strerror', None) or error or type(error).__name__}")
