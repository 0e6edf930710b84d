"""A check that cannot fail is no check: every deliberate bug is noticed, by the check that is named for it."""

from __future__ import annotations

import pytest

from hadelay.testing.mutations import MUTATIONS, broken
from hadelay.testing.nemesis import Nemesis
from hadelay.testing.run import FAULTS_S, Report, build, drive

#: Where a mutation shows first, so that the test need not look far. `python -m tests.sim.test_mutations` finds them.
FIRST = dict.fromkeys(MUTATIONS, range(1, 9))


def report_of(name: str, seed: int) -> Report:
    cluster = build(seed)
    faults = dict.fromkeys(MUTATIONS[name].faults, 1.0)
    return drive(cluster, Nemesis(cluster, FAULTS_S, faults))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_bug_is_noticed(name: str):
    with broken(name) as mutation:
        for seed in FIRST[name]:
            report = report_of(name, seed)
            if report.failure:
                assert report.invariant.startswith(mutation.caught_by), report.failure
                return
    pytest.fail(f"nothing noticed that {mutation.what}")


def test_without_a_bug_the_same_seeds_pass():
    for name in list(MUTATIONS)[:4]:
        assert not report_of(name, 1).failure


if __name__ == "__main__":
    for mutation_name in MUTATIONS:
        with broken(mutation_name):
            found = next(((s, r) for s in range(1, 200) if (r := report_of(mutation_name, s)).failure), None)
            print(mutation_name, found and (found[0], found[1].failure), flush=True)
