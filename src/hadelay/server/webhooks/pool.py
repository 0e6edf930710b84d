"""Who is called, and how many at once.

The pool is a consumer like any other: while its node leads it polls for every topic that has a webhook, so that
grants, leases, commit-before-call, redelivery marks, expiry and fail-over hold as they do for those that pull. It
fetches ahead, as many as the receiver takes in the time of some commits. A call is begun only while the whole of its
timeout fits into the lease, so nobody else is handed the message while it lasts. When the node ceases to lead the pool
fetches no more, and finishes what it holds.

Dispatching and calling are decoupled (S3): a topic has so many calls at once and no more, and where all topics
together want more than there may be each has an equal share. Whoever does not answer holds up his own topic alone.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
import structlog

from hadelay.codec.commands import encode_extend, encode_topic_put, uncounted
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.meta import unpack
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.errors import DamagedFile, HadelayError
from hadelay.handout.lines import Delivery, Poll
from hadelay.http.values import format_instant
from hadelay.model import encode_id
from hadelay.server.api import Histogram
from hadelay.server.records import Place, fetch, read_cached, split_record, verified
from hadelay.server.webhooks.call import Answer, Caller, Request
from hadelay.server.webhooks.headers import Facts, call_headers
from hadelay.server.webhooks.reports import Lease, Reports, Verdict
from hadelay.server.webhooks.signing import key_of
from hadelay.settings.topic import origin_of

if TYPE_CHECKING:
    from hadelay.ledger.topics import Topic
    from hadelay.server.node import Node
    from hadelay.settings.topic import TopicSettings, Webhook

#: The name under which the pool holds leases.
CONSUMER = "webhook"
#: Of a lease, beyond the time that two calls may take: one to wait for, and its own.
_MARGIN_MS = 5_000
_REPORT_S = 2.0
_WAIT_MS = 3_600_000
#: Calls of a topic begun in one go, and a second, at least; a receiver that answers gets twice as many as it answered.
#: What begins together also times out together, and everybody else on this thread waits meanwhile.
_AT_A_TIME = 8
_A_SECOND = 200.0
_SOON_S = 0.005
_PACE_S = 0.1
_MOST_AHEAD = 1_000
_AGAIN_S = 0.1
#: Why a topic is paused whose receiver answered 410.
GONE = "webhook disabled: HTTP 410"
#: Upper bounds of hadelay_webhook_call_duration_seconds.
_DURATIONS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: Different outcomes that are counted apart.
_MOST_OUTCOMES = 32

log = structlog.get_logger("hadelay")


class Job:
    """One message to be called about, under one lease."""

    __slots__ = (
        "again", "attempt", "deliver_at_ms", "ends", "first_id", "floor", "lease", "offset", "record", "size",
    )  # fmt: skip

    def __init__(
        self, lease: Lease, ends: float, first_id: int, at_ms: int, offset: int, size: int, attempt: int, again: bool,
        floor: int,
    ) -> None:  # fmt: skip
        self.lease, self.ends, self.first_id, self.deliver_at_ms = lease, ends, first_id, at_ms
        self.offset, self.size, self.attempt, self.again = offset, size, attempt, again
        #: Of its topic, when it was fetched: it was purged if that has risen since.
        self.floor = floor
        #: While it waits for a host.
        self.record: bytes | None = None


class Feed:
    """One topic with a webhook: what was fetched for it, and how many calls are under way."""

    def __init__(self, topic: Topic) -> None:
        self.name, self.number = topic.name, topic.number
        self.queue: deque[Job] = deque()
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
        return len(self.queue) + self.calling + self.absent


class Pool:
    """One per node; works once it has a `caller`."""

    def __init__(self, node: Node) -> None:
        self.node, self.runtime, self.config = node, node.runtime, node.config.webhooks
        self.caller: Caller | None = None
        self.reports = Reports(node.name, node.runtime, node.propose)
        self.feeds: dict[int, Feed] = {}
        #: Feeds that have something to call about and found no room, in the order of their turns.
        self._turns: deque[Feed] = deque()
        self._resuming = False
        self._hosts: Counter[str] = Counter()
        self._leading = False
        self._numbers = itertools.count()
        #: For /metrics.
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()
        self.durations = Histogram.of(_DURATIONS_S)

    @property
    def busy(self) -> bool:
        return bool(self.in_flight or self.reports.busy or any(feed.held for feed in self.feeds.values()))

    # leading

    def on_leader(self) -> None:
        self._leading = True
        for topic in self.node.ledger.topics.all:
            self.on_topic(topic)

    def on_follower(self) -> None:
        """No more is fetched; the dispatcher has answered the polls."""
        self._leading = False

    def on_topic(self, topic: Topic) -> None:
        """Made, changed or deleted."""
        feed = self.feeds.get(topic.number)
        if topic.exists and topic.settings.webhook is not None:
            if feed is None:
                if not self._leading:
                    return
                feed = self.feeds[topic.number] = Feed(topic)
            feed.set(topic.settings, self.config.topic_calls, self.node.ledger.settings.max_lease_ms)
            feed.removed = False
            self._run(feed)
            self._fetch(feed)
        elif feed is not None:
            feed.removed = True
            while feed.polls:
                self.node.dispatcher.cancel_poll(feed.polls.pop())
            self._run(feed)
            self._forget(feed)

    def _forget(self, feed: Feed) -> None:
        if feed.removed and not feed.held and self.feeds.get(feed.number) is feed:
            del self.feeds[feed.number]

    # fetching

    def _fetch(self, feed: Feed, request_id: bytes = b"") -> None:
        if not self._leading or feed.removed:
            return
        most = feed.calls + feed.ahead(self.runtime.monotonic())
        room = most - feed.held - sum(poll.max for poll in feed.polls)
        # Two polls, each for half: one waits for what falls due while the grant of the other is on its way. And not
        # one for every slot that gets free: for a quarter of them together, at the least.
        while len(feed.polls) < 2 and room >= max(1, most // 4):
            number = request_id or f"{self.node.leading}-{next(self._numbers)}".encode()
            request_id = b""
            poll = Poll(CONSUMER, number, (feed.name,), min(room, max(1, most // 2)), feed.lease_ms, _WAIT_MS, _ignore)
            poll.done = partial(self._fetched, feed, poll)
            feed.polls.add(poll)
            room -= poll.max
            # Not within this call: a poll may be answered at once, and its feed be in the middle of something.
            self.runtime.call_soon(self._ask, feed, poll)

    def _ask(self, feed: Feed, poll: Poll) -> None:
        if poll in feed.polls:
            self.node.dispatcher.poll(poll)

    def _fetched(self, feed: Feed, poll: Poll, delivery: Delivery | None, error: HadelayError | None) -> None:
        feed.polls.discard(poll)
        if delivery is None:
            # The same request again: if it was granted after all, this is how to get it.
            self.runtime.call_later(_AGAIN_S, self._fetch, feed, poll.request_id)
            return
        feed.queue.extend(_jobs(delivery, self.runtime.monotonic(), feed.floor))
        self._run(feed)
        self._fetch(feed)

    # calling

    def _run(self, feed: Feed) -> None:
        """Begin as many of its calls as may be; of many some now, and the others soon; none of a topic that is paused,
        and none about what was purged before it was called about."""
        topic = self.node.ledger.topics[feed.number]
        if topic.floor != feed.floor:
            feed.floor = topic.floor
            while feed.queue:
                self._settle(feed.queue.popleft(), (-1, "purged"))
        if topic.settings.paused:
            self._keep(feed)
            return
        while feed.queue and self._has_room(feed):
            if not feed.may_begin(self.runtime.monotonic()):
                if not self._resuming:
                    self._resuming = True
                    self.runtime.call_later(_SOON_S, self._resume)
                break
            job = feed.queue[0]
            if job.floor != feed.floor:  # it was out of the queue when its topic was purged
                self._settle(feed.queue.popleft(), (-1, "purged"))
                continue
            if job.ends - self.runtime.monotonic() < feed.needs_s:
                self._extend(feed)
                continue
            if job.record is None and not self._read(feed, job):
                continue
            if not self._begin(feed, job):
                break
            feed.tokens -= 1
        if feed.queue and feed.calling < feed.calls and feed not in self._turns:
            self._turns.append(feed)

    def _keep(self, feed: Feed) -> None:
        """What was fetched before the pause stays leased and waits for its end."""
        if feed.queue and not feed.keeping:
            feed.keeping = True
            first = min(job.ends for job in feed.queue) - feed.needs_s
            wait_s = max(_SOON_S, first - self.runtime.monotonic())
            self.runtime.call_later(wait_s, self._kept, feed)

    def _kept(self, feed: Feed) -> None:
        feed.keeping = False
        if feed.queue and min(job.ends for job in feed.queue) - feed.needs_s < self.runtime.monotonic():
            self._extend(feed)
        self._run(feed)

    def _resume(self) -> None:
        self._resuming = False
        self._take_turns()

    def _take_turns(self) -> None:
        """Those that found no room before."""
        for _ in range(len(self._turns)):
            if self.in_flight >= self.config.max_calls:
                break
            self._run(self._turns.popleft())

    def _has_room(self, feed: Feed) -> bool:
        most = self.config.max_calls
        if feed.calling + feed.reading >= feed.calls or self.in_flight >= most:
            return False
        # Shares count once half of all calls are taken.
        return 2 * self.in_flight < most or feed.calling < max(1, most // sum(1 for f in self.feeds.values() if f.held))

    def _read(self, feed: Feed, job: Job) -> bool:
        """Its record; False when the disk has to be asked or it has to be mended first, and the job is out of the queue
        meanwhile."""
        place = Place(job.lease[3], job.offset, job.size)
        found = read_cached(self.node, [place])
        if found[0] is not None:
            return self._verify(feed, job, place, found[0])
        feed.queue.popleft()
        feed.absent += 1
        feed.reading += 1

        def fetched() -> None:
            feed.absent -= 1
            feed.reading -= 1
            feed.queue.appendleft(job)
            self._verify(feed, job, place, found[0])
            self._next(feed)

        fetch(self.node, [place], found, fetched)
        return False

    def _verify(self, feed: Feed, job: Job, place: Place, record: bytes | None) -> bool:
        """The job is the first of the queue; False: it is out of the queue until it was mended."""
        try:
            job.record = verified(self.node, place, record)
        except DamagedFile as damage:
            feed.queue.popleft()
            feed.absent += 1
            path = PurePath(damage.path)
            self.node.mender.mend(
                place.hour, path.suffix, damage.offset, damage.size, lambda data: self._mended(feed, job, data)
            )
            return False
        return True

    def _mended(self, feed: Feed, job: Job, data: bytes | None) -> None:
        feed.absent -= 1
        if data is None:
            self._settle(job, (-1, "damaged"))
        else:
            job.record = data
            feed.queue.appendleft(job)
        self._next(feed)

    def _begin(self, feed: Feed, job: Job) -> bool:
        """False: there are enough calls to that host already."""
        assert job.record is not None
        assert self.caller is not None
        packed, body = split_record(job.record)
        meta, webhook, node = unpack(packed), feed.webhook, self.node
        url = meta.cb if meta.cb is not None and webhook.allow_per_message else webhook.url
        host = urlsplit(url).netloc
        if self._hosts[host] >= self.config.host_calls:
            return False
        feed.queue.popleft()
        job.record = None
        feed.calling += 1
        self.in_flight += 1
        self._hosts[host] += 1
        now_ms = node.clock.read(self.runtime.monotonic())
        facts = Facts(
            encode_id(job.first_id), feed.name, f"/{node.config.cluster.id}/topics/{feed.name}",
            format_instant(job.deliver_at_ms), job.attempt, job.again, meta,
        )  # fmt: skip
        term, seq, position, _, _ = job.lease
        node.dispatcher.answered(term, seq, np.array([position]), job.deliver_at_ms)
        # A message's own URL gets no secret that is for the topic's receiver.
        extra = webhook.headers if origin_of(url) == origin_of(webhook.url) else ()
        headers = call_headers(facts, feed.keys, extra, now_ms, body)
        self.caller.call(Request(url, headers, body, feed.timeout_s), partial(self._called, feed, job, url, host))
        return True

    def _called(self, feed: Feed, job: Job, url: str, host: str, answer: Answer) -> None:
        feed.calling -= 1
        feed.answered += 1
        self.in_flight -= 1
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]
        self._count(answer)
        if answer.status == 410 and url == feed.webhook.url:
            self._disable(feed)
        if answer.reason:
            longest = self.node.ledger.settings.max_delay_ms
            delay_ms = -1 if answer.retry_after_ms is None else min(answer.retry_after_ms, longest)
            self._settle(job, (delay_ms, answer.reason))
        else:
            self._settle(job, None)
        self._next(feed)

    def _settle(self, job: Job, verdict: Verdict) -> None:
        self.reports.add(job.lease, job.ends, verdict)

    def _next(self, feed: Feed) -> None:
        """Something of the feed is over: its next call, those of others who waited for room, and more to do."""
        self._run(feed)
        self._take_turns()
        self._fetch(feed)
        self._forget(feed)

    def _extend(self, feed: Feed) -> None:
        """Those that waited so long for their turn that a call no longer fits into the lease: hold them for longer."""
        soon = self.runtime.monotonic() + feed.needs_s
        late = [job for job in feed.queue if job.ends < soon]
        feed.queue = deque(job for job in feed.queue if job.ends >= soon)
        feed.absent += len(late)
        command = encode_extend(self.node.name, np.array([job.lease for job in late], LEASE), feed.lease_ms)
        asked = self.runtime.monotonic()

        def extended(result: Any, error: HadelayError | None) -> None:
            feed.absent -= len(late)
            if error is None and isinstance(result, LeaseResult):
                for job, outcome in zip(late, result.outcomes.tolist(), strict=True):
                    if outcome == LeaseOutcome.DONE:
                        job.ends = asked + feed.lease_ms / 1000
                        feed.queue.append(job)
            # What was lost, or is in doubt, comes again when its lease has run out.
            self._next(feed)

        self.node.propose(command, extended)

    def _disable(self, feed: Feed) -> None:
        """410: the receiver wants no more of this. The messages stay, and what was fetched goes back uncalled;
        `:resume` calls again."""
        topic = self.node.ledger.topics[feed.number]
        webhook = topic.settings.webhook
        if topic.exists and not topic.settings.paused and webhook is not None and webhook.url == feed.webhook.url:
            log.warning("webhook_disabled", topic=feed.name, url=webhook.url)
            pause = {"paused": True, "paused_reason": GONE}
            self.node.propose(encode_topic_put(feed.name, pause), lambda result, error: None)
        while feed.queue:
            self._settle(feed.queue.popleft(), (uncounted(0), "HTTP 410"))

    # numbers

    def _count(self, answer: Answer) -> None:
        outcome = f"{answer.status // 100}xx" if answer.status else answer.reason.replace(" ", "_")
        # Reasons may be the words of a library: what is counted by them stays few.
        known = outcome in self.outcomes or len(self.outcomes) < _MOST_OUTCOMES
        self.outcomes[outcome if known else "other"] += 1
        self.durations.observe(answer.seconds)

    @property
    def queued(self) -> int:
        """Fetched, and not called about yet."""
        return sum(len(feed.queue) for feed in self.feeds.values())


def _ignore(delivery: Delivery | None, error: HadelayError | None) -> None: ...


def _jobs(delivery: Delivery, mono: float, floor: int) -> Iterator[Job]:
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
