"""Deliberate bugs in schedules."""

from typing import Any
from unittest.mock import patch

from msgspec.structs import replace

from chaos.sim.mutations.table import Original, bug, stub
from hadelay.codec.commandtypes import Command
from hadelay.codec.results import FireOutcome
from hadelay.codec.schedules import Overlap
from hadelay.ledger.apply import _APPLY
from hadelay.ledger.schedules import firing, occurrences, schedules
from hadelay.server.delivery.schedules import ScheduleRunner
from hadelay.timing import plan


def _known(ledger: Any, firing: Any, found: Any) -> FireOutcome:
    return FireOutcome.STALE if found is None else FireOutcome.DONE


stub(
    "stale_version", "a firing of a schedule that was changed or paused meanwhile counts", "slow_link slow_sync",
    ("S4 schedules, version",), (firing, "_outcome", _known),
)  # fmt: skip
stub(
    "blind_overlap", "a message is made beside a pending one that forbids it", "", ("S2 schedules, overlap",),
    (firing, "pending_of", lambda ledger, ring: iter(())),
)  # fmt: skip
stub(
    "filed_stays", "a change leaves what is filed and not due", "", ("S4 schedules, cancelled",),
    (occurrences, "cancel_filed", lambda ledger, state, after_ms=-1: (state.ring, [])),
)  # fmt: skip
stub(
    "all_caught_up", "every missed occurrence is made, whatever the policy", "", ("S2 schedules, catch-up",),
    (plan, "_caught_up", lambda spec, late, now_ms, following: late),
)  # fmt: skip
stub(
    "deaf_runner", "the leader does not hear of a schedule's new next occurrence", "", ("S5 schedules, overdue",),
    (ScheduleRunner, "changed", lambda runner, next_ms: None),
)  # fmt: skip


@bug("an applied firing is applied once more", "", "S1 schedules", at=(_APPLY, Command.SCHEDULE_FIRE))
def fires_again(apply: Original, ledger: Any, command: Any) -> Any:
    result = apply(ledger, command)
    with patch.object(firing, "_outcome", _known):
        apply(ledger, command)
    return result


@bug("a row of the agenda is lost now and then", "", "I2 conservation", at=(schedules, "store"))
def lost_agenda_row(store: Original, ledger: Any, name: str, before: Any, after: Any) -> None:
    store(ledger, name, before, after)
    if not after.paused and after.made % 3 == 2:
        ledger.tables.delete(schedules.AGENDA, schedules.agenda_key(after.next, name))


@bug("an occurrence is left out, and not counted", "", "S2 schedules, counts", at=(plan, "_firing"))
def left_out(firing: Original, *args: Any, made: list[int], **more: Any) -> Any:
    return firing(*args, made=made[1:] if len(made) > 3 else made, **more)


@bug("any number of messages waits for a pending one", "", "S2 schedules, wait", at=(firing, "_without_overlap"))
def all_wait(without_overlap: Original, ledger: Any, found: Any, count: int) -> int:
    waits = found.stored.spec.overlap == Overlap.WAIT
    return count if waits else without_overlap(ledger, found, count)


@bug("a repeated trigger makes another message", "", "S1 schedules, triggers", at=(_APPLY, Command.SCHEDULE_RUN))
def triggers_again(apply: Original, ledger: Any, command: Any) -> Any:
    return apply(ledger, replace(command, key=None))
