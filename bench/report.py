"""The report: the table on the terminal, and report.md and report.html with plots in the output directory."""

from __future__ import annotations

import html
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.result import Row, Setup, Target, machine

Line = tuple[str, str, str, str, str, str]
HEADS = ("row", "figure", "measured", "must", "goal", "verdict")


def number(value: float, unit: str = "") -> str:
    text = f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
    return f"{text} {unit}".strip()


def _bound(target: Target, value: float | None) -> str:
    return "" if value is None else f"{'≤' if target.at_most else '≥'} {number(value)}"


def lines(rows: list[Row]) -> list[Line]:
    found: list[Line] = []
    for row in rows:
        aimed = {target.figure for target in row.targets}
        for target, value, verdict in row.verdicts():
            measured = "" if value is None else number(value, row.units.get(target.figure, ""))
            bounds = _bound(target, target.limit), _bound(target, target.goal)
            found.append((row.name, target.figure, measured, *bounds, verdict))
        for figure in row.samples:
            if figure not in aimed:
                found.append((row.name, figure, number(row.median(figure) or 0.0, row.units[figure]), "", "", ""))
        found += [(row.name, note, "", "", "", "VOID" if note.startswith("VOID") else "") for note in row.notes]
    return found


def write_report(rows: list[Row], out: Path, setup: Setup) -> int:
    """Returns the exit code: 1 when anything is void, or missed by more than 20 %."""
    table = lines(rows)
    _print(table)
    plots = _plots(rows, out)
    (out / "report.md").write_text(_markdown(rows, table, plots, setup))
    (out / "report.html").write_text(_page(rows, table, plots, setup))
    print(f"report: {out / 'report.html'}, {out / 'report.md'}")
    return int(any(line[5] in ("VOID", "MISSED") for line in table))


def _print(table: list[Line]) -> None:
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in HEADS:
        grid.add_column(head, justify="right" if head in ("measured", "must", "goal") else "left")
    for line in table:
        grid.add_row(*line, style="bold red" if line[5] in ("VOID", "MISSED") else None)
    Console(width=140).print(grid)


def _preface(setup: Setup) -> str:
    about = machine()
    how = "QUICK RUN: one short round, figures say little" if setup.quick else f"medians of {setup.rounds} rounds"
    return (
        f"{about['date']}, commit {about['commit']}, {about['cpus']} × {about['cpu']}, Linux {about['kernel']}, "
        f"Python {about['python']}; {how}. All nodes, peers and load generators share this machine."
    )


def _markdown(rows: list[Row], table: list[Line], plots: dict[str, str], setup: Setup) -> str:
    text = ["# hadelay bench", "", _preface(setup), "", f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    text += [f"| {' | '.join(line)} |" for line in table]
    for row in rows:
        text += ["", f"## {row.name}", "", row.title, ""]
        text += [
            f"- {figure}: " + ", ".join(number(v, row.units[figure]) for v in values)
            for figure, values in row.samples.items()
        ]
        if row.name in plots:
            text += ["", f"![{row.name}]({plots[row.name]})"]
    return "\n".join(text) + "\n"


def _page(rows: list[Row], table: list[Line], plots: dict[str, str], setup: Setup) -> str:
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd;text-align:left}"
        ".bad{color:#b00020;font-weight:600}img{max-width:100%}"
    )
    head = "".join(f"<th>{html.escape(h)}</th>" for h in HEADS)
    body = ""
    for line in table:
        mark = ' class="bad"' if line[5] in ("VOID", "MISSED") else ""
        body += f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>\n"
    parts = "".join(
        f'<h2>{html.escape(row.name)}</h2><p>{html.escape(row.title)}</p><img src="{plots[row.name]}" alt="{row.name}">'
        for row in rows
        if row.name in plots
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>hadelay bench</title><style>{style}</style>'
        f"<h1>hadelay bench</h1><p>{html.escape(_preface(setup))}</p>"
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{parts}</html>"
    )


def _plots(rows: list[Row], out: Path) -> dict[str, str]:
    """One picture per row: a bar per figure (one panel per unit), a dot per round."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = {}
    for row in rows:
        units = list(dict.fromkeys(row.units[figure] for figure in row.samples))
        if not units:
            continue
        figure, panels = pyplot.subplots(1, len(units), figsize=(4.2 * len(units) + 1, 3.2), squeeze=False)
        for panel, unit in zip(panels[0], units, strict=True):
            names = [name for name in row.samples if row.units[name] == unit]
            panel.barh(names, [row.median(name) or 0 for name in names], color="#3b6ea5", height=0.6)
            for i, name in enumerate(names):
                panel.plot(row.samples[name], [i] * len(row.samples[name]), "o", color="#222", markersize=3, alpha=0.6)
            panel.invert_yaxis()
            panel.set_xlabel(unit or "count")
            panel.spines[["top", "right"]].set_visible(False)
        figure.suptitle(row.title, fontsize=10)
        figure.tight_layout()
        made[row.name] = f"{row.name}.svg"
        figure.savefig(out / made[row.name])
        pyplot.close(figure)
    return made
