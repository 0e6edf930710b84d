"""Anything in any order to topics whose messages fail, expire, are routed, redriven and purged: all adds up after
every step, and a replica that starts from a checkpoint between any two entries becomes the same, to the byte."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.describe import describe
from hadelay.model import REPLACE, Event, State
from hadelay.version import FEATURE_LEVEL
from tests.ledger.world import START_HOUR, World, draft
from tests.memory import MemoryHours, MemoryNames, MemoryTables

H = 3_600_000
TOPICS = ("a", "b", "c")
#: b sends its dead to a, a to b: whatever is routed is kept where it dies next.
CONFIGS: tuple[dict[str, Any], ...] = (
    {"max_attempts": 1, "dead_letter": "b", "ttl_ms": 5_000, "backoff": [1_000, H]},
    {"max_attempts": 2, "dead_letter": "a", "dead_retention_ms": H},
    {
        "max_attempts": 3,
        "backoff": {"min_ms": 100, "max_ms": 2 * H, "factor": 30, "jitter": 0.5},
        "dead_retention_ms": H,
    },
)

numbers = st.integers(0, 30)
topic = st.sampled_from(TOPICS)
step = st.one_of(
    st.tuples(
        st.just("publish"), topic, st.sampled_from([0, 0, 1_000, 2 * H]), st.sampled_from([0, 0, 1, 3_000, 3 * H])
    ),
    st.tuples(st.just("publish key"), topic),
    st.tuples(st.just("grant"), st.lists(numbers, min_size=1, max_size=6), st.sampled_from([1, 30_000])),
    st.tuples(st.just("ack"), numbers),
    st.tuples(st.just("nack"), numbers, st.sampled_from([-1, -1, 0, 90 * 60_000, commands.DEAD_NOW])),
    st.tuples(st.just("expire")),
    st.tuples(st.just("wait"), st.sampled_from([0, 1, 2_500, 40 * 60_000, 3 * H])),
    st.tuples(st.just("ttl"), st.sampled_from([1, 3, 1_000])),
    st.tuples(st.just("redrive"), topic, st.lists(numbers, max_size=5)),
    st.tuples(st.just("redrive all"), topic, st.sampled_from([None, 0.5, 1_000.0])),
    st.tuples(st.just("redrive some"), topic, st.sampled_from([1, 2, 100])),
    st.tuples(st.just("purge"), topic, st.integers(1, 7)),
    st.tuples(st.just("delete"), topic),
    st.tuples(st.just("sweep"), st.sampled_from([1, 3, 1_000])),
    st.tuples(st.just("carry"), st.integers(1, 4)),
    st.tuples(st.just("retire"), st.integers(2, 6)),
    st.tuples(st.just("drop"), st.integers(1, 3)),
    st.tuples(st.just("cancel"), numbers),
    st.tuples(st.just("reschedule"), numbers, st.sampled_from([0, 4_000, H])),
    st.tuples(st.just("config"), st.permutations(range(3))),
)


class Life:
    def __init__(self) -> None:
        self.world = World()
        self.ids: list[int] = []
        self.leases: list[Any] = []
        #: Ids that a purge or the end of a retention has made unknown: they stay so.
        self.gone: set[int] = set()
        self.ended: dict[int, State] = {}

    def some(self, picks: list[int]) -> list[int]:
        return [self.ids[n % len(self.ids)] for n in picks] if self.ids else []

    def play(self, what: str, *args: Any) -> None:
        world, one = self.world, self.world.one
        hour = START_HOUR + world.now // H
        if what == "publish":
            name, in_ms, ttl_ms = args
            self.ids += world.ids(replace(draft(name, in_ms), ttl_ms=ttl_ms))
        elif what == "publish key":
            self.ids += world.ids(replace(draft(args[0], 500), key=b"k", on_conflict=REPLACE))
        elif what == "grant" and self.ids:
            result = world.grant(*self.some(args[0]), lease_ms=args[1])
            if result.granted.any():
                self.leases.append(world.leased(result.term, result.seq))
        elif what == "ack" and self.leases:
            world.ack(self.leases[args[0] % len(self.leases)])
        elif what == "nack" and self.leases:
            world.nack(self.leases[args[0] % len(self.leases)], args[1], "why")
        elif what == "expire":
            world.expire(*world.ledger.grants)
        elif what == "wait":
            world.now += args[0]
            one(commands.encode_noop())
        elif what == "ttl":
            one(commands.encode_maintain(Job.TTL_EXPIRE, limit=args[0]))
        elif what == "redrive":
            dead = [
                i for i in self.ids if (d := describe(world.ledger, i)) and d.state is State.DEAD and d.topic == args[0]
            ]
            one(commands.encode_redrive("n1", args[0], self.some(args[1]) + dead[:2]))
        elif what == "redrive all":
            one(commands.encode_redrive("n1", args[0], [], all=True, rate=args[1]))
        elif what == "redrive some":
            world.maintain(Job.REDRIVE, topic=args[0], limit=args[1])
        elif what == "purge":
            one(commands.encode_purge(*args))
        elif what == "delete":
            one(commands.encode_topic_delete(args[0], True))
        elif what == "sweep":
            one(commands.encode_maintain(Job.SWEEP, limit=args[0]))
        elif what == "carry":
            one(commands.encode_maintain(Job.ROLL_FORWARD, hour - args[0]))
        elif what == "retire":
            one(commands.encode_maintain(Job.RETIRE, hour - args[0]))
        elif what == "drop":
            for known in world.store.hours()[-args[0] :]:
                one(commands.encode_maintain(Job.DROP_DEAD, known, 2))
        elif what == "cancel" and self.ids:
            world.cancel(*self.some([args[0]]))
        elif what == "reschedule" and self.ids:
            one(commands.encode_reschedule("n1", args[1], True, self.some([args[0]])))
        elif what == "config":
            for name, n in zip(TOPICS, args[0], strict=True):
                config = dict.fromkeys(("max_attempts", "dead_letter", "ttl_ms", "backoff", "dead_retention_ms"))
                config |= CONFIGS[n]
                if config["dead_letter"] != name:
                    one(commands.encode_topic_put(name, config))

    def look(self) -> None:
        """What is over stays over; only what is dead may come back."""
        for message_id in self.ids:
            found = describe(self.world.ledger, message_id)
            if found is None:
                self.gone.add(message_id)
                continue
            assert message_id not in self.gone, f"{message_id:x} is back"
            before = self.ended.get(message_id)
            assert before is None or found.state is before, f"{message_id:x} was {before}, is {found.state}"
            written = bool(found.history) and found.history[-1].event is Event.TTL_EXPIRED
            # Expired, and not written down yet: it goes with its topic, if that is deleted or purged first.
            if found.state in (State.ACKED, State.CANCELLED) or (found.state is State.EXPIRED and written):
                self.ended[message_id] = found.state


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(step, min_size=5, max_size=60))
def test_everything_adds_up_and_replicas_are_equal(steps: list[tuple[Any, ...]]) -> None:
    life = Life()
    life.play("config", [0, 1, 2])
    for what, *args in steps:
        life.play(what, *args)
        life.look()
    world = life.world
    store, tables, names = MemoryHours(), MemoryTables(), MemoryNames()
    replica = Ledger(0, store, tables, names)
    replica.level = FEATURE_LEVEL
    for n, entry in enumerate(world.entries):
        apply_entry(replica, n + 1, world.term, entry)
        dumped = checkpoint.dump(replica)
        replica = Ledger(0, store, tables, names)
        checkpoint.load(replica, *dumped)
    assert checkpoint.dump(replica) == checkpoint.dump(world.ledger)
    assert store.bytes_of() == world.store.bytes_of()
    assert {name: rows for name, rows in tables.rows.items() if rows} == {
        name: rows for name, rows in world.tables.rows.items() if rows
    }
