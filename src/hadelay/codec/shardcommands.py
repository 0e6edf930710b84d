"""Commands about the shard map (docs/spec/shards.md)."""

from enum import IntEnum

import msgspec

from hadelay.codec.packed import Packed

#: Limit of an encoded map, in bytes: a map is one entry of the log.
MAX_MAP_BYTES = 2 << 20


class ShardStep(IntEnum):
    """Step of a change of the shard map. Values are in the log: never renumber."""

    #: Store the map of a later version. From then on, the shard creates only topics that it owns under both the stored
    #: map and the map in force.
    PREPARE = 0
    #: Put the prepared map in force, with the names that were pinned to shards since PREPARE.
    COMMIT = 1
    #: Change group numbers and addresses alone, in one step: they decide no ownership.
    ADDRESS = 2


class PutShardMap(Packed, frozen=True):
    step: ShardStep
    #: ShardMap of settings/shardmap.py, which apply decodes.
    map: msgspec.Raw
