"""Servers for tests of the client: in the event loop of a test, and in a thread of their own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from tests.http.conftest import MAX_DELAY_MS, lost, make_node, node, roomy, shards
from tests.http.served import serve

__all__ = ["lost", "make_node", "node", "roomy", "shards"]


@pytest.fixture
def url() -> Iterator[str]:
    """A server in a thread of its own, since these tests block."""
    loop, http = asyncio.new_event_loop(), HttpConfig(listen="127.0.0.1:0")
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    # By a host name, as users have it: an address would hide whatever is wrong with looking names up.
    service = asyncio.run_coroutine_threadsafe(serve(http, roomy=True), loop).result(10)
    server = HttpServer(service, http, MAX_DELAY_MS)
    yield asyncio.run_coroutine_threadsafe(server.start(), loop).result(10).replace("127.0.0.1", "localhost")
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
    loop.call_soon_threadsafe(service.close)
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
