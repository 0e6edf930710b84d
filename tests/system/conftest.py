"""Every test here starts processes: the marker is given to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.system.cluster import Cluster

Make = Callable[..., Cluster]
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.timeout(120))


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Make]:
    """make_cluster(settings=…, sync=…, nodes=…): a running cluster of this test's own."""
    with ExitStack() as stack:

        def make(**options: object) -> Cluster:
            return stack.enter_context(Cluster(tmp_path / "cluster", **options))  # type: ignore[arg-type]

        yield make


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes that the tests of a module share, and leave running."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
