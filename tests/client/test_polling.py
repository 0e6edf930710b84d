"""Polls of a consumer that are cut off or divided over shards: no message that a node granted to them is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from hadelay import AsyncClient, AsyncMessage
from hadelay.client.consumer import Consumer
from hadelay.errors import Conflict, Forbidden, OutcomeUnknown
from tests.http.conftest import Node


class Shards:
    """Receives of a client as shards with a topic each answer them; the messages come from one node."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        #: Topics of every receive.
        self.asked: list[list[str]] = []
        #: Topics → event that is set by a grant of them; the answer to that grant is lost.
        self.lost: dict[str, asyncio.Event] = {}
        #: Topics that have moved: the next receive learns that.
        self.moved: set[str] = set()
        #: Topics of which a shard hands out one message, and then refuses to.
        self.refused: set[str] = set()
        #: Request ids whose answers were lost; and the event before which their repetitions get no answer.
        self.cut: set[str] = set()
        self.repeated, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def receive(self, topics: Sequence[str], **options: Any) -> list[AsyncMessage]:
        names = list(topics)
        self.asked.append(names)
        if len(names) > 1 or names[0] in self.moved:
            self.moved -= set(names)
            raise Conflict("several shards", shards={f"s{n}": [name] for n, name in enumerate(names)})
        if options["request_id"] in self.cut:
            self.repeated.set()
            await self.go.wait()
        if names[0] in self.refused and self.asked.count(names) > 1:
            raise Forbidden("the token is no longer valid")
        messages = await self.client.receive(topics, **{"wait": 20} | options)
        if messages and (granted := self.lost.pop(names[0], None)) is not None:
            self.cut.add(options["request_id"])
            granted.set()
            await asyncio.Event().wait()
        return messages

    def consumer(self, *topics: str) -> Consumer:
        return Consumer(self.client, topics, self.receive, 30.0, 10, set())


async def some_turns() -> None:
    """Let the event loop run what is ready, and what becomes ready by that."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_cancelled_handler_of_a_divided_consumer_gives_its_message_back(node: Node) -> None:
    async with asyncio.timeout(30), AsyncClient(node.url) as client, asyncio.timeout(20):
        consumer = Shards(client).consumer("a", "b")
        await client.put("a")
        message = await anext(consumer)
        with pytest.raises(asyncio.CancelledError):
            async with message:
                raise asyncio.CancelledError
        again = await anext(consumer)
        assert again.id == message.id
        assert not node.service.settled[-1].count
        await again.ack()
        await consumer.close()
    assert node.service.states == ["acked"]


async def test_a_stop_during_a_division_ends_all_polls(node: Node) -> None:
    """One shard has lost its topic, while the poll of the other repeats its request."""
    async with asyncio.timeout(30), AsyncClient(node.url) as client, asyncio.timeout(20):
        shards = Shards(client)
        shards.lost["a"] = asyncio.Event()
        consumer, granted = shards.consumer("a", "b"), shards.lost["a"]
        waiting = asyncio.create_task(consumer.next())
        while shards.asked.count(["b"]) < 2:  # noqa: ASYNC110 - the first poll does not wait
            await asyncio.sleep(0.005)
        await client.put("a")
        await granted.wait()
        shards.go.clear()
        shards.moved.add("b")
        await client.put("b")
        message = await waiting
        assert message is not None
        assert message.topic == "b"
        await shards.repeated.wait()
        consumer.stop()
        await some_turns()
        shards.go.set()
        asked = len(shards.asked)
        await message.ack()
        await consumer.close()
        assert len(shards.asked) == asked
    assert sorted(node.service.states) == ["acked", "ready"]
    assert not node.service.settled[-1].count or not node.service.settled[-2].count


async def test_a_change_of_topics_loses_no_message_of_another_shard(node: Node) -> None:
    async with asyncio.timeout(30), AsyncClient(node.url) as client, asyncio.timeout(20):
        shards = Shards(client)
        granted = shards.lost["b"] = asyncio.Event()
        consumer = shards.consumer("a", "b")
        waiting = asyncio.create_task(consumer.next())
        await client.put("b")
        await granted.wait()
        shards.go.clear()
        consumer.topics = ["b", "a"]
        await shards.repeated.wait()
        await asyncio.sleep(0.1)  # the other poll ends meanwhile
        shards.go.set()
        message = await waiting
        assert message is not None
        assert (message.topic, message.attempt) == ("b", 1)
        await message.ack()
        await consumer.close()


async def test_a_stop_after_a_change_of_topics_gives_the_granted_message_back(node: Node) -> None:
    async with asyncio.timeout(30), AsyncClient(node.url) as client, asyncio.timeout(20):
        shards = Shards(client)
        granted = shards.lost["a"] = asyncio.Event()
        consumer = shards.consumer("a")
        waiting = asyncio.create_task(consumer.next())
        await client.put("a")
        await granted.wait()
        shards.go.clear()
        consumer.topics = "b"
        await shards.repeated.wait()
        consumer.stop()
        await some_turns()
        shards.go.set()
        await consumer.close()
        assert await waiting is None
    assert node.service.states == ["ready"]
    assert not node.service.settled[-1].count


async def test_a_change_of_topics_during_a_pause_repeats_the_request_with_the_old_ones() -> None:
    """A node refuses a repetition that names other topics."""
    asked: list[tuple[list[str], str]] = []
    changed = asyncio.Event()

    async def poll(topics: list[str], *, request_id: str, **_: Any) -> list[AsyncMessage]:
        asked.append((topics, request_id))
        if len(asked) == 1:
            consumer.topics = "b"
            raise OutcomeUnknown("the connection broke", retry_after_ms=1)
        if topics == ["b"]:
            changed.set()
            await asyncio.Event().wait()
        return []

    consumer = Consumer(AsyncClient(), "a", poll, 30.0, 10, set())
    async with asyncio.timeout(10):
        waiting = asyncio.create_task(consumer.next())
        await changed.wait()
        consumer.stop()
        await waiting
    assert [topics for topics, _ in asked[:3]] == [["a"], ["a"], ["b"]]
    assert asked[0][1] == asked[1][1] != asked[2][1]


async def test_a_refusal_by_one_shard_ends_the_polls_of_the_others(node: Node) -> None:
    async with asyncio.timeout(30), AsyncClient(node.url) as client, asyncio.timeout(20):
        shards = Shards(client)
        consumer = shards.consumer("a", "b")
        shards.refused.add("b")
        await client.put("b")
        assert (await anext(consumer)).topic == "b"
        with pytest.raises(Forbidden):
            await consumer.next()
        asked = len(shards.asked)
        await client.put("a")
        await some_turns()
        assert len(shards.asked) == asked
        await consumer.close()
