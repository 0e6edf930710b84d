"""Large requests take turns on the event loop: each does a slice of its work, and then the others have theirs."""

from __future__ import annotations

import asyncio
from collections import deque

#: Limit of the work of one slice: bytes read, decoded or written, an item counting as ITEM of them. Some milliseconds.
SLICE = 256 << 10
ITEM = 256


class Turns:
    """One per server. However many large requests there are, a pass of the loop has one slice of one of them."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._running = False
        #: Turns so far, and the most work of one slice.
        self.given = self.largest = 0

    def count(self, work: int) -> None:
        """Note the work of the slice that was just done."""
        self.largest = max(self.largest, work)

    async def next(self) -> None:
        """Wait until it is this request's turn again."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if not self._running:
            self._running = True
            loop.call_soon(self._give)
        await turn

    def _give(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # else its request was cancelled
                turn.set_result(None)
                self.given += 1
                break
        self._running = bool(self._waiting)
        if self._running:
            asyncio.get_running_loop().call_soon(self._give)
