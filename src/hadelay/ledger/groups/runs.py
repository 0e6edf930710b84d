"""Runs: the first messages of a group, leased in the group's order by one grant, where `group_concurrency` is 1.

A GRANT that leases the unblocked message of a group may name blocked messages of the group as well. Apply leases them
as far as they are the next ones in order, and only if no other grant has a lease of the group. Rule G then keeps all
others blocked until every lease of the run has ended. A failed message keeps its order, so it goes first again.
"""

from collections import Counter

import numpy as np

from hadelay.codec.formats import Rows
from hadelay.ledger.groups.messagegroups import (
    BEHIND,
    GROUP,
    GROUP_KEY,
    GROUPOF,
    GROUPQ,
    MESSAGE,
    PLACE,
    POSITION,
    Change,
    is_live,
    unpack_group,
)
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.ledger.state import Ledger
from hadelay.model import MAX_RUN


def take_next(ledger: Ledger, rows: Rows, behind: list[int]) -> list[int]:
    """Unblock messages of a grant's LEASED rows (at the positions `behind`), if they come next in a group whose
    unblocked message the same grant has leased. Returns the positions of the unblocked messages, for the grant to
    lease."""
    ids = np.zeros(len(behind), np.uint64)
    at = np.array(behind)
    for hour, where in rows_by_value(rows["hour"][at]):
        ids[where] = ledger.store.entries(hour, rows["index"][at[where]])["first_id"]
    places = list(zip(rows["hour"].tolist(), rows["index"].tolist(), strict=True))
    leased = {places[n]: n for n in np.flatnonzero(rows["open"]).tolist()}
    wanted: dict[bytes, list[int]] = {}
    for n, stored in zip(behind, ledger.tables.get_many(GROUPOF, list(map(MESSAGE.pack, ids.tolist()))), strict=True):
        if stored is not None:
            wanted.setdefault(stored[: GROUP_KEY.size], []).append(n)
    change, taken, counts = Change(ledger), list[int](), Counter[int]()
    change.read(wanted)
    for key, mine in wanted.items():
        group, topic = change.groups[key], ledger.topics[GROUP_KEY.unpack(key)[0]]
        if group is None or not is_live(ledger, key) or topic.settings.group_concurrency != 1 or topic.settings.paused:
            continue
        # A consumer gets a group's messages in order, so the first must be in this grant, too, and before the others
        # (lower position); skip the group if its first message is leased by another grant, or not at all.
        heads = [leased.get((head.hour, head.entry), len(places)) for head in group.heads]
        if not heads or max(heads) > mine[0]:
            continue
        most = MAX_RUN - len(heads)
        if topic.settings.concurrency is not None:
            most = min(most, topic.settings.concurrency - topic.leased - counts[topic.number])
        run = mine[: max(most, 0)]
        run = run[: change.run_on(key, group, [places[n] for n in run])]
        counts[topic.number] += len(run)
        taken += run
    change.finish()
    return taken


def next_of(ledger: Ledger, heads: list[int], most: int) -> list[list[tuple[int, int]]]:
    """For each of these messages, by id: up to `most` entries (hour, index) of blocked messages that come next in its
    group, in order; none if a message has no group, or is not the only unblocked message of its group."""
    found: list[list[tuple[int, int]]] = [[] for _ in heads]
    keys = [
        None if stored is None else stored[: GROUP_KEY.size]
        for stored in ledger.tables.get_many(GROUPOF, list(map(MESSAGE.pack, heads)))
    ]
    known = list(dict.fromkeys(key for key in keys if key is not None))
    groups = dict(zip(known, ledger.tables.get_many(GROUP, known), strict=True))
    for n, key in enumerate(keys):
        if key is None or (stored := groups[key]) is None or not is_live(ledger, key):
            continue
        group = unpack_group(stored)
        if group.blocked and len(group.heads) == 1:
            first = key + POSITION.pack(*group.lowest)
            rows = ledger.tables.range(GROUPQ, first, key + BEHIND, min(most, group.blocked))
            found[n] = [PLACE.unpack(place) for _, place in rows]
    return found
