"""Check G1: the stored state of message groups (rows, bits of blocked entries, counts) is what Rule G
(ledger/groups/messagegroups.py) demands for the present messages."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hadelay.ledger.groups.messagegroups import (
    GROUP,
    GROUP_KEY,
    GROUPOF,
    GROUPQ,
    IDLE,
    PLACE,
    POSITION,
    Head,
    is_live,
    unpack_group,
)
from hadelay.ledger.hours.lookup import find_entry
from hadelay.model import DEAD_HOURS

if TYPE_CHECKING:
    from hadelay.ledger.state import Ledger


def check(ledger: Ledger) -> set[int]:
    """Check all message groups; returns the ids of blocked messages. Raises AssertionError with the inconsistency."""
    members: dict[bytes, list[Head]] = {}
    counts = {name: Counter[int]() for name in ("group_rows", "grouped", "blocked")}
    dead, waiting = 0, set[int]()
    for key, stored in ledger.tables.range(GROUPOF, b"", None, 1 << 30):
        first_id, group = int.from_bytes(key, "big"), stored[: GROUP_KEY.size]
        order_ms, number = int.from_bytes(stored[GROUP_KEY.size :], "big"), GROUP_KEY.unpack(group)[0]
        entry = find_entry(ledger, first_id)
        if order_ms == IDLE:
            dead += 1
            assert entry is None or entry.hour >= DEAD_HOURS, f"{first_id:x} lives, but has the group of a dead letter"
            continue
        assert entry is not None, f"{first_id:x} has a group, but is gone"
        assert ledger.outcome_of(entry.hour, entry.index)[0] is None, f"{first_id:x} has a group, but has ended"
        assert entry.rows["topic"][0] == number, f"{first_id:x}: group in another topic"
        assert is_live(ledger, group) == ledger.topics.alive(entry.rows)[0], f"{first_id:x}: group of another floor"
        members.setdefault(group, []).append(Head(order_ms, first_id, entry.hour, entry.index))
        counts["group_rows"][number] += 1
        counts["grouped"][number] += is_live(ledger, group)
    assert dead == ledger.grouped_dead, f"{ledger.grouped_dead} dead letters with a group, not {dead}"
    rows = dict(ledger.tables.range(GROUP, b"", None, 1 << 30))
    queued = dict(ledger.tables.range(GROUPQ, b"", None, 1 << 30))
    bits = {(hour, index) for hour, state in ledger.hours.items() for index in state.blocked}
    for key, mine in members.items():
        topic = ledger.topics[GROUP_KEY.unpack(key)[0]]
        if key not in rows:
            limited = is_live(ledger, key) and topic.settings.group_concurrency
            assert not limited, f"{topic.name}: a group without a row"
            continue
        blocked = _check_group(ledger, key, rows.pop(key), sorted(mine))
        waiting.update(head.id for head in blocked)
        for head in blocked:
            place = queued.pop(key + POSITION.pack(*head[:2]), None)
            assert place == PLACE.pack(head.hour, head.entry), f"{head.id:x} is blocked, but not queued"
            bits.remove((head.hour, head.entry))
        counts["blocked"][topic.number] += is_live(ledger, key) * len(blocked)
    assert not rows, f"groups without messages: {sorted(rows)}"
    assert not queued, f"queued, but not blocked: {sorted(queued)}"
    assert not bits, f"blocked without a group: {sorted(bits)}"
    for topic in ledger.topics.all:
        for name, counted in counts.items():
            found = getattr(topic, name)
            assert found == counted[topic.number], f"{topic.name}: {name} {found} ≠ {counted[topic.number]}"
    return waiting


def _check_group(ledger: Ledger, key: bytes, stored: bytes, members: list[Head]) -> list[Head]:
    """Check one message group; returns its blocked messages. members: all messages of the group, in the group's
    order."""
    group = unpack_group(stored)
    blocked = [m for m in members if (found := ledger.hours.get(m.hour)) is not None and m.entry in found.blocked]
    heads = [m for m in members if m not in blocked]
    assert group.heads == heads, f"group {key.hex()}: unblocked {group.heads} ≠ {heads}"
    assert group.blocked == len(blocked), f"group {key.hex()}: {group.blocked} blocked, not {len(blocked)}"
    if blocked:
        assert group.lowest <= blocked[0][:2], f"group {key.hex()}: the first blocked message is before the bound"
    if is_live(ledger, key):
        leased = [m for m in members if ledger.outcome_of(m.hour, m.entry)[1]]
        waiting = [m for m in members if m not in leased]
        expected = sorted(leased + waiting[: max(group.limit - len(leased), 0)])
        assert heads == expected, f"Rule G, group {key.hex()}, n = {group.limit}: {heads} ≠ {expected}"
    return blocked
