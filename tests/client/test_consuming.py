"""`consume` and `work`: what they fetch, settle, extend, and give back when they stop."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from hadelay.client import AsyncClient, AsyncMessage, Client, Put, sync
from hadelay.client.consumer import Consumer
from hadelay.client.message import reason_of
from hadelay.errors import BadRequest, Conflict
from tests.http.conftest import Node, until


async def test_consume_acks_and_nacks(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a", body=b"%d" % n) for n in range(30)])
        bodies: list[bytes] = []
        async for message in client.consume("a", concurrency=4):
            bodies.append(message.body)
            try:
                async with message:
                    if message.body == b"7" and message.attempt == 1:
                        raise RuntimeError("once")
            except RuntimeError:
                continue
            if len(bodies) == 31:
                break
    assert sorted(bodies, key=int) == sorted([*(b"%d" % n for n in range(30)), b"7"], key=int)
    assert set(node.service.states) == {"acked"}
    assert max(poll.max for poll in node.service.polls) == 4


def test_the_reason_of_an_exception() -> None:
    assert reason_of(ValueError("no\nsuch card")) == "ValueError: no such card"
    assert reason_of(KeyError()) == "KeyError"
    assert len(reason_of(ValueError("ü" * 200)).encode()) <= 128


async def test_no_more_than_concurrency_are_leased(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 20)
        running = peak = done = 0

        async def handle(message: Any) -> None:
            nonlocal running, peak, done
            running += 1
            peak = max(peak, running)
            await asyncio.sleep(0.005)
            running -= 1
            done += 1

        working = asyncio.create_task(client.work("a", handle, concurrency=3))
        await until(lambda: done == 20)
        await until(lambda: set(node.service.states) == {"acked"})
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert peak == 3


async def test_work_goes_on_after_a_failure(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("a", b"bad")
        await client.put("a", b"good")
        failures: list[str] = []

        async def handle(message: Any) -> None:
            if message.body == b"bad" and message.attempt == 1:
                raise ValueError("bad")

        working = asyncio.create_task(
            client.work("a", handle, on_error=lambda message, error: failures.append(repr(error)))
        )
        await until(lambda: set(node.service.states) == {"acked"})
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert failures == ["ValueError('bad')"]


async def test_a_stop_lets_handlers_finish(node: Node) -> None:
    """Cancelled, `work` fetches no more; what is in hand is finished, under leases that are still extended."""
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 3)
        begun = 0

        async def handle(message: Any) -> None:
            nonlocal begun
            begun += 1
            await asyncio.sleep(0.6)

        working = asyncio.create_task(client.work("a", handle, concurrency=2, lease=0.2))
        await until(lambda: begun == 2)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
    assert begun == 2
    assert sorted((str(m.state), m.attempt) for m in node.service.messages_now) == [
        ("acked", 1), ("acked", 1), ("ready", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("again", [False, True], ids=["after the time for it", "cancelled again"])
async def test_unfinished_messages_go_back(node: Node, again: bool) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("a")
        begun = asyncio.Event()

        async def handle(message: Any) -> None:
            begun.set()
            await asyncio.Event().wait()

        working = asyncio.create_task(client.work("a", handle, drain=60 if again else 0.05))
        await begun.wait()
        working.cancel()
        if again:
            await asyncio.sleep(0)
            working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(working, 10)
    assert node.service.states == ["ready"]
    assert node.service.settled[-1][:3] == ("nack", "the consumer stopped", False)


def test_leased_messages_go_back_when_the_event_loop_ends(url: str) -> None:
    """asyncio.run cancels every task at once: also those that a consumer settles with."""

    async def worker(begun: asyncio.Future[str]) -> None:
        async def handle(message: Any) -> None:
            begun.set_result(message.id)
            await asyncio.Event().wait()

        async with AsyncClient(url) as client:
            await client.put("ends")
            await client.work("ends", handle, drain=60)

    async def main() -> str:
        begun = asyncio.get_running_loop().create_future()
        working.append(asyncio.create_task(worker(begun)))
        return await begun

    working: list[asyncio.Task[None]] = []
    began = time.monotonic()
    message_id = asyncio.run(main())
    assert time.monotonic() - began < 10
    with Client(url) as client:
        assert client.get(message_id).state in ("scheduled", "ready")


class Scripted:
    """A client whose receives are as told, one after the other; then they wait. It notes what is settled."""

    def __init__(self, *receives: Callable[[], Awaitable[list[AsyncMessage]]]) -> None:
        self.receives, self.nacked = iter(receives), asyncio.Event()
        self.settled: list[tuple[list[str], bool]] = []

    async def receive(self, *topics: Any, **options: Any) -> list[AsyncMessage]:
        if (reported := next(self.receives, None)) is not None:
            return await reported()
        if "timeout" not in options:
            await asyncio.Event().wait()
        return []

    async def nack(self, leases: list[str], *, count: bool = True, **options: Any) -> list[str]:
        self.settled.append((leases, count))
        await asyncio.sleep(0)
        self.nacked.set()
        return ["nacked"] * len(leases)


def a_message(lease: str) -> AsyncMessage:
    return msgspec.convert(
        {"id": "0", "lease": lease, "topic": "a", "deliver_at": 0, "late_ms": 0, "attempt": 1, "redelivered": False,
         "lease_until": 0, "lease_left_ms": 30_000, "body": b""}, AsyncMessage, strict=False,
    )  # fmt: skip


async def test_messages_of_the_last_poll_go_back_in_one_request() -> None:
    """A stop cuts off a poll; the same request again shows what that was granted."""

    async def cut_off() -> list[AsyncMessage]:
        await asyncio.Event().wait()
        return []

    async def granted() -> list[AsyncMessage]:
        return [a_message(str(n)) for n in range(100)]

    client = Scripted(cut_off, granted)
    consumer = Consumer(client, "a", client.receive, 30, 100, set())  # type: ignore[arg-type]
    waiting = asyncio.create_task(anext(consumer, None))
    await asyncio.sleep(0.01)
    consumer.stop()
    assert await waiting is None
    await consumer.close()
    assert client.settled == [([str(n) for n in range(100)], False)]


async def test_nothing_goes_back_before_the_end_of_the_last_poll() -> None:
    """Else the last poll might be granted a message that was given back, and the message would go back twice."""
    settled: list[Any] = []

    async def first() -> list[AsyncMessage]:
        return [a_message("in hand"), a_message("fetched")]

    async def cut_off() -> list[AsyncMessage]:
        await asyncio.Event().wait()
        return []

    async def last() -> list[AsyncMessage]:
        for _ in range(20):
            await asyncio.sleep(0)
        settled.extend(client.settled)
        return [a_message("granted")]

    client = Scripted(first, cut_off, last)
    consumer = Consumer(client, "a", client.receive, 30, 100, set())  # type: ignore[arg-type]

    async def handle() -> None:
        async with await anext(consumer):
            await asyncio.Event().wait()

    handling = asyncio.create_task(handle())
    await until(lambda: len(consumer.unsettled) == 2)
    consumer.stop()
    handling.cancel()
    await asyncio.gather(handling, return_exceptions=True)
    await consumer.close()
    assert settled == []
    assert sorted(lease for leases, count in client.settled for lease in leases if not count) == [
        "fetched", "granted", "in hand",
    ]  # fmt: skip


async def test_messages_that_no_handler_began_with_go_back() -> None:
    """A failing on_error ends `work`, also a task that has not had its first turn."""

    async def first() -> list[AsyncMessage]:
        return [a_message("1")]

    async def second() -> list[AsyncMessage]:
        await script.nacked.wait()
        await asyncio.sleep(0)
        return [a_message("2")]

    async def handle(message: Any) -> None:
        if message.lease == "1":
            raise ValueError("bad")
        await asyncio.Event().wait()

    def on_error(message: Any, error: Exception) -> None:
        raise error

    client, script = AsyncClient("http://127.0.0.1:9"), Scripted(first, second)
    client.receive, client.nack = script.receive, script.nack  # type: ignore[method-assign, assignment]
    with pytest.raises(ExceptionGroup):
        await client.work("a", handle, concurrency=2, on_error=on_error, drain=0.05)
    assert script.settled == [(["1"], True), (["2"], False)]


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
def test_a_blocking_consumer_that_is_stopped_gives_back(url: str, stop: type[BaseException]) -> None:
    with Client(url) as client:
        receipt = client.put(stop.__name__)
        message = next(messages := client.consume(stop.__name__))
        with pytest.raises(stop), message:
            raise stop
        messages.close()
        assert client.get(receipt.id).state in ("scheduled", "ready")


def test_a_signal_handler_stops_a_blocking_consumer(url: str) -> None:
    """After the message in hand, and while it waits for one."""
    with Client(url) as client:
        client.put("signals", "one")
        client.put("signals", "two")
        handled = []
        messages = client.consume("signals", concurrency=1)
        before = signal.signal(signal.SIGUSR1, lambda *_: messages.stop())
        try:
            for message in messages:
                with message as m:
                    signal.raise_signal(signal.SIGUSR1)
                    handled.append(m.text())
            idle = client.consume("nobody")
            threading.Timer(0.3, idle.stop).start()
            assert list(idle) == []
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert len(handled) == 1
        assert sorted(m.state for m in client.messages("signals", state="all")) == ["acked", "ready"]


def test_a_stop_while_a_blocking_consumer_begins_is_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler may run between any two steps of the thread that it interrupts."""
    with Client(url) as client:
        messages = client.consume("begins")
        wait = sync.wait

        def interrupted(coroutine: Any) -> Any:
            monkeypatch.setattr(sync, "wait", wait)
            messages.stop()
            return wait(coroutine)

        monkeypatch.setattr(sync, "wait", interrupted)
        threading.Timer(3, lambda: messages.stop()).start()
        began = time.monotonic()
        assert list(messages) == []
        assert time.monotonic() - began < 2


