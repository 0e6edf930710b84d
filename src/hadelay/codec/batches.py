"""Batches with one completion callback, as the log and the tables hold them: specification, state, commands 60 to 63.

docs/spec/commands.md has the fields of each command with an example, docs/spec/lifecycle.md the life of a batch.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta as Bounds

from hadelay.codec.commandtypes import Command
from hadelay.codec.meta import unpack
from hadelay.codec.packed import U8, U32, U64, Name, Packed
from hadelay.codec.wire import WireReader, frame

#: Limit of the members that one BATCH_STEP cancels; the next BATCH_STEP cancels further members.
MAX_STEP = 500
#: Limits of a callback, in bytes: its body, and its meta map; a larger callback is refused.
MAX_BODY, MAX_META = 16 << 10, 8 << 10
#: Limit of the lifetime that a request may give to a batch, in ms; a longer one is refused.
MAX_LIFETIME_MS = 366 * 86_400_000
#: Limit of the failures (members that were not acked) that a batch lists; further failures are only counted.
MAX_FAILURES = 1_000
#: Time for which a batch is kept after its end, in ms.
KEPT_MS = 7 * 86_400_000
#: Bits of State.flags. ENDED: all members are settled, or the lifetime is over. EXPIRED: the lifetime ended first.
#: REFUSED: the callback could not be published.
SEALED, CANCELLED, ENDED, EXPIRED, REFUSED = 1, 2, 4, 8, 16


class On(IntEnum):
    """Which outcome of a batch publishes the callback, once all members are settled."""

    #: Publish the callback whatever the outcome is.
    COMPLETE = 0
    #: Publish the callback if every member was acked, and the batch was not cancelled.
    SUCCESS = 1
    #: Publish the callback if a member became a dead letter.
    DEATH = 2


class Spec(Packed, frozen=True):
    #: Topic to which the callback is published.
    topic: Name
    on: Annotated[int, Bounds(ge=0, le=int(max(On)))]
    #: Values of the callback: delay, and TTL (0: the topic's TTL), in ms; tag mask; meta map; body (None: a JSON
    #: document about the batch).
    delay_ms: U64
    ttl_ms: U64
    tag_mask: U64
    meta: Annotated[bytes, Bounds(max_length=MAX_META)]
    body: Annotated[bytes, Bounds(max_length=MAX_BODY)] | None
    #: Lifetime of the batch from its opening on, in ms: a batch that is unfinished after this time expires.
    lifetime_ms: Annotated[int, Bounds(gt=0, le=MAX_LIFETIME_MS)]

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            unpack(self.meta)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ValueError(f"the meta of a callback must be a meta map: {error}") from error


class Open(Packed, frozen=True):
    #: Name of the token of the request; "" without tokens.
    by: str
    key: Name
    spec: Spec


class Seal(Packed, frozen=True):
    key: Name


class Cancel(Packed, frozen=True):
    key: Name


class Step(Packed, frozen=True):
    """BATCH_STEP: cancel the messages with these ids, as far as they wait and are members of cancelled batches."""

    #: New value of BatchCounts.searched (ledger/state.py), once all waiting members are found; 0: the search goes on.
    searched: U64
    ids: Annotated[Sequence[U64], Bounds(max_length=MAX_STEP)]


class Stored(Packed, frozen=True):
    """Values of a batch that BATCH_OPEN wrote, and that never change."""

    key: Name
    #: Name of the token that opened the batch; "" without tokens.
    creator: str
    spec: Spec


class State(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Counters of a batch. Only apply changes them (Ledger.batch_states)."""

    flags: U8 = 0
    #: Number of members, settled members included.
    joined: U64 = 0
    #: Numbers of settled members by outcome.
    acked: U64 = 0
    dead: U64 = 0
    expired: U64 = 0
    cancelled: U64 = 0
    #: Number of failures (members that were not acked) that the batch lists, at most MAX_FAILURES.
    failures: U32 = 0
    #: Times of opening, sealing and end, in Unix ms; 0: has not happened yet.
    opened_ms: U64 = 0
    sealed_ms: U64 = 0
    ended_ms: U64 = 0
    #: Time at which an unfinished batch expires, or a finished one is forgotten.
    until_ms: U64 = 0
    #: Message id of the callback; 0 if none was published.
    callback: U64 = 0

    @property
    def settled(self) -> int:
        return self.acked + self.dead + self.expired + self.cancelled

    @property
    def complete(self) -> bool:
        """Whether no message can join any more, and all members are settled."""
        return bool(self.flags & SEALED) and self.settled == self.joined

    def calls_back(self, on: int) -> bool:
        """Whether the outcome of a complete batch publishes its callback."""
        succeeded = self.acked == self.joined and not self.flags & CANCELLED
        return {On.SUCCESS: succeeded, On.DEATH: self.dead > 0}.get(On(on), True)


def encode_open(key: str, spec: Spec, by: str = "") -> bytes:
    return frame(Command.BATCH_OPEN, Open(by, key, spec).pack())


def encode_seal(key: str) -> bytes:
    return frame(Command.BATCH_SEAL, Seal(key).pack())


def encode_cancel(key: str) -> bytes:
    return frame(Command.BATCH_CANCEL, Cancel(key).pack())


def encode_step(searched: int, ids: Sequence[int]) -> bytes:
    return frame(Command.BATCH_STEP, Step(searched, ids).pack())


DECODERS: dict[int, Callable[[WireReader], Any]] = {
    Command.BATCH_OPEN: Open.read,
    Command.BATCH_SEAL: Seal.read,
    Command.BATCH_CANCEL: Cancel.read,
    Command.BATCH_STEP: Step.read,
}
