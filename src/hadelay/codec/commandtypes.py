"""Commands of the Raft log as numbers and values; codec/commands.py has their bytes."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from hadelay.codec.ackparts import AckResult, CallReply
from hadelay.codec.formats import U32, Rows
from hadelay.codec.packed import I64, U8, U16, U64, Name, Packed, check_size
from hadelay.codec.packed import U32 as Number
from hadelay.members import Members, is_whole
from hadelay.model import MAX_RATE

MAX_REQUEST_ID = 64
#: Limit of messages in a grant: lease tokens hold the position in the grant as a u16.
MAX_GRANT = 65_535
#: Highest sequence number of a grant: lease tokens hold this number as a u32.
MAX_SEQ = (1 << 32) - 1
#: Maximum time in ms from a grant's commit to the due time of its messages; they are handed out when due.
MAX_AHEAD_MS = 100
#: Hash of a client key (publishcommand.hash_client_key).
KeyHash = Annotated[bytes, Meta(min_length=16, max_length=16)]
#: Limit of topics in one TOPIC_EXPIRY; the next TOPIC_EXPIRY has further topics.
MAX_EXPIRY = 500


class Command(IntEnum):
    """Command numbers, which are in the log: never renumber. 1–15 are for messages, 16–31 for what the leader proposes
    by itself, 32–47 for topics, 48–63 for schedules, jobs and batches, 64–79 for the cluster and access."""

    NOOP = 0
    PUBLISH = 1
    GRANT = 2
    SETTLE = 3
    EXTEND = 4
    EXPIRE = 5
    CANCEL = 6
    RESCHEDULE = 7
    REDRIVE = 8
    CURSOR = 16
    SWEEP = 17
    CARRY = 18
    RETIRE = 19
    TTL_EXPIRE = 20
    DROP_DEAD = 21
    REDRIVE_SOME = 22
    ALERTED = 23
    TOPIC_EXPIRY = 24
    BATCHES = 25
    TOPIC_PUT = 32
    TOPIC_DELETE = 33
    PURGE = 34
    SUBSCRIPTION_PUT = 35
    SUBSCRIPTION_FILL = 36
    SCHEDULE_PUT = 48
    SCHEDULE_DELETE = 49
    SCHEDULE_FIRE = 50
    SCHEDULE_STATE = 51
    SCHEDULE_RUN = 52
    JOB_BEGIN = 56
    JOB_STEP = 57
    JOB_STOP = 58
    BATCH_OPEN = 60
    BATCH_SEAL = 61
    BATCH_CANCEL = 62
    BATCH_STEP = 63
    FEATURE = 64
    INCARNATION = 65
    MEMBERS = 66
    SETTINGS = 67
    SHARD_MAP = 68
    TOKEN_CREATE = 72
    TOKEN_REVOKE = 73
    AUDITED = 74


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
    #: End batches whose lifetime is over, and forget old ones.
    BATCHES = Command.BATCHES


#: Feature level that a command needs, if above the first. Until the cluster has switched to that level, apply refuses
#: the command on every node, even on nodes that know the command.
LEVEL_OF: dict[int, int] = {}


class Audited(Packed, frozen=True):
    """A command with its audit trail entry (who asked for what). The result is the inner command's result."""

    node: str
    token_id: str
    token: str
    action: str
    target: str
    #: The inner command: its number, and its encoded body.
    kind: U8
    body: memoryview


class Grant(NamedTuple):
    """Proposal to lease messages to `consumer`; apply decides for each message whether it is leased."""

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
    """A SETTLE, which is an ack or a nack, or an EXTEND. `value_ms`: delay of a nack (negative: see
    commands.encode_nack), or lease time of an EXTEND."""

    node: str
    value_ms: int
    rows: Rows
    #: Reason of a nack, or progress that comes with an EXTEND, for people; at most MAX_REASON bytes.
    reason: str = ""
    #: Hand-out delay of each lease: ms from the grant until the message was handed to the consumer; NONE32: unknown.
    delays: U32 | None = None
    #: Results that an ack stores: position of a lease in `rows` → result. Leases without a result are left out.
    results: dict[int, AckResult] | None = None
    #: Answers of webhooks, which become the bodies of callbacks: position of a lease in `rows` → answer.
    replies: dict[int, CallReply] | None = None
    #: True for a nack; False for an ack or an EXTEND.
    nack: bool = False


