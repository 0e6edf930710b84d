"""The parts of a node alone, deeper than the whole cluster goes: Raft, and the state machine on its storage."""

from __future__ import annotations

import pytest

from tests.sim import raftsim, statesim


@pytest.mark.parametrize("block", range(4))
def test_raft_keeps_its_promises(block: int):
    failed = [text for seed in range(block * 40 + 1, block * 40 + 41) if (text := raftsim.run(seed))]
    assert not failed, "\n\n".join(failed)


@pytest.mark.parametrize("seed", [870])
def test_raft_seeds_that_failed_once(seed: int):
    assert raftsim.run(seed) == ""


@pytest.mark.parametrize("block", range(3))
def test_an_interrupted_replica_ends_like_one_that_never_was(block: int):
    failed = [text for seed in range(block * 10 + 1, block * 10 + 11) if (text := statesim.run(seed))]
    assert not failed, "\n".join(failed)
