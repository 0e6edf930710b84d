"""Somebody is told when messages die (S4): by a call to the topic's `alert`, or to `webhooks.alert_url`.

At least once: the state keeps how many of a topic's deaths somebody was told of, and that number goes up, by a
replicated command, after a 2xx. Whoever leads tells of the others. Aggregated: one call says how many died since the
last one, and names the first hundred; the next call for the topic waits for alert_interval_ms.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import structlog

from hadelay.api.text import format_instant
from hadelay.codec.commands import encode_alerted
from hadelay.errors import HadelayError
from hadelay.ledger.dead import KEY, listing
from hadelay.ledger.topics import Topic
from hadelay.model import Event, encode_id
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Propose
from hadelay.server.replica import Replica
from hadelay.server.webhooks.call import Answer, Caller, Request
from hadelay.server.webhooks.headers import alert_headers
from hadelay.server.webhooks.signing import key_of
from hadelay.settings.node import Config

#: Ids in one call.
MOST_IDS = 100
#: Deaths that come together are told together.
_GATHER_S = 0.5
#: After a call that failed; doubled up to alert_interval_ms.
_RETRY_S = 5.0
_TIMEOUT_S = 15.0
#: A new leader does not know which letters were told of, and counts them off from the oldest; beyond, it names none.
_COUNT_OFF = 10_000

log = structlog.get_logger("hadelay")


@dataclass(eq=False, slots=True)
class _Watch:
    """One topic with deaths to be told of."""

    #: Told of up to here; None: not known, because another node told.
    cursor: bytes | None
    scheduled: bool = False
    failures: int = 0
    #: On the monotonic clock: not before.
    not_before: float = 0.0


class Alerts:
    """One per node. propose: of a command of any node."""

    def __init__(
        self, config: Config, runtime: Runtime, replica: Replica, now_ms: Callable[[], int], propose: Propose
    ) -> None:
        self.runtime, self.config, self._cluster_id = runtime, config.webhooks, config.cluster.id
        self._replica, self._now_ms, self._propose = replica, now_ms, propose
        self.caller: Caller | None = None
        self.sent = self.failed = 0
        self._term = 0
        self._watches: dict[int, _Watch] = {}
        #: Deaths of topics without a watch are later than this.
        self._since = b""

    def on_leader(self, term: int) -> None:
        self._term = term
        self._watches.clear()
        self._since = self._now()
        for topic in self._replica.ledger.topics.all:
            if untold(topic):
                self._watches[topic.number] = _Watch(None)
                self.on_topic(topic)

    def _now(self) -> bytes:
        """The cursor behind everything that has died by now."""
        return struct.pack(">QQ", self._replica.ledger.now_ms, (1 << 64) - 1)

    def on_follower(self) -> None:
        self._term = 0

    def on_topic(self, topic: Topic) -> None:
        """Some of its messages died, or its settings changed."""
        if not self._term or not untold(topic) or self._target(topic) is None:
            return
        watch = self._watches.setdefault(topic.number, _Watch(self._since))
        if not watch.scheduled:
            watch.scheduled = True
            wait_s = max(_GATHER_S, watch.not_before - self.runtime.monotonic())
            self.runtime.call_later(wait_s, self._tell, self._term, topic, watch)

    def _target(self, topic: Topic) -> tuple[str, str] | None:
        if not topic.exists:
            return None
        alert = topic.settings.alert
        if alert is not None:
            return alert.url, alert.secret
        return (self.config.alert_url, self.config.alert_secret) if self.config.alert_url else None

    def _tell(self, term: int, topic: Topic, watch: _Watch) -> None:
        if term != self._term:
            return
        target = self._target(topic)
        count = untold(topic)
        if target is None or not count:
            watch.scheduled = False
            return
        url, secret = target
        letters = self._letters(topic, watch, count)
        upto = topic.settled[Event.DEAD]
        ids = [encode_id(first_id) for _, first_id in letters]
        now_ms = self._now_ms()
        body = msgspec.json.encode(
            {
                "topic": topic.name,
                "died": count,
                "ids": ids,
                "dead": topic.dead,
                "first_died_at": format_instant(KEY.unpack(b"\0\0\0\0" + letters[0][0])[1]) if letters else None,
                "cluster_id": self._cluster_id,
            }
        )
        headers = alert_headers(
            f"dead-{topic.name}-{topic.generation}-{topic.alerted}-{upto}",
            f"/{self._cluster_id}/topics/{topic.name}",
            now_ms, [key_of(secret)] if secret else [], body,
        )  # fmt: skip
        assert self.caller is not None
        cursor = letters[-1][0] if 0 < len(letters) < MOST_IDS else self._now()
        done = partial(self._told, term, topic, watch, upto, cursor)
        self.caller.call(Request(url, headers, body, _TIMEOUT_S), done)

    def _letters(self, topic: Topic, watch: _Watch, count: int) -> list[tuple[bytes, int]]:
        """(cursor, id) of the first of them, as far as they are known and still kept."""
        if watch.cursor is not None:
            return listing(self._replica.ledger, topic, watch.cursor, MOST_IDS)
        told = max(topic.dead - count, 0)
        if told > _COUNT_OFF:
            return []
        return listing(self._replica.ledger, topic, b"", told + MOST_IDS)[told:]

    def _told(self, term: int, topic: Topic, watch: _Watch, upto: int, cursor: bytes, answer: Answer) -> None:
        if term != self._term:
            return
        interval_s = self.config.alert_interval_ms / 1000
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

        self._propose(encode_alerted(topic.name, upto), recorded)

    def _again(self, topic: Topic, watch: _Watch, wait_s: float) -> None:
        watch.scheduled = False
        watch.not_before = self.runtime.monotonic() + wait_s
        self.on_topic(topic)


def untold(topic: Topic) -> int:
    """Deaths that nobody was told of."""
    return topic.settled[Event.DEAD] - topic.alerted
