"""Deliberate bugs in subscriptions."""

from typing import Any

from chaos.sim.mutations.table import Original, bug, stub
from hadelay.ledger import changes, publish
from hadelay.ledger.subscriptions import FanOut


@bug("the last subscription gets no copies", "", "F1 fan-out, copies", at=(publish, "fan_out"))
def short_fan_out(fan_out: Original, ledger: Any, batch: Any) -> Any:
    found = fan_out(ledger, batch)
    return found if found is None else FanOut(found.own, found.copies[:-1])


stub(
    "first_copy_only", "a command for the published id means the first copy", "", ("F1 fan-out, hand-outs",),
    (changes, "copies_of", lambda ledger, message_id: []),
)  # fmt: skip
