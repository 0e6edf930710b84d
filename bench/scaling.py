"""`python -m bench.scaling RESULTS [--note TEXT]`: fit the model of docs/explanation/scaling.md to the results.json of
`python -m bench shards`, and write that page, its plot, and a copy of the results (bench/scaling.json)."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import lines, number
from bench.result import Row, Target
from bench.rows.shards import COUNTS, SHARE
from hadelay.settings.shardmap import MAX_SHARDS

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE, PLOT = (
    ROOT / "bench/scaling.json",
    ROOT / "docs/explanation/scaling.md",
    ROOT / "docs/images/scaling.svg",
)
#: Assumptions about the machines that the model is asked about: hardware threads each, worth of a thread whose
#: neighbour works too, share of a core that a leader may be busy, share of all cores that stays free.
THREADS, WORTH, BUSY, FREE = 16, 0.65, 0.6, 0.1
#: Bytes per second of a machine's network in one direction, and its memory in MB.
LINK, MEMORY_MB = 10e9 / 8, 64_000
#: Memory of a node at all of its limits, in MB (docs/howto/sizing.md).
FULL_MB = 1_000
#: Numbers of machines in the table, and in the plot.
MACHINES = (3, 6, 12, 24, 48)


@dataclass
class Model:
    """Processor time per message in µs: of a leader, of one follower, of a node that forwards. record: bytes of a
    message; idle: processor time of a node in µs per second; memory: MB of a node."""

    leader: float
    follower: float
    front: float
    record: float
    idle: float
    memory: float

    @classmethod
    def fit(cls, rows: list[Row], kind: str) -> Model:
        """kind: `single`, or `batch of 100`."""
        found = [_value(rows, "front", figure) for figure in (f"leader, {kind}", f"follower, {kind}", f"front, {kind}")]
        others = [_value(rows, "front", figure) for figure in ("record", "idle, one node", "memory, one node")]
        return cls(*found, *others)

    def topic(self) -> float:
        """Messages per second of one shard, so of the busiest topic."""
        return BUSY * 1e6 / self.leader

    def cores(self, shards: int, forwarded: float) -> float:
        """Cores that the shards need in all. forwarded: share of the messages that another shard's node gets first."""
        each = self.leader + 2 * self.follower + forwarded * self.front
        return shards * self.topic() * each / 1e6 + 3 * shards * self.idle / 1e6

    def shards(self, machines: int, forwarded: float = 0.0) -> int:
        """Number of shards that the machines' cores carry, whatever the limit of the map."""
        there = machines * THREADS * WORTH * (1 - FREE)
        return max(1, int(there / self.cores(1, forwarded)))

    def limits(self, machines: int, shards: int) -> dict[str, float]:
        """Share of each limit that is used, clients sending to the leaders."""
        nodes = 3 * shards / machines
        # A machine receives what its leaders store, and twice as much for its followers, which is the larger direction.
        bytes_in = 3 * shards / machines * self.topic() * self.record
        return {
            "cores": self.cores(shards, 0.0) / (machines * THREADS * WORTH * (1 - FREE)),
            "links": bytes_in / LINK,
            "map": shards / MAX_SHARDS,
            "memory": nodes * FULL_MB / MEMORY_MB,
        }


def read(text: str) -> tuple[dict[str, Any], list[Row]]:
    said = json.loads(text)
    rows = [Row(**{**row, "targets": [Target(**one) for one in row["targets"]]}) for row in said["rows"]]
    return said, [row for row in rows if row.name.startswith("shards")]


