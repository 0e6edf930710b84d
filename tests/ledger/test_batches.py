"""Batches: messages that join, are settled in every way, and the callback with the last one."""

from __future__ import annotations

import json
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from chaos.sim import ledgercheck
from chaos.sim.disk import SimDisk
from chaos.sim.tables import SimBackend
from hadelay.codec import batches as codec
from hadelay.codec import commands
from hadelay.codec.batches import CANCELLED, ENDED, EXPIRED, KEPT_MS, MAX_FAILURES, SEALED, On, Spec
from hadelay.codec.commandtypes import Command, Job
from hadelay.codec.meta import Meta, pack, unpack
from hadelay.codec.results import Done, Refused, RowCode
from hadelay.errors import NoLeader
from hadelay.ledger.batches import batches, ending, members
from hadelay.ledger.batches.batches import BATCHEND, Found
from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS, REPLACE, Draft, Event
from hadelay.server.delivery.batchcancels import BatchCancels
from hadelay.server.delivery.term import Alarm
from hadelay.storage.tables import Layer, Tables
from tests.ledger.world import START_MS, World, draft

DAY_MS = 24 * HOUR_MS


def spec(on: On = On.COMPLETE, *, topic: str = "done", body: bytes | None = None, lifetime_ms: int = DAY_MS) -> Spec:
    return Spec(topic, on, 0, 0, 0, b"", body, lifetime_ms)


def member(of: str = "b", topic: str = "t", in_ms: int = 0, **fields: Any) -> Draft:
    return replace(draft(topic, in_ms), meta=pack(Meta(batch=of)), batched=True, **fields)


def opened(key: str = "b", on: On = On.COMPLETE, **fields: Any) -> World:
    world = World()
    assert world.one(codec.encode_open(key, spec(on, **fields))) == Done()
    return world


def seal(world: World, key: str = "b") -> Any:
    return world.one(codec.encode_seal(key))


def batch(world: World, key: str = "b") -> Found:
    found = batches.find(world.ledger, key)
    assert found is not None
    return found


def counts(world: World, key: str = "b") -> tuple[int, ...]:
    """Numbers of joined, acked, dead, expired and cancelled members."""
    state = batch(world, key).state
    return state.joined, state.acked, state.dead, state.expired, state.cancelled


def callbacks(world: World, topic: str = "done") -> int:
    found = world.ledger.topic(topic)
    return 0 if found is None else found.published


@pytest.mark.parametrize("fields", [{"ttl_ms": 2**63}, {"delay_ms": 2**64 - 1}, {"tag_mask": 2**64 - 1}])
def test_a_spec_with_any_numbers_ends(fields: dict[str, int]) -> None:
    """Apply raises on no bytes."""
    world = World()
    world.one(codec.encode_open("b", replace(spec(), **fields)))
    seal(world)
    assert callbacks(world) == 1


def test_the_callback_comes_with_the_last_member_in_the_same_entry() -> None:
    world = opened()
    ids = world.ids(member(), member(), member(topic="u"))
    assert seal(world) == Done()
    world.ack(world.lease(*ids[:2]))
    assert (counts(world), callbacks(world)) == ((3, 2, 0, 0, 0), 0)
    entries = len(world.entries)
    world.ack(world.lease(ids[2]))
    assert (counts(world), callbacks(world), len(world.entries)) == ((3, 3, 0, 0, 0), 1, entries + 2)
    state = batch(world).state
    assert (state.flags, state.ended_ms) == (SEALED | ENDED, START_MS)
    callback = describe(world.ledger, state.callback, START_MS, body=True)
    assert callback is not None
    assert callback.body is not None
    assert callback.topic == "done"
    assert json.loads(callback.body) == {
        "batch": "b", "on": "complete", "joined": 3, "acked": 3, "dead": 0, "expired": 0, "cancelled": 0,
        "opened_at": "2026-11-20T18:00:00.000Z", "sealed_at": "2026-11-20T18:00:00.000Z",
        "ended_at": "2026-11-20T18:00:00.000Z",
    }  # fmt: skip
    meta = unpack(callback.meta)
    assert (meta.ct, meta.meta["batch"], meta.meta["batch-acked"]) == ("application/json", "b", "3")


