"""One node for the HTTP layer: futures over the callbacks of `Node`, and reads.

Arguments are plain values: ids are u64 ints, times Unix ms, durations ms, names str. Answers are documents of the API
with times as text. Refusals are raised as `hadelay.errors`. Every method may be called on any node: linearizability,
forwarding to the leader, group commit and the wait for a majority happen behind it.
"""

from hadelay.api.service import Measured
from hadelay.server.metrics import NodeMetrics
from hadelay.server.node import Node
from hadelay.server.service.cluster import Clusters
from hadelay.server.service.consuming import ConsumingService
from hadelay.server.service.files import Files
from hadelay.server.service.messages import MessageService
from hadelay.server.service.tokens import TokenService
from hadelay.server.service.topics import TopicService
from hadelay.server.webhooks.webhooks import Webhooks


class NodeService:
    """One per node."""

    def __init__(self, node: Node, webhooks: Webhooks | None = None) -> None:
        """webhooks: for /metrics."""
        self._node = node
        self._metrics = NodeMetrics(node, webhooks)
        #: The node's name.
        self.node = node.name
        # A callback and no future: a publish per request is the hottest path, and a future costs more than the call.
        self.publish = node.publish
        self.consume, self.messages, self.topics = ConsumingService(node), MessageService(node), TopicService(node)
        self.cluster, self.files, self.access = Clusters(node), Files(node), TokenService(node)

    @property
    def leader_name(self) -> str | None:
        """Leader in this node's view, for the header `Hadelay-Leader`."""
        return self._node.raft.leader

    @property
    def applied_index(self) -> int:
        """Applied index, for the header `Hadelay-Applied` of stale reads."""
        return self._node.raft.applied_index

    async def metrics(self) -> Measured:
        return await self._node.reader.in_slices(self._metrics.collect)
