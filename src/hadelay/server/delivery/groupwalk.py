"""The leader's walk over message groups with blocked messages. It finds, per topic, the message that waits longest
behind the first messages of its group, and groups in which the wrong messages are blocked (Rule G, ADR 259)."""

import logging

from hadelay.ledger.groups.groupwalk import Wait, next_group, wait_of
from hadelay.ledger.groups.messagegroups import GROUP_KEY
from hadelay.server.delivery.term import Term

log = logging.getLogger(__name__)

#: Limit of groups per step of a walk, which then takes about a millisecond; and pause between two steps, in seconds.
_GROUPS, _PAUSE_S = 32, 0.05
#: Limit of groups that one walk names in the log.
_NAMED = 10
#: Stands for all topics together where a topic number is expected.
ALL = -1


class GroupWalk:
    """Walks over the groups, some at a time. One object per term."""

    def __init__(self, term: Term) -> None:
        self._term, self._ledger = term, term.ledger
        #: Topic number → key of the group in which a message waits longest: found so far by the present walk, and by
        #: the last walk.
        self._found: dict[int, bytes] = {}
        self._before: dict[int, bytes] = {}
        #: Number of groups in which the wrong messages are blocked: found so far by the present walk; by the last walk.
        self._wrong = self._wrong_before = 0
        self._at, self._alarm = b"", term.alarm(self._step)

    def wake(self) -> None:
        """Called each time the sweeper has run: begin a walk, unless a walk is under way."""
        if not self._at:
            self._step()

    @property
    def wrong(self) -> int:
        """Number of groups in which the wrong messages are blocked (Rule G, ADR 259); any number but 0 shows a bug."""
        return max(self._wrong, self._wrong_before)

    def waits_since_ms(self, number: int = ALL) -> int:
        """Time in Unix ms since which a due message of the topic waits behind its group; 0 if the walks found none."""
        wait = self.longest(number)
        return 0 if wait is None else wait.since_ms

    def longest(self, number: int = ALL) -> Wait | None:
        """The group of the topic in which a due message waits longest; None if the walks found none."""
        keys = (walk[number] for walk in (self._found, self._before) if number in walk)
        waits = [wait for key in keys if (wait := wait_of(self._ledger, key)) is not None]
        due = (wait for wait in waits if 0 < wait.since_ms <= self._term.now())
        return min(due, key=lambda wait: wait.since_ms, default=None)

    def longest_of_topics(self, most: int) -> list[bytes]:
        """Keys of at most `most` groups: for each topic, the group in which a message waits longest."""
        found = {**self._before, **self._found}
        return [key for number, key in found.items() if number != ALL][:most]

    def _since_ms(self, key: bytes) -> int:
        wait = wait_of(self._ledger, key)
        return 0 if wait is None else wait.since_ms

    def _step(self) -> None:
        for _ in range(_GROUPS):
            key, self._at = next_group(self._ledger, self._at)
            if key is not None:
                self._look(key)
            if not self._at:
                self._before, self._found = self._found, {}
                self._wrong_before, self._wrong = self._wrong, 0
                return
        self._alarm.at(self._term.runtime.monotonic() + _PAUSE_S)

    def _look(self, key: bytes) -> None:
        wait = wait_of(self._ledger, key)
        if wait is None:
            return
        number, _, group = GROUP_KEY.unpack(key)
        for each in (number, ALL):
            best = self._found.get(each)
            # The group found earlier may have changed since the walk passed it, so its wait is read anew.
            if best is None or not 0 < self._since_ms(best) <= wait.since_ms:
                self._found[each] = key
        if wait.fault:
            self._wrong += 1
            if self._wrong <= _NAMED:
                topic = self._ledger.topics[number].name
                log.error("group_wrong", extra={"topic": topic, "group_hash": f"{group:016x}", "what": wait.fault})
