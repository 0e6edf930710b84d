"""Alerts: calls to a topic's `alert` URL, or to `webhooks.alert_url`, that report messages which became dead letters.

At least once: the ledger keeps how many of a topic's dead letters were reported, and a replicated command raises that
number after a 2xx; each leader reports the others. One call says how many messages died since the last one and names
the first hundred; the topic's next call waits for webhooks.alert_interval_ms.
"""

from __future__ import annotations

import struct
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import msgspec
import structlog

from hadelay.api.text import format_instant
from hadelay.codec.commands import encode_alerted
from hadelay.errors import HadelayError
from hadelay.ledger.leases.dead import KEY, Letters, listing
from hadelay.ledger.topics.topics import TopicState
from hadelay.model import NONE32, Event, encode_id
from hadelay.server.node import Node
from hadelay.server.webhooks.calls import Call, CallRequest, Reply, alert_headers
from hadelay.webhooks import key_of

#: Limit of topics that a new leader examines in one turn of the event loop.
TOPICS_AT_ONCE = 500
#: Limit of message ids in one alert; its number of dead letters counts the others, too.
MOST_IDS = 100
#: Pause before an alert, in seconds: one alert reports all messages that die together.
_GATHER_S = 0.5
#: Pause after a failed alert, in seconds; it doubles after each further failure, up to alert_interval_ms.
_RETRY_S = 5.0
_TIMEOUT_S = 15.0
#: Limit of the already reported dead letters that a new leader skips in order to find the new ones. If there are more,
#: its alert names no message ids.
_COUNT_OFF = 10_000

log = structlog.get_logger("hadelay")


@dataclass(eq=False, slots=True)
class _Watch:
    """State of alerts for one topic that has dead letters which no alert has reported yet."""

    #: Position after the last reported letter in the topic's list of dead letters; None: unknown, because another node
    #: reported it.
    cursor: bytes | None
    scheduled: bool = False
    failures: int = 0
    #: Monotonic time before which no alert is sent.
    not_before: float = 0.0


