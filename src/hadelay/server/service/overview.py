"""Sums over topics, sorted pages of topics, and consumers with leases, for people who look at the cluster (the
console).

All work over many topics, grants or hours is done in slices, and each answer has a limit.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from heapq import nsmallest
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.api.topicsettings import Topic
from hadelay.codec.formats import CONSUMER, TOPIC
from hadelay.codec.publishcommand import hash_client_key
from hadelay.ledger.messages.keys import find_key
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import DEAD_HOURS, NONE32, Event, hour_name
from hadelay.server.node import Node
from hadelay.server.service.archive import ArchiveService
from hadelay.server.service.cluster import clock_problems
from hadelay.server.service.part import Service
from hadelay.server.service.topics import TopicService
from hadelay.server.webhooks.pool import Webhooks
from hadelay.server.webhooks.queues import Health

#: Numbers of topics, of keys, of grants, and of events that are read before other tasks of the event loop run.
_TOPICS_AT_ONCE, _KEYS_AT_ONCE, GRANTS_AT_ONCE, EVENTS_AT_ONCE = 1_000, 100, 200, 2_000
#: Limit of grants that are searched for the leases of one topic; the answer tells whether there are more.
MOST_GRANTS = 20_000
#: Limits of counting acks per consumer: hours whose dispatch logs are read, the running hour included; events per log;
#: events of all logs together; and time in ms over which acks are counted.
_ACK_HOURS, _MOST_EVENTS, _ALL_EVENTS, ACKS_MS = 24, 20_000, 100_000, 60_000
#: p99 of the lateness, in ms, from which on a topic is shown as late.
LATE_MS = 1_000
#: Age of the oldest ready message, in ms, from which on a topic is shown as idle if nothing was handed out.
IDLE_MS = 60_000
#: Limit of hours that `hours` returns, which are the newest.
_MOST_HOURS = 1_000


class Totals(NamedTuple):
    """Sums over all topics, as of the last entry that this node has applied. Counters count since the cluster was
    founded."""

    at_ms: int
    topics: int
    paused: int
    published: int
    acked: int
    died: int
    waiting: int
    leased: int
    retrying: int
    dead: int
    bytes: int


class Recent(NamedTuple):
    """Ready messages, and lateness of the last five minutes in ms, as the leader reports them. For several topics, p50
    and p99 are upper bounds, because the leader reports quantiles per topic; the maximum is exact."""

    ready: int
    oldest_ms: int
    handed_out: int
    p50_ms: int
    p99_ms: int
    max_ms: int


class TopicCounts(NamedTuple):
    """Counters of one topic for a chart."""

    published: int
    acked: int
    died: int
    pending: int
    retrying: int


class HourRow(NamedTuple):
    hour: str
    entries: int
    open: int
    mapped: bool
    sealed: bool
    archived: bool


class Holder(NamedTuple):
    """A consumer that has leased messages of a topic. since_ms: time of its oldest grant."""

    consumer: str
    leased: int
    since_ms: int


#: Name of an order of topics → function that makes the sort key from (topic, leader's report about it).
_Report = tuple[int, ...]
ORDERS: Mapping[str, Callable[[TopicState, _Report], Any]] = {
    "name": lambda topic, report: topic.name,
    "scheduled": lambda topic, report: (report[0] - topic.waiting, topic.name),
    "ready": lambda topic, report: (-report[0], topic.name),
    "leased": lambda topic, report: (-topic.leased, topic.name),
    "retrying": lambda topic, report: (-topic.retrying, topic.name),
    "dead": lambda topic, report: (-topic.dead, topic.name),
    "late": lambda topic, report: (-report[4], topic.name),
    "oldest": lambda topic, report: (report[1] if report[0] else 1 << 62, topic.name),
}
_NO_REPORT = (0, 0, 0, 0, 0, 0)
#: Name of a filter of topics → test of (topic, leader's report about it, cluster time). idle: a message has been ready
#: for a minute, and none was handed out in the last five minutes.
CHOICES: Mapping[str, Callable[[TopicState, _Report, int], bool]] = {
    "all": lambda topic, report, now_ms: True,
    "retrying": lambda topic, report, now_ms: topic.retrying > 0,
    "dead": lambda topic, report, now_ms: topic.dead > 0,
    "paused": lambda topic, report, now_ms: topic.settings.paused,
    "idle": lambda topic, report, now_ms: (
        report[0] > 0 and not report[2] and not topic.settings.paused and now_ms - report[1] >= IDLE_MS
    ),
    "late": lambda topic, report, now_ms: report[4] >= LATE_MS,
}


class Overview(Service):
    def __init__(self, node: Node, topics: TopicService, webhooks: Webhooks | None) -> None:
        super().__init__(node)
        self._topics, self._webhooks, self._archive = topics, webhooks, ArchiveService(node)

    def receiver(self, name: str) -> Health | None:
        """Health of the receiver of a topic's webhook; None if this node does not lead, so makes no calls. Raises
        NotFound."""
        topic = self._topic(name)
        return None if self._webhooks is None else self._webhooks.pool.health(topic.number)

    async def totals(self) -> Totals:
        """Compute the sums over all topics from this node's state, without asking another node."""
        found, known = np.zeros(10, np.int64), self._node.ledger.topics.all
        for first in range(0, len(known), _TOPICS_AT_ONCE):
            few = known[first : first + _TOPICS_AT_ONCE]
            found += np.array([_row(topic) for topic in few], np.int64).sum(axis=0)
            await asyncio.sleep(0)
        node = self._node
        return Totals(node.now_ms() if node.clock.ready else node.ledger.now_ms, *found.tolist())

    async def recent(self) -> Recent:
        """Ask the leader for ready messages and lateness. Raises NoLeader."""
        reports = list((await self._topics.ready(stale=False)).values())
        rows = np.zeros((len(reports), 6), np.int64)
        for first in range(0, len(reports), _TOPICS_AT_ONCE):
            few = reports[first : first + _TOPICS_AT_ONCE]
            rows[first : first + len(few)] = [(*report[:5], report[-1]) for report in few]
            await asyncio.sleep(0)
        return summarize(rows)

    async def busiest(self, limit: int) -> list[str]:
        """Names of the topics to which most messages were published."""
        best: list[TopicState] = []
        known = self._node.ledger.topics.all
        for first in range(0, len(known), _TOPICS_AT_ONCE):
            few = [topic for topic in known[first : first + _TOPICS_AT_ONCE] if topic.exists]
            best = nsmallest(limit, [*best, *few], key=lambda topic: (-topic.published, topic.number))
            await asyncio.sleep(0)
        return [topic.name for topic in best]

    def counts(self, name: str) -> TopicCounts | None:
        """Counters of a topic, as of the last entry that this node has applied; None if there is no such topic."""
        topic = self._node.ledger.topic(name)
        if topic is None:
            return None
        settled = topic.settled
        died = settled[Event.DEAD]
        return TopicCounts(topic.published, settled[Event.ACKED], died, topic.pending, topic.retrying)

    async def topics_of(self, names: Iterable[str], *, stale: bool) -> list[Topic[str]]:
        """The topics with these names; those that do not exist any more are left out."""
        await self._confirm(stale)
        reports = await self._topics.ready(stale=stale)
        found = (self._node.ledger.topic(name) for name in names)
        return [self._topics.document(topic, reports) for topic in found if topic is not None]

    async def find_topics(
        self,
        text: str,
        order: str,
        skip: int,
        limit: int,
        *,
        may: Callable[[str], bool],
        stale: bool,
        choice: str = "all",
    ) -> tuple[list[Topic[str]], int]:
        """Find topics that pass a filter (CHOICES) and whose names contain `text`. Returns (one page of them, in an
        order of ORDERS; number of topics found). may: whether the caller may see the topic of this name."""
        await self._confirm(stale)
        reports, key, chosen = await self._topics.ready(stale=stale), ORDERS[order], CHOICES[choice]
        best: list[tuple[Any, TopicState]] = []
        known, text, count, now_ms = self._node.ledger.topics.all, text.lower(), 0, self._node.now_ms()
        for first in range(0, len(known), _TOPICS_AT_ONCE):
            few = [
                topic
                for topic in known[first : first + _TOPICS_AT_ONCE]
                if topic.exists
                and text in topic.name.lower()
                and chosen(topic, reports.get(topic.number, _NO_REPORT), now_ms)
                and may(topic.name)
            ]
            count += len(few)
            rows = [(key(topic, reports.get(topic.number, _NO_REPORT)), topic) for topic in few]
            best = nsmallest(skip + limit, [*best, *rows], key=lambda row: row[0])
            await asyncio.sleep(0)
        return [self._topics.document(topic, reports) for _, topic in best[skip:]], count

    async def find_key(self, key: str, limit: int, *, may: Callable[[str], bool], stale: bool) -> list[int]:
        """Find the messages under a client key in all topics that the caller may see: from each topic, the id of the
        message published last; at most `limit` ids, in the order in which the topics were created."""
        await self._confirm(stale)
        ledger, digest, found = self._node.ledger, hash_client_key(key.encode()), list[int]()
        known = ledger.topics.all
        for first in range(0, len(known), _KEYS_AT_ONCE):
            few = [topic.name for topic in known[first : first + _KEYS_AT_ONCE] if topic.exists and may(topic.name)]
            found += [one for name in few if (one := find_key(ledger, name, digest)) is not None]
            if len(found) >= limit:
                break
            await asyncio.sleep(0)
        return found[:limit]

    async def holders(self, name: str) -> tuple[list[Holder], bool]:
        """Consumers with leased messages of a topic, those with most leases first. Also returns whether all grants were
        searched."""
        topic, found = self._topic(name), dict[str, tuple[int, int]]()
        number = self._node.ledger.names.number(TOPIC, topic.name)
        grants = list(self._node.ledger.grants.values())
        for n, grant in enumerate(grants[:MOST_GRANTS]):
            if n % GRANTS_AT_ONCE == GRANTS_AT_ONCE - 1:
                await asyncio.sleep(0)
            count = int(np.count_nonzero((grant.rows["topic"] == number) & (grant.rows["open"] == 1)))
            if count:
                before, since_ms = found.get(grant.consumer, (0, grant.granted_at_ms))
                found[grant.consumer] = before + count, min(since_ms, grant.granted_at_ms)
        holders = [Holder(consumer, leased, since_ms) for consumer, (leased, since_ms) in found.items()]
        return sorted(holders, key=lambda holder: (-holder.leased, holder.consumer)), len(grants) <= MOST_GRANTS

    async def acks(self, name: str) -> dict[str, int]:
        """Consumer → number of its acks of a topic in the last minute, from the dispatch logs of messages that fell due
        in the last 24 hours. If the logs have too many events, a shorter time is read, and the acks are scaled to a
        minute."""
        node, topic = self._node, self._topic(name)
        now_ms, store = node.now_ms() if node.clock.ready else node.ledger.now_ms, node.storage.hours
        since_ms, logs = recent_events(node, now_ms - ACKS_MS)
        acks: Counter[int] = Counter()
        for hour, first, count in logs:
            for end in range(count, first, -EVENTS_AT_ONCE):
                events = store.events(hour, slice(max(first, end - EVENTS_AT_ONCE), end), verify=False)
                acked = (events["event"] == Event.ACKED) & (events["consumer"] != NONE32) & (events["at_ms"] > since_ms)
                entries = store.entries(hour, events["index"][acked], verify=False)
                acks.update(events["consumer"][acked][entries["topic"] == topic.number].tolist())
                await asyncio.sleep(0)
                if len(events) and events["at_ms"][0] <= since_ms:
                    break
        scale = ACKS_MS / max(1, now_ms - since_ms)
        return {node.ledger.names.name(CONSUMER, number): round(count * scale) for number, count in acks.items()}

    async def hours(self) -> tuple[list[HourRow], str]:
        """Returns (hours on this node in ascending order, without hours of dead letters, at most the newest 1,000;
        state of the archive, see ArchiveService)."""
        archived, archive = await self._archive.look()
        node = self._node
        store, running = node.storage.hours, node.ledger.now_hour
        numbers = sorted(hour for hour in store.hours() if hour < DEAD_HOURS)[-_MOST_HOURS:]
        rows = [
            HourRow(
                hour_name(hour),
                store.count(hour),
                node.ledger.open_entries(hour),
                store.mapped(hour),
                hour < running,
                hour in archived,
            )
            for hour in numbers
        ]
        return rows, archive

    @property
    def clock_problems(self) -> list[str]:
        """Problems of the wall clocks in words, as this node sees them."""
        return clock_problems(self._node)

    @property
    def free_bytes(self) -> int:
        """Free bytes on the disk of this node's data or of its journal, whichever has less."""
        return self._node.checkpoints.free_bytes

    @property
    def checkpoint_age_s(self) -> float:
        """Time since this node's last checkpoint became durable, in seconds."""
        return self._node.runtime.monotonic() - self._node.checkpoints.finished


