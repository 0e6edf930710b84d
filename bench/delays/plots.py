"""Plots of a run: lateness as a distribution per contender, and bars of what differs most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.delays.summary import BASE, Results, errors, median, names
from bench.delays.workloads import UNITS, WORKLOADS

#: Workloads whose lateness is drawn; figures that are drawn as bars, by workload.
_LATENESS = ("steady", "burst", "server")
_BARS = {
    "burst": ("drained", "publish rate"), "pending": ("memory", "worker memory", "disk"),
    "server": ("after kill max", "doubled", "lost"), "worker": ("all again", "lost"), "visibility": ("doubled", "lost"),
}  # fmt: skip


def plots(results: Results, directory: Path) -> dict[str, list[str]]:
    """Draw into `directory`; names of the files by workload."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "delays", "svg.fonttype": "none", "font.size": 9})
    made: dict[str, list[str]] = {}
    for workload in WORKLOADS:
        if not [name for name in names(results, workload) if not errors(results, workload, name)]:
            continue
        if workload in _LATENESS:
            made.setdefault(workload, []).append(_lateness(results, workload, directory))
        if workload in _BARS:
            made.setdefault(workload, []).append(_bars(results, workload, directory))
    return made


def _save(figure: Any, path: Path) -> str:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return path.name


def _lateness(results: Results, workload: str, directory: Path) -> str:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4))
    for n, name in enumerate(results["contenders"]):
        runs = [r for r in results["runs"] if (r["workload"], r["contender"]) == (workload, name) and r["late_ms"]]
        if runs:
            late = [max(0.1, value) for value in runs[len(runs) // 2]["late_ms"]]
            share = [k / (len(late) - 1) for k in range(len(late))]
            style = ("-", "--", ":")[n // 7 % 3]
            axes.plot(late, share, style, label=name, linewidth=2.6 if name == BASE else 1.3)
    axes.set(xscale="log", xlabel="lateness, ms", ylabel="share of messages", ylim=(0, 1))
    axes.set_title(f"({WORKLOADS[workload].letter}) lateness: {WORKLOADS[workload].title}", fontsize=9, loc="left")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return _save(figure, directory / f"delays-{workload}-lateness.svg")


def _bars(results: Results, workload: str, directory: Path) -> str:
    from matplotlib import pyplot

    figures = _BARS[workload]
    shown = [name for name in names(results, workload) if not errors(results, workload, name)]
    figure, panels = pyplot.subplots(
        1, len(figures), figsize=(3.2 * len(figures) + 1.5, 0.28 * len(shown) + 1.2), squeeze=False, sharey=True
    )
    for panel, what in zip(panels[0], figures, strict=True):
        values = [median(results, workload, name, what) or 0.0 for name in shown]
        bars = panel.barh(shown, values, color=["#c0392b" if name == BASE else "#3b6ea5" for name in shown], height=0.6)
        panel.bar_label(bars, [f"{value:,.3g}" for value in values], padding=2, fontsize=7)
        panel.set_xlabel(f"{what}, {UNITS[what]}" if what in UNITS else what)
        panel.spines[["top", "right"]].set_visible(False)
        panel.margins(x=0.25)
    panels[0][0].invert_yaxis()
    return _save(figure, directory / f"delays-{workload}.svg")
