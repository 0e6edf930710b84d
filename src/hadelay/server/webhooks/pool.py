"""Decides which webhook calls are made, and how many at once.

The pool is a consumer: while its node leads, it polls for every topic that has a webhook. So grants, leases, commit
before call, redelivery marks, expiry and fail-over work as for consumers that pull. The pool fetches ahead as much as
the receiver takes during a few commits. A call begins only if its whole timeout fits into the lease, so nobody else is
handed the message meanwhile. When the node ceases to lead, the pool fetches no more and finishes what it has.

A topic has a limit of concurrent calls; where all topics together want more calls than the node makes, each gets an
equal share. So a receiver that does not answer holds up its own topic only.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import structlog

from hadelay.api.service import Histogram
from hadelay.api.text import format_instant
from hadelay.codec.ackparts import CallReply
from hadelay.codec.commands import encode_extend, encode_topic_put, uncounted
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.meta import unpack
from hadelay.codec.results import LeaseOutcome, LeaseResult
from hadelay.errors import HadelayError
from hadelay.handout.polls import Delivery, Poll
from hadelay.ledger.messages.copies import published_in
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import SEPARATOR, Event, encode_id
from hadelay.server.node import Node
from hadelay.server.reading import Extent, split_record
from hadelay.server.webhooks.alerts import TOPICS_AT_ONCE, Alerts
from hadelay.server.webhooks.calls import Call, CallRequest, Facts, Reply, call_headers
from hadelay.server.webhooks.queues import CallJob, Health, Report, Reports, Verdict, WebhookQueue, jobs_of
from hadelay.settings.topic import BODILESS
from hadelay.settings.urls import origin_of

#: Name of the consumer for which webhooks lease messages.
CONSUMER = "webhook"
_WAIT_MS = 3_600_000
_SOON_S = 0.005
_AGAIN_S = 0.1
#: Reason that is stored when a topic is paused because its webhook's receiver answered with HTTP 410.
GONE = "webhook disabled: HTTP 410"
#: Bucket bounds of the histogram hadelay_webhook_call_duration_seconds.
_DURATIONS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: Limit of the number of different call outcomes that are counted each on its own; others are counted together.
_MOST_OUTCOMES = 32

log = structlog.get_logger("hadelay")


class Pool:
    """Makes the webhook calls of all topics while this node leads. One object per node."""

    def __init__(self, node: Node, call: Call) -> None:
        self._node, self._config, self._call = node, node.config.webhooks, call
        self._runtime, self._delivery = node.runtime, node.delivery
        self.reports = Reports(node.name, node.runtime, node.publishing.propose, node.delivery.delays_of)
        self.queues: dict[int, WebhookQueue] = {}
        #: Queues with jobs that wait because of a limit of concurrent calls, in the order of their turns.
        self._turns: deque[WebhookQueue] = deque()
        self._resuming = False
        self._hosts: Counter[str] = Counter()
        #: The term that this node leads; 0: it does not lead.
        self._term = 0
        self._numbers = itertools.count()
        #: Metrics of webhook calls, for the page /metrics.
        self.in_flight = 0
        self.outcomes: Counter[str] = Counter()
        self.durations = Histogram.of(_DURATIONS_S)

    @property
    def busy(self) -> bool:
        """Whether calls are under way, or outcomes of calls are not committed yet."""
        return bool(self.in_flight or self.reports.busy or any(queue.leased for queue in self.queues.values()))

    def on_leader(self, term: int) -> None:
        self._term = term
        for queue in self.queues.values():
            queue.health = Health()
        self._look_at(term, iter(sorted(self._node.ledger.topics.webhooks | self.queues.keys())))

    def _look_at(self, term: int, numbers: Iterator[int]) -> None:
        """Start the webhook queues of these topics, some per turn of the event loop."""
        if term != self._term:
            return
        some = list(islice(numbers, TOPICS_AT_ONCE))
        for number in some:
            self.on_topic(self._node.ledger.topics[number])
        if some:
            self._runtime.call_soon(self._look_at, term, numbers)

    def on_follower(self) -> None:
        """Stop fetching messages. (The dispatcher has answered the polls of the pool already.)"""
        self._term = 0

    def on_topic(self, topic: TopicState) -> None:
        """Start, change or end the webhook queue of a topic that was created, changed or deleted."""
        queue = self.queues.get(topic.number)
        if topic.exists and topic.settings.webhook is not None:
            if queue is None:
                if not self._term:
                    return
                queue = self.queues[topic.number] = WebhookQueue(topic)
            queue.set(topic.settings, self._config.topic_calls, self._node.ledger.settings.max_lease_ms)
            queue.removed = False
            self._run(queue)
            self._fetch(queue)
        elif queue is not None:
            queue.removed = True
            while queue.polls:
                self._delivery.cancel_poll(queue.polls.pop())
            self._run(queue)
            self._forget(queue)

    def _forget(self, queue: WebhookQueue) -> None:
        if queue.removed and not queue.leased and self.queues.get(queue.number) is queue:
            del self.queues[queue.number]

    def _fetch(self, queue: WebhookQueue, request_id: bytes = b"") -> None:
        if not self._term or queue.removed:
            return
        most = queue.calls + queue.ahead(self._runtime.monotonic())
        room = most - queue.leased - sum(poll.max for poll in queue.polls)
        # Keep two polls, each for half of the queue's slots: one waits for due messages while the grant of the other is
        # being committed. A poll asks for at least a quarter of the slots, so that not every slot that becomes free
        # causes a poll.
        while len(queue.polls) < 2 and room >= max(1, most // 4):
            number = request_id or f"{self._term}-{next(self._numbers)}".encode()
            request_id = b""
            some = min(room, max(1, most // 2))
            poll = Poll(CONSUMER, number, (queue.name,), some, queue.lease_ms, _WAIT_MS, lambda *_: None)
            poll.done = partial(self._fetched, queue, poll)
            queue.polls.add(poll)
            room -= poll.max
            # Submit the poll in the next turn of the loop: it may be answered at once, and this queue is being worked
            # on now.
            self._runtime.call_soon(self._ask, queue, poll)

    def _ask(self, queue: WebhookQueue, poll: Poll) -> None:
        if poll in queue.polls:
            self._delivery.poll(poll)

    def _fetched(self, queue: WebhookQueue, poll: Poll, delivery: Delivery | None, error: HadelayError | None) -> None:
        queue.polls.discard(poll)
        if delivery is None:
            # Repeat the failed poll with the same request id: if messages were granted to it, the repetition gets them.
            self._runtime.call_later(_AGAIN_S, self._fetch, queue, poll.request_id)
            return
        queue.jobs.extend(jobs_of(delivery, self._runtime.monotonic(), queue.floor))
        self._run(queue)
        self._fetch(queue)

    def _run(self, queue: WebhookQueue) -> None:
        """Begin as many of the queue's calls as its limits allow; if a limit stops it, it continues later. Begin no
        calls for a paused topic, and none about messages that were purged."""
        topic = self._node.ledger.topics[queue.number]
        if topic.floor != queue.floor:
            queue.floor = topic.floor
            while queue.jobs:
                self._settle(queue.jobs.popleft(), (-1, "purged"))
        if topic.settings.paused:
            self._keep(queue)
            return
        while queue.jobs and self._has_room(queue):
            if not queue.may_begin(self._runtime.monotonic()):
                self._resume_soon()
                break
            job = queue.jobs[0]
            # Drop the job: its topic was purged while the job's record was read or its lease extended; or, in interval
            # mode, its message was cancelled or rescheduled before its grant was committed.
            if job.floor != queue.floor or self._has_ended(job):
                self._settle(queue.jobs.popleft(), (-1, "purged" if job.floor != queue.floor else "cancelled"))
                continue
            if job.ends - self._runtime.monotonic() < queue.needs_s:
                self._extend(queue)
                continue
            if not self._may_call(job):
                self._resume_soon()
                break
            if job.record is None and not self._read(queue, job):
                continue
            if not self._begin(queue, job):
                break
            queue.tokens -= 1
        if queue.jobs and queue.calling < queue.calls and queue not in self._turns:
            self._turns.append(queue)

    def _may_call(self, job: CallJob) -> bool:
        """Whether the job's call may begin: the grant is committed, or no other node can have led since the grant.
        In interval mode messages are fetched before their grants are committed: if this node stood still since then,
        the next leader may have handed out the same messages."""
        node, (term, seq, *_) = self._node, job.lease
        return (term, seq) in node.ledger.grants or (term == self._term and node.raft.has_leader_lease())

    def _has_ended(self, job: CallJob) -> bool:
        """Whether the job's message is settled, or has moved from the index entry under which it was fetched."""
        _, _, _, hour, index = job.lease
        return self._node.ledger.outcome_of(hour, index)[0] is not None

    def _keep(self, queue: WebhookQueue) -> None:
        """As long as the topic is paused, extend the leases of messages that were fetched before the pause."""
        if queue.jobs and not queue.keeping:
            queue.keeping = True
            first = min(job.ends for job in queue.jobs) - queue.needs_s
            wait_s = max(_SOON_S, first - self._runtime.monotonic())
            self._runtime.call_later(wait_s, self._kept, queue)

    def _kept(self, queue: WebhookQueue) -> None:
        queue.keeping = False
        if queue.jobs and min(job.ends for job in queue.jobs) - queue.needs_s < self._runtime.monotonic():
            self._extend(queue)
        self._run(queue)

    def _resume_soon(self) -> None:
        if not self._resuming:
            self._resuming = True
            self._runtime.call_later(_SOON_S, self._resume)

    def _resume(self) -> None:
        self._resuming = False
        self._take_turns()

    def _take_turns(self) -> None:
        """Begin calls of the queues that wait because of a limit, in the order of their turns."""
        for _ in range(len(self._turns)):
            if self.in_flight >= self._config.max_calls:
                break
            self._run(self._turns.popleft())

    def _has_room(self, queue: WebhookQueue) -> bool:
        most = self._config.max_calls
        if queue.calling + queue.reading >= queue.calls or self.in_flight >= most:
            return False
        if 2 * self.in_flight < most:
            return True
        busy = sum(1 for other in self.queues.values() if other.leased)
        return queue.calling < max(1, most // busy)

    def _read(self, queue: WebhookQueue, job: CallJob) -> bool:
        """Read the record of a job. False: a thread has to read it from disk; until then, the job is out of the
        queue."""
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

        record = self._node.reader.record(Extent(job.lease[3], job.offset, job.size), found)
        if record is not None:
            put_back(record)
        return record is not None

    def _begin(self, queue: WebhookQueue, job: CallJob) -> bool:
        """Begin the call of a job. False if the host has reached its limit of concurrent calls."""
        assert job.record is not None
        packed, body = split_record(job.record)
        copied = SEPARATOR in queue.name
        published = encode_id(published_in(self._node.ledger, job.first_id, job.record)) if copied else None
        meta, webhook = unpack(packed), queue.webhook
        url, extra, ours = webhook.url, webhook.headers, True
        if meta.cb is not None and webhook.allow_per_message:
            # If the message has its own URL, this URL gets the topic's headers, which may hold secrets, and the client
            # certificate only if it has the same origin as the topic's URL.
            url, ours = meta.cb, origin_of(meta.cb) == origin_of(webhook.url)
            extra = extra if ours else ()
        if webhook.method in BODILESS:
            body = b""
        host = urlsplit(url).netloc
        if self._hosts[host] >= self._config.host_calls:
            return False
        queue.jobs.popleft()
        job.record = None
        queue.calling += 1
        self.in_flight += 1
        self._hosts[host] += 1
        facts = Facts(
            encode_id(job.first_id),
            queue.name,
            f"/{self._node.config.cluster.id}/topics/{queue.name}",
            format_instant(job.deliver_at_ms),
            job.attempt,
            job.uncounted,
            job.redelivered,
            meta,
            published,
        )
        term, seq, position, _, _ = job.lease
        self._delivery.answered(term, seq, np.array([position]), job.deliver_at_ms)
        headers = call_headers(facts, queue.keys, extra, self._node.now_ms(), body)
        keeps = meta.re is None and bool(queue.on_success or (webhook.allow_per_message and meta.os))
        request = CallRequest(url, headers, body, queue.timeout_s, webhook.method, identified=ours, keeps=keeps)
        self._call(request, partial(self._called, queue, job, url, host))
        return True

    def _called(self, queue: WebhookQueue, job: CallJob, url: str, host: str, answer: Reply) -> None:
        queue.calling -= 1
        queue.answered += 1
        self.in_flight -= 1
        self._hosts[host] -= 1
        if not self._hosts[host]:
            del self._hosts[host]
        self._count(answer)
        queue.health.add(answer.status, answer.reason, self._node.now_ms(), again=job.attempt > 1 or job.redelivered)
        if answer.status == 410 and url == queue.webhook.url:
            self._disable(queue)
        delay_ms = -1
        if answer.retry_after_ms is not None:
            delay_ms = min(answer.retry_after_ms, queue.longest_wait_ms, self._node.ledger.settings.max_delay_ms)
        kept = answer.kept
        if kept is not None and self._node.peers.full:
            kept = kept._replace(body=b"", truncated=bool(kept.body) or kept.truncated)
        self._settle(job, (delay_ms, answer.reason) if answer.reason else None, kept)
        self._next(queue)

    def _settle(self, job: CallJob, verdict: Verdict, kept: CallReply | None = None) -> None:
        self.reports.add(Report(job.lease, job.ends, kept), verdict)

    def _next(self, queue: WebhookQueue) -> None:
        """Continue after a job of the queue has ended: start waiting calls of this and other queues, and fetch more
        messages."""
        self._run(queue)
        self._take_turns()
        self._fetch(queue)
        self._forget(queue)

    def _extend(self, queue: WebhookQueue) -> None:
        """Extend the leases of those waiting jobs whose leases have too little time left for a call."""
        soon = self._runtime.monotonic() + queue.needs_s
        late = [job for job in queue.jobs if job.ends < soon]
        queue.jobs = deque(job for job in queue.jobs if job.ends >= soon)
        queue.absent += len(late)
        command = encode_extend(self._node.name, np.array([job.lease for job in late], LEASE), queue.lease_ms)
        asked = self._runtime.monotonic()

        def extended(result: Any, error: HadelayError | None) -> None:
            queue.absent -= len(late)
            if error is None and isinstance(result, LeaseResult):
                for job, outcome in zip(late, result.outcomes.tolist(), strict=True):
                    if outcome == LeaseOutcome.DONE:
                        job.ends = asked + queue.lease_ms / 1000
                        queue.jobs.append(job)
            # If a lease was lost, or it is unknown whether it was extended, the message is granted again when its lease
            # has ended.
            self._next(queue)

        self._node.publishing.propose(command, extended)

    def _disable(self, queue: WebhookQueue) -> None:
        """Pause the topic, because its receiver answered with HTTP 410. Fetched messages are nacked without a call."""
        topic = self._node.ledger.topics[queue.number]
        webhook = topic.settings.webhook
        if topic.exists and not topic.settings.paused and webhook is not None and webhook.url == queue.webhook.url:
            log.warning("webhook_disabled", topic=queue.name, url=webhook.url)
            pause = {"paused": True, "paused_reason": GONE}
            self._node.publishing.propose(encode_topic_put(queue.name, pause), lambda result, error: None)
        while queue.jobs:
            self._settle(queue.jobs.popleft(), (uncounted(0), "HTTP 410"))

    def _count(self, answer: Reply) -> None:
        outcome = f"{answer.status // 100}xx" if answer.status else answer.reason.replace(" ", "_")
        # The reason of a failed call may be a text of a library, so the number of counters needs a limit.
        known = outcome in self.outcomes or len(self.outcomes) < _MOST_OUTCOMES
        self.outcomes[outcome if known else "other"] += 1
        self.durations.observe(answer.seconds)

    def health(self, topic: int) -> Health | None:
        """Health of the receiver of the topic with this number; None: this node does not call its webhook."""
        queue = self.queues.get(topic)
        return queue.health if queue is not None and self._term and not queue.removed else None

    @property
    def queued(self) -> int:
        """Number of messages that were fetched and wait for their calls."""
        return sum(len(queue.jobs) for queue in self.queues.values())


class Webhooks:
    """Webhooks of one node: calls about messages, and alerts about dead letters. Both work only while the node leads.

    Attaches itself to a node that has not started yet."""

    def __init__(self, node: Node, call: Call) -> None:
        self._node = node
        self.pool, self.alerts = Pool(node, call), Alerts(node, call)
        self._changed: dict[int, TopicState] = {}
        #: Numbers of the topics that have had dead letters: only a topic's first dead letter is logged.
        self._died: set[int] = set()
        node.delivery.watch, node.attention.health = self.on_topic, self.pool.health
        node.leadership.parts.append(self)

    def on_leader(self, term: int) -> None:
        self._died = self._node.ledger.topics.died.copy()
        self.pool.on_leader(term)
        self.alerts.on_leader(term)

    def on_follower(self) -> None:
        self.pool.on_follower()
        self.alerts.on_follower()

    def on_topic(self, topic: TopicState) -> None:
        """Note a topic whose settings changed, or in which messages died. Apply calls this, so the work is done after
        apply."""
        if topic.settled[Event.DEAD] and topic.number not in self._died:
            self._died.add(topic.number)
            log.warning("first_death", topic=topic.name, look=f"hadelay dead list {topic.name}")
        if not self._changed:
            self._node.runtime.call_soon(self._look)
        self._changed[topic.number] = topic

    def _look(self) -> None:
        changed, self._changed = self._changed, {}
        for topic in changed.values():
            self.pool.on_topic(topic)
            self.alerts.on_topic(topic)
