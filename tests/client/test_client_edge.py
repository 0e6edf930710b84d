"""What clients do when their user does what nobody expected."""

from __future__ import annotations

import asyncio
import math
import re
import signal
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hadelay.client import AsyncClient, Client, Put, Receipt, Unreachable
from hadelay.client.background import loop
from hadelay.client.consumer import Consumer
from hadelay.client.message import ACK, AsyncMessage
from hadelay.errors import Conflict, OutcomeUnknown, Unauthorized
from tests.http.conftest import Node, until

# ---- what is given is what arrives


@pytest.mark.parametrize("delay", [0.00005, 1e-7, timedelta(microseconds=3)])
async def test_waits_that_are_short(node: Node, delay: Any) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("t", b"x", delay=delay)
    assert node.service.published[0].when_ms == 1


async def test_no_tags_are_none(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        one = await client.put("t", b"x", tags=[])
        (many,) = await client.put_many([Put(topic="t", tags=[])])
        assert isinstance(many, Receipt)
        assert [(await client.get(r.id)).tags for r in (one, many)] == [[], []]
        with pytest.raises(ValueError, match="comma"):
            await client.put("t", b"x", tags=["a,b"])


@pytest.mark.parametrize(
    "key", ["a", "a b", " a ", "\ta", "a\n", "ä", "a\u2003", "%41", "a#b&c=d", "😀", "a\x01b", "...", ".a"]
)
async def test_keys_arrive_as_they_are(node: Node, key: str) -> None:
    async with AsyncClient(node.url) as client:
        receipt = await client.put("t", b"x", key=key, delay="1h")
        assert receipt.key == key
        assert (await client.get(topic="t", key=key)).id == receipt.id


@pytest.mark.parametrize(
    "meta",
    [{"trace:id": "7"}, {"a b": "7"}, {"": "7"}, {"ü": "7"}, {"a": " 7"}, {"a": "7\t"}, {"a": "x\r\nHadelay-Key: k"},
     {"a\r\nHadelay-Key": "k"}],
)  # fmt: skip
async def test_meta_that_a_header_cannot_carry_is_refused(node: Node, meta: dict[str, str]) -> None:
    """It would arrive as something else. A batch can carry it."""
    async with AsyncClient(node.url) as client:
        with pytest.raises(ValueError, match="put_many"):
            await client.put("t", b"x", meta=meta)
        assert not node.service.published
        (receipt,) = await client.put_many([Put(topic="t", meta=meta)])
        assert isinstance(receipt, Receipt)
        assert (await client.get(receipt.id)).meta == meta


async def test_numbers_that_are_none(node: Node) -> None:
    """JSON has no NaN: it would arrive as null, which takes a setting back."""
    async with AsyncClient(node.url) as client:
        await client.put_topic("t", rate=5.0)
        for ask in (
            client.put_topic("t", rate=float("nan")),
            client.redrive_all("t", rate=float("inf")),
            client.nack("L", delay=float("nan")),
            client.put("t", delay=float("inf")),
        ):
            with pytest.raises(ValueError, match="JSON number"):
                await ask
        assert (await client.topic("t")).rate == 5.0


async def test_more_leases_than_one_request_may_name(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        (receipt,) = await client.put_many([Put(topic="t")])
        assert isinstance(receipt, Receipt)
        (message,) = await client.receive("t")
        outcomes = await client.ack(["x"] * 10_000 + [message.lease])
    assert outcomes == ["lease_lost"] * 10_000 + ["acked"]


# ---- consumers


async def test_a_failed_settlement_is_reported_to_its_caller(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nonsense(*_: Any) -> Any:
        raise msgspec.DecodeError("<html>")

    async with AsyncClient(node.url) as client:
        await client.put("t")
        async for message in client.consume("t"):
            with monkeypatch.context() as patch:
                patch.setattr(client, "ack", nonsense)
                with pytest.raises(msgspec.DecodeError):
                    await asyncio.wait_for(message.ack(), 20)
            assert await asyncio.wait_for(message.ack(), 20) == "acked"
            break


async def test_a_publish_that_may_have_happened_tells_its_key(node: Node) -> None:
    """Who did not give one can still ask again without making a second message."""
    async with AsyncClient(node.url) as client:
        node.service.hold()
        with pytest.raises(OutcomeUnknown, match="same key") as caught:
            await client.put("t", b"x", timeout=1)
        node.service.release()
        assert caught.value.idempotency_key
        assert (await client.put("t", b"x", idempotency_key=caught.value.idempotency_key)).duplicate


@pytest.mark.parametrize("error", [OutcomeUnknown("?"), Unauthorized("revoked")])
async def test_the_key_of_put_many_covers_what_was_published_before_the_error(node: Node, error: Any) -> None:
    puts = [Put(topic="t")] * 1_500

    def some() -> Iterator[Put]:
        for n, put in enumerate(puts):
            node.service.fail = error if n == 1_200 else node.service.fail
            yield put

    async with AsyncClient(node.url, timeout=2) as client:
        with pytest.raises(type(error)) as caught:
            await client.put_many(some())
        node.service.fail = None
        again = await client.put_many(puts, idempotency_key=caught.value.idempotency_key, timeout=60)
    assert [isinstance(r, Receipt) and r.duplicate for r in again] == [True] * 1_000 + [False] * 500
    assert len(node.service.published) == 1_500


async def test_a_machine_that_is_gone_is_known_to_have_done_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes no connection, and refuses none."""
    monkeypatch.setattr("hadelay.client.transport._CONNECT_S", 0.2)
    gone = socket.create_server(("127.0.0.1", 0), backlog=0)
    with gone, socket.create_connection(gone.getsockname()):  # no more than this
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        async with AsyncClient(url, timeout=2) as client:
            with pytest.raises(Unreachable, match="no connection in time") as caught:
                await client.put("t")
        assert caught.value.outcome_known
        async with AsyncClient(url, timeout=0.1) as client:
            with pytest.raises(Unreachable, match="no connection in time"):  # its time is over first
                await client.put("t")
        async with AsyncClient([url, node.url], timeout=60) as client:
            client._transport._at = 0
            assert (await asyncio.wait_for(client.put("t"), 10)).topic == "t"


@pytest.mark.parametrize("error", [ValueError("mine"), asyncio.CancelledError(), SystemExit(3)])
async def test_the_first_error_is_raised(node: Node, error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Also when the message can't be given back because of it: its lease ends by itself."""
    async with AsyncClient(node.url) as client:
        await client.put("t")
        async for message in client.consume("t"):
            node.service.fail = Conflict("no")
            with pytest.raises(type(error)) as caught:
                async with message:
                    raise error
            node.service.fail = None
            break
    assert caught.value is error
    assert "was not given back: no" in caplog.text


@pytest.mark.parametrize("heard", [True, False])
async def test_exceptions_of_handlers_are_reported(node: Node, caplog: pytest.LogCaptureFixture, heard: bool) -> None:
    """To `on_error`, or in the log: somebody has to know that nothing works."""
    reported: list[Exception] = []

    async def handle(_: object) -> None:
        raise ValueError("no such card")

    on_error = (lambda _, error: reported.append(error)) if heard else None
    async with AsyncClient(node.url) as client:
        await client.put("t")
        working = asyncio.create_task(client.work("t", handle, on_error=on_error))
        await until(lambda: bool(reported or caplog.text))
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert bool(reported) is heard
    assert ("ValueError: no such card" in caplog.text) is not heard


async def test_acked_twice_at_once(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("t")
        async for message in client.consume("t"):
            async with message:
                gone = asyncio.create_task(message.ack())
                twice = asyncio.gather(message.ack(), message.ack())
                await asyncio.sleep(0)
                gone.cancel()
                assert await asyncio.wait_for(twice, 20) == ["acked", "acked"]
            break


async def test_closing_waits_for_what_is_closing_already(node: Node) -> None:
    """What was fetched goes back before the connections do."""
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="t")] * 10)
        consumer = client.consume("t")
        async for _ in consumer:
            break
        closing = asyncio.create_task(consumer.close())
        await asyncio.sleep(0)
    assert client._transport._session is None
    assert node.service.states == ["leased"] + ["ready"] * 9
    await closing


def test_puts_are_made_on_the_thread_that_asks(url: str) -> None:
    """A generator that takes its time must not hold up the loop that extends everybody's leases."""
    threads = set()

    def puts() -> Iterator[Put]:
        for _ in range(1_500):
            threads.add(threading.current_thread())
            yield Put(topic="t")

    with Client(url) as client:
        assert len({receipt.id for receipt in client.put_many(puts()) if isinstance(receipt, Receipt)}) == 1_500
    assert threads == {threading.current_thread()}
    assert Client.put_many.__doc__ == AsyncClient.put_many.__doc__


def test_a_consumer_that_is_collected_on_the_loops_own_thread(url: str) -> None:
    """Garbage is collected on whatever thread happens to run: it must not wait there for itself."""
    with Client(url) as client:
        client.put("t")
        messages = client.consume("t")
        next(messages)

        async def collect() -> None:
            messages.close()

        asyncio.run_coroutine_threadsafe(collect(), loop()).result(20)
        gone = until(lambda: not client._async()._consumers)
        asyncio.run_coroutine_threadsafe(gone, loop()).result(20)


def test_ctrl_c_ends_a_blocking_consumer(url: str) -> None:
    """As what it is, and not as an error about generators."""
    client = Client(url)
    interrupted = threading.Event()

    def interrupt() -> None:
        polling = asyncio.run_coroutine_threadsafe(until(lambda: bool(client._async()._consumers)), background)
        polling.result(20)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGUSR1)
        interrupted.set()

    def raises(*_: Any) -> None:
        raise KeyboardInterrupt

    def consume() -> None:
        thread.start()
        for _ in client.consume("t", wait=30):
            pass

    background = loop()
    before = signal.signal(signal.SIGUSR1, raises)
    thread = threading.Thread(target=interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            consume()
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert interrupted.is_set()
    assert not client._async()._consumers
    client.close()


async def test_a_string_is_one_of_what_is_asked_for(node: Node) -> None:
    """And not its characters, which nobody would ever find again."""
    async with AsyncClient(node.url) as client:
        receipt = await client.put("a", tags="paid")
        await client.put_many([Put(topic="a", tags="open")])
        assert (await client.get(receipt.id)).tags == ["paid"]
        assert [m.tags async for m in client.messages("a", tags="open")] == [["open"]]
        await client.receive("a", tags="paid", any_tags="red")
        assert (node.service.polls[-1].tags, node.service.polls[-1].any_tags) == (("paid",), ("red",))
        await client.purge("a", "scheduled")


@pytest.mark.parametrize("key", ["", "a\nb", " a"])
async def test_an_idempotency_key_that_is_none(node: Node, key: str) -> None:
    """Empty ones would be the same for everybody; put away in silence, they would make nothing harmless."""
    async with AsyncClient(node.url) as client:
        for ask in (
            client.put("a", idempotency_key=key),
            client.put_many([Put(topic="a")], idempotency_key=key),
            client.put_many([Put(topic="a", idempotency_key=key)]),
        ):
            with pytest.raises(ValueError, match="idempotency_key"):
                await ask
    assert node.service.published == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key": 4711}, "key must be a str, not int: key='4711'"),
        ({"tags": [7]}, "tag must be a str, not int"),
        ({"meta": {"a": 1}}, "meta['a'] must be a str, not int"),
        ({"topic": 5}, "topic must be a str, not int"),
    ],
)
def test_a_value_of_the_wrong_type_is_named(options: dict[str, Any], said: str) -> None:
    client = Client("http://127.0.0.1:1")
    with pytest.raises(TypeError, match=re.escape(said)):
        client.put(**{"topic": "t", "body": "x", **options})
    with pytest.raises(TypeError, match=re.escape(said)):
        client.put_many([Put(**{"topic": "t", **options})])
    client.close()


