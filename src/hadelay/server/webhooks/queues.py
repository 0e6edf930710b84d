"""One topic with a webhook: the messages fetched for it, its calls under way, and how fast its receiver answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from hadelay.handout.polls import Delivery, Poll
from hadelay.ledger.topics import Topic
from hadelay.server.webhooks.reports import Lease
from hadelay.server.webhooks.signing import key_of
from hadelay.settings.topic import TopicSettings, Webhook

#: Of a lease, beyond the time that two calls may take: one to wait for, and its own.
_MARGIN_MS = 5_000
_REPORT_S = 2.0
#: Calls of a topic begun in one go, and a second, at least; a receiver that answers gets twice as many as it answered.
#: What begins together also times out together, and everybody else on this thread waits meanwhile.
_AT_A_TIME = 8
_A_SECOND = 200.0
_SOON_S = 0.005
_PACE_S = 0.1
_MOST_AHEAD = 1_000


@dataclass(eq=False, slots=True)
class Job:
    """One message to be called about, under one lease."""

    lease: Lease
    #: End of the lease on the monotonic clock, in seconds.
    ends: float
    first_id: int
    deliver_at_ms: int
    offset: int
    size: int
    attempt: int
    redelivered: bool
    #: `Topic.floor` when the job was fetched: the message was purged if that has risen since.
    floor: int
    #: Set while the job waits for a host.
    record: bytes | None = None


class WebhookQueue:
    """One topic with a webhook: what was fetched for it, and how many calls are under way."""

    def __init__(self, topic: Topic) -> None:
        self.name, self.number = topic.name, topic.number
        self.jobs: deque[Job] = deque()
        self.calling = 0
        #: Jobs whose records the disk is asked for: each has its turn, and begins when the record is there.
        self.reading = 0
        #: Fetched, and out of the queue while something has to be done first.
        self.absent = 0
        self.polls: set[Poll] = set()
        self.removed = False
        #: Of its topic: what was fetched before it rose was purged.
        self.floor = topic.floor
        #: Paused with calls waiting: when their leases are looked after.
        self.keeping = False
        #: Calls that were answered since then, and how many in the tenth of a second before.
        self.answered, self._since, self._pace = 0, 0.0, 0.0
        #: Calls that may begin now, as of then.
        self.tokens, self._filled = float(_AT_A_TIME), 0.0

    def set(self, settings: TopicSettings, most_calls: int, max_lease_ms: int) -> None:
        assert settings.webhook is not None
        self.webhook: Webhook = settings.webhook
        self.keys = [key_of(secret) for secret in self.webhook.secrets]
        #: Calls at once.
        self.calls = min(settings.concurrency or most_calls, most_calls)
        self.lease_ms = min(2 * self.webhook.timeout_ms + _MARGIN_MS, max_lease_ms)
        self.timeout_s = min(self.webhook.timeout_ms, self.lease_ms // 2) / 1000
        #: Of its lease, to begin a call: for the call, and to tell what came of it.
        self.needs_s = self.timeout_s + min(_REPORT_S, self.lease_ms / 4000)

    def may_begin(self, mono: float) -> bool:
        self._measure(mono)
        rate = max(_A_SECOND, 2 * self._pace / _PACE_S)
        most = max(_AT_A_TIME, rate * _SOON_S * 2)
        self.tokens = min(most, self.tokens + (mono - self._filled) * rate)
        self._filled = mono
        return self.tokens >= 1

    def _measure(self, mono: float) -> None:
        passed_s = mono - self._since
        if passed_s >= _PACE_S:
            self._pace, self._since, self.answered = self.answered * _PACE_S / passed_s, mono, 0

    def ahead(self, mono: float) -> int:
        """How many to fetch beyond those that can be called: one round, or what the receiver takes in two tenths of a
        second, since a grant has to be committed first."""
        self._measure(mono)
        return max(self.calls, min(int(2 * self._pace), _MOST_AHEAD))

    @property
    def held(self) -> int:
        return len(self.jobs) + self.calling + self.absent


def jobs_of(delivery: Delivery, mono: float, floor: int) -> Iterator[Job]:
    rows = delivery.rows
    columns = zip(
        delivery.positions.tolist(),
        delivery.hours.tolist(),
        delivery.indexes.tolist(),
        delivery.until_ms.tolist(),
        rows["first_id"].tolist(),
        rows["deliver_at_ms"].tolist(),
        rows["offset"].tolist(),
        rows["size"].tolist(),
        delivery.attempts.tolist(),
        delivery.redelivered.tolist(),
        strict=True,
    )
    for position, hour, index, until_ms, first_id, at_ms, offset, size, attempt, again in columns:
        lease = (delivery.term, delivery.seq, position, hour, index)
        ends = mono + (until_ms - delivery.now_ms) / 1000
        yield Job(lease, ends, first_id, at_ms, offset, size, attempt, again, floor)
