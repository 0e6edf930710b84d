"""Consumers of all topics, with their receives, leases, acks and failures. Each answer has a limit, and long work over
grants or events is done in slices.

The leader knows who asked. Leases, acks and failures are replicated: this node has them.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

import numpy as np

from hadelay.api.consumers import ConsumerOfTopics, Consumers, Failed, OldestLease
from hadelay.api.text import format_instant
from hadelay.codec.formats import CONSUMER, REASON, nack_reason
from hadelay.errors import HadelayError
from hadelay.model import NONE32, Event, encode_id
from hadelay.server.service.overview import ACKS_MS, EVENTS_AT_ONCE, GRANTS_AT_ONCE, MOST_GRANTS, recent_events
from hadelay.server.service.part import Service

#: Limit of consumers in an answer, those with most leases first; and limit of topics that are listed per consumer, the
#: first ones by name.
_MOST, _MOST_TOPICS = 1_000, 50
#: Age in ms up to which failed attempts are searched for.
_FAILURES_MS = 600_000
_FAILURES = (Event.NACKED, Event.LEASE_EXPIRED)


class _Found:
    """One consumer's topics, leases and last failure, as far as this node has collected them."""

    def __init__(self) -> None:
        self.topics: set[str] = set()
        #: Cluster time of the consumer's last receive; name of the node that it was sent to; whether a receive waits
        #: now.
        self.asked: tuple[int, str, bool] = (0, "", False)
        self.leased = 0
        #: Oldest grant with an open lease: time of the grant; hour and entry of a leased message; name of its topic.
        self.oldest: tuple[int, int, int, str] | None = None
        self.acked = 0
        #: Last failed attempt: its time, name of the topic, reason.
        self.failed: tuple[int, str, str] | None = None


class ConsumerService(Service):
    async def list_consumers(self, *, may: Callable[[str], bool], stale: bool) -> Consumers[str]:
        """Consumers of the topics that `may` allows; those with most leases come first."""
        await self._confirm(stale)
        found: dict[str, _Found] = {}
        complete = await self._asked(found, may, stale=stale)
        complete &= await self._leases(found, may)
        await self._events(found, may)
        best = sorted(found.items(), key=lambda row: (-row[1].leased, row[0]))
        shown = [self._document(name, one) for name, one in best[:_MOST]]
        return Consumers(shown, complete and len(best) <= _MOST)

    async def _asked(self, found: dict[str, _Found], may: Callable[[str], bool], *, stale: bool) -> bool:
        """Ask the leader for consumers and their receives, and add them to `found`; returns whether the leader
        answered."""
        if not self._node.leading and (stale or self._node.raft.leader is None):
            return False
        try:
            rows = await self._ask_leader("consumers", None, self._node.config.http.no_leader_wait_ms / 1000)
        except HadelayError:
            return False
        for name, at_ms, node, waits, topics in rows or ():
            mine = [topic for topic in topics if may(topic)]
            if mine:
                one = found.setdefault(name, _Found())
                one.asked = at_ms, node, waits
                one.topics.update(mine)
        return rows is not None

    async def _leases(self, found: dict[str, _Found], may: Callable[[str], bool]) -> bool:
        """Add the number of leases of each consumer to `found`; returns whether all grants were examined."""
        ledger, names = self._node.ledger, dict[int, str]()
        grants = list(ledger.grants.values())
        for n, grant in enumerate(grants[:MOST_GRANTS]):
            if n % GRANTS_AT_ONCE == GRANTS_AT_ONCE - 1:
                await asyncio.sleep(0)
            rows = grant.rows[grant.rows["open"] == 1]
            for number in np.unique(rows["topic"]).tolist():
                name = names.setdefault(number, ledger.topics[number].name)
                if not may(name):
                    continue
                of, one = rows[rows["topic"] == number], found.setdefault(grant.consumer, _Found())
                one.leased += len(of)
                one.topics.add(name)
                if one.oldest is None or grant.granted_at_ms < one.oldest[0]:
                    one.oldest = grant.granted_at_ms, int(of["hour"][0]), int(of["index"][0]), name
        return len(grants) <= MOST_GRANTS

    async def _events(self, found: dict[str, _Found], may: Callable[[str], bool]) -> None:
        """Add the acks of the last minute and the last failures to `found`, both from the dispatch logs."""
        node, store = self._node, self._node.storage.hours
        now_ms = node.now_ms() if node.clock.ready else node.ledger.now_ms
        since_ms, logs = recent_events(node, now_ms - _FAILURES_MS)
        acks_ms, acks = max(since_ms, now_ms - ACKS_MS), Counter[int]()
        for hour, first, count in logs:
            for end in range(count, first, -EVENTS_AT_ONCE):
                events = store.events(hour, slice(max(first, end - EVENTS_AT_ONCE), end), verify=False)
                kinds, named = events["event"], events["consumer"] != NONE32
                acked = (kinds == Event.ACKED) & named & (events["at_ms"] > acks_ms)
                failed = np.isin(kinds, _FAILURES) & named & (events["at_ms"] > since_ms)
                some = events[acked | failed]
                entries = store.entries(hour, some["index"], verify=False)
                allowed = np.isin(entries["topic"], self._allowed(entries["topic"], may))
                some, topics = some[allowed], entries["topic"][allowed]
                acks.update(some["consumer"][some["event"] == Event.ACKED].tolist())
                self._note(found, some, topics)
                await asyncio.sleep(0)
                if len(events) and events["at_ms"][0] <= since_ms:
                    break
        scale = ACKS_MS / max(1, now_ms - acks_ms)
        for number, count in acks.items():
            found[node.ledger.names.name(CONSUMER, number)].acked = round(count * scale)

    def _allowed(self, topics: np.ndarray, may: Callable[[str], bool]) -> list[int]:
        every = self._node.ledger.topics
        return [number for number in np.unique(topics).tolist() if may(every[number].name)]

    def _note(self, found: dict[str, _Found], events: np.ndarray, topics: np.ndarray) -> None:
        """Add the topics and the last failures in these events to their consumers in `found`. The events are in the
        order of time."""
        ledger = self._node.ledger
        rows = zip(
            events["consumer"].tolist(),
            events["event"].tolist(),
            events["at_ms"].tolist(),
            topics.tolist(),
            nack_reason(events["other_hour"]).tolist(),
            strict=True,
        )
        for consumer, event, at_ms, topic, reason in rows:
            one, name = found.setdefault(ledger.names.name(CONSUMER, consumer), _Found()), ledger.topics[topic].name
            one.topics.add(name)
            if event != Event.ACKED and (one.failed is None or at_ms >= one.failed[0]):
                given = event == Event.NACKED and reason != NONE32
                words = ledger.names.name(REASON, reason) if given else Event(event).name.lower().replace("_", " ")
                one.failed = at_ms, name, words

    def _document(self, name: str, one: _Found) -> ConsumerOfTopics[str]:
        at_ms, node, waits = one.asked
        oldest, store = None, self._node.storage.hours
        if one.oldest is not None and one.oldest[2] < store.count(one.oldest[1]):
            since_ms, hour, entry, topic = one.oldest
            row = store.entries(hour, slice(entry, entry + 1))[0]
            oldest = OldestLease(encode_id(int(row["first_id"])), topic, format_instant(since_ms))
        failed = None if one.failed is None else Failed(format_instant(one.failed[0]), *one.failed[1:])
        asked_at = format_instant(at_ms) if at_ms else None
        topics = sorted(one.topics)[:_MOST_TOPICS]
        return ConsumerOfTopics(name, topics, asked_at, node, bool(waits), one.leased, one.acked, failed, oldest)
