"""Report of a run: a table for the terminal, JSON for programs, and an HTML page that plots the run over time."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import Any

from chaos import flat
from chaos.checkers import Verdict
from chaos.history import History
from chaos.lateness import fault_spans, first_given, overtaken

_SHOWN = 20
_WIDTH, _LEFT, _ROW, _PLOT = 1000, 70, 16, 120
_STORED, _LATE, _GIVEN = "#4269d0", "#efb118", "#ff725c"
#: One colour per node, distinct for colour-blind readers (Okabe and Ito).
_NODES = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#999999")


def summary(history: History, verdicts: list[Verdict], head: dict[str, Any]) -> dict[str, Any]:
    """Results for report.json, without events; times in milliseconds unless the name ends in `_s`."""
    puts = history.puts.values()
    first = first_given(history)
    spans = fault_spans(history)
    begins = [began for began, _ in spans]
    late: dict[str, list[float]] = {"calm": [], "during faults": []}
    for g in first.values():
        due_s = g.got - (g.now_ms - g.due_ms) / 1000
        before = bisect_left(begins, g.got)
        calm = not before or spans[before - 1][1] <= due_s
        late["calm" if calm else "during faults"].append(g.now_ms - g.due_ms)
    failovers: dict[str, list[float]] = defaultdict(list)
    for event in history.of("failover"):
        failovers[event["kind"]].append(event["s"] * 1000)
    return {
        **head,
        "ok": not any(v.violations for v in verdicts),
        "messages": {
            "tried": len(puts),
            "acknowledged": sum(p.id is not None for p in puts),
            "unknown": sum(p.id is None and not p.refused for p in puts),
            "refused": sum(p.refused for p in puts),
            "handed out": len(first),
            "rescheduled": sum(p.moved is not None for p in puts),
            "expired": sum(state == "expired" for state, _ in history.ends.values()),
            "extended": sum(g.extended is not None for g in history.given),
            "redriven": sum(r.redriven is not None for seen in history.redrives.values() for r in seen),
            "redelivered": sum(g.attempt > 1 for g in history.given),
            "acked": len({g.id for g in history.given if g.acked is not None}),
            "cancelled": sum(p.cancelled is not None for p in puts),
            "overtaken": overtaken(history),
        },
        "faults": dict(sorted(Counter(event["kind"] for event in history.of("fault")).items())),
        "points": _points(history),
        "passed": sorted({point for event in history.of("passed") for point in event["points"]}),
        "leaders": len(history.of("leader")),
        "ended by themselves": len(history.of("ended")),
        "leaders hit": sum(event["deposed"] for event in history.of("fault")),
        "failover_ms": {kind: spread(values) for kind, values in sorted(failovers.items())},
        "late_ms": {phase: spread(values) for phase, values in late.items() if values},
        "recovery_ms": spread(event["s"] * 1000 for event in history.of("recovered")),
        "watched": flat.table(history),
        "verdicts": {v.name: {"what": v.what, "decided": v.decided, "violations": v.violations} for v in verdicts},
    }


def _points(history: History) -> dict[str, list[int]]:
    """Crash point → [number of times that a node ended there, number of times that the point was armed]."""
    found: dict[str, list[int]] = {}
    for event in history.of("crash"):
        row = found.setdefault(event["at"], [0, 0])
        row[0] += bool(event["nodes"])
        row[1] += 1
    return dict(sorted(found.items()))


def spread(values: Iterable[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {"n": 0}
    at = {"p50": 0.5, "p99": 0.99}
    found = {name: round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1) for name, q in at.items()}
    return {"n": len(ordered), **found, "max": round(ordered[-1], 1)}


def table(found: dict[str, Any]) -> str:
    lines = [f"{found['scenario']}, seed {found['seed']}, {found['seconds']:.0f} s", ""]
    if found.get("interrupted"):
        lines[0] += ", interrupted: verdicts are of what was seen until then"
    lines += [f"  {name:<16}{count:>10,}" for name, count in found["messages"].items()]
    lines += ["", "  faults          " + ", ".join(f"{kind} {n}" for kind, n in found["faults"].items())]
    if found["points"]:
        passed = sum(bool(reached) for reached, _ in found["points"].values())
        missed = ", ".join(point for point, (reached, _) in found["points"].items() if not reached)
        lines += [
            f"  crash points    {passed} of {len(found['points'])}" + (f"; no node ended at {missed}" if missed else "")
        ]
    lines += [f"  {'leaders':<16}{found['leaders']:>10}"]
    timed = sum(row["n"] for row in found["failover_ms"].values())
    lines += [f"  {'leaders hit':<16}{found['leaders hit']:>10}, {timed} times with a majority left: those are timed"]
    for title, rows in (("failover", found["failover_ms"]), ("late", found["late_ms"])):
        lines += [f"  {title + ', ' + kind:<24}{_spread(row)}" for kind, row in rows.items()]
    lines += [f"  {'ready after healing':<24}{_spread(found['recovery_ms'])}", ""]
    lines += _watched(found["watched"])
    for name, verdict in found["verdicts"].items():
        violations = verdict["violations"]
        state = f"VIOLATED {len(violations)} times" if violations else "kept"
        lines.append(f"  {name:<16}{state:<8}  {_decided(verdict['decided'])}".rstrip())
        lines += [f"    {violation}" for violation in violations[:_SHOWN]]
        lines += [f"    … and {len(violations) - _SHOWN} more"] if len(violations) > _SHOWN else []
    lines += ["", f"  again: {found['replay']}", f"  files: {found['directory']}"]
    return "\n".join(lines)


def _decided(cases: dict[str, int]) -> str:
    """Text about a checker: number of cases that each of its branches (rules) decided, and the branches without a
    case."""
    idle = ", ".join(branch for branch, count in cases.items() if not count)
    counts = ", ".join(f"{branch} {count:,}" for branch, count in cases.items() if count)
    return "; ".join([counts] * bool(counts) + [f"nothing to decide: {idle}"] * bool(idle))


def _watched(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    head = f"  {'watched':<48}{'node':<5}{'first':>9}{'median':>9}{'last':>9}{'most':>9}  growth in the second half"
    lines = [head]
    for row in rows:
        numbers = "".join(f"{row[name]:>9.1f}" for name in ("first", "median", "last", "most"))
        limit = "" if row["limit"] is None else f", {'most' if row['level'] else 'growth'} may be {row['limit']:g}"
        lines.append(f"  {row['what']:<48}{row['node']:<5}{numbers}  {row['rise']:+.2f}{limit}")
    return [*lines, ""]


def _spread(row: dict[str, float]) -> str:
    if not row["n"]:
        return "none"
    return f"p50 {row['p50']:,.0f} ms, p99 {row['p99']:,.0f} ms, max {row['max']:,.0f} ms ({row['n']:,.0f})"


def page(history: History, found: dict[str, Any]) -> str:
    return f"""<!doctype html><meta charset="utf-8"><title>chaos: {escape(found["scenario"])}</title>
