"""What clients of several shards see: the leader of a topic's shard is killed while they use nodes of another shard,
and one consumer takes topics of two shards."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from itertools import pairwise

import uvloop

from bench.cluster import Cluster, Void
from bench.load import Tally
from bench.result import Row, Setup, Target
from bench.rows.deliver import steady
from bench.rows.failure import complete, kill_and_watch, under_load
from bench.sharded import Sharded, sharded
from hadelay.client import AsyncClient
from hadelay.client.message import AsyncMessage

#: Messages per second of the consumer, its concurrency, seconds of a slice, and slices per side and round. The first
#: slice of each side warms it, and does not count.
_RATE, _CONCURRENCY, _SLICE_S, _SLICES = 2_000, 1_000, 20, 4
#: Topics by side: the shard of each.
_SIDES = {"one shard": (0, 0), "two shards": (0, 1)}


def kills(setup: Setup) -> Row:
    count = setup.many(100, 5)
    row = Row(
        "shards, kills",
        f"SIGKILL of the leader of a topic's shard, {count} times, while all clients use nodes of another shard: next "
        "due delivery, and the longest time in which no publish is answered",
        [Target(f"{figure}, worst", 600, at_most=True) for figure in ("next delivery", "without an answer")],
    )
    setup.say(f"{row.name}, {count} kills")
    with sharded(setup.directory / "ours", setup.port, 2) as whole:
        front, owner = whole.shards
        act = partial(_kill, owner, count, row)
        complete(owner, uvloop.run(under_load(front.addresses, act, whole.topics[1])), row, whole.topics[1])
    for figure in ("next delivery", "without an answer"):
        row.add(f"{figure}, worst", max(row.samples[figure]), "ms")
    return row


async def _kill(owner: Cluster, count: int, row: Row, tally: Tally) -> None:
    for _ in range(count):
        began = time.time() * 1000
        await kill_and_watch(owner, tally, 1, row)
        answers = [began, *(at for at in tally.stored_at if at > began), time.time() * 1000]
        row.add("without an answer", max(after - at for at, after in pairwise(answers)), "ms")


def consumer(setup: Setup) -> Row:
    row = Row(
        "shards, consumer",
        f"one consumer of the Python client, two topics, {_RATE:,} messages/s published through one node: lateness "
        "with topics of two shards against topics of one; slices by turns",
        [Target("p99, two shards to one", 1.2, at_most=True)],
    )
    for _ in setup.each_round(row.name):
        with sharded(setup.directory / "ours", setup.port, 2) as whole:
            topics = {side: [whole.name(n, f"t{at}") for at, n in enumerate(_SIDES[side])] for side in _SIDES}
            for number in range(setup.many(_SLICES, 2) + 1):
                for side in list(_SIDES)[:: -1 if number % 2 else 1]:
                    tally = uvloop.run(_consumed(whole, topics[side], setup.seconds(_SLICE_S)))
                    if len(tally.seen) != tally.published:
                        raise Void(f"{tally.published - len(tally.seen)} messages did not come ({side})")
                    if number:
                        row.add(f"p50, {side}", tally.late(0.5), "ms")
                        row.add(f"p99, {side}", tally.late(0.99), "ms")
    row.ratio("p99, two shards to one", "p99, two shards", "p99, one shard")
    return row


async def _consumed(whole: Sharded, topics: list[str], seconds: float) -> Tally:
    async def consume(tally: Tally, stop: asyncio.Event) -> None:
        async def handle(message: AsyncMessage) -> None:
            tally.received([{"id": message.id, "body": message.body}])
            tally.acked += await message.ack() == "acked"

        async with AsyncClient(whole.addresses) as client:
            consumer = client.consume(topics, concurrency=_CONCURRENCY)
            working = asyncio.create_task(consumer.work(handle))
            await stop.wait()
            consumer.stop()
            await working

    addresses = whole.shards[0].addresses[:1]
    return await steady(whole.shards[0], _RATE, seconds, addresses, topics=topics, consumer=consume)
