"""docs/explanation/measured.md, written from the results of a run; nothing on the page is written by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from bench.delays.contenders import CONTENDERS
from bench.delays.field import HERE, ROOT
from bench.delays.plots import plots
from bench.delays.run import Sizes
from bench.delays.summary import Results, errors, losses, names, table
from bench.delays.workloads import WORKLOADS

#: Results that the page is written from, the page, and the directory of its plots.
RESULTS, PAGE, IMAGES = HERE / "measured.json", "docs/explanation/measured.md", "docs/images"

#: Number of rounds of a full run, whose medians count.
_MEDIAN_OF = 3

_HEAD = """<!-- Written by `python -m bench delays --page RESULTS` from bench/delays/measured.json. -->

# Measured beside other systems

`python -m bench delays` does the same delayed work on hadelay and on systems that people use for it today: publish,
wait, deliver on time, ack; with the server killed, with a worker killed, and with a long delay. Real servers run with
the set-up that their documentation describes. Each contender is [one module](../../bench/delays/contenders), so its
authors can object to a setting.
"""

_JUDGE = """
## How it is judged

Producers and workers write what they see into files; the servers are not asked. [The
judge](../../bench/delays/judge.py) reads these files and knows no contender. `make test` shows that it sees planted
violations of each kind.

- **lost**: the server acknowledged the publish, and no worker got the message, or only a worker that was killed
  meanwhile. No message came for three visibility timeouts and 30 s. Messages that still came when the time limit ended
  count as **unfinished**.
- **early**: a worker had the message in hand before its due time, by the clock of the machine; `early by` is the most.
  hadelay decides by cluster time, and a new leader may be about a millisecond ahead ([why](time-and-dispatch.md)):
  such a hand-out counts as early here.
- **doubled**: a worker got a message that another worker had before, although that worker was not killed. A second
  hand-out after the first worker was killed is **redelivered**, as it should be.
- **lateness**: first hand-out minus due time, taken in the worker. **gap**: the longest time without a hand-out while a
  message was due.
- **unsure**: messages of publishes that failed. Such a message may come once or never. Nobody publishes it again.
- **memory** is anonymous and shared memory of all server processes (hadelay: three nodes), without page cache; **disk**
  is the blocks of their files, preallocated ones included; both per pending message.
- Servers, workers and producers share the machine. Contenders take turns in each round, and ratios are taken within a
  round. `kill -9` ends a process and not the machine: what a system loses that does not sync shows only in a power cut,
  which is not measured here. hadelay alone has three nodes, so it does the work three times on the same cores.
