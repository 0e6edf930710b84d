"""Bulk jobs in the Raft log: what a job changes (JobSpec), and the bodies of JOB_BEGIN, JOB_STEP and JOB_STOP.

docs/spec/commands.md has every layout with an example.
"""

import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hadelay.codec.wire import Malformed, WireReader, pack_name
from hadelay.model import NONE32

#: Limits of messages in one JOB_STEP, and of topics of one job.
MAX_STEP = 500
MAX_TOPICS = 1_000
#: Limit of the ids in a specification, which is in each checkpoint and in each list of jobs.
MAX_IDS = 200
#: Size of the hash of an Idempotency-Key, in bytes; all zero: the request had none.
REQUEST_BYTES = 16
JobAction = Literal["cancel", "reschedule", "deliver_now", "redrive", "delete_dead", "fill"]
#: Actions on dead letters; the others are on waiting messages.
ON_DEAD = frozenset(("redrive", "delete_dead"))
#: Position of a job in the hour files: (hour, globalIndex) of the next entry to look at.
JobCursor = tuple[int, int]
#: Cursor of a job that has looked at all entries.
LAST: JobCursor = (NONE32, NONE32)

_STEP = struct.Struct("<I4IH")
_NUMBER = struct.Struct("<I")
_TOPICS = struct.Struct("<H")
_U64 = np.dtype("<u8")


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Specification of a bulk job: selection of messages, and the change to them. Times and durations are in ms."""

    action: JobAction
    #: Name of a topic, or a pattern in which "*" stands for any text, even for an empty text.
    topic: str
    #: Filter: only messages with all these tags, whose client key begins with `key_prefix`, due in [from_ms, to_ms).
    #: For dead letters the times are those of the deaths.
    tags: tuple[str, ...] = ()
    key_prefix: str = ""
    from_ms: int | None = None
    to_ms: int | None = None
    #: Filter: only messages of this group, or made by this schedule.
    group: str = ""
    schedule: str = ""
    #: Filter: only these messages; only dead letters whose last error belongs to this group (words.error_group).
    ids: tuple[int, ...] = ()
    error: str = ""
    #: For "reschedule", exactly one of: shift_ms, by which due times move; at_ms, the new due time; delay_ms, from the
    #: beginning of the job.
    shift_ms: int | None = None
    at_ms: int | None = None
    delay_ms: int | None = None
    #: Limit of messages per second; None: no limit.
    rate: float | None = None
    #: For "fill", which only SUBSCRIPTION_FILL begins: the new subscription (orders~billing) that gets the copies.
    subscription: str = ""


class FillBegin(NamedTuple):
    """SUBSCRIPTION_FILL: create a subscription, and begin the job that copies the topic's pending messages to it."""

    node: str
    #: Name of the token that asked for the subscription; "" without tokens.
    by: str
    topic: str
    subscription: str
    config: Any


class JobBegin(NamedTuple):
    node: str
    #: Name of the token that asked for the job; "" without tokens.
    by: str
    #: Hash of the Idempotency-Key of the request that began the job; zero bytes: it had none.
    request: bytes
    #: Names of the topics that matched `spec.topic` when the job was proposed.
    topics: list[str]
    spec: JobSpec


class JobStep(NamedTuple):
    """JOB_STEP: carry out the job for `ids`, and set its cursor; refused unless the cursor is `expected`. ids: of
    messages; of a fill, which means entries, ids made from hour and globalIndex of these entries."""

    job: int
    expected: JobCursor
    cursor: JobCursor
    ids: NDArray[np.uint64]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(JobSpec).decode


def pack_spec(spec: JobSpec) -> bytes:
    return _encode(spec)


def unpack_spec(data: bytes | memoryview) -> JobSpec:
    """Decode a specification. Raises Malformed."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Malformed(f"not the specification of a job: {error}") from error


def begin_body(begin: JobBegin) -> bytes:
    names = [pack_name(name) for name in (begin.node, begin.by)]
    topics = [_TOPICS.pack(len(begin.topics)), *map(pack_name, begin.topics)]
    return b"".join((*names, begin.request or bytes(REQUEST_BYTES), *topics, pack_spec(begin.spec)))


def decode_begin(reader: WireReader) -> JobBegin:
    node, by, request = reader.name(), reader.name(), bytes(reader.take(REQUEST_BYTES))
    (count,) = reader.unpack(_TOPICS)
    if count > MAX_TOPICS:
        raise Malformed(f"a JOB_BEGIN must name at most {MAX_TOPICS} topics")
    topics = [reader.name() for _ in range(count)]
    return JobBegin(node, by, request, topics, unpack_spec(reader.take(len(reader.view) - reader.at)))


def decode_fill(reader: WireReader) -> FillBegin:
    return FillBegin(reader.name(), reader.name(), reader.named(), reader.named(), reader.msgpack())


def step_body(
    job: int, expected: JobCursor, cursor: JobCursor, ids: Sequence[int] | NDArray[np.uint64]
) -> bytes:  # fmt: skip
    return _STEP.pack(job, *expected, *cursor, len(ids)) + np.asarray(ids, _U64).tobytes()


def decode_step(reader: WireReader) -> JobStep:
    job, hour, index, to_hour, to_index, count = reader.unpack(_STEP)
    ids = reader.array(_U64, count)
    if count > MAX_STEP or len(np.unique(ids)) < count:
        raise Malformed(f"a JOB_STEP must name at most {MAX_STEP} messages, without duplicates")
    if (to_hour, to_index) <= (hour, index):
        raise Malformed("the new cursor of a JOB_STEP must be after the expected cursor")
    return JobStep(job, (hour, index), (to_hour, to_index), ids)


def decode_stop(reader: WireReader) -> int:
    (job,) = reader.unpack(_NUMBER)
    return int(job)


def stop_body(job: int) -> bytes:
    return _NUMBER.pack(job)
