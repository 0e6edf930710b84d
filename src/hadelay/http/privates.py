"""The private names of aiohttp that we use, all of them: another version may lack one, so pyproject.toml pins aiohttp.

tests/repository/test_layers.py looks whether the installed version has each.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler


class Server(web.Server):
    """aiohttp's low-level server. `options`: arguments to create the protocol of a connection, which is a class of our
    own."""

    def __init__(self, handler: Callable[[web.BaseRequest], Any], **options: Any) -> None:
        super().__init__(handler, handler_cancellation=True, **options)

    @property
    def options(self) -> dict[str, Any]:
        return {"loop": self._loop, **self._kwargs}


class Protocol(RequestHandler):
    """Protocol of one connection, with names for the states of aiohttp's handler."""

    __slots__ = ("loop",)

    def __init__(self, manager: Server, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(manager, loop=loop, **options)
        self.loop = loop

    pause_transport = RequestHandler._pause_transport_reading
    resume_transport = RequestHandler._resume_transport_reading

    def is_waiting(self) -> bool:
        """Whether the handler waits for a request, and the parser is between two requests, as far as aiohttp knows."""
        waiter = self._waiter
        return waiter is not None and not waiter.done() and not self._messages and not self._paused

    def is_about_to_wait(self) -> bool:
        """Whether the handler has not begun yet, or has just answered. Bytes that a client sends right after
        connecting, or right after an answer, arrive before the handler waits for them."""
        return self._waiter is None and not (self._request_in_progress or self._messages or self._paused)

    def has_begun(self) -> bool:
        return self._waiter is not None

    def begin_request(self) -> None:
        """Mark a request as under way; it is answered without aiohttp's handler."""
        self._request_in_progress = True

    def end_request(self) -> None:
        self._next_keepalive_close_time = self.loop.time() + self._keepalive_timeout
        self._request_in_progress = False
        if self._handler_waiter is not None and not self._handler_waiter.done():
            self._handler_waiter.set_result(None)

    def is_busy(self) -> bool:
        """Whether the connection is busy; a busy connection is not closed for being idle."""
        return False

    def _process_keepalive(self) -> None:
        if self.is_busy():
            self._next_keepalive_close_time = self.loop.time() + self._keepalive_timeout
        super()._process_keepalive()
