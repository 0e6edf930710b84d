"""Several shards as the harness drives them: one `hadelay dev --shards`, a Cluster per shard, names by owner."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.cluster import Cluster, Node, Void, get
from hadelay.settings.shardmap import ShardMap

#: Limit of names that are tried until one is found for each shard.
_NAMES = 10_000


class Sharded:
    """shards[n] is the cluster of shard n, and topics[n] the name of a topic of it. The nodes are started and ended
    together."""

    def __init__(self, whole: Cluster, shards: list[Cluster]) -> None:
        self.whole, self.shards = whole, shards
        known = self.map()
        self.topics = [_name(known, shard, "bench") for shard in range(len(shards))]

    def map(self) -> ShardMap:
        answer = self.shards[0].get(self.shards[0].nodes[0], "/v1/shards")
        return msgspec.convert(answer["current"], ShardMap, strict=False)

    def name(self, shard: int, begin: str) -> str:
        """A name of a topic of this shard that begins so."""
        return _name(self.map(), shard, begin)

    @property
    def addresses(self) -> list[str]:
        return [url for cluster in self.shards for url in cluster.addresses]


def _name(known: ShardMap, shard: int, begin: str) -> str:
    for number in range(_NAMES):
        if known.owner(name := f"{begin}-{number}") == shard:
            return name
    raise Void(f"no name for shard {shard} in {_NAMES}")


@contextlib.contextmanager
def sharded(directory: Path, port_base: int, shards: int, settings: tuple[str, ...] = ()) -> Iterator[Sharded]:
    """Fresh shards with one map, each of three nodes."""
    shutil.rmtree(directory, ignore_errors=True)
    with Cluster.start(directory, port_base, shards=shards, settings=settings) as whole:
        parts = [Cluster(directory, port_base, shard=shard) for shard in range(shards)]
        for node in whole.nodes:
            name, _, shard = node.name.partition("-s")
            parts[int(shard or 0)].nodes.append(Node(name, node.pid, node.http))
        for part in parts:
            part.leader()
        try:
            yield Sharded(whole, parts)
        finally:
            for part in parts:
                part.stop()  # what was started again by name


def one_shard(cluster: Cluster) -> None:
    """Give a cluster a map in which it is the only shard."""
    nodes = {node.name: node.http for node in cluster.nodes}
    known = {"version": 1, "shards": {"0": {"group": 0, "nodes": nodes}}, "rules": [{"pattern": "*", "shards": [0]}]}
    for step in ("prepare", "commit"):
        body = msgspec.json.encode({"step": step, "map": known})
        get(f"{cluster.leader().http}/v1/shards", body=body, method="PUT")
