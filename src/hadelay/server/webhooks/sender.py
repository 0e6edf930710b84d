"""One call: an HTTP/1.1 POST on a connection that is kept, and what came of it in words that fit into a history.

The status decides. What follows it is read only so that the connection can be used again: at most 16 KiB, within what
is left of the timeout; whoever answers more, or more slowly, loses the connection. Redirects are refused: the place
they lead to was not what the topic's owner wrote, nor was it checked. Proxies, cookies and .netrc of the environment
are not looked at.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from email.utils import parsedate_to_datetime
from functools import lru_cache

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from hadelay.server.webhooks.call import Answer, Done, Request
from hadelay.server.webhooks.guard import AddressRefused, Guard

#: Of an answer's body, before the connection is given up.
MAX_ANSWER = 16 << 10
#: Connections idle for longer are closed by us: some servers close theirs after 5 s, and what is sent meanwhile fails.
_IDLE_S = 4.0
_DNS_S = 10


class GuardedResolver(AbstractResolver):
    """Leaves out what may not be called. Raises AddressRefused when nothing is left."""

    def __init__(self, inner: AbstractResolver, guard: Guard) -> None:
        self.inner, self.guard = inner, guard

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self.inner.resolve(host, port, family)
        permitted = [one for one in found if self.guard.permits(one["host"])]
        if found and not permitted:
            raise AddressRefused(f"{host} has private addresses only")
        return permitted

    async def close(self) -> None:
        await self.inner.close()


class Sender:
    """A Caller (call.py). Make it inside the running loop; `close` waits for no answer."""

    def __init__(self, guard: Guard, user_agent: str) -> None:
        resolver = GuardedResolver(ThreadedResolver(), guard)
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_IDLE_S, resolver=resolver, ttl_dns_cache=_DNS_S, socket_factory=guard.socket
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": user_agent, "Accept": "*/*"},
            skip_auto_headers=("Accept-Encoding",),
            auto_decompress=False,
            trust_env=False,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def call(self, request: Request, done: Done) -> None:
        task = asyncio.ensure_future(self._call(request, done))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def _call(self, request: Request, done: Done) -> None:
        began = time.monotonic()
        status, reason, retry_after_ms = 0, "", None
        try:
            async with self._session.post(
                _url(request.url),
                data=request.body,
                headers=request.headers,
                allow_redirects=False,
                timeout=_timeout(request.timeout_s),
            ) as answer:
                status = answer.status
                retry_after_ms = retry_after(answer.headers.get("Retry-After"))
                if not answer.content.at_eof():
                    await _skim(answer)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, ssl.CertificateError) as error:
            reason = "" if status else why(error)
        done(Answer(status, reason or failure(status), retry_after_ms, time.monotonic() - began))


async def _skim(answer: aiohttp.ClientResponse) -> None:
    """Read to its end, or close the connection if that is not near."""
    size = 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER:
            answer.close()
            return


@lru_cache(maxsize=1024)
def _url(text: str) -> URL:
    return URL(text, encoded=True)


@lru_cache(maxsize=1024)
def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    """For all of it; aiohttp would round those over 5 s up to whole seconds of the clock."""
    return aiohttp.ClientTimeout(total=seconds, sock_connect=None, ceil_threshold=1e9)


def failure(status: int) -> str:
    if 200 <= status < 300:
        return ""
    return f"redirect refused (HTTP {status})" if 300 <= status < 400 and status != 304 else f"HTTP {status}"


def why(error: BaseException) -> str:
    """A few words out of a bounded set: they are kept with the message, and name what its owner can do about."""
    cause: BaseException | None = error
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
    if isinstance(cause, AddressRefused):
        return "address refused"
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "name not resolved"
    if isinstance(error, (aiohttp.ClientSSLError, ssl.SSLError, ssl.CertificateError)):
        return "TLS error"
    if isinstance(error, aiohttp.InvalidURL):
        return "invalid URL"
    if isinstance(cause, OSError) and cause.errno in _ERRORS:
        return _ERRORS[cause.errno]
    if isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionError)):
        return "connection closed"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connection failed"
    return "no HTTP answer"


_ERRORS = {
    errno.ECONNREFUSED: "connection refused",
    errno.EHOSTUNREACH: "host unreachable",
    errno.ENETUNREACH: "network unreachable",
    errno.ECONNRESET: "connection closed",
    errno.EPIPE: "connection closed",
    errno.ETIMEDOUT: "timeout",
    errno.EMFILE: "too many open files",
}


def retry_after(text: str | None, now_s: float | None = None) -> int | None:
    """Milliseconds from now; both forms (RFC 9110, 10.2.3). None when it is missing or nonsense."""
    if not text:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        return int(text[:12]) * 1000
    try:
        at = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0, int((at - (time.time() if now_s is None else now_s)) * 1000))
