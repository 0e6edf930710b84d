"""Reads for the pages: acks per consumer, reports of single topics."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hadelay.codec.formats import DISPATCH, INDEX, Rows
from hadelay.console.overview import _soon
from hadelay.console.render import Renderer
from hadelay.console.zones import zone_of
from hadelay.errors import NoLeader
from hadelay.model import Event
from hadelay.server.leadership import Leadership
from hadelay.server.service.overview import Overview
from tests.console.conftest import Browser
from tests.system.cluster import Cluster, until

NOW_MS = 1_000_000


class Logs:
    """Dispatch logs in which consumer 1 acks `rate` messages of topic 7 per second, and as many of topic 8."""

    def __init__(self, hours: dict[int, int], rate: int) -> None:
        self.counts, self.rate, self.reads = hours, rate, list[int]()

    def event_count(self, hour: int) -> int:
        return self.counts.get(hour, 0)

    def events(self, hour: int, numbers: slice, *, verify: bool) -> Rows:
        first, end, _ = numbers.indices(self.counts[hour])
        rows = np.zeros(end - first, DISPATCH)
        rows["event"], rows["consumer"], rows["index"] = Event.ACKED, 1, np.arange(first, end)
        rows["at_ms"] = NOW_MS - (self.counts[hour] - np.arange(first, end)) * 500 // self.rate
        self.reads.append(len(rows))
        return rows

    def entries(self, hour: int, indexes: Any, *, verify: bool) -> Rows:
        rows = np.zeros(len(indexes), INDEX)
        rows["topic"] = 7 + indexes % 2
        return rows


def overview_of(logs: Logs) -> Overview:
    ledger = SimpleNamespace(
        now_ms=NOW_MS, now_hour=100, topic=lambda name: SimpleNamespace(number=7),
        names=SimpleNamespace(name=lambda kind, number: f"consumer-{number}"),
    )  # fmt: skip
    found = Overview.__new__(Overview)
    node: Any = SimpleNamespace(ledger=ledger, clock=SimpleNamespace(ready=False), storage=SimpleNamespace(hours=logs))
    found._node = node
    return found


async def test_acks_are_counted_in_slices_and_up_to_a_limit() -> None:
    logs = Logs({100: 50_000, 99: 100, 60: 100}, rate=10)
    assert await overview_of(logs).acks("t") == {"consumer-1": 599 + 50}
    assert sum(logs.reads) < 4_000, "events before the last minute are not read"
    # Each of the 24 hours has 20,000 events of the last minute: the newest 100,000 of all are read, and scaled.
    logs, turns = Logs(dict.fromkeys(range(77, 101), 20_000), rate=200), 0
    counting = asyncio.create_task(overview_of(logs).acks("t"))
    while not counting.done():
        await asyncio.sleep(0)
        turns += 1
    assert abs(counting.result()["consumer-1"] - 24 * 200 * 60) < 24 * 200
    assert max(logs.reads) <= 2_000
    assert sum(logs.reads) <= 100_000 + 100
    assert turns >= 50


def test_the_page_of_a_topic_shows_acks_per_minute(node: Cluster, browser: Browser) -> None:
    node.publish_many("n1", "minutes", ["x"] * 3)
    found: list[Any] = []
    until(
        lambda: found.extend(node.receive("n1", "minutes", max=3, consumer="acker", wait="5s")) or len(found) == 3, "3"
    )
    node.settle("n1", "ack", found)
    browser.go("/console/topics/minutes")
    assert re.search(r"acker n1 .+ 0 3 ", browser.text)


def test_a_leader_reports_on_the_topics_that_a_page_asks_for() -> None:
    found: list[Any] = []
    delivery = SimpleNamespace(active_topics=lambda: [1, 2, 3], topic_reports=lambda some: dict.fromkeys(some, (1, 2)))
    stub: Any = SimpleNamespace(_delivery=delivery, leading=True)
    stub._report = partial(Leadership._report, stub)
    for numbers in (None, [3], []):
        Leadership._on_ready(stub, "n2", numbers, lambda answer, error: found.append(answer))
    assert [list(answer) for answer in found] == [[1, 2, 3], [3], []]


def test_pages_of_a_follower_count_ready_messages(cluster: Cluster) -> None:
    follower = cluster.followers()[0]
    for path in ("far", "far/subscriptions/copies"):
        assert cluster.ask(follower, "PUT", f"/v1/topics/{path}", {}).status == 200
    cluster.publish_many(follower, "far", ["x"] * 4)
    browser = Browser(cluster.urls[follower])
    until(
        lambda: re.search(r"copies 0 4 0 0", (browser.go("/console/topics/far"), browser.text)[1]), "copies are ready"
    )
    until(lambda: "Ready 4" in (browser.go("/console/topics/far~copies"), browser.text)[1], "the topic's own page")


def test_no_age_is_negative() -> None:
    """A lease may be younger than the time at which the page was made."""
    rows = [{"name": "shop-1", "leased": 2, "since_ms": NOW_MS + 40}]
    values = {"consumers": rows, "now_ms": NOW_MS, "receiver": ("", ""), "health": [], "all_grants": True}
    assert "0 ms ago" in Renderer("n1").block("consumers.html", values, zone_of(None))


async def test_visitors_share_a_count_of_what_falls_due_soon() -> None:
    counted = 0

    async def due(*range_: Any, stale: bool) -> tuple[list[int], list[int]]:
        nonlocal counted
        counted += 1
        await asyncio.sleep(0)
        return [90_000], [7]

    service = SimpleNamespace(access=SimpleNamespace(now_ms=lambda: 60_000), topics=SimpleNamespace(due=due))
    visit: Any = SimpleNamespace(site=SimpleNamespace(soon=(0.0, None)), service=service)
    found = await asyncio.gather(*(_soon(visit) for _ in range(20)))
    assert counted == 1
    assert found == [[("minute", 7), ("hour", 7), ("day", 7), ("month", 7)]] * 20


async def test_a_count_that_failed_is_made_again() -> None:
    async def due(*range_: Any, stale: bool) -> tuple[list[int], list[int]]:
        raise NoLeader("elections are on")

    service = SimpleNamespace(access=SimpleNamespace(now_ms=lambda: 0), topics=SimpleNamespace(due=due))
    visit: Any = SimpleNamespace(site=SimpleNamespace(soon=(0.0, None)), service=service)
    first = visit.site.soon
    for _ in range(2):
        with pytest.raises(NoLeader):
            await _soon(visit)
        assert visit.site.soon is not first
        first = visit.site.soon
