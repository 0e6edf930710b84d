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
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import structlog

from hadelay.api.metrics import Histogram
from hadelay.api.text import format_instant
from hadelay.codec.commands import encode_extend, encode_topic_put, uncounted
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.meta import unpack
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.errors import HadelayError
from hadelay.handout.polls import Delivery, Poll
from hadelay.ledger.topics import Topic
from hadelay.model import encode_id
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Propose
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.reading import Extent, Reader, split_record
from hadelay.server.replica import Replica
from hadelay.server.webhooks.call import Answer, Caller, Request
from hadelay.server.webhooks.headers import Facts, call_headers
from hadelay.server.webhooks.queues import Job, WebhookQueue, jobs_of
from hadelay.server.webhooks.reports import Reports, Verdict
from hadelay.settings.node import Config
from hadelay.settings.topic import origin_of

#: The name under which the pool holds leases.
CONSUMER = "webhook"
_WAIT_MS = 3_600_000
_SOON_S = 0.005
_AGAIN_S = 0.1
#: Why a topic is paused whose receiver answered 410.
GONE = "webhook disabled: HTTP 410"
#: Upper bounds of hadelay_webhook_call_duration_seconds.
_DURATIONS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: Different outcomes that are counted apart.
_MOST_OUTCOMES = 32

log = structlog.get_logger("hadelay")


