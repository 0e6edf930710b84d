"""Reads for the pages: acks per consumer, reports of single topics."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import numpy as np

from hadelay.codec.formats import DISPATCH, INDEX, Rows
from hadelay.model import Event
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