<style>body{{font:14px/1.4 system-ui;margin:2em;max-width:1100px}} pre{{background:#f4f4f4;padding:1em;overflow:auto}}
text{{font:11px system-ui}} .bad{{color:#c00}}</style>
<h1>{escape(found["scenario"])}, seed {found["seed"]}:
{"kept" if found["ok"] else '<span class="bad">violated</span>'}</h1>
{_course(history)}
<div>{flat.plots(history)}</div>
<pre>{escape(table(found))}</pre>
"""


def _course(history: History) -> str:
    """Plot the run over time as SVG: message rates, then leader and faults per node, then a row per kind of fault."""
    faults = history.of("healed")
    names = sorted({name for event in history.of("fault") for name in event["all"]})
    end: float = max([g.got for g in history.given] + [e["t"] for e in history.events] + [1.0])

    def x(t: float) -> float:
        return _LEFT + t / end * (_WIDTH - _LEFT)

    def rate(times: Iterable[float], colour: str, peak: int) -> str:
        counts = Counter(int(t) for t in times)
        points = " ".join(
            f"{x(t + 0.5):.1f},{_PLOT - counts[t] / peak * (_PLOT - 10):.1f}" for t in range(int(end) + 1)
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    stored = [p.stored for p in history.puts.values() if p.stored is not None]
    got = [g.got for g in history.given]
    peak = max([*Counter(map(int, stored)).values(), *Counter(map(int, got)).values(), 1])
    parts = [
        f'<text x="0" y="12">{peak}/s</text>',
        f'<text x="0" y="30" fill="{_STORED}">stored</text>',
        f'<text x="0" y="46" fill="{_GIVEN}">handed out</text>',
        rate(stored, _STORED, peak),
        rate(got, _GIVEN, peak),
    ]
    base = _PLOT + 70
    parts += _lateness(history, x, base)
    row = {name: base + 12 + i * _ROW for i, name in enumerate(names)}
    leaders = history.of("leader")
    for one, after in zip(leaders, [*leaders[1:], {"t": end}], strict=False):
        if one["node"] in row:
            parts.append(
                _bar(x(one["t"]), x(after["t"]), row[one["node"]] + 5, 3, "#333", f"leader, term {one['term']}")
            )
    # Plot a row per kind of fault, a strip per node: in a run of an hour, faults are only a pixel wide.
    kinds = sorted({event["kind"] for event in faults})
    below = base + 24 + len(names) * _ROW
    lane = {kind: below + i * _ROW for i, kind in enumerate(kinds)}
    strip = (_ROW - 3) / max(1, len(names))
    for event in faults:
        began, healed, kind = x(event["began"]), x(event["t"]), event["kind"]
        for name in event["nodes"]:
            i = names.index(name)
            colour = _NODES[i % len(_NODES)]
            parts.append(_bar(began, healed, row[name], _ROW - 3, colour, kind))
            parts.append(_bar(began, healed, lane[kind] + i * strip, strip, colour, f"{kind} of {name}"))
    parts += [f'<text x="0" y="{y + 11}">{escape(name)}</text>' for name, y in [*row.items(), *lane.items()]]
    bottom = below + len(kinds) * _ROW
    return f'<svg width="{_WIDTH}" height="{bottom}" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'


def _lateness(history: History, x: Callable[[float], float], base: float) -> Iterator[str]:
    """Plot the largest lateness of each second. x: horizontal position of a time; base: bottom of the plot."""
    worst: dict[int, int] = {}
    for g in first_given(history).values():
        worst[int(g.got)] = max(worst.get(int(g.got), 0), g.now_ms - g.due_ms)
    top = max([*worst.values(), 1])
    yield f'<text x="0" y="{_PLOT + 22}">latest: {top} ms</text>'
    for second, ms in worst.items():
        height = ms / top * 50
        yield (
            f'<rect x="{x(second):.1f}" y="{base - height:.1f}" width="{max(1.0, x(1) - x(0) - 0.5):.1f}" '
            f'height="{height:.1f}" fill="{_LATE}"><title>{ms} ms late</title></rect>'
        )


def _bar(left: float, right: float, y: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{left:.1f}" y="{y:g}" width="{max(1.5, right - left):.1f}" height="{height:g}" fill="{colour}" '
        f'opacity="0.75"><title>{escape(title)}</title></rect>'
    )