class Pool:
    """One per node; works once it has a `caller`."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        replica: Replica,
        now_ms: Callable[[], int],
        propose: Propose,
        *,
        dispatcher: DeliveryLoop,
        reader: Reader,
    ) -> None:
        self._name, self._cluster_id, self.config = config.node.name, config.cluster.id, config.webhooks
        self.runtime, self._replica, self._now_ms, self._propose = runtime, replica, now_ms, propose
        self._dispatcher, self._reader = dispatcher, reader
        self.caller: Caller | None = None
        self.reports = Reports(self._name, runtime, propose)
        self.queues: dict[int, WebhookQueue] = {}
        #: Queues that have something to call about and found no room, in the order of their turns.
        self._turns: deque[WebhookQueue] = deque()
        self._resuming = False
        self._hosts: Counter[str] = Counter()
        #: The term that this node leads; 0: it does not lead.
        self._term = 0
        self._numbers = itertools.count()
        #: For /metrics.
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()
        self.durations = Histogram.of(_DURATIONS_S)

    @property
    def busy(self) -> bool:
        return bool(self.in_flight or self.reports.busy or any(queue.held for queue in self.queues.values()))

    # leading

    def on_leader(self, term: int) -> None:
        self._term = term
        for topic in self._replica.ledger.topics.all:
            self.on_topic(topic)

    def on_follower(self) -> None:
        """No more is fetched; the dispatcher has answered the polls."""
        self._term = 0

    def on_topic(self, topic: Topic) -> None:
        """Made, changed or deleted."""
        queue = self.queues.get(topic.number)
        if topic.exists and topic.settings.webhook is not None:
            if queue is None:
                if not self._term:
                    return
                queue = self.queues[topic.number] = WebhookQueue(topic)
            queue.set(topic.settings, self.config.topic_calls, self._replica.ledger.settings.max_lease_ms)
            queue.removed = False
            self._run(queue)
            self._fetch(queue)
        elif queue is not None:
            queue.removed = True
            while queue.polls:
                self._dispatcher.cancel_poll(queue.polls.pop())
            self._run(queue)
            self._forget(queue)

    def _forget(self, queue: WebhookQueue) -> None:
        if queue.removed and not queue.held and self.queues.get(queue.number) is queue:
            del self.queues[queue.number]

    # fetching

    def _fetch(self, queue: WebhookQueue, request_id: bytes = b"") -> None:
        if not self._term or queue.removed:
            return
        most = queue.calls + queue.ahead(self.runtime.monotonic())
        room = most - queue.held - sum(poll.max for poll in queue.polls)
        # Two polls, each for half: one waits for what falls due while the grant of the other is on its way. And not
        # one for every slot that gets free: for a quarter of them together, at the least.
        while len(queue.polls) < 2 and room >= max(1, most // 4):
            number = request_id or f"{self._term}-{next(self._numbers)}".encode()
            request_id = b""
            poll = Poll(
                CONSUMER, number, (queue.name,), min(room, max(1, most // 2)), queue.lease_ms, _WAIT_MS, _ignore
            )
            poll.done = partial(self._fetched, queue, poll)
            queue.polls.add(poll)
            room -= poll.max
            # Not within this call: a poll may be answered at once, and its queue be in the middle of something.
            self.runtime.call_soon(self._ask, queue, poll)

    def _ask(self, queue: WebhookQueue, poll: Poll) -> None:
        if poll in queue.polls:
            self._dispatcher.poll(poll)

    def _fetched(self, queue: WebhookQueue, poll: Poll, delivery: Delivery | None, error: HadelayError | None) -> None:
        queue.polls.discard(poll)
        if delivery is None:
            # The same request again: if it was granted after all, this is how to get it.
            self.runtime.call_later(_AGAIN_S, self._fetch, queue, poll.request_id)
            return
        queue.jobs.extend(jobs_of(delivery, self.runtime.monotonic(), queue.floor))
        self._run(queue)
        self._fetch(queue)

    # calling

    def _run(self, queue: WebhookQueue) -> None:
        """Begin as many of its calls as may be; of many some now, and the others soon; none of a topic that is paused,
        and none about what was purged before it was called about."""
        topic = self._replica.ledger.topics[queue.number]
        if topic.floor != queue.floor:
            queue.floor = topic.floor
            while queue.jobs:
                self._settle(queue.jobs.popleft(), (-1, "purged"))
        if topic.settings.paused:
            self._keep(queue)
            return
        while queue.jobs and self._has_room(queue):
            if not queue.may_begin(self.runtime.monotonic()):
                if not self._resuming:
                    self._resuming = True
                    self.runtime.call_later(_SOON_S, self._resume)
                break
            job = queue.jobs[0]
            if job.floor != queue.floor:  # it was out of the queue when its topic was purged
                self._settle(queue.jobs.popleft(), (-1, "purged"))
                continue
            if job.ends - self.runtime.monotonic() < queue.needs_s:
                self._extend(queue)
                continue
            if job.record is None and not self._read(queue, job):
                continue
            if not self._begin(queue, job):
                break
            queue.tokens -= 1
        if queue.jobs and queue.calling < queue.calls and queue not in self._turns:
            self._turns.append(queue)

    def _keep(self, queue: WebhookQueue) -> None:
        """What was fetched before the pause stays leased and waits for its end."""
        if queue.jobs and not queue.keeping:
            queue.keeping = True
            first = min(job.ends for job in queue.jobs) - queue.needs_s
            wait_s = max(_SOON_S, first - self.runtime.monotonic())
            self.runtime.call_later(wait_s, self._kept, queue)

    def _kept(self, queue: WebhookQueue) -> None:
        queue.keeping = False
        if queue.jobs and min(job.ends for job in queue.jobs) - queue.needs_s < self.runtime.monotonic():
            self._extend(queue)
        self._run(queue)

    def _resume(self) -> None:
        self._resuming = False
        self._take_turns()

    def _take_turns(self) -> None:
        """Those that found no room before."""
        for _ in range(len(self._turns)):
            if self.in_flight >= self.config.max_calls:
                break
            self._run(self._turns.popleft())

    def _has_room(self, queue: WebhookQueue) -> bool:
        most = self.config.max_calls
        if queue.calling + queue.reading >= queue.calls or self.in_flight >= most:
            return False
        # Shares count once half of all calls are taken.
        return 2 * self.in_flight < most or queue.calling < max(
            1, most // sum(1 for f in self.queues.values() if f.held)
        )

    def _read(self, queue: WebhookQueue, job: Job) -> bool:
        """False when the disk or another node has to be asked for the record: the job is out of the queue meanwhile."""
        queue.jobs.popleft()
        queue.absent += 1
        queue.reading += 1

        def put_back(record: bytes | None) -> None:
            queue.absent -= 1
            queue.reading -= 1
            if record is None:
                self._settle(job, (-1, "damaged"))
            else:
                job.record = record
                queue.jobs.appendleft(job)

        def found(record: bytes | None) -> None:
            put_back(record)
            self._next(queue)

        record = self._reader.record(Extent(job.lease[3], job.offset, job.size), found)
        if record is not None:
            put_back(record)
        return record is not None

    def _begin(self, queue: WebhookQueue, job: Job) -> bool:
        """False: there are enough calls to that host already."""
        assert job.record is not None
        assert self.caller is not None
        packed, body = split_record(job.record)
        meta, webhook = unpack(packed), queue.webhook
        url = meta.cb if meta.cb is not None and webhook.allow_per_message else webhook.url
        host = urlsplit(url).netloc
        if self._hosts[host] >= self.config.host_calls:
            return False
        queue.jobs.popleft()
        job.record = None
        queue.calling += 1
        self.in_flight += 1
        self._hosts[host] += 1
        now_ms = self._now_ms()
        facts = Facts(
            encode_id(job.first_id), queue.name, f"/{self._cluster_id}/topics/{queue.name}",
            format_instant(job.deliver_at_ms), job.attempt, job.redelivered, meta,
        )  # fmt: skip
        term, seq, position, _, _ = job.lease
        self._dispatcher.answered(term, seq, np.array([position]), job.deliver_at_ms)
        # A message's own URL gets no secret that is for the topic's receiver.
        extra = webhook.headers if origin_of(url) == origin_of(webhook.url) else ()
        headers = call_headers(facts, queue.keys, extra, now_ms, body)
        self.caller.call(Request(url, headers, body, queue.timeout_s), partial(self._called, queue, job, url, host))
        return True

    def _called(self, queue: WebhookQueue, job: Job, url: str, host: str, answer: Answer) -> None:
        queue.calling -= 1
        queue.answered += 1
        self.in_flight -= 1
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]
        self._count(answer)
        if answer.status == 410 and url == queue.webhook.url:
            self._disable(queue)
        if answer.reason:
            longest = self._replica.ledger.settings.max_delay_ms
            delay_ms = -1 if answer.retry_after_ms is None else min(answer.retry_after_ms, longest)
            self._settle(job, (delay_ms, answer.reason))
        else:
            self._settle(job, None)
        self._next(queue)

    def _settle(self, job: Job, verdict: Verdict) -> None:
        self.reports.add(job.lease, job.ends, verdict)

    def _next(self, queue: WebhookQueue) -> None:
        """Something of the queue is over: its next call, those of others who waited for room, and more to do."""
        self._run(queue)
        self._take_turns()
        self._fetch(queue)
        self._forget(queue)

    def _extend(self, queue: WebhookQueue) -> None:
        """Those that waited so long for their turn that a call no longer fits into the lease: hold them for longer."""
        soon = self.runtime.monotonic() + queue.needs_s
        late = [job for job in queue.jobs if job.ends < soon]
        queue.jobs = deque(job for job in queue.jobs if job.ends >= soon)
        queue.absent += len(late)
        command = encode_extend(self._name, np.array([job.lease for job in late], LEASE), queue.lease_ms)
        asked = self.runtime.monotonic()

        def extended(result: Any, error: HadelayError | None) -> None:
            queue.absent -= len(late)
            if error is None and isinstance(result, LeaseResult):
                for job, outcome in zip(late, result.outcomes.tolist(), strict=True):
                    if outcome == LeaseOutcome.DONE:
                        job.ends = asked + queue.lease_ms / 1000
                        queue.jobs.append(job)
            # What was lost, or is in doubt, comes again when its lease has run out.
            self._next(queue)

        self._propose(command, extended)

    def _disable(self, queue: WebhookQueue) -> None:
        """410: the receiver wants no more of this. The messages stay, and what was fetched goes back uncalled;
        `:resume` calls again."""
        topic = self._replica.ledger.topics[queue.number]
        webhook = topic.settings.webhook
        if topic.exists and not topic.settings.paused and webhook is not None and webhook.url == queue.webhook.url:
            log.warning("webhook_disabled", topic=queue.name, url=webhook.url)
            pause = {"paused": True, "paused_reason": GONE}
            self._propose(encode_topic_put(queue.name, pause), lambda result, error: None)
        while queue.jobs:
            self._settle(queue.jobs.popleft(), (uncounted(0), "HTTP 410"))

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
        return sum(len(queue.jobs) for queue in self.queues.values())


def _ignore(delivery: Delivery | None, error: HadelayError | None) -> None: ...
