"""Consumers that are changed, asked one message at a time, or run handlers in threads; and messages that settle
themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from msgspec import UNSET

from hadelay import AsyncClient, AsyncMessage, Client, Message, Put, Receipt, SyncMessage
from hadelay.client.consumer import Consumer
from hadelay.errors import Forbidden, OutcomeUnknown, TooLarge
from tests.http.conftest import Node


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# ---- one type of message


async def test_a_received_message_settles_itself(node: Node) -> None:
    """As one of a consumer does: it is the same type."""
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 5)
        first, second, third, fourth, fifth = await client.receive("a", max=5)
        assert await first.ack() == "acked"
        assert await second.nack("1s", reason="bank closed") == "nacked"
        assert node.service.settled[-1] == ("nack", "bank closed", True, False)
        assert await third.snooze("1h") == "nacked"
        assert node.service.settled[-1] == ("nack", "", False, False)
        assert await fourth.nack(dead=True, reason="no such customer") == "nacked"
        assert node.service.settled[-1] == ("nack", "no such customer", True, True)
        assert await fifth.extend("1m", progress="page 7") == "extended"
        assert (await client.get(fifth.id)).progress == "page 7"
        with pytest.raises(KeyError):
            async with fifth:
                raise KeyError("x")
        assert node.service.settled[-1].reason == "KeyError: 'x'"


async def test_a_message_settled_by_its_handler_is_left_alone(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("a")
        (message,) = await client.receive("a")

        async def handle() -> None:
            async with message:
                await message.nack(dead=True, reason="hopeless")
                raise ValueError("hopeless")

        with pytest.raises(ValueError, match="hopeless"):
            await handle()
    assert node.service.settled == [("nack", "hopeless", True, True)]


def test_blocking_messages_are_of_one_type_too(url: str) -> None:
    with Client(url) as client:
        client.put("a", {"n": 1})
        client.put("a", {"n": 2})
        (received,) = client.receive("a", max=1)
        consumed = next(consuming := client.consume("a"))
        assert type(received) is type(consumed) is SyncMessage
        assert isinstance(received, Message)
        assert (received.json(), consumed.json(), consumed.lost) == ({"n": 1}, {"n": 2}, False)
        assert (received.ack(), consumed.snooze("1h")) == ("acked", "nacked")
        consuming.close()


async def test_acks_carry_results(node: Node) -> None:
    """Of received messages, of those of a consumer, and in one request; what cannot be sent spoils no other ack."""
    async with AsyncClient(node.url) as client:
        ids = [one.id for one in await client.put_many([Put(topic="a")] * 6) if isinstance(one, Receipt)]
        (first,) = await client.receive("a", max=1)
        assert await first.ack({"paid": 7}) == "acked"
        consumer = client.consume("a")
        some = [await anext(consumer) for _ in range(5)]
        with pytest.raises(ValueError, match="65536"):
            await some[0].ack("x" * 65_535)
        with pytest.raises(TypeError):
            await some[0].ack(object())
        outcomes = await asyncio.gather(some[0].ack(), some[1].ack(None), some[2].ack([2]), some[3].ack("drei"))
        assert outcomes == ["acked"] * 4
        assert await client.ack([some[4]], results=[4.5]) == ["acked"]
        await consumer.close()
        found = [(await client.get(one)).result for one in ids]
        assert found == [{"paid": 7}, UNSET, None, [2], "drei", 4.5]
        with pytest.raises(ValueError, match="one for each"):
            await client.ack(["x"], results=[])


async def test_a_result_that_nodes_refuse_spoils_no_other_ack(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes may refuse what the client takes for sound, such as JSON that is nested too deeply for them."""
    monkeypatch.setattr("hadelay.http.consume.MAX_RESULT", 100)
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 3)
        consumer = client.consume("a")
        one, refused, other = [await anext(consumer) for _ in range(3)]
        outcomes = await asyncio.gather(one.ack(1), refused.ack("x" * 200), other.ack(3), return_exceptions=True)
        assert (outcomes[0], type(outcomes[1]), outcomes[2]) == ("acked", TooLarge, "acked")
        assert [(await client.get(given.id)).result for given in (one, other)] == [1, 3]
        assert (await client.get(refused.id)).state == "leased"
        assert await consumer.close() is None


async def test_many_large_results_go_in_several_requests(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 40)
        messages = await client.receive("a", max=40)
        outcomes = await client.ack(messages, results=["x" * 60_000] * 40)
    assert outcomes == ["acked"] * 40


def test_a_caller_waits_for_the_result(url: str) -> None:
    with Client(url) as client:
        receipt = client.put("a")
        with pytest.raises(TimeoutError, match="ready"):
            client.wait_for(receipt.id, timeout=0.05)
        (message,) = client.receive("a")
        threading.Timer(0.1, lambda: message.ack({"paid": 7})).start()
        done = client.wait_for(receipt.id, timeout=20)
        assert (done.state, done.result) == ("acked", {"paid": 7})


