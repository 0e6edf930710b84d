"""The process dies, or the power fails, at every single step of its writing: what the last checkpoint said is there,
and replaying what came after it gives the same bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import IDENTITY, NOW, events, hour_states, messages, puts

from chaos.sim.disk import SimCrash, SimDisk
from chaos.sim.runtime import SimRuntime, SimWorld
from chaos.sim.tables import SimBackend
from hadelay.storage.names import TOPIC
from hadelay.storage.store import Storage
from tests.scale import size

FAR = NOW + 50
#: More than 64 files in one checkpoint would take the way of syncfs.
STEPS = 9


class Machine:
    """A disk, and the process that writes to it: it applies entries 1, 2, 3 … as core would."""

    def __init__(self, seed: int) -> None:
        self.disk = SimDisk(random.Random(seed))
        self.disk.makedirs("/")
        self.durable = 0
        self.seed = seed

    def start(self) -> Storage:
        self.world = SimWorld(self.seed)
        self.crashed = False
        self.world.on_crash = lambda runtime: setattr(self, "crashed", True)
        runtime = SimRuntime(self.world, "n1", self.disk)
        backend = lambda path: SimBackend(self.disk, path)  # noqa: E731
        storage = Storage(self.disk, "/data", runtime, IDENTITY, backend=backend, far_buffer_bytes=1 << 16)
        storage.hours.set_clock(NOW + storage.applied_index // 4)
        self.started = storage
        return storage

    def apply(self, storage: Storage, index: int) -> None:
        hours = np.array([NOW, NOW + 1, FAR, FAR + index % 3] * 3)
        storage.hours.append(*messages(hours, sizes=[20 + index] * 12, seed=index, copies=[index % 3] * 12))
        storage.hours.append_events(NOW + 1, events([index]))
        storage.names.register(TOPIC, f"topic {index // 2}")
        storage.tables.put(b"keys", b"%d" % index, b"value")
        if index == 5:
            storage.hours.retire(NOW)
        if index == 3:
            storage.tables.drop_table(b"keys")
        storage.hours.set_clock(NOW + index // 4)
        storage.hours.count(FAR)

    def checkpoint(self, storage: Storage, index: int) -> None:
        outcome: list[Any] = []
        storage.checkpoint(index, 1, b"core %d" % index, [puts({FAR: b"%d" % index})], outcome.append)
        self.world.run_until(self.world.now + 10, stop=lambda: bool(outcome) or self.crashed)
        if self.crashed:
            raise SimCrash("in an event")
        assert outcome == [None]
        self.durable = index
        self.world.run_for(1.0)  # unlinks of retired hours
        if self.crashed:
            raise SimCrash("in an event")

    def run(self, storage: Storage) -> None:
        for index in range(storage.applied_index + 1, STEPS):
            if index > 5:
                self.apply_late(storage, index)
            else:
                self.apply(storage, index)
            if index % 2 == 0:
                self.checkpoint(storage, index)

    def apply_late(self, storage: Storage, index: int) -> None:
        """As `apply`, once the first hour is retired."""
        hours = np.array([NOW + 1, FAR, FAR + index % 3] * 3)
        storage.hours.append(*messages(hours, sizes=[20 + index] * 9, seed=index))
        storage.tables.put(b"keys", b"%d" % index, b"value")


def seen(storage: Storage) -> tuple[Any, ...]:
    store = storage.hours
    sums = store.checksums()
    for hour in store.hours():
        assert len(store.entries(hour, slice(None))) == store.count(hour)
        for row in store.entries(hour, slice(None)):
            store.record(hour, int(row["offset"]), int(row["size"]), verify=True)
    return sums, storage.names.all(), storage.tables.range(b"keys"), storage.core_blob, hour_states(storage)


def reference() -> tuple[dict[int, tuple[Any, ...]], int]:
    """What is seen after a restart from each checkpoint, and how many steps the whole takes."""
    machine, at = Machine(0), {}
    storage = machine.start()
    at[0] = seen(storage)
    for index in range(1, STEPS):
        (machine.apply_late if index > 5 else machine.apply)(storage, index)
        if index % 2 == 0:
            machine.checkpoint(storage, index)
            storage.close()
            storage = machine.start()
            at[index] = seen(storage)
    machine = Machine(0)
    machine.run(machine.start())
    return at, machine.disk.steps


@pytest.mark.parametrize("end", ["kill", "power_cut"])
def test_a_power_cut_at_every_step(end: str) -> None:
    at, steps = reference()
    assert steps > 100
    final = None
    for step in range(1, steps + 1):
        machine = Machine(step)
        machine.disk.crash_in = step
        try:
            machine.run(machine.start())
            pytest.fail(f"step {step} was not reached")
        except SimCrash:
            getattr(machine.disk, end)()
        storage = machine.start()
        applied = storage.applied_index
        # A commit that was under way may have happened.
        assert machine.durable <= applied <= machine.durable + 2, step
        assert seen(storage) == at[applied], step
        machine.run(storage)
        whole = seen(machine.started)[:3]
        final = final or whole
        assert whole == final, step


def crashes_twice(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    yield from (rng.randint(1, 120) for _ in range(6))


@pytest.mark.parametrize("seed", range(size(15, 40)))
def test_power_cuts_again_and_again(seed: int) -> None:
    """Crashes of recovery itself, and of what it then goes on with."""
    at, _ = reference()
    machine = Machine(seed)
    for step in crashes_twice(seed):
        machine.disk.crash_in = step
        try:
            machine.run(machine.start())
        except SimCrash:
            machine.disk.power_cut()
        else:
            machine.disk.kill()
        machine.disk.crash_in = 0
    storage = machine.start()
    assert storage.applied_index >= machine.durable
    assert seen(storage) == at[storage.applied_index]
