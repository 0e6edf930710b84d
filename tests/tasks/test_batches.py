"""Batches of calls with one more call at the end, against a real node and in the inline mode."""

from __future__ import annotations

import json

import pytest

from hadelay.tasks import App
from hadelay.testing.node import LocalNode

app = App("http://127.0.0.1:1")
called: list[object] = []


@app.task(topic="loads")
def load(row: int) -> None:
    called.append(row)


@app.task(topic="reports")
async def report(number: int) -> None:
    called.append(("report", number))


def test_the_last_call_of_a_batch_is_followed_by_another_call() -> None:
    with LocalNode() as node:
        own = App(node.url)
        own_load, own_report = own.task(load.function), own.task(topic="reports")(report.function)
        with own.batch(on="success").then(own_report.options(meta={"mine": "1"}), 7) as batch:
            batch.put_sync(own_load, 1)
            own_load.options(batch=batch.key).put_sync(2)
        client = node.client
        assert (client.batch(batch.key).state, client.batch(batch.key).joined) == ("sealed", 2)
        for message in client.receive("tasks", max=2):
            message.ack()
        (following,) = client.receive("reports")
        call = json.loads(following.body)
        assert (call["task"], call["args"]) == (own_report.name, {"number": 7})
        assert (following.meta["mine"], following.meta["batch-acked"]) == ("1", "2")
        failed = own.batch().then(own_report, 8)
        with pytest.raises(ZeroDivisionError), failed:
            failed.put_sync(own_load, 1 // 0)
        assert client.batch(failed.key).state in ("cancelled", "done")


async def test_inline_batches_call_at_their_end() -> None:
    called.clear()
    with app.testing(inline=True):
        async with app.batch().then(report, 7) as batch:
            await batch.put(load, 1)
            assert called == [1]
    assert called == [1, ("report", 7)]


def test_misused_batches_of_calls() -> None:
    with pytest.raises(TypeError, match="then"), app.batch():
        pass
    with pytest.raises(TypeError, match="key"):
        app.batch().then(report.options(key="k"), 7)
