"""Deliberate bugs in the delay of topics."""

from typing import Any

import numpy as np

from chaos.sim.mutations.table import Original, bug
from hadelay.codec.publishcommand import RELATIVE
from hadelay.ledger.messages import publish


@bug("a message without a time of its own is due at once, whatever its topic's delay", "", "D1 delays",
     at=(publish, "_resolve"))  # fmt: skip
def no_own_delay(resolve: Original, ledger: Any, command: Any) -> Any:
    due_ms, too_far = resolve(ledger, command)
    rows = command.rows
    return np.where((rows["flags"] & RELATIVE != 0) & (rows["when_ms"] < 0), ledger.now_ms, due_ms), too_far
