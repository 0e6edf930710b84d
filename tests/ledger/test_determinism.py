"""The same log gives the same bytes: with other flush times, after restarts, in another process, in another store."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from msgspec.structs import replace

from chaos.sim import ledgercheck
from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.changedrows import HOURS
from hadelay.ledger.hours.lookup import find_entry
from hadelay.ledger.state import Ledger
from hadelay.model import HOUR_MS, hour_name
from hadelay.platform.disk import Disk
from hadelay.storage.hours import DiskHourStore
from hadelay.version import FEATURE_LEVEL
from tests.ledger.world import World, draft
from tests.memory import MemoryNames, MemoryTables


def long_log(seed: int, steps: int = 250) -> list[bytes]:
    """Entries of a busy life: what comes out of a world that was driven at random."""
    rng = random.Random(seed)
    world = World()
    world.checking = False
    known: list[int] = []
    for step in range(steps):
        world.now += rng.choice([1, 40, 400, 5_000, HOUR_MS // 5])
        world.term += rng.random() < 0.02
        topics = [rng.choice(["orders", "refunds", "mail"]) for _ in range(rng.randint(1, 40))]
        delays = [0, 900, 60_000, HOUR_MS, 700 * HOUR_MS]
        drafts = [draft(t, rng.choice(delays), b"x" * rng.randint(0, 300)) for t in topics]
        drafts[0] = replace(drafts[0], idem=b"%d" % (step // 2))
        known += [i for i in world.ids(*drafts) if i]
        due = [i for i in rng.sample(known, min(len(known), 30)) if find_entry(world.ledger, i)]
        if due:
            consumer, request = rng.choice(["c1", "c2", "c3"]), b"%d" % (step % 7)
            result = world.grant(*due, lease_ms=rng.choice([1_000, HOUR_MS]), consumer=consumer, request_id=request)
            if result.granted.any():
                rows = world.leased(result.term, result.seq)
                world.ack(rows[::2])
                world.nack(rows[1::4], rng.choice([-1, 5_000, HOUR_MS]))
        world.expire(*world.ledger.grants)
        world.cancel(*rng.choices(known, k=3))
        if step % 50 == 49:
            world.one(commands.encode_topic_delete("mail", True))
        world.maintain(Job.SWEEP, limit=50)
        hour = world.ledger.now_hour - 2
        world.apply(
            commands.encode_maintain(Job.ROLL_FORWARD, hour, 20),
            commands.encode_maintain(Job.RETIRE, hour, 20),
        )
        world.one(commands.encode_cursor(hour, step % 3600, step))
    return world.entries


def replayed(entries: list[bytes], directory: Path, *, far_buffer_bytes: int, every: int) -> dict[str, str]:
    """Apply them over real files, restarting the core every so many entries; digests of all that is left."""
    directory.mkdir(parents=True)
    store = DiskHourStore(Disk(), str(directory), 0, far_buffer_bytes=far_buffer_bytes)
    tables, names = MemoryTables(), MemoryNames()
    ledger = Ledger(0, store, tables, names)
    ledger.level = FEATURE_LEVEL
    rows: dict[bytes, dict[bytes, bytes | None]] = {}
    for index, entry in enumerate(entries, 1):
        apply_entry(ledger, index, 1, entry)
        if index % every == 0:
            core, slices = checkpoint.begin(ledger)
            for table, key, value in chain.from_iterable(slices):
                rows.setdefault(table, {})[key] = value
            ledger = Ledger(0, store, tables, names)
            kept = {
                table: [(key, value) for key, value in sorted(some.items()) if value] for table, some in rows.items()
            }
            checkpoint.load(ledger, core, kept)
    ledgercheck.check(ledger)
    core, all_rows = checkpoint.dump(ledger)
    hours = [(int.from_bytes(key, "big"), blob) for key, blob in all_rows[HOURS]]
    digests = {name: f"{size} {crc}" for name, (size, crc) in store.checksums().items()}
    digests |= {f"state {hour_name(hour)}": hashlib.sha256(blob).hexdigest() for hour, blob in hours}
    digests |= {
        f"table {t!r}": hashlib.sha256(repr(sorted(r.items())).encode()).hexdigest() for t, r in tables.rows.items()
    }
    digests["state"] = hashlib.sha256(core + repr(all_rows).encode()).hexdigest()
    digests["chain"] = str(ledger.chain)
    store.close()
    return digests


@pytest.mark.parametrize("seed", [1])
def test_flush_times_and_restarts_leave_no_trace(tmp_path: Path, seed: int) -> None:
    entries = long_log(seed)
    first = replayed(entries, tmp_path / "a", far_buffer_bytes=64 << 20, every=10**9)
    second = replayed(entries, tmp_path / "b", far_buffer_bytes=4_096, every=37)
    assert first == second
    assert len(first) > 50


def test_files_are_those_of_the_model(tmp_path: Path) -> None:
    entries = long_log(3, steps=60)
    world = World()
    world.checking = False
    for index, entry in enumerate(entries, 1):
        apply_entry(world.ledger, index, 1, entry)
    replayed(entries, tmp_path / "a", far_buffer_bytes=64 << 20, every=10**9)
    for hour in world.store.hours():
        name = hour_name(hour)
        for suffix in ("log", "idx", "dsp"):
            expected = world.store.bytes_of()[f"{hour}.{suffix}"]
            if expected:
                assert (tmp_path / "a" / f"{name}.{suffix}").read_bytes()[: len(expected)] == expected


def test_hash_seeds_leave_no_trace(tmp_path: Path) -> None:
    answers = []
    for seed in ("0", "4711"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "tests.ledger.test_determinism", str(tmp_path / seed)]
        answers.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert answers[0] == answers[1]
    assert json.loads(answers[0])["chain"]


if __name__ == "__main__":
    print(
        json.dumps(
            replayed(long_log(4, steps=80), Path(sys.argv[1]), far_buffer_bytes=1 << 20, every=50), sort_keys=True
        )
    )
