"""One client's connection: aiohttp's protocol, with a fast path for the most frequent requests.

aiohttp's parsed head, two tasks, request and response objects cost four times as much as the rest of a publish. So a
request that arrives whole is read here, and `RequestHeads` finds its head among recent ones. A publish's body becomes a
draft, and the commit's callback writes the answer: no task, no future, no header map. Handlers of routes declared
`short` (batches, receive, ack, one message) run in a task with the parsed head and the body.

Only plain heads take the fast path (a Host, no name twice, nothing that changes the framing); aiohttp reads all others.
The two paths never overlap: the fast path is open only while aiohttp's parser is between two requests and its handler
waits. Bytes that arrive during a request are buffered until it is answered, so the answers of pipelined requests
keep the order.
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web

from hadelay.api.service import Receipts
from hadelay.errors import BadRequest, HadelayError, Overloaded
from hadelay.http import receipts
from hadelay.http.answers import JSON_LINES, JSON_TYPE, Answer, header_lines, refusal
from hadelay.http.call import Call, Context
from hadelay.http.forwarding.exchange import WholeAnswer
from hadelay.http.forwarding.forwarder import Forwarding
from hadelay.http.options import DraftTemplate
from hadelay.http.privates import Protocol, Server
from hadelay.http.requestheads import RequestHeads, ShortRequest
from hadelay.http.sharding import Forwarded

log = logging.getLogger(__name__)

#: Size limit, in bytes, of a response body that is joined with its head into one write; larger ones are not copied.
_JOIN_BYTES = 64 << 10
#: Limit of bytes of later requests that are read while a request is being answered; beyond it, reading pauses.
_MAX_BUFFERED = 64 << 10
_LATE = "this node stood still, and read the request too late: nothing happened. Send it again"


class Connection(Protocol):
    """Protocol of one client connection. lost, limit: see HttpListener."""

    __slots__ = (
        "_buffered",
        "_busy",
        "_context",
        "_heads",
        "_lost",
        "_missing",
        "_stalled",
        "_task",
        "_template",
        "limit",
    )  # fmt: skip

    def __init__(
        self, server: Server, context: Context, heads: RequestHeads, lost: Callable[[], None], limit: str
    ) -> None:
        super().__init__(server, **server.options)
        self.limit = limit
        self._context, self._heads, self._lost = context, heads, lost
        #: Bytes still to arrive of a request that aiohttp answers; −1: unknown, so aiohttp gets all further bytes.
        self._missing = -1 if limit else 0
        #: Whether a request is being answered without aiohttp; bytes that arrive meanwhile are buffered.
        self._busy = False
        #: The request under way, if a disconnect of its client cancels it: the task of its route, or the request
        #: forwarded to another shard.
        self._task: asyncio.Task[None] | Forwarding | None = None
        self._template: DraftTemplate
        self._buffered = b""
        self._stalled: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        if self._context.stalls.is_late(self.transport):
            self._refuse_late()
            return
        if self._busy:
            self._hold(data)
            return
        if self._missing or not data or not self.is_waiting():
            if data and not self._missing and self.is_about_to_wait():
                self._busy = True
                self._hold(data)
                self.loop.call_soon(self._go_on)
            else:
                self._to_aiohttp(data)
            return
        end = data.find(b"\r\n\r\n") + 4
        text = data[:end]
        heads, authenticator, router = self._heads, self._context.authenticator, self._context.router
        if authenticator is not None:
            authenticator.look()
        if router.view.replica.ledger.shards is not router.known:
            router.refresh()
        seen = heads.recent.get(text) or (heads.parse(text) if end > 3 else None)
        if seen is None:
            self._missing = -1
            super().data_received(data)
            return
        body_bytes, asks = seen
        after = end + body_bytes
        if asks is None or len(data) < after or self._context.polls.draining:
            self._missing = max(after, len(data)) - len(data) if len(data) <= after else -1
            super().data_received(data)
            return
        body = data[end:after]
        self._busy = True
        self.begin_request()
        if isinstance(asks, ShortRequest):
            self._task = self.loop.create_task(self._run(asks, body))
        if len(data) > after:
            self._hold(data[after:])
        if isinstance(asks, DraftTemplate):
            self._publish(asks, body)
        elif isinstance(asks, Forwarded):
            self._forward(asks, body)

    def _refuse_late(self) -> None:
        """Refuse bytes that arrived before this process stalled, and close the connection. The refusal is definite,
        unless the bytes continue a request that has begun."""
        transport = self.transport
        if transport is None:
            return
        if self._busy or self._missing or not self.is_waiting():
            transport.abort()
            return
        if count := self._context.log_limit.count("late_requests_refused"):
            log.warning("late_requests_refused", extra={"count": count})
        answer = refusal(Overloaded(_LATE, retry_after_ms=100))
        self._context.count("none", answer.status)
        lines = header_lines({**answer.headers, "Connection": "close"})
        transport.write(self._context.head_of(answer.status, lines, len(answer.body)) + answer.body)
        transport.close()

    def _publish(self, template: DraftTemplate, body: bytes) -> None:
        self._template = template
        try:
            key = template.idempotency_key
            self._context.service.publish([template.with_body(body)], key, self._published, template.by)
        except Exception as error:
            self._answer("publish", self._context.failed("publish", error, "POST"))

    def _forward(self, asks: Forwarded, body: bytes) -> None:
        forwarder = self._context.forwarder

        def done(answer: WholeAnswer | None, error: HadelayError | None) -> None:
            self._task = None
            if answer is None:
                assert error is not None
                self._answer(asks.route, self._context.refused(asks.route, error))
            else:
                head = answer.head + forwarder.direct_line(asks.to) + b"\r\n"
                self._write(asks.route, answer.status, head, answer.body)

        self._task = forwarder.ask(asks.to, asks.head, body, done)

    def _to_aiohttp(self, data: bytes) -> None:
        if self._missing > 0:
            missing = self._missing - len(data)
            self._missing = missing if missing >= 0 else -1
        elif data:
            # aiohttp gets all further bytes: while busy, it does not tell where the requests in `data` end.
            self._missing = -1
        super().data_received(data)

    def _published(self, answer: Receipts | None, error: HadelayError | None) -> None:
        if error is None:
            assert answer is not None
            try:
                status, message_id, document = receipts.one(self._template.draft, answer)
            except HadelayError as refused:
                error = refused
            else:
                lines = b"Content-Type: application/json\r\nLocation: /v1/messages/%b\r\n" % message_id.encode()
                self._write("publish", status, self._context.head_of(status, lines, len(document)), document)
                return
        assert error is not None
        self._answer("publish", self._context.refused("publish", error))

    def _answer(self, route: str, answer: Answer) -> None:
        lines = JSON_LINES if answer.headers is JSON_TYPE else header_lines(answer.headers)
        own = "Hadelay-Node" in answer.headers
        head = self._context.head_of(answer.status, lines, len(answer.body), own=own)
        self._write(route, answer.status, head, answer.body)

    async def _run(self, asks: ShortRequest, body: bytes) -> None:
        context, route = self._context, asks.route
        try:
            answer = await Call(context, asks.head, route, asks.path, asks.query, data=body, access=asks.access).run()
            assert isinstance(answer, Answer)
        except HadelayError as error:
            answer = context.refused(route.name, error)
        except Exception as error:
            answer = context.failed(asks.head.raw_path, error, asks.head.method)
        self._task = None
        draining = context.polls.draining
        if draining:
            self._buffered = b""
            answer = answer._replace(headers={**answer.headers, "Connection": "close"})
        self._answer(route.name, answer)
        if draining:
            self.force_close()

    def _write(self, route: str, status: int, head: bytes, body: bytes) -> None:
        self._context.count(route, status)
        self.end_request()
        transport = self.transport
        if transport is None:
            return
        if len(body) <= _JOIN_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        if self._buffered:
            # Answer buffered requests in the next pass of the event loop: data_received must not nest.
            self.loop.call_soon(self._go_on)
        else:
            self._busy = False

    def _hold(self, data: bytes) -> None:
        self._buffered += data
        # Go on reading while a task runs: a disconnect must cancel the task, and only reading notices a disconnect.
        if self._task is None or len(self._buffered) > _MAX_BUFFERED:
            self.pause_transport()

    def _go_on(self) -> None:
        buffered, self._buffered, self._busy = self._buffered, b"", False
        if self.transport is not None:
            self.resume_transport()
            if not self.has_begun():
                self._to_aiohttp(buffered)
            else:
                self.data_received(buffered)

    def is_busy(self) -> bool:
        return self._busy

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self.loop.call_later(self._context.config.io_timeout_ms / 1000, self._drop_slow_reader)

    def resume_writing(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        self._buffered = b""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self.end_request()
        self._lost()
        super().connection_lost(exc)

    def _drop_slow_reader(self) -> None:
        self._stalled = None
        if self.transport is not None:
            if count := self._context.log_limit.count("slow_reader_dropped"):
                log.info("slow_reader_dropped", extra={"peer": str(self.peername), "count": count})
            self.transport.abort()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer requests that are not HTTP, and unexpected errors."""
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer was sent before this error: close the connection") from exc
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            answer = refusal(BadRequest(" ".join((message or "this is not an HTTP request").split())[:200]))
        else:
            answer = self._context.failed(request.path, exc, request.method)
        response = web.Response(status=answer.status, body=answer.body, headers=answer.headers)
        self._context.add_headers(response.headers)
        response.force_close()
        return response
