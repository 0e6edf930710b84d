"""Turns apply's refusals of publishes and commands into errors for users; remembers which topics exceeded their publish
rate."""

import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from hadelay.codec.results import Refused, RowCode
from hadelay.errors import BadRequest, Conflict, DiskFull, HadelayError, Impossible, LimitReached, NotFound, OtherShard
from hadelay.model import Draft, encode_id

#: Limit of the time, in ms, for which a topic is throttled: its settings may change meanwhile.
_LONGEST_MS = 1_000
_LIMITS = {
    RowCode.TOO_MANY_MESSAGES: "max_messages",
    RowCode.TOO_MANY_BYTES: "max_bytes",
    RowCode.TOO_FAST: "publish_rate",
}
_PROBLEMS: dict[RowCode, tuple[type[HadelayError], str]] = {
    RowCode.TOO_FAR: (Impossible, "deliver_at is further ahead than this cluster allows (limits.max_delay)"),
    RowCode.KEY_CONFLICT: (
        Impossible, "this Idempotency-Key was used with another payload or other options: take a new key",
    ),
    RowCode.KEY_CANCELLED: (
        Conflict,
        "the message stored under this Idempotency-Key was cancelled, by a cancel, a purge or a deletion of its topic, "
        "and nothing new is stored; `id` is its id. To publish the message again, take a new key",
    ),
    RowCode.KEY_PENDING: (Conflict, "a message with this key is pending; `id` is the id of that message"),
    RowCode.KEY_LEASED: (
        Conflict, "the message with this key is leased, too late to replace it; publish again when it is settled",
    ),
    RowCode.NO_CALLBACK: (
        Impossible,
        "callback, on_success, on_failure: topic {topic} does not accept those of messages: set allow_per_message of "
        "the topic's webhook",
    ),
    RowCode.NO_TOPIC: (
        NotFound, "there is no topic {topic!r}, and publishing creates no topics in this cluster: create it first",
    ),
    RowCode.NO_BATCH: (
        NotFound,
        "there is no batch with the key that the message names: open the batch first. With several shards, it has to "
        "be opened in the shard of topic {topic} (?shard=)",
    ),
    RowCode.BATCH_CLOSED: (Conflict, "the batch is sealed, cancelled or has ended: no message can join it"),
    RowCode.SUBSCRIPTION_FULL: (
        LimitReached,
        "a subscription of topic {topic} is at its max_messages or max_bytes: GET /v1/topics/{topic}/subscriptions",
    ),
    RowCode.TOO_MANY_KEYS: (
        LimitReached,
        "unique_for: the cluster remembers as many keys as it may (limits.idempotency_keys); try later, when some end",
    ),
    RowCode.OTHER_SHARD: (
        OtherShard,
        "topic {topic} is new here, and the shard map gives it, or another topic of this request, to another shard, or "
        "is being changed: try again (`hadelay shards list`)",
    ),
    RowCode.FOREIGN_TARGET: (
        Impossible,
        "on_success, on_failure: callbacks stay in the shard of their topic {topic}, and a topic named here would be "
        "created in another shard: name a topic of the same shard, or let an admin pin the name (`hadelay shards pin`)",
    ),
    RowCode.HOUR_FULL: (LimitReached, "the hour of deliver_at is full: choose another time"),
    RowCode.TOO_MANY_TOPICS: (
        LimitReached,
        "topic {topic} would be new, and the cluster has 100,000 topics, as many as it allows, with the deleted ones: "
        "publish to topics that exist",
    ),
    RowCode.SHARE_OF_TOPICS: (
        LimitReached,
        "topic {topic} would be new. Your token has created its share, a quarter of all topics with deleted ones, "
        "or only the tenth for admin tokens is left: publish to topics that exist, or ask an admin to create it",
    ),
    RowCode.SHARE_OF_KEYS: (
        LimitReached,
        "your token uses its share of limits.idempotency_keys (three quarters of the keys of a window, half of those "
        "with unique_for): try later, when some end, publish without such a key, or ask an admin to raise the limit",
    ),
}  # fmt: skip
_OUTCOMES = {RowCode.KEY_PENDING: "pending", RowCode.KEY_LEASED: "leased", RowCode.KEY_CANCELLED: "cancelled"}
_REFUSALS: dict[str, Callable[[str], HadelayError]] = {
    "bad_config": BadRequest,
    "no_topic": NotFound,
    "too_many_generations": LimitReached,
    "too_many_marks": LimitReached,
    "too_many_topics": LimitReached,
    "too_many_subscriptions": LimitReached,
    "too_far": Impossible,
    "impossible_config": Impossible,
    "no_own_queue": Impossible,
    "fill_running": partial(Conflict, outcome="running"),
    "groups_pending": partial(Conflict, outcome="pending"),
    "needs_upgrade": Conflict,
    "other_shard": OtherShard,
    "foreign_target": Impossible,
    "bad_shard_map": BadRequest,
    "other_shard_map": Conflict,
    "bad_token": BadRequest,
    "no_token": NotFound,
    "token_exists": Conflict,
    "too_many_tokens": LimitReached,
    "bad_job": BadRequest,
    "no_job": NotFound,
    "job_conflict": Impossible,
    "key_conflict": Impossible,
    "share_of_keys": LimitReached,
    "too_many_jobs": LimitReached,
    "no_batch": NotFound,
    "batch_exists": Conflict,
    "too_many_batches": LimitReached,
    "no_schedule": NotFound,
    "schedule_changed": Conflict,
    "too_many_schedules": LimitReached,
    "topic_has_schedules": partial(Conflict, outcome="scheduled"),
    "overlap": lambda other: Conflict("the message before is pending; `id` is its id", outcome="pending", id=other),
    "topic_not_empty": partial(Conflict, outcome="pending"),
    "disk_full": partial(DiskFull, retry_after_ms=5_000),
}


