"""Where the time of a delivery and of a publish goes: stages from the instants that nodes noted.

`python -m bench.waterfall RESULTS` writes the tables of `python -m bench waterfall` into docs/explanation/cost.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.cluster import Void
from bench.instants import ROOT, Instants
from bench.report import number

Times = NDArray[np.float64]

PAGE = ROOT / "docs" / "explanation" / "cost.md"
#: Stages of a delivery after its due time, in their order.
DELIVERY = (
    "no receive waits: consumers are busy",
    "a receive waits, but gets no message yet",
    "the grant waits for a batch of the log",
    "the entry waits for the journal's sync",
    "the leader syncs",
    "a follower's answer, after that",
    "apply",
    "the answer waits until its last message is due",
    "the answer's timer rings late",
    "records are read, the answer is encoded",
    "the consumer reads the answer",
)
#: Stages of a publish, in their order.
PUBLISH = (
    "waits for a batch of the log",
    "the entry waits for the journal's sync",
    "the leader syncs",
    "a follower's answer, after that",
    "apply",
    "the rest: sockets, parsing, answer, client",
)
#: Stages of the quicker follower, while the leader syncs: parts of the same time.
FOLLOWER = (
    "sent until the quicker follower reads it",
    "there it waits for its journal",
    "its journal is synced",
    "its answer until the leader reads it",
)
WHOLE = "all"


class Answer(NamedTuple):
    """Messages that a consumer got in one answer."""

    #: Id of the first message.
    first: str
    #: Instant at which the consumer had the answer in hand: monotonic seconds, and by the wall clock.
    mono: float
    wall: float


def _at(indexes: Sequence[int], marks: Sequence[int], instants: Sequence[float]) -> Times:
    """For each index, the instant of the first mark that reaches it; nan if none does."""
    highest = np.maximum.accumulate(np.array(marks, np.int64)) if marks else np.zeros(0, np.int64)
    return np.append(np.array(instants), np.nan)[np.searchsorted(highest, np.array(indexes, np.int64))]


class _Entries:
    """Instants of the leader's entries: a column per event."""

    def __init__(self, leader: Instants) -> None:
        self.rows = sorted(leader.entries)
        self.indexes = [row[0] for row in self.rows]
        self.sent = np.array([row[1] for row in self.rows])
        self.applied = np.array([row[2] for row in self.rows])
        self.began = _at(self.indexes, [sync[0] for sync in leader.syncs], [sync[1] for sync in leader.syncs])
        self.synced = _at(self.indexes, [sync[0] for sync in leader.syncs], [sync[2] for sync in leader.syncs])
        self.committed = _at(self.indexes, [row[0] for row in leader.commits], [row[1] for row in leader.commits])
        #: A record that a sync finds in the journal's file may belong to an entry that comes while the sync begins.
        self.began = np.maximum(self.began, self.sent)
        self.synced = np.minimum(self.synced, self.committed)


def _grants(leader: Instants) -> dict[int, tuple[float, float, float, float, float]]:
    """Grant's number → instants of its entry: sent, sync began, synced, committed, applied."""
    entries = _Entries(leader)
    columns = zip(
        entries.sent.tolist(), entries.began.tolist(), entries.synced.tolist(), entries.committed.tolist(),
        entries.applied.tolist(), strict=True,
    )  # fmt: skip
    return {seq: times for row, times in zip(entries.rows, columns, strict=True) for seq in row[3]}


def delivery(leader: Instants, answers: Sequence[Answer]) -> tuple[Times, dict[str, float]]:
    """Milliseconds of each stage after the due time, a row per message; and facts about hand-outs."""
    grants, got = _grants(leader), {answer.first: answer for answer in answers}
    rows: list[list[float]] = []
    ahead, spans, sizes, took, waits, holds = [], [], [], [], [], []
    for seq, first, came, offered, due_ms in leader.offers:
        answer, entry = got.get(first), grants.get(seq)
        times = leader.decided.get(seq), leader.released.get(seq), leader.written.get(seq)
        if answer is None or entry is None or None in times:
            continue
        decided, released, written = times
        due = np.array(due_ms) / 1000 - (answer.wall - answer.mono)
        last = min(float(due.max()), released or 0.0)
        ends = [came, offered, *entry[:4], decided, last, released, written, answer.mono]
        rows += _clipped(due, ends)
        ahead.append(1000 * (float(due.min()) - offered))
        spans.append(max(due_ms) - min(due_ms))
        sizes.append(len(due_ms))
        took.append(1000 * (float(decided or 0) - offered))
        waits.append(offered - came)
        holds.append(answer.mono - offered)
    seconds = max(answer.mono for answer in answers) - min(offer[3] for offer in leader.offers)
    facts = {
        "messages per answer": statistics.mean(sizes),
        "messages per answer, most": float(max(sizes)),
        "first to last due time of an answer, median": statistics.median(spans),
        "first to last due time of an answer, p99": float(np.quantile(spans, 0.99)),
        "offered before the first message is due, median": statistics.median(ahead),
        "consumers whose receive waits for messages, mean": sum(waits) / seconds,
        "consumers whose messages are chosen, but not in hand, mean": sum(holds) / seconds,
        "from offer to decision, median": statistics.median(took),
        "from offer to decision, p99": float(np.quantile(took, 0.99)),
    }
    return np.array(rows) * 1000, facts