"""


def page(results: Results, drawn: dict[str, list[str]]) -> str:
    parts = [_HEAD, _conditions(results), _contenders(results), _losses(results)]
    for workload, what in WORKLOADS.items():
        head, *lines = table(results, workload)
        if lines:
            parts.append(
                f"\n## ({what.letter}) {what.title[0].upper()}{what.title[1:]}\n\n{_size(results, workload)}\n"
            )
            parts.append("\n".join(_row(line) for line in (head, ["---"] * len(head), *lines)) + "\n")
            parts += [f"\n![{_alt(name)}](../images/{name})\n" for name in drawn.get(workload, [])]
    return "\n".join(part.strip("\n") + "\n" for part in [*parts, _JUDGE])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _alt(name: str) -> str:
    return name.removeprefix("delays-").removesuffix(".svg").replace("-", ", ")


def _conditions(results: Results) -> str:
    about, loads = results["machine"], [run["load"] for run in results["runs"]]
    small, rounds = results["sizes"] != Sizes().__dict__, _rounds(results)
    few = any(count < _MEDIAN_OF for counts in rounds.values() for count in counts.values())
    busy = max(loads) > 2 * (about["cpus"] or 1)
    commands = "; ".join(f"`{one}`" for one in results["command"].split("; "))
    text = [
        "## The run",
        f"- {about['date']}, commit {about['commit']}, {about['cpus']} × {about['cpu']}, Linux {about['kernel']}, "
        f"Python {about['python']}.",
        f"- Command: {commands}.",
        *_rounds_text(rounds),
        f"- Load average before the runs: {min(loads):.0f} to {max(loads):.0f}.",
        "- Sizes: " + ", ".join(f"{name} {value:g}" for name, value in results["sizes"].items()) + ".",
    ]
    if busy:
        text.append(
            "- **Under load**: other programs used the same cores. Compare contenders, and not with other pages."
        )
    if results.get("note"):
        text.append(f"- {results['note']}")
    if small or few:
        missing = ["sizes are small"] if small else []
        missing += ["some medians of three rounds are missing"] if few else []
        text.append(
            f"- **Not the full run**: {' and '.join(missing)}. A figure of one round says that a set-up works, and "
            "what it loses or doubles. The full run is `python -m bench delays`, without options."
        )
    for workload, what in WORKLOADS.items():
        run = names(results, workload)
        if absent := [name for name in results["contenders"] if name not in run]:
            text.append(f"- Not run in ({what.letter}): {', '.join(absent)}.")
    failed = [
        f"{name} in ({what.letter}): {wrong[0][:200]}"
        for workload, what in WORKLOADS.items()
        for name in names(results, workload)
        if (wrong := errors(results, workload, name))
    ]
    text += [f"- Failed: {one}" for one in failed]
    return "\n".join([text[0], "", *text[1:]])


def _rounds(results: Results) -> dict[str, Counter[str]]:
    """Workload → contender → number of its rounds."""
    counts: dict[str, Counter[str]] = {workload: Counter() for workload in WORKLOADS}
    for run in results["runs"]:
        counts[run["workload"]][run["contender"]] += 1
    return counts


def _rounds_text(rounds: dict[str, Counter[str]]) -> list[str]:
    """Lines that say of how many rounds the figures are medians; workloads with the same rounds share a line."""
    letters: dict[str, list[str]] = {}
    for workload, counts in rounds.items():
        by_number: dict[int, list[str]] = {}
        for name, number in counts.items():
            by_number.setdefault(number, []).append(f"`{name}`")
        parts = [f"{number} of {', '.join(who)}" for number, who in sorted(by_number.items(), reverse=True)]
        text = f"{next(iter(by_number))} each" if len(by_number) == 1 else "; ".join(parts)
        letters.setdefault(text, []).append(f"({WORKLOADS[workload].letter})")
    return [f"- Rounds in {', '.join(where)}: {text}." for text, where in letters.items() if text]


def _contenders(results: Results) -> str:
    lines = [["", "Set-up", "An acknowledged publish is", "Cancel", "Note"], ["---"] * 5]
    for name, about in results["contenders"].items():
        lines.append([f"`{name}`", about["setup"], about["durability"], about["cancels"] or "–", about["notes"] or "–"])
    text = ["## The contenders", "", *map(_row, lines)]
    left_out = dict(results["left_out"]) | {
        name: "not part of this run" for name in CONTENDERS.keys() - results["contenders"].keys()
        if name not in results["left_out"]
    }  # fmt: skip
    text += (
        ["", "Left out:", "", *(f"- `{name}`: {why}." for name, why in sorted(left_out.items()))] if left_out else []
    )
    return "\n".join([*text, "", *(f"- {name}: {why}." for name, why in NEVER.items())])


#: Systems that were looked at and have no module, with the reason.
NEVER = {
    "RabbitMQ's delayed-message plugin": "Debian has no package of it, and the project archived it in January 2026",
    "ElasticMQ": "it comes from Maven Central or as a container image, and the bench takes Debian, PyPI and npm only; "
    "moto stands for the SQS emulators",
    "SQS itself, EventBridge, QStash": "services; the bench has no network",
    "Temporal": "Debian has no package of its server",
}


def _losses(results: Results) -> str:
    found = losses(results)
    lines = [f"- {one}." for one in found] or ["- In none of these figures."]
    return "\n".join(["## Where another system is better", "", *lines])


def _size(results: Results, workload: str) -> str:
    size = results["sizes"]
    return {
        "steady": f"{size['rate']} messages/s for {size['seconds']:g} s, due 1 to {size['span_s']:g} s later, from "
        "four producers that publish ten or more with one call, where the client has such a call; each "
        "hundredth message is cancelled where the system can cancel. CPU is processor time per delivered message.",
        "burst": f"{size['burst']:,} messages; `drained` is the time from the start of that second to the last "
        "hand-out.",
        "pending": f"{size['pending']:,} messages, or as many as {size['pending_s']:g} s allow; then "
        f"{size['cancels']:,} are cancelled, one call per key, from four connections.",
        "server": f"{size['kills']} times, every {size['between_kills_s']:g} s. `after kill` is the time until a "
        "message arrives that fell due after the kill. hadelay fails over; the others are started again at once. "
        "`worker restarts` counts workers that ended with their server, and were started again as by a supervisor.",
        "worker": f"The worker holds {size['in_hand']}; visibility timeout {size['visibility_s']:g} s, where there is "
        "one. `all again` is the time from the kill until another worker has had all messages.",
        "visibility": f"{size['in_hand']} messages, due {3 * size['visibility_s']:g} s later; visibility timeout "
        f"{size['visibility_s']:g} s.",
    }[workload]  # fmt: skip


def write_page(results: Results) -> None:
    """Write the page, its plots and a copy of the results."""
    for old in (ROOT / IMAGES).glob("delays-*.svg"):
        old.unlink()
    drawn = plots(results, ROOT / IMAGES)
    (ROOT / PAGE).write_text(page(results, drawn))
    RESULTS.write_text(compact(results))


def compact(results: Results) -> str:
    """JSON with a line per run."""
    runs = ",\n".join(json.dumps(run, ensure_ascii=False) for run in results["runs"])
    about = json.dumps({key: value for key, value in results.items() if key != "runs"}, indent=1, ensure_ascii=False)
    return f'{about[:-2]},\n "runs": [\n{runs}\n ]\n}}\n'


def drawn_names(directory: Path) -> dict[str, list[str]]:
    """Names of the committed plots by workload, in the order of the page."""
    found: dict[str, list[str]] = {}
    for path in sorted(directory.glob("delays-*.svg"), key=lambda path: ("lateness" not in path.name, path.name)):
        found.setdefault(path.stem.split("-")[1], []).append(path.name)
    return found
