"""Directories as nodes leave them, made by the state machine itself."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.ackparts import encode_results
from hadelay.codec.checksums import crc32c
from hadelay.codec.commandtypes import Grant, Job
from hadelay.codec.formats import DISPATCH, DISPATCH_SIZE, HOUR_ROW, INDEX_SIZE
from hadelay.codec.meta import Meta, pack
from hadelay.model import NONE32, Draft, Event, hour_name, unpack_id
from hadelay.pipeline.schema import Options, parse_options
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.names import encode_name
from hadelay.storage.tables import CHECKPOINT, CORE, HOUR_STATES, HOURS, ROW
from tests.ledger.world import START_HOUR, START_MS, World

SECOND, MINUTE, HOUR = 1_000, 60_000, 3_600_000


def message(topic: str, at: int, body: bytes = b"x", *, ttl_ms: int = 0, **meta: Any) -> Draft:
    """Due `at` ms after the world began."""
    return replace(Draft(topic, START_MS + at, False, 0, 0, pack(Meta(**meta)), body), ttl_ms=ttl_ms)


def write(world: World, directory: Path, *, checkpoint: bool = False) -> Path:
    """The world's files: as a copy of a directory, with the checkpoint in state.mdb or without."""
    (directory / "hours").mkdir(parents=True, exist_ok=True)
    for name, data in world.store.bytes_of().items():
        hour, _, suffix = name.partition(".")
        (directory / "hours" / f"{hour_name(int(hour))}.{suffix}").write_bytes(data)
    with open(directory / "names", "wb") as file:
        for kind, names in world.names.known.items():
            for number, name in enumerate(names):
                file.write(encode_name(kind, number, name))
    if checkpoint:
        names = (directory / "names").read_bytes()
        row = {"cluster_id": "c", "group": 0, "index": len(world.entries), "term": 1}
        row |= {"names_length": len(names), "names_crc": crc32c(names)}
        backend = LmdbBackend(str(directory / "state.mdb"), map_bytes=1 << 20)
        hours = [(hour.to_bytes(4, "big"), _hour_row(world, hour)) for hour in world.store.hours()]
        core = msgpack.packb({"version": 1, "now_ms": START_MS + world.now})
        puts = [
            (CHECKPOINT, ROW, msgpack.packb(row)),
            (CHECKPOINT, CORE, core),
            *((HOURS, key, value.tobytes()) for key, value in hours),
        ]
        backend.commit([], [*puts, *((HOUR_STATES, key, b"state") for key, _ in hours)])
        backend.close()
        (directory / "state.mdb-lock").unlink()
    return directory


def _hour_row(world: World, hour: int) -> np.ndarray:
    log, idx, dsp = (world.store.bytes_of()[f"{hour}.{suffix}"] for suffix in ("log", "idx", "dsp"))
    row = np.zeros(1, HOUR_ROW)
    row["log_bytes"], row["entries"], row["events"] = len(log), len(idx) // INDEX_SIZE, len(dsp) // DISPATCH_SIZE
    row["log_crc"], row["idx_crc"], row["dsp_crc"] = map(crc32c, (log, idx, dsp))
    return row


def options(world: World, directory: Path, **more: Any) -> Options:
    return parse_options({"path": str(directory), "as_of": START_MS + world.now, **more})


def log(world: World, message_id: int, *events: tuple[Event, int]) -> None:
    """Write (event, ms after the world began) as no node would, at the message's first entry."""
    _, hour, index = unpack_id(message_id)
    rows = np.zeros(len(events), DISPATCH)
    rows["index"], rows["other_hour"], rows["attempt"] = index, NONE32, 1
    rows["event"] = [event for event, _ in events]
    rows["at_ms"] = [START_MS + at for _, at in events]
    known = world.store.events(hour)["index"]
    before = np.flatnonzero(known == index)[-1:].tolist() or [NONE32]
    rows["previous"] = [before[0], *range(len(known), len(known) + len(events) - 1)]
    world.store.append_events(hour, rows)


