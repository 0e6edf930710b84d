"""Publishing: one message per request and batches, beside etcd, bare aiohttp, and the others."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgpack
import uvloop

from bench import peers, speak
from bench.result import Row, Setup, Target
from bench.rows.deliver import steady
from bench.wrk_run import Figures, Missing, wrk

SECONDS = 10
#: Before a run counts: connections, first pages of the files, the branch predictors of everybody.
WARM_S = 2
#: Number of subscriptions in the row `subscriptions`: besides the topic's own queue.
_COPIES = 3


@contextlib.contextmanager
def baseline(kind: str, port: int) -> Iterator[tuple[str, int]]:
    """Run bench.baseline; its URL, and its process number."""
    process = subprocess.Popen([sys.executable, "-m", "bench.baseline", str(port), kind])
    try:
        peers.wait_port(port)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def ours(
    setup: Setup,
    script: str,
    connections: int,
    to: str = "leader",
    each: int = 1,
    *,
    copies: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Figures:
    """One run on a fresh cluster, counted on every node afterwards. copies: number of subscriptions of the topic.
    environment: of wrk."""
    with setup.cluster() as cluster:
        topics = ["bench", *(f"bench~s{n}" for n in range(copies))]
        for topic in topics if copies else ():
            cluster.put_topic(topic)
        node = cluster.leader() if to == "leader" else cluster.follower()
        warm = wrk(node.http, script, connections, WARM_S, **environment or {})
        run = wrk(node.http, script, connections, setup.seconds(SECONDS), **environment or {})
        each *= len(topics)
        good = (warm.requests - warm.status + run.requests - run.status) * each
        cluster.account(topics, good, 0, unsure=2 * connections * each)
        if run.bad:
            setup.say(f"  {run.bad} of {run.requests} answers were not 2xx")
        return run


def etcd_run(setup: Setup, connections: int) -> Figures:
    with peers.etcd(setup.directory / "etcd", setup.port + 100) as url:
        wrk(url, "etcd", connections, WARM_S)
        return wrk(url, "etcd", connections, setup.seconds(SECONDS))


def baseline_run(setup: Setup, kind: str, script: str, connections: int, **environment: str) -> Figures:
    with baseline(kind, setup.port + 200) as (url, _):
        wrk(url, script, connections, 1, **environment)
        return wrk(url, script, connections, setup.seconds(SECONDS), **environment)


def optional(row: Row, run: Callable[[], Figures]) -> Figures | None:
    try:
        return run()
    except Missing as missing:
        if str(missing) not in row.notes:
            row.notes.append(str(missing))
        return None


def single(setup: Setup) -> list[Row]:
    row = Row(
        "single",
        "one message per request, 200 bytes, 256 connections, to the leader",
        [Target("against etcd", 2.2, 5), Target("against baseline", 0.65, 1.5), Target("p99 to p50", 5, at_most=True)],
    )
    for _ in setup.each_round("single"):
        mine = ours(setup, "publish", 256)
        row.add("hadelay", mine.rate, "/s")
        row.add("hadelay p50", mine.p50, "ms")
        row.add("hadelay p99", mine.p99, "ms")
        if other := optional(row, lambda: etcd_run(setup, 256)):
            row.add("etcd", other.rate, "/s")
            row.add("etcd p50", other.p50, "ms")
        row.add("baseline", baseline_run(setup, "plain", "plain", 256).rate, "/s")
    row.ratio("against etcd", "hadelay", "etcd")
    row.ratio("against baseline", "hadelay", "baseline")
    row.ratio("p99 to p50", "hadelay p99", "hadelay p50")
    return [row]


def keys(setup: Setup) -> list[Row]:
    row = Row(
        "keys", "one message per request, each with a key of its own, against none", [Target("against none", 0.7, 0.85)]
    )
    for _ in setup.each_round("keys"):
        for name, script in (("without", "publish"), ("with keys", "keyed")):
            run = ours(setup, script, 256)
            row.add(name, run.rate, "/s")
            row.add(f"{name} p99", run.p99, "ms")
    row.ratio("against none", "with keys", "without")
    return [row]


def s4(setup: Setup) -> list[Row]:
    row = Row(
        "s4",
        "S4's test: 300 connections, one message per request",
        [Target("rate", 9_000, 15_000), Target("p50", 30, at_most=True)],
    )
    for _ in setup.each_round("s4"):
        mine = ours(setup, "publish", 300)
        row.add("rate", mine.rate, "/s")
        row.add("p50", mine.p50, "ms")
        row.add("p99", mine.p99, "ms")
    return [row]


def of_a_batch(directory: Path, topic: str = "bench", count: int = 1000) -> dict[str, str]:
    """What file.lua sends: a thousand messages of 200 bytes, or `count`."""
    directory.mkdir(parents=True, exist_ok=True)
    body = directory / f"batch-{topic}-{count}.msgpack"
    items = [{"topic": topic, "body": os.urandom(200), "delay": 600 + i % 3000} for i in range(count)]
    body.write_bytes(msgpack.packb(items))
    return {"BENCH_BODY": str(body), "BENCH_TYPE": "application/msgpack", "BENCH_PATH": "/v1/messages:batch"}


def batch(setup: Setup) -> list[Row]:
    row = Row(
        "batch", "batches of 1,000 (msgpack), against a handler that only decodes them", [Target("ratio", 0.08, 0.15)]
    )
    environment = of_a_batch(setup.directory)
    for _ in setup.each_round("batch"):
        mine = ours(setup, "file", 32, each=1000, environment=environment)
        row.add("hadelay", mine.rate * 1000, "msg/s")
        row.add("hadelay p50", mine.p50, "ms")
        decoded = baseline_run(setup, "batch", "file", 32, **environment | {"BENCH_PATH": "/"})
        row.add("baseline", decoded.rate * 1000, "msg/s")
    row.ratio("ratio", "hadelay", "baseline")
    return [row]


def subscriptions(setup: Setup) -> list[Row]:
    row = Row(
        "subscriptions",
        "as `single` and as `batch`, into a topic with three subscriptions, against the same topic without",
        [Target("single", 0.8), Target("batch", 0.55)],
    )
    environment = of_a_batch(setup.directory)
    for _ in setup.each_round("subscriptions"):
        for copies, name in ((0, "without"), (_COPIES, "with three")):
            run = ours(setup, "publish", 256, copies=copies)
            row.add(f"single {name}", run.rate, "/s")
            row.add(f"single {name} p99", run.p99, "ms")
            run = ours(setup, "file", 32, each=1000, copies=copies, environment=environment)
            row.add(f"batch {name}", run.rate * 1000, "msg/s")
    row.ratio("single", "single with three", "single without")
    row.ratio("batch", "batch with three", "batch without")
    return [row]


def follower(setup: Setup) -> list[Row]:
    row = Row("follower", "publish to a follower, against the leader", [Target("ratio", 0.85)])
    for _ in setup.each_round("follower"):
        row.add("leader", ours(setup, "publish", 256).rate, "/s")
        row.add("follower", ours(setup, "publish", 256, to="follower").rate, "/s")
    row.ratio("ratio", "follower", "leader")
    return [row]


def slow_disk_object(directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "slowsync.so"
    source = Path(__file__).resolve().parent.parent / "slowsync.c"
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(target), str(source), "-ldl"], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        raise Missing(f"no C compiler for bench/slowsync.c (apt-get install gcc): {error}") from error
    return str(target)


def slowdisk(setup: Setup) -> list[Row]:
    row = Row(
        "slowdisk",
        "publish with every fdatasync delayed by 5 ms",
        [Target("ratio", 0.6, 0.8), Target("lateness p99", 80, at_most=True)],
    )
    os.environ["SLOWSYNC_MS"] = "5"
    preload = slow_disk_object(setup.directory)
    for _ in setup.each_round("slowdisk"):
        row.add("undelayed", ours(setup, "publish", 256).rate, "/s")
        with setup.cluster(preload=preload) as cluster:
            url = cluster.leader().http
            warm = wrk(url, "publish", 256, WARM_S)
            run = wrk(url, "publish", 256, setup.seconds(SECONDS))
            good = warm.requests - warm.status + run.requests - run.status
            cluster.account(["bench"], good, 0, unsure=512)
            row.add("delayed", run.rate, "/s")
            row.add("delayed p50", run.p50, "ms")
        with setup.cluster(preload=preload) as cluster:
            tally = uvloop.run(steady(cluster, 2_000, setup.seconds(10)))
            cluster.account(["bench"], tally.published, tally.acked)
            row.add("lateness p99", tally.late(0.99), "ms")
    row.ratio("ratio", "delayed", "undelayed")
    return [row]


def others(setup: Setup) -> list[Row]:
    """All in the same Python client, 64 connections: what each stores per second, as durably as it can."""
    row = Row("peers", "one message per request, 64 connections, one Python client for all", [])
    kinds: list[tuple[str, type[speak.Speaker], Callable[[Path, int], contextlib.AbstractContextManager[int]]]] = [
        ("redis, AOF always, WAIT 2", speak.Redis, peers.redis),
        ("rabbitmq, quorum queue", speak.RabbitMq, peers.rabbitmq),
        ("beanstalkd -f0, one node", speak.Beanstalkd, peers.beanstalkd),
        ("nats R3, synced lazily", speak.Nats, peers.nats),
    ]
    seconds = setup.seconds(8)
    for _ in setup.each_round("peers"):
        with setup.cluster() as cluster:
            port = int(cluster.leader().http.rpartition(":")[2])
            row.add("hadelay, three nodes", uvloop.run(speak.rate(speak.Hadelay, port, 64, seconds)), "/s")
        for name, kind, start in kinds:
            try:
                with start(setup.directory / "peer", setup.port + 100) as port:
                    row.add(name, uvloop.run(speak.rate(kind, port, 64, seconds)), "/s")
            except (Missing, ConnectionError) as error:
                row.notes.append(f"{name}: {error}")
    return [row]
