"""The client against real servers over a service in memory: what it sends, retries, follows and gives back."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from inspect import signature
from typing import Any

import aiohttp
import msgspec
import pytest

import hadelay
from hadelay.api.problems import error_of
from hadelay.api.service import Leader
from hadelay.client import AsyncClient, AsyncMessage, Client, Put, Receipt, Unreachable, sync
from hadelay.client.connector import Connector
from hadelay.client.consumer import Consumer
from hadelay.client.message import reason_of
from hadelay.client.transport import HttpAnswer, addresses
from hadelay.errors import (
    BadRequest,
    Conflict,
    DiskFull,
    HadelayError,
    Impossible,
    NoLeader,
    NotFound,
    OutcomeUnknown,
    Overloaded,
)
from hadelay.http.app import HttpServer
from hadelay.settings.node import HttpConfig
from tests.http.conftest import MAX_DELAY_MS, Make, Node, until
from tests.http.memory_service import MemoryService


def test_what_users_import() -> None:
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
        with pytest.raises(ValueError, match="address"):
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
        ({}, (0, True)),
        ({"delay": "15m"}, (900_000, True)),
        ({"delay": 0.25}, (250, True)),
        ({"delay": timedelta(hours=1)}, (3_600_000, True)),
        ({"at": datetime(2026, 11, 20, 18, tzinfo=UTC)}, (1_795_197_600_000, False)),
        ({"at": datetime(2026, 11, 20, 18, 0, 0, 1500, timezone(timedelta(hours=8)))}, (1_795_168_800_002, False)),
        ({"at": "2026-11-20T18:00:00+08:00"}, (1_795_168_800_000, False)),
        ({"at": 1_795_168_800_000}, (1_795_168_800_000, False)),
    ],
)
async def test_when(node: Node, options: dict[str, Any], expected: tuple[int, bool]) -> None:
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


async def test_a_large_body(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put("orders", b"x" * (1 << 20))
    assert len(node.service.published[0].body) == 1 << 20


async def test_topics_due_cluster(node: Node) -> None:
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
        assert await client.transfer_leader("n2") == "n2"
        assert (await client.hours()).hours[0].log.entries == 3
        assert "anonymous" in (await client.names()).consumers
        assert (await client.ready()).status == "ok"
        node.service.leader = None
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
_TOPIC = {"topic": "t", "scheduled": 0, "ready": 0, "leased": 0, "dead": 0}


@pytest.mark.parametrize(
    ("call", "answer", "method", "path", "body"),
    [
        (lambda c: c.cancel("1"), {"outcome": "cancelled"}, "DELETE", "/v1/messages/1", None),
        (lambda c: c.cancel(topic="t", key="a/ü"), {"outcome": "cancelled"}, "DELETE", "/v1/topics/t/keys/a%2F%C3%BC",
         None),
        (lambda c: c.reschedule("1", delay="2h"), _MOVED, "PATCH", "/v1/messages/1", {"delay": "2h"}),
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
async def test_what_is_sent(call: Any, answer: Any, method: str, path: str, body: Any) -> None:
    async with AsyncClient() as client:
        wire = client._transport.request = Wire(answer)  # type: ignore[method-assign]
        await call(client)
    assert wire.asked == [(method, path, body)]


@pytest.mark.parametrize("name", [{}, {"topic": "t"}, {"key": "k"}, {"message_id": "1", "topic": "t", "key": "k"}])
async def test_a_message_is_named_one_way(name: dict[str, str]) -> None:
    async with AsyncClient() as client:
        with pytest.raises(ValueError, match="by its id, or by topic and key"):
            await client.get(**name)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="give either delay or at"):
            await client.reschedule("1")


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
        assert (await client.get(first.id)).tags == ["a", "b"]
        assert (await client.deliver_now(third.id)).deliver_at < third.deliver_at
        assert await client.cancel(topic="t", key="k") == "cancelled"
        with pytest.raises(Conflict) as caught:
            await client.deliver_now(third.id)
        assert caught.value.outcome == "cancelled"


# ---- errors


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda c: c.put("a/b", b""), BadRequest),
        (lambda c: c.put("a", delay="900d"), Impossible),
        (lambda c: c.put("a", delay=-1), BadRequest),
        (lambda c: c.get("0000000000000"), NotFound),
        (lambda c: c.get("x/y"), BadRequest),
        (lambda c: c.receive([]), BadRequest),
        (lambda c: c.topic("none"), NotFound),
        (lambda c: c.transfer_leader("n9"), NotFound),
    ],
)
async def test_refusals_are_raised_at_once(node: Node, ask: Any, kind: type[HadelayError]) -> None:
    async with AsyncClient(node.url) as client:
        with pytest.raises(kind) as caught:
            await asyncio.wait_for(ask(client), 5)
    assert type(caught.value) is kind
    assert caught.value.detail
    assert not caught.value.retryable


async def test_what_a_conflict_is_about(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        receipt = await client.put("a")
        await client.receive("a")
        with pytest.raises(Conflict) as caught:
            await client.cancel(receipt.id)
    assert caught.value.extra["outcome"] == "leased"


def test_errors_of_servers_that_know_more() -> None:
    error = error_of({"type": "brand-new", "detail": "d", "retryable": True, "outcome_known": False}, 409)
    assert isinstance(error, Conflict)
    assert (error.retryable, error.outcome_known) == (True, False)
    assert type(error_of({"type": "brand-new"}, 418)) is HadelayError
    assert type(error_of({"type": "damaged-file", "detail": "f"}, 500)) is HadelayError


# ---- fail-over and retries


class Failing(MemoryService):
    """Refuses the first `times` publishes with `error`."""

    times = 2
    error: HadelayError = NoLeader("elections are on", retry_after_ms=20)

    def publish(self, drafts: Any, request_key: Any, done: Any) -> None:
        if self.times:
            self.times -= 1
            if not self.error.outcome_known:  # it did happen
                super().publish(drafts, request_key, lambda *_: None)
            done(None, self.error)
        else:
            super().publish(drafts, request_key, done)


@pytest.mark.parametrize(
    "error", [NoLeader("x", retry_after_ms=20), Overloaded("x", retry_after_ms=20), OutcomeUnknown("x")]
)
async def test_retried_until_it_works(error: HadelayError) -> None:
    service = Failing()
    service.error = error
    server = HttpServer(service, HttpConfig(listen="127.0.0.1:0"), MAX_DELAY_MS)
    url = await server.start()
    async with AsyncClient(url) as client:
        receipt = await client.put("a", b"x")
    assert service.times == 0
    assert len(service.published) == 1  # the key made the repetition harmless
    assert receipt.duplicate is (not error.outcome_known)
    await server.stop(0)


async def test_patience_ends(node: Node) -> None:
    node.service.fail = NoLeader("elections are on", retry_after_ms=20)
    async with AsyncClient(node.url, timeout=0.1) as client:
        with pytest.raises(NoLeader, match="elections"):
            await client.put("a")
        node.service.fail = Overloaded("full", retry_after_ms=60_000)
        with pytest.raises(Overloaded):
            await client.put("a", timeout=30)  # not worth waiting: it would be too late
        node.service.fail = DiskFull("full")
        with pytest.raises(DiskFull):
            await client.put("a", timeout=30)


async def test_a_node_that_does_not_answer(node: Node) -> None:
    node.service.hold()
    async with AsyncClient(node.url, timeout=0.1) as client:
        with pytest.raises(OutcomeUnknown):
            await client.put("a")
    node.service.release()


async def test_an_unknown_outcome_stays_unknown(node: Node) -> None:
    """The first try may have published; that a later one finds nobody does not make it certain that nothing did."""
    node.service.hold()
    async with AsyncClient(node.url, timeout=0.5) as client:
        putting = asyncio.create_task(client.put("a"))
        await until(lambda: bool(node.service.held))
        node.service.held = None
        node.service.fail = NoLeader("elections are on")
        for connection in list(node.server._server.connections):  # type: ignore[union-attr]
            connection.transport.abort()  # type: ignore[union-attr]
        with pytest.raises(OutcomeUnknown):
            await putting


async def test_nobody_there() -> None:
    async with AsyncClient("127.0.0.1:1", timeout=0.5) as client:
        with pytest.raises(Unreachable, match="is a node running there"):
            await client.put("a")


async def test_fail_over_to_the_next_address(make_node: Make) -> None:
    node = await make_node()
    async with AsyncClient(f"127.0.0.1:1,{node.url},127.0.0.1:2") as client:
        for _ in range(5):
            await client.put("a")
    assert len(node.service.published) == 5


async def test_a_node_that_dies_in_the_middle(make_node: Make) -> None:
    first, second = await make_node(), await make_node()
    second.service.keys = first.service.keys  # one cluster, as far as keys go
    first.service.hold()
    async with AsyncClient([first.url, second.url]) as client:
        client._transport._at = 0
        putting = asyncio.create_task(client.put("a", b"x"))
        await until(lambda: bool(first.service.held))
        for connection in list(first.server._server.connections):  # type: ignore[union-attr]
            connection.transport.abort()  # type: ignore[union-attr]
        await putting
        assert len(second.service.published) == 1
        first.service.held = None


async def test_receives_follow_the_leader(make_node: Make) -> None:
    follower, leader = await make_node(), await make_node()
    follower.service.leader = Leader("n2", leader.url, False)
    async with AsyncClient(follower.url) as client:
        await client.receive("a")
        await client.receive("a")
        assert len(leader.service.polls) == 2
        assert follower.server.metrics.requests["receive_topics", 307] == 1  # it remembered
        # Leadership moves back; the old leader is gone.
        await leader.server.stop(0)
        follower.service.leader = Leader("n1", "", True)
        await client.receive("a")
    assert len(follower.service.polls) == 1
    assert len({p.request_id for p in leader.service.polls}) == 2


async def test_a_leader_whose_name_means_nothing_here_is_asked_through_the_follower(
    make_node: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes resolve what they advertise; this client does not."""
    follower, leader = await make_node(), await make_node()
    follower.service.leader = Leader("n2", leader.url.replace("127.0.0.1", "localhost"), False)
    looked_up: list[str] = []

    async def resolve(self: Any, host: str, *options: Any, **more: Any) -> Any:
        if host == "localhost":
            looked_up.append(host)
            raise OSError("Name or service not known")
        return await aiohttp.TCPConnector._resolve_host(self, host, *options, **more)

    monkeypatch.setattr(Connector, "_resolve_host", resolve, raising=False)
    async with AsyncClient(follower.url) as client:
        await client.put("a", b"x")
        await client.receive("a")
        await client.receive("a")
        assert len(leader.service.polls) == 2
        assert len(looked_up) == 1  # it remembered
        assert client._transport.leader is None
        avoided = client._transport._avoided
        avoided.update(dict.fromkeys(avoided, 0.0))
        await client.receive("a")
        assert len(looked_up) == 2  # and looks again after a while


