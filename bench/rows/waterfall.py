"""Where the time of a delivery goes (the load of `lateness`), and of a publish with slow disks (that of `slowdisk`)."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import uvloop

from bench import peers
from bench.cluster import Void, cpu_seconds
from bench.instants import collected, environment
from bench.load import Tally
from bench.result import Row, Setup, Target
from bench.rows.deliver import steady
from bench.rows.publish import SECONDS, WARM_S, slow_disk_object
from bench.waterfall import DELIVERY, Answer, delivery, figures, publishes
from bench.wrk_run import wrk

_CONNECTIONS = 256
_UNITS = {
    "messages per answer": "", "messages per answer, most": "", "entries per second": "/s", "publishes per entry": "",
    "publishes per entry, as a publish sees it": "", "entries in flight": "", "syncs per second": "/s",
    "syncs at the same time": "", "consumers whose receive waits for messages, mean": "",
    "consumers whose messages are chosen, but not in hand, mean": "",
}  # fmt: skip


class Answers(Tally):
    """A tally that keeps the instant of each answer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []

    def received(self, messages: list[dict[str, Any]]) -> None:
        super().received(messages)
        self.answers.append(Answer(messages[0]["id"], time.monotonic(), time.time()))


def waterfall(setup: Setup) -> list[Row]:
    row = Row("waterfall", "where the time of a delivery and of a publish goes, by stages", list[Target]())
    preload = slow_disk_object(setup.directory)
    os.environ["SLOWSYNC_MS"] = "5"
    for _ in setup.each_round("waterfall"):
        _deliveries(setup, row)
        _publishes(setup, row, "undelayed", "")
        _publishes(setup, row, "delayed", preload)
    return [row]


def _deliveries(setup: Setup, row: Row) -> None:
    tally, directory = Answers(), peers.fresh(setup.directory / "instants")
    with setup.cluster(environment=environment(directory)) as cluster:
        uvloop.run(steady(cluster, 2_000, setup.seconds(30), tally=tally))
        cluster.account(["bench"], tally.published, tally.acked)
        cluster.stop()
    stages, facts = delivery(collected(directory)[0], tally.answers)
    if len(stages) < 0.99 * len(tally.late_ms):
        raise Void(f"the instants of {len(tally.late_ms) - len(stages)} of {len(tally.late_ms)} messages are unknown")
    for figure, value in figures(stages, DELIVERY):
        row.add(f"lateness: {figure}", value, "ms")
    for figure, value in facts.items():
        row.add(f"lateness: {figure}", value, _UNITS.get(figure, "ms"))


def _publishes(setup: Setup, row: Row, side: str, preload: str) -> None:
    directory = peers.fresh(setup.directory / "instants")
    with setup.cluster(environment=environment(directory), preload=preload) as cluster:
        leader = cluster.leader()
        wrk(leader.http, "publish", _CONNECTIONS, WARM_S)
        nodes = [leader, *(node for node in cluster.nodes if node is not leader)]
        before, idle, began = [cpu_seconds(node.pid) for node in nodes], _idle_s(), time.monotonic()
        run = wrk(leader.http, "publish", _CONNECTIONS, setup.seconds(SECONDS))
        ended = time.monotonic()
        spent = [cpu_seconds(node.pid) - at for node, at in zip(nodes, before, strict=True)]
        idle = _idle_s() - idle
        cluster.settle()
        cluster.stop()
    if run.bad or not run.rate:
        raise Void(f"{run.bad} of {run.requests} answers were not 2xx: the cluster was disturbed")
    # Each connection has always one request under way: their mean time follows from the rate.
    mean_ms = 1000 * _CONNECTIONS / run.rate
    for figure, value in publishes(collected(directory), began, ended, mean_ms).items():
        row.add(f"slowdisk, {side}: {figure}", value, _UNITS.get(figure, "ms"))
    row.add(f"slowdisk, {side}: publishes per second", run.rate, "/s")
    busy = (os.cpu_count() or 1) - idle / (ended - began)
    row.add(f"slowdisk, {side}: busy cores", busy)
    row.add(f"slowdisk, {side}: processor time of all", busy / run.rate * 1e6, "µs/msg")
    for who, some in (("the leader", spent[:1]), ("the followers", spent[1:])):
        row.add(f"slowdisk, {side}: processor time of {who}", sum(some) / run.requests * 1e6, "µs/msg")


def _idle_s() -> float:
    """Seconds that the cores of this machine were idle since it started."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")
