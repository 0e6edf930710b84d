"""Shards: what the map costs a cluster without one and with one, what a second shard brings, what forwarding costs, and
how long a change of the map takes. `python -m bench.scaling` fits the model of docs/explanation/scaling.md to it."""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from bench.cluster import Cluster, Node, Void, cpu_seconds, get, rss_anon_mb
from bench.cpushare import PERIOD_US, shares
from bench.result import Row, Setup, Target
from bench.rows import shardclients, unused
from bench.rows.publish import of_a_batch
from bench.sharded import Sharded, one_shard, sharded
from bench.wrk_run import Missing, wrk
from hadelay.cli.output import Remote
from hadelay.cli.shards import rule
from hadelay.settings.shardmap import MAX_PINNED, Rule, Shard, ShardMap

#: Slices per side and round, and their length in seconds. The first of each side warms it, and does not count.
_SLICES, _SLICE_S = 4, 5
#: Share of a core that each process gets, and numbers of shards that get the load by turns.
SHARE, COUNTS = 0.1, (1, 2, 4)
#: Connections of each generator, by load; messages per request.
_CONNECTIONS = {"single": 128, "batch": 16}
_EACH = {"single": 1, "batch": 100}
#: Settings of nodes that are as slow as that: their elections wait ten times as long.
_SLOW = ("raft.election_min_ms=3000",)
#: Distance between the ports of two clusters.
_PORTS = 20


def _slices(setup: Setup) -> int:
    return setup.many(_SLICES, 1)


def shards(setup: Setup) -> list[Row]:
    """All rows; a part that cannot be measured here is a row with the reason."""
    rows: list[Row] = []
    parts = {
        "no map": _no_map, "scale": _scale, "front": _front, "change": _change, "kills": shardclients.kills,
        "consumer": shardclients.consumer,
    }  # fmt: skip
    for name, part in parts.items():
        try:
            rows.append(part(setup))
        except Missing as missing:
            rows.append(Row(f"shards, {name}", "left out", [], notes=[str(missing)]))
        except Void as void:
            rows.append(Row(f"shards, {name}", "void", [], notes=[f"VOID: {void}"]))
    return rows


# --- a cluster without a map, with one, and of the version before ---


def _no_map(setup: Setup) -> Row:
    row = Row("shards, no map", "messages per second of processor time, all nodes; clusters get slices by turns", [])
    sides = ["no map", "map of one shard", *(["before"] if setup.before else [])]
    if setup.before is None:
        row.notes.append("no version before to compare with: --before DIR, a checkout (git worktree add DIR 5c412203)")
    loads = {
        "single": unused.published("publish", 256, 1),
        "batch": unused.published("file", 32, 1000, **of_a_batch(setup.directory)),
        "e2e": unused.end_to_end,
    }
    for _ in setup.each_round(row.name):
        for name, load in loads.items():
            with contextlib.ExitStack() as stack:
                clusters = {}
                for number, side in enumerate(sides):
                    source = setup.before if side == "before" else None
                    start = Cluster.start(setup.directory / str(number), setup.port + number * _PORTS, source=source)
                    clusters[side] = stack.enter_context(start)
                one_shard(clusters["map of one shard"])
                for number in range(_slices(setup) + 1):
                    for side in sides[:: -1 if number % 2 else 1]:
                        leader, follower = unused.spent_by(clusters[side], load, setup.seconds(_SLICE_S))
                        if number:
                            row.add(f"{name}, {side}", 1e6 / (leader + 2 * follower), "msg/s")
    for name in loads:
        for of, to in (("map of one shard", "no map"), ("no map", "before")):
            if to in sides:
                row.ratio(figure := f"{name}, {of} to {to}", f"{name}, {of}", f"{name}, {to}")
                row.targets.append(Target(figure, 0.98))
    return row


# --- one, two and four shards, each process with the same share of a core ---


class _Load:
    """Publishes into shards at once, and counts what each stored."""

    def __init__(self, setup: Setup, whole: Sharded) -> None:
        self.setup, self.whole = setup, whole
        self.stored = [0] * len(whole.shards)
        self.unsure = [0] * len(whole.shards)
        #: Refusals, as notes: such a slice counts, too, since the rate is that of good answers.
        self.refused: list[str] = []

    def run(self, kind: str, chosen: list[int], url: Callable[[int], str], seconds: float, each: int = 0) -> float:
        """Load all chosen shards, by the address that `url` gives; messages per second."""
        each = each or _EACH[kind]

        def one(shard: int) -> float:
            topic, connections = self.whole.topics[shard], _CONNECTIONS[kind]
            if kind == "single":
                run = wrk(url(shard), "publish", connections, seconds, BENCH_TOPIC=topic)
            else:
                environment = of_a_batch(self.setup.directory, topic, each)
                run = wrk(url(shard), "file", connections, seconds, **environment)
            if run.bad:
                self.refused.append(f"{run.bad} of {run.requests} answers of shard {shard} were not 2xx ({kind})")
            self.stored[shard] += (run.requests - run.status) * each
            self.unsure[shard] += connections * each
            return run.rate * each

        with ThreadPoolExecutor(len(chosen)) as pool:
            return sum(pool.map(one, chosen))

    def account(self) -> None:
        for cluster, topic, stored, unsure in zip(
            self.whole.shards, self.whole.topics, self.stored, self.unsure, strict=True
        ):
            if stored:
                cluster.account([topic], stored, 0, unsure=unsure)


