"""State machine and storage alone, on a disk that dies at any step: one life that is never interrupted beside one that
is, fed the same entries. After every recovery and replay both have equal state and equal bytes."""

from __future__ import annotations

import random
import sys

import numpy as np

from chaos.sim import ledgercheck
from chaos.sim.disk import SimDisk
from chaos.sim.replicas import state_parts
from chaos.sim.runtime import SimRuntime, SimWorld
from chaos.sim.tables import SimBackend
from hadelay.codec import commands as c
from hadelay.codec.entries import encode_entry
from hadelay.codec.leasetokens import LEASE
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.changedrows import TABLES
from hadelay.ledger.state import Ledger
from hadelay.model import DEAD_HOURS, KEEP, REJECT, REPLACE
from hadelay.storage.identity import Identity
from hadelay.storage.store import Storage

HOUR = 3_600_000
START = 494_579 * HOUR - 20_000


class Entries:
    """An endless log: what clients and a leader might have proposed, from one seed. Kept, for replay."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"entries {seed}")
        self.log: list[bytes] = [b"", b""]
        self.now = START
        self.ids: list[int] = []
        self.filed: list[tuple[int, int]] = []
        self.seq = 0
        self.leases: list[tuple[int, ...]] = []

    def next(self, ledger: Ledger) -> bytes:
        """Made from what the uninterrupted state looks like."""
        rng = self.random
        self.now += rng.choice((0, 1, 30, 400, 400, 3000, 3000, 20_000, 900_000 if rng.random() < 0.2 else 0))
        kinds = [
            self._publish,
            self._publish,
            self._grant,
            self._grant,
            self._settle,
            self._settle,
            self._cancel,
            self._reschedule,
            self._other,
            self._maintenance,
        ]
        made = [m for kind in rng.sample(kinds, rng.randint(1, 3)) for m in [kind(ledger)] if m]
        entry = encode_entry(self.now, made or [c.encode_noop()])
        self.log.append(entry)
        return entry

    def _publish(self, ledger: Ledger) -> bytes:
        rng = self.random
        drafts = []
        for _ in range(rng.choice((1, 2, 10, 60))):
            relative = rng.random() < 0.6
            delay = rng.choice((-5, 0, 10, 2000, 30_000, 2 * HOUR, rng.randrange(30 * HOUR), 800 * 24 * HOUR))
            key = b"k%d" % rng.randrange(400) if rng.random() < 0.2 else None
            body = rng.randbytes(rng.choice((0, 10, 200, 2000)))
            drafts.append(
                c.Draft(
                    rng.choice(("a", "b", "ccc")),
                    delay if relative else self.now + delay,
                    relative,
                    0,
                    rng.choice((0, 0, 0, 500, 60_000, 3 * HOUR)),
                    b"",
                    body,
                    key,
                    *self._client_key(),
                )
            )
        return c.encode_publish(
            rng.choice(("n1", "n2")), drafts, b"r%d" % rng.randrange(300) if rng.random() < 0.3 else None
        )

    def _client_key(self) -> tuple[bytes | None, int, int]:
        rng = self.random
        if rng.random() < 0.7:
            return None, 0, 0
        return b"c%d" % rng.randrange(40), rng.choice((KEEP, REPLACE, REPLACE, REJECT)), rng.choice((0, 5000))

    def _reschedule(self, ledger: Ledger) -> bytes | None:
        rng = self.random
        hours = ledger.store.hours()
        if not hours:
            return None
        hour = rng.choice(hours)
        ids = [hour << 32 | rng.randrange(ledger.store.count(hour) + 2) for _ in range(rng.randint(0, 5))]
        keys = [(rng.choice(("a", "b", "none")), b"c%d" % rng.randrange(40)) for _ in range(rng.randint(0, 3))]
        if rng.random() < 0.2:
            return c.encode_cancel("n2", ids, keys)
        when_ms = rng.choice((0, 10, 3000, 5 * HOUR, 800 * 24 * HOUR))
        return c.encode_reschedule("n1", when_ms, True, ids, keys)

    def _grant(self, ledger: Ledger) -> bytes | None:
        rng = self.random
        hours = [h for h in ledger.store.hours() if ledger.store.count(h)]
        if not hours:
            return None
        hour = rng.choice(hours[:3])
        count = ledger.store.count(hour)
        indexes = sorted(rng.sample(range(count), min(count, rng.randint(1, 20))))
        self.seq += 1
        rows = np.array(indexes, np.uint32)
        for pos, index in enumerate(indexes):
            self.leases.append((1, self.seq, pos, hour, index))
        return c.encode_grant(
            c.Grant(
                1,
                self.seq,
                rng.choice((100, 3000, 60_000)),
                rng.choice(("x", "y")),
                rng.choice((b"", b"q%d" % self.seq)),
                "n1",
                np.full(len(rows), hour, np.uint32),
                rows,
            )
        )

    def _settle(self, ledger: Ledger) -> bytes | None:
        rng = self.random
        if not self.leases:
            return None
        rows = np.array(rng.sample(self.leases[-200:], min(len(self.leases[-200:]), rng.randint(1, 15))), LEASE)
        kind = rng.random()
        if kind < 0.5:
            return c.encode_ack("n1", rows)
        if kind < 0.7:
            return c.encode_nack("n2", rows, rng.choice((-1, 0, 500, 3 * HOUR)))
        if kind < 0.8:
            return c.encode_extend("n1", rows, 5000)
        return c.encode_expire(sorted(ledger.grants)[: rng.randint(1, 10)])

    def _cancel(self, ledger: Ledger) -> bytes | None:
        rng = self.random
        hours = ledger.store.hours()
        if not hours:
            return None
        hour = rng.choice(hours)
        return c.encode_cancel(
            "n1", [hour << 32 | rng.randrange(ledger.store.count(hour) + 2) for _ in range(rng.randint(1, 8))]
        )

    def _maintenance(self, ledger: Ledger) -> bytes:
        """What ends by itself, dies, is purged and comes back."""
        rng = self.random
        topic = rng.choice(("a", "b", "ccc"))
        dead = [h for h in ledger.store.hours() if h >= DEAD_HOURS] or [0]
        ids = [row for h in dead if h for row in ledger.store.entries(h, slice(None))["first_id"].tolist()]
        limits = {"max_attempts": rng.randrange(1, 3), "dead_retention_ms": HOUR, "backoff": [rng.randrange(5000)]}
        return rng.choice((
            c.encode_topic_put("b", limits | {"dead_letter": rng.choice(("keep", "ccc"))}),
            c.encode_topic_put("ccc", limits),
            c.encode_maintain(c.Job.TTL_EXPIRE, limit=20),
            c.encode_maintain(c.Job.TTL_EXPIRE, limit=500),
            c.encode_purge(topic, rng.randrange(8)),
            c.encode_redrive("n1", topic, rng.sample(ids, min(len(ids), 5))),
            c.encode_redrive("n2", topic, [], all=True, rate=rng.choice((None, 0.5))),
            c.encode_maintain(c.Job.REDRIVE, topic=topic, limit=3),
            c.encode_maintain(c.Job.REDRIVE, topic=topic),
            c.encode_maintain(c.Job.DROP_DEAD, rng.choice(dead), 4),
            c.encode_alerted(topic, rng.randrange(20)),
        ))  # fmt: skip

    def _other(self, ledger: Ledger) -> bytes:
        rng = self.random
        hours = [h for h in ledger.store.hours() if h < self.now // HOUR] or [0]
        return rng.choice((
            c.encode_topic_put("a", {"lease_ms": rng.randrange(1, 5000)}),
            c.encode_topic_delete(rng.choice(("b", "ccc")), True),
            c.encode_maintain(c.Job.SWEEP, limit=50),
            c.encode_maintain(c.Job.ROLL_FORWARD, rng.choice(hours), 20),
            c.encode_maintain(c.Job.RETIRE, rng.choice(hours), 100),
            c.encode_cursor(self.now // HOUR, self.now // 1000 % 3600, 0),
        ))  # fmt: skip


class Replica:
    def __init__(self, seed: int, name: str, entries: Entries) -> None:
        self.world = SimWorld(seed)
        self.world.on_crash = self._died
        self.disk = SimDisk(random.Random(f"{seed} {name}"))
        self.entries = entries
        self.open()

    def open(self) -> None:
        self.runtime = SimRuntime(self.world, "n1", self.disk)
        self.dead, self.ready = False, False
        self.runtime.call_soon(self._open)
        self.world.run_for(0.01)

    def _died(self, runtime: SimRuntime) -> None:
        self.dead = True
        runtime.crash()

    def _open(self) -> None:
        self.disk.makedirs("/data/g0")
        self.storage = Storage(
            self.disk, "/data/g0", self.runtime, Identity("c", 0, "n1", 1),
            backend=lambda path: SimBackend(self.disk, path), far_buffer_bytes=20_000,
        )  # fmt: skip
        self.ledger = Ledger(0, self.storage.hours, self.storage.tables, self.storage.names)
        if self.storage.core_blob:
            checkpoint.load(self.ledger, self.storage.core_blob, self.storage.core_rows(TABLES))
        self.next = max(2, self.storage.applied_index + 1)
        self.ready = True

    def catch_up(self) -> None:
        """Apply everything there is, with a checkpoint now and then."""
        self.runtime.call_soon(self._apply_all)
        self.world.run_for(0.0)

    def _apply_all(self) -> None:
        while self.next < len(self.entries.log):
            apply_entry(self.ledger, self.next, 1, self.entries.log[self.next])
            self.next += 1

    def checkpoint(self) -> None:
        self.runtime.call_soon(self._checkpoint)

    def _checkpoint(self) -> None:
        if not self.storage.checkpointing and self.next > 2:
            core, slices = checkpoint.begin(self.ledger)
            self.storage.checkpoint(self.next - 1, 1, core, slices, self._done)

    def _done(self, error: BaseException | None) -> None:
        if error is not None:
            self._died(self.runtime)


def run(seed: int, steps: int = 150, *, explain: bool = False) -> str:
    rng = random.Random(seed)
    entries = Entries(seed)
    steady, mortal = Replica(seed, "steady", entries), Replica(seed, "mortal", entries)
    lives = 1
    try:
        for step in range(steps):  # noqa: B007 (told on failure)
            entries.next(steady.ledger)
            steady.catch_up()
            if mortal.ready and not mortal.dead:
                mortal.catch_up()
                if rng.random() < 0.1:
                    mortal.checkpoint()
                mortal.world.run_for(rng.choice((0.0, 0.0003, 0.01)))
                if rng.random() < 0.05:
                    mortal.disk.crash_in = rng.randint(1, 60)
                if rng.random() < 0.02:
                    mortal.disk.fail_syncs = 1
            if mortal.dead or rng.random() < 0.06:
                mortal.runtime.crash()
                mortal.disk.fail_syncs = 0
                mortal.disk.power_cut() if rng.random() < 0.6 else mortal.disk.kill()
                lives += 1
                mortal.open()
                if mortal.dead or not mortal.ready:
                    continue
                mortal.catch_up()
                if rng.random() < 0.3:
                    compare(steady, mortal)
        if mortal.dead or not mortal.ready:
            mortal.disk.kill()
            mortal.open()
            mortal.catch_up()
        compare(steady, mortal)
    except Exception as error:
        if not explain:
            return f"seed {seed}: step {step}, life {lives}: {type(error).__name__}: {error}"
        raise
    return ""


def compare(one: Replica, two: Replica) -> None:
    two.disk.crash_in = two.disk.fail_syncs = 0
    if two.dead or not two.ready or two.next != one.next:
        return
    a, b = state_parts(one.ledger, one.storage), state_parts(two.ledger, two.storage)
    ledgercheck.check(one.ledger)
    for part in {**a, **b}:
        assert a.get(part) == b.get(part), f"{part} differs: {a.get(part)!r:.300} {b.get(part)!r:.300}"


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    bad = [text for text in (run(seed, explain=count == 1) for seed in range(first, first + count)) if text]
    print("\n".join(bad), f"\n{len(bad)} of {count} failed")
