"""Commands of the Raft log as numbers and values; codec/commands.py has their bytes."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import U32, Rows
from hadelay.version import MEMBERS_LEVEL, SETTLE_LEVEL

MAX_REQUEST_ID = 64
#: A position in a grant is a u16 in its lease tokens.
MAX_GRANT = 65_535
#: The last number of a grant, a u32 in its lease tokens too.
MAX_SEQ = (1 << 32) - 1
#: A grant may be committed at most this long before its messages are due (they are handed out when they are).
MAX_AHEAD_MS = 100


class Audited(NamedTuple):
    """A command, and who wanted it: the answer is the command's own."""

    node: str
    token_id: str
    token: str
    action: str
    target: str
    kind: int
    body: memoryview


class Command(IntEnum):
    """Numbers are in the log: never renumber. 32–63 are kept for keys, reschedule, retries, webhooks and flow, 64–79
    for access, 80–95 for the cluster, 96–127 for schedules, groups, bulk jobs and settlements."""

    NOOP = 0
    PUBLISH = 1
    GRANT = 2
    ACK = 3
    NACK = 4
    EXTEND = 5
    EXPIRE = 6
    CANCEL = 7
    CURSOR = 8
    TOPIC_PUT = 9
    TOPIC_DELETE = 10
    SWEEP = 11
    CARRY = 12
    RETIRE = 13
    FEATURE = 14
    INCARNATION = 15
    SETTINGS = 16
    RESCHEDULE = 32
    REDRIVE = 33
    TTL_EXPIRE = 34
    PURGE = 35
    DROP_DEAD = 36
    REDRIVE_SOME = 40
    ALERTED = 41
    TOKEN_CREATE = 64
    TOKEN_REVOKE = 65
    AUDITED = 66
    MEMBERS = 80
    SETTLE = 113


class Job(IntEnum):
    """Background work in slices, each a command of its own number (`Command`)."""

    #: Write down what deletions and purges cancelled.
    SWEEP = Command.SWEEP
    #: Move what an hour that is over still owes to the running hour.
    ROLL_FORWARD = Command.CARRY
    #: Forget a drained hour.
    RETIRE = Command.RETIRE
    #: End messages that wait and are past their TTL.
    TTL_EXPIRE = Command.TTL_EXPIRE
    #: Forget an hour of dead letters that is over.
    DROP_DEAD = Command.DROP_DEAD
    #: Go on with the redrive of a topic, as far as its rate allows.
    REDRIVE = Command.REDRIVE_SOME


#: The feature level that brought a command, where it is above the first. Before the cluster has switched to it, apply
#: refuses the command on every node alike: those that know it, and those to which its number means nothing.
LEVEL_OF: dict[int, int] = {Command.MEMBERS: MEMBERS_LEVEL, Command.SETTLE: SETTLE_LEVEL}


class Grant(NamedTuple):
    """Lease these messages to `consumer`: a proposal, decided by apply message by message."""

    term: int
    #: Chosen by the leader: 1 to MAX_SEQ, and not one of a grant of its term that is held.
    seq: int
    lease_ms: int
    consumer: str
    #: Empty: the request is not idempotent.
    request_id: bytes
    node: str
    hours: U32
    indexes: U32
    #: They were handed out already (interval mode): to be recorded, whatever the topic's limits say by now.
    handed: bool = False
    #: Messages that fall due within so many ms may be granted too (at most MAX_AHEAD_MS): they are handed out then.
    ahead_ms: int = 0


class SettleLeases(NamedTuple):
    """ACK, NACK (`value_ms`: delay, −1 for the topic's own) and EXTEND (`value_ms`: the new lease)."""

    node: str
    value_ms: int
    rows: Rows
    #: Of a NACK: why, for people; at most MAX_REASON bytes, "" for none.
    reason: str = ""
    #: Per lease: ms from its grant until its message was handed to the consumer, NONE32 where that is not known.
    delays: U32 | None = None


class Redrive(NamedTuple):
    """Of these dead letters, or of `all` there are: those at `rate` per second (None: as fast as it goes)."""

    node: str
    topic: str
    all: bool
    rate: float | None
    ids: NDArray[np.uint64]


class Cancel(NamedTuple):
    """Messages by id, and then by (topic, hash of the client key)."""

    node: str
    ids: NDArray[np.uint64]
    keys: list[tuple[str, bytes]]


class Reschedule(NamedTuple):
    """As CANCEL names them. `when_ms`: Unix ms, or a delay when `relative`; past, zero and negative are now."""

    node: str
    when_ms: int
    relative: bool
    ids: NDArray[np.uint64]
    keys: list[tuple[str, bytes]]


class Maintain(NamedTuple):
    """One slice of background work, on at most `limit` entries. `hour` is 0 and `topic` empty where a job has none."""

    job: Job
    hour: int
    limit: int
    topic: str = ""
