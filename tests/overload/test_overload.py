"""Every scenario of overload, small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chaos import tools
from chaos.cluster import LocalCluster
from tests.overload.rig import Rig, nodes
from tests.overload.scenarios import SCENARIOS, SMALL

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with nodes(tmp_path_factory.mktemp("overload"), *SMALL.settings) as running:
        yield running


@pytest.mark.parametrize("name", SCENARIOS)
async def test_more_than_it_can_take(cluster: LocalCluster, name: str) -> None:
    if name == "stalled" and tools.missing("cc"):
        pytest.skip(tools.missing("cc"))
    async with Rig(cluster) as rig:
        await SCENARIOS[name](rig, SMALL)
