"""Compares answers to readers (pages of messages, counts by due time, single messages) with the same answers computed
slowly, from the entries alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from chaos.sim.door import whole
from hadelay.codec.meta import unpack
from hadelay.ledger.hours.lookup import EntryRef, find_entry, state_of
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.describe import describe
from hadelay.ledger.views.listing import ListQuery, listing
from hadelay.model import DEAD_HOURS, FIRST, HOUR_MS, NEVER_MS, PENDING, Key, State
from hadelay.server.service.cluster import others_left
from hadelay.server.service.duecounts import DueCounts

if TYPE_CHECKING:
    from chaos.sim.cluster import SimCluster
    from hadelay.server.node import Node

#: Hours on both sides of the present whose messages are counted by minute.
_HOURS = 120
#: `_PAGE`: size of the pages that are read. `_LOOKED_UP`: one message in this many is looked up.
_PAGE, _LOOKED_UP = 7, 3


def seen(cluster: SimCluster) -> None:
    """Compare answers of one node to readers with the node's entries."""
    nodes = [node for node in cluster.nodes() if node.name not in cluster.rotten]
    if nodes:
        node = nodes[cluster.seed % len(nodes)]
        entries = list(_entries(node.ledger))
        _listed(cluster, node, entries)
        _counted(cluster, node, entries)
        _described(cluster, node)


def _entries(ledger: Ledger) -> Iterator[tuple[EntryRef, State]]:
    """Present entry and state of each message, found from the entries one by one."""
    for hour in ledger.store.hours():
        rows = ledger.store.entries(hour, slice(0, ledger.store.count(hour)))
        for index, row in enumerate(rows):
            place = find_entry(ledger, int(row["first_id"]))
            if place is not None and (place.hour, place.index) == (hour, index):
                yield place, state_of(ledger, place, ledger.now_ms)


def _listed(cluster: SimCluster, node: Node, entries: list[tuple[EntryRef, State]]) -> None:
    """Reads, listed: the pages of a topic have each message once, in its state, in the order of due times."""
    ledger = node.ledger
    for topic in ledger.topics.all:
        wanted: list[tuple[int, int, int, State]] = []
        for place, state in entries:
            row = place.rows[0]
            if int(row["topic"]) == topic.number:
                filed_ms = place.hour * HOUR_MS + int(row["second"]) * 1000
                due_ms = filed_ms if place.hour >= DEAD_HOURS else max(int(row["deliver_at_ms"]), filed_ms)
                wanted.append((due_ms, int(row["first_id"]), place.hour, state))
        found: list[tuple[int, int, int, State]] = []
        after: Key | None = FIRST
        while after is not None:
            query = ListQuery(topic.number, frozenset(State), 0, 1 << 60, 0, after, _PAGE)
            page = whole(listing(ledger, query, ledger.now_ms))
            keys = zip(
                page.due_ms.tolist(), page.rows["first_id"].tolist(), page.hours.tolist(), page.states, strict=True
            )
            found += keys
            after = page.after
        odd = sorted(set(wanted) ^ set(found))[:4]
        text = f"{node.name} lists {len(found)} messages of {topic.name}, and has {len(wanted)}: {odd}"
        cluster.decide("reads, listed", found != sorted(wanted), text, *(one[1] for one in odd), who=node.name)


def _counted(cluster: SimCluster, node: Node, entries: list[tuple[EntryRef, State]]) -> None:
    """Reads, counted: the histogram of due times has each open message once."""
    ledger, hour = node.ledger, node.ledger.now_hour
    first_ms, end_ms = (hour - _HOURS) * HOUR_MS, (hour + _HOURS) * HOUR_MS
    for topic in (None, *(one for one in ledger.topics.all if one.exists)):
        counts = Counter[int]()
        for at in ledger.store.hours():
            if abs(at - hour) >= _HOURS:
                continue
            rows = ledger.store.entries(at, slice(0, ledger.store.count(at)))
            hour_state = ledger.hours.get(at)
            is_open = np.ones(len(rows), np.bool_)
            if hour_state is not None:
                is_open[np.array(hour_state.settled, np.int64)] = False
            mine = rows[is_open] if topic is None else rows[is_open & (rows["topic"] == topic.number)]
            counts.update((at * HOUR_MS + mine["second"] // 60 * np.int64(60_000)).tolist())
        counting = DueCounts(node.replica).count(None if topic is None else topic.name, first_ms, end_ms, 60_000)
        found = dict(zip(*whole(counting), strict=True))
        text = f"{node.name} counts {found} open messages, of {topic and topic.name}, and has {dict(counts)}"
        cluster.decide("reads, counted", found != counts, text, who=node.name)


def _described(cluster: SimCluster, node: Node) -> None:
    """Reads, described: a look-up has the message as it was published, with the due time that was answered last."""
    history = cluster.history
    for message in history.messages[cluster.seed % _LOOKED_UP :: _LOOKED_UP]:
        found = None if message.id is None else describe(node.ledger, message.id, body=True)
        if found is None or not history.own_id(message) or message.kept_other:
            continue
        same = (found.topic, found.body, tuple(unpack(found.meta).tags)) == (message.topic, message.body, message.tags)
        # Skip due times that changed: by an ended lease or a nack (both are in the message's history), by a reschedule,
        # or by a redrive.
        moved = found.history or history.moved(message) or history.meant("redrive", message, found.id)
        # A restored cluster does not know the due time of a message that was rescheduled about the time of the backup.
        unknown = moved or message.deliver_at_ms == NEVER_MS
        due = message.deliver_at_ms if unknown or found.state not in PENDING else found.deliver_at_ms
        text = f"message {message.number}, due {message.deliver_at_ms}, is described as {found}"
        cluster.decide("reads, described", not same or due != message.deliver_at_ms, text, found.id, who=node.name)


def may_leave(cluster: SimCluster, node: Node, without: str) -> None:
    """Reads, quorum: a node that is asked which voters remain without a certain member names only admitted voters."""
    blank = [peer.name for peer in node.raft.peers.values() if cluster.oracles.is_blank(peer)]
    left = others_left(node, without)
    members = node.raft.membership.voters
    text = f"{node.name} says that {left} are left without {without}; {blank} are not admitted"
    broken = without in left or not set(left) <= members - set(blank)
    cluster.decide("reads, quorum", broken, text, who=node.name)
