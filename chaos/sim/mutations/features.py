"""Deliberate bugs that the model of features (chaos/sim/features.py) notices."""

from typing import Any

from chaos.sim.mutations.table import Original, bug
from hadelay.codec.ackparts import AckResult, CallReply
from hadelay.ledger.leases import callbacks
from hadelay.ledger.messages import keys


@bug("a callback has the result of the lease before its own", "", "C1 callbacks", at=(callbacks, "_results"))
def shifted_results(results: Original, given: dict[int, AckResult]) -> dict[int, CallReply]:
    return {lease + 1: reply for lease, reply in results(given).items()}


@bug("only the message itself is replaced", "", "F1 fan-out, copies", at=(keys, "waiting"))
def replaced_alone(waiting: Original, ledger: Any, message_id: int) -> Any:
    return waiting(ledger, message_id)[:1]