def _clipped(due: Times, ends: Sequence[Any]) -> list[list[float]]:
    """For each due time, the seconds from it, or from the stage before, to each end; 0 for an end before."""
    reached = np.maximum.accumulate(np.column_stack([due, *(np.full(len(due), end) for end in ends)]), axis=1)
    found: list[list[float]] = np.diff(reached, axis=1).tolist()
    return found


def figures(stages: Times, names: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Figures of each stage and of their sum: median, p99, and means over the middle tenth and the slowest hundredth of
    the sums, whose stages add up."""
    whole = stages.sum(axis=1)
    low, high, slow = np.quantile(whole, (0.45, 0.55, 0.99))
    middle, slowest = (whole >= low) & (whole <= high), whole >= slow
    for name, values in [*zip(names, stages.T, strict=True), (WHOLE, whole)]:
        yield f"{name}; median", float(np.median(values))
        yield f"{name}; p99", float(np.quantile(values, 0.99))
        yield f"{name}; middle tenth", float(values[middle].mean())
        yield f"{name}; slowest hundredth", float(values[slowest].mean())


def publishes(nodes: Sequence[Instants], began: float, ended: float, mean_ms: float) -> dict[str, float]:
    """Mean ms of a publish's stages in entries sent from `began` until `ended`; and facts about entries and syncs.
    mean_ms: of a request, as the client saw it."""
    leader, *followers = nodes
    if any(began <= entry[1] < ended for one in followers for entry in one.entries):
        raise Void("leadership moved")
    entries = _Entries(leader)
    within = (entries.sent >= began) & (entries.sent < ended) & ~np.isnan(entries.committed)
    counts = np.array([len(row[4]) for row in entries.rows])
    chosen = np.flatnonzero(within & (counts > 0))
    weights, seconds = counts[chosen], ended - began
    ends = [entries.sent, entries.began, entries.synced, entries.committed, entries.applied]
    waits = float(np.mean([wait for n in chosen for wait in entries.rows[n][4]]))
    spent = [waits, *(float(np.average((b - a)[chosen], weights=weights)) for a, b in pairwise(ends))]
    spent.append(mean_ms / 1000 - sum(spent))
    found = {f"{name}; mean": 1000 * value for name, value in zip(PUBLISH, spent, strict=True)}
    found[f"{WHOLE}; mean"] = mean_ms
    for name, values in zip(FOLLOWER, _quicker(entries, leader, followers, chosen), strict=True):
        found[f"{name}; mean"] = 1000 * float(np.average(values, weights=weights))
    syncs = [(start, end) for _, start, end in leader.syncs if began <= start < ended]
    calls = [end - start for start, end in leader.calls if began <= start < ended]
    took = (entries.applied - entries.sent)[within]
    return found | {
        "entries per second": within.sum() / seconds,
        "publishes per entry": float(weights.mean()),
        "publishes per entry, as a publish sees it": float(np.average(weights, weights=weights)),
        "entries in flight": float(took.sum()) / seconds,
        "syncs per second": len(syncs) / seconds,
        "syncs at the same time": sum(end - start for start, end in syncs) / seconds,
        "a sync": 1000 * statistics.mean(end - start for start, end in syncs),
        "its system call": 1000 * statistics.mean(calls),
    }


def _quicker(
    entries: _Entries, leader: Instants, followers: Sequence[Instants], chosen: NDArray[np.intp]
) -> list[Times]:
    """Seconds of each stage at the follower whose answer came first, for the chosen entries."""
    every = [_follower(entries, leader, one) for one in followers]
    first = np.nan_to_num(np.vstack([ends[-1] for ends in every]), nan=np.inf).argmin(axis=0)
    columns = [np.choose(first, [ends[n] for ends in every])[chosen] for n in range(len(FOLLOWER) + 1)]
    return [after - before for before, after in pairwise(columns)]


def _follower(entries: _Entries, leader: Instants, one: Instants) -> list[Times]:
    """Instants of the leader's entries: sent, received by this follower, sync began, synced there, its answer read."""
    replies = [(match, at) for name, match, at in leader.replies if name == one.node]
    received = _at(entries.indexes, [row[0] for row in one.received], [row[1] for row in one.received])
    began = _at(entries.indexes, [row[0] for row in one.syncs], [row[1] for row in one.syncs])
    synced = _at(entries.indexes, [row[0] for row in one.syncs], [row[2] for row in one.syncs])
    replied = _at(entries.indexes, [match for match, _ in replies], [at for _, at in replies])
    return [entries.sent, received, np.maximum(began, received), synced, replied]


def tables(results: dict[str, Any], note: str = "") -> dict[str, str]:
    """Name of a part of the page → its text, from the row `waterfall` of results.json. note: a sentence about the
    run."""
    row = next(row for row in results["rows"] if row["name"] == "waterfall")
    values = {name: statistics.median(found) for name, found in row["samples"].items()}
    about, rounds = results["machine"], max(map(len, row["samples"].values()))
    said = f"Medians of {rounds} rounds" if rounds > 1 else "One round"
    head = (
        f"{said}, {about['date'].partition(' ')[0]}, commit {about['commit']}, {about['cpus']} × {about['cpu']}, with "
        f"load generator and nodes on the same cores.{note and ' ' + note}"
    )
    kinds = ("median", "p99", "middle tenth", "slowest hundredth")
    late = [f"{head}\n", *_head("Stage, in ms after the due time", kinds)]
    late += [_line(name, [values[f"lateness: {name}; {kind}"] for kind in kinds]) for name in (*DELIVERY, WHOLE)]
    late += ["", *_head("Hand-outs", [""])]
    late += [_line(name, [value], row["units"][f"lateness: {name}"]) for name, value in _facts(values, "lateness: ")]
    sides = ("undelayed", "delayed")
    slow = [f"{head}\n", *_head("Stage of a publish, mean in ms", sides)]
    for name in (*PUBLISH, WHOLE):
        slow.append(_line(name, [values[f"slowdisk, {side}: {name}; mean"] for side in sides]))
    slow += ["", *_head("Meanwhile at the quicker follower, mean in ms", sides)]
    slow += [_line(name, [values[f"slowdisk, {side}: {name}; mean"] for side in sides]) for name in FOLLOWER]
    slow += ["", *_head("Entries, syncs, cores", sides)]
    for name, _ in _facts(values, "slowdisk, delayed: "):
        unit = row["units"][f"slowdisk, delayed: {name}"]
        slow.append(_line(name, [values[f"slowdisk, {side}: {name}"] for side in sides], unit))
    return {"lateness": "\n".join(late), "slowdisk": "\n".join(slow)}


def _facts(values: dict[str, float], prefix: str) -> list[tuple[str, float]]:
    """Names and values of the figures that are no stages."""
    found = [(name.removeprefix(prefix), value) for name, value in values.items() if name.startswith(prefix)]
    return [(name, value) for name, value in found if ";" not in name]


def _head(first: str, others: Sequence[str]) -> list[str]:
    return [f"| {first} | {' | '.join(others)} |", "|---" + "|--:" * len(others) + "|"]


def _line(name: str, values: Sequence[float], unit: str = "") -> str:
    mark = "**" if name == WHOLE else ""
    return f"| {mark}{name}{mark} | " + " | ".join(f"{mark}{number(value, unit)}{mark}" for value in values) + " |"


def written(page: str, parts: dict[str, str]) -> str:
    """The page with these parts in place of its own, each between its two comments."""
    for name, text in parts.items():
        before, found, rest = page.partition(f"<!-- figures: {name} -->\n")
        _, ends, after = rest.partition("<!-- end of figures -->")
        if not found or not ends:
            raise SystemExit(f"{PAGE.name} has no place for the figures {name}")
        page = f"{before}{found}\n{text}\n\n{ends}{after}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.waterfall", description=__doc__)
    parser.add_argument("results", type=Path, help="results.json of `python -m bench waterfall`")
    parser.add_argument("--note", default="", help="a sentence for the page, about the conditions of the run")
    chosen = parser.parse_args()
    PAGE.write_text(written(PAGE.read_text(), tables(json.loads(chosen.results.read_text()), chosen.note)))


if __name__ == "__main__":
    main()
