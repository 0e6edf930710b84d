"""One node as its HTTP layer sees it (`api.service.Service`): futures over the callbacks of `Node`, and the reads."""

from __future__ import annotations

from hadelay.api.metrics import Measured
from hadelay.server.metrics import NodeMetrics
from hadelay.server.node import Node
from hadelay.server.service.cluster import Clusters
from hadelay.server.service.consuming import Consuming
from hadelay.server.service.files import Files
from hadelay.server.service.messages import Messages
from hadelay.server.service.tokens import Access
from hadelay.server.service.topics import Topics


class NodeService:
    """Implements api.service.Service."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._metrics = NodeMetrics(node)
        self.node, self.publish = node.name, node.publish
        self.consume, self.messages, self.topics = Consuming(node), Messages(node), Topics(node)
        self.cluster, self.files, self.access = Clusters(node), Files(node), Access(node)

    @property
    def leader_name(self) -> str | None:
        return self._node.raft.leader

    @property
    def applied_index(self) -> int:
        return self._node.raft.applied_index

    async def metrics(self) -> Measured:
        return await self._node.reader.in_slices(self._metrics.collect)