def test_a_callback_has_the_body_delay_and_tags_of_its_batch() -> None:
    world = World()
    meta = pack(Meta(ct="text/plain", tags=["eu"], meta={"mine": "1"}))
    world.one(codec.encode_open("b", Spec("done", On.SUCCESS, 4_000, 9_000, 7, meta, b"go", DAY_MS)))
    seal(world)  # an empty batch ends when it is sealed
    callback = describe(world.ledger, batch(world).state.callback, START_MS, body=True)
    assert callback is not None
    assert (callback.body, callback.deliver_at_ms, unpack(callback.meta).ct) == (b"go", START_MS + 4_000, "text/plain")
    assert (unpack(callback.meta).meta["mine"], unpack(callback.meta).meta["batch-joined"]) == ("1", "0")


@pytest.mark.parametrize(
    ("on", "fails", "calls"),
    [(On.COMPLETE, "", 1), (On.COMPLETE, "dies", 1), (On.SUCCESS, "", 1), (On.SUCCESS, "dies", 0),
     (On.SUCCESS, "cancelled", 0), (On.DEATH, "", 0), (On.DEATH, "dies", 1), (On.DEATH, "cancelled", 0)],
)  # fmt: skip
def test_outcomes_that_call_back(on: On, fails: str, calls: int) -> None:
    world = opened(on=on)
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    one, two = world.ids(member(), member())
    seal(world)
    if fails == "cancelled":
        world.cancel(one)
    else:
        lease = world.lease(one)
        world.nack(lease) if fails else world.ack(lease)
    world.ack(world.lease(two))
    assert (callbacks(world), batch(world).state.flags) == (calls, SEALED | ENDED)


def test_each_way_to_end_counts_once() -> None:
    world = opened()
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    world.one(commands.encode_topic_put("routed", {"max_attempts": 1, "dead_letter": "letters"}))
    dying, routed, expiring, cancelled, retried = world.ids(
        member(), member(topic="routed"), member(ttl_ms=5_000), member(), member(topic="many")
    )
    purged = world.ids(member(topic="purged", in_ms=HOUR_MS))
    deleted = world.ids(member(topic="deleted"))
    world.nack(world.lease(dying, routed))
    world.nack(world.lease(retried), 0)  # goes on
    world.cancel(cancelled)
    world.one(commands.encode_purge("purged", 3))
    world.one(commands.encode_topic_delete("deleted", True))
    seal(world)
    assert counts(world) == (7, 0, 2, 0, 1)
    world.now += 6_000
    world.maintain(Job.TTL_EXPIRE)
    world.maintain(Job.SWEEP)
    world.maintain(Job.SWEEP)
    world.maintain(Job.SWEEP)
    assert counts(world) == (7, 0, 2, 1, 3)
    world.one(commands.encode_redrive("n1", "t", [dying]))
    world.ack(world.lease(dying, routed))
    assert (counts(world), callbacks(world)) == ((7, 0, 2, 1, 3), 0)
    world.ack(world.lease(retried))
    assert (counts(world), callbacks(world)) == ((7, 1, 2, 1, 3), 1)
    failures = members.failures_of(world.ledger, batch(world).number, 0, 100)
    assert [(f.id, f.event) for f in failures] == [
        (dying, Event.DEAD), (routed, Event.DEAD), (cancelled, Event.CANCELLED), (expiring, Event.TTL_EXPIRED),
        (deleted[0], Event.CANCELLED), (purged[0], Event.CANCELLED),
    ]  # fmt: skip
    assert members.failures_of(world.ledger, batch(world).number, 4, 1) == failures[4:5]


def test_messages_that_cannot_join() -> None:
    world = opened()
    assert world.publish(member("other"), draft()).codes.tolist() == [RowCode.NO_BATCH, RowCode.OK]
    seal(world)
    assert world.publish(member()).codes.tolist() == [RowCode.BATCH_CLOSED]
    assert world.publish(replace(member(), meta=b"\xc1")).codes.tolist() == [RowCode.NO_BATCH]
    assert callbacks(world) == 1


