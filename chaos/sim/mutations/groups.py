"""Deliberate bugs in message groups. Bugs that the checks G2 to G6 have to notice run without check G1, which would
notice them first."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from chaos.sim import groupcheck
from chaos.sim.mutations.table import MUTATIONS, Bug, Mutation, Original
from hadelay.handout.grouprate import GroupRate
from hadelay.handout.matching import Matcher
from hadelay.ledger.groups import messagegroups
from hadelay.ledger.groups.messagegroups import BEHIND, GROUPQ, PLACE, Change
from hadelay.ledger.hours import maintenance
from hadelay.ledger.hours.transitions import settle
from hadelay.model import Event

_leave, _rejoin = messagegroups.leave, messagegroups.rejoin
_fill, _block, _switch, _remove = Change.fill, Change._block, Change._switch, Change.remove
_offer = Matcher._offer


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _unchecked(ledger: Any) -> set[int]:
    return set()


def _bug(name: str, what: str, *caught_by: str, faults: str = "", stand_ins: list[tuple[Any, str, Original]]) -> None:
    """Add a bug that replaces functions (owner, name, replacement) in runs with message groups."""

    def apply() -> Bug:
        checks = [(groupcheck, "check", _unchecked)] if caught_by[0].startswith(("G2", "G3", "G4", "G5", "G6")) else []
        return [patch.object(*one) for one in (*stand_ins, *checks)]

    MUTATIONS[name] = Mutation(what, caught_by, tuple(faults.split()), apply, sync="commit")


def _only_cleared(self: Any, head: Any, *, blocked: bool) -> None:
    if not blocked:
        _switch(self, head, blocked=False)


def _left(ledger: Any, hour: int, rows: Any, blocked: Any, event: Event) -> None:
    _leave(ledger, hour, rows, blocked, Event.CANCELLED if event is Event.MOVED else event)


def _to_the_end(ledger: Any, hours: Any, rows: Any, *, keep: bool = False, retry: bool = False) -> Any:
    return _rejoin(ledger, hours, rows, keep=keep)


def _carried(ledger: Any, hours: Any, rows: Any, *, keep: bool = False, retry: bool = False) -> Any:
    blocked = _rejoin(ledger, hours, rows, keep=keep, retry=retry)
    for hour, index in zip(hours.tolist(), rows["index"].tolist(), strict=True) if keep else ():
        ledger.hour_state(hour).blocked.discard(index)
    return None if keep else blocked


def _swept(*of: Any, **more: Any) -> None:
    with patch.object(Change, "fill", _nothing):
        settle(*of, **more)


def _bound_kept(self: Any, key: bytes, group: Any, head: Any) -> None:
    lowest, first = group.lowest, not group.blocked
    _block(self, key, group, head)
    group.lowest = group.lowest if first else lowest


def _undecided(self: Any, group: int, handed_ms: int | None) -> None:
    self.busy.discard(group)


def _all_gone(self: Any, key: bytes, head: Any, *, blocked: bool) -> None:
    _remove(self, key, head, blocked=blocked)
    if not blocked and self.groups[key] is not None:
        self.groups[key].heads = []


def _in_any_order(self: Any, key: bytes, group: Any, wanted: list[tuple[int, int]]) -> int:
    rows = {PLACE.unpack(row[1]): row for row in self.tables.range(GROUPQ, key, key + BEHIND, 1 << 20)}
    for place in wanted:
        self._let_go(key, group, rows[place])
    return len(wanted)


def _unasked(self: Any, poll: Any, *of: Any) -> Any:
    poll.group_max = 10
    return _offer(self, poll, *of)


_waits: Callable[..., bool] = lambda self, head: False  # noqa: E731

_bug(
    "never_blocked", "no message of a group is blocked", "G2 groups apart",
    stand_ins=[(Change, "_switch", _only_cleared)],
)  # fmt: skip
_bug(
    "nobody_released", "nobody takes the place of a message that ended", "G4 groups released",
    stand_ins=[(Change, "fill", _nothing)],
)  # fmt: skip
_bug(
    "released_at_nack", "a failed message leaves its group", "G2 groups apart",
    stand_ins=[(messagegroups, "leave", _left)],
)  # fmt: skip
_bug(
    "retry_at_the_end", "a retry goes behind the others, with n = 1", "G3 groups in order",
    stand_ins=[(messagegroups, "rejoin", _to_the_end)],
)  # fmt: skip
_bug(
    "token_kept", "a hand-out spends no token of its group", "G5 groups in pace",
    stand_ins=[(GroupRate, "decided", _undecided)],
)  # fmt: skip
_bug(
    "not_displaced", "an earlier message waits for a later one", "G1 groups",
    stand_ins=[(Change, "_waits", _waits)],
)  # fmt: skip
_bug(
    "carried_unblocked", "a blocked message that is rolled forward is free", "Rule G",
    stand_ins=[(messagegroups, "rejoin", _carried)],
)  # fmt: skip
_bug(
    "purged_heads", "nobody takes the place of a purged message", "Rule G",
    stand_ins=[(maintenance, "settle", _swept)],
)  # fmt: skip
_bug(
    "bound_not_lowered", "the bound of a group's blocked messages stays above an earlier one", "G1 groups",
    stand_ins=[(Change, "_block", _bound_kept)],
)  # fmt: skip
_bug(
    "run_with_a_gap", "a grant that names the third message of a group leases it without the second", "Rule G",
    stand_ins=[(Change, "run_on", _in_any_order)],
)  # fmt: skip
_bug(
    "run_let_go", "one settled message of several that were leased together lets the group go on", "Rule G",
    stand_ins=[(Change, "remove", _all_gone)],
)  # fmt: skip
_bug(
    "run_unasked", "a receive that asks for one message of a group gets several", "G6 groups in runs",
    stand_ins=[(Matcher, "_offer", _unasked)],
)  # fmt: skip
