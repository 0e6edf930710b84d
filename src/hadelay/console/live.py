"""Streams of server-sent events, one per open page. Pages that show the same thing share one rendering.

A stream sends a frame every other second, and only what changed since its last frame. A browser that does not read is
waited for, and cut off by the node's write timeout; a stream ends with its session, and when the node stops (ADR 231).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import structlog
from aiohttp import web

from hadelay.console.owntime import OwnTime
from hadelay.console.render import SECURITY
from hadelay.console.visit import Visit, count_of
from hadelay.errors import HadelayError, Unauthorized
from hadelay.rules.sharedcount import SharedCount

log = structlog.get_logger("hadelay")

#: Limit of open streams (pages that are kept up to date) of one node.
MOST = 300
#: Interval between two frames (updates of a page) of a stream, in seconds.
TICK_S = 2.0
#: Pause after a rendering, as a multiple of its CPU time: 33 means at most 3 % of a core for all pages together. And
#: limit of the CPU time that counts, in seconds, so that the pause is not too long.
_PAUSE, _MOST_S = 33, 0.5

#: Frame, one update of a page: `html` maps ids of elements to their new HTML; console.js reads the other members.
Frame = dict[str, Any]
Make = Callable[[], Awaitable[Frame]]


class Streams:
    def __init__(self) -> None:
        self._open = SharedCount(MOST, "open pages are updated", "reload this page to see changes")
        self._stopping = asyncio.Event()
        #: Name of the content that streams show → (monotonic time of the latest rendering, frame with the rendering).
        self._frames: dict[str, tuple[float, asyncio.Task[Frame]]] = {}
        #: Monotonic time from which on another frame may be rendered.
        self._free = 0.0

    def stop(self) -> None:
        self._stopping.set()

    async def run(self, visit: Visit, key: str, make: Make, still_in: Callable[[], object]) -> web.StreamResponse:
        """Send frames until the browser disconnects, the session ends or the node stops. key: name of what the page
        shows, shared by all visitors. still_in: raises Unauthorized once the session has ended."""
        with self._open.one_more(visit.access):
            return await self._run(visit, key, make, still_in)

    async def _run(self, visit: Visit, key: str, make: Make, still_in: Callable[[], object]) -> web.StreamResponse:
        response = web.StreamResponse(headers={**SECURITY, "Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        response.content_type = "text/event-stream"
        visit.call.context.add_headers(response.headers)
        try:
            await response.prepare(visit.call.request)
            if visit.call.request.method != "HEAD":
                await self._send(response, visit, key, make, still_in)
            with suppress(ConnectionError):
                await response.write_eof()
        except ConnectionError:
            pass  # the browser closed the connection
        return response

    async def _send(
        self, response: web.StreamResponse, visit: Visit, key: str, make: Make, still_in: Callable[[], object]
    ) -> None:
        # A page that was hidden, or lost its connection, is older than the newest frame, and gets it. A page that was
        # just opened gets only frames that are rendered later.
        sent, since = dict[str, str](), 0.0 if visit.query.get("again") else time.monotonic()
        while not self._stopping.is_set():
            try:
                still_in()
                frame = await self._frame(key, make, since)
            except Unauthorized:
                # The browser connects again, maybe with a newer cookie: other pages may have renewed the session
                # meanwhile.
                await response.write(b"event: later\ndata: The session has ended.\n\n")
                return
            except HadelayError as error:
                frame = {"problem": error.detail}
            html = {name: text for name, text in frame.get("html", {}).items() if sent.get(name) != text}
            sent |= html
            html = {name: visit.under(text) for name, text in html.items()}
            news = {**frame, "html": html, "leader": visit.service.leader_name or ""}
            if (since_ms := visit.service.leader_since_ms) is not None:
                news["since"] = since_ms
            if (report := await visit.site.report(visit)) is not None:
                news["problems"] = count_of(report)
            await response.write(b"event: frame\ndata: " + msgspec.json.encode(news) + b"\n\n")
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._stopping.wait()
        await response.write(b"event: later\ndata: This node is stopping: the page goes on when the node is back.\n\n")

    async def _frame(self, key: str, make: Make, since: float = 0.0) -> Frame:
        """The newest frame for `key`, rendered at most once per TICK_S for all streams together, and more rarely while
        many different pages are open. Empty if the newest frame is older than the monotonic time `since`: a page that
        was just opened shows newer values."""
        now = time.monotonic()
        known = self._frames.get(key)
        if now >= self._free and (known is None or (known[1].done() and now - known[0] >= TICK_S * 0.9)):
            for other in [name for name, (at, task) in self._frames.items() if task.done() and now - at > 30 * TICK_S]:
                del self._frames[other]
            known = self._frames[key] = now, asyncio.create_task(self._made(make))
        return await asyncio.shield(known[1]) if known is not None and known[0] >= since else {}

    async def _made(self, make: Make) -> Frame:
        own = OwnTime()
        try:
            return await own.of(_tried(make))
        finally:
            self._free = max(self._free, time.monotonic()) + _PAUSE * min(_MOST_S, own.spent_s)


async def _tried(make: Make) -> Frame:
    try:
        return await make()
    except HadelayError as error:
        return {"problem": error.detail}
    except Exception as error:
        # The stream has begun, so an error can't be the answer of the request any more.
        log.warning("console_frame_failed", error=repr(error))
        return {"problem": "This node could not read what the page shows; its log says why."}
