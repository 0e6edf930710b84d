"""Parts of the integrations that need no cluster: bindings of Celery, the end of a call of taskiq, ETAs of Dramatiq."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import dramatiq
import pytest

from hadelay import Put
from hadelay.celery.address import Address
from hadelay.celery.bindings import Binding, Bindings
from hadelay.dramatiq.broker import _Consumer
from hadelay.errors import NoLeader
from hadelay.taskiq.broker import HadelayBroker
from hadelay.taskiq.delivery import Delivery


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


def test_bindings_may_be_made_while_those_of_a_queue_are_deleted() -> None:
    bindings = Bindings(Publisher(), Address("", None, "shop.", None))  # type: ignore[arg-type]

    class Looked:
        """A binding; when it is looked at, another thread binds a queue."""

        @property
        def queue(self) -> str:
            bindings._made.add(Binding("reply", "", f"new-{len(bindings._made)}", 1))
            return "other"

    bindings._made.update([Looked(), Looked()])  # type: ignore[list-item]
    bindings.remove("gone")
    assert len(bindings._made) == 4


async def test_a_call_counts_as_running_until_its_ack() -> None:
    """What taskiq keeps of a failed call, in a cycle of references, must not hold its place."""
    ended = list[int]()

    async def ack(*_: object) -> str:
        assert not ended
        return "acked"

    delivery = Delivery(SimpleNamespace(ack=ack, _settled=True), lambda: ended.append(1))  # type: ignore[arg-type]
    await delivery.ack()
    assert ended == [1]
    del delivery
    await asyncio.sleep(0.01)
    assert ended == [1]


@dataclass
class Fetched:
    """A message of Dramatiq's consumer, which notes for how long it goes back."""

    body: bytes
    snoozed: list[float] = field(default_factory=list)

    def snooze(self, delay: float, *, reason: str) -> str:
        self.snoozed.append(delay)
        return "nacked"


@pytest.mark.parametrize(
    ("eta", "snoozed"), [(-1, None), (60, 60), (10_000 * 86_400, 30 * 86_400), (None, None), ("soon", None)]
)
def test_a_message_of_dramatiq_with_an_eta_waits_in_the_cluster(eta: Any, snoozed: float | None) -> None:
    at = round((time.time() + eta) * 1000) if isinstance(eta, int) else eta
    message = Fetched(dramatiq.Message("default", "remind", (4711,), {}, {"eta": at, "retries": 1}).encode())
    client = SimpleNamespace(consume=lambda *_, **__: SimpleNamespace(next=lambda timeout: message))
    found = next(_Consumer(client, "t", 1, 1.0, 30))  # type: ignore[arg-type]
    if snoozed is None:
        assert found is not None
        assert (found.options, message.snoozed) == ({"retries": 1}, [])
    else:
        assert found is None
        assert message.snoozed == [pytest.approx(snoozed, abs=5)]


@pytest.mark.parametrize("options", [{"eta": 4_000_000_000_000}, None, "nonsense"])
def test_a_message_of_dramatiq_that_cannot_be_given_back_leaves_its_consumer_alone(options: Any) -> None:
    """An error would end the consumer, which extends the leases of the other messages of its queue."""

    def unreachable(*_: object, **__: object) -> str:
        raise NoLeader("no leader")

    body = dramatiq.Message("default", "remind", (4711,), {}, options).encode() if options != "nonsense" else b"[]"
    message = SimpleNamespace(id="0", body=body, snooze=unreachable, nack=unreachable)
    client = SimpleNamespace(consume=lambda *_, **__: SimpleNamespace(next=lambda timeout: message))
    assert next(_Consumer(client, "t", 1, 1.0, 30)) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body", [b"nonsense", b'{"task_id": "1", "task_name": "gone", "labels": {}, "args": [], "kwargs": {}}']
)
async def test_a_call_of_taskiq_that_cannot_be_given_back_leaves_the_worker_alone(body: bytes) -> None:
    """An error of `listen` ends the worker process, with the calls that run."""

    async def unreachable(**_: object) -> str:
        raise NoLeader("no leader")

    broker = HadelayBroker("http://127.0.0.1:1")
    message = SimpleNamespace(id="0", body=body, nack=unreachable, schedule=None)
    assert await broker._call(message) is None  # type: ignore[arg-type]
    broker.client.close()