def test_a_token_out_of_a_file(tmp_path: Path) -> None:
    assert AsyncClient(token="abc\n")._transport._headers["Authorization"] == "Bearer abc"
    with pytest.raises(ValueError, match="token") as caught:
        AsyncClient(token="sec\nret")
    assert "sec" not in str(caught.value)
    with pytest.raises(OSError, match=r"nothing\.pem"):
        AsyncClient(ca=str(tmp_path / "nothing.pem"))


def test_a_client_of_another_loop_says_so() -> None:
    client = AsyncClient("http://127.0.0.1:1", timeout=0.01)
    with asyncio.Runner() as runner:
        with pytest.raises(Unreachable):
            runner.run(client.topics())
        with pytest.raises(RuntimeError, match=r"each asyncio\.run"):
            asyncio.run(client.topics())
        runner.run(client.close())


async def test_a_consumer_in_vain_says_why(caplog: pytest.LogCaptureFixture) -> None:
    """In the words, which is all that an ordinary program shows."""
    async with AsyncClient("http://127.0.0.1:1", timeout=0.01) as client:
        waiting = asyncio.create_task(anext(aiter(client.consume("t", wait=0))))
        await until(lambda: caplog.records)
        waiting.cancel()
    assert "127.0.0.1:1" in caplog.messages[0]