def test_a_repeated_publish_and_a_kept_key_join_once() -> None:
    world = opened()
    once = member(idem=b"k")
    assert world.ids(once) == world.ids(once)
    assert world.ids(member(key=b"a", in_ms=9_000)) == world.ids(member(key=b"a", in_ms=9_000))
    assert counts(world)[0] == 2
    world.publish(member(key=b"a", in_ms=9_000, on_conflict=REPLACE))
    assert counts(world) == (3, 0, 0, 0, 1)


def test_copies_for_subscriptions_are_members() -> None:
    world = opened()
    world.one(commands.encode_topic_put("t", {}))
    world.one(commands.encode_subscription_put("t", "billing", {}))
    (first,) = world.ids(member())
    seal(world)
    world.ack(world.lease(first))
    assert (counts(world), callbacks(world)) == ((2, 1, 0, 0, 0), 0)
    world.ack(world.lease(first + 1))
    assert (counts(world), callbacks(world)) == ((2, 2, 0, 0, 0), 1)


def test_a_repeated_open_changes_nothing_and_another_one_is_refused() -> None:
    world = opened()
    assert world.one(codec.encode_open("b", spec())) == Done(False)
    assert seal(world) == Done()
    assert seal(world) == Done(False)
    assert world.one(codec.encode_open("b", spec())) == Done(False)
    refused = world.one(codec.encode_open("b", spec(On.DEATH)))
    assert isinstance(refused, Refused)
    assert refused.code == "batch_exists"


@pytest.mark.parametrize(
    ("given", "code"), [(spec(topic="a~b"), "bad_config"), (spec(topic="a b"), "bad_config")]
)  # fmt: skip
def test_refused_specifications(given: Spec, code: str) -> None:
    refused = World().one(codec.encode_open("b", given))
    assert isinstance(refused, Refused)
    assert refused.code == code


def test_malformed_specifications() -> None:
    world = World()
    good = ["", "b", ["done", 0, 0, 0, 0, b"", None, 1]]
    assert world.raw(Command.BATCH_OPEN, *good) == Done()
    for at, value in ((1, 3), (5, b"\xc1"), (5, b"\x81\xa2ct\x01"), (6, b"x" * 16_385), (7, 0), (7, 367 * DAY_MS)):
        bad = [*good[:2], [*good[2][:at], value, *good[2][at + 1 :]]]
        assert world.raw(Command.BATCH_OPEN, *bad).code == "malformed", value


def test_limits_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_BATCHES", 2)
    world = opened()
    world.one(codec.encode_open("c", spec()))
    assert world.one(codec.encode_open("d", spec())).code == "too_many_batches"
    assert seal(world, "x").code == world.one(codec.encode_cancel("x")).code == "no_batch"


def test_a_cancel_ends_what_waits_in_slices_and_lets_leased_members_finish() -> None:
    world = opened()
    world.one(codec.encode_open("other", spec()))
    ids = world.ids(*(member(topic=f"t{n % 3}", in_ms=n * 600_000) for n in range(12)))
    kept = world.ids(member("other"), draft())
    lease = world.lease(ids[0])
    assert world.one(codec.encode_cancel("b")) == Done()
    assert not world.one(codec.encode_step(0, ids[:5])).done
    assert counts(world)[4] == 4
    assert world.one(codec.encode_step(1, [*ids[3:], *kept, *ids[3:], 2**64 - 1])).done
    assert (counts(world), batch(world).state.flags) == ((12, 0, 0, 0, 11), SEALED | CANCELLED)
    assert world.states(*kept) == ["ready", "ready"]
    world.ack(lease)
    assert (counts(world), callbacks(world)) == ((12, 1, 0, 0, 11), 1)
    assert world.one(codec.encode_cancel("b")) == Done(False)


