"""HTTP API types about the shard map, which says which shard owns a topic."""

from typing import Literal

from hadelay.api.base import Document, Request
from hadelay.settings.shardmap import ShardMap


class ShardsOut(Document, frozen=True):
    #: Index of this shard in the current map; null for a cluster without a map.
    shard: int | None
    #: Number of the Raft group: the first byte of message ids.
    group: int
    cluster_id: str
    #: Shard map in force; null for a cluster without a map, which owns all topics.
    current: ShardMap | None
    #: Next shard map, while a change of the map is under way; null otherwise.
    prepared: ShardMap | None
    #: Whether the cluster was restored as a shard from a backup: it creates no topics until it gets the shard map
    #: again.
    suspended: bool


class PutShards(Request):
    step: Literal["prepare", "commit", "address"]
    map: ShardMap


class NamesQuery(Request):
    after: str = ""
    limit: int = 1_000


class ShardNames(Document, frozen=True):
    """A page of names of topics. A name may occur more than once."""

    #: Version of the prepared map that the node had applied when it read the names; null without one.
    prepared: int | None
    #: Names of topics that exist in this shard.
    topics: list[str]
    #: Names of topics in settings and schedules of this shard, whether the topics exist or not.
    targets: list[str]
    #: Value of `after` for the next page; null: no more.
    next: str | None
