"""Counts of a topic's messages, their lateness, and the topic's consumers, as in answers of the HTTP API."""

from typing import Generic

from hadelay.api.base import At, Document


class Lateness(Document, frozen=True):
    """Time from deliver_at to the hand-out, for messages that this leader handed out in the last five minutes. p50 and
    p99 are at most 0.8 % too high; the maximum is exact."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float


class Consumer(Document, Generic[At], frozen=True):
    name: str
    #: Time of the consumer's latest receive.
    asked_at: At
    #: Node to which the consumer's latest receive was sent; absent while a node is not upgraded.
    node: str = ""
    #: Whether a receive of the consumer waits now; absent if not.
    waiting: bool = False


class TopicStatus(Document, Generic[At], frozen=True):
    """A topic without its settings: counts of its messages, and its consumers."""

    topic: str
    scheduled: int
    ready: int
    leased: int
    dead: int
    oldest_ready_age_ms: int | None
    #: Size of the records of pending messages, in bytes.
    bytes: int
    #: Lateness of recent hand-outs; None: there were none.
    lateness: Lateness | None
    #: Number of messages that are blocked by earlier messages of their groups, due or not.
    blocked: int = 0
    #: Number of scheduled, ready and blocked messages that wait after a failed attempt.
    retrying: int = 0
    #: Longest wait of a due message behind the first messages of its group, in ms; None if none is known to wait. Only
    #: in the answer for a single topic.
    oldest_blocked_age_ms: int | None = None
    #: Number of copies that the subscription, and earlier ones of its name, dropped because it was full (`on_full`).
    dropped: int = 0
    #: Consumers since the present leader took over, latest first, at most 16; only in the answer for a single topic.
    consumers: list[Consumer[At]] | None = None
    #: Shard of the topic; None without a shard map.
    shard: int | None = None