def _spent(nodes: list[Node]) -> float:
    return sum(cpu_seconds(node.pid) for node in nodes)


def _followers(cluster: Cluster, leader: Node) -> list[Node]:
    return [node for node in cluster.nodes if node is not leader]


def _scale(setup: Setup) -> Row:
    row = Row(
        "shards, scale",
        f"messages stored per second by 1, 2 and 4 shards of three nodes, each process with {SHARE:.0%} of a core "
        f"(control groups, period {PERIOD_US // 1000} ms), sent to the leaders; slices by turns",
        [Target(f"{kind}, 2 shards to 1", 1.85) for kind in _EACH]
        + [Target(f"{kind}, processor time, 2 shards to 1", 1.05, at_most=True) for kind in _EACH],
    )
    for _ in setup.each_round(row.name):
        with shares() as limit, sharded(setup.directory / "ours", setup.port, max(COUNTS), _SLOW) as whole:
            load = _Load(setup, whole)
            for node in (node for cluster in whole.shards for node in cluster.nodes):
                limit.give(node.pid, SHARE)
            for kind in _EACH:
                for number in range(_slices(setup) + 1):
                    for count in COUNTS[:: -1 if number % 2 else 1]:
                        # Which shards have the load changes from slice to slice.
                        chosen = [(number + k) % max(COUNTS) for k in range(count)]
                        _scale_slice(load, kind, chosen, setup.seconds(_SLICE_S), row if number else None)
            limit.remove()
            load.account()
            row.notes += load.refused
    for kind, count in itertools.product(_EACH, COUNTS[1:]):
        row.ratio(f"{kind}, {count} shards to 1", f"{kind}, {count} shards", f"{kind}, 1 shards")
        row.ratio(
            f"{kind}, processor time, {count} shards to 1", f"{kind}, processor time, {count} shards",
            f"{kind}, processor time, 1 shards",
        )  # fmt: skip
    return row


def _scale_slice(load: _Load, kind: str, chosen: list[int], seconds: float, row: Row | None) -> None:
    clusters = [load.whole.shards[shard] for shard in chosen]
    leaders = [cluster.leader() for cluster in clusters]
    urls = {shard: leader.http for shard, leader in zip(chosen, leaders, strict=True)}
    nodes = [node for cluster in clusters for node in cluster.nodes]
    before, led, stored = _spent(nodes), _spent(leaders), sum(load.stored)
    rate = load.run(kind, chosen, urls.__getitem__, seconds)
    for cluster in clusters:
        cluster.settle()
    count = sum(load.stored) - stored
    each, leading = (_spent(nodes) - before) / count * 1e6, (_spent(leaders) - led) / count * 1e6
    if row is not None:
        row.add(f"{kind}, {len(chosen)} shards", rate, "msg/s")
        row.add(f"{kind}, processor time, {len(chosen)} shards", each, "µs/msg")
        row.add(f"{kind}, leader's processor time, {len(chosen)} shards", leading, "µs/msg")


# --- forwarding ---


def _front(setup: Setup) -> Row:
    row = Row(
        "shards, front",
        "processor time per message of a node that forwards all requests to another shard; of that shard's nodes, when "
        "clients send to its leader; one node that has nothing to do; memory",
        [
            Target("front, single", 35, at_most=True),
            Target("front, batch of 100", 4, at_most=True),
            Target("front, batch of 1000", 4, at_most=True),
        ],
    )
    loads = (("single", "single", 1), ("batch of 100", "batch", 100), ("batch of 1000", "batch", 1000))
    for _ in setup.each_round(row.name):
        with sharded(setup.directory / "ours", setup.port, 2) as whole:
            load, home, owner = _Load(setup, whole), whole.shards[0], whole.shards[1]
            row.add("idle, one node", _idle(setup, home), "µs/s")
            for (name, kind, each), number in itertools.product(loads, range(_slices(setup) + 1)):
                front, leader = home.follower(), owner.leader()
                for url in (front.http, leader.http)[:: -1 if number % 2 else 1]:
                    found = _front_slice(load, kind, each, url, (front, leader, _followers(owner, leader)))
                    if number and url == front.http:
                        row.add(f"front, {name}", found[0], "µs/msg")
                        row.add(f"leader, forwarded {name}", found[1], "µs/msg")
                    elif number:
                        row.add(f"leader, {name}", found[1], "µs/msg")
                        row.add(f"follower, {name}", found[2], "µs/msg")
            load.account()
            row.notes += load.refused
            row.add("memory, one node", max(rss_anon_mb(node.pid) for node in owner.nodes), "MB")
            row.add("record", _record_bytes(owner, sum(load.stored)), "B/msg")
    row.ratio("front to leader, single", "front, single", "leader, single")
    known = _largest_map()
    row.add("map of 50,000 pinned names, encoded", len(msgspec.msgpack.encode(known)) / 1e6, "MB")
    return row