def _row(topic: TopicState) -> tuple[int, ...]:
    settled = topic.settled
    return (
        topic.exists,
        topic.exists and topic.settings.paused,
        topic.published,
        settled[Event.ACKED],
        settled[Event.DEAD],
        topic.waiting,
        topic.leased,
        topic.retrying,
        topic.dead,
        topic.bytes,
    )


def summarize(reports: NDArray[np.int64]) -> Recent:
    """Summarize the leader's reports, which have one row per topic. Half of a topic's messages count with its p50, 49 %
    with its p99 and 1 % with its maximum, so the quantiles over all topics are upper bounds; for one topic they are
    exact."""
    count, since_ms, messages, p50, p99, most = reports.T
    since_ms = since_ms[(count > 0) & (since_ms > 0)]
    values = np.concatenate((p50, p99, most))
    order = np.argsort(values, kind="stable")
    passed = np.cumsum(np.concatenate((0.5 * messages, 0.49 * messages, 0.01 * messages))[order])
    handed_out = int(messages.sum())
    found = values[order][passed.searchsorted(np.array([0.5, 0.99]) * handed_out - 1e-6)] if handed_out else (0, 0)
    oldest_ms, largest = int(since_ms.min(initial=1 << 62)), int(most.max(initial=0))
    return Recent(
        int(count.sum()), oldest_ms if len(since_ms) else 0, handed_out, int(found[0]), int(found[1]), largest
    )


def recent_events(node: Node, since_ms: int) -> tuple[int, list[tuple[int, int, int]]]:
    """Dispatch logs with events after since_ms, as (hour, first event to read, number of events). Also the time,
    since_ms or later, after which all events are among those to read."""
    store, running = node.storage.hours, node.ledger.now_hour

    def at_ms(hour: int, number: int) -> int:
        return int(store.events(hour, slice(number, number + 1), verify=False)["at_ms"][0])

    counts = {hour: store.event_count(hour) for hour in range(running - _ACK_HOURS + 1, running + 1)}
    recent = {hour: count for hour, count in counts.items() if count and at_ms(hour, count - 1) > since_ms}
    most = min(_MOST_EVENTS, _ALL_EVENTS // max(1, len(recent)))
    logs = [(hour, max(0, count - most), count) for hour, count in recent.items()]
    return max([since_ms, *(at_ms(hour, first) for hour, first, _ in logs if first)]), logs
