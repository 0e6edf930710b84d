"""What filing, reading and checkpoints cost: `python tests/storage/bench_storage.py DIRECTORY [hours] [messages]`.

First it files messages of 222 bytes over that many hours, through checkpoints, and opens the directory again; RssAnon
is against the start. Then medians of one call each, in µs of CPU (the kernel's included). DIRECTORY is emptied.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from support import NOW, Loop, checkpoint, events, messages, open_storage

from hadelay.platform.disk import Disk

RUNS = 300


def anon_mb() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("RssAnon"))


def median_us(what: str, run: Callable[[Any], Any], inputs: list[Any]) -> None:
    took = []
    for one in inputs:
        start = time.thread_time()
        run(one)
        took.append(time.thread_time() - start)
    print(f"{what:48} {sorted(took)[len(took) // 2] * 1e6:9.1f} µs")


def calls(directory: str) -> None:
    loop = Loop()
    storage = open_storage(Disk(), directory, loop, far_buffer_bytes=256 << 20)
    store, rng = storage.hours, np.random.default_rng(1)
    for n in (1, 10, 30, 100, 1000):
        near = [messages(NOW, sizes=[222] * n, seed=seed) for seed in range(RUNS)]
        median_us(f"append {n} to a near hour", lambda args: store.append(*args), near)
    for n in (30, 1000):
        far = [messages(rng.integers(NOW + 5, NOW + 17_520, n), sizes=[222] * n, seed=s) for s in range(RUNS)]
        median_us(f"append {n} over two years", lambda args: store.append(*args), far)
    picks = [rng.integers(0, store.count(NOW), 100) for _ in range(RUNS)]
    median_us("100 entries, verified", lambda indexes: store.entries(NOW, indexes), picks)
    median_us("100 entries, not verified", lambda indexes: store.entries(NOW, indexes, verify=False), picks)
    median_us("1 record, verified", lambda _: store.record(NOW, 0, 270, verify=True), picks)
    median_us("append 100 events", lambda rows: store.append_events(NOW, rows), [events([1] * 100) for _ in picks])
    storage.close()


def checkpoints(directory: str, hours: int, total: int) -> None:
    loop = Loop()
    storage = open_storage(Disk(), directory, loop, far_buffer_bytes=64 << 20)
    template, rng = messages(NOW, sizes=[222] * 1000), np.random.default_rng(1)
    before, peak, count, cpu = anon_mb(), 0, 0, 0.0
    for _ in range(0, total, 1000):
        rows, blob, headers = (part.copy() for part in template[1:])
        rows["second"] = rng.integers(0, 3600, 1000)
        chosen = rng.integers(NOW, NOW + hours, 1000)
        start = time.process_time()
        storage.hours.append(chosen, rows, blob, headers)
        if storage.hours.far_bytes >= 64 << 20:
            count += 1
            peak = max(peak, anon_mb())
            checkpoint(storage, loop, count)
            peak = max(peak, anon_mb())
        cpu += time.process_time() - start
    checkpoint(storage, loop, count + 1)
    storage.close()
    print(f"{total:,} messages over {hours:,} hours: {cpu / total * 1e6:.2f} µs of CPU each, {count + 1} checkpoints")
    print(f"RssAnon + {peak - before} MB at its peak, + {anon_mb() - before} MB at the end")
    start = time.perf_counter()
    open_storage(Disk(), directory, loop).close()
    print(f"opened again in {(time.perf_counter() - start) * 1000:.0f} ms")


def main() -> None:
    directory = sys.argv[1]
    hours, total = (int(arg) for arg in (sys.argv[2:] + ["48", "1000000"][len(sys.argv) - 2 :])[:2])
    for part in (lambda: checkpoints(directory, hours, total), lambda: calls(directory)):
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        part()
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
