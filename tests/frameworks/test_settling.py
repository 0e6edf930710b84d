"""Parts of the integrations that need no cluster: bindings of Celery."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from hadelay import Put
from hadelay.celery.address import Address
from hadelay.celery.bindings import Binding, Bindings


class Publisher:
    """A client that notes what is published."""

    def __init__(self) -> None:
        self.sent: list[list[Put]] = []

    def _async(self) -> Publisher:
        return self

    async def put_many(self, puts: list[Put]) -> list[Any]:
        self.sent.append(puts)
        return []


async def test_bindings_may_change_while_they_are_refreshed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refresh runs on the event loop of blocking clients, and queues are bound in other threads."""
    monkeypatch.setattr("hadelay.celery.bindings._REFRESH_S", 0.001)
    client = Publisher()
    bindings = Bindings(client, Address("", None, "shop.", None))  # type: ignore[arg-type]
    bindings._made.update(Binding("reply", "", f"queue-{n}", 1) for n in range(3))
    put = bindings._put

    def put_beside_another_thread(binding: Binding) -> Put:
        if len(bindings._made) < 10:
            bindings._made.add(Binding("reply", "", f"new-{len(bindings._made)}", 1))
        return put(binding)

    monkeypatch.setattr(bindings, "_put", put_beside_another_thread)
    refreshing = asyncio.create_task(bindings._refresh())
    async with asyncio.timeout(5):
        while len(client.sent) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert not refreshing.done()
    refreshing.cancel()
