"""Command `python -m chaos sim`: runs many seeds on all cores, and prints how to repeat a run that fails."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations, product
from pathlib import Path
from typing import NoReturn

import structlog
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from chaos.sim import raftsim
from chaos.sim.mutations import MUTATIONS, broken
from chaos.sim.nemesis import FAMILIES
from chaos.sim.run import Report, run_seed

#: Value of the option `--only` that leaves out all parts of the run.
NOTHING = "nothing"
#: Number of seeds per line of the log file.
_BLOCK = 100
#: Maximum number of runs to find a smaller failing run of one seed.
TRIES = 250


@dataclass
class Options:
    """What to simulate: options of `python -m chaos sim` for each seed. only: names of the parts of a run to do
    (workload.Parts); None: all."""

    mutation: str = ""
    only: frozenset[str] | None = None
    shrink: bool = False
    #: Name of a fault family that every run has; "": none.
    fault: str = ""
    #: True: simulate only Raft (chaos/sim/raftsim.py).
    raft: bool = False

    def run(self, seed: int) -> Report:
        with broken(self.mutation) if self.mutation else nullcontext() as bug:
            families = bug.families if bug is not None else {**FAMILIES, self.fault: 1.0} if self.fault else None
            sync = bug.sync if bug is not None else ""

            def run(only: frozenset[str] | None) -> Report:
                gc.collect()  # collect now, as automatic garbage collection is off during a run
                return run_seed(seed, families, only, sync)

            if self.raft or (bug is not None and bug.raft):
                gc.collect()
                return raftsim.run_seed(seed, bug.families if bug is not None and bug.raft else None)
            report = run(self.only)
            return shrink(report, run) if self.shrink and report.failure else report

    def replay(self, seed: int | str, parts: Sequence[str] | None = None) -> str:
        """Command that repeats the seed's run. parts: the parts to run, if others were left out."""
        command = f"python -m chaos sim --seed {seed}"
        if self.mutation:
            command += f" --mutation {self.mutation}"
        if self.fault:
            command += f" --fault {self.fault}"
        if self.raft:
            command += " --raft"
        return command if parts is None else f"{command} --only {','.join(parts) or NOTHING}"


