"""Notices requests that lay unread in their sockets while this process stood still (stopped, starved, or swapped out).

Their clients may have asked another node meanwhile, and their Idempotency-Keys may be forgotten by now. So a node
judges such a request by when it arrived, which the kernel knows, and refuses it: nothing of it has happened.
"""

import asyncio
import socket
import time
from typing import Any

#: Interval, in seconds, of the timer that shows that the event loop runs.
_BEAT_S = 0.1
#: Time without a beat, in seconds, after which the process counts as stalled; and age of a request, in seconds, from
#: which it is refused after a stall. Shorter than limits.commit_timeout_ms, for which a node keeps requests that it has
#: read; longer than a busy machine or a slow sync holds the loop.
_STALLED_S = 5.0
#: Time after a stall, in seconds, in which a node may still read requests that arrived before the stall ended: on
#: connections that wait to be accepted, or behind other bytes.
_AFTERWARDS_S = 30.0
#: In struct tcp_info of Linux: offset and size of tcpi_last_data_recv, the ms since the last data arrived.
_LAST_DATA, _SIZE = 52, 4


class Stalls:
    """Notices when the event loop of this process stood still. `start` begins to watch."""

    def __init__(self) -> None:
        self._beat, self._until = time.monotonic(), 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._look()
        self._timer = asyncio.get_running_loop().call_later(_BEAT_S, self.start)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> bool:
        """Whether the event loop stalled lately: until _AFTERWARDS_S seconds after the end of the stall."""
        now = time.monotonic()
        if self._timer is not None and now - self._beat > _STALLED_S:
            self._until = now + _AFTERWARDS_S
        self._beat = now
        return now < self._until

    def is_late(self, transport: Any) -> bool:
        """Whether the bytes that this connection has just read arrived before a stall, so long ago that their sender
        may have given up."""
        return self._look() and _waited_s(transport) > _STALLED_S


def _waited_s(transport: Any) -> float:
    """Time in seconds since the last data arrived at the socket of a transport; 0 if it is unknown."""
    connection = None if transport is None else transport.get_extra_info("socket")
    if connection is None:
        return 0.0
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA + _SIZE)
    except OSError:
        return 0.0
    return int.from_bytes(info[_LAST_DATA:], "little") / 1000
