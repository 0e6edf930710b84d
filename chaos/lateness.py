"""Check I10 of lateness: first hand-outs of messages, time spans with faults, and the lateness that these faults
excuse."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate

from chaos.history import Given, History

Span = tuple[float, float]
#: Seconds for which messages are still handed out late after a fault is healed and every node is ready.
_CATCH_UP_S = 1.0
#: Longest backoff (delay of a retry) of the topics in the load, in seconds.
_BACKOFF_S = 1.0
#: `_HOLD_S`: longest time, in seconds, by which a fault on a minority of the nodes delays messages, by kind of fault; a
#: fault of another kind delays messages until it is healed. `_BROKEN_S`: a broken connection costs an election and a
#: new connection. `_SILENT_S`: clients give up a silent node after 6 s (1 s of long-poll and 5 s of grace).
_BROKEN_S, _SILENT_S = 3.0, 8.0
_HOLD_S = {
    **dict.fromkeys(("kill", "stop", "wipe", "crash", "transfer", "fail-sync", "power-cut"), _BROKEN_S),
    **dict.fromkeys(("pause", "cut", "stalled-disk"), _SILENT_S),
}


def first_given(history: History) -> dict[str, Given]:
    return {g.id: g for g in reversed(history.given)}


def overtaken(history: History) -> int:
    """I11, not promised: number of messages whose receive began after some consumer had already got a message that was
    due at least a second later."""
    given = sorted(first_given(history).values(), key=lambda g: g.due_ms)
    dues = [g.due_ms for g in given]
    soonest = list(accumulate([g.got for g in reversed(given)], min))[::-1]
    later = [bisect_left(dues, due + 1000) for due in dues]
    return sum(at < len(given) and soonest[at] < g.asked for g, at in zip(given, later, strict=True))


def fault_spans(history: History) -> list[Span]:
    """Time spans with faults: from the start of each fault until every node was ready again, plus one second in which
    nodes hand out the delayed messages. Sorted; overlaps are merged."""
    again = [event["t"] for event in history.of("recovered")]
    return _union((event["began"], _over(again, event["t"])) for event in history.of("healed"))


def _over(again: list[float], healed: float) -> float:
    at = bisect_left(again, healed)
    return (again[at] if at < len(again) else healed) + _CATCH_UP_S


def _union(spans: Iterable[Span]) -> list[Span]:
    merged: list[Span] = []
    for began, end in sorted(spans):
        if merged and began <= merged[-1][1]:
            began, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((began, end))
    return merged


def _holds(history: History) -> list[Span]:
    """Time spans in which the faults in force may have delayed messages, with overlaps merged.

    A fault that leaves a majority delays messages for a while at its start and at its healing. A fault that leaves no
    majority, alone or with others, delays messages until the nodes are ready again. So does a fault that makes a node
    slow. A stall of chaos itself counts too: the machine gave the nodes no time either.
    """
    again = [event["t"] for event in history.of("recovered")]
    every = {(event["t"], event["kind"]): event for event in history.of("fault")}
    struck = [(e["began"], _over(again, e["t"]), set(e["nodes"])) for e in history.of("healed")]
    spans = []
    for event in history.of("healed"):
        began, healed, end = event["began"], event["t"], _over(again, event["t"])
        down = set().union(*(nodes for start, over, nodes in struck if start < end and began < over))
        nodes = len(every[began, event["kind"]]["all"]) if (began, event["kind"]) in every else 0
        hold_s = _HOLD_S.get(event["kind"])
        if hold_s is None or 2 * len(down) >= nodes:
            spans.append((began, end))
        else:
            spans += [(began, min(end, began + hold_s)), (healed, min(end, healed + _CATCH_UP_S))]
    spans += [(event["t"] - event["s"], event["t"] + event["s"]) for event in history.of("stall")]
    return _union(spans)


class _Covered:
    """Disjoint time spans; measures how much of an interval they cover."""

    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans
        self._ends = [end for _, end in spans]

    def seconds(self, began: float, end: float) -> float:
        covered, at = 0.0, bisect_right(self._ends, began)
        while at < len(self._spans) and self._spans[at][0] < end:
            covered += min(end, self._spans[at][1]) - max(began, self._spans[at][0])
            at += 1
        return covered


def late(history: History) -> Iterator[tuple[str, str]]:
    """I10: a message is handed out for the first time at most limits.late_s after its due time. Not counted: time in
    which the faults in force may have delayed the message, and the time of leases that no consumer knew because the
    answer was lost."""
    load = next(iter(history.of("load")), {})
    limit_s, lease_s = load.get("late_s", 0.0), load.get("lease_s", 0.0)
    if not limit_s:
        return
    faults = _Covered(_holds(history))
    for g in first_given(history).values():
        waited_s = (g.now_ms - g.due_ms) / 1000
        delayed_s = faults.seconds(g.got - waited_s, g.got)
        branch = "beside faults" if delayed_s else "calm"
        allowed_s = limit_s + delayed_s + (g.attempt - 1) * (lease_s + _BACKOFF_S)
        why = f"{waited_s:.3f} s late, and the faults allow {allowed_s:.3f} s"
        yield branch, f"message {g.n} ({g.id}), handed out at {g.got:.3f} s: {why}" if waited_s > allowed_s else ""
