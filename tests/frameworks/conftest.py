"""One cluster of three real nodes for all frameworks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.frameworks.support import Running
from tests.system.cluster import Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture(autouse=True)
def _all_nodes_run(request: pytest.FixtureRequest) -> None:
    """Restart the nodes that a failed test has killed: all later tests would fail, too."""
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").revive()


@pytest.fixture
def running(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Worker processes of a framework, ended after the test."""
    processes = Running(cluster, tmp_path_factory.mktemp("workers"))
    yield processes
    processes.close()
