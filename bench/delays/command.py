"""`python -m bench delays`: run the workloads on all contenders, and write results.json, plots and the page.

--quick shows in minutes that everything works; its figures say little. The full run takes hours.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

from bench.delays import field
from bench.delays.contenders import CONTENDERS
from bench.delays.page import write_page
from bench.delays.plots import plots
from bench.delays.run import QUICK, Run, Sizes
from bench.delays.summary import Results, merged, show
from bench.delays.workloads import WORKLOADS
from bench.result import machine
from chaos.freeports import free_ports

#: Ports that one contender may use.
_PORTS = 24


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench delays", description=__doc__)
    made.add_argument("contenders", nargs="*", metavar="CONTENDER", help=f"{', '.join(CONTENDERS)}; default: all")
    made.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated; default: all, %(default)s")
    made.add_argument("--quick", action="store_true", help="small sizes and one round: does it work at all")
    made.add_argument("--rounds", type=int, help="rounds, in which the contenders take turns; default: 3, or 1")
    made.add_argument("--out", type=Path, default=Path("bench/out/delays"), help="where results and plots go")
    made.add_argument("--data", type=Path, help="directory on the disk that is measured; default: the temporary one")
    made.add_argument("--output", choices=("table", "json"), default="table", help="what goes to standard output")
    made.add_argument("--keep", action="store_true", help="keep histories and logs of the runs")
    made.add_argument("--install", action="store_true", help="install the contenders' libraries, and end")
    made.add_argument(
        "--page",
        type=Path,
        nargs="+",
        metavar="RESULTS",
        help="write the page from files results.json, of which the later ones replace runs of earlier ones; and end",
    )
    made.add_argument("--note", default="", help="with --page: a sentence about how the runs were made")
    for size in dataclasses.fields(Sizes):
        kind = int if size.type == "int" else float
        option = f"--{size.name.replace('_', '-')}"
        made.add_argument(
            option, dest=size.name, type=kind, help=f"default: {size.default}, quick: {_quick(size.name)}"
        )
    return made


def _quick(name: str) -> float:
    return float(getattr(QUICK, name))


def main(arguments: list[str]) -> int:
    made = parser()
    chosen = made.parse_args(arguments)
    if chosen.install:
        field.install()
        return 0
    if chosen.page:
        write_page({**merged([json.loads(path.read_text()) for path in chosen.page]), "note": chosen.note})
        return 0
    names, workloads = chosen.contenders or list(CONTENDERS), chosen.workloads.split(",")
    if unknown := [name for name in names if name not in CONTENDERS]:
        made.error(f"no contender {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    if unknown := [name for name in workloads if name not in WORKLOADS]:
        made.error(f"no workload {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    given = {size.name: getattr(chosen, size.name) for size in dataclasses.fields(Sizes)}
    sizes = dataclasses.replace(QUICK if chosen.quick else Sizes(), **{k: v for k, v in given.items() if v is not None})
    # Ended from outside, the command ends the servers too: SystemExit passes through `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    results = _begin(names, sizes, f"python -m bench delays {' '.join(arguments)}".strip())
    if not results["contenders"]:
        made.error("; ".join(f"{name}: {why}" for name, why in results["left_out"].items()))
    rounds = chosen.rounds or (1 if chosen.quick else 3)
    _measure(results, workloads, sizes, rounds, chosen)
    plots(results, chosen.out)
    if chosen.output == "json":
        print(json.dumps(results))
    else:
        show(results)
    return int(any(run["error"] and not run["error"].startswith("not run") for run in results["runs"]))


def _begin(names: list[str], sizes: Sizes, command: str) -> Results:
    left_out = {name: why for name in names if (why := CONTENDERS[name].missing())}
    present = {name: CONTENDERS[name] for name in names if name not in left_out}
    described = {name: one.described() for name, one in present.items()}
    about = {**machine(), "platform": platform.platform(terse=True)}
    sized = dataclasses.asdict(sizes)
    return {"machine": about, "command": command, "sizes": sized, "contenders": described, "left_out": left_out,
            "runs": []}  # fmt: skip


def _measure(
    results: Results, workloads: list[str], sizes: Sizes, rounds: int, chosen: argparse.Namespace
) -> None:  # fmt: skip
    """Contenders take turns in each round of each workload, and another one begins each round."""
    chosen.out.mkdir(parents=True, exist_ok=True)
    data = Path(tempfile.mkdtemp(prefix="hadelay-delays-", dir=chosen.data))
    data.chmod(0o711)  # PostgreSQL runs as another user if this is root
    names = list(results["contenders"])
    try:
        for number in range(rounds):
            for workload in workloads:
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    print(f"round {number + 1}, {workload}, {name}", file=sys.stderr, flush=True)
                    one = _one(name, workload, sizes, data / f"{number}-{workload}-{name}")
                    results["runs"].append({"contender": name, "workload": workload, "round": number, **one})
                    (chosen.out / "results.json").write_text(json.dumps(results, indent=1))
                    if not chosen.keep:
                        shutil.rmtree(data / f"{number}-{workload}-{name}", ignore_errors=True)
    finally:
        if not chosen.keep:
            shutil.rmtree(data, ignore_errors=True)
        else:
            print(f"histories and logs: {data}", file=sys.stderr)


def _one(name: str, workload: str, sizes: Sizes, directory: Path) -> Results:
    load, began, what = os.getloadavg()[0], time.monotonic(), WORKLOADS[workload]
    run, error = Run.make(name, sizes, directory, free_ports(_PORTS), short=what.short), ""
    longest = run.contender.longest_delay_s
    if what.weeks and longest is not None:
        error = f"not run: the longest delay is {longest / 60:g} minutes"
    elif what.measures_rate and run.contender.waits_in_order:
        error = "not run: messages that measure the rate of publishes, due in a day, hold up all others"
    if error:
        return {"figures": {}, "late_ms": [], "error": error, "load": load, "seconds": 0.0}
    try:
        run.start()
        what.run(run)
    except Exception as failure:  # one run must not take the others' hours with it
        traceback.print_exc()
        error = f"{type(failure).__name__}: {failure}"
    finally:
        try:
            run.stop()
        except (OSError, subprocess.SubprocessError, AttributeError) as failure:
            error = error or f"the servers did not stop: {failure}"
    took = time.monotonic() - began
    return {"figures": run.figures, "late_ms": run.late_ms, "error": error, "load": load, "seconds": took}
