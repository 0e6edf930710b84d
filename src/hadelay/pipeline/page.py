"""HTML reports in one file, for people who do not read logs: a summary, then plots (SVG), then tables.

A page loads nothing from elsewhere, so it can be mailed.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h1{margin-bottom:.2rem}.lead{font-size:1.15rem}.bad{color:#b00020;font-weight:600}.quiet{color:#666}"
    "table{border-collapse:collapse;margin:.5rem 0}td,th{padding:.2rem .7rem;border-bottom:1px solid #ddd}"
    "td{text-align:right;font-variant-numeric:tabular-nums}th,td:first-child{text-align:left}"
    "svg{width:100%;height:auto}text{font:12px system-ui,sans-serif;fill:#555}"
)
_COLOURS = ("#3b6ea5", "#d9822b", "#3ca951")
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 960, 260, 64, 12, 26, 24
#: Maximum number of points in a plotted line: more points would not be visible in the plot's width.
_POINTS = 400
#: Limit of the rows of a table in a report.
ROWS = 200


def page(title: str, lead: str, parts: Iterable[str]) -> str:
    """Make a report's HTML page. lead: summary in a few sentences. parts: HTML of the plots and tables."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{"".join(parts)}</html>\n'
    )


def section(title: str, text: str, *parts: str, bad: bool = False) -> str:
    mark = ' class="bad"' if bad else ""
    return f"<h2>{escape(title)}</h2><p{mark}>{escape(text)}</p>{''.join(parts)}"


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(column.replace('_', ' '))}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell(column, row.get(column)))}</td>" for column in columns) + "</tr>"
        for row in rows[:ROWS]
    )
    more = f'<p class="quiet">… and {len(rows) - ROWS:,} more</p>' if len(rows) > ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def cell(column: str, value: Any) -> str:
    """Text of a table's cell."""
    if value is None:
        return "–"
    if column == "hour":  # show the number yyyymmddHH as a date and an hour
        day, hour = divmod(value, 100)
        return f"{day // 10_000}-{day // 100 % 100:02}-{day % 100:02} {hour:02}:00"
    return f"{value:,}" if isinstance(value, int) else str(value)


def plot(
    label: Callable[[int], str], series: Mapping[str, npt.ArrayLike], *, unit: str, limit: int = 0, log: bool = False
) -> str:
    """Plot series of equal length as lines of an SVG. If there are too many values, the maximum of each stretch is
    plotted. label: text at a position. limit: value of a dashed line. log: logarithmic axis, for values of at least
    1."""
    length = len(np.asarray(next(iter(series.values()))))
    shown = np.arange(0, length, -(-length // _POINTS))
    lines = {name: np.maximum.reduceat(np.asarray(values), shown).tolist() for name, values in series.items()}
    top = max([value for values in lines.values() for value in values] + [limit, 1])
    scale = math.log10(max(top, 10)) if log else top

    def y(value: float) -> float:
        part = math.log10(max(value, 1)) / scale if log else value / scale
        return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)

    def x(at: float) -> float:
        return _LEFT + (at + 0.5) / len(shown) * (_WIDTH - _LEFT - _RIGHT)

    grid = [10.0**n for n in range(int(scale) + 1)] if log else [top * n / 4 for n in range(5)]
    parts = [
        f'<path d="M{_LEFT} {y(v):.1f}H{_WIDTH - _RIGHT}" stroke="#e4e4e4"/>'
        f'<text x="{_LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{_short(v)}</text>'
        for v in grid
    ]
    parts.append(f'<text x="0" y="12">{escape(unit)}</text>')
    for at in sorted({round(n * (len(shown) - 1) / 5) for n in range(6)}):
        parts.append(
            f'<text x="{x(at):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(label(int(shown[at])))}</text>'
        )
    for n, (name, values) in enumerate(lines.items()):
        colour = _COLOURS[n % len(_COLOURS)]
        points = [(x(at), y(value)) for at, value in enumerate(values)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(points) <= 60:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in points]
        parts.append(f'<text x="{_LEFT + 130 * (n + 1)}" y="12" style="fill:{colour}">{escape(name)}</text>')
    if limit:
        parts.append(f'<path d="M{_LEFT} {y(limit):.1f}H{_WIDTH - _RIGHT}" stroke="#b00020" stroke-dasharray="5 4"/>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


def _short(value: float) -> str:
    for size, mark in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{mark}"
    return f"{value:.3g}"