def added(new: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """The known results with the new rows in place of those of the same name, or behind all."""
    rows = {row["name"]: row for row in (*known["rows"], *new["rows"])}
    return known | {"rows": list(rows.values())}


def _value(rows: list[Row], part: str, figure: str) -> float:
    value = next(row for row in rows if row.name == f"shards, {part}").median(figure)
    if value is None:
        raise SystemExit(f"the results have no figure {figure!r} of `shards, {part}`: run `python -m bench shards`")
    return value


def page(said: dict[str, Any], rows: list[Row]) -> str:
    single, batch = Model.fit(rows, "single"), Model.fit(rows, "batch of 100")
    parts = [_HEAD, _run(said, rows), _measured(rows), _fitted(single, batch), _checked(rows), _sizes(single, batch)]
    return "\n".join(part.strip("\n") + "\n" for part in [*parts, _breaks(single, batch), _FUNCTION])


_HEAD = """<!-- Written by `python -m bench.scaling` from bench/scaling.json. -->

# How far shards scale, and what breaks first

Shards share nothing but the map, so a model of one shard and of one forwarded request says what many carry. This page
has the figures of one machine, the model with these figures, and what the model says of larger machines. Figures of
larger machines are predictions: nobody has measured them. [Shards](../howto/shards.md) says how to set them up.
"""


def _run(said: dict[str, Any], rows: list[Row]) -> str:
    about = said["machine"]
    rounds = len(next(row for row in rows if row.name == "shards, front").samples["idle, one node"])
    text = [
        "## The run",
        "",
        f"- {about['date']}, commit {about['commit']}, {about['cpus']} × {about['cpu']}, Linux {about['kernel']}, "
        f"Python {about['python']}. Rounds: {rounds}; medians, and medians of ratios within a round.",
        "- Command: `python -m bench shards`, then `python -m bench.scaling bench/out/results.json`.",
        "- Sides get the load in slices by turns, so that what else slows the machine slows all sides.",
        f"- In `shards, scale` a control group gives each process {SHARE:.0%} of a core, in periods of 10 ms. So four "
        "shards of three nodes fit on few cores, and a core that one process does not use helps no other process.",
    ]
    if said.get("note"):
        text.append(f"- {said['note']}")
    return "\n".join(text)


def _measured(rows: list[Row]) -> str:
    text = ["## Measured", "", "| Row | Figure | Measured | Must | Verdict |", "|---|---|---|---|---|"]
    for name, figure, measured, must, _, verdict in lines(rows):
        if must or not measured:
            text.append(f"| {name.removeprefix('shards, ')} | {figure} | {measured} | {must} | {verdict} |")
    return "\n".join(text)


def _fitted(single: Model, batch: Model) -> str:
    text = ["## The model", "", "Processor time per message, and what a node takes:", ""]
    text += ["| | singles | batches of 100 |", "|---|---|---|"]
    for what, field in (
        ("L: leader", "leader"), ("F: one follower", "follower"), ("f: node that forwards", "front"),
    ):  # fmt: skip
        text.append(f"| {what} | {number(getattr(single, field))} µs | {number(getattr(batch, field))} µs |")
    text += [
        f"| F / L | {single.follower / single.leader:.2f} | {batch.follower / batch.leader:.2f} |",
        "",
        f"A node that has nothing to do takes {single.idle / 1e4:.1f} % of a core and {single.memory:.0f} MB; a "
        f"message of 200 bytes is a record of {single.record:.0f} bytes.",
        "",
        "With S shards, each leader busy for a share b of a core:",
        "",
        "- messages per second = S · b / L; of the busiest topic: b / L, because a topic lives in one shard;",
        "- cores = S · b · (L + 2F) / L, and S · b · f / L · (S − 1) / S more if clients send to any node. The Python "
        "client remembers the leader of each topic, and most of its requests are not forwarded;",
        "- bytes per second into a machine of M = 3 · S / M · b / L · record: once from clients, twice from leaders;",
        f"- memory of a machine = 3 · S / M · ({single.memory:.0f} MB after these loads, up to 1 GB at all limits).",
    ]
    return "\n".join(text)


def _checked(rows: list[Row]) -> str:
    scale = next(row for row in rows if row.name == "shards, scale")
    text = ["## The model against the run", ""]
    if not scale.samples:
        return "\n".join([*text, f"Not checked: {'; '.join(scale.notes)}."])
    text += [
        f"A leader with {SHARE:.0%} of a core stores {SHARE:.0%} · 10⁶ / L messages per second, if L is the processor "
        "time of a leader per message in the same slices. `busy` says how much of its share the leader used.",
        "",
        "| Shards | Singles/s | Against one | Busy | Batches of 100, msg/s | Against one | Busy |",
        "|---|---|---|---|---|---|---|",
    ]
    for count in COUNTS:
        cells = [str(count)]
        for kind in ("single", "batch"):
            rate = _value(rows, "scale", f"{kind}, {count} shards")
            against = 1.0 if count == 1 else _value(rows, "scale", f"{kind}, {count} shards to 1")
            busy = (
                rate * _value(rows, "scale", f"{kind}, leader's processor time, {count} shards") / 1e6 / count / SHARE
            )
            cells += [f"{rate:,.0f}", f"{against:.2f} ×", f"{busy:.0%}"]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join([*text, "", "![Measured and predicted rates](../images/scaling.svg)"])


def _sizes(single: Model, batch: Model) -> str:
    text = [
        "## What it says of larger machines",
        "",
        f"Machines of {THREADS} hardware threads as fast as those measured, a thread worth {WORTH} of a core, leaders "
        f"{BUSY:.0%} busy, {FREE:.0%} of the cores free, 10 Gbit/s and 64 GB each, messages of 200 bytes, clients that "
        "send to the leaders. The last columns are the used share of each limit; memory is of nodes at all limits.",
        "",
        "| Machines | Shards | Singles/s | all forwarded | Batched msg/s | Cores | Links, batched | Map | Memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for machines in MACHINES:
        shards = min(MAX_SHARDS, single.shards(machines))
        relayed = min(MAX_SHARDS, single.shards(machines, 1 - 1 / shards))
        many = min(MAX_SHARDS, batch.shards(machines))
        used, batched = single.limits(machines, shards), batch.limits(machines, many)
        rates = (shards * single.topic(), relayed * single.topic(), many * batch.topic())
        cells = [str(machines), str(shards), *(_round(rate) for rate in rates), f"{used['cores']:.0%}"]
        cells += [f"{share:.0%}" for share in (batched["links"], used["map"], used["memory"])]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def _round(rate: float) -> str:
    return f"{round(rate, -3):,.0f}"


def _breaks(single: Model, batch: Model) -> str:
    full = next(machines for machines in range(3, 10_000) if single.shards(machines) >= MAX_SHARDS)
    shards = single.shards(3)
    most = LINK * 3 / (3 * shards * single.topic())
    most_batched = LINK * 3 / (3 * batch.shards(3) * batch.topic())
    share = single.front / (single.leader + 2 * single.follower + single.front)
    memory = 3 * single.shards(3) / 3 * single.memory
    text = [
        "## What breaks first",
        "",
        f"1. **One leader's core**, at any size: a topic gets at most {_round(1e6 / single.leader)} singles/s or "
        f"{_round(1e6 / batch.leader)} batched messages/s, and {BUSY:.0%} of that with room for bursts. More shards do "
        "not help a hot topic; several topics do.",
        f"2. **All cores**, from the first machine on: {shards} shards fill three machines. Add machines in threes.",
        f"3. **Forwarding**, if clients send singles to any node: {share:.0%} of the processor time is then that of "
        "fronts. Direct addresses avoid it, and batches make it small.",
        f"4. **The links** follow the size of messages: with singles of more than {most / 1000:.1f} kB, or batched "
        f"messages of more than {most_batched / 1000:.1f} kB, 10 Gbit/s are full before the cores are.",
        f"5. **The map** has {MAX_SHARDS} shards, which the cores of {full} such machines carry. It may pin 50,000 "
        "names: give patterns to shards, not names.",
        f"6. **Memory** is far: {memory / 1000:.1f} GB of a machine after these loads, {shards} GB at all limits.",
        "",
        "The model leaves out the disks. Each node syncs its own journal, so three machines with these shards have "
        f"{shards} journals each that sync at the same time: use local NVMe, or `journal_dir` on several disks. It "
        "also leaves out consumers: `e2e` costs about as much processor time per message as a single "
        "([cost](cost.md)).",
    ]
    return "\n".join(text)


_FUNCTION = """## Sixteen processes

`tests/system/test_many_shards.py` (in `make long`) starts four shards of four nodes on one machine, 16 processes of
`hadelay serve`, publishes batches over topics of all shards through nodes of all shards, receives through others, and
counts: each message once, each topic in one shard. On 2026-11-30, with two busy cores, 10,240 messages over 32 topics
were handed out once each; the test took 26 s with start and stop. That shows the function, not the speed.
"""


def plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.hashsalt": "scaling", "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6))
    if next(row for row in rows if row.name == "shards, scale").samples:
        rates = [_value(rows, "scale", f"single, {count} shards") for count in COUNTS]
        left.plot([0, *COUNTS], [0, *(rates[0] * count for count in COUNTS)], "--", color="#888", label="S × one shard")
        left.plot(COUNTS, rates, "o", color="#c0392b", label="measured")
    left.set(xlabel=f"shards, each process with {SHARE:.0%} of a core", ylabel="singles/s", ylim=(0, None))
    left.legend(frameon=False)
    single, machines = Model.fit(rows, "single"), range(3, MACHINES[-1] + 1, 3)
    for forwarded, name, style in ((0.0, "to the leaders", "-"), (1.0, "all forwarded", "--")):
        shards = [min(MAX_SHARDS, single.shards(m, forwarded)) for m in machines]
        right.plot(machines, [count * single.topic() / 1e6 for count in shards], style, color="#3b6ea5", label=name)
    right.set(xlabel=f"machines of {THREADS} threads (prediction)", ylabel="million singles/s", ylim=(0, None))
    right.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("results", type=Path, help="results.json of `python -m bench shards`")
    parser.add_argument("--note", default="", help="a sentence for the page, about the conditions of the run")
    parser.add_argument(
        "--add", action="store_true",
        help="keep machine, note and other rows of the page, and put these rows in; say in the note when they are from",
    )  # fmt: skip
    chosen = parser.parse_args()
    said, _ = read(chosen.results.read_text())
    said["rows"] = [row for row in said["rows"] if row["name"].startswith("shards")]
    if chosen.add:
        said = added(said, read(RESULTS.read_text())[0])
    if chosen.note:
        said["note"] = " ".join(filter(None, [said.get("note"), chosen.note]))
    _, rows = read(json.dumps(said))
    text = page(said, rows)
    plot(rows, PLOT)
    PAGE.write_text(text)
    RESULTS.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
