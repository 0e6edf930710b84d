"""Deliberate bugs in subscriptions and callbacks."""

from typing import Any

from chaos.sim.mutations.table import Original, bug, stub
from hadelay.ledger.leases import dead, settling
from hadelay.ledger.messages import changes, fills, publish
from hadelay.ledger.messages.subscriptions import FanOut


@bug("the last subscription gets no copies", "", "F1 fan-out, copies", at=(publish, "fan_out"))
def short_fan_out(fan_out: Original, ledger: Any, batch: Any) -> Any:
    found = fan_out(ledger, batch)
    return found if found is None else FanOut(found.own, found.copies[:-1])


@bug("a subscription gets a second copy of a message", "", "F1 fan-out, hand-outs", at=(publish, "fan_out"))
def filled_twice(fan_out: Original, ledger: Any, batch: Any) -> Any:
    found = fan_out(ledger, batch)
    return found if found is None else FanOut(found.own, [*found.copies, *found.copies[:1]])


@bug("a copy that a full subscription drops is not counted", "", "F1 fan-out, copies", at=(FanOut, "drop"))
def uncounted_drop(drop: Original, fan: FanOut, row: int, full: Any) -> None:
    drop(fan, row, full)
    for subscription, _ in fan.copies:
        subscription.dropped -= subscription.number in full


@bug("a fill skips the last message of a step", "", "J2 jobs, complete", at=(fills, "step"))
def short_step(step: Original, ledger: Any, job: Any, found: list[tuple[int, Any]]) -> None:
    step(ledger, job, [(hour, rows[:-1]) for hour, rows in found])


@bug("a fill leaves out what was acked since it began", "", "one copy each", at=(fills, "open_for"))
def acked_left_out(open_for: Original, ledger: Any, topics: Any, *rest: Any) -> Any:
    return open_for(ledger, (), *rest)


stub(
    "moved_uncopied", "a fill forgets messages that are moved before it reaches them", "", ("one copy each",),
    (fills, "copy_before_move", lambda ledger, hour, rows: None),
)  # fmt: skip
stub(
    "first_copy_only", "a command for the published id means the first copy", "", ("F1 fan-out, hand-outs",),
    (changes, "copies_of", lambda ledger, message_id: []),
)  # fmt: skip
stub(
    "ack_without_callback", "an ack files no callback", "", ("C1 callbacks",),
    (settling, "succeeded", lambda ledger, command, done: None),
)  # fmt: skip
stub(
    "death_without_callback", "a death files no callback", "", ("C1 callbacks",),
    (dead, "died", lambda ledger, leaving, topic: None),
)  # fmt: skip


@bug("a repeated ack files its callback again", "", "C1 callbacks", at=(settling, "succeeded"))
def called_back_again(succeeded: Original, ledger: Any, command: Any, done: Any) -> None:
    succeeded(ledger, command, done)
    succeeded(ledger, command, done & (command.rows["index"] % 2 == 0))
