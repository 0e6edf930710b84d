"""One client's connection: aiohttp's, with a short way for the requests that there are most of.

aiohttp gives every request a parsed head, two tasks, a request and a response object; that is four times what a publish
costs otherwise. So a request that arrives whole is taken out of the bytes here: its head is looked up among the heads
of recent requests (clients repeat theirs to the byte). A publish's body becomes a draft, and the answer is written when
the commit calls back: no task, no future, no header map. Routes that are declared `short` (batches, receive, ack, and
what is asked of one message) run as they do otherwise, in a task that gets the parsed head and the body, and whose
answer is written here.

Only heads of the plainest form come this way (`_parse_fields` is strict: a Host, no name twice, nothing that changes
framing). Whatever else arrives is fed to aiohttp, which keeps its parser, its limits and its errors. The two never
overlap: the short way is open only while aiohttp's parser is between two requests and its handler waits for the next,
and bytes that arrive while a request is under way wait until it is answered (so pipelined requests are answered in
order).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from hadelay.errors import BadRequest, HadelayError
from hadelay.http import problems, receipts
from hadelay.http.access import Access
from hadelay.http.options import TRACEPARENT, Head, Options, parse_headers, with_key, with_line, with_trace
from hadelay.http.routes import Answer, Call, Route, check_headers, decode_query, header_lines, parse_query
from hadelay.http.routes import Head as RequestHead
from hadelay.server.api import Receipts

if TYPE_CHECKING:
    from hadelay.http.app import HttpServer

log = logging.getLogger(__name__)

#: As many bytes, and lines, as aiohttp takes.
_MAX_HEAD, _MAX_LINES = 8_190, 128
_TARGET = re.compile(rb'(GET|POST|PUT|DELETE|PATCH) (/[!"$-~]*) HTTP/1\.1\r\n')
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff]*)\r\n")
_PUBLISH = re.compile(rb"/v1/topics/([A-Za-z0-9._-]+)/messages(?:\?(.*))?")
#: An answer up to so large is copied behind its head.
_JOIN_BYTES = 64 << 10
#: While a task runs, so much of what follows its request is read.
_MAX_HELD = 64 << 10
_DIGITS = re.compile(rb"\d{1,15}")
#: The line of a client key that means what it says: printable ASCII, no space.
_KEY_LINE = re.compile(rb"\r\n[Hh]adelay-[Kk]ey: ?([!-~]+)(?=\r\n)")
#: What tracing adds: another one with each request.
_TRACE_LINE = re.compile(rb"\r\n[Tt]raceparent: ?(%b)(?=\r\n)" % TRACEPARENT.pattern)
#: Headers that hardly come again.
_OWN = frozenset((b"idempotency-key", b"hadelay-key", b"traceparent"))
#: Parts of a path that name a message.
_OWN_PATH = frozenset(("id", "key"))
#: Headers that change how a message is framed, or need an answer of their own.
_AIOHTTP_ONLY = frozenset(
    (b"transfer-encoding", b"expect", b"upgrade", b"content-encoding", b"te", b"trailer", b"origin", b"sec-fetch-site")
)


class Fields(NamedTuple):
    """The header lines of a request: of many requests the same, whatever their request lines ask."""

    #: None: there is no Content-Length.
    body_bytes: int | None
    #: None: something in them is wrong, or not for a publish.
    options: Options | None
    lines: tuple[tuple[bytes, bytes], ...]
    #: They may come again, to the byte.
    common: bool
    authorization: tuple[str, ...]


class Known(NamedTuple):
    """What a request asks that a route answers without aiohttp, but for its body."""

    route: Route
    path: dict[str, str]
    query: Any
    head: RequestHead
    access: Access


class Seen(NamedTuple):
    """A request head that was parsed: where its request ends, and what it asks. Remembered while its token may."""

    body_bytes: int
    #: None: it has no short way, or something is wrong with it; aiohttp and the routes deal with it.
    asks: Head | Known | None
    #: It may come again, to the byte.
    common: bool


class Heads:
    """Recent request heads, byte for byte. Those with an Idempotency-Key, a key, … are not: they hardly come again."""

    def __init__(self, server: HttpServer, capacity: int = 1024) -> None:
        self.server = server
        self.capacity = capacity
        self.recent: dict[bytes, Seen] = {}
        self._fields: dict[bytes, Fields] = {}

    def parse(self, text: bytes) -> Seen | None:
        """None: not plain, so that only aiohttp can tell where the request ends."""
        trace = _TRACE_LINE.search(text)
        if trace is not None:
            rest = text[: trace.start()] + text[trace.end() :]
            seen = self.recent.get(rest) or self._parse_keyed(rest)
            if seen is not None and isinstance(seen.asks, Head):
                return seen._replace(asks=with_trace(seen.asks, trace[1]), common=False)
        return self._parse_keyed(text)

    def _parse_keyed(self, text: bytes) -> Seen | None:
        line = _KEY_LINE.search(text)
        if line is not None:
            # Of requests with keys of their own all else is the same.
            rest = text[: line.start()] + text[line.end() :]
            seen = self.recent.get(rest) or self._remembered(rest)
            if seen is not None and isinstance(seen.asks, Head) and seen.asks.extras is None:
                key = line[1]
                if len(key) <= self.server.config.max_key_bytes and key not in (b".", b".."):
                    return seen._replace(asks=with_key(seen.asks, key), common=False)
        return self._remembered(text)

    def _remembered(self, text: bytes) -> Seen | None:
        seen = self._parse(text)
        # Who asks for a token remembers nothing for those who have none.
        if seen is not None and seen.common and (seen.asks is not None or self.server.door is None):
            if len(self.recent) >= self.capacity:
                self.recent.clear()
            self.recent[text] = seen
        return seen

    def _parse(self, text: bytes) -> Seen | None:
        line = _TARGET.match(text)
        if line is None or len(text) > _MAX_HEAD:
            return None
        lines = text[line.end() :]
        fields = self._fields.get(lines) or self._parse_fields(lines)
        if fields is None:
            return None
        publish = _PUBLISH.fullmatch(line[2]) if line[1] == b"POST" else None
        if publish is not None:
            head = self._publish(publish, fields)
            common = head is None or (head.idempotency_key is None and head.extras is None)
            return Seen(fields.body_bytes or 0, head, common)
        known = self._known(line, fields)
        common = known is None or (fields.common and _OWN_PATH.isdisjoint(known.path))
        return Seen(fields.body_bytes or 0, known, common)

    def _parse_fields(self, text: bytes) -> Fields | None:
        headers: list[tuple[bytes, bytes]] = []
        names: set[bytes] = set()
        at = 0
        length: int | None = None
        common = True
        while at < len(text) - 2:
            header = _HEADER.match(text, at)
            if header is None:
                return None
            name, value = header[1].lower(), header[2].rstrip()
            common = common and name not in _OWN
            if name in _AIOHTTP_ONLY or name in names or (name == b"connection" and value.lower() != b"keep-alive"):
                return None
            if name == b"content-length":
                if not _DIGITS.fullmatch(value):
                    return None
                length = int(value)
            elif name == b"host" and not self.server.hosts.allows(value.decode("latin-1")):
                return None
            names.add(name)
            headers.append((header[1], value))
            at = header.end()
        if b"host" not in names or len(names) > _MAX_LINES:
            return None
        try:
            options = parse_headers(self.server.config, headers)
        except HadelayError:
            options = None  # the route says the same again, with all that belongs to an answer
        authorization = tuple(value.decode("latin-1") for name, value in headers if name.lower() == b"authorization")
        fields = Fields(length, options, tuple(headers), common, authorization)
        if common:
            if len(self._fields) >= self.capacity:
                self._fields.clear()
            self._fields[text] = fields
        return fields

    def _known(self, line: re.Match[bytes], fields: Fields) -> Known | None:
        target = line[2].decode()
        path, _, query = target.partition("?")
        try:
            route, found = self.server.route(line[1].decode(), path)
            if not route.short or (fields.body_bytes is None and route.body is not None):
                return None
            check_headers(fields.lines, route.headers)
            decoded = decode_query(parse_query(query), route.query)
            access = self.server.admit(route, found, fields.authorization)
        except HadelayError:
            return None
        return Known(route, found, decoded, RequestHead(line[1].decode(), target, fields.lines), access)

    def _publish(self, target: re.Match[bytes], fields: Fields) -> Head | None:
        config, length = self.server.config, fields.body_bytes
        if fields.options is None or length is None or length > config.max_body_bytes:
            return None
        query, topic = (target[2] or b"").decode("latin-1"), target[1].decode()
        try:
            if self.server.door is not None:
                self.server.door.admit(fields.authorization).need("publish", topic)
            return with_line(config, self.server.max_delay_ms, topic, query, fields.options)
        except HadelayError:
            return None


class Connection(RequestHandler):
    """See the module. `_missing`: bytes until aiohttp's parser is between requests again; −1: nobody knows, ever again.
    `_busy`: bytes that arrive are held until it is over."""

    __slots__ = ("_busy", "_held", "_key", "_lost", "_missing", "_server", "_stalled", "_task", "_topic")

    def __init__(
        self,
        manager: Any,
        server: HttpServer,
        lost: Callable[[], None],
        *,
        loop: asyncio.AbstractEventLoop,
        **kwargs: Any,
    ) -> None:
        super().__init__(manager, loop=loop, **kwargs)
        self._server = server
        #: To be called when the connection is.
        self._lost = lost
        self._missing = 0
        #: A request is under way on the short way; `_task`: in a task.
        self._busy = False
        self._task: asyncio.Task[None] | None = None
        self._topic = ""
        self._key: bytes | None = None
        self._held = b""
        self._stalled: asyncio.TimerHandle | None = None

    # ---- the short way

    def data_received(self, data: bytes) -> None:
        if self._busy:
            self._hold(data)
            return
        waiter = self._waiter
        if self._missing or not data or waiter is None or waiter.done() or self._messages or self._paused:
            if waiter is None and self._is_about_to_wait() and data:
                self._busy = True
                self._hold(data)
                self._loop.call_soon(self._go_on)
            else:
                self._to_aiohttp(data)
            return
        end = data.find(b"\r\n\r\n") + 4
        text = data[:end]
        heads, door = self._server.heads, self._server.door
        if door is not None:
            door.look()
        seen = heads.recent.get(text) or (heads.parse(text) if end > 3 else None)
        if seen is None:
            self._missing = -1
            super().data_received(data)
            return
        body_bytes, asks, _ = seen
        after = end + body_bytes
        if asks is None or len(data) < after or not self._server.accepting:
            self._missing = max(after, len(data)) - len(data) if len(data) <= after else -1
            super().data_received(data)
            return
        body = data[end:after]
        self._busy = self._request_in_progress = True
        if isinstance(asks, Known):
            self._task = self._loop.create_task(self._run(asks, body))
        if len(data) > after:
            self._hold(data[after:])
        if isinstance(asks, Head):
            self._publish(asks, body)

    def _publish(self, head: Head, body: bytes) -> None:
        self._topic, self._key = head.topic, head.key
        try:
            self._server.service.publish([head.draft(body)], head.idempotency_key, self._published)
        except Exception as error:
            log.exception("publish_failed")
            self._refuse(problems.unexpected(error, "POST"))

    def _is_about_to_wait(self) -> bool:
        """aiohttp's handler has not begun yet, or has just answered: what a client sends with its connect, or at once
        after an answer, is here before the handler waits for it."""
        return not (self._missing or self._request_in_progress or self._messages or self._paused)

    def _to_aiohttp(self, data: bytes) -> None:
        if self._missing > 0:
            missing = self._missing - len(data)
            self._missing = missing if missing >= 0 else -1
        elif data:
            # Fed while aiohttp is busy: where these bytes end is its secret.
            self._missing = -1
        super().data_received(data)

    def _published(self, answer: Receipts | None, error: HadelayError | None) -> None:
        if error is None:
            assert answer is not None
            try:
                status, message_id, document = receipts.one(self._topic, self._key, answer)
            except HadelayError as refusal:
                error = refusal
            else:
                lines = b"Content-Type: application/json\r\nLocation: /v1/messages/%b\r\n" % message_id.encode()
                self._write("publish", status, lines, document)
                return
        assert error is not None
        self._refuse(error)

    def _refuse(self, error: HadelayError) -> None:
        answer = self._server.refused("publish", error)
        self._write("publish", answer.status, header_lines(answer.headers), answer.body)

    async def _run(self, known: Known, body: bytes) -> None:
        server, route = self._server, known.route
        try:
            answer = await server.run(
                Call(server, known.head, route, known.path, known.query, data=body, access=known.access)
            )
            assert isinstance(answer, Answer)
        except HadelayError as error:
            answer = server.refused(route.name, error)
        except Exception as error:
            server.log_failure(known.head.raw_path, error)
            answer = server.refused(route.name, problems.unexpected(error, known.head.method))
        lines = header_lines(answer.headers)
        if server.draining:
            self._held = b""
            lines += b"Connection: close\r\n"
        self._task = None
        self._write(route.name, answer.status, lines, answer.body)
        if server.draining:
            self.force_close()

    def _end(self) -> None:
        self._request_in_progress = False
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)

    def _write(self, route: str, status: int, lines: bytes, body: bytes) -> None:
        self._server.count(route, status)
        self._end()
        transport = self.transport
        if transport is None:
            return
        head = self._server.head_of(status, lines, len(body))
        if len(body) <= _JOIN_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._held:
            # Not at once: an answer may come from within data_received, and this must not nest.
            self._loop.call_soon(self._go_on)
        else:
            self._busy = False

    def _hold(self, data: bytes) -> None:
        self._held += data
        # What runs in a task ends when its client hangs up, which is only seen by reading on.
        if self._task is None or len(self._held) > _MAX_HELD:
            self._pause_transport_reading()

    def _go_on(self) -> None:
        held, self._held, self._busy = self._held, b"", False
        if self.transport is not None:
            self._resume_transport_reading()
            if self._waiter is None:
                self._to_aiohttp(held)
            else:
                self.data_received(held)

    # ---- what aiohttp leaves to its user

    def _process_keepalive(self) -> None:
        if self._busy:
            self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        super()._process_keepalive()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._loop.call_later(self._server.config.io_timeout_ms / 1000, self._drop_slow_reader)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._held = b""
        if self._task is not None:  # it hung up
            self._task.cancel()
            self._task = None
            self._end()
        self._lost()
        super().connection_lost(exc)

    def _drop_slow_reader(self) -> None:
        self._stalled = None
        if self.transport is not None:
            if count := self._server.log_limit.count("slow_reader_dropped"):
                log.info("slow_reader_dropped", extra={"peer": str(self.peername), "count": count})
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is not even HTTP, and what our own code did not expect."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer broke off") from exc
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            error: HadelayError = BadRequest(" ".join((message or "not HTTP").split())[:200])
        else:
            self._server.log_failure(request.path, exc)
            error = problems.unexpected(exc, request.method)
        response = problems.response(error)
        self._server.add_headers(response.headers)
        response.force_close()
        return response
