"""What is more than a cluster can take, and what it promises then. Every function returns figures."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgpack

from bench import worst
from bench.http1 import Connection, request
from hadelay.http.bodies import SLICE
from hadelay.settings.cluster import Settings
from hadelay.settings.node import RaftSettings
from tests.overload.rig import MIB, REFUSALS, Rig

Figures = dict[str, float]
#: Receives that begin at once.
_AT_ONCE = 500
#: Names of topics that a batch makes at once.
_NAMES = 500
_PUBLISHES = 'hadelay_buffer_bytes{buffer="publish_queue"}'
_RECEIVES = "hadelay_http_waiting_receives"
#: What a storm may cost in memory (howto/overload): so many times those two limits, for what Python and malloc make of
#: them, and what has limits of its own.
_TIMES, _BESIDES = 4, 256 * MIB
_INFLIGHT, _ENTRY = RaftSettings().max_inflight_bytes, RaftSettings().max_entry_bytes


@dataclass(frozen=True)
class Scale:
    """How much of it; and what the nodes' limits are, which have to be the same as their settings."""

    queue_bytes: int = 64 * MIB
    reading_bytes: int = 64 * MIB
    max_waiting: int = 10_000
    metrics_topics: int = 1_000
    storm_clients: int = 1_000
    storm_bytes: int = 256 << 10
    batches: int = 64
    batch_bytes: int = 8 * MIB
    storm_s: float = 30.0
    topics: int = 1_000_000
    slow_s: float = 60.0
    stall_s: float = 8.0
    worst_bytes: int = 16 * MIB

    @property
    def settings(self) -> tuple[str, ...]:
        return (
            f"limits.publish_queue_bytes={self.queue_bytes}",
            f"http.max_reading_bytes={self.reading_bytes}",
            f"http.max_waiting={self.max_waiting}",
            f"limits.metrics_topics={self.metrics_topics}",
        )


FULL = Scale()
SMALL = Scale(
    queue_bytes=2 * MIB, reading_bytes=4 * MIB, max_waiting=120, metrics_topics=50, storm_clients=90,
    storm_bytes=128 << 10, batches=9, batch_bytes=1 * MIB, storm_s=1.5, topics=2_000, slow_s=2.0, stall_s=1.5,
    worst_bytes=5 * MIB,
)  # fmt: skip


def check_refusal(status: int, headers: Any, body: Any) -> None:
    """Nothing happened, and it says when to come again."""
    assert status in REFUSALS, (status, body)
    assert int(headers["Retry-After"]) >= 0
    assert body["retryable"] is True
    assert body["outcome_known"] is True


