"""Long runs: samples of each node's resources under load, and whether they grow.

The checker judges the second half of the load, when caches and reserves are full: the median of the slopes between all
pairs of samples (Theil and Sen), times the length of that half. A checkpoint's saw-tooth or a busy moment of the
machine does not move this median.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from chaos.history import History

#: Name of a sampled value → metric of the node that gives the value, summed over the metric's labels.
SAMPLED = {
    "log_bytes": "hadelay_log_bytes",
    "hour_bytes": "hadelay_hour_bytes",
    "published": "hadelay_published_messages_total",
    "buffers": "hadelay_buffer_bytes",
    "descriptors": "process_open_fds",
    "resident": "process_resident_memory_bytes",
    "cpu_s": "process_cpu_seconds_total",
}
_MIB = 1 << 20
#: Maximum number of points from which a slope is computed: the median slope looks at every pair of points.
_POINTS = 300
#: Number of sample intervals over which a p99 of lateness is computed: one interval has too few messages.
_SPAN = 6
_WIDTH, _HEIGHT, _LEFT, _TOP = 480, 150, 46, 18
_COLOURS = ("#4269d0", "#3ca951", "#ff725c", "#a463f2", "#efb118", "#6cc5b0", "#97bbf5", "#9c6b4e", "#9498a0")


@dataclass(frozen=True)
class Series:
    """Samples of one value, drawn as one line of a plot: pairs of (seconds, value)."""

    kind: str
    who: str
    points: list[tuple[float, float]]
    #: Limit of the growth of the values in the second half of the load; if `level` is True, limit of the largest value.
    #: None: no limit.
    limit: float | None
    level: bool = False

    @property
    def judged(self) -> float:
        return max(value for _, value in self.points) if self.level else self.rise

    @property
    def rise(self) -> float:
        half = self.points[len(self.points) // 2 :]
        few = half[:: max(1, len(half) // _POINTS)]
        slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(few, 2) if t > s]
        rise = median(slopes) * (half[-1][0] - half[0][0]) if slopes else 0.0
        values = [value for _, value in half]
        # limit the growth to the range of the values: after a restart, a node's values rise steeply for a short while
        most = max(values) - min(values)
        return max(-most, min(most, rise))


#: Kinds of values whose limit in `[watch]` bounds the value itself, not its growth.
_LEVELS = ("journal",)
#: Kind of value → (title with unit, key of `[watch]` that has its limit, or None).
KINDS: dict[str, tuple[str, str | None]] = {
    "anonymous": ("anonymous memory, MiB", "anonymous_mib"),
    "resident": ("resident memory, with mapped index files, MiB", None),
    "buffers": ("buffers that have limits, MiB", None),
    "descriptors": ("file descriptors", "descriptors"),
    "journal": ("journal, MiB", "journal_mib"),
    "per message": ("hour files, bytes per published message", "bytes_per_message"),
    "hours": ("hour files, MiB", None),
    "late p50": ("lateness, p50, ms", "late_ms"),
    "late p99": ("lateness, p99, ms", None),
    "cpu": ("processor, share of a core", None),
}
#: Branches (rules) of the checker `growing`: name → condition that breaks the promise.
BRANCHES = {
    kind: f"{title}: {'more than' if kind in _LEVELS else 'grows by more than'} `watch.{key}` allows"
    for kind, (title, key) in KINDS.items()
    if key is not None
}


def parse(text: str) -> dict[str, float]:
    """Read the sampled metrics (table SAMPLED) from the text of a node's /metrics; values are summed over labels."""
    sums: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            sums[name.partition("{")[0]] += float(value)
    return {key: sums[metric] for key, metric in SAMPLED.items()}


