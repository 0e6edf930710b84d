"""Large requests take turns on the event loop: each does a slice of its work, then other requests have their turn."""

import asyncio

#: Limit of the work of one slice: bytes read, decoded or written, an item counting as ITEM of them. Some milliseconds.
SLICE = 256 << 10
ITEM = 256


class RequestTurns:
    """Turns of large requests, one object per server: each pass of the event loop has at most one slice of one large
    request."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        #: Number of turns so far, and the largest work of one slice.
        self.given = self.largest = 0

    def count(self, work: int) -> None:
        """Note the work of the slice that was just done."""
        self.largest = max(self.largest, work)

    async def next(self) -> None:
        """Wait until it is this request's turn again."""
        async with self._lock:  # first come, first served
            await asyncio.sleep(0)
        self.given += 1
