"""`client.messages`: everything there is of a topic, a page at a time behind the scenes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from hadelay.api.jobs import JobCount
from hadelay.api.text import format_instant
from hadelay.client import AsyncClient, Client, Put
from hadelay.codec.jobcommands import JobCursor, JobSpec
from hadelay.errors import BadRequest, NotFound
from tests.http.conftest import Node

T0 = datetime(2030, 1, 1, tzinfo=UTC)


async def test_every_message_in_due_order_whatever_the_page(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        sent = await client.put_many([Put(topic="a", at=T0 + timedelta(seconds=n % 5)) for n in range(12)])
        found = [m async for m in client.messages("a", page=5)]
        assert [m.deliver_at for m in found] == sorted(T0 + timedelta(seconds=n % 5) for n in range(12))
        assert {m.id for m in found} == {receipt.id for receipt in sent}  # type: ignore[union-attr]
        assert {m.state for m in found} == {"scheduled"}


async def test_messages_of_all_topics(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        for n, topic in enumerate("bab"):
            await client.put(topic, at=T0 + timedelta(seconds=n))
        assert [m.topic async for m in client.messages()] == ["b", "a", "b"]


async def test_states_and_range(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        first, second, third = [await client.put("a", at=T0 + timedelta(hours=n)) for n in range(3)]
        await client.cancel(second.id)
        early = client.messages("a", state=["scheduled", "cancelled"], start=T0, end=third.deliver_at)
        assert [m.id async for m in early] == [first.id, second.id]
        assert [m.id async for m in client.messages("a", state="cancelled")] == [second.id]
        assert [m.id async for m in client.messages("a", tags=["eu"])] == []


async def test_a_job_is_counted_part_by_part(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def count(spec: JobSpec, after: JobCursor) -> tuple[JobCount[str], JobCursor | None]:
        """A part for each of three messages, which are due one second after another."""
        at = format_instant(int(T0.timestamp() * 1000) + 1_000 * after[1])
        return JobCount(1, 1, at, at, 0.5, None), None if after[1] == 2 else (0, after[1] + 1)

    monkeypatch.setattr(node.service.jobs, "count", count)
    async with AsyncClient(node.url) as client:
        counted = await client.count_job("cancel", "a")
    assert (counted.matched, counted.leased, counted.cursor) == (3, 3, None)
    assert (counted.first, counted.last) == (T0, T0 + timedelta(seconds=2))


async def test_refused_listings(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        with pytest.raises(NotFound):
            [m async for m in client.messages("nothing")]
        await client.put("a")
        with pytest.raises(BadRequest, match="state"):
            [m async for m in client.messages("a", state="lost")]


def test_the_blocking_twin_lists(url: str) -> None:
    with Client(url) as client:
        sent = [client.put("a", at=T0 + timedelta(seconds=n)).id for n in range(5)]
        assert [m.id for m in client.messages("a", page=2)] == sent
        for message in client.messages("a", page=2):
            assert message.id == sent[0]
            break
        info = client.topic("a")
        assert (info.scheduled, info.lateness) == (5, None)
