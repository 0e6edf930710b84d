"""Commands of the Raft log as numbers and values; codec/commands.py has their bytes."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import U32, Rows
from hadelay.version import MEMBERS_LEVEL, SETTLE_LEVEL

MAX_REQUEST_ID = 64
#: A position in a grant is a u16 in its lease tokens.
MAX_GRANT = 65_535
#: Highest number of a grant, a u32 in its lease tokens.
MAX_SEQ = (1 << 32) - 1
#: Limit of the time between the commit of a grant and the later due time of its messages, which leave when due.
MAX_AHEAD_MS = 100


class Command(IntEnum):
    """Numbers are in the log: never renumber. 32–63 are for keys, reschedule, retries, webhooks and flow, 64–79 for
    access, 80–95 for the cluster, 96–127 for schedules, groups, bulk jobs and settlements."""

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


#: Feature levels of commands above the first level. Before the cluster has switched to that level, apply refuses the
#: command on every node alike, whether or not the node knows it.
LEVEL_OF: dict[int, int] = {Command.MEMBERS: MEMBERS_LEVEL, Command.SETTLE: SETTLE_LEVEL}


class Audited(NamedTuple):
    """A command with who asked for it; the result is the command's own."""

    node: str
    token_id: str
    token: str
    action: str
    target: str
    kind: int
    body: memoryview


class Grant(NamedTuple):
    """Lease these messages to `consumer`: a proposal, decided by apply message by message."""

    term: int
    #: Chosen by the leader: 1 to MAX_SEQ, different from the held grants of its term.
    seq: int
    lease_ms: int
    consumer: str
    #: Empty: the request is not idempotent.
    request_id: bytes
    node: str
    hours: U32
    indexes: U32
    #: The messages were handed out already (interval mode): to be recorded, whatever the topic's limits are by now.
    handed: bool = False
    #: Messages due within so many ms (at most MAX_AHEAD_MS) may be granted, too; they are handed out when due.
    ahead_ms: int = 0


class SettleLeases(NamedTuple):
    """ACK, NACK (`value_ms`: delay, −1 for the topic's own) and EXTEND (`value_ms`: the new lease)."""

    node: str
    value_ms: int
    rows: Rows
    #: Reason of a NACK, for people; at most MAX_REASON bytes.
    reason: str = ""
    #: Per lease the ms from its grant until its message was handed to the consumer, NONE32 for unknown.
    delays: U32 | None = None


class RedriveCommand(NamedTuple):
    """Bring back these dead letters, or `all` of the topic at `rate` per second (None: as fast as possible)."""

    node: str
    topic: str
    all: bool
    rate: float | None
    ids: NDArray[np.uint64]


class Cancel(NamedTuple):
    """Cancel messages, named by id, and then by (topic, hash of the client key)."""

    node: str
    ids: NDArray[np.uint64]
    keys: list[tuple[str, bytes]]


class RescheduleCommand(NamedTuple):
    """Give messages, named as in Cancel, the due time `when_ms`: Unix ms, or a delay when `relative`; past, zero and
    negative mean now."""

    node: str
    when_ms: int
    relative: bool
    ids: NDArray[np.uint64]
    keys: list[tuple[str, bytes]]


class Maintain(NamedTuple):
    """One slice of a maintenance job, of at most `limit` entries. `hour` is 0 and `topic` "" where the job has none."""

    job: Job
    hour: int
    limit: int
    topic: str = ""
