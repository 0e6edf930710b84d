"""The queue of a topic with a webhook, and the reports of the outcomes of its calls."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.ackparts import CallReply, encode_replies
from hadelay.codec.commands import encode_ack, encode_nack
from hadelay.codec.formats import U32, Rows
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.errors import HadelayError
from hadelay.handout.polls import Delivery, Poll
from hadelay.ledger.hours.retries import excused
from hadelay.ledger.topics.topics import TopicState
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Propose
from hadelay.settings.topic import Exponential, TopicSettings, Webhook
from hadelay.webhooks import key_of

#: A lease as {term, seq, position, hour, index}, the fields of a LEASE row.
Lease = tuple[int, int, int, int, int]
#: Verdict, the outcome to report for a lease: None for an ack; for a nack (delay in ms, or a negative special value of
#: `encode_nack`; reason).
Verdict = tuple[int, str] | None
#: Limit of leases in one ack or nack command; more leases take several commands.
_MOST_LEASES = 1_000
#: Limit of the total size of answers' bodies in one ack command, in bytes; a single body may be larger.
_MOST_BYTES = 256 << 10
#: Pause before outcomes whose proposal failed are proposed again, in seconds.
_AGAIN_S = 0.05
#: Margin in ms: the duration of a lease is the timeouts of two calls in a row, plus this margin.
_MARGIN_MS = 5_000
#: Minimum time in seconds from the timeout of a call to the end of the lease, so that the outcome can be reported.
_REPORT_S = 2.0
#: Limit in ms of the wait that a Retry-After may ask for; a longer wait is possible only if the topic's backoff has
#: one. A receiver's own limits may need longer waits than a short backoff.
_RETRY_AFTER_MS = 3_600_000
#: Lower bounds of two limits of a topic's webhook calls: number of calls begun at the same moment, and calls begun per
#: second. A receiver gets up to twice as many calls per second as it answers. Calls that begin together time out
#: together, and then delay all other work of this thread.
_AT_A_TIME = 8
_A_SECOND = 200.0
_SOON_S = 0.005
_PACE_S = 0.1
_MOST_AHEAD = 1_000


@dataclass(eq=False, slots=True)
class CallJob:
    """One message that is leased for a webhook, and its call."""

    lease: Lease
    #: End of the lease on the monotonic clock, in seconds.
    ends: float
    #: `Topic.floor` when the job was fetched. If it has risen since then, the message was purged.
    floor: int
    first_id: int
    deliver_at_ms: int
    offset: int
    size: int
    attempt: int
    #: Number of earlier attempts that do not count towards the limit of attempts.
    uncounted: int
    redelivered: bool
    #: The message's record, while the job waits for a free call slot of its host; otherwise None.
    record: bytes | None = None


class Report(NamedTuple):
    """A lease whose call is over, to be acked or nacked."""

    lease: Lease
    #: End of the lease in monotonic seconds.
    ends: float
    #: The receiver's answer, which a success callback will contain; None: none is wanted.
    kept: CallReply | None = None


@dataclass(slots=True)
class Health:
    """Answers of a webhook's receiver since this node leads, or since the URL was set. Calls to URLs that messages have
    of their own count, too. Times are Unix ms."""

    calls: int = 0
    #: Number of calls for messages that had been handed out before, so were retries.
    retries: int = 0
    #: Number of failed calls since the last success, and time of the first of them; 0: the last call succeeded.
    failed: int = 0
    failing_since_ms: int = 0
    #: HTTP status of the last call; 0: no answer came.
    status: int = 0
    #: Reason and time of the last failure, which may be before the last success; empty: no call failed.
    error: str = ""
    error_at_ms: int = 0

    def add(self, status: int, error: str, now_ms: int, *, again: bool) -> None:
        """Count a call. error: empty after a success. again: whether the message had been handed out before."""
        self.calls += 1
        self.retries += again
        self.status = status
        if not error:
            self.failed = self.failing_since_ms = 0
            return
        self.failing_since_ms = self.failing_since_ms or now_ms
        self.failed += 1
        self.error, self.error_at_ms = error, now_ms


class WebhookQueue:
    """Queue of one topic with a webhook: its fetched messages, the calls under way, and the measured speed of the
    receiver."""

    def __init__(self, topic: TopicState) -> None:
        self.name, self.number = topic.name, topic.number
        self.jobs: deque[CallJob] = deque()
        #: Number of calls under way.
        self.calling = 0
        #: Number of jobs that have had their turn, and wait for their records to be read from disk.
        self.reading = 0
        #: Number of jobs that are out of the queue for a while: those in `reading`, and those whose lease is being
        #: extended.
        self.absent = 0
        self.polls: set[Poll] = set()
        self.removed = False
        self.health, self._url = Health(), ""
        #: `Topic.floor` when this queue last saw it. If it has risen since then, messages fetched before were purged.
        self.floor = topic.floor
        #: True while a timer is set that will extend the leases of jobs that wait for the end of a pause.
        self.keeping = False
        #: Measurement of the receiver's speed: number of calls answered since the monotonic time `_since`; `_since`;
        #: and number of calls answered in the tenth of a second before `_since`.
        self.answered, self._since, self._pace = 0, 0.0, 0.0
        #: Number of calls that may begin now (a token bucket), as of the monotonic time `_filled`.
        self.tokens, self._filled = float(_AT_A_TIME), 0.0

    def set(self, settings: TopicSettings, most_calls: int, max_lease_ms: int) -> None:
        assert settings.webhook is not None
        self.webhook: Webhook = settings.webhook
        self.on_success = settings.on_success
        if self.webhook.url != self._url:
            self.health, self._url = Health(), self.webhook.url
        self.keys = [key_of(secret) for secret in self.webhook.secrets]
        #: Limit of concurrent calls about the topic's messages.
        self.calls = min(settings.concurrency or most_calls, most_calls)
        self.lease_ms = min(2 * self.webhook.timeout_ms + _MARGIN_MS, max_lease_ms)
        self.timeout_s = min(self.webhook.timeout_ms, self.lease_ms // 2) / 1000
        backoff = settings.backoff
        longest_ms = backoff.max_ms if isinstance(backoff, Exponential) else max(backoff, default=0)
        #: Limit in ms of the wait that a Retry-After may ask for: without it, one wrong header could delay a message
        #: for years.
        self.longest_wait_ms = max(longest_ms, _RETRY_AFTER_MS)
        #: Time in seconds that a lease must have left when a call begins: for the call, and for the report of its
        #: outcome.
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
        """Number of messages to fetch beyond the limit of concurrent calls: as many as that limit, or as many as the
        receiver answers in 0.2 s if that is more. Their leases have to be committed before their calls begin."""
        self._measure(mono)
        return max(self.calls, min(int(2 * self._pace), _MOST_AHEAD))

    @property
    def leased(self) -> int:
        """Number of messages that are leased for this queue."""
        return len(self.jobs) + self.calling + self.absent


def jobs_of(delivery: Delivery, mono: float, floor: int) -> Iterator[CallJob]:
    rows = delivery.rows
    columns: list[NDArray[Any]] = [
        delivery.positions, delivery.hours, delivery.indexes, delivery.until_ms,
        rows["first_id"], rows["deliver_at_ms"], rows["offset"], rows["size"], delivery.attempts, excused(rows),
        delivery.redelivered,
    ]  # fmt: skip
    for position, hour, index, until_ms, *facts in zip(*(column.tolist() for column in columns), strict=True):
        lease = (delivery.term, delivery.seq, position, hour, index)
        yield CallJob(lease, mono + (until_ms - delivery.now_ms) / 1000, floor, *facts)


class Reports:
    """Proposes the outcomes of webhook calls as acks and nacks, many in one command.

    While one round is being committed, the next one gathers. A report is repeated until it is answered or its lease is
    over: group commit takes it to the leader, so calls that were under way when this node lost the lead are settled
    too."""

    def __init__(self, node: str, runtime: Runtime, propose: Propose, delays_of: Callable[[Rows], U32 | None]) -> None:
        """delays_of: returns the hand-out delays of leases, see DeliveryLoop.delays_of."""
        self.node, self.runtime, self.propose, self._delays_of = node, runtime, propose, delays_of
        #: Outcomes that wait to be proposed: verdict → reports of the leases with this verdict.
        self._waiting: dict[Verdict, list[Report]] = {}
        self._in_flight = 0
        self._resting = False
        #: Number of leases that were lost before the outcome of their call was committed: each message gets
        #: another call.
        self.lost = 0

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._in_flight)

    def add(self, report: Report, verdict: Verdict) -> None:
        self._waiting.setdefault(verdict, []).append(report)
        self._flush()

    def _flush(self) -> None:
        if self._in_flight or self._resting or not self._waiting:
            return
        now = self.runtime.monotonic()
        waiting, self._waiting = self._waiting, {}
        for verdict, reports in waiting.items():
            leased = [one for one in reports if one.ends > now]
            self.lost += len(reports) - len(leased)
            for part in _parts(leased):
                self._in_flight += 1
                self.propose(self._command(verdict, part), partial(self._answered, verdict, part))

    def _command(self, verdict: Verdict, part: list[Report]) -> bytes:
        rows = np.array([one.lease for one in part], LEASE)
        delays = self._delays_of(rows)
        if verdict is not None:
            return encode_nack(self.node, rows, *verdict, delays=delays)
        return encode_ack(self.node, rows, replies=encode_replies([one.kept for one in part]), delays=delays)

    def _answered(self, verdict: Verdict, part: list[Report], result: Any, error: HadelayError | None) -> None:
        self._in_flight -= 1
        if error is not None or not isinstance(result, LeaseResult):
            # Propose the outcomes again. If the first proposal was committed after all, apply reports those leases as
            # settled.
            self._waiting.setdefault(verdict, []).extend(part)
            self._resting = True
            self.runtime.call_later(_AGAIN_S, self._rested)
            return
        self.lost += int(np.count_nonzero(result.outcomes == LeaseOutcome.LEASE_LOST))
        again = np.flatnonzero(result.outcomes == LeaseOutcome.AGAIN).tolist()
        if again:
            self._waiting.setdefault(verdict, []).extend(part[n] for n in again)
        self._flush()

    def _rested(self) -> None:
        self._resting = False
        self._flush()


def _parts(reports: list[Report]) -> Iterator[list[Report]]:
    """Split reports into commands of limited size."""
    part: list[Report] = []
    size = 0
    for one in reports:
        more = len(one.kept.body) if one.kept is not None else 0
        if part and (len(part) == _MOST_LEASES or size + more > _MOST_BYTES):
            yield part
            part, size = [], 0
        part.append(one)
        size += more
    if part:
        yield part
