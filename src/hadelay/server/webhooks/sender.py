"""Makes webhook calls: an HTTP/1.1 request on a connection that is reused; the outcome is described in a few words for
the message's history.

This is a client of our own because a general one costs three times as much per call (ADR 0088). It sends one request
at a time on a connection; of an answer it reads the status, `Retry-After`, and where the answer ends.

The status decides. The body is read so that the connection can be used again, and for callbacks: at most 16 KiB, within
the rest of the timeout; a receiver that answers more, or more slowly, loses the connection. Redirects are refused:
nobody wrote or checked the URL that they lead to. Proxies, cookies and .netrc of the environment are ignored.

A receiver may close an idle connection at the moment at which a call is sent on it. If no byte of an answer came, the
call is made once more on a fresh connection, as the same attempt, within the same timeout: `webhook-id` says that it is
the same call, in case the receiver carried out the first.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

from aiohappyeyeballs import AddrInfoType, start_connection
from yarl import URL

from hadelay.api.problems import retry_after_ms
from hadelay.codec.ackparts import CallReply
from hadelay.model import MAX_REPLY
from hadelay.platform.tls import Certificates
from hadelay.server.guard import Guard
from hadelay.server.webhooks.calls import CallRequest, Done, Reply
from hadelay.server.webhooks.failures import failure, why

#: Limit of an answer's head, and of its body, in bytes; the connection of a longer answer is closed.
MAX_ANSWER = MAX_REPLY
#: Idle time after which a connection is closed, in seconds: some servers close idle connections after 5 s, and a
#: request sent just then fails.
_IDLE_S = 4.0
#: Time in seconds for which a host's addresses are used before the host is looked up again.
_DNS_S = 10.0
#: Time limit, in seconds, of waiting for a repeated look-up of a host's name; after that, the old addresses are used.
#: Look-ups share a few threads, and slow names of one topic must not delay the calls of other topics.
_SLOW_DNS_S = 1.0
_MAX_NAMES = 1_024
#: Time in seconds without a connection after which the next address of a host is tried in parallel (RFC 8305).
_NEXT_ADDRESS_S = 0.25
_NO_ANSWER = "no HTTP answer"
#: Limit of the wait that an answer may ask for with Retry-After, in seconds; limits.max_delay limits the wait of a
#: message further.
_LONGEST_WAIT_S = 1e9

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?(?:\r?\n|\Z)")
_HEAD_END = re.compile(rb"\r?\n\r?\n")
#: Pattern of the header fields of an answer that this client evaluates.
_FIELD = re.compile(
    rb"(?i)\n(connection|content-length|content-type|retry-after|transfer-encoding)[ \t]*:[ \t]*([^\r\n]*)"
)
_DIGITS = re.compile(rb"\d{1,15}[ \t]*\Z")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r?\n")
_TRAILERS = re.compile(rb"(?:[^\r\n]+\r?\n)*\r?\n")

Resolve = Callable[[str, int], Awaitable[list[AddrInfoType]]]


class Endpoint(NamedTuple):
    """Server to which a connection leads, and whether the connection uses the client certificate."""

    host: str
    port: int
    tls: bool
    #: Whether this side shows its client certificate to the server.
    identified: bool = False


class Sender:
    """HTTP client for webhook calls. Construct inside the running loop; `close` does not wait for answers."""

    def __init__(
        self, guard: Guard, user_agent: str, resolve: Resolve | None = None, certificates: Certificates | None = None
    ) -> None:
        self._guard, self._loop = guard, asyncio.get_running_loop()
        self._resolve = resolve or self._look_up
        #: Lines of default headers, by name; headers that are set for a topic replace them.
        self._defaults = {"user-agent": f"User-Agent: {user_agent}\r\n", "accept": "Accept: */*\r\n"}
        #: Webhook calls under way.
        self.calls: set[_Call] = set()
        #: Idle connections by server, in the order in which they became idle.
        self._idle: dict[Endpoint, list[_Connection]] = {}
        self._sweeping: asyncio.TimerHandle | None = None
        #: Look-ups of hosts by (host, port), the least recently used first.
        self._names: dict[tuple[str, int], _Name] = {}
        self._certificates = certificates

    def call(self, request: CallRequest, done: Done) -> None:
        call = _Call(done, request.keeps)
        self.calls.add(call)
        call.timer = self._loop.call_later(request.timeout_s, self._expired, call)
        try:
            identified = request.identified and self._certificates is not None
            call.endpoint, line = _target(request.method, request.url, identified)
            call.request = b"".join((self._head(line, request.headers, len(request.body)), request.body))
        except ValueError:
            self._loop.call_soon(self.over, call, "invalid request")
            return
        waiting = self._idle.get(call.endpoint)
        while waiting:
            connection = waiting.pop()
            if not connection.transport.is_closing():
                connection.send(call)
                return
        self.connect(call)

    def connect(self, call: _Call) -> None:
        call.connection = None
        call.task = self._loop.create_task(self._connect(call, call.endpoint))

    async def close(self) -> None:
        calls, self.calls = self.calls, set()
        tasks: list[asyncio.Future[Any]] = [call.task for call in calls if call.task is not None]
        tasks += [name.task for name in self._names.values() if name.task is not None]
        for task in tasks:
            task.cancel()
        for call in calls:
            call.end()
        for connection in [one for idle in self._idle.values() for one in idle]:
            connection.transport.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def over(self, call: _Call, reason: str) -> None:
        """End a call and report its outcome. reason: why the call failed, if it got no HTTP status."""
        call.end()
        if call not in self.calls:
            return
        self.calls.remove(call)
        reason = failure(call.status) if call.status else reason
        kept = CallReply(call.status, call.content_type, call.body, not call.whole) if call.keeps else None
        call.done(Reply(call.status, reason, call.retry_after_ms, time.monotonic() - call.began, kept))

    def _expired(self, call: _Call) -> None:
        if call.task is not None:
            call.task.cancel()
        if call.connection is not None:
            call.connection.keep_body(call)
        self.over(call, "timeout")

    def _head(self, line: str, headers: Mapping[str, str], size: int) -> bytes:
        fields = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if not fields.count("\n") == fields.count("\r") == len(headers):
            raise ValueError("a header of the webhook call contains a line break")
        named = {name.lower() for name in headers}
        defaults = "".join([text for name, text in self._defaults.items() if name not in named])
        return f"{line}{defaults}{fields}Content-Length: {size}\r\n\r\n".encode()

    async def _connect(self, call: _Call, endpoint: Endpoint) -> None:
        host = endpoint.host.rstrip(".") if endpoint.tls else None
        try:
            found = self._guard.permitted(await self._addresses(endpoint.host, endpoint.port))
            connected = await start_connection(
                found, happy_eyeballs_delay=_NEXT_ADDRESS_S, socket_factory=self._guard.socket
            )
            await self._loop.create_connection(
                partial(_Connection, self, endpoint, call),
                sock=connected,
                ssl=self._context(endpoint) if endpoint.tls else None,
                server_hostname=host,
            )
        except (OSError, ValueError, RuntimeError) as error:
            self.over(call, why(error))

    def _context(self, endpoint: Endpoint) -> ssl.SSLContext:
        # Take the TLS context anew for each connection, because renewed certificates come with a new context.
        return self._certificates.client if endpoint.identified and self._certificates else _tls_context()

    async def _addresses(self, host: str, port: int) -> list[AddrInfoType]:
        name = self._names.pop((host, port), None)
        if name is None:
            name = _Name()
            if len(self._names) >= _MAX_NAMES:
                del self._names[next(iter(self._names))]
        self._names[host, port] = name
        now = time.monotonic()
        if name.task is None or (name.task.done() and (name.found is None or name.until < now)):
            name.until = now + _DNS_S
            name.task = asyncio.ensure_future(self._resolve(host, port))
            name.task.add_done_callback(name.resolved)
        # Shield the look-up from cancellation: several calls may wait for it, and cancelling one must not fail the
        # others.
        if name.found is not None and not name.task.done():
            await asyncio.wait((name.task,), timeout=_SLOW_DNS_S)
        return name.found if name.found is not None else await asyncio.shield(name.task)

    async def _look_up(self, host: str, port: int) -> list[AddrInfoType]:
        kind, flags = socket.SOCK_STREAM, socket.AI_ADDRCONFIG
        return cast(list[AddrInfoType], await self._loop.getaddrinfo(host, port, type=kind, flags=flags))

    def idle(self, connection: _Connection) -> None:
        self._idle.setdefault(connection.endpoint, []).append(connection)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(_IDLE_S / 4, self._sweep)

    def lost(self, connection: _Connection) -> None:
        waiting = self._idle.get(connection.endpoint, [])
        if connection in waiting:
            waiting.remove(connection)

    def _sweep(self) -> None:
        oldest = time.monotonic() - _IDLE_S
        for endpoint, waiting in list(self._idle.items()):
            while waiting and waiting[0].since < oldest:
                waiting.pop(0).transport.close()
            if not waiting:
                del self._idle[endpoint]
        self._sweeping = self._loop.call_later(_IDLE_S / 4, self._sweep) if self._idle else None


class _Name:
    __slots__ = ("found", "task", "until")

    def __init__(self) -> None:
        #: Addresses that the last look-up found, valid until `until`; None if it failed, or if there was none yet.
        self.found: list[AddrInfoType] | None = None
        self.until = 0.0
        #: The latest look-up of the host's addresses, as an asyncio task.
        self.task: asyncio.Future[list[AddrInfoType]] | None = None

    def resolved(self, task: asyncio.Future[list[AddrInfoType]]) -> None:
        self.found = None if task.cancelled() or task.exception() else task.result()


class _Call:
    __slots__ = (
        "began", "body", "connection", "content_type", "done", "endpoint", "keeps", "request", "retry_after_ms",
        "status", "task", "timer", "whole",
    )  # fmt: skip

    def __init__(self, done: Done, keeps: bool) -> None:
        self.done, self.began, self.keeps = done, time.monotonic(), keeps
        #: Content type of the answer, its body as far as received, and whether that is the whole body.
        self.content_type, self.body, self.whole = "", b"", False
        self.request = b""
        self.endpoint: Endpoint
        self.status = 0
        self.retry_after_ms: int | None = None
        self.timer: asyncio.TimerHandle
        #: Task that opens a connection for this call; None if the call uses an idle connection.
        self.task: asyncio.Task[None] | None = None
        self.connection: _Connection | None = None

    def end(self) -> None:
        """Stop the call's timer; close the call's connection, unless the connection is idle again and can be reused."""
        self.timer.cancel()
        if self.connection is not None:
            self.connection.drop()


class _Connection(asyncio.Protocol):
    """A connection to a receiver. call: the call under way on it; None while the connection is idle."""

    def __init__(self, sender: Sender, endpoint: Endpoint, call: _Call) -> None:
        self.sender, self.endpoint = sender, endpoint
        self.call: _Call | None = call
        self.since = 0.0
        #: _used: whether an earlier call used the connection. _silent: whether no byte of the present call's answer
        #: came yet.
        self._used, self._silent = False, True
        #: Bytes received of the answer: first those of its head, then those of its body.
        self._buffer = b""
        #: _keep: whether another call may use the connection afterwards. _length: length of the answer's body; None if
        #: the body is chunked; more than MAX_ANSWER if the body ends when the connection ends.
        self._keep, self._length = False, cast(int | None, 0)
        #: Whether the answer's body ends only when the receiver closes the connection.
        self._until_closed = False
        #: Offset of the next chunk in the body of a chunked answer.
        self._next = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        if self.call is not None and self.call in self.sender.calls:
            self.send(self.call)
        else:
            self.drop()

    def send(self, call: _Call) -> None:
        self.call, call.connection, self._silent = call, self, True
        self.transport.write(call.request)

    def drop(self) -> None:
        self.call = None
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        call = self.call
        if call is None:
            self.transport.abort()  # no call is under way, so no request asked for the bytes received
            return
        self._silent = False
        searched = max(0, len(self._buffer) - 3)
        data = self._buffer + data
        while not call.status:
            end = _HEAD_END.search(data, searched)
            line = _STATUS.match(data) if end is not None else None
            if end is None and b"HTTP/1.".startswith(data[:7]) and len(data) <= MAX_ANSWER:
                self._buffer = data
                return
            if end is None or line is None:
                self.sender.over(call, _NO_ANSWER)
                return
            head, data, searched = data[: end.start()], data[end.end() :], 0
            # Skip interim answers (1xx), except 101: after a 101, the receiver would no longer speak HTTP on this
            # connection.
            if line[2][:1] != b"1" or line[2] == b"101":
                call.status = int(line[2])
                self._frame(call, line[1] == b"1", head)
        end_at = self._length if self._length is not None else self._chunks(data)
        if len(data) < end_at and len(data) <= MAX_ANSWER:
            self._buffer = data
            return
        self._buffer = data
        self.keep_body(call)
        self._buffer = b""
        if self._keep and len(data) == end_at and not self.transport.get_write_buffer_size():
            self.call = call.connection = None
            self._used = True
            self.since = time.monotonic()
            self.sender.idle(self)
        self.sender.over(call, "")

    def _frame(self, call: _Call, persistent: bool, head: bytes) -> None:
        """Read the head of an answer: determine where the body ends, and whether the connection stays open (RFC 9112,
        6.3, 9.3)."""
        fields: dict[bytes, bytes] = {}
        doubtful = False
        for name, value in _FIELD.findall(head):
            doubtful |= fields.setdefault(name.lower(), value) != value
        length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
        options = fields.get(b"connection", b"").lower()
        self._keep = (
            call.status != 101
            and not doubtful
            and (b"close" not in options if persistent else b"keep-alive" in options)
        )
        self._next = 0
        if call.status in (101, 204, 304):
            self._length = 0
        elif coding is not None:
            self._length = None if coding.strip().lower() == b"chunked" else MAX_ANSWER + 1
            self._keep &= length is None
        else:
            self._length = int(length) if length is not None and _DIGITS.match(length) else MAX_ANSWER + 1
        self._until_closed = coding is None and length is None
        if call.keeps:
            text = fields.get(b"content-type", b"").decode("ascii", "replace")
            call.content_type = text.strip() if text.isprintable() else ""
        call.retry_after_ms = retry_after_ms(fields.get(b"retry-after", b"").decode("latin-1"), _LONGEST_WAIT_S)

    def keep_body(self, call: _Call, closed: bool = False) -> None:
        """If the call keeps the answer, give it the body as far as received. closed: whether the receiver closed the
        connection in good order."""
        if not (call.keeps and call.status):
            return
        data, length = self._buffer, self._length
        if length is None:
            data, call.whole = _joined(data)
        else:
            call.whole = len(data) >= length or (closed and self._until_closed)
            data = data[:length]
        call.body, call.whole = data[:MAX_REPLY], call.whole and len(data) <= MAX_REPLY

    def _chunks(self, data: bytes) -> int:
        """Offset at which a chunked body ends; more than MAX_ANSWER if the body is malformed, or its end has not come
        yet."""
        while chunk := _CHUNK.match(data, self._next):
            size = int(chunk[1], 16)
            if not size:
                trailers = _TRAILERS.match(data, chunk.end())
                return trailers.end() if trailers else MAX_ANSWER + 1
            self._next = chunk.end() + size + 2
        return MAX_ANSWER + 1

    def connection_lost(self, exc: Exception | None) -> None:
        call, self.call = self.call, None
        if call is not None:
            self.keep_body(call, closed=exc is None)
        if call is None:
            self.sender.lost(self)
        elif self._used and self._silent and (exc is None or isinstance(exc, ConnectionError)):
            # The receiver closed the connection while it was idle: repeat the call on a new one (RFC 9112, 9.3.1).
            self.sender.connect(call)
        else:
            self.sender.over(call, "connection closed" if exc is None else why(exc))


def _joined(data: bytes) -> tuple[bytes, bool]:
    """Returns (contents of the chunks in the first part of a chunked body, whether the last chunk is among them)."""
    parts, at = list[bytes](), 0
    while chunk := _CHUNK.match(data, at):
        size = int(chunk[1], 16)
        if not size:
            return b"".join(parts), True
        parts.append(data[chunk.end() : chunk.end() + size])
        at = chunk.end() + size + 2
    return b"".join(parts), False


@lru_cache(maxsize=1)
def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


@lru_cache(maxsize=1024)
def _target(method: str, url: str, identified: bool) -> tuple[Endpoint, str]:
    """Server to connect to for a URL, and the first lines of the request to it. ValueError if the URL cannot be
    called."""
    parts = URL(url, encoded=True)
    if not parts.raw_host or parts.port is None:
        raise ValueError("the URL has no host")
    line = f"{method} {parts.raw_path_qs or '/'} HTTP/1.1\r\nHost: {parts.host_port_subcomponent}\r\n"
    if not line.isascii() or line.count("\n") != 2:
        raise ValueError("the URL is not ASCII")
    tls = parts.scheme == "https"
    return Endpoint(parts.raw_host, parts.port, tls, identified and tls), line
