"""asyncio on the virtual time of one simulated process: `server.service` runs as it does under a real event loop.

Only what coroutines of a node ask a loop for: futures, tasks, timers, and a name server that knows no name.
"""

import asyncio
import inspect
import socket
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, cast

from chaos.sim.disk import SimCrash
from chaos.sim.runtime import Event, SimRuntime

Reply = Callable[[Any, BaseException | None], None]


class SimLoop:
    """Every callback is an event of the process: a pause holds it back, and a crash loses it."""

    def __init__(self, runtime: SimRuntime) -> None:
        self._runtime, self._disk = runtime, runtime.disk
        #: Coroutines of the tasks that have not ended.
        self._works: set[Coroutine[Any, Any, Any]] = set()

    def run(self, work: Coroutine[Any, Any, Any], done: Reply) -> asyncio.Task[Any]:
        """Start `work`; done(result, error) unless the task is cancelled."""
        self._works.add(work)
        task = self.create_task(work)

        def ended(task: asyncio.Task[Any]) -> None:
            self._works.discard(work)
            if not task.cancelled():
                error = task.exception()
                done(None if error is not None else task.result(), error)

        task.add_done_callback(ended)
        return task

    def close(self) -> None:
        """The process is gone: close the coroutines that never began, or Python warns of each."""
        for work in self._works:
            if inspect.getcoroutinestate(work) == inspect.CORO_CREATED:
                work.close()

    def _run(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None) -> None:
        events._set_running_loop(cast(Any, self))
        try:
            callback(*args) if context is None else context.run(callback, *args)
        finally:
            events._set_running_loop(None)
        if self._disk is not None and self._disk.crashing:
            raise SimCrash("within a task, which keeps what it raised")

    # A part of asyncio.AbstractEventLoop. Callers only cancel handles, so an Event serves as a handle.

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Event:
        return self.call_later(0.0, callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: Context | None = None) -> Event:
        return self._runtime.call_later(delay, self._run, callback, args, context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> Event:
        return self.call_later(when - self.time(), callback, *args, context=context)

    def time(self) -> float:
        return self._runtime.monotonic()

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=cast(Any, self))

    def create_task(self, coro: Any, **more: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=cast(Any, self), **more)

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tasks of processes that ended are dropped while they wait."""

    async def getaddrinfo(self, host: Any, port: Any, **more: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "the simulated world has no names")