async def test_a_poll_cut_off_is_asked_again_under_the_same_id(make_node: Make) -> None:
    first, second = await make_node(), await make_node()
    async with AsyncClient([first.url, second.url]) as client:
        client._transport._at = 0
        polling = asyncio.create_task(client.receive("a", wait=30))
        await until(lambda: first.server.waiting == 1)
        await first.server.stop(0)
        await until(lambda: second.server.waiting == 1)
        await second.ask("POST", "/v1/topics/a/messages", b"x")
        assert len(await polling) == 1
    assert first.service.polls[0].request_id == second.service.polls[0].request_id


# ---- consuming


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
    assert {m.state for m in node.service.stored.values()} == {"acked"}
    assert max(poll.max for poll in node.service.polls) == 4


def test_the_reason_of_an_exception() -> None:
    assert reason_of(ValueError("no\nsuch card")) == "ValueError: no such card"
    assert reason_of(KeyError()) == "KeyError"
    assert len(reason_of(ValueError("ü" * 200)).encode()) <= 128


async def test_no_more_than_concurrency_are_held(node: Node) -> None:
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
        await until(lambda: all(m.state == "acked" for m in node.service.stored.values()))
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
        await until(lambda: all(m.state == "acked" for m in node.service.stored.values()))
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
    assert sorted((m.state, m.attempt) for m in node.service.stored.values()) == [
        ("acked", 1), ("acked", 1), ("scheduled", 0),
    ]  # fmt: skip


