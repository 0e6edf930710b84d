"""Stores the texts of `current().progress` with the message, by extending its lease."""

import asyncio
import contextlib
import logging

from hadelay.client import AsyncMessage
from hadelay.errors import HadelayError

log = logging.getLogger(__name__)

#: Minimum interval between two extends of one attempt, in seconds: each extend is an entry in the cluster's Raft log.
_INTERVAL_S = 1.0


class Progress:
    """Sends the newest progress text of one attempt. Create it on the worker's event loop; any thread may call it."""

    def __init__(self, message: AsyncMessage, lease_s: float) -> None:
        """lease_s: length of the consumer's leases, so that an extend never shortens the lease."""
        self._message, self._lease_s = message, lease_s
        self._loop = asyncio.get_running_loop()
        self._text = ""
        self._sending: asyncio.Task[None] | None = None
        self._ended = False

    def __call__(self, text: str) -> None:
        with contextlib.suppress(RuntimeError):  # the worker's event loop has ended before this thread
            self._loop.call_soon_threadsafe(self._take, text)

    def _take(self, text: str) -> None:
        self._text = text
        if not self._ended and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while text := self._text:
            self._text = ""
            try:
                await self._message.extend(self._lease_s, progress=text)
            except HadelayError as error:
                log.warning("the progress of message %s was not stored: %s", self._message.id, error)
            await asyncio.sleep(_INTERVAL_S)

    def end(self) -> None:
        """Send no further text, because the attempt is over."""
        self._ended = True
        if self._sending is not None:
            self._sending.cancel()
