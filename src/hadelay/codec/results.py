"""Results of apply: one value per command, in order. A refusal is a value too, because apply never raises."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import I64, Mask


class RowCode(IntEnum):
    """Outcome of one message (row) of a PUBLISH."""

    OK = 0
    #: The due time is beyond max_delay: refused, never clamped (422).
    TOO_FAR = 1
    #: The Idempotency-Key was used with another payload or other options (422).
    KEY_CONFLICT = 2
    #: The topic does not exist and auto_create_topics is off (404).
    NO_TOPIC = 3
    #: The hour of the due time is full: it has 2³² − 1 index entries (429).
    HOUR_FULL = 4
    #: The topic is new, and the limit max_topics is reached (429).
    TOO_MANY_TOPICS = 5
    #: on_conflict is reject, and a pending message (its id is in `others`) has the same client key (409).
    KEY_PENDING = 6
    #: on_conflict is replace, and a leased message (its id is in `others`) has the same client key (409).
    KEY_LEASED = 7
    #: The topic has max_messages pending messages (429).
    TOO_MANY_MESSAGES = 8
    #: The pending messages of the topic would have more than max_bytes (429).
    TOO_MANY_BYTES = 9
    #: The topic's publish_rate is exceeded (429).
    TOO_FAST = 10
    #: The message names a webhook URL of its own, and the topic does not allow that (422).
    NO_CALLBACK = 12
    #: A subscription that gets the message has max_messages pending messages, or would have more than max_bytes (429).
    SUBSCRIPTION_FULL = 13
    #: The message has a `unique_for`, and the cluster already remembers the maximum number of such keys (429).
    TOO_MANY_KEYS = 14
    #: The message stored under the Idempotency-Key (its id is in `others`) was cancelled or purged since then (409).
    KEY_CANCELLED = 15
    #: The topic is new. The token has used up its share of topics, or only admin tokens may create more topics (429).
    SHARE_OF_TOPICS = 16
    #: The request's token has used up its share of the Idempotency-Keys, or of the keys with `unique_for` (429).
    SHARE_OF_KEYS = 17
    #: There is no batch with the key that the message names (404).
    NO_BATCH = 18
    #: The batch is sealed, cancelled or has ended: no message can join (409).
    BATCH_CLOSED = 19
    #: The topic is new, and the shard map gives it to another shard, or to none while the map changes; or another row
    #: of the same request is refused for that reason (503).
    OTHER_SHARD = 20
    #: A topic of the message's own callbacks is new, and belongs to another shard (422).
    FOREIGN_TARGET = 21


#: Refusals after which the same publish may succeed later; their answers have `retryable: true`.
RETRYABLE = frozenset(
    (
        RowCode.HOUR_FULL, RowCode.TOO_MANY_TOPICS, RowCode.TOO_MANY_MESSAGES, RowCode.TOO_MANY_BYTES,
        RowCode.TOO_FAST, RowCode.SUBSCRIPTION_FULL, RowCode.TOO_MANY_KEYS, RowCode.SHARE_OF_TOPICS,
        RowCode.SHARE_OF_KEYS, RowCode.OTHER_SHARD,
    )
)  # fmt: skip


class LeaseOutcome(IntEnum):
    """Outcome of one lease of an ACK, NACK or EXTEND."""

    DONE = 0
    ALREADY_ACKED = 1
    LEASE_LOST = 2
    #: NACK only: the command reached its limit of copied bytes; the lease is unchanged. Propose its nack again.
    AGAIN = 3


class TargetOutcome(IntEnum):
    """Outcome of one message of a RESCHEDULE."""

    DONE = 0
    LEASED = 1
    ACKED = 2
    EXPIRED = 3
    DEAD = 4
    NOT_FOUND = 5
    CANCELLED = 6
    #: The new due time is beyond max_delay (422).
    TOO_FAR = 7
    #: The RESCHEDULE reached the limit of messages, or of moved bytes, of one command: propose this message again.
    AGAIN = 8
    #: The outcomes of the message and its copies for subscriptions differ; see `copies` of the result.
    PARTIAL = 9
    #: The message is due at another time than the command expected: it was rescheduled or retried meanwhile.
    MOVED = 10


class CancelOutcome(IntEnum):
    CANCELLED = 0
    LEASED = 1
    ACKED = 2
    EXPIRED = 3
    DEAD = 4
    NOT_FOUND = 5
    #: Same number as in TargetOutcome: a message and its copies have different outcomes.
    PARTIAL = 9


class RedriveOutcome(IntEnum):
    """Outcome of one id of a REDRIVE."""

    REDRIVEN = 0
    SCHEDULED = 1
    READY = 2
    LEASED = 3
    ACKED = 4
    CANCELLED = 5
    EXPIRED = 6
    #: The id was never issued, or its message is gone or in another topic.
    NOT_FOUND = 7
    #: The command had too many ids for one apply: propose this id again.
    AGAIN = 8
    #: Another message with the same client key is pending: the dead letter stays dead.
    KEY_TAKEN = 9
    BLOCKED = 10


@dataclass(slots=True)
class PublishResult:
    """Result of a PUBLISH, in the order of its rows. Where `codes` is not OK, `ids` and `deliver_at_ms` are 0."""

    ids: NDArray[np.uint64]
    deliver_at_ms: I64
    codes: NDArray[np.uint8]
    #: True for rows that stored no new message. `ids` and `deliver_at_ms` are those of the first answer to the same
    #: Idempotency-Key, or of the pending message with the same client key.
    duplicate: Mask
    #: For rows with client keys: id of the replaced message, or of the message that blocks the row; for KEY_CANCELLED:
    #: id of the cancelled message; 0: none.
    others: NDArray[np.uint64] | None = None

    @classmethod
    def blank(cls, count: int) -> PublishResult:
        """A result of `count` rows, all OK so far."""
        return cls(
            np.zeros(count, np.uint64), np.zeros(count, np.int64), np.zeros(count, np.uint8), np.zeros(count, bool)
        )

    def note_others(self, rows: int | slice, ids: int | NDArray[np.uint64]) -> None:
        if self.others is None:
            self.others = np.zeros(len(self.ids), np.uint64)
        self.others[rows] = ids


@dataclass(slots=True)
class GrantResult:
    term: int
    seq: int
    #: For each proposed message, whether it is leased to the consumer now. Only then may it be handed out.
    granted: Mask
    attempts: NDArray[np.uint16]
    until_ms: int
    #: (term, seq) of an earlier grant of the same {consumer, request_id} that still has leases: nothing new was
    #: granted; hand out the earlier grant again.
    existing: tuple[int, int] | None = None


@dataclass(slots=True)
class LeaseResult:
    """Result of ACK, NACK and EXTEND: a LeaseOutcome per lease. until_ms: new lease end, for EXTEND only."""

    outcomes: NDArray[np.uint8]
    until_ms: int = 0


@dataclass(slots=True)
class ExpireResult:
    """Result of EXPIRE. returned: number of messages whose leases had run out and were ended. remaining: (term,
    seq) of the grants in the command that still have leases."""

    returned: int
    remaining: list[tuple[int, int]]


@dataclass(slots=True)
class CancelResult:
    #: a CancelOutcome for each message that the command names
    outcomes: NDArray[np.uint8]
    #: For each named message, if it has copies for subscriptions: (topic or subscription, id, CancelOutcome) of itself
    #: and of its copies. None if no message has copies.
    copies: list[list[tuple[str, int, int]]] | None = None


@dataclass(slots=True)
class RedriveResult:
    #: a RedriveOutcome for each id in the command
    outcomes: NDArray[np.uint8]


@dataclass(slots=True)
class RescheduleResult:
    """Result of RESCHEDULE, per named message: its outcome (TargetOutcome); its id, 0 if not found; its due time, if
    the outcome is DONE or MOVED; and whether its group blocks it, if the outcome is DONE."""

    outcomes: NDArray[np.uint8]
    ids: NDArray[np.uint64]
    deliver_at_ms: I64
    #: None if no message is blocked: the node link then sends a result without this field.
    blocked: Mask | None = None
    #: For each named message, if it has copies for subscriptions: (topic or subscription, id, TargetOutcome) of itself
    #: and of its copies. None if no message has copies: the node link then leaves this field out.
    copies: list[list[tuple[str, int, int]]] | None = None


class FireOutcome(IntEnum):
    """Outcome of one schedule of a SCHEDULE_FIRE."""

    DONE = 0
    #: The schedule has changed since the leader proposed the firing: nothing was done.
    STALE = 1
    #: The times contradict the schedule's state or limits: nothing was done.
    REFUSED = 2


@dataclass(slots=True)
class FireResult:
    """Result of SCHEDULE_FIRE: a FireOutcome per schedule; numbers of occurrences by outcome."""

    outcomes: NDArray[np.uint8]
    made: int = 0
    missed: int = 0
    overlapped: int = 0
    refused: int = 0


@dataclass(slots=True)
class JobResult:
    """Result of one slice of a maintenance job, or of the start of a redrive. Propose the next slice until `done`."""

    done: bool
    count: int


@dataclass(slots=True)
class JobBegun:
    """Result of a JOB_BEGIN: the job's number. again: an earlier request with the same Idempotency-Key began it."""

    job: int
    again: bool


@dataclass(slots=True)
class Done:
    """Result of commands without a result type of their own. `changed` is False if the command found nothing to do."""

    changed: bool = True


@dataclass(slots=True)
class Refused:
    """Result of a refused command, which changed nothing. `code` is stable: malformed, unknown_command, bad_config,
    no_topic, topic_not_empty, hour_running, hour_open, unsupported_level, …; `detail` is for people."""

    code: str
    detail: str = ""

    @property
    def retryable(self) -> bool:
        """Whether the same command may succeed later: a limit was reached."""
        return self.code.startswith("too_many_") or self.code in (
            "disk_full",
            "needs_upgrade",
            "share_of_keys",
            "other_shard",
        )


Result = (
    PublishResult
    | GrantResult
    | LeaseResult
    | ExpireResult
    | CancelResult
    | RescheduleResult
    | RedriveResult
    | FireResult
    | JobResult
    | JobBegun
    | Done
    | Refused
)
