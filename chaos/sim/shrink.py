"""A smaller run that breaks the same promise: what clients and nemesis need not do for it is left out.

Delta debugging (Zeller and Hildebrandt, 2002) over the parts of a run (cluster.Parts): strikes of the nemesis (`f3`),
batches of a producer (`p1.7`), consumers but the first (`c2`), acts of the administrator (`admin.4`). What a part
draws is its own, so the others stay what they were. What the network draws is not: a part that is not the cause may
yet be needed for the order in which things happen.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from chaos.sim.run import Report

#: Runs that one seed may take.
TRIES = 250


def shrink(whole: Report, run: Callable[[frozenset[str]], Report], tries: int = TRIES) -> Report:
    """The report of the smallest run that was found, `whole` if there is none. run(only): the same seed again."""
    best = whole

    def breaks(parts: list[str]) -> bool:
        nonlocal best, tries
        tries -= 1
        if tries < 0:
            return False
        report = run(frozenset(parts))
        if _promise(report) != _promise(whole):
            return False
        # Some of them do not come up any more.
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
    """Strikes, one client, …: first without all of a kind."""
    return re.sub(r"\.?\d*$", "", part) if part.startswith(("f", "admin")) else part.partition(".")[0]


def _promise(report: Report) -> str:
    """What it broke; of an error that nobody expected, its kind."""
    return report.failure.partition("(")[0] if report.invariant == "error" else report.invariant
