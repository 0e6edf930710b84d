"""The supervisor of `hadelay work`, with processes in place of its workers that wait for a signal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hadelay.errors import BadRequest
from hadelay.tasks.channel import Start
from hadelay.tasks.health import Counts, serve
from hadelay.tasks.supervisor import Supervisor, supervise

START = Start("shop:app", 1, 1.0, 30.0)


@pytest.mark.parametrize("stops", [1, 2])
async def test_a_signal_that_comes_while_a_worker_is_created(monkeypatch: pytest.MonkeyPatch, stops: int) -> None:
    supervisor, create = Supervisor(START, processes=stops), asyncio.create_subprocess_exec

    async def creating(*_: str, **options: Any) -> asyncio.subprocess.Process:
        process = await create("sleep", "60", **options)
        supervisor.stop()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", creating)
    assert await asyncio.wait_for(supervisor.run(), 20) == 0


@pytest.mark.parametrize("head", [b"nonsense\r\n\r\n", b"GET\r\n\r\n", b"\r\n\r\n"])
async def test_connections_that_speak_no_http_are_closed(head: bytes) -> None:
    server = await serve("127.0.0.1:0", Counts(), 1)
    host, port = server.sockets[0].getsockname()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    server.close()


@pytest.mark.parametrize("health", ["127.0.0.1:99999", "65536", "127.0.0.1", "nowhere:"])
def test_an_address_that_cannot_be_served(health: str) -> None:
    with pytest.raises(BadRequest, match=r"--health .*: expected HOST:PORT"):
        supervise("shop:app", health=health)
