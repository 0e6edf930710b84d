"""Deliberate bugs in unique_for."""

from typing import Any

from chaos.sim.mutations.table import Original, bug, stub
from hadelay.ledger.messages import unique
from hadelay.ledger.messages.unique import Periods

stub(
    "no_period", "a settled message ends the period of its key", "", ("U1 unique, stored",),
    (Periods, "finish", lambda *_: None),
)  # fmt: skip


@bug("a period that is over drops a publish", "", "U1 unique, dropped", at=(Periods, "__init__"))
def endless_period(init: Original, periods: Periods, ledger: Any, batch: Any) -> None:
    now_ms = ledger.now_ms
    ledger.now_ms -= 1_500
    try:
        init(periods, ledger, batch)
    finally:
        ledger.now_ms = now_ms


@bug("a period is forgotten up to a second before its end", "", "U1 unique, stored", at=(unique, "drop_ended"))
def ends_early(drop_ended: Original, ledger: Any, limit: int) -> Any:
    now_ms = ledger.now_ms
    ledger.now_ms += 999
    try:
        return drop_ended(ledger, limit)
    finally:
        ledger.now_ms = now_ms
