"""Deliberate bugs in batches."""

from typing import Any
from unittest.mock import patch

import numpy as np

from chaos.sim.mutations.table import Bug, Original, bug, stub
from hadelay.codec.batches import SEALED, State
from hadelay.ledger.batches import batches, ending, members
from hadelay.model import Event


@bug("a batch ends while messages can join it", "", "B2 batches, without", "I2 conservation")
def batch_without_seal() -> Bug:
    return [patch.object(State, "complete", property(lambda state: state.settled == state.joined))]


@bug("the callback of a batch is published when the batch is sealed", "", "B2 batches, last member")
def batch_calls_at_the_seal() -> Bug:
    close, call_back = batches._close, ending._call_back

    def close_and_call(ledger: Any, key: str, flags: int) -> Any:
        result, found = close(ledger, key, flags), batches.find(ledger, key)
        if found is not None and flags == SEALED and not found.state.complete:
            call_back(ledger, found)
        return result

    def call_late(ledger: Any, found: Any) -> Any:
        """Publish the callback of a batch only if the seal itself ended the batch."""
        return 1 if found.state.sealed_ms < ledger.now_ms else call_back(ledger, found)

    return [patch.object(batches, "_close", close_and_call), patch.object(ending, "_call_back", call_late)]


stub(
    "batch_always_calls", "a batch that failed calls back as a success", "", ("B2 batches, without",),
    (State, "calls_back", lambda state, on: True),
)  # fmt: skip
stub(
    "batch_callback_lost", "the callback of a batch is noted, and not published", "", ("B2 batches, once",),
    (ending, "_call_back", lambda ledger, found: 1),
)  # fmt: skip


@bug("the callback of a batch is published twice", "", "B2 batches, once", at=(ending, "_call_back"))
def batch_calls_twice(call_back: Original, ledger: Any, found: Any) -> Any:
    call_back(ledger, found)
    return call_back(ledger, found)


@bug("a member that fails counts twice", "", "B2 batches, last member", "B2 batches, without", "I2 conservation",
     at=(members, "_fail"))  # fmt: skip
def batch_counts_twice(fail: Original, ledger: Any, number: int, state: State, hour: int, *rest: Any) -> None:
    rows, event = rest
    fail(ledger, number, state, hour, np.concatenate([rows, rows]), event)


@bug("a dead member stays unsettled", "", "B2 batches, once", "I2 conservation", at=(members, "leave"))
def batch_forgets_the_dead(leave: Original, ledger: Any, hour: int, rows: Any, event: Event) -> None:
    if event is not Event.DEAD:
        leave(ledger, hour, rows, event)
