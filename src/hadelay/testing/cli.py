"""`hadelay sim`: run seeds, on all cores, and say how to run a failing one again."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator

from hadelay.testing.run import Report, run_seed


def main(seed: int = 1, count: int = 1, jobs: int = 0, verbose: bool = False) -> int:
    """Run seeds seed … seed + count - 1. Returns 0, or 1 when a promise was broken (the story is printed)."""
    started = time.perf_counter()
    failed: list[Report] = []
    totals: Counter[str] = Counter()
    simulated = messages = hand_outs = done = 0.0
    for report in run_seeds(range(seed, seed + count), jobs):
        done += 1
        simulated += report.simulated_s
        messages += report.messages
        hand_outs += report.hand_outs
        totals.update(report.counts)
        if verbose or count == 1:
            print(line(report), flush=True)
        if report.failure:
            failed.append(report)
            print(story(report), flush=True)
    wall = time.perf_counter() - started
    print(
        f"{done:.0f} seeds, {len(failed)} failed: {simulated:.0f} simulated seconds in {wall:.1f} s "
        f"({done / wall:.1f} seeds/s), {messages:.0f} messages, {hand_outs:.0f} hand-outs"
    )
    print("  " + ", ".join(f"{name} {n}" for name, n in sorted(totals.items())))
    for report in failed:
        print(f"failed: seed {report.seed}: {report.invariant}: hadelay sim --seed {report.seed}")
    return 1 if failed else 0


def run_seeds(seeds: range | list[int], jobs: int = 0) -> Iterator[Report]:
    """Reports in the order of the seeds; every process runs its seeds one after another."""
    jobs = jobs or os.cpu_count() or 1
    if jobs == 1 or len(seeds) == 1:
        _quiet()
        yield from map(_one, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(seeds)), initializer=_quiet) as pool:
        yield from pool.imap(_one, seeds, chunksize=4)


def _one(seed: int) -> Report:
    report = run_seed(seed)
    gc.collect()
    return report


def _quiet() -> None:
    # A run makes a lot of garbage that only ends with it; collecting in between costs a tenth of the time. What was
    # imported stays.
    gc.disable()
    gc.freeze()
    logging.disable(logging.CRITICAL)


def line(report: Report) -> str:
    return (
        f"seed {report.seed}: {report.failure or 'ok'} · {report.simulated_s:.1f} s in {report.wall_s:.2f} s · "
        f"{report.messages} messages, {report.hand_outs} hand-outs, {report.entries} entries, {report.terms} terms, "
        f"drained after {report.drained_s:.1f} s · trace {report.trace:08x}"
    )


def story(report: Report) -> str:
    head = f"\n=== seed {report.seed}: {report.failure}"
    return "\n".join([head, *report.story, f"replay: hadelay sim --seed {report.seed}", ""])