async def storm(rig: Rig, scale: Scale) -> Figures:
    """Clients far beyond capacity, who do not wait as they are told: yes, or a refusal that says when to come again;
    the queue stays under its limit; who consumes goes on; after it publishing is as before, and nothing is lost."""
    topic, answers, unknown, ids = f"storm-{os.urandom(3).hex()}", Counter[int](), 0, set[str]()
    before_ms = await rig.late_ms(f"{topic}-before")
    small = await rig.publish_surely(f"{topic}-beside", 20, "?delay=1s")
    await rig.publish_surely(topic, 1)
    end = time.monotonic() + scale.storm_s
    body, item = os.urandom(scale.storm_bytes), {"topic": topic, "body": os.urandom(scale.storm_bytes), "delay": "1h"}
    batch = msgpack.packb([item] * (scale.batch_bytes // scale.storm_bytes))
    stored = 1

    async def send(n: int, ask: Callable[[str], Awaitable[int]]) -> None:
        nonlocal stored, unknown
        await asyncio.sleep(random.random() * 0.2)
        while time.monotonic() < end:
            try:
                got = await ask(rig.names[n % len(rig.names)])
                stored += got
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                answers[0] += 1  # refused while it was still writing: the connection is closed, and the answer lost
                unknown += 1
            await asyncio.sleep(0.05)

    async def one(name: str) -> int:
        answer = await rig.publish(name, topic, body, "?delay=1h")
        answers[answer.status] += 1
        if answer.status == 201:
            ids.add(answer.body["id"])
            return 1
        check_refusal(*answer)
        return 0

    async def many(name: str) -> int:
        answer = await rig.ask(
            name, "POST", "/v1/messages:batch", batch, Content_Type="application/msgpack", Accept="application/json",
            Idempotency_Key=os.urandom(12).hex(),
        )  # fmt: skip
        answers[answer.status] += 1
        if answer.status != 200:
            check_refusal(*answer)
            return 0
        return sum("id" in result for result in answer.body["results"])

    async with rig.watched() as most:
        clients = [send(n, one) for n in range(scale.storm_clients)] + [send(n, many) for n in range(scale.batches)]
        work = asyncio.gather(*clients)
        await rig.drain(f"{topic}-beside", set(small))
        await work
        await rig.until(lambda: _empty(rig), "every queue empty")
    assert answers[201], answers
    assert sum(answers[status] for status in REFUSALS), f"nobody was refused: {answers}"
    assert most.buffers["publish_queue"] <= scale.queue_bytes
    assert most.buffers["reading"] <= scale.reading_bytes
    assert most.growth_mib * MIB <= _BESIDES + _TIMES * (scale.queue_bytes + scale.reading_bytes)
    after_ms = await rig.late_ms(f"{topic}-after")
    await _counted(rig, topic, stored, unknown * (scale.batch_bytes // scale.storm_bytes))
    for message_id in random.sample(sorted(ids), min(20, len(ids))):
        assert (await rig.ask(rig.names[0], "GET", f"/v1/messages/{message_id}")).body["state"] == "scheduled"
    assert (await rig.ask(rig.names[0], "DELETE", f"/v1/topics/{topic}?force=true")).status in (200, 204)
    return {
        "stored": stored, **{f"answered {status}": count for status, count in sorted(answers.items())},
        **{f"{buffer}, most MiB": size / MIB for buffer, size in most.buffers.items()},
        "memory grew by, MiB": most.growth_mib,
        "late before, ms": before_ms, "late after, ms": after_ms,
    }  # fmt: skip


async def _empty(rig: Rig) -> bool:
    return not any([(await rig.metrics(name))[_PUBLISHES] for name in rig.names])


async def _leased(rig: Rig, name: str, topic: str) -> int:
    found = (await rig.ask(name, "GET", f"/v1/topics/{topic}")).body
    return sum(found[state] for state in ("scheduled", "ready", "leased", "dead"))


async def _counted(rig: Rig, topic: str, sure: int, unsure: int) -> None:
    """Every node has so many of it."""

    async def agreed() -> list[int] | None:
        counts = [await _leased(rig, name, topic) for name in rig.names]
        return counts if len(set(counts)) == 1 else None

    count = (await rig.until(agreed, "equal counts"))[0]
    assert sure <= count <= sure + unsure, (sure, count, unsure)


async def many_topics(rig: Rig, scale: Scale) -> Figures:
    """Names beyond the limit are refused, and the others go on; a scrape and a list cost what they may."""
    prefix, most_topics = os.urandom(3).hex(), Settings().max_topics
    before = {name: rig.anonymous_mib(name) for name in rig.names}
    known = int((await rig.metrics(rig.names[0]))["hadelay_topics"])
    made = refused = 0
    for first in range(0, scale.topics, _NAMES):
        items = [{"topic": f"{prefix}-{n}", "body": "", "delay": "1h"} for n in range(first, first + _NAMES)]
        key = os.urandom(12).hex()

        async def stored(items: Any = items[: scale.topics - first], n: int = first // _NAMES, key: str = key) -> Any:
            name = rig.names[n % len(rig.names)]
            answer = await rig.ask(name, "POST", "/v1/messages:batch", items, Idempotency_Key=key)
            return answer if answer.status == 200 else None

        answer = await rig.until(stored, "a batch of new topics that is stored")
        for result in answer.body["results"]:
            if "error" in result:
                assert result["error"]["status"] == 429, result
                refused += 1
            else:
                made += 1
    assert made == min(scale.topics, most_topics - known)
    assert made + refused == scale.topics
    leader = await rig.leader()
    began = time.perf_counter()
    answer = await rig.ask(leader, "GET", "/metrics")
    scrape_s = time.perf_counter() - began
    lines = answer.body.decode().splitlines()
    shown = [line for line in lines if line.startswith("hadelay_topic_messages") and f'"{prefix}-' in line]
    assert 0 < len(shown) <= 4 * scale.metrics_topics
    assert any('topic="(other)"' in line for line in lines)
    assert (await rig.metrics(rig.names[0]))["hadelay_topics"] == known + made
    began = time.perf_counter()
    page = await rig.ask(leader, "GET", "/v1/topics")
    list_s = time.perf_counter() - began
    assert len(page.body["topics"]) == known + made
    assert await rig.leader() == leader, "a list of all topics deposed the leader"
    await rig.late_ms(f"{prefix}-{random.randrange(made)}")
    growth = max(rig.anonymous_mib(name) - before[name] for name in rig.names)
    return {
        "made": made, "refused": refused, "memory grew by, MiB": growth, "bytes per topic": growth * MIB / made,
        "scrape, ms": scrape_s * 1000, "scrape, KiB": len(answer.body) / 1024, "list of all, ms": list_s * 1000,
    }  # fmt: skip


async def waiting_consumers(rig: Rig, scale: Scale) -> Figures:
    """As many receives wait as may, on one node; then on three: one more is told to come again, what falls due reaches
    them, each message one of them; and when they are gone, so are their descriptors."""
    figures: Figures = {}
    leader = await rig.leader()
    for where, spread in (("one node", [leader]), ("three nodes", rig.names)):
        figures |= {f"{what}, {where}": n for what, n in (await _wait(rig, leader, spread, scale)).items()}
    return figures


async def _wait(rig: Rig, leader: str, spread: list[str], scale: Scale) -> Figures:
    topic, many = f"waiting-{os.urandom(3).hex()}", scale.max_waiting
    assert (await rig.ask(leader, "PUT", f"/v1/topics/{topic}", {})).status == 200
    fds = {name: rig.descriptors(name) for name in rig.names}
    memory = {name: rig.anonymous_mib(name) for name in rig.names}
    path, got, answers = f"/v1/topics/{topic}/receive?redirect=false", list[Any](), Counter[int]()

    async def consume(n: int) -> None:
        options = json.dumps({"max": 1, "wait": "60s", "lease": "60s", "consumer": f"c{n % 50}"}).encode()
        connection = await Connection.open(rig.urls[spread[n % len(spread)]])
        try:
            while True:
                status, answer = await connection.send(request("POST", path, options))
                answers[status] += 1
                if status == 200:
                    got.extend(json.loads(answer)["messages"])
                else:  # the leader changed, perhaps
                    assert status in REFUSALS, answer
                    await asyncio.sleep(1.0)
        finally:
            connection.close()

    async def all_wait() -> bool:
        waiting = [(await rig.metrics(name))[_RECEIVES] for name in rig.names]
        return max(waiting) >= len(tasks)

    began, tasks = time.perf_counter(), list[asyncio.Task[None]]()
    while len(tasks) < many:
        few = range(len(tasks), min(len(tasks) + _AT_ONCE, many))
        tasks += [asyncio.ensure_future(consume(n)) for n in few]
        await rig.until(all_wait, f"{len(tasks)} receives wait")
    figures = {
        "waiting": float(many), "taken up in, s": time.perf_counter() - began,
        "KiB of memory each": max(rig.anonymous_mib(n) - memory[n] for n in rig.names) * 1024 / many,
        "descriptors each": max(rig.descriptors(n) - fds[n] for n in rig.names) / many,
    }  # fmt: skip
    leader = await rig.leader()
    check_refusal(*await rig.ask(leader, "POST", path, {"wait": "1s"}))
    messages = min(50, many // 2)
    ids = set(await rig.publish_surely(topic, messages, "?delay=1s"))

    async def all_came() -> bool:
        return len(got) >= messages

    await rig.until(all_came, f"{messages} messages reach who waits")
    assert sorted(message["id"] for message in got) == sorted(ids)
    figures["late, ms"] = sorted(message["late_ms"] for message in got)[messages // 2]
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in ended), Counter(map(repr, ended))

    async def all_gone() -> bool:
        waiting = [(await rig.metrics(name))[_RECEIVES] for name in rig.names]
        return not any(waiting) and all(rig.descriptors(name) <= fds[name] + 20 for name in rig.names)

    await rig.until(all_gone, "nobody waits, and descriptors are closed")
    return figures


async def slow_follower(rig: Rig, scale: Scale) -> Figures:
    """A follower that is ten times slower: the other two go on, what is kept for it is bounded, and it catches up."""
    topic = f"slow-{os.urandom(3).hex()}"
    leader = await rig.leader()
    slow = next(name for name in rig.names if name != leader)
    items = [{"topic": topic, "body": "x" * 1_000, "delay": "1h"} for _ in range(100)]
    stored, sent, lag = 0, 0.0, 0.0
    async with rig.watched() as most:
        with rig.broken("starve", slow):
            end = time.monotonic() + scale.slow_s
            while time.monotonic() < end:
                answer = await rig.ask(
                    leader, "POST", "/v1/messages:batch", items, Idempotency_Key=os.urandom(12).hex()
                )
                assert answer.status == 200, answer
                stored += sum("id" in result for result in answer.body["results"])
                found = await rig.metrics(leader)
                sent = max(sent, found['hadelay_buffer_bytes{buffer="replication"}'])
                lag = max(lag, found[f'hadelay_raft_peer_lag_entries{{peer="{slow}"}}'])
    assert sent <= 2 * (_INFLIGHT + _ENTRY)
    assert await rig.leader() == leader, "a slow follower deposed the leader"
    began = time.perf_counter()
    await rig.equal()
    await _counted(rig, topic, stored, 0)
    return {
        "stored": stored, "replication, most MiB": sent / MIB, "lag, most entries": lag,
        "memory grew by, MiB": most.growth_mib, "caught up in, s": time.perf_counter() - began,
    }  # fmt: skip


async def stalled_disk(rig: Rig, scale: Scale) -> Figures:
    """A disk on which every sync takes seconds: the leader's, then all. Every answer is definite or says that it is
    not; afterwards everything goes on by itself, and what was answered yes comes, once."""
    topic, ids, answers = f"stalled-{os.urandom(3).hex()}", set[str](), Counter[int]()

    async def publish(until: float) -> None:
        while time.monotonic() < until:
            answer = await rig.publish(random.choice(rig.names), topic, query="?delay=1s")
            answers[answer.status] += 1
            if answer.status in (200, 201):
                ids.add(answer.body["id"])
            elif answer.status != 504:
                check_refusal(*answer)
            else:
                assert answer.body["outcome_known"] is False
            await asyncio.sleep(0.05)

    figures: Figures = {}
    leader = await rig.leader()
    for what, hit in (("leader", [leader]), ("all", rig.names)):
        before = len(ids)
        async with rig.watched() as most:
            with rig.broken("slow-sync", *hit, ms=round(scale.stall_s * 1000)):
                await asyncio.gather(*(publish(time.monotonic() + 2 * scale.stall_s) for _ in range(8)))
        began = time.perf_counter()
        await rig.ready()
        ids |= set(await rig.publish_surely(topic, 5))
        figures |= {
            f"stored while it stood ({what})": len(ids) - before - 5,
            f"memory grew by, MiB ({what})": most.growth_mib,
            f"recovered in, s ({what})": time.perf_counter() - began,
        }
    await rig.drain(topic, ids)
    await rig.equal()
    return figures | {f"answered {status}": count for status, count in sorted(answers.items())}


async def worst_requests(rig: Rig, scale: Scale) -> Figures:
    """The worst request of every route, one after the other, to a leader that has other work: each is answered as it
    should be, no slice of work is larger than it may be, and the leader stays."""
    topic, busy, beside = f"beside-{os.urandom(3).hex()}", True, Counter[int]()
    leader = await rig.leader()
    await rig.publish_surely("t", 50)

    async def use(path: str, body: bytes) -> None:
        """One request after the other, in one piece each: the room for bodies is for the large ones."""
        connection = await Connection.open(rig.urls[rig.names[0]])
        while busy:
            status, answer = await connection.send(request("POST", path, body))
            assert status in (200, 201, 504, *REFUSALS), answer
            beside[status] += 1
        connection.close()

    async def deposes(sent: worst.Worst) -> bool:
        nonlocal leader
        leader = await rig.leader()
        term = (await rig.ask(leader, "GET", "/v1/cluster")).body["term"]
        head = {"Content_Type": sent.kind} if sent.kind else {}
        answer = await rig.ask(leader, sent.method, sent.path, sent.body or None, **head)
        now = (await rig.ask(leader, "GET", "/v1/cluster")).body
        if (now["leader"], now["term"]) != (leader, term):
            return True
        # What it publishes may find no room beside what others publish.
        assert answer.status in (sent.status, 503 if sent.status == 200 else 0), (sent.name, answer)
        assert not sent.words or sent.words in answer.body["detail"], (sent.name, answer)
        return False

    paths = {f"/v1/topics/{topic}/messages": b"x", f"/v1/topics/{topic}/receive?redirect=false": b'{"wait":"50ms"}'}
    users = asyncio.gather(*(use(path, body) for path, body in paths.items() for _ in range(3)))
    changes = 0
    try:
        for sent in itertools.chain(worst.batches(scale.worst_bytes), worst.others()):
            tries = 1
            while await deposes(sent):  # a machine that is busy otherwise does that now and then
                changes += 1
                tries += 1
                assert tries <= 3, f"{sent.name} deposed the leader, time after time"
    finally:
        busy = False
        await users
    largest = max([(await rig.metrics(name))["hadelay_http_slice_max_bytes"] for name in rig.names])
    assert SLICE // 2 < largest <= SLICE
    assert beside[201]
    return {"largest slice, KiB": largest / 1024, "changes of leader": changes, "published beside": beside[201]}


SCENARIOS: dict[str, Callable[[Rig, Scale], Awaitable[Figures]]] = {
    "storm": storm,
    "worst": worst_requests,
    "topics": many_topics,
    "consumers": waiting_consumers,
    "slow": slow_follower,
    "stalled": stalled_disk,
}
