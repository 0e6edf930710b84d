"""Documents of the shard map."""

from typing import Literal

from hadelay.api.base import Document, Request
from hadelay.settings.shardmap import ShardMap


class ShardsOut(Document, frozen=True):
    #: Index of this shard in the current map; null for a cluster without a map.
    shard: int | None
    #: Number of the Raft group: the first byte of message ids.
    group: int
    cluster_id: str
    #: Map that is in force; null for a cluster without a map, which owns all topics.
    current: ShardMap | None
    #: Map of a change that is under way.
    prepared: ShardMap | None
    #: The cluster was restored as a shard, and creates no topics until it has the map again.
    suspended: bool


class PutShards(Request):
    step: Literal["prepare", "commit", "address"]
    map: ShardMap


class NamesQuery(Request):
    after: str = ""
    limit: int = 1_000


class ShardNames(Document, frozen=True):
    """A page of names; a name may come more than once."""

    #: Version of the prepared map that the node had applied when it read the names; null without one.
    prepared: int | None
    #: Topics that exist in this shard.
    topics: list[str]
    #: Topics that settings and schedules of this shard name, whether they exist or not.
    targets: list[str]
    #: Value of `after` for the next page; null: no more.
    next: str | None