def _front_slice(
    load: _Load, kind: str, each: int, url: str, nodes: tuple[Node, Node, list[Node]]
) -> tuple[float, float, float]:
    """Processor time per message in µs: of the front, of the owner's leader, and of one follower."""
    front, leader, followers = nodes
    sides = ([front], [leader], followers)
    before, stored = [_spent(side) for side in sides], load.stored[1]
    load.run(kind, [1], lambda _: url, load.setup.seconds(_SLICE_S), each)
    load.whole.shards[1].settle()
    count = load.stored[1] - stored
    spent = [(_spent(side) - first) / len(side) / count * 1e6 for side, first in zip(sides, before, strict=True)]
    return spent[0], spent[1], spent[2]


def _idle(setup: Setup, cluster: Cluster) -> float:
    """Processor time of one node that has nothing to do, in µs per second."""
    before, began = _spent(cluster.nodes), time.monotonic()
    time.sleep(setup.seconds(20))
    return (_spent(cluster.nodes) - before) / len(cluster.nodes) / (time.monotonic() - began) * 1e6


def _record_bytes(cluster: Cluster, count: int) -> float:
    """Size of the record of a message, as the leader has it."""
    answer = cluster.get(cluster.leader(), f"/v1/topics?stale=true&shard={cluster.shard}")
    return float(sum(topic.get("counts", topic).get("bytes", 0) for topic in answer["topics"])) / count


def _largest_map() -> ShardMap:
    nodes = {f"n{n}": f"http://10.0.0.{n}:8400" for n in range(1, 4)}
    pinned = {f"customer-{n:06}": n % 128 for n in range(MAX_PINNED)}
    everywhere = tuple(range(128))
    return ShardMap(1, {n: Shard(n, nodes=nodes) for n in everywhere}, (Rule("*", everywhere),), pinned)


# --- a change of the map ---


def _change(setup: Setup) -> Row:
    row = Row(
        "shards, change",
        "three shards: a rule that pins 1,000 names, while a topic of each shard gets a message every 5 ms",
        [Target("change", 1, at_most=True), Target("longest publish", 0.3, at_most=True)],
    )
    for _ in setup.each_round(row.name):
        with sharded(setup.directory / "ours", setup.port, 3) as whole:
            known, names = whole.map(), (f"pinned-{n}" for n in itertools.count())
            moved = list(itertools.islice((name for name in names if known.owner(name)), 1_000 - 2))
            items = [{"topic": name, "body": "x", "delay": "1h"} for name in [*moved, *whole.topics]]
            get(f"{whole.addresses[0]}/v1/messages:batch", body=msgspec.json.encode(items))
            with _publishing(whole) as longest:
                began = time.monotonic()
                with contextlib.redirect_stdout(io.StringIO()):
                    rule("*", "0", remote=Remote(servers=",".join(whole.addresses)))
                row.add("change", time.monotonic() - began, "s")
            row.add("longest publish", max(longest), "s")
            if len(pinned := whole.map().pinned) != 1_000:
                raise Void(f"{len(pinned)} names are pinned, not 1,000")
    return row


@contextlib.contextmanager
def _publishing(whole: Sharded) -> Iterator[list[float]]:
    """Publish to a topic of each shard; afterwards the list has the time of each request, in seconds."""
    stop, took = threading.Event(), list[float]()

    def publish(shard: int) -> None:
        url = f"{whole.shards[shard].leader().http}/v1/topics/{whole.topics[shard]}/messages?delay=1h"
        while not stop.wait(0.005):
            began = time.monotonic()
            get(url, body=b'"x"')
            took.append(time.monotonic() - began)

    with ThreadPoolExecutor(len(whole.shards)) as pool:
        threads = [pool.submit(publish, shard) for shard in range(len(whole.shards))]
        try:
            time.sleep(0.3)
            yield took
            time.sleep(0.3)
        finally:
            stop.set()
        for thread in threads:
            thread.result()
