"""A command about many messages does what as many commands about one message do, at the same time and in the same
order.

Each seed makes two equal worlds. One gets a single command, the other one its rows one by one; then both have the same
answers, counters, tables, entries and events. So no row of a command may forget what an earlier row took or changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.meta import Meta as Tags
from hadelay.codec.meta import mask_of, pack
from hadelay.codec.publishcommand import hash_group
from hadelay.codec.results import RowCode
from hadelay.ledger.groups.messagegroups import GROUP
from hadelay.model import HOUR_MS, KEEP, REJECT, REPLACE, Draft
from hadelay.settings.cluster import Settings
from tests.ledger.world import World

#: Topics: with client keys and groups; with quotas of messages and of bytes, and a rate; with subscriptions, of which
#: two are bounded; with a TTL and few attempts.
_KEYED, _BOUNDED, _FANNED, _MORTAL = "keyed", "bounded", "fanned", "mortal"


def world_of(seed: int) -> World:
    rng = random.Random(f"world {seed}")
    world = World(Settings(idempotency_max_keys=rng.choice((4, 4, 10_000))))
    world.checking = False
    put = commands.encode_topic_put
    world.one(put(_KEYED, {"group_concurrency": rng.choice((1, 2))} if rng.random() < 0.5 else {}))
    world.one(put(_BOUNDED, {"max_messages": rng.choice((3, 6, 50)), "max_bytes": rng.choice((300, 600, 90_000))}))
    if rng.random() < 0.3:
        world.one(put(_BOUNDED, {"publish_rate": rng.choice((2.0, 4.0))}))
    world.one(put(_FANNED, {"own_queue": rng.random() < 0.5}))
    full = {"on_full": "drop"} if rng.random() < 0.5 else {}
    for name, config in (
        ("red", {"tags": ["red"], "max_bytes": rng.choice((150, 300, 9_000))} | full),
        ("blue", {"any_tags": ["blue", "green"], "max_messages": rng.choice((2, 4, 50))} | full),
        ("all", {}),
    ):
        world.one(commands.encode_subscription_put(_FANNED, name, config))
    world.one(put(_MORTAL, {"ttl_ms": 50_000, "max_attempts": rng.choice((1, 2)), "backoff": [0]}))
    world.publish(*drafts(rng, 8))
    world.now += rng.choice((0, 700, 3_000))
    return world


def drafts(rng: random.Random, count: int) -> list[Draft]:
    return [draft_of(rng) for _ in range(count)]


def draft_of(rng: random.Random) -> Draft:
    topic = rng.choice((_KEYED, _KEYED, _BOUNDED, _FANNED, _MORTAL))
    tags = rng.choice(((), ("red",), ("blue",), ("red", "green")))
    in_ms, body = rng.choice((0, 0, 400, 30_000, HOUR_MS)), b"x" * rng.choice((1, 40))
    group = hash_group(rng.choice("ab")) if topic == _KEYED and rng.random() < 0.4 else None
    ttl_ms = rng.choice((0, 0, 1_000))
    if topic != _KEYED or rng.random() < 0.2:
        return Draft(topic, in_ms, True, mask_of(tags), ttl_ms, pack(Tags(tags=list(tags))), body)
    mode, key = rng.choice((KEEP, KEEP, REPLACE, REPLACE, REJECT)), b"%d" % rng.randrange(5)
    unique_ms = rng.choice((0, 1_000, 60_000)) if mode == KEEP else 0
    wait_ms = rng.choice((0, 500, 5_000)) if mode == REPLACE else 0
    return Draft(
        topic, in_ms, True, 0, ttl_ms, pack(Tags()), body, None, key, mode, wait_ms, group=group, unique_ms=unique_ms
    )


def reported(result: Any) -> list[tuple[Any, ...]]:
    columns = result.ids.tolist(), result.deliver_at_ms.tolist(), result.codes.tolist(), result.duplicate.tolist()
    return list(zip(*columns, strict=True))


def state(world: World) -> dict[str, Any]:
    ledger = world.ledger
    found: dict[str, Any] = {f"topic {topic.name}": asdict(topic) for topic in ledger.topics.all}
    found["counts"] = ledger.unique_count, ledger.grouped_dead, len(ledger.grants)
    found["tables"] = {name: rows for name, rows in world.tables.rows.items() if rows and not name.startswith(b"idem")}
    # The lower bound of a group's blocked messages, bytes 4 to 20 of its row, depends on the order of searches.
    found["groups"] = {key: row[:4] + row[20:] for key, row in found["tables"].pop(GROUP, {}).items()}
    for hour in world.store.hours():
        found[f"entries of {hour}"] = world.store.entries(hour, slice(None)).tolist()
        events = world.store.events(hour)[["index", "other_hour", "consumer", "at_ms", "attempt", "event", "node"]]
        found[f"events of {hour}"] = sorted(events.tolist())
        kept = ledger.hours.get(hour)
        if kept is not None:
            bitmaps = kept.settled, kept.late, kept.leased, kept.blocked, kept.topics, sorted(kept.others.items())
            seconds = None if kept.open_seconds is None else kept.open_seconds.tolist()
            found[f"state of {hour}"] = bitmaps, seconds, kept.returned, kept.keyed, kept.results, kept.settled_at_ms
    return found


def compare(one: World, many: World) -> None:
    first, second = state(one), state(many)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value == second[name], name


@pytest.mark.parametrize("seed", range(150))
def test_publish(seed: int) -> None:
    batch, single = world_of(seed), world_of(seed)
    rows = drafts(random.Random(seed), random.Random(f"size {seed}").choice((2, 3, 6, 12)))
    result, answers = reported(batch.publish(*rows)), [reported(single.publish(row))[0] for row in rows]
    assert result == answers
    compare(batch, single)


@pytest.mark.parametrize("seed", range(60))
def test_a_repeated_publish_changes_nothing_and_has_the_same_answer(seed: int) -> None:
    """By the Idempotency-Keys of its rows, some of which come twice in the command, or by the key of the request."""
    world, rng = world_of(seed), random.Random(seed)
    world.ledger.settings = Settings()  # room for all keys
    by_request, known = rng.random() < 0.7, dict[bytes, Draft]()
    rows = []
    for row in drafts(rng, rng.choice((1, 2, 4, 6))):
        key = rng.choice((b"k", b"l", b"m", None if by_request else b"n"))
        rows.append(row if key is None else known.setdefault(key, replace(row, idem=key)))
        if rng.random() < 0.1:
            rows.append(replace(row, idem=key, body=b"other"))
    first = reported(world.publish(*rows, key=b"request" if by_request else None))
    before = state(world)
    again = reported(world.publish(*rows, key=b"request" if by_request else None))
    assert [answer[:3] for answer in again] == [answer[:3] for answer in first]
    assert all(duplicate for *_, code, duplicate in again if code == RowCode.OK)
    assert state(world) == before


#: Command about leases → its encoding.
_LEASES: dict[str, Callable[[np.ndarray], bytes]] = {
    "ack": lambda rows: commands.encode_ack("n1", rows),
    "nack": lambda rows: commands.encode_nack("n1", rows, -1, "why"),
    "nack later": lambda rows: commands.encode_nack("n1", rows, 2 * HOUR_MS),
    "extend": lambda rows: commands.encode_extend("n1", rows, 60_000),
}


def leased(world: World, rng: random.Random) -> np.ndarray:
    """Some leases of a few messages, in the order of their grants."""
    ids = [int(row["first_id"]) for hour in world.store.hours() for row in world.store.entries(hour, slice(None))]
    rows = []
    for _ in range(rng.choice((1, 2, 3))):
        result = world.grant(*rng.sample(ids, min(len(ids), 4)), lease_ms=rng.choice((1_000, 30_000)))
        if result.granted.any():
            rows.append(world.leased(result.term, result.seq))
    found = np.concatenate(rows) if rows else np.zeros(0, LEASE)
    picks = rng.sample(range(len(found)), rng.randrange(len(found) + 1)) if len(found) else []
    return found[sorted(picks)]


@pytest.mark.parametrize("name", _LEASES)
@pytest.mark.parametrize("seed", range(25))
def test_leases(seed: int, name: str) -> None:
    batch, single = world_of(seed), world_of(seed)
    rows, same = (leased(world, random.Random(seed)) for world in (batch, single))
    assert rows.tolist() == same.tolist()
    encode, later = _LEASES[name], random.Random(f"later {seed}").choice((0, 500, 40_000))
    batch.now += later
    single.now += later
    if len(rows):
        result = batch.one(encode(rows)).outcomes.tolist()
        assert result == [int(single.one(encode(rows[n : n + 1])).outcomes[0]) for n in range(len(rows))]
    compare(batch, single)


@pytest.mark.parametrize("seed", range(60))
def test_ids(seed: int) -> None:
    batch, single, rng = world_of(seed), world_of(seed), random.Random(seed)
    for world in (batch, single):
        leased(world, random.Random(seed))
    ids = [int(row["first_id"]) for hour in batch.store.hours() for row in batch.store.entries(hour, slice(None))]
    some = rng.sample(ids, min(len(ids), 6))
    encode: Callable[[list[int]], bytes] = rng.choice((
        lambda ids: commands.encode_cancel("n1", ids),
        lambda ids: commands.encode_reschedule("n1", 5_000, True, ids),
        lambda ids: commands.encode_reschedule("n1", 0, True, ids),
    ))  # fmt: skip
    result = batch.one(encode(some)).outcomes.tolist()
    assert result == [int(single.one(encode([one])).outcomes[0]) for one in some]
    compare(batch, single)


def test_the_seeds_meet_what_they_are_for() -> None:
    """Refusals of quotas, of a rate, and of periods; messages that replace one another within a command."""
    codes = set[int]()
    for seed in range(150):
        rows = drafts(random.Random(seed), random.Random(f"size {seed}").choice((2, 3, 6, 12)))
        codes |= set(world_of(seed).publish(*rows).codes.tolist())
    wanted = {
        RowCode.OK, RowCode.TOO_MANY_MESSAGES, RowCode.TOO_MANY_BYTES, RowCode.TOO_FAST, RowCode.SUBSCRIPTION_FULL,
        RowCode.TOO_MANY_KEYS, RowCode.KEY_PENDING,
    }  # fmt: skip
    assert wanted <= codes
