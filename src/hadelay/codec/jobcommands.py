"""Bulk jobs in the Raft log: what a job changes (JobSpec), and the bodies of JOB_BEGIN, JOB_STEP, JOB_STOP and
SUBSCRIPTION_FILL. docs/spec/commands.md has their fields with examples.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from hadelay.codec.packed import U32, U64, Name, Packed, check_size
from hadelay.model import NONE32

#: Limit of the messages in one JOB_STEP; the job's next JOB_STEP changes further messages.
MAX_STEP = 500
#: Limit of the topics of one job; a pattern that matches more topics is refused.
MAX_TOPICS = 1_000
#: Limit of the message ids in a job's specification, because each checkpoint and each list of jobs contains them.
MAX_IDS = 200
#: Size of the hash of an Idempotency-Key, in bytes.
REQUEST_BYTES = 16
JobAction = Literal["cancel", "reschedule", "deliver_now", "redrive", "delete_dead", "transfer", "fill"]
#: Actions on dead letters; the others are on waiting messages.
ON_DEAD = frozenset(("redrive", "delete_dead"))
#: Position of a job in the hour files: (hour, globalIndex) of the next entry to look at.
JobCursor = tuple[U32, U32]
#: Cursor of a job that has looked at all entries.
LAST: JobCursor = (NONE32, NONE32)


class JobSpec(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Specification of a bulk job: selection of messages, and the change to them. Times and durations are in ms."""

    action: JobAction
    #: Name of a topic, or a pattern in which "*" stands for any text, even for an empty text.
    topic: str
    #: Filter: only messages with all these tags.
    tags: tuple[str, ...] = ()
    #: Filter: only messages whose client key begins with this text.
    key_prefix: str = ""
    #: Filter: only messages due in [from_ms, to_ms), or dead letters that died in this range.
    from_ms: int | None = None
    to_ms: int | None = None
    #: Filter: only messages of this group.
    group: str = ""
    #: Filter: only messages that this schedule made.
    schedule: str = ""
    #: Filters. ids: only these messages. error: only dead letters, or messages that wait for a retry, whose last error
    #: is in the same group of errors as this text (words.error_group).
    ids: tuple[int, ...] = ()
    error: str = ""
    #: Filter: only messages that wait for a retry.
    retrying: bool = False
    #: For "reschedule", exactly one of: shift_ms, by which due times move; at_ms, the new due time; delay_ms, from the
    #: beginning of the job.
    shift_ms: int | None = None
    at_ms: int | None = None
    delay_ms: int | None = None
    #: Limit of messages per second; None: no limit.
    rate: float | None = None
    #: For "transfer": name of the topic that gets the messages; "": each goes back to the topic in which it died.
    into: str = ""
    #: For "fill", which only SUBSCRIPTION_FILL begins: the new subscription (orders~billing) that gets the copies.
    subscription: str = ""


class FillBegin(Packed, frozen=True):
    """SUBSCRIPTION_FILL: create a subscription, and begin the job that copies the topic's pending messages to it."""

    node: str
    #: Name of the token that asked for the subscription; "" without tokens.
    by: str
    topic: Name
    subscription: Name
    config: dict[str, Any]


class JobBegin(Packed, frozen=True):
    node: str
    #: Name of the token that asked for the job; "" without tokens.
    by: str
    #: Hash of the Idempotency-Key of the request that began the job; empty: it had none.
    request: Annotated[bytes, Meta(max_length=REQUEST_BYTES)]
    #: Names of the topics that matched `spec.topic` when the job was proposed.
    topics: Annotated[list[str], Meta(max_length=MAX_TOPICS)]
    spec: JobSpec

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.topics:
            check_size(name)


class JobStep(Packed, frozen=True):
    """JOB_STEP: carry out the job for `ids`, and set its cursor; refused unless the cursor is `expected`. ids: message
    ids; for a fill, which copies index entries, ids made from the hour and globalIndex of these entries."""

    job: U32
    expected: JobCursor
    cursor: JobCursor
    ids: Annotated[Sequence[U64], Meta(max_length=MAX_STEP)]

    def __post_init__(self) -> None:
        if len(set(self.ids)) < len(self.ids):
            raise ValueError("the messages of a JOB_STEP must not have duplicates")
        if self.cursor <= self.expected:
            raise ValueError("the new cursor of a JOB_STEP must be after the expected cursor")


class JobStop(Packed, frozen=True):
    job: U32


#: Encodes a specification alone, to compare it and to limit its size.
pack_spec = msgspec.msgpack.Encoder().encode