# ---- a consumer that is changed


async def test_next_waits_as_long_as_asked(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        consumer = client.consume("a")
        assert await consumer.next(0.05) is None
        assert not consumer.stopped
        await client.put("a", b"x")
        message = await consumer.next(20)
        assert message is not None
        assert message.body == b"x"
        consumer.stop()
        assert consumer.stopped
        assert await consumer.next() is None
        await message.ack()
        await consumer.close()
    assert node.service.states == ["acked"]


async def test_a_timeout_of_next_loses_no_message(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 200)
        consumer, seen = client.consume("a", concurrency=7), set[str]()
        async with asyncio.timeout(30):
            while len(seen) < 200:
                if (message := await consumer.next(0)) is not None:
                    seen.add(message.id)
                    await message.ack()
                else:
                    await asyncio.sleep(0)
        await consumer.close()
    assert node.service.states == ["acked"] * 200


async def test_concurrency_is_raised_and_lowered(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 6)
        consumer = client.consume("a", concurrency=1)
        taken = [await anext(consumer)]
        assert await consumer.next(0.05) is None
        consumer.concurrency = 4
        taken += [await anext(consumer) for _ in range(3)]
        assert len(consumer.unsettled) == 4
        consumer.concurrency = 2
        for message in taken[:2]:
            await message.ack()
        assert await consumer.next(0.05) is None
        await taken[2].ack()
        await anext(consumer)
        assert len(consumer.unsettled) == 2
        with pytest.raises(ValueError, match="concurrency"):
            consumer.concurrency = 0
        await consumer.close()


async def test_the_order_of_topics_is_asked_for(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("a")
        consumer = client.consume(["b", "a"], order="listed")
        await (await anext(consumer)).ack()
        await consumer.close()
        assert all(poll.listed for poll in node.service.polls)
        await client.receive(["b", "a"])
        assert not node.service.polls[-1].listed
        assert [topic.topic for topic in await client.topics(prefix="a")] == ["a"]
        assert await client.topics(prefix="b") == []


async def test_topics_are_added_and_removed(node: Node) -> None:
    """While a poll waits: it is asked anew."""
    async with AsyncClient(node.url) as client:
        consumer = client.consume("a", wait=30)
        assert await consumer.next(0.05) is None
        await client.put("b", b"b")
        consumer.topics = ["a", "b"]
        message = await consumer.next(5)
        assert message is not None
        assert (message.topic, consumer.topics) == ("b", ["a", "b"])
        await message.ack()
        consumer.topics = []
        await client.put("b", b"later")
        assert await consumer.next(0.05) is None
        consumer.topics = "b"
        message = await consumer.next(5)
        assert message is not None
        await message.ack()
        await consumer.close()
        assert not client._consumers
    assert node.service.states == ["acked"] * 2


@pytest.mark.parametrize("kept", [True, False])
async def test_a_granted_message_is_not_forgotten_when_topics_change(node: Node, kept: bool) -> None:
    """The poll that was cut off may have been granted a message: it comes all the same, or goes back uncounted."""
    async with AsyncClient(node.url) as client:
        receive, cut = client.receive, asyncio.Event()

        async def late(*topics: object, **options: object) -> list[AsyncMessage]:
            messages = await receive(*topics, **options)  # type: ignore[arg-type]
            if not cut.is_set():
                cut.set()
                await asyncio.Event().wait()  # the answer is on its way
            return messages

        client.receive = late  # type: ignore[method-assign, assignment]
        await client.put("a")
        consumer = client.consume("a")
        waiting = asyncio.create_task(consumer.next())
        await cut.wait()
        consumer.topics = ["a", "b"] if kept else "b"
        if kept:
            message = await asyncio.wait_for(waiting, 20)
            assert message is not None
            assert (message.topic, message.attempt) == ("a", 1)
            await message.ack()
        else:
            await until(lambda: node.service.states == ["ready"])
            assert not node.service.settled[-1].count
        await consumer.close()
        await waiting


async def test_work_ends_on_request(node: Node) -> None:
    """Handlers finish; one that takes too long is cancelled, and its message goes back uncounted."""
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a", body=b"quick"), Put(topic="a", body=b"slow")])
        stop, begun = asyncio.Event(), set[bytes]()

        async def handle(message: AsyncMessage) -> None:
            begun.add(message.body)
            if message.body == b"slow":
                await asyncio.Event().wait()
            await stop.wait()
            await asyncio.sleep(0.05)

        working = asyncio.create_task(client.work("a", handle, stop=stop, drain=0.3))
        await until(lambda: len(begun) == 2)
        stop.set()
        await asyncio.wait_for(working, 10)
    assert node.service.states == ["acked", "ready"]
    assert node.service.settled[-1][1:3] == ("the consumer stopped", False)


async def test_a_handler_learns_that_its_lease_is_lost(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("a")
        consumer = client.consume("a", lease=0.06)
        message = await anext(consumer)
        assert not message.lost
        await client.nack(message.lease, delay="1h")
        await until(lambda: message.lost)
        await consumer.close()


async def test_a_consumer_that_was_refused_has_stopped_and_does_not_wait_for_ever(node: Node) -> None:
    """It polls no more, so nothing would come. What was fetched before can still be settled."""
    async with AsyncClient(node.url) as client:
        await client.put("a")
        consumer = client.consume("a")
        message = await consumer.next(10)
        assert message is not None
        node.service.fail = Forbidden("the token is no longer valid")
        consumer.topics = ["a", "b"]
        with pytest.raises(Forbidden):
            await consumer.next(10)
        assert consumer.stopped
        async with asyncio.timeout(5):
            assert await consumer.next() is None
        node.service.fail = None
        assert await message.ack() == "acked"
        await consumer.close()


async def test_messages_that_a_failed_poll_may_have_been_granted_go_back_when_the_consumer_stops() -> None:
    """The pause before the poll is repeated is when most consumers of a failing cluster are stopped."""
    asked: list[dict[str, object]] = []

    async def poll(topics: list[str], **options: object) -> list[AsyncMessage]:
        asked.append(options)
        if len(asked) == 1:
            raise OutcomeUnknown("the connection broke")
        return []

    consumer = Consumer(AsyncClient(), "a", poll, 30.0, 10, set())
    assert await consumer.next(0.05) is None
    await consumer.close()
    first, last = asked
    assert (last["request_id"], last["wait"]) == (first["request_id"], 0)


# ---- handlers in threads


def test_work_in_threads(url: str) -> None:
    """As many at once as the concurrency allows, on threads that are used again; a failure goes to on_error."""
    with Client(url) as client:
        client.put_many([Put(topic="threads", body=b"%d" % n) for n in range(40)])
        lock, running, peak, done = threading.Lock(), 0, 0, list[bytes]()
        names, failures, stop = set[str](), list[str](), threading.Event()

        def handle(message: SyncMessage) -> None:
            nonlocal running, peak
            with lock:
                running += 1
                peak = max(peak, running)
                names.add(threading.current_thread().name)
            time.sleep(0.01)
            with lock:
                running -= 1
            if message.body == b"7" and message.attempt == 1:
                raise ValueError("once")
            if message.body == b"8":
                message.ack()
            done.append(message.body)
            if len(done) == 40:
                stop.set()

        def failed(message: SyncMessage, error: Exception) -> None:
            failures.append(f"{message.text()}: {error}")

        client.work("threads", handle, concurrency=4, on_error=failed, stop=stop)
        assert sorted(done, key=int) == [b"%d" % n for n in range(40)]
        assert (failures, peak) == (["7: once"], 4)
        assert len(names) <= 5  # the message that its handler acks makes room before its thread ends
        assert {m.state for m in client.messages("threads", state="all")} == {"acked"}


def test_a_consumer_of_threads_is_changed_and_stopped(url: str) -> None:
    with Client(url) as client:
        consuming = client.consume("first")
        client.put("second")
        assert consuming.next(0.05) is None
        consuming.topics, consuming.concurrency = ["first", "second"], 3
        assert (consuming.topics, consuming.concurrency, consuming.stopped) == (["first", "second"], 3, False)

        def handle(message: SyncMessage) -> None:
            assert message.topic == "second"
            consuming.stop()

        consuming.work(handle)
        assert consuming.stopped
        assert consuming.next() is None
        assert [m.state for m in client.messages("second", state="all")] == ["acked"]


def test_messages_that_a_thread_does_not_finish_go_back(url: str) -> None:
    """`work` returns without it; the thread goes on, and its late ack changes nothing."""
    with Client(url) as client:
        receipt = client.put("stuck")
        begun, free, stop = threading.Event(), threading.Event(), threading.Event()

        def handle(message: SyncMessage) -> None:
            begun.set()
            free.wait(20)

        threading.Thread(target=lambda: begun.wait(20) and stop.set()).start()
        began = time.monotonic()
        client.work("stuck", handle, stop=stop, drain=0.1)
        assert time.monotonic() - began < 10
        assert client.get(receipt.id).state in ("ready", "scheduled")
        free.set()


@pytest.mark.parametrize("what", ["StopIteration", "SystemExit", "KeyboardInterrupt"])
def test_an_exception_that_python_itself_uses_is_a_failed_attempt_like_any_other(url: str, what: str) -> None:
    """`next` of an empty iterator raises StopIteration, which no future takes."""
    with Client(url) as client:
        receipt, stop, errors = client.put("a"), threading.Event(), list[Exception]()

        def handle(message: SyncMessage) -> None:
            if message.attempt == 1:
                raise {"StopIteration": StopIteration, "SystemExit": SystemExit}.get(what, KeyboardInterrupt)
            stop.set()

        give_up = threading.Timer(10, stop.set)
        give_up.start()
        client.work("a", handle, stop=stop, drain=1, on_error=lambda message, error: errors.append(error))
        give_up.cancel()
        assert [what in str(error) for error in errors] == [True]
        assert client.get(receipt.id).state == "acked"


_ON_ERROR = """
import sys, threading
from hadelay import Client
stop = threading.Event()
def handle(message):
    if message.topic == "failed":
        stop.set()
    elif message.attempt == 1:
        raise ValueError(message.text())
with Client(sys.argv[1]) as client:
    client.put("work", "4711")
    client.work(["work", "failed"], handle, stop=stop, on_error=lambda message, error: client.put("failed", str(error)))
    print(*[m.topic for m in client.messages("failed", state="acked")])
"""


def test_on_error_may_use_the_client(url: str) -> None:
    """It runs in a thread, as the handler does: the event loop that all clients share must not wait for itself."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_ERROR, url], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout == "failed\n"


async def test_on_error_may_be_a_coroutine_function(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("work", "4711")

        async def handle(message: AsyncMessage) -> None:
            if message.topic == "failed":
                consumer.stop()
            elif message.attempt == 1:
                raise ValueError(message.text())

        async def failed(message: AsyncMessage, error: Exception) -> None:
            await client.put("failed", str(error))

        consumer = client.consume(["work", "failed"])
        async with asyncio.timeout(10):
            await consumer.work(handle, on_error=failed)


_WORKER = """
import os, signal, sys, threading, time
from hadelay import Client
from hadelay.client.sync import Consuming
stop = threading.Event()
stop_consuming = Consuming.stop
def say(consuming):
    stop_consuming(consuming)
    os.write(1, b"stopping\\n")
Consuming.stop = say
signal.signal(signal.SIGTERM, lambda *_: stop.set())
signal.signal(signal.SIGINT, signal.default_int_handler)
def handle(message):
    print("begun", flush=True)
    time.sleep(float(sys.argv[2]))
    print("finished", flush=True)
with Client(sys.argv[1]) as client:
    client.work("shop", handle, stop=stop, drain=float(sys.argv[3]))
print("ended", flush=True)
"""


@pytest.mark.parametrize(
    ("signals", "takes", "drain", "says"),
    [
        ([signal.SIGTERM], "0.3", "20", "finished\nended\n"),
        ([signal.SIGTERM], "60", "0.2", "ended\n"),
        ([signal.SIGINT], "0.3", "20", "finished\n"),
        ([signal.SIGINT, signal.SIGINT], "60", "50", ""),
    ],
    ids=["a stop", "a stop that takes too long", "Ctrl-C", "Ctrl-C twice"],
)
def test_a_worker_process_ends(url: str, signals: list[signal.Signals], takes: str, drain: str, says: str) -> None:
    with Client(url) as client:
        receipt = client.put("shop")
        command = [sys.executable, "-c", _WORKER, url, takes, drain]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "begun\n"
            for one in signals[:-1]:
                os.kill(worker.pid, one)
                assert worker.stdout.readline() == "stopping\n"  # the second of two at once would be none
            os.kill(worker.pid, signals[-1])
            assert worker.stdout.read().replace("stopping\n", "") == says
        done = "finished" in says
        state = client.get(receipt.id).state
        assert state == "acked" if done else state in ("ready", "scheduled")


def test_a_wait_takes_no_lock_that_ctrl_c_could_leave_taken(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C inside `Condition.__enter__` leaves its lock taken; an event loop that needs the lock hangs for good."""

    def interrupted(condition: threading.Condition) -> bool:
        taken = condition._lock.__enter__()  # type: ignore[attr-defined]
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return bool(taken)

    with Client(url) as client:
        client.put("begun")  # the event loop's thread has started
        monkeypatch.setattr(threading.Condition, "__enter__", interrupted)
        client.put("a")
        with client.receive("a", wait=5)[0]:
            pass
        consuming = client.consume("b")
        assert consuming.next(0.01) is None
        consuming.stop()
        consuming.work(print)
        consuming.close()
        monkeypatch.undo()


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while any(t.name.startswith("hadelay-handler") for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [t for t in threading.enumerate() if t.name.startswith("hadelay-handler")]
