"""Message groups: what order costs, and a million blocked messages of one group in front of others."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import msgpack
import uvloop

from bench.cluster import Cluster, Void, cpu_seconds, get, rss_anon_mb
from bench.http1 import request
from bench.load import TOPIC, Session, Tally, consume, messages, now_ms, publish, put
from bench.result import Row, Setup, Target
from bench.rows.deliver import flow, gather_until_stopped, leader_first, nothing_early, steady

#: Number of groups that messages share, and a number with which each has a group of its own.
_SHARED, _OWN = 10_000, 1 << 60
#: Number of messages of the group that is handed out one by one; ten times as many where ten come at a time.
_LINE = 5_000
RATE = 2_000
#: Number of other groups beside the blocked one.
_OTHERS = 100_000


def in_order(cluster: Cluster) -> None:
    cluster.put_topic(TOPIC, group_concurrency=1, max_attempts=5)


async def _one_group(cluster: Cluster, seconds: float, most: int, count: int) -> Tally:
    """One consumer of one group: up to `most` messages are handed out when those before are acked. count: messages."""
    tally, stop, addresses = Tally(), asyncio.Event(), leader_first(cluster)
    session, due = Session(addresses), now_ms()
    for _ in range(0, count, 1000):
        await publish(session, tally, [due] * 1000, groups=1)
    consumer = asyncio.create_task(consume(Session(addresses), tally, stop, group_max=most))
    await asyncio.sleep(seconds)
    await gather_until_stopped([consumer], stop)
    return tally


def groups(setup: Setup) -> list[Row]:
    row = Row(
        "groups",
        "end to end as `e2e`, messages in groups of their own, or in 10,000, against none; one group, ten at once",
        [Target("own groups, ratio", 0.65), Target("10,000 groups, ratio", 0.5), Target("one group", 1_000)],
    )
    seconds = setup.seconds(30)
    for _ in setup.each_round("groups"):
        for name, count in (("no groups", 0), ("own groups", _OWN), ("10,000 groups", _SHARED)):
            with setup.cluster() as cluster:
                in_order(cluster)
                leader, began = cluster.leader(), time.monotonic()
                before = cpu_seconds(leader.pid)
                tally = uvloop.run(flow(cluster, seconds, groups=count))
                took, spent = time.monotonic() - began, cpu_seconds(leader.pid) - before
                cluster.account([TOPIC], tally.published, tally.acked)
                nothing_early(tally)
                row.add(f"{name}", tally.acked / took, "msg/s")
                row.add(f"{name}, leader CPU", spent / tally.acked * 1e6, "µs/msg")
        for name, most, count in (("one group", 10, _LINE * 10), ("one group, one by one", 1, _LINE)):
            with setup.cluster() as cluster:
                in_order(cluster)
                tally = uvloop.run(_one_group(cluster, seconds, most, count))
                cluster.account([TOPIC], tally.published, tally.acked)
                nothing_early(tally)
                row.add(name, tally.acked / seconds, "msg/s")
    row.ratio("own groups, ratio", "own groups", "no groups")
    row.ratio("10,000 groups, ratio", "10,000 groups", "no groups")
    return [row]


async def _block(cluster: Cluster, count: int) -> None:
    """`count` due messages of one group, of which a consumer holds the first for the whole run."""
    addresses, tally, due = leader_first(cluster), Tally(), now_ms()
    sessions = [Session(addresses) for _ in range(4)]

    async def fill(session: Session) -> None:
        for _ in range(count // (1000 * len(sessions))):
            await put(session, tally, [{**one, "group": "blocked"} for one in messages([due] * 1000)])

    await asyncio.gather(*(fill(session) for session in sessions))
    query = json.dumps({"max": 100, "wait": "10s", "lease": "1h"}).encode()
    poll = request("POST", f"/v1/topics/{TOPIC}/receive?redirect=false", query, accept="msgpack")
    leased = msgpack.unpackb(await sessions[0].call(poll, 30))["messages"]
    if len(leased) != 1 or tally.published != count:
        raise Void(f"{len(leased)} of {tally.published} messages of one group are handed out at once")


def blocked(setup: Setup) -> list[Row]:
    count = setup.many(1_000_000, 20_000)
    row = Row(
        "blocked",
        f"{RATE:,}/s in 100,000 groups beside {count:,} due messages of one blocked group, against without",
        [
            Target("p99 beyond the bound", 0, at_most=True),
            Target("p99 beyond the bound, after a kill", 0, at_most=True),
            Target("memory of the leader", 64, at_most=True),
        ],
    )
    seconds = setup.seconds(30)
    for _ in setup.each_round("blocked"):
        with setup.cluster() as cluster:
            in_order(cluster)
            leader = cluster.leader()
            alone = uvloop.run(steady(cluster, RATE, seconds, groups=_OTHERS))
            memory = rss_anon_mb(leader.pid)
            uvloop.run(_block(cluster, count))
            beside = uvloop.run(steady(cluster, RATE, seconds, groups=_OTHERS))
            row.add("memory of the leader", rss_anon_mb(leader.pid) - memory, "MB")
            cluster.end(leader, signal.SIGKILL)
            cluster.restart(leader)
            cluster.leader()
            after = uvloop.run(steady(cluster, RATE, seconds, groups=_OTHERS))
            tallies = (alone, beside, after)
            cluster.account([TOPIC], count + sum(t.published for t in tallies), sum(t.acked for t in tallies))
            waiting = get(f"{cluster.leader().http}/v1/topics/{TOPIC}")["blocked"]
            if waiting != count - 1:
                raise Void(f"{waiting} of {count - 1} messages are blocked at the end")
            bound = max(2 * alone.late(0.99), alone.late(0.99) + 10)
            for name, tally in (("alone", alone), ("beside", beside), ("after a kill", after)):
                row.add(f"p99, {name}", tally.late(0.99), "ms")
            row.add("p99 beyond the bound", max(0.0, beside.late(0.99) - bound), "ms")
            row.add("p99 beyond the bound, after a kill", max(0.0, after.late(0.99) - bound), "ms")
    return [row]
