"""An empty node takes the place of one that holds much, under load: how late messages are meanwhile, how long it is."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import uvloop

from bench.cluster import Cluster, Node, Void
from bench.load import Tally
from bench.result import Row, Setup, Target
from bench.rows.backup import fill
from bench.rows.deliver import steady

RATE = 2_000
#: Beyond this it has not worked.
PATIENCE_S = 900.0


class _Newcomer:
    """A node that the cluster's founders do not know: with a file of its own, and an empty directory."""

    def __init__(self, cluster: Cluster, number: int, old: Node) -> None:
        name, port = f"n{number}", cluster.port_base + 2 * number
        self.raft = f"127.0.0.1:{port + 1}"
        self.directory = cluster.directory / name
        mine = _settings(cluster, old.name)
        peers = {node.name: _settings(cluster, node.name)["raft"]["listen"] for node in cluster.nodes}
        named = "".join(f'{peer} = "{address}"\n' for peer, address in {**peers, name: self.raft}.items())
        file = cluster.directory / f"{name}.toml"
        file.write_text(
            f'[node]\nname = "{name}"\ndata_dir = "{self.directory}"\n[cluster]\nid = "{mine["cluster"]["id"]}"\n'
            f'[http]\nlisten = "127.0.0.1:{port}"\n[raft]\nlisten = "{self.raft}"\n[raft.peers]\n{named}'
        )
        command = [sys.executable, "-m", "hadelay", "serve", str(file), "-o", "json"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.node = Node(name, process.pid, f"http://127.0.0.1:{port}", process)


def _settings(cluster: Cluster, name: str) -> dict[str, dict[str, str]]:
    return tomllib.loads((cluster.directory / f"{name}.toml").read_text())


def _size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("hours/*"))


async def _replace(cluster: Cluster, old: Node, new: _Newcomer, row: Row) -> None:
    began = time.monotonic()
    servers = ",".join(node.http for node in cluster.nodes)
    words = ["cluster", "members", "replace", old.name, new.node.name, new.raft, "--servers", servers]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "hadelay", *words, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            said, voted = "", 0.0
            async for line in process.stderr:
                said += line.decode()
                if not voted and f"{new.node.name} votes" in said:
                    voted = time.monotonic() - began
            await process.wait()
    except TimeoutError:
        process.kill()
        raise Void(f"{new.node.name} does not vote after {PATIENCE_S:.0f} s: {said}") from None
    if process.returncode or not voted:
        raise Void(f"members replace ended with {process.returncode}: {said}")
    size = _size(new.directory)
    row.add("until it votes", voted, "s")
    row.add("size", size / (1 << 30), "GB")
    row.add("filled at", size / (1 << 20) / voted, "MB/s")


async def _meanwhile(cluster: Cluster, old: Node, new: _Newcomer, row: Row) -> Tally:
    replacing = asyncio.create_task(_replace(cluster, old, new, row))
    tally = await steady(cluster, RATE, PATIENCE_S, over=replacing.done)
    await replacing
    return tally


def replace(setup: Setup) -> list[Row]:
    row = Row(
        "replace",
        "lateness at 2,000 msg/s while an empty node takes the place of one that holds 5 GB, against before",
        [Target("ratio", 2, at_most=True)],
    )
    gigabytes = setup.many(5_000, 200) / 1000
    setup.say(f"replace, filling {gigabytes} GB")
    with setup.cluster() as cluster:
        total = Tally()
        uvloop.run(fill(cluster, gigabytes, total))
        cluster.settle()
        for number in setup.each_round("replace"):
            before = uvloop.run(steady(cluster, RATE, setup.seconds(30)))
            old = cluster.follower()
            new = _Newcomer(cluster, len(cluster.nodes) + 1 + number, old)
            try:
                during = uvloop.run(_meanwhile(cluster, old, new, row))
            finally:
                cluster.nodes.append(new.node)
            cluster.nodes.remove(old)
            cluster.end(old, signal.SIGTERM)
            shutil.rmtree(cluster.directory / old.name)
            for tally in (before, during):
                total.published += tally.published
                total.acked += tally.acked
            row.add("p99 before", before.late(0.99), "ms")
            row.add("p99 meanwhile", during.late(0.99), "ms")
            row.add("worst meanwhile", max(during.late_ms), "ms")
        cluster.account(["bench"], total.published, total.acked)
    row.ratio("ratio", "p99 meanwhile", "p99 before")
    return [row]
