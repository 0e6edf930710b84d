"""Check of a leader's dispatch cursor: its localIndex is counted again from bitmaps and due times. For tests and the
simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hadelay.codec.formats import SECONDS_PER_HOUR
from hadelay.handout.dispatcher import Dispatcher

if TYPE_CHECKING:
    from hadelay.server.node import Node


def check(core: Dispatcher) -> None:
    """Check that the localIndex equals the number of settled, leased, blocked and ready entries in the cursor's second.
    Entries that an unfinished partial purge has cancelled may count or not: those that were loaded before the purge
    still become ready. Raises AssertionError. Call this only between two events of the event loop."""
    (_, _, local), now_ms, preload = core.cursor, core.turns.now_ms, core._preload
    at = max(preload.reached, core.scans.reached)
    hour, slot = divmod(at, SECONDS_PER_HOUR)
    spilled = at in preload._seconds and preload._seconds[at].overflow
    if core.scans.first or preload.loading or spilled or core._damages:
        return  # skip the check: the node has not loaded the whole second
    if preload.to_come(at) is None or core.scans.misses(at) or not core.store.mapped(hour):
        assert core.cursor == core.ledger.cursor, f"cursor {core.cursor}, although nothing is known of {at}"
        return
    rows = core.store.entries(hour, slice(0, core.store.count(hour)), verify=False)
    rows = rows[rows["second"] == slot]
    state, later = core.ledger.hours.get(hour), rows["deliver_at_ms"] > now_ms
    if state is not None:
        reached = state.settled | state.leased | state.blocked
        later &= np.array([index not in reached for index in rows["index"].tolist()], np.bool_)
    topics = core.ledger.topics
    least, most = (len(rows) - int((later & waits).sum()) for waits in (topics.alive(rows), topics.owed(rows)))
    assert least <= local <= most, f"localIndex {local} of second {at}, and {least} to {most} entries were reached"


def check_node(node: Node) -> None:
    """Check the cursor of a node if it leads."""
    if node.delivery._grants is not None:
        check(node.delivery._grants.core)
