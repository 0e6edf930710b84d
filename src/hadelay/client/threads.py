"""Threads that run the handlers of a blocking `work`.

They are daemons: a handler that does not end must not keep the process alive once its message went back.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class HandlerThreads:
    """Threads for blocking calls. A call that finds no idle thread starts one. All methods must be called on one event
    loop."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started = self._idle = 0

    async def run(self, function: Callable[[T], object], argument: T) -> None:
        """Call the function in a thread; raises what the function raises."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def ended(error: BaseException | None) -> None:
            self._idle += 1
            if done.done():
                return  # the caller was cancelled, so nobody waits for the result
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def call() -> None:
            error: BaseException | None = None
            try:
                function(argument)
            except BaseException as failure:
                error = failure
            # Replace these exceptions: a future refuses a StopIteration, and a SystemExit would stop the event loop.
            if isinstance(error, StopIteration) or not isinstance(error, Exception | None):
                cause, error = error, RuntimeError(f"the handler raised {error!r} in its thread")
                error.__cause__ = cause
            with contextlib.suppress(RuntimeError):  # the loop may be closed, when the interpreter ends
                loop.call_soon_threadsafe(ended, error)

        if self._idle:
            self._idle -= 1
        else:
            self._started += 1
            threading.Thread(target=self._serve, daemon=True, name=f"hadelay-handler-{self._started}").start()
        self._calls.put(call)
        await done

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def close(self) -> None:
        """End the threads, each after its present call."""
        for _ in range(self._started):
            self._calls.put(None)
