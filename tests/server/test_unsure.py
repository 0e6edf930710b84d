"""A node that does not know the cluster's state refuses nothing for good."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from chaos.sim.cluster import SimCluster
from hadelay.api.service import Actor, answered
from hadelay.codec.leasetokens import encode_leases
from hadelay.errors import HadelayError
from hadelay.model import Draft
from hadelay.server.node import Node
from hadelay.server.service.cluster import Clusters
from hadelay.server.service.consuming import ConsumingService
from hadelay.server.service.topics import TopicService

LEASES = encode_leases(0, 1, 1, [0], [5], [0])
GROUPED = Draft("orders", 0, True, 0, 0, b"", b"x", group=7)
ASK: dict[str, Callable[[Node], Coroutine[Any, Any, Any]]] = {
    "publish with a group": lambda node: answered(lambda done: node.publishing.publish([GROUPED], None, done)),
    "nack dead": lambda node: ConsumingService(node).settle("nack", LEASES, None, dead=True),
    "nack uncounted": lambda node: ConsumingService(node).settle("nack", LEASES, None, count=False),
    "ack with a result": lambda node: ConsumingService(node).settle("ack", LEASES, None, results=[b"1"]),
    "extend with progress": lambda node: ConsumingService(node).settle("extend", LEASES, 1000, "half"),
    "masked headers": lambda node: TopicService(node).put_topic("t", {"webhook": {"headers": {"X": "****"}}}, Actor()),
    "transfer": lambda node: Clusters(node).transfer("n9", Actor()),
    "drain": lambda node: Clusters(node).drain("n9", False, Actor()),
    "quorum": lambda node: Clusters(node).quorum("n9"),
    "member added": lambda node: Clusters(node).add_member("n2", "n2:1", Actor()),
    "member removed": lambda node: Clusters(node).remove_member("n9", Actor()),
}


@pytest.fixture(scope="module")
def cluster() -> SimCluster:
    """One node with an empty ledger, and no link to the others."""
    cluster = SimCluster(5, restart=False)
    cluster.start("n1")
    cluster.world.run_for(1.0)
    return cluster


@pytest.mark.parametrize("what", ASK)
def test_a_node_that_knows_nothing_refuses_nothing_for_good(cluster: SimCluster, what: str) -> None:
    (node,) = cluster.nodes()

    async def ask() -> HadelayError | None:
        asked = asyncio.create_task(ASK[what](node))
        for _ in range(300):
            await asyncio.sleep(0)
            if asked.done():
                break
            cluster.world.run_for(0.1)
        error = asked.exception()
        assert error is None or isinstance(error, HadelayError)
        return error

    error = asyncio.run(ask())
    assert error is not None
    assert (error.http_status, error.retryable) == (503, True), error