async def test_leases_are_extended_while_work_goes_on(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        receipt = await client.put("a")
        async for message in client.consume("a", lease=0.15):
            async with message:
                await asyncio.sleep(0.5)
                assert (await client.get(receipt.id)).attempt == 1
                assert node.service.states == ["leased"]
            break
    (message_now,) = node.service.messages_now
    assert (str(message_now.state), message_now.attempt) == ("acked", 1)


async def test_a_lease_is_extended_long_before_its_end(node: Node) -> None:
    """An extension that fails leaves time for another one."""
    async with AsyncClient(node.url) as client:
        await client.put("a")
        messages = client.consume("a", lease=1.8)
        async with await anext(messages):
            until_ms = node.service.access.now_ms() + 1_800
            await until(lambda: [one.kind for one in node.service.settled] == ["extend"])
            assert node.service.access.now_ms() < until_ms - 600
        await messages.close()


async def test_leaving_the_loop_gives_the_rest_back(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 10)
        consumer = client.consume("a", concurrency=10)
        async for message in consumer:
            async with message:
                break
        await consumer.close()
        assert node.service.states == ["acked"] + ["ready"] * 9


async def test_closing_the_client_ends_its_consumers(node: Node) -> None:
    client = AsyncClient(node.url)

    async def consume() -> int:
        count = 0
        async for message in client.consume("a", wait=30):
            await message.ack()
            count += 1
        return count

    consuming = asyncio.create_task(consume())
    await client.put("a")
    await until(lambda: set(node.service.states) == {"acked"})
    await until(lambda: node.server.waiting.count == 1)
    await client.close()
    assert await asyncio.wait_for(consuming, 5) == 1
    await until(lambda: node.server.waiting.count == 0)


async def test_a_consumer_that_can_never_work_says_so(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        with pytest.raises(BadRequest):
            async for _ in client.consume("a/b"):
                pass
        with pytest.raises(ValueError, match="concurrency"):
            client.consume("a", concurrency=0)


async def test_acks_leave_together(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 100)
        outcomes = []
        tasks = []
        async for message in client.consume("a", concurrency=100):
            tasks.append(asyncio.create_task(message.ack()))
            if len(tasks) == 100:
                outcomes = await asyncio.gather(*tasks)
                break
    assert outcomes == ["acked"] * 100
    assert node.server.metrics.requests["ack", 200] < 50


@pytest.mark.parametrize("busy", [False, True])
async def test_work_raises_a_refusal_as_it_is(busy: bool) -> None:
    """Not in a group, as a task group would: programs catch the classes of hadelay.errors."""

    async def first() -> list[AsyncMessage]:
        return [a_message("1")]

    async def refused() -> list[AsyncMessage]:
        raise Conflict("the topic has a webhook")

    async def handle(message: Any) -> None:
        await asyncio.Event().wait()

    client, script = AsyncClient("http://127.0.0.1:9"), Scripted(*([first] if busy else []), refused)
    client.receive, client.nack = script.receive, script.nack  # type: ignore[method-assign, assignment]
    with pytest.raises(Conflict, match="webhook"):
        await client.work("a", handle, concurrency=2, drain=0.05)
    assert script.settled == ([(["1"], False)] if busy else [])
