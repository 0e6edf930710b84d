"""The simulated table backend: a commit is all or nothing, and a finished one survives a power cut."""

from __future__ import annotations

import random

from chaos.sim.disk import SimCrash, SimDisk
from chaos.sim.tables import SimBackend


def open_backend(disk: SimDisk) -> SimBackend:
    return SimBackend(disk, "/d/state.mdb")


def test_commits_are_atomic_whatever_step_the_power_fails_at():
    rows = [(b"t", b"%d" % i, bytes(700)) for i in range(5)]
    for seed in range(50):
        disk = SimDisk(random.Random(seed))
        disk.makedirs("/d")
        disk.sync_everything()
        backend = open_backend(disk)
        backend.commit([], rows)
        disk.crash_in = 1 + seed % 3
        try:
            backend.commit([b"t"], [(b"u", b"x", b"y" * 2000)])
        except SimCrash:
            disk.power_cut()
        backend = open_backend(disk)
        new = backend.get(b"u", b"x") is not None
        assert backend.scan(b"t", b"", 10) == ([] if new else [(k, v) for _, k, v in rows])


def test_scan_starts_at_the_key_and_deletes_are_kept():
    disk = SimDisk(random.Random(1))
    disk.makedirs("/d")
    backend = open_backend(disk)
    backend.commit([], [(b"t", k, k) for k in (b"c", b"a", b"b")])
    backend.commit([], [(b"t", b"b", None)])
    assert open_backend(disk).scan(b"t", b"aa", 5) == [(b"c", b"c")]