def anonymous_bytes(pid: int) -> int:
    """Anonymous memory of a process, in bytes. Raises OSError when the process is gone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} is gone")


def series(history: History) -> list[Series]:
    """One series per kind of value and node; empty if no samples were taken."""
    limits = next(iter(history.of("watch")), {})
    nodes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in history.of("sample"):
        nodes[event["node"]].append(event)
    found: list[tuple[str, str, list[tuple[float, float]]]] = []
    for node, samples in sorted(nodes.items()):
        for kind, values in _columns(samples).items():
            found.append((kind, node, values))
    for kind, values in _lateness(history, limits).items():
        found.append((kind, "all", values))
    order = list(KINDS)
    found.sort(key=lambda one: (order.index(one[0]), one[1]))
    judged = {kind: limits.get(key) if key else None for kind, (_, key) in KINDS.items()}
    return [Series(kind, who, values, judged[kind], kind in _LEVELS) for kind, who, values in found if values]


def _columns(samples: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    columns = {
        "anonymous": [(s["t"], s["anonymous"] / _MIB) for s in samples if s.get("anonymous")],
        "resident": [(s["t"], s["resident"] / _MIB) for s in samples],
        "buffers": [(s["t"], s["buffers"] / _MIB) for s in samples],
        "descriptors": [(s["t"], s["descriptors"]) for s in samples],
        "journal": [(s["t"], s["log_bytes"] / _MIB) for s in samples],
        "per message": [(s["t"], s["hour_bytes"] / s["published"]) for s in samples if s["published"]],
        "hours": [(s["t"], s["hour_bytes"] / _MIB) for s in samples],
        "cpu": [
            (b["t"], (b["cpu_s"] - a["cpu_s"]) / (b["t"] - a["t"])) for a, b in pairwise(samples) if b["t"] > a["t"]
        ],
    }
    return {kind: values for kind, values in columns.items() if values}


def _lateness(history: History, limits: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """p50 and p99 of the lateness of first attempts, in ms, as consumers saw it."""
    samples = history.of("sample")
    if not samples:
        return {}
    span = limits.get("every_s", 5.0) * _SPAN
    first, last = samples[0]["t"], samples[-1]["t"]
    spans: dict[int, list[int]] = defaultdict(list)
    for g in history.given:
        if g.attempt == 1 and first <= g.got <= last:
            spans[int((g.got - first) / span)].append(g.now_ms - g.due_ms)
    found: dict[str, list[tuple[float, float]]] = {"late p50": [], "late p99": []}
    for number, values in sorted(spans.items()):
        ordered, t = sorted(values), first + (number + 0.5) * span
        found["late p50"].append((t, ordered[len(ordered) // 2]))
        found["late p99"].append((t, ordered[int(len(ordered) * 0.99)]))
    return found


def growing(history: History) -> Iterator[tuple[str, str]]:
    """flat: no resource of a node exceeds its limit, and none grows by more than [watch] allows in the second half of
    the load."""
    for one in series(history):
        if one.limit is not None:
            title, key = KINDS[one.kind]
            verb = "was" if one.level else "grew by"
            said = f"{title}, of {one.who}: {verb} {one.judged:.1f}, and watch.{key} is {one.limit:g}"
            yield one.kind, said if one.judged > one.limit else ""


def table(history: History) -> list[dict[str, Any]]:
    """Rows of report.json, one per series."""
    rows = []
    for one in series(history):
        values = [value for _, value in one.points]
        row = {"what": KINDS[one.kind][0], "node": one.who, "first": values[0], "median": median(values)}
        row |= {"last": values[-1], "most": max(values), "rise": one.rise, "level": one.level}
        rows.append({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()} | {"limit": one.limit})
    return rows


def plots(history: History) -> str:
    """SVG plots for the HTML report: one per kind of value, with all nodes."""
    by_kind: dict[str, list[Series]] = defaultdict(list)
    for one in series(history):
        by_kind[one.kind].append(one)
    return "".join(_plot(kind, lines) for kind, lines in by_kind.items())


def _plot(kind: str, lines: list[Series]) -> str:
    title, key = KINDS[kind]
    begin = min(line.points[0][0] for line in lines)
    end = max(max(line.points[-1][0] for line in lines), begin + 1)
    top = max(max(value for _, value in line.points) for line in lines) * 1.05 or 1.0
    low = _HEIGHT - 16

    def x(t: float) -> float:
        return _LEFT + (t - begin) / (end - begin) * (_WIDTH - _LEFT - 4)

    def y(value: float) -> float:
        return low - max(0.0, value) / top * (low - _TOP)

    bound = f"; judged: watch.{key} = {lines[0].limit:g}" if key and lines[0].limit is not None else ""
    parts = [f'<text x="0" y="11" font-weight="bold">{escape(title)}{bound}</text>']
    for value in (0.0, top / 2, top):
        parts.append(
            f'<text x="{_LEFT - 4}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>'
            f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>'
        )
    middle = lines[0].points[len(lines[0].points) // 2][0]
    parts.append(f'<line x1="{x(middle):.1f}" x2="{x(middle):.1f}" y1="{_TOP}" y2="{low}" stroke="#bbb"/>')
    for i, line in enumerate(lines):
        colour = _COLOURS[i % len(_COLOURS)]
        shown = " ".join(f"{x(t):.1f},{y(value):.1f}" for t, value in line.points)
        parts.append(f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        words = f"{line.who}: {line.points[-1][1]:.4g} ({line.rise:+.2g})"
        parts.append(f'<text x="{_LEFT + i * 145}" y="{_HEIGHT - 2}" fill="{colour}">{escape(words)}</text>')
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" style="margin:0 12px 14px 0" xmlns="http://www.w3.org/2000/svg">'
        f"{''.join(parts)}</svg>"
    )
