"""The event loop on which blocking clients run their requests: one thread for all clients of a process, which a fork
starts again.

A client without `close` is closed when nothing refers to it any more, or when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from hadelay.client.aio import AsyncClient

R = TypeVar("R")

_THREAD = "hadelay-client"
#: Reentrant lock: garbage collection in the thread that holds the lock may close an iteration, which takes the lock.
lock = threading.RLock()
_background: asyncio.AbstractEventLoop | None = None
#: Clients of this process that may have connections.
used: set[AsyncClient] = set()
#: Limit of the time for consumers to give back messages when the interpreter ends, in seconds.
_CLOSE_S = 2.0


def loop() -> asyncio.AbstractEventLoop:
    """The running event loop; the first call starts its thread."""
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
        asyncio.run_coroutine_threadsafe(leave(), _background).result()


def dropped(client: AsyncClient) -> None:
    """Close the AsyncClient of a garbage-collected Client. Must not wait: any thread, with any lock, may run this."""
    if client in used and _background is not None:
        used.discard(client)
        asyncio.run_coroutine_threadsafe(_leave(client), _background)


def _in_child() -> None:
    """Reset the module in a forked child: the event loop's thread is gone, and the connections belong to the parent."""
    global lock, _background
    lock, _background = threading.RLock(), None
    for client in used:
        client._transport.disown()
    used.clear()


os.register_at_fork(after_in_child=_in_child)


def wait(coroutine: Coroutine[Any, Any, R], _: object = None) -> R:
    """Run a coroutine on the event loop, and block until its result."""
    future = asyncio.run_coroutine_threadsafe(coroutine, loop())
    try:
        return future.result()
    except BaseException:  # Ctrl-C during the wait: cancel the request too
        future.cancel()
        raise


def finish(closing: Coroutine[Any, Any, None], of: AsyncClient) -> None:
    """Close an iterator of the client `of`."""
    if of not in used:
        closing.close()  # the iterator belongs to the parent process, or was closed at the interpreter's end
    elif threading.current_thread().name == _THREAD:
        # The iterator is garbage-collected on the event loop's own thread, which must not wait for itself.
        asyncio.run_coroutine_threadsafe(closing, loop())
    else:
        wait(closing)


async def end(iterator: Any) -> None:
    """Close a generator. Works even if the wait for its next item was cancelled a moment ago."""
    while getattr(iterator, "ag_running", False):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    await iterator.aclose()
