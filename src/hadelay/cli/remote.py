"""HTTP requests of commands to a cluster.

Standard library only, because importing a client library would delay commands. Servers are tried in turn, so every
request has an Idempotency-Key or a request_id, or is harmless to repeat.
"""

import difflib
import http.client
import json
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from hadelay import errors
from hadelay.api.problems import NO_NEWS, NONSENSE, Headers, NotANode, not_a_node, not_http, refusal, without_tls
from hadelay.cli.output import Remote
from hadelay.client.paths import may_follow, of_shard, reachable, relayed, segment, with_query
from hadelay.errors import HadelayError
from hadelay.model import SEPARATOR

#: Timeout of connecting, in seconds; the answer has its own timeout.
_CONNECT_S = 3.0
_MAX_REDIRECTS = 3
#: Errors of a node after which the request is sent to the next address.
_ASK_ANOTHER = (errors.NoLeader, errors.Overloaded, NotANode)


def call(
    remote: Remote,
    method: str,
    path: str,
    body: Any = None,
    *,
    needs: str = "",
    query: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 15.0,
    decode: Callable[[bytes], Any] = msgspec.json.decode,
    node: str = "",
) -> Any:
    """Send a request; returns the decoded answer (default: JSON). Raises a node's refusal as its exception class in
    hadelay.errors.

    body: bytes are sent unchanged, other values as JSON. needs: a member that every node's answer has, to recognise
    other servers; without `needs`, the answer is empty (204). Other content must have a node's header.
    node: name of the node that must answer; answers of other nodes are ignored.
    """
    data, sent = _encoded(body, {**(headers or {})}, remote.token.strip())
    request = _Request(method, of_shard(with_query(path, query or {}), remote.shard), data, sent, timeout_s)
    problems: list[Exception] = []
    for url in remote.addresses():
        try:
            answer = _exchange(url, request)
            if node and (name := answer.headers.get("Hadelay-Node", node)) != node:
                raise ConnectionError(f"node {name} answers at {url}, not {node}")
            return read_answer(answer, method, needs, decode)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(*filter(None, [sent.get("Idempotency-Key")])) from None
        except ValueError as error:
            raise errors.BadRequest(f"the request cannot be sent: {error}") from None
        except (HadelayError, OSError) as error:
            problems.append(error)
            if isinstance(error, HadelayError) and error.outcome_known and not isinstance(error, _ASK_ANOTHER):
                break
    raise _advised(_cause(problems, sent.get("Idempotency-Key")), remote, path, body)


def _advised(error: Exception, remote: Remote, path: str, body: Any) -> Exception:
    """The error to raise, with advice if the request lacked a token, or named a topic or a schedule that does not
    exist."""
    if isinstance(error, errors.Unauthorized) and error.of_a_node and not remote.token:
        return errors.Unauthorized("the cluster requires a token: set HADELAY_TOKEN, or use --token")
    if isinstance(error, errors.NotFound) and (named := _named(path, body)):
        error.detail += meant(remote, *named)
        error.args = (error.detail,)
    return error


def _named(path: str, body: Any) -> tuple[str, str] | None:
    """Kind and name of the topic or schedule that a request is about; None if it is about neither."""
    if found := re.match(r"/v1/(topics|schedules)/([^/:?]+)", path):
        return found[1], unquote(found[2])
    topic = body.get("filter", {}).get("topic") if isinstance(body, dict) else None
    return ("topics", topic) if topic else None


def meant(remote: Remote, kind: str, name: str) -> str:
    """Sentence about a topic or schedule that does not exist, to add to an error: the most similar name that exists;
    empty if there is none, or if the token may not list them. kind: topics or schedules."""
    of, separator, _ = name.partition(SEPARATOR)
    path = f"/v1/{kind}/{segment(of)}/subscriptions" if separator else f"/v1/{kind}"
    try:
        names = [one[kind[:-1]] for one in call(remote, "GET", path, needs=kind)[kind]]
    except (HadelayError, OSError):
        return ""
    similar = [] if name in names else difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f". Did you mean {similar[0]}?" if similar else ""


def _cause(problems: Sequence[Exception], key: str | None) -> Exception:
    """The error to raise for a request that failed at every address. problems: the errors, one per address."""
    if not problems:
        return ConnectionError("no server was given: use --servers")
    said = [error for error in problems if isinstance(error, HadelayError)]
    if not said:
        return type(problems[-1])("; ".join(map(str, problems)))
    unknown = next((error for error in said if not error.outcome_known), None)
    # If the outcome of an earlier try is unknown, report that, and not a later refusal of the request or its token
    # (NO_NEWS): such a refusal does not tell whether the earlier try took effect.
    if unknown is None or (said[-1].outcome_known and not isinstance(said[-1], (*_ASK_ANOTHER, *NO_NEWS))):
        return said[-1]
    if key is not None:
        unknown.extra["idempotency_key"] = key
    return unknown


def call_member(remote: Remote, member: Mapping[str, Any], method: str, path: str, **options: Any) -> Any:
    """Like `call`, but to one member of the cluster: at its advertised address, or, because this machine may not
    resolve that name, at any of --servers where this member answers."""
    servers = ",".join(reachable([member["http"]], remote.addresses(), remote.token))
    return call(replace(remote, servers=servers), method, path, node=member["name"], **options)


