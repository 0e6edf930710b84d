"""What the client raises at once, what it tries again, and how it follows the leader."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from hadelay.api.problems import error_of
from hadelay.api.service import Leader
from hadelay.client import AsyncClient, Unreachable
from hadelay.client.connector import Connector
from hadelay.client.transport import Transport
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
from tests.http.conftest import Make, Node, until

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
        (lambda c: c.transfer_leader("n9"), BadRequest),
    ],
)
async def test_refusals_are_raised_at_once(node: Node, ask: Any, kind: type[HadelayError]) -> None:
    async with AsyncClient(node.url) as client:
        with pytest.raises(kind) as caught:
            await asyncio.wait_for(ask(client), 5)
    assert type(caught.value) is kind
    assert caught.value.detail
    assert not caught.value.retryable


async def test_the_subject_of_a_conflict(node: Node) -> None:
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


@pytest.mark.parametrize(
    "error", [NoLeader("x", retry_after_ms=20), Overloaded("x", retry_after_ms=20), OutcomeUnknown("x")]
)
async def test_retried_until_it_works(node: Node, error: HadelayError) -> None:
    times, service, publish = 2, node.service, node.service.publish

    def refused(drafts: Any, request_key: Any, done: Any, by: str = "") -> None:
        nonlocal times
        times -= 1
        if not times:
            service.publish = publish
        if not error.outcome_known:  # it did happen
            publish(drafts, request_key, lambda *_: None, by)
        done(None, error)

    service.publish = refused
    async with AsyncClient(node.url) as client:
        receipt = await client.put("a", b"x")
    assert times == 0
    assert len(service.messages_now) == 1  # the key made the repetition harmless
    assert receipt.duplicate is (not error.outcome_known)


async def test_patience_ends(node: Node) -> None:
    node.service.fail = NoLeader("elections are on", retry_after_ms=20)
    async with AsyncClient(node.url, timeout=0.5) as client:
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
        await until(lambda: bool(node.service.deferred))
        node.service.deferred = None
        node.service.fail = NoLeader("elections are on")
        for connection in list(node.server._servers[0].connections):
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
    first.service.hold()
    async with AsyncClient([first.url, second.url]) as client:
        client._transport._at = 0
        putting = asyncio.create_task(client.put("a", b"x"))
        await until(lambda: bool(first.service.deferred))
        for connection in list(first.server._servers[0].connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await putting
        assert len(second.service.published) == 1
        first.service.deferred = None


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
        follower.service.leader = None
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
        assert not client._transport.leaders
        avoided = client._transport._avoided
        avoided.update(dict.fromkeys(avoided, 0.0))
        await client.receive("a")
        assert len(looked_up) == 2  # and looks again after a while


async def test_a_poll_cut_off_is_asked_again_under_the_same_id(make_node: Make) -> None:
    first, second = await make_node(), await make_node()
    async with AsyncClient([first.url, second.url]) as client:
        client._transport._at = 0
        polling = asyncio.create_task(client.receive("a", wait=30))
        await until(lambda: first.server.waiting.count == 1)
        await first.server.stop(0)
        await until(lambda: second.server.waiting.count == 1)
        await second.ask("POST", "/v1/topics/a/messages", b"x")
        assert len(await polling) == 1
    assert first.service.polls[0].request_id == second.service.polls[0].request_id


async def test_a_try_that_the_time_limit_cuts_short_hides_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = 0

    async def fail(self: Transport, request: object, read: object, within_s: float, *_: object) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise Unreachable("the server does not speak TLS")
        await asyncio.sleep(within_s)
        raise Unreachable("no connection in time")

    monkeypatch.setattr(Transport, "_try", fail)
    async with AsyncClient("http://127.0.0.1:1", timeout=0.5) as client:
        with pytest.raises(Unreachable, match="speak TLS"):
            await client.put("t", "x")
    assert tries == 2
