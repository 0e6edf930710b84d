"""A page of a topic's messages: what ledger/listing.py finds, with what the records say of each."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from hadelay.codec import meta
from hadelay.codec.tags import mask_of
from hadelay.ledger.describe import described, over
from hadelay.ledger.listing import MessageQuery, listing
from hadelay.ledger.topics import Topic
from hadelay.model import Description, State
from hadelay.server.api import ListWish, MessagePage
from hadelay.server.reading import LISTS, extents_of

if TYPE_CHECKING:
    from hadelay.server.node import Node

#: Records read between two turns of others, and for one page: beyond that it is short.
_TURN_BYTES, _PAGE_BYTES = 1 << 18, 16 << 20
#: What reading a record costs besides its bytes, in bytes; and the first of an hour whose files have to be opened.
_RECORD_COST, _HOUR_COST = 8_192, 128 << 10
_SETTLED = (State.ACKED, State.CANCELLED, State.EXPIRED)


async def page_of(node: Node, topic: Topic, asked: ListWish) -> MessagePage:
    """May be short, even empty, while there is more: whoever asks goes on behind `after` until it is None."""
    mask = mask_of(asked.tags)
    query = MessageQuery(topic.number, asked.states, asked.from_ms, asked.to_ms, mask, asked.after, asked.limit)
    now_ms = node.clock.read(node.runtime.monotonic())
    page = await node.reader.in_slices(lambda: listing(node.ledger, query, now_ms))
    messages: list[Description] = []
    wanted, turn, total = set(asked.tags), 0, 0
    fits = int(np.searchsorted(page.rows["size"].cumsum(dtype=np.int64), _PAGE_BYTES))
    await node.reader.read_off_loop(extents_of(page.hours[:fits], page.rows[:fits]), LISTS)
    for n, (hour, state) in enumerate(zip(page.hours.tolist(), page.states, strict=True)):
        row = page.rows[n]
        size = int(row["size"])
        other = not n or hour != page.hours[n - 1]
        turn += size + (_RECORD_COST if not other or node.storage.hours.mapped(hour) else _HOUR_COST)
        total += size
        if total > _PAGE_BYTES and n:
            return MessagePage(messages, (int(page.due_ms[n - 1]), int(page.rows["first_id"][n - 1])))
        if turn > _TURN_BYTES:
            turn = 0
            await asyncio.sleep(0)
        found = await node.reader.repaired(lambda h=hour, r=row, s=state: _message(node, topic, h, r, s))  # type: ignore[misc]
        # The mask says "perhaps" (codec/tags.py); the record knows.
        if found is not None and (not wanted or wanted <= set(meta.unpack(found.meta).tags)):
            messages.append(found)
    return MessagePage(messages, page.after)


def _message(node: Node, topic: Topic, hour: int, row: np.void, state: State) -> Description | None:
    """Without history. None: its hour was retired meanwhile, or it is past its topic's retention."""
    store, index = node.storage.hours, int(row["index"])
    if not store.count(hour):
        return None
    if state in _SETTLED and over(node.ledger, topic, hour, index, node.clock.read(node.runtime.monotonic())):
        return None
    # The attempt that ended it, or is under way, is not in the entry yet.
    attempt = int(row["attempt"])
    if state in (State.LEASED, State.ACKED):
        hour_state = node.ledger.hours.get(hour)
        attempt += hour_state is None or index not in hour_state.late
    return described(node.ledger, hour, row, state, attempt, [], body=False)
