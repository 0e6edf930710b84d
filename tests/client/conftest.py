"""Servers for tests of the client: in the event loop of a test, and in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from tests.http.conftest import MAX_DELAY_MS, make_node, node
from tests.http.memory_service import MemoryService

__all__ = ["make_node", "node"]


@pytest.fixture
def url() -> Iterator[str]:
    """A server in a thread of its own, since these tests block."""
    loop = asyncio.new_event_loop()
    server = HttpServer(MemoryService(), HttpConfig(listen="127.0.0.1:0"), MAX_DELAY_MS)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(_all_hung_up())
    loop.close()


async def _all_hung_up() -> None:
    """Wait until the server has closed the connections that clients opened while the server stopped."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=10)
    for _ in range(20):
        await asyncio.sleep(0)
