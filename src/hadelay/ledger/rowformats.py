"""Formats of a checkpoint (ledger/checkpoint.py): arrays of the fields of a dataclass for rows, and a map for the core.

The declaration of a class is the layout. Bitmaps and arrays of numpy are their bytes.
"""

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec
import numpy as np
from pyroaring import BitMap

from hadelay.codec.formats import Rows
from hadelay.ledger.leases.grantrows import LEASED
from hadelay.ledger.state import BatchCounts, ScheduleCounts
from hadelay.members import Members
from hadelay.settings.shardmap import ALONE, Shards

_T = TypeVar("_T")


class Core(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Core of a checkpoint: the state of the ledger that is in no row. It is a map, whose keys are never renamed."""

    version: int
    level: int
    group: int
    now_ms: int
    applied: int
    term: int
    chain: int
    key_epoch: int
    key_epoch_ends_ms: int
    key_count: int
    key_count_before: int
    keys_dropped_early: int
    granted: int
    jobs_begun: int
    grouped_dead: int
    unique_count: int
    filled_copies: int
    cursor: tuple[int, int, int]
    #: Position from which SWEEP continues.
    sweep: tuple[int, int]
    suspects: tuple[tuple[int, int], ...]
    retired: BitMap
    schedules: ScheduleCounts
    batches: BatchCounts
    members: Members
    members_index: int
    settings: dict[str, Any]
    named: dict[int, int]
    incarnations: dict[str, int]
    #: Number of entries ever added to the audit trail.
    audited: int
    made: dict[str, dict[str, int]]
    #: The shard map; left out of the bytes as long as the cluster has none.
    shards: Shards = ALONE


#: Names of the fields of Core whose values are the ledger's attributes of the same name.
PLAIN = tuple(
    name
    for name in Core.__struct_fields__
    if name not in ("version", "settings", "named", "incarnations", "audited", "made")
)


class CoreHead(msgspec.Struct):
    """Keys of Core that every version has: a program reads them first, to refuse a Core of a newer version."""

    version: int
    level: int
    group: int


class RowFormat(Generic[_T]):
    """Format of the objects of a dataclass: an array of the fields that its constructor takes, in the order of their
    declaration. The order never changes; new fields go to the end."""

    def __init__(self, kind: type[_T]) -> None:
        names = [one.name for one in fields(kind) if one.init]  # type: ignore[arg-type]
        hints = get_type_hints(kind, include_extras=True)
        self.values, self.array = attrgetter(*names), tuple[tuple(hints[name] for name in names)]  # type: ignore[misc]
        self._kind, self._decode = kind, decoder(self.array)

    def load(self, row: bytes) -> _T:
        return self._kind(*self._decode(row))


def _encoder(*, canonical: bool) -> Callable[[Any], bytes]:
    """Make a function that encodes values of a checkpoint. canonical: equal bitmaps give equal bytes, which takes
    longer for large bitmaps."""

    def plain(value: Any) -> bytes:
        if not isinstance(value, BitMap):
            return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()  # type: ignore[no-any-return]
        # Equal sets must give equal bytes: build the bitmap anew, as its inner form may depend on earlier changes.
        packed = BitMap(value.to_array()) if canonical else value.copy()
        packed.run_optimize()
        return bytes(packed.serialize())

    return msgspec.msgpack.Encoder(enc_hook=plain).encode


def decoder(kind: Any) -> Callable[[bytes], Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_plain).decode


def _from_plain(kind: Any, raw: bytes) -> Any:
    """Decode a bitmap, or a numpy array, from its bytes."""
    if kind is BitMap:
        return BitMap.deserialize(raw)
    return np.frombuffer(raw, LEASED if kind == Rows else "<u4").copy()


encode, encode_canonical = _encoder(canonical=False), _encoder(canonical=True)
