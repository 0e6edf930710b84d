"""Lists message groups in which messages wait, the group with the longest wait first.

Each node has all groups, and looks at a limited number of them. The leader walks over all of them again and again: of
each topic, it knows the group with the longest wait.
"""

from collections.abc import Callable, Generator

from hadelay.api.text import format_instant
from hadelay.api.topics import GroupOfTopic, Groups
from hadelay.codec.formats import REASON
from hadelay.codec.meta import unpack
from hadelay.errors import HadelayError
from hadelay.ledger.groups.groupwalk import Wait, next_group, wait_of
from hadelay.ledger.groups.messagegroups import GROUP_KEY
from hadelay.ledger.hours.transitions import failures_of
from hadelay.ledger.views.describe import describe
from hadelay.model import NEVER_MS, NONE32, encode_id
from hadelay.server.service.part import Service

#: Limit of groups in an answer; limit of groups that are examined for an answer; limit of topics for which the leader
#: is asked for the longest wait; and number of groups that are examined, for about a millisecond, before other tasks of
#: the event loop run.
_MOST, _LOOKED, _TOPICS, _AT_ONCE = 100, 10_000, 1_000, 32
_Waits = dict[bytes, Wait]


class GroupService(Service):
    async def list_groups(self, name: str | None, *, may: Callable[[str], bool], stale: bool) -> Groups[str]:
        """List groups with blocked messages, of one topic or of all topics that `may` allows. Raises NotFound."""
        await self._confirm(stale)
        node, number = self._node, None if name is None else self._topic(name).number
        longest = await self._longest(stale=stale)
        waits, complete = await node.reader.in_slices(lambda: self._look(number, longest, may))
        now_ms = node.now_ms()

        def order(row: tuple[bytes, Wait]) -> tuple[int, int]:
            wait = row[1]
            return wait.since_ms if 0 < wait.since_ms <= now_ms else NEVER_MS, -wait.blocked

        best = sorted(waits.items(), key=order)[:_MOST]
        found = list[GroupOfTopic[str]]()
        for key, wait in best:
            row = await node.reader.repaired(lambda key=key, wait=wait: self._document(key, wait, now_ms))  # type: ignore[misc]
            if row is not None:
                found.append(row)
        return Groups(found, complete)

    async def _longest(self, *, stale: bool) -> list[bytes]:
        """Ask the leader for the keys of each topic's group with the longest wait; returns none if it does not
        answer."""
        if not self._node.leading and (stale or self._node.raft.leader is None):
            return []
        try:
            return await self._ask_leader("groups", _TOPICS, self._node.config.http.no_leader_wait_ms / 1000) or []
        except HadelayError:
            return []

    def _look(
        self, number: int | None, longest: list[bytes], may: Callable[[str], bool]
    ) -> Generator[None, None, tuple[_Waits, bool]]:
        """Find the groups with blocked messages, in slices; if there are too many to examine, also those in `longest`.
        Returns (key of a group → its wait, whether all groups were examined)."""
        ledger, waits, allowed = self._node.ledger, _Waits(), dict[int, bool]()

        def add(key: bytes) -> None:
            of, _, _ = GROUP_KEY.unpack(key)
            if of not in allowed:
                allowed[of] = number in (None, of) and may(ledger.topics[of].name)
            if allowed[of] and (wait := wait_of(ledger, key)) is not None and wait.head is not None:
                waits[key] = wait

        at = b"" if number is None else GROUP_KEY.pack(number, ledger.topics[number].floor, 0)
        end = None if number is None else GROUP_KEY.pack(number + 1, 0, 0)
        for looked in range(_LOOKED):
            key, at = next_group(ledger, at)
            if key is not None and (end is None or key < end):
                add(key)
            if not at or (end is not None and at >= end):
                return waits, True
            if looked % _AT_ONCE == _AT_ONCE - 1:
                yield
        for key in longest:
            add(key)
        return waits, False

    def _document(self, key: bytes, wait: Wait, now_ms: int) -> GroupOfTopic[str] | None:
        """Describe a group by its first message; None if that message has ended meanwhile."""
        ledger, head = self._node.ledger, wait.head
        view = None if head is None else describe(ledger, head.id, now_ms)
        if head is None or view is None:
            return None
        failures = failures_of(ledger, head.id)
        _, event, _, reason = failures[-1] if failures else (0, None, 0, NONE32)
        words = "" if event is None else event.name.lower().replace("_", " ")
        return GroupOfTopic(
            view.topic,
            unpack(view.meta).group or "",
            wait.blocked,
            format_instant(wait.since_ms) if 0 < wait.since_ms <= now_ms else None,
            encode_id(head.id),
            str(view.state),
            view.attempt,
            words if reason == NONE32 else ledger.names.name(REASON, reason),
        )
