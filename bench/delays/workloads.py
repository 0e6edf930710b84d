"""The workloads, (a) to (f). Each drives one Run, and leaves its figures there."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.delays.history import Event, read
from bench.delays.plan import Load
from bench.delays.run import Run
from bench.delays.server import disk_mb, memory_mb, tree

#: Time after which workers are ready for sure, and in which servers write what they write late, in seconds.
_WARM_S, _SETTLE_S = 3.0, 2.0
#: Delay of messages that a worker is to hold, in seconds: publishing them has to be over by then.
_DUE_S = 4.0
#: Time limit of the load while servers are killed, in seconds.
_KILLS_S = 1800.0


@dataclass(frozen=True)
class Workload:
    letter: str
    title: str
    run: Callable[[Run], None]
    #: Figures of the table, in the order of columns.
    figures: tuple[str, ...]
    #: The visibility timeout is short, also where workers hold delayed messages.
    short: bool = False
    #: The rate of publishes is measured first, by messages that are due after the run.
    measures_rate: bool = False
    #: Delays are longer than some systems take.
    weeks: bool = False


UNITS = {
    "publish rate": "/s", "late p50": "ms", "late p99": "ms", "late max": "ms", "gap": "s", "early by": "ms",
    "drained": "s",
    "server CPU": "µs/message", "all CPU": "µs/message", "memory": "bytes/message", "disk": "bytes/message",
    "worker memory": "bytes/message", "cancel rate": "/s", "after kill p50": "s", "after kill max": "s",
    "all again": "s",
}  # fmt: skip
_VIOLATIONS = ("lost", "early", "early by", "doubled", "unfinished")
_LATE = ("late p50", "late p99", "late max")


def _flow(run: Run) -> Load:
    sizes = run.sizes
    return Load("steady", rate=sizes.rate, seconds=sizes.seconds, span_s=sizes.span_s, cancel_every=100)


def steady(run: Run) -> None:
    run.work(run.plan.workers)
    time.sleep(_WARM_S)
    before = run.spent()
    run.produce(_flow(run)).wait(run.sizes.seconds + 120)
    produced = run.spent()  # a process that ended says nothing more about its time
    run.drain()
    after = run.spent()
    found = run.judged()
    if found.delivered:
        run.figures["server CPU"] = (after[0] - before[0]) / found.delivered * 1e6
        run.figures["all CPU"] = (max(after[1], produced[1]) - before[1]) / found.delivered * 1e6


def burst(run: Run) -> None:
    run.work(run.plan.workers)
    time.sleep(_WARM_S)
    run.produce(Load("burst", count=run.sizes.burst))
    run.published()
    loaded = next(event for event in read(run.directory / "history") if event["e"] == "loaded")
    if not loaded["in_time"]:
        raise RuntimeError("publishing took longer than the delay")
    # A slow publisher chooses a late second, and the limit of the wait begins with it.
    time.sleep(max(0.0, loaded["second"] / 1000 - time.time()))
    run.drain()
    found = run.judged()
    if found.delivered:
        run.figures["drained"] = (found.last_ms - loaded["second"]) / 1000


def pending(run: Run) -> None:
    run.work(run.plan.workers)
    time.sleep(_WARM_S)
    servers, workers = run.contender.servers, [tree(worker.pid) for worker in run.workers]
    before, disk = memory_mb(servers()), disk_mb(run.contender.directory)
    at_workers = sum(map(memory_mb, workers))
    producer = run.produce(Load("pending", count=run.sizes.pending, seconds=run.sizes.pending_s,
                                cancel=run.sizes.cancels))  # fmt: skip
    while not any(event["e"] == "loaded" for event in read_small(run)):
        if producer.poll() is not None:
            run.published()
            raise RuntimeError("the producer ended before it had published")
        time.sleep(0.5)
    time.sleep(_SETTLE_S)
    memory, on_disk = memory_mb(servers()) - before, disk_mb(run.contender.directory) - disk
    grown = sum(map(memory_mb, workers)) - at_workers
    assert producer.stdin is not None
    producer.stdin.close()
    run.published()
    run.note("end")
    found = run.judged()
    for name, value in (("memory", memory), ("disk", on_disk), ("worker memory", grown)):
        run.figures[name] = value * (1 << 20) / max(1, found.published)
    for event in read_small(run):
        if event["e"] == "cancelled" and event["count"]:
            run.figures["cancel rate"] = event["count"] / event["seconds"]
            run.figures["cancelled"] = event["count"]


def read_small(run: Run) -> list[Event]:
    """Events without the long lists of ids: of a million publishes, only these are wanted here."""
    found = []
    for path in (run.directory / "history").glob("produce-*.jsonl"):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 4096))
            tail = file.read().rpartition(b"\n")[0].splitlines()
        for line in tail:
            if line.startswith((b'{"e": "loaded"', b'{"e": "cancelled"')):
                found.append(json.loads(line))
    return found


def killed_server(run: Run) -> None:
    run.work(run.plan.workers)
    time.sleep(_WARM_S)
    load = _flow(run)
    load.seconds, load.span_s, load.cancel_every = _KILLS_S, 2 * run.sizes.between_kills_s, 0
    producer = run.produce(load)
    for _ in range(run.sizes.kills):
        time.sleep(run.sizes.between_kills_s)
        run.supervise()
        run.kill_server()
    time.sleep(run.sizes.between_kills_s)
    assert producer.stdin is not None
    producer.stdin.close()
    producer.wait()
    run.drain(run.sizes.visibility_s, supervised=True)
    found = run.judged()
    if found.after_kill_s:
        run.figures["after kill p50"] = statistics.median(found.after_kill_s)
        run.figures["after kill max"] = max(found.after_kill_s)


def killed_worker(run: Run) -> None:
    """One worker takes what is due, and is killed; another one has to get it all. The second worker starts after the
    kill, so that it takes nothing before."""
    run.work(1, hold=run.sizes.in_hand)
    time.sleep(_WARM_S)
    run.produce(Load("once", count=run.sizes.in_hand, span_s=_DUE_S))
    run.published()
    run.wait_got(run.sizes.in_hand, _DUE_S + 1)
    run.kill_worker()
    killed = time.time() * 1000
    run.work(1)
    run.drain(since_ms=killed)
    # A framework's worker holds messages that its tasks have not begun: any later hand-out is one of those.
    run.judged()
    again = [event["at"] for event in read(run.directory / "history") if event["e"] == "got" and event["at"] > killed]
    if again:
        run.figures["all again"] = (max(again) - killed) / 1000


def long_delay(run: Run) -> None:
    run.work(run.plan.workers)
    time.sleep(_WARM_S)
    run.produce(Load("once", count=run.sizes.in_hand, span_s=3 * run.sizes.visibility_s))
    run.published()
    run.drain(1.5 * run.sizes.visibility_s)
    run.judged()


WORKLOADS = {
    "steady": Workload("a", "a steady rate, due uniformly over a minute", steady,
                       (*_LATE, "publish rate", "server CPU", "all CPU", *_VIOLATIONS)),
    "burst": Workload("b", "messages due within one second", burst, ("drained", "publish rate", *_LATE, *_VIOLATIONS),
                      measures_rate=True),
    "pending": Workload("c", "messages pending over a week, then some cancelled by key", pending,
                        ("publish rate", "memory", "disk", "worker memory", "cancel rate", "published"), weeks=True),
    "server": Workload("d", "the same as (a), with the server (hadelay: the leader) killed and started again",
                       killed_server, ("after kill p50", "after kill max", "late max", "gap", "unsure",
                                       "worker restarts", *_VIOLATIONS)),
    "worker": Workload("e", "a worker killed while it holds messages", killed_worker,
                       ("all again", "redelivered", *_VIOLATIONS), short=True),
    "visibility": Workload("f", "a delay of three visibility timeouts", long_delay,
                           ("late max", *_VIOLATIONS), short=True),
}  # fmt: skip
