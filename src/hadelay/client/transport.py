"""One request to a cluster of several addresses: fail-over, retries, and the server's errors as exceptions.

Whatever is sent here may be sent twice: publishes carry an Idempotency-Key, receives a request_id, and the rest is
idempotent by itself. So a request whose outcome is unknown (the connection broke, 504) is simply asked again, at the
next address, until its time is over.
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
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import aiohttp
import yarl

from hadelay import errors
from hadelay.api.problems import NO_NEWS, NONSENSE, NotANode, Unreachable, not_a_node, refusal
from hadelay.errors import HadelayError, NoLeader, OutcomeUnknown
from hadelay.paths import encrypted_too, relayed
from hadelay.version import VERSION

T = TypeVar("T")

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.05, 2.0
#: Bodies above are streamed: aiohttp warns about large bytes.
_STREAMED_BYTES = 1 << 20
_MAX_REDIRECTS = 3
#: For a machine that is gone: it says nothing at all, and there are other addresses.
_CONNECT_S = 3.0
#: How long the address of a redirect is not tried again after it took no connection, in seconds.
_AVOIDED_S = 30.0


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes
    #: It is of a later try: an earlier one may have been carried out, too.
    resent: bool = False


def addresses(urls: str | Sequence[str]) -> list[str]:
    """ "http://a:8400,http://b:8400", or a list; without a scheme it is http. Raises ValueError in words."""
    found = []
    for url in urls.split(",") if isinstance(urls, str) else urls:
        text = url.strip().rstrip("/")
        text = text if "://" in text else f"http://{text}"
        if not _address(text):
            raise ValueError(f"{url!r}: expected an address such as http://127.0.0.1:8400")
        found.append(text)
    if not found:
        raise ValueError("no address given")
    return found


def _address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        found = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port that is none
        return False
    return bool(found) and not parts.path and not parts.query and not re.search(r"\s", text)


#: Whether this task's try got a connection: until then nothing was sent.
_connected = ContextVar("connected", default=False)


class _Connector(aiohttp.TCPConnector):
    """Closed by the process that made it: its copy in the child of a fork would take the parent's sockets out of the
    selector, which is one for both."""

    _pid = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pid = os.getpid()

    async def connect(self, *request: Any, **options: Any) -> Any:
        connection = await super().connect(*request, **options)
        _connected.set(True)
        return connection

    def __del__(self, *options: Any) -> None:
        if self._pid == os.getpid():
            super().__del__(*options)


def _of_later_try(read: Callable[[Answer], T], answer: Answer) -> T:
    return read(answer._replace(resent=True))


class Transport:
    """Opened lazily, on the loop that first uses it."""

    def __init__(self, urls: str | Sequence[str], token: str | None, timeout_s: float, ca: str | None = None) -> None:
        """ca: a PEM file; OSError when it can't be read."""
        self.urls = addresses(urls)
        try:
            self._ssl = ssl.create_default_context(cafile=ca) if ca else True
        except OSError as error:
            raise OSError(f"ca {ca}: {error.strerror or error}") from None
        self.timeout_s = timeout_s
        #: Where the leader was when a node last told us; receives go there first.
        self.leader: str | None = None
        #: Addresses of redirects that took no connection, and until when (monotonic) they are not tried again.
        self._avoided: dict[str, float] = {}
        self._at = random.randrange(len(self.urls))
        self._headers = {"User-Agent": f"hadelay-python/{VERSION}"}
        # Out of a file, it has the end of its line.
        token = (token or os.environ.get("HADELAY_TOKEN", "")).strip()
        if not token.isascii() or not token.isprintable():
            raise ValueError("the token is not a line of ASCII: was it read from the right place?")
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def disown(self) -> None:
        """In the child of a fork: its copies of the connections are left as they are."""
        if self._session is not None:
            self._session.detach()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None:
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=_Connector(limit=0, ttl_dns_cache=30, ssl=self._ssl),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
            )
        if loop is not self._loop:
            raise RuntimeError("this client is of another event loop: make one in each asyncio.run, or use Client")
        return self._session

    async def request(
        self,
        method: str,
        path: str,
        read: Callable[[Answer], T],
        *,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        answer_within_s: float | None = None,
        to_leader: bool = False,
        retry: bool = True,
    ) -> T:
        """What `read` makes of a 2xx, or an exception. `timeout_s`: all tries together; `answer_within_s`: one try,
        then the next address."""
        total_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + total_s
        if retry and answer_within_s is None:
            # A node that is frozen takes requests and answers none: each address gets its share of the time.
            answer_within_s = total_s / len(self.urls)
        backoff_s = _FIRST_BACKOFF_S
        failures = strangers = 0
        unknown: HadelayError | None = None
        while True:
            left_s = max(deadline - time.monotonic(), 0.001)
            try:
                within_s = min(left_s, answer_within_s or left_s)
                answered = read if unknown is None else partial(_of_later_try, read)
                return await self._try(method, path, answered, data, headers or {}, within_s, to_leader)
            except HadelayError as error:
                if not error.outcome_known:
                    unknown = error
                failures += 1
                # No node at an address: another one may be right, and when none is, waiting does not help.
                strangers = strangers + 1 if isinstance(error, NotANode) and not error.retryable else 0
                again = strangers < len(self.urls) if strangers else _worth_retrying(error)
                # Who is no node speaks for its own address, and not for the others.
                alone = not error.of_a_node and len(self.urls) > 1
                pause_s = 0.0 if alone else (error.retry_after_ms or 0) / 1000
                # The other addresses first, at once; only when none of them could, with a pause.
                if failures % len(self.urls) == 0 or pause_s:
                    pause_s = max(pause_s, backoff_s * random.uniform(0.5, 1.0))
                    backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)
                if not retry or not again or time.monotonic() + pause_s >= deadline:
                    if headers and unknown and "Idempotency-Key" in headers:
                        unknown.extra["idempotency_key"] = headers["Idempotency-Key"]
                    if unknown and error.outcome_known and (error.retryable or strangers or isinstance(error, NO_NEWS)):
                        # "Nothing happened" is true of the last try, and not of an earlier one.
                        raise unknown from error
                    raise
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _try(
        self,
        method: str,
        path: str,
        read: Callable[[Answer], T],
        data: bytes,
        headers: Mapping[str, str],
        within_s: float,
        to_leader: bool,
        at: str = "",
    ) -> T:
        """One try at one address, redirects included. at: that address. A node may advertise a name that this machine
        cannot resolve or reach; then the node that redirected there relays the request."""
        until = time.monotonic() + within_s
        base = at or (self.leader if to_leader and self.leader else self.urls[self._at])
        url, redirected_by = base + path, ""
        session = self._open()
        answered = False
        try:
            async with asyncio.timeout(within_s):
                for _ in range(_MAX_REDIRECTS):
                    _connected.set(False)
                    body = data if len(data) < _STREAMED_BYTES else io.BytesIO(data)
                    async with session.request(
                        method, yarl.URL(url, encoded=True), data=body or None, headers=headers, allow_redirects=False
                    ) as response:
                        answered = True
                        if response.status == 307 and "Location" in response.headers:
                            there = encrypted_too(url, response.headers["Location"]).removesuffix(path)
                            answered = False
                            if self._avoided.get(there, 0.0) > time.monotonic():
                                url = relayed(base + path)
                            else:
                                redirected_by, base, url = base, there, there + path
                                self.leader = there
                            continue
                        content = await response.read()
                        answer = Answer(response.status, response.headers, content)
                    if not 200 <= answer.status < 300:
                        raise refusal(base, method, answer.status, answer.headers, content)
                    try:
                        return read(answer)
                    except NONSENSE as error:
                        raise not_a_node(base, method, answer.status, answer.headers, content, str(error)) from None
                raise NoLeader(f"the leader moves: {_MAX_REDIRECTS} redirects and no answer", retry_after_ms=100)
        except HadelayError as error:
            if isinstance(error, NoLeader | errors.Overloaded) or not error.of_a_node:
                self._turn(base)
            raise
        except (aiohttp.ClientError, TimeoutError, ConnectionError, asyncio.IncompleteReadError) as error:
            self._turn(base)
            if redirected_by and not _connected.get():
                self._avoided[base] = time.monotonic() + _AVOIDED_S
                if (left_s := until - time.monotonic()) > 0:
                    return await self._try(method, path, read, data, headers, left_s, to_leader, redirected_by)
            raise _in_words(error, base, method, headers, answered=answered) from None

    def _turn(self, failed: str) -> None:
        """On to the next address, unless another request did so already."""
        if failed == self.leader:
            self.leader = None
        if failed == self.urls[self._at]:
            self._at = (self._at + 1) % len(self.urls)


def _in_words(
    error: BaseException, base: str, method: str, headers: Mapping[str, str], *, answered: bool
) -> HadelayError:
    """What became of a request that `base` did not answer. answered: it had begun to."""
    if not _connected.get():
        why = "it takes no connection" if isinstance(error, TimeoutError) else error
        if isinstance(error, aiohttp.ClientConnectorError):
            why = error.strerror or error
        return Unreachable(f"{base}: {why}; is a node running there?")
    words = "no answer in time" if isinstance(error, TimeoutError) else f"the connection broke: {error}"
    if method in ("GET", "HEAD"):
        return Unreachable(f"{base}: {words}")
    told = "; it had begun to answer" if answered else ""
    keyed = ". Retry with the same key" if "Idempotency-Key" in headers else ""
    return OutcomeUnknown(f"{base}: {words}{told}{keyed}")


def _worth_retrying(error: HadelayError) -> bool:
    # A full disk is retryable, but not within the patience of one call.
    return (error.retryable or not error.outcome_known) and not isinstance(error, errors.DiskFull)
