"""Measures the CPU time of a coroutine, without that of other tasks that run between the coroutine's steps."""

import time
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class OwnTime:
    """Adds up the CPU time of coroutines that run on the event loop, in seconds."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    async def of(self, made: Awaitable[T]) -> T:
        """Await `made`, and add its CPU time."""
        return await _Timed(self, made)


class _Timed(Generic[T]):
    def __init__(self, clock: OwnTime, made: Awaitable[T]) -> None:
        self._clock, self._made = clock, made

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._made.__await__()
        step: Callable[[], Any] = partial(next, steps)
        while True:
            began = time.thread_time()
            try:
                waits_for = step()
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            finally:
                self._clock.spent_s += time.thread_time() - began
            try:
                yield waits_for
            except BaseException as error:  # pass the error on to the coroutine: a cancellation must reach it
                step = partial(steps.throw, error)
            else:
                step = partial(next, steps)
