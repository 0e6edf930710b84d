"""Batches over HTTP: opened, joined, sealed, cancelled, and listed with their failures."""

from __future__ import annotations

from typing import Any

import pytest

from hadelay.client import AsyncClient
from hadelay.errors import BadRequest, Conflict, NotFound
from tests.http.conftest import Node


@pytest.fixture
async def client(node: Node) -> Any:
    async with AsyncClient(node.url) as made:
        yield made


async def test_a_batch_from_its_opening_to_its_callback(client: AsyncClient) -> None:
    opened = await client.open_batch("done", key="import", on="success", meta={"mine": "1"}, ttl="1h")
    assert (opened.batch, opened.state, opened.joined, opened.topic) == ("import", "open", 0, "done")
    assert (await client.open_batch("done", key="import", on="success", meta={"mine": "1"}, ttl="1h")) == opened
    with pytest.raises(Conflict):
        await client.open_batch("done", key="import")
    one = await client.put("work", b"1", batch="import")
    assert (await client.get(one.id)).batch == "import"
    (message,) = await client.receive("work")
    assert message.batch == "import"
    await client.put("work", b"2", batch=message.batch)  # from inside a member
    await message.ack()
    sealed = await client.seal_batch("import")
    assert (sealed.state, sealed.joined, sealed.pending, sealed.progress) == ("sealed", 2, 1, 0.5)
    assert await client.receive("done") == []
    (message,) = await client.receive("work")
    await message.ack()
    (callback,) = await client.receive("done")
    assert callback.json()["acked"] == 2
    assert (callback.meta["batch"], callback.meta["batch-joined"], callback.meta["mine"]) == ("import", "2", "1")
    done = await client.batch("import")
    assert (done.state, done.callback_id, done.progress) == ("done", callback.id, 1.0)
    with pytest.raises(Conflict, match="sealed"):
        await client.put("work", b"3", batch="import")


async def test_failures_and_pages_of_batches(client: AsyncClient) -> None:
    for key in ("a", "b", "c"):
        await client.open_batch("done", {"go": key}, key=key)
    assert [batch.batch async for batch in client.batches(page=2)] == ["c", "b", "a"]
    receipts = [await client.put("work", b"x", delay="1h", batch="a") for _ in range(3)]
    for receipt in receipts:
        await client.cancel(receipt.id)
    failures = [failure async for failure in client.batch_failures("a", page=2)]
    assert [(failure.id, failure.outcome) for failure in failures] == [(each.id, "cancelled") for each in receipts]
    assert (await client.cancel_batch("a")).state == "done"
    (callback,) = await client.receive("done")
    assert callback.json() == {"go": "a"}


async def test_refused_requests_about_batches(client: AsyncClient) -> None:
    with pytest.raises(NotFound):
        await client.seal_batch("nothing")
    with pytest.raises(NotFound, match="open the batch first"):
        await client.put("work", b"x", batch="nothing")
    for key in ("a b", ".a", "x" * 129):
        with pytest.raises(BadRequest, match="batch"):
            await client.open_batch("done", key=key)
    with pytest.raises(BadRequest, match="ttl"):
        await client.open_batch("done", ttl="400d")
    with pytest.raises(BadRequest, match="subscription"):
        await client.open_batch("done~own")
