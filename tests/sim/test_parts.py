"""The state machine on its storage alone, deeper than the whole cluster goes. Raft alone: tests/raft."""

from __future__ import annotations

import pytest

from tests.scale import size
from tests.sim import statesim


@pytest.mark.parametrize("block", range(size(1, 4)))
def test_an_interrupted_replica_ends_like_one_that_never_was(block: int):
    failed = [text for seed in range(block * 8 + 1, block * 8 + 9) if (text := statesim.run(seed))]
    assert not failed, "\n".join(failed)
