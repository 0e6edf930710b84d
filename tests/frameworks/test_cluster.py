"""The cluster that all tests of frameworks share."""

from __future__ import annotations

import pytest

from tests.system.cluster import Cluster


@pytest.mark.parametrize("turn", range(2))
def test_nodes_that_a_test_has_killed_run_in_the_next(cluster: Cluster, turn: int) -> None:
    for name in cluster.urls:
        assert cluster.ask(name, "GET", "/livez").status == 200
    cluster.kill(cluster.leader())