async def test_a_second_settlement_is_answered_although_the_first_request_was_cut_off() -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()

    class Slow:
        async def ack(self, leases: list[str]) -> list[str]:
            if not asked.is_set():
                asked.set()
                await go_on.wait()
            return ["acked"] * len(leases)

    now = datetime.now(UTC)
    message = AsyncMessage(
        id="1", lease="l", topic="t", body=b"", deliver_at=now, late_ms=0, attempt=1, redelivered=False,
        lease_until=now, lease_left_ms=1,
    )  # fmt: skip
    consumer = Consumer(Slow(), "t", None, 1.0, 1, set())  # type: ignore[arg-type]
    consumer._take([message])
    (leased,) = consumer.unsettled.values()
    first = asyncio.create_task(consumer.settle(leased, ACK))
    await asked.wait()
    again = asyncio.create_task(consumer.settle(leased, ACK))
    await asyncio.sleep(0)
    assert consumer._sender is not None
    consumer._sender.cancel()
    assert await asyncio.wait_for(asyncio.gather(first, again), 5) == ["acked", "acked"]


class Rated(msgspec.Struct):
    number: int
    rate: float


#: Values that JSON has no number for, and where each is.
NOT_FINITE = [
    (math.nan, "body"), ({"price": math.nan}, "body.price"), ([1.5, {"a": [math.inf]}], "body[1].a[0]"),
    ((1, -math.inf), "body[1]"), ({"null": None, "x": math.nan}, "body.x"), (Rated(1, math.nan), "body.rate"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "where"), NOT_FINITE)
async def test_values_that_json_has_no_number_for_are_refused(node: Node, value: Any, where: str) -> None:
    """msgspec would write null."""
    async with AsyncClient(node.url) as client:
        refused = pytest.raises(ValueError, match=re.escape(f"{where}: JSON has no "))
        with refused:
            await client.put("t", value)
        with refused:
            await client.put_many([Put(topic="t", body=value)])
        with refused:
            await client.put_schedule("s", "t", value, every="1h")
        await client.put("t", {"null": None, "text": "null", "number": 1.5})
        (message,) = await client.receive("t")
        assert message.json() == {"null": None, "text": "null", "number": 1.5}
        with pytest.raises(ValueError, match=re.escape(f"{where}: JSON has no ".replace("body", "result", 1))):
            await message.ack(value)
        with pytest.raises(ValueError, match="JSON has no"):
            await client.ack([message], results=[value])
        assert await message.ack(None) == "acked"
