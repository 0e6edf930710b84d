"""The event loop on which blocking clients run their requests: one thread for all clients of a process. A forked child
starts a new thread.

A client without `close` is closed when nothing refers to it any more, or when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Coroutine, Iterable
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar

from hadelay.client.aio import AsyncClient

R = TypeVar("R")

_THREAD = "hadelay-client"
#: Reentrant lock: garbage collection in the thread that holds the lock may close an iteration, which takes the lock.
lock = threading.RLock()
_background: asyncio.AbstractEventLoop | None = None
#: Tasks that have not ended. An event loop has only weak references to its tasks, so they could be garbage-collected.
_under_way: set[asyncio.Task[Any]] = set()
#: Clients of this process that may have open connections.
used: set[AsyncClient] = set()
#: Limit, in seconds, of the time in which consumers give back messages when the interpreter ends.
_CLOSE_S = 2.0


def loop() -> asyncio.AbstractEventLoop:
    """The running event loop; the first call starts the loop's thread."""
    global _background
    with lock:
        if _background is None:
            fresh = asyncio.new_event_loop()
            try:
                threading.Thread(target=fresh.run_forever, daemon=True, name=_THREAD).start()
            except RuntimeError:  # the system refused another thread; a later call tries to start the thread again
                fresh.close()
                raise
            atexit.register(_at_exit)
            _background = fresh
        return _background


class Running(Generic[R]):
    """A coroutine that runs on the event loop while another thread waits for it.

    Ctrl-C may interrupt the thread between any two instructions. So the thread takes no lock that the event loop waits
    for: a `concurrent.futures.Future` has one, and a Ctrl-C inside it stops the event loop for good.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, R]) -> None:
        self._coroutine = coroutine
        self._task: asyncio.Task[R] | None = None
        self._ended = threading.Lock()
        self._ended.acquire()
        loop().call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._end)
        _under_way.add(self._task)

    def _end(self, task: asyncio.Task[R]) -> None:
        _under_way.discard(task)
        if not task.cancelled():
            task.exception()  # read the exception: after an interrupted wait nobody else does, and asyncio would log it
        self._ended.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the coroutine has ended, at most `timeout` seconds; returns whether it has ended."""
        if self._task is None or not self._task.done():
            self._ended.acquire(timeout=-1 if timeout is None else timeout)
        return self._task is not None and self._task.done()

    def result(self) -> R:
        """Wait until the coroutine has ended; returns its result. Raises the coroutine's exception, and CancelledError
        if it was cancelled."""
        self.wait()
        assert self._task is not None, "it has ended"
        if self._task.cancelled():
            # the class of concurrent.futures: asyncio's CancelledError would mean that the caller's task was cancelled
            raise CancelledError
        return self._task.result()

    def cancel(self) -> None:
        """Cancel the coroutine; does not wait for its end."""
        loop().call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def wait_for_all(running: Iterable[Running[Any]], seconds: float) -> None:
    """Wait until all of these coroutines have ended, at most `seconds` in all."""
    end = time.monotonic() + seconds
    for one in running:
        one.wait(max(0.0, end - time.monotonic()))


async def _leave(client: AsyncClient) -> None:
    try:
        await asyncio.wait_for(client.close(), _CLOSE_S)
    finally:
        await client._transport.close()


def _at_exit() -> None:
    clients = list(used)
    used.clear()  # clear before the wait: if Ctrl-C ends the wait, no later clean-up waits for these clients

    async def leave() -> None:
        await asyncio.gather(*map(_leave, clients), return_exceptions=True)

    if _background is not None:
        Running(leave()).result()


def dropped(client: AsyncClient) -> None:
    """Close the AsyncClient of a garbage-collected Client. Must not wait: any thread, with any lock, may run this."""
    if client in used and _background is not None:
        used.discard(client)
        Running(_leave(client))


def _in_child() -> None:
    """Reset the module in a forked child: the event loop's thread is gone, and the connections belong to the parent."""
    global lock, _background
    lock, _background = threading.RLock(), None
    for client in used:
        client._transport.disown()
    used.clear()
    _under_way.clear()


os.register_at_fork(after_in_child=_in_child)


def wait(coroutine: Coroutine[Any, Any, R], _: object = None) -> R:
    """Run a coroutine on the event loop, and block until its result."""
    running = Running(coroutine)
    try:
        return running.result()
    except BaseException:  # Ctrl-C during the wait: cancel the request too
        running.cancel()
        raise


def finish(closing: Coroutine[Any, Any, None], of: AsyncClient) -> None:
    """Close an iterator of the client `of`."""
    if of not in used:
        closing.close()  # the iterator belongs to the parent process, or was closed at the interpreter's end
    elif threading.current_thread().name == _THREAD:
        # The iterator is garbage-collected on the event loop's own thread, which must not wait for itself.
        Running(closing)
    else:
        wait(closing)


async def end(iterator: Any) -> None:
    """Close an asynchronous generator, even if the wait for its next item was cancelled a moment ago."""
    while getattr(iterator, "ag_running", False):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await iterator.aclose()
