"""Schedules: a thousand that are due each second, a hundred thousand that are due in the same second, and as many of
which none is due."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, NamedTuple

import uvloop

from bench.cluster import Cluster, Void, cpu_seconds, rss_anon_mb, written_bytes
from bench.http1 import request
from bench.load import Session, Tally, consume, now_ms, publish, until
from bench.result import Row, Setup, Target
from bench.rows.deliver import gather_until_stopped, leader_first, nothing_early
from bench.rows.size import at_rest, written_out

TOPIC = "bench"
_EVERY_SECOND = 1_000
#: Requests under way at once while schedules are set.
_SETTERS = 64
#: Consumers of 100 messages at a time. Eight take 800 of the thousand that are due at one instant; how late the others
#: are then is the time of an ack and the next receive, of schedules' messages as of any others.
_CONSUMERS = 16
#: Schedules that are set and deleted before nodes are measured without any. The memory that requests take is then
#: taken, and the audit trail is full, which each checkpoint writes.
_WARM = 2_000
#: Interval of checkpoints while schedules are idle, in seconds, and number of checkpoints that are measured.
_CHECKPOINT_S, _CHECKPOINTS = 1, 5


class Occurrences(Tally):
    """Lateness by the times that the schedules ask for, and which (schedule, occurrence) came. The judge does not take
    the cluster's word for a time: an occurrence that no schedule asks for counts as wrong."""

    def __init__(self, start_ms: int, every_ms: int = 0) -> None:
        """start_ms: first time that the schedules ask for; every_ms: interval of the next ones, 0 for none."""
        super().__init__()
        self.start_ms, self.every_ms, self.wrong = start_ms, every_ms, 0
        self.came: set[tuple[str, str]] = set()

    def received(self, messages: list[dict[str, Any]]) -> None:
        now = time.time() * 1000
        self.last_at = now
        for message in messages:
            due = round(datetime.fromisoformat(message["occurrence"]).timestamp() * 1000)
            after = due - self.start_ms
            self.wrong += after < 0 or (after % self.every_ms if self.every_ms else after) != 0
            self.early += now < due
            self.late_ms.append(now - due)
            which = message["schedule"], message["occurrence"]
            self.duplicates += which in self.came
            self.came.add(which)

    def void(self) -> str:
        """Why the run says nothing; "" if all is well."""
        if not (self.early or self.duplicates or self.wrong):
            return ""
        return f"{self.early} early, {self.duplicates} twice, {self.wrong} at times that no schedule asks for"


async def _set_all(addresses: list[str], count: int, schedule: dict[str, Any]) -> None:
    await _ask_all(addresses, count, "PUT", json.dumps({"topic": TOPIC, "body": "x" * 200, **schedule}).encode())


async def _ask_all(addresses: list[str], count: int, method: str, body: bytes = b"") -> None:
    names: Iterator[int] = iter(range(count))

    async def some(first: int) -> None:
        session = Session(addresses, first)
        for n in names:
            await session.call(request(method, f"/v1/schedules/s{n}", body), 30)

    await asyncio.gather(*(some(n) for n in range(_SETTERS)))


async def _watched(cluster: Cluster, tally: Tally, seconds: float) -> float:
    """Receive and ack for so long, after some seconds that do not count; processor time of the leader in seconds."""
    addresses, stop = leader_first(cluster), asyncio.Event()
    consumers = [asyncio.create_task(consume(Session(addresses), tally, stop)) for _ in range(_CONSUMERS)]
    await asyncio.sleep(5)
    tally.late_ms = []
    leader = cluster.leader()
    before = cpu_seconds(leader.pid)
    await asyncio.sleep(seconds)
    took = cpu_seconds(leader.pid) - before
    await gather_until_stopped(consumers, stop)
    return took


async def each_second(cluster: Cluster, seconds: float) -> tuple[Occurrences, float]:
    """(occurrences, processor time of the leader in seconds)"""
    start_ms = now_ms() // 1000 * 1000
    schedule = {"every": "1s", "catch_up": "all", "start": start_ms}
    await _set_all(leader_first(cluster), _EVERY_SECOND, schedule)
    tally = Occurrences(start_ms, 1_000)
    return tally, await _watched(cluster, tally, seconds)


