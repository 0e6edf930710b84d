"""What callbacks cost where a topic asks for them."""

from __future__ import annotations

import time

import uvloop

from bench.cluster import cpu_seconds
from bench.load import TOPIC
from bench.result import Row, Setup
from bench.rows.deliver import flow, nothing_early

_DONE = "bench.done"


def callbacks(setup: Setup) -> list[Row]:
    row = Row("callbacks", "end to end as `e2e`, a callback about each ack (on_success), against none", [])
    seconds = setup.seconds(30)
    for _ in setup.each_round("callbacks"):
        for name, settings in (("without", {}), ("with", {"on_success": _DONE})):
            with setup.cluster() as cluster:
                cluster.put_topic(TOPIC, **settings)
                leader, began = cluster.leader(), time.monotonic()
                before = cpu_seconds(leader.pid)
                tally = uvloop.run(flow(cluster, seconds))
                took, spent = time.monotonic() - began, cpu_seconds(leader.pid) - before
                nothing_early(tally)
                callbacks = tally.acked if settings else 0
                cluster.account([TOPIC, _DONE], tally.published + callbacks, tally.acked)
                row.add(name, tally.acked / took, "msg/s")
                row.add(f"{name}, leader CPU", spent / tally.acked * 1e6, "µs/msg")
    row.ratio("rate, ratio", "with", "without")
    row.ratio("leader CPU, ratio", "with, leader CPU", "without, leader CPU")
    return [row]
