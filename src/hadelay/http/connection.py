"""One client's connection: aiohttp's, with a short way for the one request that there is most of.

aiohttp gives every request a parsed head, a task, a request and a response object; that is four times what a publish
costs otherwise. So a publish that arrives whole is taken out of the bytes here: its head is looked up among the heads
of recent requests (producers repeat theirs to the byte), its body becomes a draft, and the answer is written when the
commit calls back. No task, no future, no header map.

Only heads of the plainest form come this way (`_HEAD` is strict: one Content-Length, nothing that changes framing).
Whatever else arrives is fed to aiohttp, which keeps its parser, its limits and its errors. The two never overlap:
the short way is open only while aiohttp's parser is between two requests and its handler waits for the next, and
bytes that arrive while a publish is under way wait until it is answered (so pipelined requests are answered in order).
"""

from __future__ import annotations

import asyncio
import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NamedTuple

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from hadelay.errors import BadRequest, HadelayError
from hadelay.http import problems, receipts
from hadelay.http.options import Head, Options, parse_headers, with_key, with_line
from hadelay.server.api import Receipts

if TYPE_CHECKING:
    from hadelay.http.app import HttpServer

log = logging.getLogger(__name__)

_MAX_HEAD = 8_190
_TARGET = re.compile(rb"(GET|POST|PUT|DELETE) (/[!-~]*) HTTP/1\.1\r\n")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\x80-\xff]*)\r\n")
_PUBLISH = re.compile(rb"/v1/topics/([A-Za-z0-9._-]+)/messages(?:\?(.*))?")
_DIGITS = re.compile(rb"\d{1,15}")
#: The line of a client key that means what it says: printable ASCII, no space.
_KEY_LINE = re.compile(rb"\r\n[Hh]adelay-[Kk]ey: ?([!-~]+)(?=\r\n)")
#: Headers that change how a message is framed, or need an answer of their own.
_AIOHTTP_ONLY = frozenset((b"transfer-encoding", b"expect", b"upgrade", b"content-encoding", b"te", b"trailer"))


class Fields(NamedTuple):
    """The header lines of a request: of many requests the same, whatever their request lines ask."""

    #: None: there is no Content-Length.
    body_bytes: int | None
    #: None: something in them is wrong, or not for a publish.
    options: Options | None


class Seen(NamedTuple):
    """A request head that was parsed: where its request ends and, for a publish, what it asks."""

    body_bytes: int
    #: None: not a publish, or a wrong one; aiohttp and the routes deal with it.
    head: Head | None


class Heads:
    """Recent request heads, byte for byte. Those with an Idempotency-Key, a key, … are not: they hardly come again."""

    def __init__(self, server: HttpServer, capacity: int = 1024) -> None:
        self.server = server
        self.capacity = capacity
        self.recent: dict[bytes, Seen] = {}
        self._fields: dict[bytes, Fields] = {}

    def parse(self, text: bytes) -> Seen | None:
        """None: not plain, so that only aiohttp can tell where the request ends."""
        line = _KEY_LINE.search(text)
        if line is not None:
            # Of requests with keys of their own all else is the same.
            rest = text[: line.start()] + text[line.end() :]
            seen = self.recent.get(rest) or self._remembered(rest)
            if seen is not None and seen.head is not None and seen.head.extras is None:
                key = line[1]
                if len(key) <= self.server.config.max_key_bytes:
                    return seen._replace(head=with_key(seen.head, key))
        return self._remembered(text)

    def _remembered(self, text: bytes) -> Seen | None:
        seen = self._parse(text)
        if seen is not None and (seen.head is None or (seen.head.idempotency_key is None and seen.head.extras is None)):
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
        return Seen(fields.body_bytes or 0, self._publish(line, fields))

    def _parse_fields(self, text: bytes) -> Fields | None:
        headers: list[tuple[bytes, bytes]] = []
        at = 0
        length: int | None = None
        while at < len(text) - 2:
            header = _HEADER.match(text, at)
            if header is None:
                return None
            name, value = header[1].lower(), header[2].rstrip()
            if name in _AIOHTTP_ONLY or (name == b"connection" and value.lower() != b"keep-alive"):
                return None
            if name == b"content-length":
                if length is not None or not _DIGITS.fullmatch(value):
                    return None
                length = int(value)
            headers.append((name, value))
            at = header.end()
        try:
            options = parse_headers(self.server.config, headers)
        except HadelayError:
            options = None  # the route says the same again, with all that belongs to an answer
        fields = Fields(length, options)
        if options is None or (options.idempotency_key is None and "key" not in options.found):
            if len(self._fields) >= self.capacity:
                self._fields.clear()
            self._fields[text] = fields
        return fields

    def _publish(self, line: re.Match[bytes], fields: Fields) -> Head | None:
        target = _PUBLISH.fullmatch(line[2])
        config, length = self.server.config, fields.body_bytes
        if line[1] != b"POST" or target is None or fields.options is None:
            return None
        if length is None or length > config.max_body_bytes:
            return None
        query = (target[2] or b"").decode("latin-1")
        try:
            return with_line(config, self.server.max_delay_ms, target[1].decode(), query, fields.options)
        except HadelayError:
            return None