class RedriveCommand(Packed, frozen=True):
    """Redrive the dead letters `ids`, or `all` of the topic at `rate` per second (None: as fast as possible)."""

    node: str
    topic: Name
    all: bool
    rate: float | None
    ids: list[U64]

    def __post_init__(self) -> None:
        super().__post_init__()
        # This check keeps infinity and NaN out of the replicated state; NaN passes limits of msgspec.
        if self.rate is not None and not 0 < self.rate <= MAX_RATE:
            raise ValueError(f"a rate must be more than 0 and at most {MAX_RATE}")


class Targets(Packed, frozen=True):
    """Messages to change: those with these ids, then those with these keys (topic, hash of the client key)."""

    node: str
    ids: list[U64]
    keys: list[tuple[Name, KeyHash]]

    def __post_init__(self) -> None:
        super().__post_init__()
        for topic, _ in self.keys:
            check_size(topic)


class Cancel(Targets, frozen=True):
    pass


class RescheduleCommand(Targets, frozen=True):
    """Reschedule messages. `when_ms`: new due time in Unix ms, or a delay in ms if
    `relative`; times in the past, zero and negative mean now. `expected_ms`: change only messages that are due at this
    time (Unix ms), or already at `when_ms`; negative: change all."""

    when_ms: I64
    relative: bool
    expected_ms: I64


class TopicPut(Packed, frozen=True):
    """Change the settings in `config` of a topic; None resets a setting."""

    topic: Name
    config: dict[str, Any]


class TopicDelete(Packed, frozen=True):
    topic: Name
    #: Delete the topic even if it has pending messages or subscriptions, or schedules publish to it.
    force: bool


class Purge(Packed, frozen=True):
    topic: Name
    #: States of the messages to cancel, as bits of ledger/topics/topicchanges.py.
    states: U8


class Alerted(Packed, frozen=True):
    """ALERTED: the alert URL was notified of the topic's first `deaths` messages that became dead letters."""

    topic: Name
    deaths: U64


class Incarnation(Packed, frozen=True):
    node: Name
    incarnation: U64


class TokenCreate(Packed, frozen=True):
    """Create a token. Apply checks the values (ledger/access.py)."""

    name: str
    #: SHA-256 of the token.
    digest: bytes
    scopes: list[str]
    lifetime_ms: int | None
    #: Secret access key for AWS SDKs.
    aws_key: bytes | None


class TokenRevoke(Packed, frozen=True):
    id: Name


class NewMembers(Packed, frozen=True):
    """MEMBERS: a new list of members, in place of the list in force."""

    members: Members

    def __post_init__(self) -> None:
        for member in self.members:
            check_size(member.name)
            check_size(member.address)
        if not is_whole(self.members):
            raise ValueError("members must be sorted by name, without duplicate names or addresses, and with a voter")


class SubscriptionPut(Packed, frozen=True):
    topic: Name
    subscription: Name
    config: dict[str, Any]


class TopicUse(NamedTuple):
    """One topic of a TOPIC_EXPIRY: a topic with `expires_after` that is in use, or that is to be deleted (`ends`).
    lives, used_ms: number of the topic's deletions, and time of its last use, as the leader read them. If the topic's
    values differ when the command is applied, the topic stays as it is. For a topic in use, used_ms is not compared."""

    topic: Number
    lives: U16
    ends: bool
    used_ms: I64


class TopicExpiry(Packed, frozen=True):
    topics: Annotated[Sequence[TopicUse], Meta(min_length=1, max_length=MAX_EXPIRY)]


class Maintain(NamedTuple):
    """One slice of a maintenance job, of at most `limit` entries. A job without an hour has `hour` 0, and a job without
    a topic has `topic` ""."""

    job: Job
    hour: int
    limit: int
    topic: str = ""
