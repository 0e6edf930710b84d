"""A check that cannot fail is no check: every deliberate bug is noticed, by the check that is named for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hadelay.testing.mutations import MUTATIONS, broken
from hadelay.testing.nemesis import Nemesis
from hadelay.testing.run import FAULTS_S, Report, build, drive
from tests.sim.test_journal_torture import torture

#: Most show in the first seed or the second.
SEEDS = range(1, 61)
#: Takes a certain order of faults, and this seed has it. Where it no longer does, the others are looked through.
FIRST = {"wiped_node_votes": (23,)}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def report_of(name: str, seed: int) -> Report:
    cluster = build(seed)
    faults = dict.fromkeys(MUTATIONS[name].faults, 1.0)
    return drive(cluster, Nemesis(cluster, FAULTS_S, faults))


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name != "forgotten_vote"])
def test_a_bug_is_noticed(name: str):
    found: list[str] = []
    with broken(name) as mutation:
        for seed in (*FIRST.get(name, ()), *SEEDS):
            report = report_of(name, seed)
            if report.failure:
                found.append(f"seed {seed}: {report.failure}")
                if report.invariant.startswith(mutation.caught_by):
                    return
    pytest.fail(f"no {mutation.caught_by} noticed that {mutation.what}; but: {found[:5]}")


def test_a_forgotten_vote_is_noticed():
    """It takes a crash between two votes of one term: rare in a cluster, common when the journal is tortured."""

    def lives() -> None:
        for seed in range(50):
            torture(seed)

    with broken("forgotten_vote"), pytest.raises(AssertionError, match="vote was forgotten"):
        lives()


def test_without_a_bug_the_same_faults_break_nothing():
    for name in ("no_sync", "dispatch_before_commit", "wiped_node_votes", "wall_clock_stamps"):
        assert not report_of(name, 1).failure