class Alerts:
    """Sends alerts about dead letters while this node leads. One object per node."""

    def __init__(self, node: Node, call: Call) -> None:
        self._node, self._config, self._call = node, node.config.webhooks, call
        self.sent = self.failed = 0
        self._term = 0
        self._watches: dict[int, _Watch] = {}
        #: Position at the end of the list of dead letters at the take-over; and highest topic number up to which topics
        #: were searched for unreported dead letters. For topics up to that number that are not in `_watches`, all
        #: earlier dead letters are reported.
        self._since, self._looked_at = b"", -1

    def on_leader(self, term: int) -> None:
        self._term = term
        self._watches.clear()
        self._since, self._looked_at = self._now(), -1
        self._look_at(term, iter(sorted(self._node.ledger.topics.died)))

    def _look_at(self, term: int, numbers: Iterator[int]) -> None:
        """Search for dead letters that no alert has reported; some topics per turn of the event loop."""
        if term != self._term:
            return
        some = list(islice(numbers, TOPICS_AT_ONCE))
        for topic in map(self._node.ledger.topics.__getitem__, some):
            if untold(topic):
                self._watches.setdefault(topic.number, _Watch(None))
                self.on_topic(topic)
        self._looked_at = some[-1] if some else NONE32
        if some:
            self._node.runtime.call_soon(self._look_at, term, numbers)

    def _now(self) -> bytes:
        """Position after all present dead letters; messages that die later come after this position."""
        return struct.pack(">QQ", self._node.ledger.now_ms, (1 << 64) - 1)

    def on_follower(self) -> None:
        self._term = 0

    def on_topic(self, topic: TopicState) -> None:
        """Schedule an alert about a topic if one is due: called when messages of the topic died, or its settings
        changed."""
        if not self._term or not untold(topic) or self._target(topic) is None:
            return
        looked_at = topic.number <= self._looked_at
        watch = self._watches.setdefault(topic.number, _Watch(self._since if looked_at else None))
        if not watch.scheduled:
            watch.scheduled = True
            wait_s = max(_GATHER_S, watch.not_before - self._node.runtime.monotonic())
            self._node.runtime.call_later(wait_s, self._tell, self._term, topic, watch)

    def _target(self, topic: TopicState) -> tuple[str, str] | None:
        """(URL, secret) to which alerts about the topic go; None: nowhere."""
        if not topic.exists:
            return None
        if (alert := topic.settings.alert) is not None:
            return alert.url, alert.secret
        return (self._config.alert_url, self._config.alert_secret) if self._config.alert_url else None

    def _tell(self, term: int, topic: TopicState, watch: _Watch) -> None:
        letters = self._letters(topic, watch, untold(topic))
        self._search(term, topic, watch, topic.settled[Event.DEAD], self._now(), letters)

    def _search(
        self,
        term: int,
        topic: TopicState,
        watch: _Watch,
        upto: int,
        end: bytes,
        letters: Generator[None, None, Letters],
    ) -> None:
        """Search for the dead letters that an alert has to name, one slice per turn of the event loop; then send the
        alert. It reports the topic's dead letters up to the count `upto`, which are before position `end`."""
        if term != self._term:
            return
        try:
            next(letters)
        except StopIteration as found:
            self._send(topic, watch, upto, end, found.value)
        else:
            self._node.runtime.call_soon(self._search, term, topic, watch, upto, end, letters)

    def _send(self, topic: TopicState, watch: _Watch, upto: int, end: bytes, letters: Letters) -> None:
        target, count = self._target(topic), upto - topic.alerted
        if target is None or count <= 0:
            watch.scheduled = False
            self.on_topic(topic)
            return
        url, secret = target
        cluster_id = self._node.config.cluster.id
        body = msgspec.json.encode(
            {
                "topic": topic.name,
                "died": count,
                "ids": [encode_id(first_id) for _, first_id in letters],
                "dead": topic.dead,
                "first_died_at": format_instant(KEY.unpack(b"\0\0\0\0" + letters[0][0])[1]) if letters else None,
                "cluster_id": cluster_id,
            }
        )
        headers = alert_headers(
            f"dead-{topic.name}-{topic.generation}-{topic.alerted}-{upto}",
            f"/{cluster_id}/topics/{topic.name}",
            self._node.now_ms(),
            [key_of(secret)] if secret else [],
            body,
        )
        cursor = letters[-1][0] if 0 < len(letters) < MOST_IDS else end
        answered = partial(self._answered, self._term, topic, watch, upto, cursor)
        self._call(CallRequest(url, headers, body, _TIMEOUT_S), answered)

    def _letters(self, topic: TopicState, watch: _Watch, count: int) -> Generator[None, None, Letters]:
        """Search for the first dead letters that no alert has reported yet, and that are not deleted."""
        if watch.cursor is not None:
            return (yield from listing(self._node.ledger, topic, watch.cursor, MOST_IDS))
        reported = max(topic.dead - count, 0)
        if reported > _COUNT_OFF:
            return []
        return (yield from listing(self._node.ledger, topic, b"", reported + MOST_IDS))[reported:]

    def _answered(self, term: int, topic: TopicState, watch: _Watch, upto: int, cursor: bytes, answer: Reply) -> None:
        if term != self._term:
            return
        interval_s = self._config.alert_interval_ms / 1000
        if answer.reason:
            self.failed += 1
            log.warning("alert_failed", topic=topic.name, reason=answer.reason)
            wait_s = min(_RETRY_S * 2**watch.failures, max(interval_s, _RETRY_S))
            watch.failures = min(watch.failures + 1, 20)
            self._again(topic, watch, wait_s)
            return
        self.sent += 1
        watch.failures = 0

        def recorded(result: Any, error: HadelayError | None) -> None:
            if error is None:
                watch.cursor = cursor
            self._again(topic, watch, interval_s)

        self._node.publishing.propose(encode_alerted(topic.name, upto), recorded)

    def _again(self, topic: TopicState, watch: _Watch, wait_s: float) -> None:
        watch.scheduled = False
        watch.not_before = self._node.runtime.monotonic() + wait_s
        self.on_topic(topic)


def untold(topic: TopicState) -> int:
    """Number of dead letters of the topic that no alert has reported, deleted and redriven ones included."""
    return topic.settled[Event.DEAD] - topic.alerted