def test_a_cancel_during_a_search_gets_another_search() -> None:
    world = opened()
    world.one(codec.encode_open("c", spec()))
    ids = world.ids(*(member("c" if n < 4 else "b") for n in range(8)))
    world.one(codec.encode_cancel("b"))
    world.one(codec.encode_step(0, ids[4:6]))
    world.one(codec.encode_cancel("c"))
    assert not world.one(codec.encode_step(1, ids[6:])).done
    assert (counts(world)[4], counts(world, "c")[4]) == (4, 0)
    assert world.one(codec.encode_step(2**64 - 1, ids[:4])).done
    assert (world.ledger.batches.searched, world.ledger.batches.cancels, callbacks(world)) == (2, 2, 2)


def test_a_member_that_is_rescheduled_during_a_search_is_found_by_another_search() -> None:
    """The search reads entries in their order, and the new entry may lie before its place."""
    world = opened()
    (one,) = world.ids(member(in_ms=9 * HOUR_MS))
    world.one(codec.encode_cancel("b"))
    world.one(commands.encode_reschedule("n1", HOUR_MS, True, [one]))
    assert not world.one(codec.encode_step(1, [])).done
    leader = Leader(world)
    leader.run()
    assert (counts(world), leader.steps) == ((1, 0, 0, 0, 1), 1)


def numbers(world: World, hours: int = 0) -> list[int]:
    """Number of the batch of each entry, 0 for none, of the hour that begins in so many hours."""
    hour = START_MS // HOUR_MS + hours
    return members.numbers_of(world.ledger, hour, np.arange(world.ledger.store.count(hour), dtype=np.uint32)).tolist()


def test_numbers_of_neighbouring_entries_are_kept_in_runs() -> None:
    world = opened()
    world.one(codec.encode_open("c", spec()))
    world.checking = 0
    rng, expected = random.Random(1), {0: list[int](), 1: list[int]()}
    for _ in range(40):
        some = [(rng.choice((1, 1, 1, 2, 0)), rng.randrange(2)) for _ in range(rng.choice((1, 5, 60)))]
        if rng.random() < 0.5:
            some = [some[0]] * len(some)
        world.ids(*(member("bc"[n - 1], in_ms=h * HOUR_MS) if n else draft("t", h * HOUR_MS) for n, h in some))
        for n, h in some:
            expected[h].append(n)
    assert [numbers(world, h) for h in (0, 1)] == [expected[0], expected[1]]
    assert min(map(len, expected.values())) > members.BLOCK
    world.ids(*[member() for _ in range(100)])
    ledgercheck.check(world.ledger)
    alone = opened()
    for _ in range(3):
        alone.ids(member(), member())
    assert [len(row) for _, row in alone.ledger.tables.range(members.BATCHOF)] == [members.RUN.itemsize]


def test_rows_of_members_go_with_their_hour() -> None:
    world = opened()
    world.checking = 0
    ids = world.ids(*[member() for _ in range(3 * members.BLOCK)])
    world.now += 1
    world.nack(world.lease(ids[0]), 5 * HOUR_MS)
    world.cancel(*ids[1:])
    hour = START_MS // HOUR_MS
    world.now += 3 * HOUR_MS
    while not world.maintain(Job.RETIRE, hour, 100).done:
        pass
    assert [members.BLOCK_KEY.unpack(key)[0] for key, _ in world.ledger.tables.range(members.BATCHOF)] == [hour + 5]
    world.checking = 1
    seal(world)
    world.now += 3 * HOUR_MS
    world.ack(world.lease(ids[0]))
    assert (counts(world), callbacks(world)) == ((768, 1, 0, 0, 767), 1)


class Leader:
    """The search of a leader, on a runtime whose timers fire at once; commands are applied when they are proposed."""

    def __init__(self, world: World) -> None:
        self.world, self.waiting = world, list[Any]()
        runtime: Any = SimpleNamespace(monotonic=lambda: 0.0, call_later=self._later)
        term: Any = SimpleNamespace(
            ledger=world.ledger, runtime=runtime, alarm=partial(Alarm, runtime), propose_behind=self._propose
        )
        self.fails, self.steps = 0, 0
        self.cancels = BatchCancels(term)

    def _later(self, delay_s: float, ring: Any) -> Any:
        self.waiting.append(ring)
        return SimpleNamespace(cancel=lambda: None)

    def _propose(self, command: bytes, done: Any) -> None:
        self.steps += 1
        if self.fails:
            self.fails -= 1
            done(None, NoLeader("lost"))
        else:
            done(self.world.one(command), None)

    def run(self) -> None:
        self.cancels.watch()
        while self.waiting:
            self.waiting.pop()()