async def _published(cluster: Cluster, seconds: float) -> tuple[Tally, float]:
    """The same with as many messages that a client publishes: in batches of 100, due at full seconds."""
    tally, session, over = Tally(), Session(leader_first(cluster)), asyncio.Event()

    async def produce() -> None:
        while not over.is_set():
            second = now_ms() // 1000 * 1000
            for _ in range(_EVERY_SECOND // 100):
                await publish(session, tally, [second + 3_000] * 100)
            await asyncio.sleep(max(0.0, (second + 1_000 - now_ms()) / 1000))

    producer = asyncio.create_task(produce())
    took = await _watched(cluster, tally, seconds)
    over.set()
    await producer
    return tally, took


def schedules(setup: Setup) -> list[Row]:
    row = Row(
        "schedules", "1,000 schedules of one second each, delivered and acked, 10 min",
        [Target("rate", 950, 1_000), Target("lateness p99", 60, 30, at_most=True)],
    )  # fmt: skip
    seconds = setup.seconds(600)
    for _ in setup.each_round("schedules"):
        with setup.cluster() as cluster:
            tally, took = uvloop.run(each_second(cluster, seconds))
            if wrong := tally.void():
                raise Void(wrong)
            row.add("rate", len(tally.late_ms) / seconds, "/s")
            row.add("lateness p50", tally.late(0.5), "ms")
            row.add("lateness p99", tally.late(0.99), "ms")
            row.add("leader", took / max(len(tally.late_ms), 1) * 1e6, "µs")
            row.add("leader, of a core", took / seconds * 100, "%")
        with setup.cluster() as cluster:
            minute = setup.seconds(60)
            plain, took = uvloop.run(_published(cluster, minute))
            cluster.account([TOPIC], plain.published, plain.acked)
            nothing_early(plain)
            row.add("lateness p99, the same rate published", plain.late(0.99), "ms")
            row.add("leader, of a core, the same rate published", took / minute * 100, "%")
    return [row]


async def _crowd(cluster: Cluster, count: int) -> tuple[Occurrences, int, float]:
    """(occurrences, the instant, seconds that setting took)"""
    began = time.monotonic()
    due = (now_ms() // 1000 + 30 + count // 400) * 1000
    addresses, tally, stop = leader_first(cluster), Occurrences(due), asyncio.Event()
    await _set_all(addresses, count, {"at": [due]})
    took = time.monotonic() - began
    if now_ms() > due - 70_000 and count > 10_000:
        raise Void("setting the schedules took too long")
    await asyncio.sleep(max(0.0, (due - now_ms()) / 1000 - 3))
    consumers = [
        asyncio.create_task(consume(Session(addresses), tally, stop, most=1000, wait="30s")) for _ in range(16)
    ]
    await until(lambda: len(tally.came) >= count or any(t.done() for t in consumers), 90)
    stop.set()
    for task in consumers:
        task.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    return tally, due, took


def crowd(setup: Setup) -> list[Row]:
    row = Row(
        "crowd", "100,000 schedules due at one instant: all handed out within",
        [Target("seconds", 5, 3, at_most=True)],
    )  # fmt: skip
    count = setup.many(100_000, 5_000)
    for _ in setup.each_round("crowd"):
        with setup.cluster() as cluster:
            tally, due, took = uvloop.run(_crowd(cluster, count))
            if (wrong := tally.void()) or len(tally.came) != count:
                raise Void(f"{wrong or 'nothing early'}, {len(tally.came)} of {count}")
            row.add("seconds", (tally.last_at - due) / 1000, "s")
            row.add("set", count / took, "/s")
    return [row]


class _Resting(NamedTuple):
    """What the nodes take while no schedule is due: processor time in % of a core, written bytes, memory in MB, and
    bytes that a checkpoint writes after one publish; each of the node that takes most, but memory."""

    cpu: float
    written: int
    memory: list[float]
    checkpoint: float


def _resting(cluster: Cluster, setup: Setup) -> _Resting:
    # Quiet for long enough that no checkpoint is to come.
    written_out(cluster, setup.seconds(20))
    nodes = at_rest(cluster, setup.seconds(20))
    memory = [rss_anon_mb(node.pid) for node in cluster.nodes]
    checkpoints = [_checkpoint(cluster) for _ in range(_CHECKPOINTS)]
    return _Resting(
        max(cpu for cpu, _ in nodes), max(written for _, written in nodes), memory, statistics.median(checkpoints)
    )


def _checkpoint(cluster: Cluster) -> int:
    """Bytes that a node writes for one message and the checkpoint after it."""
    before = [written_bytes(node.pid) for node in cluster.nodes]
    uvloop.run(publish(Session(leader_first(cluster)), Tally(), [now_ms() + 86_400_000]))
    time.sleep(4 * _CHECKPOINT_S)
    return max(written_bytes(node.pid) - was for node, was in zip(cluster.nodes, before, strict=True))


def idle_schedules(setup: Setup) -> list[Row]:
    count = setup.many(100_000, 5_000)
    row = Row(
        "idle_schedules", f"{count:,} schedules of which none is due, against none: CPU per node, writes, memory",
        [
            Target("cpu", 2.0, at_most=True), Target("written", 0.0, at_most=True),
            Target("RssAnon more", 20, at_most=True), Target("checkpoint more", 1024, at_most=True),
        ],
    )  # fmt: skip
    # Months away.
    month = (datetime.now(UTC).month + 5) % 12 + 1
    schedule = {"cron": f"0 9 1 {month} *", "timezone": "Europe/Vienna"}
    for _ in setup.each_round("idle_schedules"):
        with setup.cluster(settings=(f"storage.checkpoint_interval_ms={_CHECKPOINT_S}s",)) as cluster:
            addresses = leader_first(cluster)
            uvloop.run(_set_all(addresses, _WARM, schedule))
            uvloop.run(_ask_all(addresses, _WARM, "DELETE"))
            none = _resting(cluster, setup)
            uvloop.run(_set_all(addresses, count, schedule))
            many = _resting(cluster, setup)
            more = max(now - before for before, now in zip(none.memory, many.memory, strict=True))
            row.add("cpu", many.cpu, "% of a core")
            row.add("cpu, none", none.cpu, "% of a core")
            row.add("written", float(many.written), "bytes")
            row.add("RssAnon more", more, "MB")
            row.add("checkpoint", many.checkpoint / 1024, "KiB")
            row.add("checkpoint more", (many.checkpoint - none.checkpoint) / 1024, "KiB")
    return [row]