@pytest.mark.parametrize("again", [False, True], ids=["after the time for it", "cancelled again"])
async def test_what_is_not_finished_goes_back(node: Node, again: bool) -> None:
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
    (message,) = node.service.stored.values()
    assert (message.state, node.service.reason, node.service.count) == ("scheduled", "the consumer stopped", False)


def test_what_is_in_hand_goes_back_when_the_event_loop_ends(url: str) -> None:
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
        if (told := next(self.receives, None)) is not None:
            return await told()
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


async def test_what_the_last_poll_was_granted_goes_back_in_one_request() -> None:
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
    await until(lambda: len(consumer.held) == 2)
    consumer.stop()
    handling.cancel()
    await asyncio.gather(handling, return_exceptions=True)
    await consumer.close()
    assert settled == []
    assert sorted(lease for leases, count in client.settled for lease in leases if not count) == [
        "fetched", "granted", "in hand",
    ]  # fmt: skip


async def test_what_no_handler_began_with_goes_back() -> None:
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
                (stored,) = node.service.stored.values()
                assert stored.until_ms > node.service.now_ms()
            break
    assert stored.state == "acked"
    assert stored.attempt == 1


async def test_leaving_the_loop_gives_the_rest_back(node: Node) -> None:
    async with AsyncClient(node.url) as client:
        await client.put_many([Put(topic="a")] * 10)
        consumer = client.consume("a", concurrency=10)
        async for message in consumer:
            async with message:
                break
        await consumer.close()
        assert sorted(m.state for m in node.service.stored.values()) == ["acked"] + ["scheduled"] * 9


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
    await until(lambda: bool(node.service.stored) and all(m.state == "acked" for m in node.service.stored.values()))
    await until(lambda: node.server.waiting == 1)
    await client.close()
    assert await asyncio.wait_for(consuming, 5) == 1
    await until(lambda: node.server.waiting == 0)


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


# ---- the blocking twin


@pytest.fixture
def url() -> Iterator[str]:
    """A server in a thread of its own, since these tests block."""
    loop = asyncio.new_event_loop()
    server = HttpServer(MemoryService(), HttpConfig(listen="127.0.0.1:0"), MAX_DELAY_MS)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)
    asyncio.run_coroutine_threadsafe(server.stop(0), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.run_until_complete(_all_hung_up())
    loop.close()


async def _all_hung_up() -> None:
    """Who was accepted while the server stopped has hung up by now: that is read, and the connection closed."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=10)
    for _ in range(20):
        await asyncio.sleep(0)


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


def test_it_has_every_method_of_the_other() -> None:
    public = {name for name in dir(AsyncClient) if not name.startswith("_")}
    assert public - set(vars(Client)) == set()
    for name in public - {"work", "consume"}:
        own, others = getattr(Client, name), getattr(AsyncClient, name)
        assert own.__doc__ == others.__doc__
        assert list(signature(own).parameters.values())[1:] == list(signature(others).parameters.values())[1:]


def test_wrong_addresses_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="expected an address"):
        Client("http://a/b")
