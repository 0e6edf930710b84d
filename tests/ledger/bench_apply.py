"""What apply costs, over real files: PYTHONPATH=src:. python tests/ledger/bench_apply.py [million messages]

Medians of microseconds per entry of one command. With a number: memory after so many million pending messages.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Grant
from hadelay.codec.entries import encode_entry
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.describe import describe
from hadelay.model import HOUR_MS, pack_id
from hadelay.platform.disk import Disk
from hadelay.storage.hours import DiskHourStore
from hadelay.version import FEATURE_LEVEL
from tests.ledger.world import START_HOUR, START_MS, draft, leases
from tests.memory import MemoryNames, MemoryTables


class Bench:
    def __init__(self, directory: str) -> None:
        self.ledger = Ledger(0, DiskHourStore(Disk(), directory, 0), MemoryTables(), MemoryNames())
        self.index = 0

    def apply(self, encoded: bytes, now: int = 0) -> Any:
        self.index += 1
        return apply_entry(self.ledger, self.index, 1, encode_entry(START_MS + now, [encoded]))[0]

    def measure(self, what: str, encoded: Iterable[bytes], now: int = 0) -> None:
        took = []
        for command in list(encoded):
            start = time.perf_counter()
            self.apply(command, now)
            took.append(time.perf_counter() - start)
        print(f"{what:34} {np.median(took) * 1e6:8.0f} µs   p95 {np.quantile(took, 0.95) * 1e6:8.0f}")


def publish(rows: int, run: int, key: bytes = b"", step_ms: int = 37, span_ms: int = 60_000) -> bytes:
    delays = [(n * step_ms + run) % span_ms for n in range(rows)]
    idem: Callable[[int], bytes | None] = lambda n: b"%s %d %d" % (key, run, n) if key else None  # noqa: E731
    return commands.encode_publish("n1", [draft("t", d, b"x" * 200, idem=idem(n)) for n, d in enumerate(delays)])


def grant(term: int, seq: int, first: int, count: int) -> bytes:
    indexes = np.arange(first, first + count)
    hours = np.full(count, START_HOUR)
    return commands.encode_grant(Grant(term, seq, 30_000, "c", b"%d %d" % (term, seq), "n1", hours, indexes))


def lease_rows(term: int, seq: int, first: int, count: int) -> np.ndarray:
    return leases(*((term, seq, n, START_HOUR, first + n) for n in range(count)))


def speed(bench: Bench) -> None:
    bench.ledger.level = FEATURE_LEVEL
    bench.apply(commands.encode_topic_put("t", {"group_concurrency": 2}))
    bench.apply(publish(1, 0))
    for rows in (1000, 100, 30, 10, 1):
        bench.measure(f"PUBLISH {rows}", (publish(rows, run) for run in range(200)))
    bench.measure("PUBLISH 30, each with a key", (publish(30, run, b"a") for run in range(200)))
    far = 1000 * HOUR_MS
    bench.measure("PUBLISH 1000 over 1000 hours", (publish(1000, run, b"", HOUR_MS, far) for run in range(50)))
    grouped = ([replace(draft("t", 0, b"x" * 200), group=run * 1000 + n) for n in range(1000)] for run in range(50))
    bench.measure("PUBLISH 1000, each in a group", (commands.encode_publish("n1", drafts) for drafts in grouped))
    now = 70_000
    bench.measure("GRANT 100", (grant(1, q, q * 100, 100) for q in range(300)), now)
    bench.measure(
        "ACK 100 of one grant", (commands.encode_ack("n1", lease_rows(1, q, q * 100, 100)) for q in range(100))
    )
    four = [np.concatenate([lease_rows(1, q + n, (q + n) * 100, 25) for n in range(4)]) for q in range(100, 200, 4)]
    bench.measure("ACK 100 of four grants", (commands.encode_ack("n1", rows) for rows in four))
    bench.measure("NACK 100", (commands.encode_nack("n1", lease_rows(1, q, q * 100, 100)) for q in range(200, 300)))
    bench.measure("GRANT 1", (grant(2, q, 40_000 + q, 1) for q in range(300)), now)
    bench.measure("ACK 1", (commands.encode_ack("n1", lease_rows(2, q, 40_000 + q, 1)) for q in range(300)))
    cancels = (commands.encode_cancel("n1", [pack_id(0, START_HOUR, 50_000 + n)]) for n in range(300))
    bench.measure("CANCEL 1", cancels)
    start = time.perf_counter()
    for n in range(100):
        describe(bench.ledger, pack_id(0, START_HOUR, 97 * n))
    print(f"{'GET of what was settled':34} {(time.perf_counter() - start) * 1e4:8.0f} µs")


def memory(bench: Bench, millions: float) -> None:
    """Pending over 48 hours; the far buffer is written out as a checkpoint would."""

    def anonymous_mb() -> float:
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024

    span = 48 * HOUR_MS
    before = 0.0
    for run in range(int(millions * 1000)):
        bench.apply(publish(1000, run, b"", span // 1000, span))
        if run % 100 == 99:
            while not bench.ledger.store.write_some():  # type: ignore[attr-defined]
                pass
            bench.ledger.store.sample()  # type: ignore[attr-defined]
        if run == 9:
            before = anonymous_mb()
    core, rows = checkpoint.dump(bench.ledger)
    print(f"{millions} M pending: RssAnon {anonymous_mb():.0f} MB, {before:.0f} MB at 10 thousand")
    sizes = {table.decode(): sum(len(value) for _, value in found) for table, found in rows.items()}
    print(f"state: {len(core)} bytes, rows {sizes}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(directory)
        if len(sys.argv) > 1:
            memory(bench, float(sys.argv[1]))
        else:
            speed(bench)
