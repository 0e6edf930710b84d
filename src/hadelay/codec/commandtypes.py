"""Commands of the Raft log as numbers and values; codec/commands.py has their bytes."""

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.ackresults import AckResults
from hadelay.codec.callreplies import CallReplies
from hadelay.codec.formats import U32, Rows
from hadelay.version import (
    EXPIRY_LEVEL,
    FILL_LEVEL,
    MEMBERS_LEVEL,
    SCHEDULER_LEVEL,
    SETTLE_LEVEL,
    SUBSCRIPTION_LEVEL,
)

MAX_REQUEST_ID = 64
#: Limit of messages in a grant: lease tokens hold the position in the grant as a u16.
MAX_GRANT = 65_535
#: Highest sequence number of a grant: lease tokens hold this number as a u32.
MAX_SEQ = (1 << 32) - 1
#: Maximum time in ms from a grant's commit to the due time of its messages; they are handed out when due.
MAX_AHEAD_MS = 100


class Command(IntEnum):
    """Command numbers, which are in the log: never renumber. 32–63 are for keys, reschedule, retries, webhooks and
    flow, 64–79 for access, 80–95 for the cluster, 96–127 for schedules, groups, bulk jobs and settlements."""

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
    PUBLISH2 = 17
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
    SCHEDULE_PUT = 96
    SCHEDULE_DELETE = 97
    SCHEDULE_FIRE = 98
    SCHEDULE_STATE = 99
    SCHEDULE_RUN = 100
    SUBSCRIPTION_PUT = 101
    TOPIC_EXPIRY = 102
    SUBSCRIPTION_FILL = 103
    SETTLE = 113
    JOB_BEGIN = 120
    JOB_STEP = 121
    JOB_STOP = 122


#: Commands that publish messages.
PUBLISHES = (Command.PUBLISH, Command.PUBLISH2)


class Job(IntEnum):
    """Maintenance jobs, run in slices. Each slice is a replicated command, whose number is the job's value."""

    #: Write the `cancelled` events of messages that a deletion or purge of their topic cancelled.
    SWEEP = Command.SWEEP
    #: Move pending messages from the files of a past hour to the files of the current hour.
    ROLL_FORWARD = Command.CARRY
    #: Delete the files of an hour whose messages are all settled.
    RETIRE = Command.RETIRE
    #: Expire messages that are not leased and whose TTL has passed.
    TTL_EXPIRE = Command.TTL_EXPIRE
    #: Delete dead letters whose retention is over, an hour at a time: dead letters are stored by the hour in which
    #: their retention ends.
    DROP_DEAD = Command.DROP_DEAD
    #: Continue the redrive of a topic's dead letters, as far as the redrive's rate allows.
    REDRIVE = Command.REDRIVE_SOME


#: Feature level that a command needs, if above the first. Until the cluster has switched to that level, apply refuses
#: the command on every node, even on nodes that know the command.
LEVEL_OF: dict[int, int] = {
    Command.PUBLISH2: SCHEDULER_LEVEL, Command.MEMBERS: MEMBERS_LEVEL, Command.SETTLE: SETTLE_LEVEL,
    Command.JOB_BEGIN: SCHEDULER_LEVEL, Command.JOB_STEP: SCHEDULER_LEVEL, Command.JOB_STOP: SCHEDULER_LEVEL,
    Command.SCHEDULE_PUT: SCHEDULER_LEVEL, Command.SCHEDULE_DELETE: SCHEDULER_LEVEL,
    Command.SCHEDULE_FIRE: SCHEDULER_LEVEL, Command.SCHEDULE_STATE: SCHEDULER_LEVEL,
    Command.SCHEDULE_RUN: SCHEDULER_LEVEL, Command.SUBSCRIPTION_PUT: SUBSCRIPTION_LEVEL,
    Command.TOPIC_EXPIRY: EXPIRY_LEVEL, Command.SUBSCRIPTION_FILL: FILL_LEVEL,
}  # fmt: skip


class Audited(NamedTuple):
    """A command with its audit trail entry (who asked for what). The result is the inner command's result."""

    node: str
    token_id: str
    token: str
    action: str
    target: str
    kind: int
    body: memoryview


class Grant(NamedTuple):
    """Proposal to lease messages to `consumer`; apply decides for each message."""

    term: int
    #: Sequence number that the leader chose, 1 to MAX_SEQ; unique among the grants of a term that still have leases.
    seq: int
    lease_ms: int
    consumer: str
    #: Id of the receive request; empty if the request is not idempotent.
    request_id: bytes
    node: str
    hours: U32
    indexes: U32
    #: dispatch.sync = "interval": the messages are handed out already; apply leases them even beyond topic limits.
    handed: bool = False
    #: Messages due within this time, in ms (at most MAX_AHEAD_MS), may be granted, too; they are handed out when due.
    ahead_ms: int = 0


class SettleLeases(NamedTuple):
    """An ACK, NACK or EXTEND. `value_ms`: delay of a NACK (negative: see commands.encode_nack), or lease time of an
    EXTEND."""

    node: str
    value_ms: int
    rows: Rows
    #: Reason of a NACK, or progress that comes with an EXTEND, for people; at most MAX_REASON bytes.
    reason: str = ""
    #: Hand-out delay of each lease: ms from the grant until the message was handed to the consumer; NONE32: unknown.
    delays: U32 | None = None
    #: Results of an ACK, of some of its leases.
    results: AckResults | None = None
    #: Answers to the webhook calls about some leases of an ACK, for callbacks.
    replies: CallReplies | None = None


class RedriveCommand(NamedTuple):
    """Redrive the dead letters `ids`, or `all` of the topic at `rate` per second (None: as fast as possible)."""

    node: str
    topic: str
    all: bool
    rate: float | None
    ids: NDArray[np.uint64]


class Cancel(NamedTuple):
    """Cancel messages: those with these ids, then those with these keys (topic, hash of the client key)."""

    node: str
    ids: NDArray[np.uint64]
    keys: list[tuple[str, bytes]]


class RescheduleCommand(NamedTuple):
    """Reschedule the messages with these ids and keys. `when_ms`: new due time in Unix ms, or a delay in ms if
    `relative`; times in the past, zero and negative mean now."""

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
