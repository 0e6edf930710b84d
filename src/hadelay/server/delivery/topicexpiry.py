"""Ends topics that nobody has used for their `expires_after`: the leader searches for them, and apply decides."""

import logging
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import Any

from hadelay.codec.commands import encode_topic_expiry
from hadelay.codec.commandtypes import MAX_EXPIRY, TopicUse
from hadelay.errors import HadelayError
from hadelay.ledger.topics.topicexpiry import ends_at_ms, is_empty, is_needed, routes
from hadelay.ledger.topics.topics import TopicState
from hadelay.server.delivery.term import Term

log = logging.getLogger("hadelay")

#: Limit of topics that a log line names.
_NAMED = 20
#: Pause, in seconds, between two searches for unused topics, and limit of topics per search.
_LOOK_S, _TOPICS = 5.0, 10_000
#: Time in ms after the begin of a term in which no topic ends: consumers need time to ask the new leader.
_GRACE_MS = 60_000


class TopicExpiry:
    """Looks for unused topics, some thousand at a time. One object per term."""

    def __init__(self, term: Term) -> None:
        self._term, self._ledger = term, term.ledger
        self._not_before_ms = term.now() + _GRACE_MS
        #: Topic number → time in Unix ms until which a consumer polls the topic. Has only polls that no TOPIC_EXPIRY
        #: has reported to apply yet.
        self._polled: dict[int, int] = {}
        #: Numbers of the topics that the present round has not examined yet.
        self._left: list[int] = []
        self._alarm, self._asleep = term.alarm(self._look), True

    def polled(self, topics: Sequence[str], until_ms: int) -> None:
        """Note that a consumer polls these topics until until_ms. This costs nearly nothing while no topic has
        `expires_after`."""
        for name in topics if self._ledger.topics.expiring else ():
            topic = self._ledger.topic(name)
            if topic is not None and topic.settings.expires_after_ms is not None:
                self._polled[topic.number] = max(until_ms, self._polled.get(topic.number, 0))

    def wake(self) -> None:
        """Called each time the sweeper has run: search again. No search runs while no topic has `expires_after`."""
        if self._asleep:
            self._rest()

    def _rest(self) -> None:
        self._asleep = not self._ledger.topics.expiring
        if not self._asleep:
            self._alarm.at(self._term.runtime.monotonic() + _LOOK_S)

    def _look(self) -> None:
        rows = [*islice(self._used(), MAX_EXPIRY)]
        rows += islice(self._unused(), MAX_EXPIRY - len(rows))
        if rows:
            self._term.propose_behind(encode_topic_expiry(rows), partial(self._replicated, rows))
        else:
            self._rest()

    def _replicated(self, rows: list[TopicUse], result: Any, error: HadelayError | None) -> None:
        if error is not None:
            # The command failed: note these polls again for the next search, because `_used` has removed those that
            # have ended.
            for number in [number for number, _, ends, _ in rows if not ends]:
                self._polled[number] = max(self._term.now(), self._polled.get(number, 0))
        asked = [self._ledger.topics[number] for number, _, ends, _ in rows if ends and error is None]
        if names := [topic.name for topic in asked if not topic.exists]:
            log.info("topics_expired", extra={"count": len(names), "topics": names[:_NAMED]})
        self._rest()

    def _used(self) -> list[TopicUse]:
        """Rows of TOPIC_EXPIRY that report topics as used: consumers polled them at least an eighth of `expires_after`
        after the last use that apply knows."""
        now, rows = self._term.now(), []
        for number, until_ms in list(self._polled.items()):
            topic = self._ledger.topics[number]
            after_ms = topic.settings.expires_after_ms
            if until_ms <= now or after_ms is None:
                del self._polled[number]
            if after_ms is not None and min(until_ms, now) - topic.used_ms >= after_ms // 8:
                rows.append(_row(topic, ends=False))
        return rows

    def _unused(self) -> list[TopicUse]:
        """Rows of TOPIC_EXPIRY for topics that nobody has used for their `expires_after`. A row ends its topic; or, if
        something needs the topic, the row notes that the topic is used."""
        now = self._term.now()
        if now < self._not_before_ms:
            return []
        if not self._left:
            self._left = sorted(self._ledger.topics.expiring, reverse=True)
        looked, self._left = self._left[-_TOPICS:], self._left[:-_TOPICS]
        topics = [self._ledger.topics[number] for number in looked]
        over = [t for t in topics if (at_ms := ends_at_ms(t)) is not None and at_ms <= now and is_empty(t)]
        routed = routes(self._ledger) if over else set()
        return [
            _row(topic, ends=not is_needed(self._ledger, topic, routed))
            for topic in over
            if self._polled.get(topic.number, 0) < now
        ]


def _row(topic: TopicState, *, ends: bool) -> TopicUse:
    return TopicUse(topic.number, topic.lives, ends, topic.used_ms)