def one_of_each() -> tuple[World, dict[str, list[int]]]:
    """A world six hours later, and which messages are to have which verdict."""
    world = World()
    world.one(commands.encode_topic_put("dying", {"max_attempts": 1}))
    world.one(commands.encode_topic_put("t", {"backoff": [0]}))  # what comes back is due at once
    one = [message("t", 10 * SECOND) for _ in range(10)]
    ids = world.ids(*one)
    dying, redriven = world.ids(message("dying", 5 * SECOND), message("dying", 5 * SECOND))
    (expired,) = world.ids(message("t", 10 * SECOND, ttl_ms=MINUTE))
    (far,) = world.ids(message("far", 30 * HOUR))
    (carried,) = world.ids(message("t", 20 * SECOND))
    early, twice = world.ids(message("t", 3 * HOUR), message("t", 3 * HOUR))
    said: dict[str, list[int]] = {"pending": [far], "dead": [dying], "expired": [expired]}

    world.now = 6 * SECOND
    for message_id in (dying, redriven):
        world.nack(world.lease(message_id), reason="no such order")
    world.one(commands.encode_redrive("n1", "dying", [redriven]))
    world.now = 7 * SECOND
    world.one(commands.encode_ack("n1", world.lease(redriven), encode_results([b'"a result is no message"'])))

    world.now = 10 * SECOND - 90  # a grant ahead of its time is no early hand-out
    world.ack(_hand_out(world, ids[0]))
    world.now = 10 * SECOND + 20
    world.ack(world.lease(ids[1]))
    world.nack(world.lease(ids[2]), 2 * HOUR)  # a retry is no duplicate
    leased = world.lease(ids[3])
    world.cancel(ids[4])
    world.now = 15 * SECOND
    world.ack(world.lease(ids[5]))
    world.lease(ids[6])
    key = (int(leased["term"][0]), int(leased["seq"][0]))
    world.now = 50 * SECOND
    world.one(commands.encode_expire([key]))
    world.ack(world.lease(ids[3]))
    world.now = 2 * MINUTE
    world.maintain(Job.TTL_EXPIRE)
    world.now = HOUR + MINUTE
    while not world.maintain(Job.ROLL_FORWARD, START_HOUR).done:
        pass
    world.now += 10
    world.ack(world.lease(carried))
    world.now = 2 * HOUR + 10 * SECOND + 30
    world.ack(world.lease(ids[2]))
    world.checking = False
    log(world, early, (Event.LEASED, 3 * HOUR - SECOND))
    log(world, twice, *[(Event.LEASED, 3 * HOUR + 10)] * 2, (Event.ACKED, 3 * HOUR + 11))
    log(world, early, (Event.ACKED, 3 * HOUR + 11))
    log(world, START_HOUR << 32 | 99, (Event.LEASED, 3 * HOUR))
    world.now = 6 * HOUR
    said |= {
        "ok": [redriven, ids[0], ids[1], ids[2]],
        "duplicate": [ids[3], twice],
        "cancelled": [ids[4]],
        "late": [ids[5], carried],
        "unacked": [ids[6]],
        "early": [early],
        "undelivered": ids[7:],
    }
    return world, said


def _hand_out(world: World, message_id: int) -> np.ndarray:
    """Grant it although it is due in less than 100 ms."""
    world.seq += 1
    hour, index = world.place(message_id)
    grant = Grant(world.term, world.seq, 30_000, "c", b"", "n1", [hour], [index], ahead_ms=100)
    result = world.one(commands.encode_grant(grant))
    assert result.granted.all()
    return world.leased(result.term, result.seq)


def at_random(seed: int, steps: int = 150) -> tuple[World, list[int]]:
    """A world in which much happened, and its messages."""
    rng, world = random.Random(seed), World()
    world.checking = False
    world.one(commands.encode_topic_put("b", {"max_attempts": 2}))
    ids: list[int] = []
    grants: list[np.ndarray] = []
    for _ in range(steps):
        world.now += rng.choice((5, SECOND, 5 * MINUTE))
        dice = rng.random()
        if dice < 0.3 or not ids:
            many = [
                message(
                    rng.choice("abc"),
                    world.now + rng.choice((0, SECOND, MINUTE, HOUR)),
                    rng.randbytes(rng.randrange(50)),
                )
                for _ in range(rng.randrange(1, 5))
            ]
            ids += world.ids(*many)
        elif dice < 0.6:
            some = rng.sample(ids, min(3, len(ids)))
            result = world.grant(*[i for i in some if world.states(i) == ["ready"]])
            if len(result.granted):
                grants.append(world.leased(result.term, result.seq))
        elif dice < 0.9 and grants:
            leased = grants.pop(rng.randrange(len(grants)))
            choice = rng.random()
            if choice < 0.5:
                world.ack(leased)
            elif choice < 0.8:
                world.nack(leased, rng.choice((0, MINUTE, 2 * HOUR)), "why")
            else:
                world.one(commands.encode_expire([(int(leased["term"][0]), int(leased["seq"][0]))]))
        else:
            world.cancel(rng.choice(ids))
        hour = (START_MS + world.now) // HOUR - 1
        if hour in world.store.files:
            world.maintain(Job.ROLL_FORWARD, hour)
    return world, ids
