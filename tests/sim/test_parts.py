"""The state machine on its storage alone, deeper than the whole cluster goes. Raft alone: tests/raft."""

from __future__ import annotations

import pytest

from tests.sim import statesim


@pytest.mark.parametrize("block", range(2))
def test_an_interrupted_replica_ends_like_one_that_never_was(block: int):
    failed = [text for seed in range(block * 10 + 1, block * 10 + 11) if (text := statesim.run(seed))]
    assert not failed, "\n".join(failed)