@dataclass
class Totals:
    """Sums over the reports of several seeds."""

    seeds: int = 0
    simulated_s: float = 0.0
    #: Processor time of all runs, in seconds.
    wall_s: float = 0.0
    messages: int = 0
    hand_outs: int = 0
    #: Seed of each failed run → the promise that the run broke.
    failed: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    #: Pairs of fault families that struck in the same run, with the run's mode and size: "kill × pause, commit, 5".
    pairs: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, report: Report) -> Totals:
        failed = {str(report.seed): report.invariant} if report.failure else {}
        pairs = [f"{one} × {two}, {report.mode}, {report.size}" for one, two in combinations(report.struck, 2)]
        return cls(
            1, report.simulated_s, report.wall_s, report.messages, report.hand_outs, failed, Counter(report.counts),
            pairs,
        )  # fmt: skip

    def join(self, other: Totals) -> None:
        for name in ("seeds", "simulated_s", "wall_s", "messages", "hand_outs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.counts.update(other.counts)
        self.failed |= other.failed
        self.pairs = sorted({*self.pairs, *other.pairs})

    def coverage(self, *, raft: bool) -> str:
        """Text: number of pairs of fault families that struck in the same run, for each shape of a run. A shape is mode
        and size of the cluster; in runs of Raft alone, number of voters that one fault may stop, and size."""
        shapes = raftsim.SHAPES if raft else tuple(product(("commit", "interval"), (3, 5)))
        pairs = combinations(sorted(raftsim.FAULTS if raft else FAMILIES), 2)
        every = {f"{one} × {two}, {shape}, {size}" for (one, two), (shape, size) in product(pairs, shapes)}
        missing = sorted(every - set(self.pairs))
        some = f"; not {'; '.join(missing[:5])}{' …' if len(missing) > 5 else ''}" if missing else ""
        by = "voters down and size" if raft else "mode and size"
        return f"{len(every) - len(missing)} of {len(every)} pairs of faults, by {by}{some}"


class Log:
    """Log file with one line of JSON per block of seeds; seeds in the file are not run again."""

    def __init__(self, path: str) -> None:
        self.path = Path(path) if path else None
        self.blocks: dict[tuple[int, int], Totals] = {}
        if self.path is not None and self.path.exists():
            for text in self.path.read_text().splitlines():
                try:
                    block = json.loads(text)
                    self.blocks[block["first"], block["count"]] = Totals(**block["totals"])
                except (ValueError, TypeError, KeyError):
                    continue  # ignore a truncated line: its seeds are run again

    def write(self, block: range, totals: Totals) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                line = {"first": block.start, "count": len(block), "totals": vars(totals)}
                file.write(json.dumps(line) + "\n")


def main(argv: Sequence[str]) -> int:
    """Exit code of `python -m chaos sim …`; invalid options end the process with a message."""
    parameter = Parameter(negative="")
    app = App(name="python -m chaos sim", help_format="plaintext", default_parameter=parameter, version_flags=[])
    app.default(sim)
    code: int = app(list(argv), result_action="return_value")
    return code


def sim(
    *, seed: int = 1, count: int = 1, jobs: int = 0, verbose: bool = False, mutation: str = "", log: str = "",
    shrink: bool = False, only: str = "", fault: str = "", raft: bool = False,
) -> int:  # fmt: skip
    """Run seeds of the simulator: real nodes with simulated disks, network and clocks. The exit code is 1 if a seed
    fails.

    Parameters
    ----------
    seed
        The first one. The same seed gives the same run.
    count
        How many, counting up.
    jobs
        Processes; 0 is one per core.
    verbose
        A line per seed.
    mutation
        A bug to put in first, to see it noticed.
    log
        A file for the results: seeds that are in it are not run again, so a long run can be interrupted.
    shrink
        Of a seed that fails, look for a smaller run that breaks the same promise: with fewer faults, fewer messages and
        fewer clients. Some minutes at most.
    only
        The parts of the run that are done, as `--shrink` prints them; `nothing` for none.
    fault
        A kind of fault that every run has, such as `members`; by themselves runs draw theirs.
    raft
        Raft alone, with a machine that only remembers: a simulated second costs a fifth. Without --fault, --shrink and
        --only.
    """
    if refusal := _refusal(mutation, fault, raft and bool(fault or shrink or only)):
        print(refusal, file=sys.stderr)
        return 2
    parts = frozenset(filter(None, only.replace(NOTHING, "").split(","))) if only else None
    options = Options(mutation, parts, shrink, fault, raft)
    started = time.perf_counter()
    known, totals = Log(log), Totals()
    blocks = [range(first, min(first + _BLOCK, seed + count)) for first in range(seed, seed + count, _BLOCK)]
    for block in blocks:
        if (done := known.blocks.get((block.start, len(block)))) is not None:
            totals.join(done)
    before = totals.seeds
    missing = [block for block in blocks if (block.start, len(block)) not in known.blocks]
    reports = run_seeds([one for block in missing for one in block], jobs, options)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    unseen = count == 1 or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=unseen) as progress:
        task = progress.add_task("seeds", total=count, completed=before)
        for block in missing:
            here = Totals()
            for _ in block:
                report = next(reports)
                here.join(Totals.of(report))
                if verbose or count == 1:
                    print(line(report), flush=True)
                if report.failure:
                    print(explain(report, options), flush=True)
                failed = len(totals.failed) + len(here.failed)
                progress.update(task, advance=1, description=f"seeds, {failed} failed")
            known.write(block, here)
            totals.join(here)
    _print_summary(totals, before, time.perf_counter() - started, log)
    if not mutation and count > 1:
        print(f"  {totals.coverage(raft=raft)}")
    for number, invariant in totals.failed.items():
        print(f"failed: seed {number}: {invariant}: {options.replay(number)}")
    return 1 if totals.failed else 0


def _refusal(mutation: str, fault: str, mixed: bool) -> str:
    """Reason why the options cannot be combined; "" if they can."""
    if mutation and mutation not in MUTATIONS:
        return f"there is no mutation {mutation!r}: {', '.join(MUTATIONS)}"
    if fault and fault not in FAMILIES:
        return f"--fault: there is no {fault!r}: {', '.join(FAMILIES)}"
    if fault and mutation:
        return "--fault: a mutation has faults of its own"
    return "--raft goes without --fault, --shrink and --only" if mixed else ""