def test_the_leader_finds_what_waits_and_begins_anew_after_a_failure() -> None:
    world = opened()
    world.checking = 0
    world.one(codec.encode_open("other", spec()))
    ids = world.ids(*(member("other" if n % 3 else "b") for n in range(1_900)))
    leader = Leader(world)
    leader.run()
    assert leader.steps == 0
    lease = world.lease(ids[0])
    world.one(codec.encode_cancel("b"))
    leader.fails = 1
    leader.run()
    assert (counts(world)[4], counts(world, "other")[4], leader.steps) == (633, 0, 3)
    world.ack(lease)
    assert callbacks(world) == 1
    leader.run()
    assert leader.steps == 3
    world.one(codec.encode_cancel("other"))
    later = Leader(world)
    later.run()
    assert (counts(world, "other")[4], callbacks(world)) == (1_266, 2)
    ledgercheck.check(world.ledger)


def test_rows_deleted_since_the_checkpoint_cost_apply_no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number differs by node, and had apply read for 0.3 s and more. A batch that ended, or was forgotten, leaves
    deleted rows too."""
    world, disk = World(), SimDisk(random.Random(1))
    disk.makedirs("/data")
    backend = SimBackend(disk, "/data/state.mdb")
    tables = world.ledger.tables = world.tables = Tables(backend)  # type: ignore[assignment]
    world.checking = 0
    for n in range(200):
        world.one(codec.encode_open(f"b{n}", spec(lifetime_ms=DAY_MS if n % 2 else HOUR_MS)))
    ids = world.ids(*(member("b0") for _ in range(2_000)))
    layer = tables.freeze()
    backend.commit(layer.dropped, layer.puts())
    tables.committed()
    world.ack(world.lease(*ids[:1_990]))
    read: Counter[str] = Counter()
    page, scan = Layer.page, SimBackend.scan

    def counted(name: str, real: Any) -> Any:
        def call(*args: Any) -> Any:
            found = real(*args)
            read[name] += len(found)
            return found

        return call

    monkeypatch.setattr(Layer, "page", counted("layer", page))
    monkeypatch.setattr(SimBackend, "scan", counted("backend", scan))
    world.one(codec.encode_cancel("b0"))
    world.one(codec.encode_step(1, ids[-500:]))
    assert (counts(world, "b0"), read.total()) == ((2_000, 1_990, 0, 0, 10), 0)
    for n in range(1, 200):
        seal(world, f"b{n}")
    most = 0
    for pass_ms in (0, HOUR_MS, DAY_MS, KEPT_MS):
        world.now += pass_ms
        done = False
        while not done:
            read.clear()
            done = world.maintain(Job.BATCHES).done
            most = max(most, read.total())
    assert (world.ledger.batches.count, batches.first_end_ms(world.ledger)) == (0, None)
    assert not tables.range(BATCHEND)
    assert most <= 4 * ending.MAX_ENDED


def test_the_lifetime_ends_a_batch_without_a_callback() -> None:
    world = opened(lifetime_ms=5_000)
    (one,) = world.ids(member(in_ms=9_000))
    world.now += 4_999
    assert world.maintain(Job.BATCHES)
    assert not batch(world).state.flags
    world.now += 1
    assert batches.first_end_ms(world.ledger) == START_MS + world.now
    world.maintain(Job.BATCHES)
    assert batch(world).state.flags == ENDED | EXPIRED
    assert world.publish(member()).codes.tolist() == [RowCode.BATCH_CLOSED]
    world.now += 9_000
    world.ack(world.lease(one))
    assert (counts(world), callbacks(world)) == ((1, 0, 0, 0, 0), 0)


def test_an_ended_batch_is_forgotten_and_its_key_is_free_again() -> None:
    world = opened()
    (one,) = world.ids(member())
    world.cancel(one)
    seal(world)
    world.now += KEPT_MS
    world.maintain(Job.BATCHES)
    assert (batches.find(world.ledger, "b"), world.ledger.batches.count) == (None, 0)
    assert world.one(codec.encode_open("b", spec(On.DEATH))) == Done()
    assert batch(world).number == 2


def test_failures_beyond_the_limit_are_counted_and_not_listed() -> None:
    world = opened()
    ids = world.ids(*(member() for _ in range(MAX_FAILURES + 5)))
    world.cancel(*ids)
    seal(world)
    assert counts(world)[4] == MAX_FAILURES + 5
    assert len(members.failures_of(world.ledger, batch(world).number, 0, 5_000)) == MAX_FAILURES


def test_a_deleted_topic_gets_the_callback_anyway() -> None:
    world = opened()
    world.one(commands.encode_topic_delete("done", True))
    seal(world)
    assert world.ledger.topic("done") is not None
    assert batch(world).state.callback


def test_the_list_has_the_newest_first() -> None:
    world = World()
    for key in "abcd":
        world.one(codec.encode_open(key, spec()))
    first = batches.listing(world.ledger, None, 3)
    assert [found.stored.key for found in first] == ["d", "c", "b"]
    assert [found.stored.key for found in batches.listing(world.ledger, first[-1].number, 3)] == ["a"]


@pytest.mark.parametrize("seed", range(10))
def test_counts_are_those_of_the_members(seed: int) -> None:
    """A random history, whose every step checks the counts of all batches (chaos/sim/batchcheck.py)."""
    rng, world = random.Random(f"batches {seed}"), World()
    world.checking = 3
    world.one(commands.encode_topic_put("t", {"max_attempts": 2, "backoff": [100], "group_concurrency": 1}))
    world.one(commands.encode_topic_put("u", {"dead_letter": "t", "max_attempts": 1, "ttl_ms": 40_000}))
    ids: list[int] = []
    leases: list[Any] = []
    for _ in range(60):
        step, key = rng.randrange(12), rng.choice("abc")
        if step == 0:
            world.one(codec.encode_open(key, spec(rng.choice(list(On)), lifetime_ms=rng.choice((30_000, DAY_MS)))))
        elif step < 5:
            some = [
                member(key, rng.choice("tu"), rng.choice((0, 0, 5_000, HOUR_MS)), group=rng.choice((None, 1)))
                for _ in range(rng.randrange(1, 4))
            ]
            ids += [i for i in world.ids(*some) if i]
        elif step < 8 and ids:
            result = world.grant(*rng.sample(ids, min(3, len(ids))))
            if result.granted.any():
                leases.append(world.leased(result.term, result.seq)[result.granted])
        elif step == 8 and leases:
            lease = leases.pop(rng.randrange(len(leases)))
            world.nack(lease, rng.choice((-1, 0, commands.DEAD_NOW))) if rng.random() < 0.5 else world.ack(lease)
        elif step == 9:
            world.one(rng.choice((codec.encode_seal, codec.encode_cancel))(key))
        elif step == 10:
            purge = commands.encode_purge(rng.choice("tu"), rng.choice((1, 2, 3, 4)))
            world.one(rng.choice((purge, commands.encode_cancel("n1", ids[-2:]))))
        else:
            world.now += rng.choice((200, 6_000, 31_000))
            world.expire(*list(world.ledger.grants))
            for job in (Job.TTL_EXPIRE, Job.SWEEP, Job.BATCHES):
                world.maintain(job)
            world.one(codec.encode_step(0, [i for i in ids if rng.random() < 0.5][:500]))


def test_a_cancelled_batch_without_members_is_no_success() -> None:
    world = opened(on=On.SUCCESS)
    world.one(codec.encode_cancel("b"))
    assert (batch(world).state.flags, callbacks(world)) == (SEALED | CANCELLED | ENDED, 0)
