"""Raft alone under everything that can happen to it, from seeds: chaos/sim/raftsim.py has the world and the checks.

`python -m chaos sim --raft --seed FIRST --count COUNT` runs others. Seeds that once found something are kept by number.
"""

from __future__ import annotations

import logging

import pytest

from chaos.sim.raftsim import run_seed
from tests.scale import size

BLOCK = 20
#: 115: a beat that was scheduled before the leader was deposed; 242: a leader heard again after a silence, and a reply
#: that was owed to it; 246: syncs that overlap wrote their records in any order, and a process was killed between; 635:
#: what was answered in one term, remembered under the next; 2100956: a power cut that waited for a frame to be sent
#: came after the faults were over.
FOUND_SOMETHING = (115, 242, 246, 284, 376, 635, 870, 2100956)


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(size(1, 5)))
def test_safe_and_converging(block: int):
    for seed in range(10_000 + block * BLOCK, 10_000 + (block + 1) * BLOCK):
        assert not run_seed(seed).failure, f"seed {seed}"


@pytest.mark.parametrize("seed", FOUND_SOMETHING)
def test_seeds_that_found_bugs_pass(seed: int):
    assert not run_seed(seed).failure
