"""Where work runs: what is brief may run on the loop, but only on a disk that has been quick for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hadelay.platform.runtime import Runtime


async def run(runtime: Runtime, fn: Callable[[], Any], *, brief: bool) -> Any:
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(result: Any, error: BaseException | None) -> None:
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    runtime.in_thread("disk", fn, done, brief=brief)
    return await asyncio.wait_for(future, 10)


async def until_on_loop(runtime: Runtime) -> int:
    """How many brief jobs it takes until one runs on the loop."""
    for count in range(10_000):
        if await run(runtime, threading.get_ident, brief=True) == threading.get_ident():
            return count
    raise AssertionError("never")


async def test_brief_jobs_come_to_the_loop_once_they_are_quick_and_leave_it_when_one_is_not() -> None:
    runtime = Runtime(asyncio.get_running_loop())
    try:
        assert await until_on_loop(runtime) >= 8
        await run(runtime, lambda: time.sleep(0.006), brief=True)
        assert await run(runtime, threading.get_ident, brief=True) != threading.get_ident()
        assert await until_on_loop(runtime) >= 7
        assert await run(runtime, threading.get_ident, brief=False) != threading.get_ident()
    finally:
        runtime.close()


async def test_most_brief_jobs_may_wait_for_something_else_than_the_disk() -> None:
    """The quickest of a few tells what the disk can do: on a busy node each waits for the interpreter too."""
    runtime = Runtime(asyncio.get_running_loop())
    try:
        for number in range(100):
            await run(runtime, (lambda: time.sleep(0.003)) if number % 4 else (lambda: None), brief=True)
            if await run(runtime, threading.get_ident, brief=True) == threading.get_ident():
                break
        else:
            raise AssertionError("never")
    finally:
        runtime.close()


async def test_a_slow_disk_is_never_waited_for_on_the_loop() -> None:
    runtime = Runtime(asyncio.get_running_loop())
    ran: list[int] = []
    try:
        for _ in range(100):
            await run(runtime, lambda: (time.sleep(0.0006), ran.append(threading.get_ident())), brief=True)
        assert threading.get_ident() not in ran
    finally:
        runtime.close()


async def test_jobs_of_a_lane_keep_their_order_wherever_they_run() -> None:
    runtime = Runtime(asyncio.get_running_loop())
    loop, ran, last = asyncio.get_running_loop(), [], asyncio.Event()
    try:
        await until_on_loop(runtime)
        for number in range(20):
            runtime.in_thread("disk", lambda n=number: ran.append(n), lambda *_: None, brief=number % 3 == 0)
        runtime.in_thread("disk", lambda: None, lambda *_: loop.call_soon(last.set), brief=True)
        await asyncio.wait_for(last.wait(), 10)
        assert ran == list(range(20))
    finally:
        runtime.close()


async def test_an_error_on_the_loop_is_answered_like_one_in_the_thread() -> None:
    runtime = Runtime(asyncio.get_running_loop())
    try:
        await until_on_loop(runtime)
        for brief in (True, False):
            with pytest.raises(ZeroDivisionError):
                await run(runtime, lambda: 1 / 0, brief=brief)
    finally:
        runtime.close()