class _Request(NamedTuple):
    method: str
    target: str
    body: bytes | None
    headers: Mapping[str, str]
    timeout_s: float


class RemoteAnswer(NamedTuple):
    url: str
    status: int
    headers: Headers
    body: bytes


def _encoded(body: Any, headers: dict[str, str], token: str) -> tuple[bytes | None, dict[str, str]]:
    """Encode a request's body, and add its headers; returns (body, headers)."""
    if token:
        if not token.isascii() or not token.isprintable():
            raise errors.BadRequest("--token, HADELAY_TOKEN: the token must be one line of ASCII")
        headers["Authorization"] = f"Bearer {token}"
    if body is None or isinstance(body, bytes):
        return body, headers
    try:
        return json.dumps(body, allow_nan=False).encode(), headers | {"Content-Type": "application/json"}
    except ValueError:
        raise errors.BadRequest("nan and inf cannot be sent as JSON numbers") from None


def read_answer(
    answer: RemoteAnswer, method: str, needs: str = "", decode: Callable[[bytes], Any] = msgspec.json.decode
) -> Any:
    """The decoded answer of a node; refusals are raised. Raises NotANode if something other than a node answered."""
    url, status, headers, body = answer
    if not 200 <= status < 300:
        raise refusal(url, method, status, headers, body)
    try:
        found = decode(body) if body else None
    except NONSENSE as error:
        raise not_a_node(url, method, status, headers, body, str(error)) from None
    # Gateways may drop unknown headers, so JSON answers are recognised by their content.
    if decode is not msgspec.json.decode:
        wrong = "no header Hadelay-Node: does a gateway drop it?" if "Hadelay-Node" not in headers else ""
    elif needs:
        wrong = "" if isinstance(found, dict) and needs in found else f"the answer has no field {needs!r}"
    else:
        wrong = "" if status == http.HTTPStatus.NO_CONTENT else f"expected status 204, not {status}"
    if wrong:
        raise not_a_node(url, method, status, headers, body, wrong)
    return found


def _exchange(url: str, request: _Request) -> RemoteAnswer:
    """Send the request to the node at `url`, or to the leader if the node redirects; returns the answer."""
    redirected_by = ""
    for _ in range(_MAX_REDIRECTS + 1):
        try:
            connection = _connected(url, request)
        except (OSError, http.client.HTTPException) as error:
            if not redirected_by:
                raise _unreachable(url, error) from None
            # The leader's advertised address is unreachable from this machine: ask the node that redirected here to
            # relay the request.
            url, request, redirected_by = redirected_by, request._replace(target=relayed(request.target)), ""
            continue
        try:
            connection.endheaders(request.body)
            answer = connection.getresponse()
            found = RemoteAnswer(url, answer.status, answer.headers, answer.read())
        except http.client.BadStatusLine as error:
            if isinstance(error, http.client.RemoteDisconnected):
                raise _broken(url, request, error) from None
            raise not_http(url, request.method, repr(str(error.args[0]).encode("latin-1"))) from None
        except (OSError, http.client.HTTPException) as error:
            raise _broken(url, request, error) from None
        finally:
            connection.close()
        if answer.status != 307 or not (location := answer.headers["Location"]):
            break
        if not may_follow(url, location):
            request = request._replace(target=relayed(request.target))
            continue
        there = urlsplit(location)
        redirected_by, url = url, f"{there.scheme}://{there.netloc}"
    return found


def _broken(url: str, request: _Request, error: Exception) -> Exception:
    """The error for a connection that broke after the request was sent."""
    why = _unreachable(url, error)
    return why if request.method == "GET" else errors.OutcomeUnknown(str(why))


def _connected(url: str, request: _Request) -> http.client.HTTPConnection:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise errors.BadRequest(f"{url!r}: expected a URL such as http://127.0.0.1:8400 (--servers, HADELAY_SERVERS)")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=_CONNECT_S)
    # Build the request before connecting: an invalid request must not open a connection.
    connection.putrequest(request.method, request.target)
    for name, text in request.headers.items():
        connection.putheader(name, text.encode())
    if request.body is not None or request.method != "GET":
        connection.putheader("Content-Length", str(len(request.body or b"")))
    connection.connect()
    connection.sock.settimeout(request.timeout_s)
    return connection


def _unreachable(url: str, error: Exception) -> Exception:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = f"the server's certificate is not accepted: {error.verify_message}"
        return ConnectionError(f"{url}: {why} (set SSL_CERT_FILE to the file of its CA, or correct --servers)")
    if without_tls(error):
        return ConnectionError(f"{url}: the server does not speak TLS: try http:// (--servers)")
    if isinstance(error, TimeoutError):
        return TimeoutError(f"{url} did not answer in time")
    if isinstance(error, http.client.RemoteDisconnected) and url.startswith("http:"):
        return ConnectionError(f"{url}: the server closed the connection without an answer: try https://")
    return ConnectionError(f"{url}: {getattr(error, 'strerror', None) or error or type(error).__name__}")