class Refusals:
    """Counts rows (messages) of publishes that apply refused, and remembers which topics exceeded their publish
    rate."""

    def __init__(self, monotonic: Callable[[], float], retry_after_ms: Callable[[str], int]) -> None:
        """retry_after_ms: returns the time in ms until a topic's publish rate admits the next message; 0: now, or not
        known."""
        self._monotonic, self._retry_after_ms = monotonic, retry_after_ms
        #: Number of refused rows of publishes, by the name of the limit for which they were refused.
        self.counts: Counter[str] = Counter()
        self._throttled_until: dict[str, float] = {}

    def throttled(self, drafts: list[Draft]) -> HadelayError | None:
        """Return the error if all drafts are for one topic that is throttled, so that the leader need not be asked;
        else None."""
        if not self._throttled_until:
            return None
        topic = drafts[0].topic
        left_ms = math.ceil((self._throttled_until.get(topic, 0.0) - self._monotonic()) * 1000)
        if left_ms <= 0:
            self._throttled_until.pop(topic, None)
            return None
        return _too_fast(topic, left_ms) if all(draft.topic == topic for draft in drafts) else None

    def problem(self, code: RowCode, topic: str, other: int = 0) -> HadelayError:
        """Return the error for a refused row of a publish. other: id of the message that has, or had, the key of the
        row."""
        limit = _LIMITS.get(code)
        if limit is None:
            kind, detail = _PROBLEMS[code]
            extra: dict[str, Any] = {"outcome": _OUTCOMES[code], "id": encode_id(other)} if code in _OUTCOMES else {}
            return kind(detail.format(topic=topic), **extra)
        self.counts[limit] += 1
        if code == RowCode.TOO_FAST:
            wait_ms = self._retry_after_ms(topic)
            if wait_ms:
                self._throttled_until[topic] = self._monotonic() + min(wait_ms, _LONGEST_MS) / 1000
            return _too_fast(topic, wait_ms)
        return LimitReached(
            f"topic {topic!r} has as many pending messages or bytes as it may have ({limit})", retry_after_ms=1_000
        )


def refusal(result: Refused) -> HadelayError:
    """Return the error for a command that apply refused as a whole."""
    kind = _REFUSALS.get(result.code)
    return HadelayError(f"refused ({result.code}): {result.detail}") if kind is None else kind(result.detail)


def _too_fast(topic: str, wait_ms: int) -> HadelayError:
    return LimitReached(f"the publish_rate of topic {topic!r} is exceeded: try later", retry_after_ms=max(1, wait_ms))
