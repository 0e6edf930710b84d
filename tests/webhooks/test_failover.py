"""Leaders that die, stop and are cut off while they call: nobody is called twice about a message without reason, and
none is forgotten."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from chaos.sim.cluster import SimCluster
from hadelay.codec.records import decode_record
from hadelay.ledger.state import Ledger
from hadelay.model import encode_id
from tests.webhooks.world import Call, World

TIMEOUT_MS = 1_000
#: Two timeouts and five seconds.
LEASE_S = 7.0
#: Clocks drift a little, and a lease begins with its commit, before the call.
SLACK_S = 1.0


def harm(world: World, rng: random.Random) -> None:
    """Something happens to the leader."""
    leader = world.settle()
    kind = rng.choice(("kill", "pause", "transfer", "nothing"))
    if kind == "kill":
        world.cluster.kill(leader.name)
        world.cluster.world.after(rng.uniform(0.5, 3.0), world.cluster.start, leader.name)
    elif kind == "pause":
        process = world.cluster.process(leader.name)
        assert process is not None
        process.runtime.pause()
        world.cluster.world.after(rng.uniform(0.5, 2.0), process.runtime.resume)
    elif kind == "transfer":
        leader.leadership.transfer(None, lambda error: None)


def reason_to_call_again(before: Call, after: Call) -> bool:
    """The first failed, or nobody could be told what came of it until its lease was over."""
    if before.answer is not None and before.answer.reason:
        return True
    return after.at - before.at >= LEASE_S - SLACK_S


@pytest.mark.parametrize("seed", range(8))
def test_calls_under_faults(seed: int) -> None:
    rng = random.Random(seed)
    world = World(SimCluster(seed))
    world.answer_s = lambda: rng.choice((0.002, 0.01, 0.1, 0.4))
    world.script["http://a/"] = ["200", "200", "200", "503", "200", "connection_refused", "200", "200", "hang"] * 8 + [
        "200"
    ]
    for topic in ("a", "b"):
        webhook = {"url": f"http://{topic}/", "timeout_ms": TIMEOUT_MS}
        world.put(topic, webhook=webhook, backoff=[100, 500], on_success="told")
    ids: list[int] = []
    for _ in range(12):
        for topic in ("a", "b"):
            bodies = [b"x"] * rng.randrange(1, 12)
            ids += world.publish(topic, *bodies, delay_ms=rng.choice((0, 0, 300, 2_000)))
        world.run(rng.uniform(0.0, 0.6))
        if rng.random() < 0.5:
            harm(world, rng)
    world.until(lambda: world.settle() and all(world.state(one) == "acked" for one in ids), 120)
    assert {call.id for call in world.calls} == set(ids)
    for one in ids:
        mine = [call for call in world.calls if call.id == one]
        for before, after in itertools.pairwise(mine):
            assert reason_to_call_again(before, after), (before, after)
        attempts = [call.attempt for call in mine]
        assert attempts == sorted(set(attempts))
    assert world.cluster.violations == []
    reported = callbacks(world.settle().ledger)
    assert sorted(one["id"] for one in reported) == sorted(map(encode_id, ids)), "one for each ack, also over faults"
    assert {(one["status"], one["body"]) for one in reported} == {(200, "said")}


def callbacks(ledger: Ledger) -> list[dict[str, Any]]:
    """Documents of the callbacks in the topic `told`."""
    found = []
    for hour in ledger.store.hours():
        rows = ledger.store.entries(hour, slice(0, ledger.store.count(hour)))
        for row in rows[rows["topic"] == ledger.topic("told").number]:  # type: ignore[union-attr]
            record = ledger.store.record(hour, int(row["offset"]), int(row["size"]))
            found.append(json.loads(decode_record(record).body))
    return found


def test_a_leader_that_stalled_before_its_hand_outs_were_recorded_calls_nobody() -> None:
    """In interval mode a message is fetched before its grant is committed."""
    world = World(SimCluster(3, sync="interval"))
    world.put("t", webhook={"url": "http://t/", "timeout_ms": TIMEOUT_MS})
    old = world.settle()
    world.until(lambda: world.hooks[old].pool.queues)
    (queue,) = world.hooks[old].pool.queues.values()
    ids = world.publish("t", *[b"x"] * 3, delay_ms=300)
    world.hooks[old].pool._may_call = lambda job: False  # type: ignore[method-assign]  # until this node is held up
    world.until(lambda: len(queue.jobs) == 3)
    process = world.cluster.process(old.name)
    assert process is not None
    process.runtime.pause()
    world.until(lambda: len(world.calls) == 3)
    del world.hooks[old].pool._may_call  # type: ignore[method-assign]
    process.runtime.resume()
    world.run(10.0)
    assert {call.node for call in world.calls} == {world.settle().name} != {old.name}
    assert sorted(call.id for call in world.calls) == sorted(ids)
    assert all(world.state(one) == "acked" for one in ids)
