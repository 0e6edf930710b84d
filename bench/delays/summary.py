"""What all runs say: medians over rounds, ratios to hadelay within a round, and the terminal's table."""

from __future__ import annotations

import statistics
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.delays.contenders import CONTENDERS
from bench.delays.workloads import UNITS, WORKLOADS
from bench.report import number

#: The contender that ratios refer to.
BASE = "hadelay"
#: Figures of which more is better; of all others less is.
MORE_IS_BETTER = {"publish rate", "cancel rate", "published"}
Results = dict[str, Any]


def merged(several: list[Results]) -> Results:
    """One result of several, in their order; a run replaces an earlier one of its contender, workload and round."""
    last, runs = several[-1], dict[tuple[str, str, int], dict[str, Any]]()
    for one in several:
        if one["sizes"] != last["sizes"]:
            raise ValueError("the results have different sizes")
        runs.update({(run["contender"], run["workload"], run["round"]): run for run in one["runs"]})
    command = "; ".join(dict.fromkeys(one["command"] for one in several))
    contenders = {name: CONTENDERS[name].described() for one in several for name in one["contenders"]}
    left_out = {n: why for one in several for n, why in one["left_out"].items() if n not in contenders}
    ordered = {name: contenders[name] for name in CONTENDERS if name in contenders}
    return {**last, "command": command, "contenders": ordered, "left_out": left_out, "runs": list(runs.values())}


def names(results: Results, workload: str) -> list[str]:
    """Contenders with a run of this workload, in the order of the table."""
    return [name for name in results["contenders"] if any(_of(results, workload, name))]


def _of(results: Results, workload: str, name: str) -> list[dict[str, Any]]:
    return [run for run in results["runs"] if (run["workload"], run["contender"]) == (workload, name)]


def errors(results: Results, workload: str, name: str) -> list[str]:
    return [run["error"] for run in _of(results, workload, name) if run["error"]]


def median(results: Results, workload: str, name: str, figure: str) -> float | None:
    values = [run["figures"][figure] for run in _of(results, workload, name) if figure in run["figures"]]
    # A violation in any round counts; the median of lost messages would hide it.
    if figure in ("lost", "early", "doubled", "uncancelled", "unknown"):
        return max(values, default=None)
    return statistics.median(values) if values else None


def ratio(results: Results, workload: str, name: str, figure: str) -> float | None:
    """Median over rounds of the contender's figure divided by hadelay's figure of the same round."""
    base = {run["round"]: run["figures"] for run in _of(results, workload, BASE)}
    pairs = [(run["figures"], base.get(run["round"], {})) for run in _of(results, workload, name)]
    ratios = [own[figure] / to[figure] for own, to in pairs if figure in own and to.get(figure)]
    return statistics.median(ratios) if ratios else None


def table(results: Results, workload: str) -> list[list[str]]:
    """Head and lines, a line per contender."""
    figures = WORKLOADS[workload].figures
    lines = [["contender", *(f"{figure}, {UNITS[figure]}" if figure in UNITS else figure for figure in figures)]]
    for name in names(results, workload):
        values = [median(results, workload, name, figure) for figure in figures]
        if wrong := errors(results, workload, name):
            lines.append(
                [
                    name,
                    wrong[0][:80] if wrong[0].startswith("not run") else f"failed: {wrong[0][:80]}",
                    *[""] * (len(figures) - 1),
                ]
            )
        else:
            lines.append([name, *("–" if value is None else number(value) for value in values)])
    return lines


def losses(results: Results) -> list[str]:
    """Figures in which another contender beats hadelay, one sentence each."""
    found = []
    for workload, what in WORKLOADS.items():
        for figure in what.figures:
            ours = median(results, workload, BASE, figure)
            others = {n: median(results, workload, n, figure) for n in names(results, workload) if n != BASE}
            values = {n: v for n, v in others.items() if v is not None and not errors(results, workload, n)}
            if ours is None or not values or figure in ("published", "redelivered"):
                continue
            sign = -1 if figure in MORE_IS_BETTER else 1
            best = min(values, key=lambda n: sign * values[n])
            if sign * values[best] < sign * ours:
                better = [n for n in values if sign * values[n] < sign * ours]
                unit = UNITS.get(figure, "")
                found.append(
                    f"({what.letter}) {figure}: hadelay {number(ours, unit)}, {best} {number(values[best], unit)}; "
                    f"{len(better)} of {len(values)} contenders are better"
                )
    return found


def show(results: Results) -> None:
    console = Console(width=150)
    for workload, what in WORKLOADS.items():
        head, *lines = table(results, workload)
        if not lines:
            continue
        grid = Table(box=SIMPLE_HEAD, pad_edge=False, title=f"({what.letter}) {what.title}", title_justify="left")
        for n, name in enumerate(head):
            grid.add_column(name, justify="right" if n else "left")
        for line in lines:
            grid.add_row(*line)
        console.print(grid)
    for name, why in results["left_out"].items():
        console.print(f"left out: {name}: {why}")
