"""Write docs/record/mutations.md: which deliberate bug is noticed by which check, and in which seed. Takes some
minutes; with NAMEs only these rows are found anew. A test compares the names, and begins with these seeds."""

from __future__ import annotations

import argparse
import multiprocessing
import re
from pathlib import Path
from typing import NamedTuple

from chaos.sim.cli import Options, _quiet
from chaos.sim.mutations import MUTATIONS, SEEDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "record" / "mutations.md"
#: Noticed by a test of their own, as what, and within how many seeds of it.
BY_HAND = {
    "forgotten_vote": ("I13 log safety, vote on disk", 50),
    "wiped_node_votes": ("I1 lost", 1),
    "two_lists_at_once": ("I12 divergence, entries", 1),
    "kept_change": ("I13 log safety, members", 1),
    "founder_joins": ("I12 divergence, entries", 1),
    "old_reply": ("what leaders count", 1),
    "carried_unblocked": ("Rule G, in the model of the ledger", 30),
    "purged_heads": ("Rule G, in the model of the ledger", 30),
    "run_with_a_gap": ("Rule G, in the model of the ledger", 30),
    "run_let_go": ("Rule G, in the model of the ledger", 30),
    "acked_left_out": ("one copy each, in the model of subscriptions", 25),
    "moved_uncopied": ("one copy each, in the model of subscriptions", 25),
    "old_round": ("stale read", 1),
    "early_retirement": ("stale read, in a test of the hand-out", 1),
    "kept_progress": ("I2 conservation, in a test of the ledger", 1),
    "polls_are_no_use": ("expires_after, in a test of the hand-out", 1),
    "new_chain": ("max_wait, in a test of the ledger", 1),
    "kept_log": ("I13 log safety, applied entry", 1),
}

HEAD = """<!-- Made by tools/mutations.py; change chaos/sim/mutations/ instead. -->
# Deliberate bugs, and what notices them

A check that cannot fail is no check. Each of these bugs is put into the shipped classes, one at a time; then the
[simulator](../explanation/simulation.md) runs seed after seed, from 1 on, with the faults named here and no others,
until the check that is meant notices. The last column is that seed: how many it took. `python -m chaos sim --seed
SEED --mutation NAME` shows what happened.

Where the faults begin with `raft:`, it is the smaller simulator of Raft alone (`python -m chaos sim --raft`).

| Bug | What is wrong | Faults | Noticed by | Seeds |
|---|---|---|---|---|
"""
TAIL = """
Those by hand take an order of faults that is rare in a cluster, and have tests of their own: `forgotten_vote` a crash
between two votes of one term, noticed by the test that tortures the journal alone, with a power cut at any I/O step,
within 50 of its lives. The others are noticed by schedules: `wiped_node_votes` by a disk that is replaced while another
node is down, `two_lists_at_once` by two leaders that change the members in two ways, `kept_change` by a leader that was
cut off when it changed them, and `founder_joins` by another cluster's node that is added while commits are slow.
`old_reply` takes an answer that is delayed over two elections, and `old_round` one that is delayed while another leader
is elected and commits, all within one interval of heartbeats: tests of one node whose followers are played. `kept_log`
takes a leader that was cut off with a longer log than the snapshot that it gets later.
`new_chain` takes two replacements of one pending message in one command: the test of the ledger that compares a
command with its rows, one by one, notices it. `carried_unblocked` and `purged_heads` take message groups whose hour is
over, or that are purged in part, `run_with_a_gap` a leader that names the wrong messages, and `run_let_go` a consumer
that settles one of several: the test of the ledger beside a model of message groups notices them.
`acked_left_out` and `moved_uncopied` take a message that is settled or moved between two steps of a fill: the test
beside a model of subscriptions notices them.

Of I1 to I18 three are missing here, because no bug breaks them: I4 and I7 count what is allowed, I11 is not promised
([simulation](../explanation/simulation.md)).
"""


class Row(NamedTuple):
    what: str
    faults: str
    noticed_by: str
    seed: int


def read(page: str) -> dict[str, Row]:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \| (\d+) \|$", page, re.M)
    return {name: Row(what, faults, noticed_by, int(seed)) for name, what, faults, noticed_by, seed in rows}


def find(name: str) -> Row | None:
    """None: not within SEEDS."""
    mutation = MUTATIONS[name]
    faults = ", ".join(fault.replace("_", " ") for fault in mutation.faults) or "none"
    faults = f"raft: {faults}" if mutation.raft else faults
    if name in BY_HAND:
        return Row(mutation.what, "by hand", *BY_HAND[name])
    for seed in SEEDS:
        report = Options(name).run(seed)
        if report.failure and report.invariant in mutation.caught_by:
            return Row(mutation.what, faults, report.invariant, seed)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*MUTATIONS, []])
    parser.add_argument("--jobs", type=int, help="processes; one per core otherwise")
    options = parser.parse_args()
    names = options.names or list(MUTATIONS)
    with multiprocessing.get_context("spawn").Pool(options.jobs, initializer=_quiet) as pool:
        found = dict(zip(names, pool.map(find, names, chunksize=1), strict=True))
    known = read(PAGE.read_text())
    rows = {name: found[name] if name in found else known.get(name) for name in MUTATIONS}
    missing = [name for name, row in rows.items() if row is None]
    assert not missing, f"nobody noticed {missing}"
    lines = [f"| `{name}` | {' | '.join(map(str, row))} |\n" for name, row in rows.items() if row is not None]
    PAGE.write_text(HEAD + "".join(lines) + TAIL)


if __name__ == "__main__":
    main()
