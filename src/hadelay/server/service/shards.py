"""Services for the shard map: what this shard knows of it, one step of a change, and the names of
topics that must stay in this shard."""

import msgspec

from hadelay.api.service import Actor
from hadelay.api.shards import ShardNames, ShardsOut
from hadelay.codec import commands
from hadelay.codec.shardcommands import MAX_MAP_BYTES, ShardStep
from hadelay.errors import BadRequest, TooLarge
from hadelay.ledger.views.shardnames import names
from hadelay.server.node import Node
from hadelay.server.service.part import Service, once_begun
from hadelay.settings.shardmap import ShardMap, Shards


class ShardService(Service):
    def __init__(self, node: Node) -> None:
        super().__init__(node)
        #: State of the node, whose ledger has the shard map. It is an attribute, because each HTTP request compares the
        #: map `replica.ledger.shards` with the map for which its caches were made.
        self.replica = node.replica

    @property
    def known(self) -> Shards:
        """The shard maps (present and prepared) that this node knows; each change makes a new object."""
        return self._node.ledger.shards

    @property
    def group(self) -> int:
        return self._node.ledger.group

    async def view(self, *, stale: bool = False) -> ShardsOut:
        await self._confirm(stale)
        known = self.known
        index = None if known.current is None else known.current.index_of(self.group)
        cluster_id = self._node.config.cluster.id
        return ShardsOut(index, self.group, cluster_id, known.current, known.prepared, known.suspended)

    async def put(self, step: str, shards: ShardMap, by: Actor) -> ShardsOut:
        """Carry out one step of a change of the shard map; returns the maps that this shard knows afterwards. Raises
        BadRequest for a wrong map, Conflict for a step that does not follow the maps known here."""
        packed = msgspec.msgpack.encode(shards)
        if len(packed) > MAX_MAP_BYTES:
            raise TooLarge(f"the shard map has {len(packed)} bytes; at most {MAX_MAP_BYTES} are allowed")
        command = commands.encode_shard_map(ShardStep[step.upper()], packed)
        await self._administer(by, f"shards.{step}", f"version {shards.version}", command)
        with once_begun():
            return await self.view()

    async def names(self, after: str, limit: int) -> ShardNames:
        await self._confirm()
        prepared = self.known.prepared
        try:
            page = names(self._node.ledger, after, limit)
        except ValueError:
            raise BadRequest(f"after: {after[:80]!r} is not the `next` of a page") from None
        return ShardNames(None if prepared is None else prepared.version, *page)
