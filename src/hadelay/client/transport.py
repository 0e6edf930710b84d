"""One request to a cluster of several addresses: fail-over, retries, and the server's errors as exceptions.

Every request may be sent twice: publishes carry an Idempotency-Key, receives a request_id, and the rest is idempotent.
So a request with an unknown outcome (broken connection, 504) is repeated at the next address until its timeout.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import urlsplit

from hadelay import errors
from hadelay.api.problems import NO_NEWS, NONSENSE, NotANode, Unreachable, not_a_node, not_http, refusal, without_tls
from hadelay.client.paths import may_follow, of_shard, relayed, topic_of
from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown
from hadelay.version import VERSION

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.05, 2.0
#: Size in bytes from which request bodies are streamed: aiohttp warns about large bytes objects.
_STREAMED_BYTES = 1 << 20
_MAX_REDIRECTS = 3
#: Timeout of connecting, in seconds: a dead machine answers nothing, and other addresses may answer.
_CONNECT_S = 3.0
#: Limit of remembered leaders, and of topics with a direct address.
_MOST_LEADERS = 1_024
#: Header of forwarded answers: URL of the leader of the shard that owns the topic.
_DIRECT = "Hadelay-Direct"
#: Time in seconds for which no request goes straight to an address where no node answered. Long, because each try may
#: cost the timeout of connecting, and all that a direct address saves is one hop.
_NOT_DIRECT_S = 600.0
#: Time in seconds for which a redirect is not followed to an address that could not be connected.
_AVOIDED_S = 30.0


class HttpAnswer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes
    #: Whether the request was sent more than once: the node may have carried out an earlier try, too.
    resent: bool = False


class _Request(NamedTuple):
    method: str
    path: str
    data: bytes
    headers: Mapping[str, str]
    to_leader: str


def addresses(urls: str | Sequence[str]) -> list[str]:
    """Node URLs from "http://a:8400,http://b:8400" or a list. Default scheme: http. ValueError for another form."""
    found = []
    for url in urls.split(",") if isinstance(urls, str) else urls:
        text = url.strip().rstrip("/")
        text = text if "://" in text else f"http://{text}"
        if re.fullmatch(r"https?://[^/?#\s]+/[^?#]*", text):
            raise ValueError(
                f"{url!r}: nodes are not served under a path: remove the path; behind a proxy, use a host name or port "
                "that the proxy forwards to hadelay alone"
            )
        if not _address(text):
            raise ValueError(f"{url!r}: expected an address such as http://127.0.0.1:8400")
        found.append(text)
    if not found:
        raise ValueError("no node address given: pass a URL such as http://127.0.0.1:8400")
    return found


def _address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        found = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # urlsplit raises ValueError for an invalid port
        return False
    return bool(found) and not parts.path and not parts.query and not re.search(r"\s", text)


class Transport:
    """Requests to one cluster. Belongs to the event loop that first uses it."""

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str | None,
        timeout_s: float,
        ca: str | None = None,
        shard: int | None = None,
    ) -> None:
        """ca: path of a PEM file with CA certificates. shard: index of a shard that all requests name. Raises OSError
        if the file cannot be read."""
        from hadelay.client import connector  # the import takes 0.1 s: import here, so that no request waits

        self._connector = connector
        self.urls = addresses(urls)
        try:
            self._ssl = ssl.create_default_context(cafile=ca) if ca else True
        except OSError as error:
            raise OSError(f"ca {ca}: the CA file cannot be read: {error.strerror or error}") from None
        self.timeout_s, self._shard = timeout_s, shard
        #: Topics of a receive → address of their leader, to which a node last redirected such a receive.
        self.leaders: dict[str, str] = {}
        #: Address → monotonic time until which it is avoided. Either redirects led to the address and no connection
        #: could be made; or its own redirects must not be followed, so its node is asked to relay requests at once.
        self._avoided: dict[str, float] = {}
        #: Topic, percent-encoded as in paths → address of its shard's leader, learned from the header of a forwarded
        #: answer.
        self.direct: dict[str, str] = {}
        #: Addresses that answers may not set as direct addresses, because no node answered there → monotonic time when
        #: this exclusion ends.
        self._not_direct: dict[str, float] = {}
        self._at = random.randrange(len(self.urls))
        self._headers = {"User-Agent": f"hadelay-python/{VERSION}"}
        # Strip the token: a token read from a file ends in a line break.
        token = (token or os.environ.get("HADELAY_TOKEN", "")).strip()
        if not token.isascii() or not token.isprintable():
            raise ValueError("the token must be one line of printable ASCII: check token= or HADELAY_TOKEN")
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def disown(self) -> None:
        """Forget the connections without closing them: in the child of a fork, they belong to the parent."""
        if self._session is not None:
            self._session.detach()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=self._connector.Connector(limit=0, ttl_dns_cache=30, ssl=self._ssl),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
            )
        if loop is not self._loop:
            raise RuntimeError(
                "this client belongs to another event loop: create one in each asyncio.run, or use Client"
            )
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        read: Callable[[HttpAnswer], T],
        *,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        answer_within_s: float | None = None,
        to_leader: str = "",
        retry: bool = True,
    ) -> T:
        """Send a request; returns the result of `read` for a 2xx answer, and raises an error for other answers.
        timeout_s: limit of all tries together. answer_within_s: limit of one try at one address."""
        path = of_shard(path, self._shard)
        request = _Request(method, path, data, headers or {}, to_leader)
        total_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + total_s
        if retry and answer_within_s is None:
            # A frozen node never answers, so each address gets an equal part of the total time.
            answer_within_s = total_s / len(self.urls)
        backoff_s = _FIRST_BACKOFF_S
        failures = strangers = 0
        unknown: HadelayError | None = None
        unreachable: Unreachable | None = None
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                return await self._try(request, read, min(left_s, answer_within_s or left_s), unknown is not None)
            except HadelayError as error:
                if not error.outcome_known:
                    unknown = error
                failures += 1
                # Something other than a node answers at this address; another address may be right. If no address has a
                # node, waiting does not help.
                strangers = strangers + 1 if isinstance(error, NotANode) and not error.retryable else 0
                again = strangers < len(self.urls) if strangers else _worth_retrying(error)
                # A Retry-After from a proxy or another server concerns only that server's address.
                alone = not error.of_a_node and len(self.urls) > 1
                pause_s = 0.0 if alone else (error.retry_after_ms or 0) / 1000
                # Try all addresses without a pause in between; pause only when each has failed.
                if failures % len(self.urls) == 0 or pause_s:
                    pause_s = max(pause_s, backoff_s * random.uniform(0.5, 1.0))
                    backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
                if isinstance(error, Unreachable) and (unreachable is None or time.monotonic() < deadline):
                    unreachable = error
                if not retry or not again or time.monotonic() + pause_s >= deadline:
                    # A last try that the deadline cuts short says less about an address than the tries before it.
                    reason = unreachable if isinstance(error, Unreachable) and unreachable is not None else error
                    final = _final(reason, unknown, request)
                    if final is not error:
                        raise final from error
                    raise
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _try(
        self, request: _Request, read: Callable[[HttpAnswer], T], within_s: float, resent: bool, at: str = ""
    ) -> T:
        """Try a request at one address, redirects included. at: address to use instead of the current one. If this
        machine cannot reach the address that a node redirects to, or must not go there unencrypted, the redirecting
        node relays the request."""
        import aiohttp
        import yarl

        connected = self._connector.connected
        method, path, data, headers, to_leader = request
        base, direct = (at, "") if at else self._where(path, to_leader)
        until = time.monotonic() + within_s
        url, redirected_by, answered = base + path, "", False
        if to_leader and self._avoided.get(base, 0.0) > time.monotonic():
            url = relayed(url)
        session = self._open()
        try:
            async with asyncio.timeout(within_s):
                for _ in range(_MAX_REDIRECTS):
                    connected.set(False)
                    body = data if len(data) < _STREAMED_BYTES else io.BytesIO(data)
                    async with session.request(
                        method, yarl.URL(url, encoded=True), data=body or None, headers=headers, allow_redirects=False
                    ) as response:
                        answered = response.status != 307 or "Location" not in response.headers
                        if answered:
                            answer = HttpAnswer(response.status, response.headers, await response.read(), resent)
                            break
                        there = response.headers["Location"].removesuffix(path)
                        if self._follows(base, url, there):
                            redirected_by, base, url = base, there, there + path
                            self._remember(to_leader, there)
                        else:
                            url = relayed(base + path)
                else:
                    raise NoLeader(f"leadership is moving: {_MAX_REDIRECTS} redirects, no answer", retry_after_ms=100)
            return self._result(answer, read, base, request, direct)
        except HadelayError as error:
            if isinstance(error, NoLeader | errors.Overloaded) or not error.of_a_node:
                self._turn(base)
            if direct and error.outcome_known and not error.of_a_node:
                self._not_direct[direct] = time.monotonic() + _NOT_DIRECT_S
                return await self._try(request, read, until - time.monotonic(), resent, self.urls[self._at])
            raise
        except (aiohttp.ClientError, TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            self._turn(base)
            if (redirected_by or direct) and not connected.get():
                avoided, pause_s = (self._avoided, _AVOIDED_S) if redirected_by else (self._not_direct, _NOT_DIRECT_S)
                avoided[base] = time.monotonic() + pause_s
                if (left_s := until - time.monotonic()) > 0:
                    return await self._try(request, read, left_s, resent, redirected_by or self.urls[self._at])
            raise _in_words(error, base, request, sent=connected.get(), answered=answered) from None

    def _where(self, path: str, to_leader: str) -> tuple[str, str]:
        """Returns (address to send a request to, the same address if it is the direct address of the topic, else
        "")."""
        direct = "" if to_leader or not self.direct else self.direct.get(topic_of(path), "")
        return direct or (to_leader and self.leaders.get(to_leader)) or self.urls[self._at], direct

    def _result(
        self, answer: HttpAnswer, read: Callable[[HttpAnswer], T], base: str, asked: _Request, direct: str
    ) -> T:
        """Like _read; also remembers the topic's direct address that the answer names. direct: direct address that the
        request was sent to; "" if it went to another address."""
        if (direct or _DIRECT in answer.headers) and "Hadelay-Node" in answer.headers:
            self._learn(asked.path, base, answer.headers)
        return _read(answer, read, base, asked.method)

    def _follows(self, base: str, url: str, there: str) -> bool:
        """Whether to go to the address that the redirect of `url` names. base: address of `url`."""
        if not may_follow(url, there):
            self._avoided[base] = time.monotonic() + _AVOIDED_S
            return False
        return self._avoided.get(there, 0.0) <= time.monotonic()

    def _remember(self, topics: str, leader: str) -> None:
        if len(self.leaders) >= _MOST_LEADERS:
            self.leaders.clear()
        self.leaders[topics] = leader

    def _learn(self, path: str, base: str, headers: Mapping[str, str]) -> None:
        """Remember the direct address that an answer of `base` names for the topic of the path. Forget the address if
        the node there does not lead any more."""
        topic, there = topic_of(path), headers.get(_DIRECT, "")
        if not there:
            if headers.get("Hadelay-Leader") != headers.get("Hadelay-Node"):
                self.direct.pop(topic, None)
        elif (
            topic
            and may_follow(base, there)
            and _address(there)
            and self._not_direct.get(there, 0.0) <= time.monotonic()
        ):
            if len(self.direct) >= _MOST_LEADERS:
                self.direct.clear()
            self.direct[topic] = there

    def _turn(self, failed: str) -> None:
        """Switch from the failed address to the next, unless another request has switched already."""
        self.leaders = {topics: url for topics, url in self.leaders.items() if url != failed}
        self.direct = {topic: url for topic, url in self.direct.items() if url != failed}
        if failed == self.urls[self._at]:
            self._at = (self._at + 1) % len(self.urls)


def _read(answer: HttpAnswer, read: Callable[[HttpAnswer], T], base: str, method: str) -> T:
    """Result of `read` for an answer with status 2xx. For another status, raises the error that the answer
    describes."""
    if not 200 <= answer.status < 300:
        raise refusal(base, method, answer.status, answer.headers, answer.body)
    try:
        return read(answer)
    except NONSENSE as error:
        raise not_a_node(base, method, answer.status, answer.headers, answer.body, str(error)) from None


def _in_words(error: BaseException, base: str, request: _Request, *, sent: bool, answered: bool) -> HadelayError:
    """The error for a request that got no complete answer. sent: whether there was a connection. answered: whether the
    answer had begun."""
    if found := re.search(r"Bad status line.*?\n +(b['\"].*)", getattr(error, "message", ""), re.S):
        return not_http(base, request.method, found[1].partition("\n")[0])
    if not sent:
        if without_tls(getattr(error, "os_error", None)):
            return Unreachable(f"{base}: the server does not speak TLS: try http://")
        # `strerror` of aiohttp's ClientConnectorError is the system's reason why there is no connection.
        why = "no connection in time" if isinstance(error, TimeoutError) else getattr(error, "strerror", None) or error
        return Unreachable(f"{base}: {why}; is a node running there?")
    words = "no answer in time" if isinstance(error, TimeoutError) else f"the connection broke: {error}"
    if request.method in ("GET", "HEAD"):
        return Unreachable(f"{base}: {words}")
    begun = "; it had begun to answer" if answered else ""
    keyed = ". Retry with the same key" if "Idempotency-Key" in request.headers else ""
    return OutcomeUnknown(f"{base}: {words}{begun}{keyed}")


def _final(error: HadelayError, unknown: HadelayError | None, request: _Request) -> HadelayError:
    """The error to raise when tries are used up. error: from the last try. unknown: from the last try whose outcome is
    unknown, if any."""
    if unknown is None:
        return error
    if "Idempotency-Key" in request.headers:
        unknown.extra["idempotency_key"] = request.headers["Idempotency-Key"]
    # A known outcome of the last try does not tell the outcome of an earlier try.
    news = error.outcome_known and not (error.retryable or isinstance(error, (NotANode, *NO_NEWS)))
    return error if news or not error.outcome_known else unknown


def _worth_retrying(error: HadelayError) -> bool:
    # The error of a full disk is retryable, but the disk stays full for longer than the timeout of a call.
    return (error.retryable or not error.outcome_known) and not isinstance(error, errors.DiskFull)
