"""Base class of the services. It can propose a command, confirm a read, ask the leader, and find a topic.

Reads are linearizable by ReadIndex: the node first learns how far the log was committed when the read began, waits
until it has applied that much, and then answers from its own state.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from hadelay.api.service import Actor, answered
from hadelay.codec import commands
from hadelay.codec.results import Refused
from hadelay.errors import HadelayError, NotFound, OutcomeUnknown, shortened
from hadelay.ledger.topics.topics import TopicState
from hadelay.server.node import Node
from hadelay.server.refusals import refusal

log = structlog.get_logger("hadelay")


class Service:
    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def _shard(self) -> int | None:
        """Index of this cluster in the shard map; None if there is no map."""
        ledger = self._node.ledger
        return ledger.shards.index_of(ledger.group)

    async def _propose(self, command: bytes) -> Any:
        """Propose a command and return its result. If apply refuses the command, raises the error."""
        result = await answered(self._node.publishing.propose, command)
        if isinstance(result, Refused):
            raise refusal(result)
        return result

    async def _administer(self, by: Actor, action: str, target: str, command: bytes) -> Any:
        """Propose a command that apply notes in the audit trail."""
        target = shortened(target)
        command = commands.encode_audited(self._node.name, by.token_id, by.token, action, target, command)
        log.info("admin_action", action=action, target=target, token=by.token, token_id=by.token_id)
        return await self._propose(command)

    async def _ask_leader(self, op: str, payload: Any, timeout_s: float) -> Any:
        """Call a link operation on the leader and return its answer."""
        return await answered(self._node.leadership.ask_leader, op, payload, timeout_s)

    async def _confirm(self, stale: bool = False) -> None:
        if not stale:
            await answered(self._node.raft.read_index)

    async def _judge(self, problem: Callable[[], HadelayError | None]) -> None:
        """Raise the error that `problem` returns about this node's state; before that, confirm that the state is
        current. Raises NoLeader if it cannot be confirmed."""
        if problem() is not None:
            await answered(self._node.leadership.confirm, problem)

    def _topic(self, name: str) -> TopicState:
        topic = self._node.ledger.topic(name)
        if topic is None:
            raise NotFound(f"there is no topic {name!r}; the first message, or a PUT, creates a topic")
        return topic


@contextmanager
def once_begun(begun: bool = True) -> Iterator[None]:
    """Context for the rest of a request of which a part is done: no later error may claim that nothing happened."""
    try:
        yield
    except HadelayError as error:
        if not begun:
            raise
        raise partly_done(error) from error


def partly_done(error: HadelayError) -> HadelayError:
    """Error for a request of which a part is done: an error that claims that nothing happened becomes
    OutcomeUnknown."""
    if error.retryable and error.outcome_known:
        return OutcomeUnknown(f"a part of the request is done, the rest is not: {error}")
    return error
