"""Dead letters as the HTTP layer sees them: pages of them, read from their dead hours."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hadelay.codec.formats import REASON
from hadelay.ledger import dead
from hadelay.ledger.describe import described
from hadelay.ledger.lookup import find_entry
from hadelay.ledger.topics import Topic
from hadelay.ledger.transitions import failures_of
from hadelay.model import DEAD_HOURS, NONE32, HistoryEvent, State
from hadelay.server.api import DeadLetterView, DeadPage

if TYPE_CHECKING:
    from hadelay.server.node import Node

#: A page is not larger than this, unless a single letter is; others have their turn after so many of them.
_PAGE_BYTES = 4 << 20
_TURN = 50


async def dead_page(node: Node, topic: Topic, after: bytes, limit: int, body: bool) -> DeadPage:
    letters: list[DeadLetterView] = []
    found, room = dead.listing(node.ledger, topic, after, limit), _PAGE_BYTES
    for n, (at, first_id) in enumerate(found):
        if n % _TURN == _TURN - 1:
            await asyncio.sleep(0)
        letter = await node.reader.repaired(lambda first_id=first_id: _letter(node, first_id, body))  # type: ignore[misc]
        if letter is not None:
            letters.append(letter)
            room -= letter.message.size if body else 0
        if room <= 0:
            return DeadPage(letters, at)
    return DeadPage(letters, found[-1][0] if len(found) == limit else None)


def _letter(node: Node, first_id: int, body: bool) -> DeadLetterView | None:
    """None: redriven or gone since the list was made."""
    ledger = node.ledger
    place = find_entry(ledger, first_id)
    if place is None or place.hour < DEAD_HOURS:
        return None
    row = place.rows[0]
    message = described(ledger, place.hour, row, State.DEAD, int(row["attempt"]), [], body=body)
    errors = [
        HistoryEvent(event, at_ms, attempt, None, None, None if reason == NONE32 else ledger.names.name(REASON, reason))
        for at_ms, event, attempt, reason in failures_of(ledger, first_id)
    ]
    return DeadLetterView(message, int(row["deliver_at_ms"]), errors)