def _print_summary(totals: Totals, before: int, wall: float, log: str) -> None:
    if before:
        print(f"{before} of these seeds were run before, see {log}")
    print(
        f"{totals.seeds} seeds, {len(totals.failed)} failed: {totals.simulated_s:.0f} simulated seconds, "
        f"{totals.messages} messages, {totals.hand_outs} hand-outs, {totals.wall_s:.0f} s of computing; "
        f"now {wall:.1f} s, {(totals.seeds - before) / wall:.1f} seeds/s"
    )
    print("  " + ", ".join(f"{name} {n}" for name, n in sorted(totals.counts.items())))


def run_seeds(seeds: Sequence[int], jobs: int = 0, options: Options | None = None) -> Iterator[Report]:
    """Run seeds in several processes; yields their reports in the order of the seeds."""
    jobs = jobs or os.cpu_count() or 1
    options = options or Options()
    if jobs == 1 or len(seeds) <= 1:
        _quiet()
        yield from map(options.run, seeds)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(seeds)), initializer=_quiet) as pool:
        yield from pool.imap(options.run, seeds, chunksize=4)


def _drop(*_: object) -> NoReturn:
    raise structlog.DropEvent


def _quiet() -> None:
    # Switch the garbage collector off: most objects live until the end of a run, and collecting takes a tenth of the
    # time. Freezing exempts imported modules from later collections.
    gc.disable()
    gc.freeze()
    logging.disable(logging.CRITICAL)
    structlog.configure(processors=[_drop])


def line(report: Report) -> str:
    return (
        f"seed {report.seed}: {report.failure or 'ok'} · {report.simulated_s:.1f} s in {report.wall_s:.2f} s · "
        f"{report.messages} messages, {report.hand_outs} hand-outs, {report.entries} entries, {report.terms} terms, "
        f"drained after {report.drained_s:.1f} s · trace {report.trace:08x}"
    )


def explain(report: Report, options: Options | None = None) -> str:
    options = options or Options()
    parts = report.parts if options.shrink else None if options.only is None else sorted(options.only)
    head = f"\n=== seed {report.seed}: {report.failure}"
    return "\n".join([head, *report.lines, f"replay: {options.replay(report.seed, parts)}", ""])


def shrink(whole: Report, run: Callable[[frozenset[str]], Report], tries: int = TRIES) -> Report:
    """Find the smallest run that breaks the same promise as `whole`; returns its report. run(only): repeats the seed
    with only these parts.

    Delta debugging (Zeller and Hildebrandt, 2002) over the parts of a run (workload.Parts): strikes of the nemesis
    (`f3`), batches of a producer (`p1.7`), consumers but the first (`c2`), acts of the administrator (`admin.4`). What
    a part draws is its own, so the others stay what they were. What the network draws is not: a part that is not the
    cause may yet be needed for the order in which things happen.
    """
    best = whole

    def breaks(parts: list[str]) -> bool:
        nonlocal best, tries
        tries -= 1
        if tries < 0:
            return False
        report = run(frozenset(parts))
        if _promise(report) != _promise(whole):
            return False
        # Drop names of parts that do not occur any more in the smaller run.
        report.parts = [part for part in report.parts if part in parts]
        best = report
        return True

    parts = list(whole.parts)
    if breaks([]):
        return best
    for kind in sorted({_kind(part) for part in parts}):
        some = [part for part in parts if _kind(part) != kind]
        if some != parts and breaks(some):
            parts = list(best.parts)
    size = max(1, len(parts) // 2)
    while parts and tries > 0:
        at = 0
        while at < len(parts):
            some = parts[:at] + parts[at + size :]
            if some and breaks(some):
                parts = list(best.parts)
            else:
                at += size
        if size == 1:
            break
        size = (size + 1) // 2
    return best


def _kind(part: str) -> str:
    """Kind of a part of a run, such as strikes of the nemesis or acts of one client: shrinking first tries to leave out
    all parts of a kind."""
    return re.sub(r"\.?\d*$", "", part) if part.startswith(("f", "admin")) else part.partition(".")[0]


def _promise(report: Report) -> str:
    """Name of the promise that the run broke, or the type of its unexpected error."""
    return report.failure.partition("(")[0] if report.invariant == "error" else report.invariant