class Connection(RequestHandler):
    """See the module. `_missing`: bytes until aiohttp's parser is between requests again; −1: nobody knows, ever again.
    `_publishing`: bytes that arrive are held until it is over."""

    __slots__ = ("_held", "_key", "_missing", "_publishing", "_server", "_stalled", "_topic")

    def __init__(self, manager: Any, server: HttpServer, *, loop: asyncio.AbstractEventLoop, **kwargs: Any) -> None:
        super().__init__(manager, loop=loop, **kwargs)
        self._server = server
        self._missing = 0
        self._publishing = False
        self._topic = ""
        self._key: bytes | None = None
        self._held = b""
        self._stalled: asyncio.TimerHandle | None = None

    # ---- the short way

    def data_received(self, data: bytes) -> None:
        if self._publishing:
            self._hold(data)
            return
        waiter = self._waiter
        if self._missing or not data or waiter is None or waiter.done() or self._messages or self._paused:
            if waiter is None and self._is_about_to_wait() and data:
                self._publishing = True
                self._hold(data)
                self._loop.call_soon(self._go_on)
            else:
                self._to_aiohttp(data)
            return
        end = data.find(b"\r\n\r\n") + 4
        text = data[:end]
        heads = self._server.heads
        seen = heads.recent.get(text) or (heads.parse(text) if end > 3 else None)
        if seen is None:
            self._missing = -1
            super().data_received(data)
            return
        body_bytes, head = seen
        after = end + body_bytes
        if head is None or len(data) < after or not self._server.accepting:
            self._missing = max(after, len(data)) - len(data) if len(data) <= after else -1
            super().data_received(data)
            return
        body = data[end:after]
        self._publishing = self._request_in_progress = True
        self._topic, self._key = head.topic, head.key
        if len(data) > after:
            self._hold(data[after:])
        try:
            self._server.service.publish([head.draft(body)], head.idempotency_key, self._published)
        except Exception:
            log.exception("publish_failed")
            self._answer(HadelayError("the node failed; its log says why"))

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
                self._write(self._server.publish_answer(status, message_id, document), status)
                return
        assert error is not None
        self._answer(error)

    def _answer(self, error: HadelayError) -> None:
        document = problems.encode(error)
        self._write(self._server.raw_answer(error.http_status, problems.headers(error), document), error.http_status)

    def _write(self, answer: bytes, status: int) -> None:
        self._server.count("publish", status)
        self._request_in_progress = False
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)
        transport = self.transport
        if transport is None:
            return
        transport.write(answer)
        self._next_keepalive_close_time = self._loop.time() + self._keepalive_timeout
        if self._held:
            # Not at once: an answer may come from within data_received, and this must not nest.
            self._loop.call_soon(self._go_on)
        else:
            self._publishing = False

    def _hold(self, data: bytes) -> None:
        self._held += data
        self._pause_transport_reading()

    def _go_on(self) -> None:
        held, self._held, self._publishing = self._held, b"", False
        if self.transport is not None:
            self._resume_transport_reading()
            if self._waiter is None:
                self._to_aiohttp(held)
            else:
                self.data_received(held)

    # ---- what aiohttp leaves to its user

    def _process_keepalive(self) -> None:
        if self._publishing:
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
        super().connection_lost(exc)

    def _drop_slow_reader(self) -> None:
        self._stalled = None
        if self.transport is not None:
            log.info("slow_reader_dropped", extra={"peer": str(self.peername)})
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
            log.error("request_failed", exc_info=exc, extra={"path": request.path})
            error = HadelayError("the node failed; its log says why")
        response = problems.response(error)
        self._server.add_headers(response.headers)
        response.force_close()
        return response
