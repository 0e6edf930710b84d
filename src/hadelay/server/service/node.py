"""All services of one node for the HTTP layer: async functions that call operations of `Node`, or read its state.

Arguments are plain values: ids are u64 ints, times Unix ms, durations ms, names str. Answers are documents of the API
with times as text. Refusals are raised as `hadelay.errors`. Every method may be called on any node: linearizability,
forwarding to the leader, group commit and the wait for a majority happen behind it.
"""

from collections.abc import Mapping

from hadelay.api.service import Actor, Measured
from hadelay.codec import commands
from hadelay.errors import Conflict
from hadelay.rights import AuditEntry, Token
from hadelay.server.metrics import NodeMetrics
from hadelay.server.node import Node
from hadelay.server.service.attention import AttentionService
from hadelay.server.service.batches import BatchService
from hadelay.server.service.cluster import Clusters
from hadelay.server.service.consumers import ConsumerService
from hadelay.server.service.consuming import ConsumingService
from hadelay.server.service.files import Files
from hadelay.server.service.groups import GroupService
from hadelay.server.service.jobs import JobService
from hadelay.server.service.messages import MessageService
from hadelay.server.service.overview import Overview
from hadelay.server.service.part import Service, once_begun
from hadelay.server.service.schedules import ScheduleService
from hadelay.server.service.shards import ShardService
from hadelay.server.service.topics import TopicService
from hadelay.server.webhooks.pool import Webhooks


class TokenService(Service):
    """Services for access tokens and the audit trail."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        #: True once this node has caught up after its start. Before that, it lacks tokens and revocations, so it judges
        #: no token.
        self.knows_tokens = False

    @property
    def tokens(self) -> Mapping[str, Token]:
        """Tokens by id, as far as this node knows them; each change makes a new mapping."""
        return self._node.ledger.tokens

    def now_ms(self) -> int:
        """Cluster time in Unix ms; while this node does not know it, the time of the log entry applied last."""
        return self._node.now_ms() if self._node.clock.ready else self._node.ledger.now_ms

    async def list_tokens(self, *, stale: bool = False) -> list[Token]:
        await self._confirm(stale)
        return list(self.tokens.values())

    async def create_token(
        self,
        name: str,
        digest: bytes,
        scopes: list[str],
        lifetime_ms: int | None,
        by: Actor,
        *,
        aws_key: bytes | None = None,
    ) -> Token:
        """Create a token; when the call returns, this node knows the token. aws_key: secret access key for AWS SDKs.
        Raises BadRequest, LimitReached."""
        command = commands.encode_token_create(name, digest, scopes, lifetime_ms, aws_key)
        await self._administer(by, "token.create", f"{digest.hex()[:12]} {name}: {' '.join(scopes)}", command)
        with once_begun():
            await self._confirm()
        token = next((token for token in self.tokens.values() if token.hash == digest), None)
        if token is None:
            raise Conflict("the token was created, but someone else revoked it at once")
        return token

    async def revoke_token(self, token_id: str, by: Actor) -> None:
        """Revoke a token. This node refuses the token at once, other nodes when they apply the change. Raises
        NotFound."""
        found = self.tokens.get(token_id)
        target = token_id if found is None else f"{token_id} {found.name}"
        await self._administer(by, "token.revoke", target, commands.encode_token_revoke(token_id))
        with once_begun():
            await self._confirm()

    async def note(self, action: str, target: str, by: Actor) -> None:
        """Add an entry to the audit trail for a change whose own command makes no entry."""
        await self._administer(by, action, target, commands.encode_noop())

    async def audit(self, after: int, limit: int, *, stale: bool = False) -> list[AuditEntry]:
        """Entries of the audit trail with numbers above `after`, the oldest first."""
        await self._confirm(stale)
        return [entry for entry in self._node.ledger.audit.entries if entry.number > after][:limit]


class NodeService:
    """All services of one node for the HTTP layer."""

    def __init__(self, node: Node, webhooks: Webhooks | None = None) -> None:
        """webhooks: source of the webhook metrics of /metrics, and of the health of receivers."""
        self._node = node
        self._metrics = NodeMetrics(node, webhooks)
        self.node, self.cluster_id = node.name, node.config.cluster.id
        # Publishing takes a callback, not a coroutine: a future per request would cost more than the call itself.
        self.publish = node.publishing.publish
        self.consume, self.messages, self.topics = ConsumingService(node), MessageService(node), TopicService(node)
        self.jobs, self.groups = JobService(node), GroupService(node)
        self.cluster, self.files, self.access = Clusters(node), Files(node), TokenService(node)
        self.attention, self.shards = AttentionService(node), ShardService(node)
        self.overview = Overview(node, self.topics, webhooks)
        self.schedules, self.consumers = ScheduleService(node), ConsumerService(node)
        self.batches = BatchService(node)
        self.sessions = node.sessions

    @property
    def leader_name(self) -> str | None:
        """Name of the leader as this node knows it, for the header `Hadelay-Leader`."""
        return self._node.raft.leader

    @property
    def leader_since_ms(self) -> int | None:
        """Time in Unix ms at which the present leader took over, or at which this node first heard it; None: not
        known."""
        row = next((row for row, _ in self._node.logbook.terms()), None)
        return row.since_ms if row is not None and row.leader == self.leader_name else None

    @property
    def applied_index(self) -> int:
        """Index of the log entry applied last, for the header `Hadelay-Applied` of stale reads."""
        return self._node.raft.applied_index

    async def metrics(self) -> Measured:
        return await self._node.reader.in_slices(self._metrics.collect)
