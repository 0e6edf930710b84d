"""The client against real servers over a service in memory: what it sends and gives back, also without asyncio."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from inspect import signature
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

import hadelay
from hadelay.client import AsyncClient, Client, Put, Receipt
from hadelay.client.transport import HttpAnswer, addresses
from hadelay.codec.results import CancelOutcome
from hadelay.errors import (
    BadRequest,
    Conflict,
    HadelayError,
    NotFound,
)
from hadelay.model import OWN_DELAY
from hadelay.server.service.messages import too_late
from tests.http.conftest import Node


def test_names_that_users_import() -> None:
    assert hadelay.AsyncClient is AsyncClient
    assert hadelay.Client is Client
    assert hadelay.HadelayError is HadelayError
    with pytest.raises(AttributeError):
        _ = hadelay.Nothing


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        ("http://a:1, b:2/", ["http://a:1", "http://b:2"]),
        (["https://[::1]:3"], ["https://[::1]:3"]),
        ("http://a:1/path", None), ("ftp://a", None), ("", None), ([], None),
        ("http://a:99999", None), ("a:b", None), ("http://a b", None),
    ],
)  # fmt: skip
def test_addresses(urls: Any, expected: list[str] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError, match=r"address|not served under a path"):
            addresses(urls)
    else:
        assert addresses(urls) == expected


async def test_a_message_from_put_to_ack(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        receipt = await client.put("orders", {"id": 7}, meta={"trace": "ä"})
        assert receipt.deliver_at.tzinfo is not None
        (message,) = await client.receive("orders", wait=1, lease="10s")
        assert message.json() == {"id": 7}
        assert message.json(dict[str, int])["id"] == 7
        assert (message.id, message.content_type, message.meta, message.attempt) == (
            receipt.id, "application/json", {"trace": "ä"}, 1,
        )  # fmt: skip
        assert await client.extend(message, lease=timedelta(minutes=1)) == ["extended"]
        assert await client.ack([message, message.lease]) == ["acked", "already_acked"]
        assert await client.ack([]) == []
        info = await client.get(receipt.id, body=True)
        assert (info.state, info.body, info.history[0].event) == ("acked", b'{"id":7}', "leased")
        assert await client.receive("orders") == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (OWN_DELAY, True)),
        ({"delay": "15m"}, (900_000, True)),
        ({"delay": 0.25}, (250, True)),
        ({"delay": timedelta(hours=1)}, (3_600_000, True)),
        ({"at": datetime(2026, 11, 20, 18, tzinfo=UTC)}, (1_795_197_600_000, False)),
        ({"at": datetime(2026, 11, 20, 18, 0, 0, 1500, timezone(timedelta(hours=8)))}, (1_795_168_800_002, False)),
        ({"at": "2026-11-20T18:00:00+08:00"}, (1_795_168_800_000, False)),
        ({"at": 1_795_168_800_000}, (1_795_168_800_000, False)),
    ],
)
async def test_times_of_delivery(node: Node, options: dict[str, Any], expected: tuple[int, bool]) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("orders", "one", **options)
        (result,) = await client.put_many([Put(topic="orders", body="many", **options)])
        assert isinstance(result, Receipt)
        with pytest.raises(ValueError, match="time zone"):
            await client.put("orders", at=datetime(2026, 1, 1))
    assert [(d.when_ms, d.relative) for d in node.service.published] == [expected, expected]


async def test_waits_in_every_form(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        for wait in ("10ms", "0.01", 0.01, timedelta(milliseconds=10), "0s10ms"):
            assert await client.receive("a", wait=wait) == []
        assert [poll.wait_ms for poll in node.service.polls] == [10] * 5
        with pytest.raises(ValueError, match="not a duration"):
            await client.receive("a", wait="soon")


async def test_put_many(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        puts = [Put(topic="a", body=b"%d" % n) for n in range(2500)]
        results = await client.put_many(puts)
        assert len({r.id for r in results if isinstance(r, Receipt)}) == 2500
        assert [d.body for d in node.service.published] == [put.body for put in puts]
        mixed = await client.put_many([
            Put(topic="a", body="text", meta={"k": "v"}, idempotency_key="i"), Put(topic="a/b"), Put(topic="b"),
        ])  # fmt: skip
        assert isinstance(mixed[1], BadRequest)
        assert (mixed[0].topic, mixed[2].topic) == ("a", "b")  # type: ignore[union-attr]
        assert msgspec.msgpack.decode(node.service.published[-2].meta)["meta"] == {"k": "v"}
        assert node.service.published[-2].idem == b"i"
        again = await client.put_many(puts[:3], idempotency_key="mine")
        same = await client.put_many(puts[:3], idempotency_key="mine")
        assert [r.id for r in same] == [r.id for r in again]  # type: ignore[union-attr]
        assert all(r.duplicate for r in same)  # type: ignore[union-attr]


async def test_a_large_body(roomy: Node) -> None:
    node = roomy
    async with AsyncClient(node.url) as client:
        await client.put("orders", b"x" * (1 << 20))
    assert len(node.service.published[0].body) == 1 << 20


async def test_topics_due_cluster(node: Node, lost: Node) -> None:
    async with AsyncClient(node.url) as client:
        assert (await client.put_topic("orders", lease="1m")).lease == "1m"
        receipt = await client.put("orders", delay="1h")
        assert (await client.topic("orders")).scheduled == 1
        assert [t.topic for t in await client.topics()] == ["orders"]
        day = timedelta(days=1)
        for topic in (None, "orders"):
            buckets = await client.due(receipt.deliver_at - day, receipt.deliver_at + day, "1h", topic=topic)
            assert [b.count for b in buckets] == [1]
        with pytest.raises(Conflict):
            await client.delete_topic("orders")
        assert await client.cancel(receipt.id) == "cancelled"
        await client.delete_topic("orders")
        with pytest.raises(NotFound):
            await client.topic("orders")
        cluster = await client.cluster()
        assert (cluster.leader, cluster.members[0].role, cluster.dispatch.sync) == ("n1", "leader", "commit")
        assert await client.transfer_leader("n1") == "n1"
        assert (await client.hours()).hours[0].log.entries == 1
        await client.put("anybody")
        await client.receive("anybody")
        assert len((await client.names()).consumers) == 1
        assert (await client.ready()).status == "ok"
    async with AsyncClient(lost.url) as client:
        failing = await client.ready()
        assert (failing.status, failing.checks[0].name) == ("failing", "leader")


@dataclass
class Wire:
    """Stands in for Transport.request: what was asked, and what is answered."""

    answer: Any
    asked: list[tuple[str, str, Any]] = field(default_factory=list)

    async def __call__(self, method: str, path: str, read: Any, *, data: bytes = b"", **_: Any) -> Any:
        self.asked.append((method, path, msgspec.json.decode(data) if data else None))
        return read(HttpAnswer(204 if self.answer is None else 200, {}, msgspec.json.encode(self.answer)))


_AT = "2026-11-20T18:00:00.000Z"
_MOVED = {"id": "0", "deliver_at": _AT}
_TOPIC = {
    "topic": "t", "scheduled": 0, "ready": 0, "leased": 0, "dead": 0, "oldest_ready_age_ms": None, "bytes": 0,
    "lateness": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "answer", "method", "path", "body"),
    [
        (lambda c: c.cancel("1"), {"outcome": "cancelled"}, "DELETE", "/v1/messages/1", None),
        (lambda c: c.cancel(topic="t", key="a/ü"), {"outcome": "cancelled"}, "DELETE", "/v1/topics/t/keys/a%2F%C3%BC",
         None),
        (lambda c: c.reschedule("1", delay="2h"), _MOVED, "PATCH", "/v1/messages/1", {"delay": "2h"}),
        (lambda c: c.reschedule("1", shift=timedelta(hours=-1), expected=1_900_000_000_000), _MOVED, "PATCH",
         "/v1/messages/1", {"shift": -3600.0, "expected_deliver_at": 1_900_000_000_000}),
        (lambda c: c.reschedule(topic="t", key="k", at=_AT), _MOVED, "PATCH", "/v1/topics/t/keys/k",
         {"deliver_at": _AT}),
        (lambda c: c.deliver_now(topic="t", key="k"), _MOVED, "PATCH", "/v1/topics/t/keys/k", {"delay": 0}),
        (lambda c: c.nack("L", delay=1, reason="503"), {"results": [{"outcome": "nacked"}]}, "POST", "/v1/leases:nack",
         {"leases": ["L"], "delay": 1, "reason": "503"}),
        (lambda c: c.put_topic("t", backoff=["1s", timedelta(minutes=1)], rate=5, ttl=None), _TOPIC, "PUT",
         "/v1/topics/t", {"backoff": ["1s", 60.0], "rate": 5, "ttl": None}),
        (lambda c: c.put_topic("t", backoff={"min": 1, "max": timedelta(hours=1)}), _TOPIC, "PUT", "/v1/topics/t",
         {"backoff": {"min": 1, "max": 3600.0}}),
        (lambda c: c.pause("t", reason="sale"), _TOPIC, "POST", "/v1/topics/t:pause", {"reason": "sale"}),
        (lambda c: c.resume("t"), _TOPIC, "POST", "/v1/topics/t:resume", {}),
        (lambda c: c.purge("t"), {"topic": "t", "states": []}, "POST", "/v1/topics/t:purge",
         {"states": ["scheduled", "ready"]}),
        (lambda c: c.redrive("t", ["1"]), {"results": [{"id": "1", "outcome": "redriven"}]}, "POST",
         "/v1/topics/t/dead:redrive", {"ids": ["1"]}),
        (lambda c: c.redrive_all("t", rate=5), {"redriving": 7}, "POST", "/v1/topics/t/dead:redrive",
         {"all": True, "rate": 5}),
        (lambda c: c.purge_dead("t"), None, "DELETE", "/v1/topics/t/dead", None),
    ],
)  # fmt: skip
async def test_requests_of_each_method(call: Any, answer: Any, method: str, path: str, body: Any) -> None:
    async with AsyncClient() as client:
        wire = client._transport.request = Wire(answer)  # type: ignore[method-assign]
        await call(client)
    assert wire.asked == [(method, path, body)]


@pytest.mark.parametrize("name", [{}, {"topic": "t"}, {"key": "k"}, {"message_id": "1", "topic": "t", "key": "k"}])
async def test_a_message_is_named_one_way(name: dict[str, str]) -> None:
    async with AsyncClient() as client:
        with pytest.raises(ValueError, match="by its id, or by topic and key"):
            await client.get(**name)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="give one of shift, delay and at"):
            await client.reschedule("1")
        with pytest.raises(ValueError, match="shift needs expected"):
            await client.reschedule("1", shift="1h")


async def test_a_key_from_put_to_cancel(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        first = await client.put("t", "1", delay="1h", key="k", tags=["a", "b"], ttl="1d")
        draft = node.service.published[0]
        assert (first.key, draft.key, draft.ttl_ms, draft.tag_mask != 0) == ("k", b"k", 86_400_000, True)
        assert (await client.put("t", "2", delay="1h", key="k")).duplicate
        second = await client.put("t", "3", delay="1h", key="k", on_conflict="replace", max_wait=timedelta(days=1))
        assert second.replaced == first.id
        (third,) = await client.put_many([Put(topic="t", delay="1h", key="k", on_conflict="replace", max_wait="1d")])
        assert isinstance(third, Receipt)
        assert (third.key, third.replaced) == ("k", second.id)
        with pytest.raises(Conflict) as caught:
            await client.put("t", key="k", on_conflict="reject")
        assert (caught.value.outcome, caught.value.extra["id"]) == ("pending", third.id)
        for unique_for in ("1d", timedelta(hours=1), 5.5):
            await client.put("t", key="night", unique_for=unique_for)
        await client.put_many([Put(topic="t", key="night", unique_for=60)])
        assert [d.unique_ms for d in node.service.published[-4:]] == [86_400_000, 3_600_000, 5_500, 60_000]
        moved = await client.reschedule(topic="t", key="k", delay="2h")
        assert (moved.id, moved.deliver_at > third.deliver_at) == (third.id, True)
        info = await client.get(topic="t", key="k")
        assert (info.id, info.state, info.deliver_at) == (third.id, "scheduled", moved.deliver_at)
        assert [(one.old_deliver_at, one.new_deliver_at) for one in info.history] == [
            (third.deliver_at, moved.deliver_at)
        ]
        for _ in range(2):  # a repeated request finds the message moved
            later = await client.reschedule(third.id, shift="1h", expected=moved.deliver_at)
        assert later.deliver_at == moved.deliver_at + timedelta(hours=1)
        with pytest.raises(Conflict) as late:
            await client.reschedule(third.id, delay="9h", expected=moved.deliver_at)
        assert (late.value.outcome, "rescheduled or retried meanwhile" in str(late.value)) == ("moved", True)
        assert (await client.get(first.id)).tags == ["a", "b"]
        assert (await client.deliver_now(third.id)).deliver_at < third.deliver_at
        assert await client.cancel(topic="t", key="k") == "cancelled"
        with pytest.raises(Conflict) as caught:
            await client.deliver_now(third.id)
        assert (caught.value.outcome, caught.value.outcomes) == ("cancelled", None)


async def test_a_conflict_over_some_copies_has_the_outcome_of_each(node: Node) -> None:
    outcomes = {"t": "cancelled", "t~billing": "leased"}
    partial = too_late("cancelled", CancelOutcome.PARTIAL, outcomes)
    node.service.messages.cancel = AsyncMock(side_effect=partial)
    async with AsyncClient(node.url) as client:
        receipt = await client.put("t", "1", delay="1h")
        with pytest.raises(Conflict) as caught:
            await client.cancel(receipt.id)
        assert (caught.value.outcome, caught.value.outcomes) == ("partial", outcomes)


def test_the_blocking_twin(url: str) -> None:
    with Client(url) as client:
        receipt = client.put("a", {"n": 1})
        assert client.get(receipt.id).state == "ready"
        (message,) = client.receive("a", max=1)
        assert client.ack(message) == ["acked"]
        assert isinstance(client.put_many([Put(topic="a", body="two")])[0], Receipt)
        with pytest.raises(BadRequest):
            client.put("a/b")
        seen = []
        for message in client.consume("a"):
            seen.append((message.text(), message.attempt))
            with pytest.raises(RuntimeError), message:
                raise RuntimeError
            if len(seen) == 2:
                break
        assert seen == [("two", 1), ("two", 2)]


def test_the_synchronous_client_has_every_method_of_the_other() -> None:
    public = {name for name in dir(AsyncClient) if not name.startswith("_")}
    assert public - set(vars(Client)) == set()
    for name in public - {"work", "consume"}:
        own, others = getattr(Client, name), getattr(AsyncClient, name)
        assert own.__doc__ == others.__doc__
        assert list(signature(own).parameters.values())[1:] == list(signature(others).parameters.values())[1:]


def test_wrong_addresses_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="not served under a path"):
        Client("http://a/b")
