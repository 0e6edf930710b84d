"""Webhooks of one node: calls about messages, and alerts about dead letters. Both work only while the node leads."""

import structlog

from hadelay.ledger.topics import TopicState
from hadelay.model import Event
from hadelay.server.node import Node
from hadelay.server.webhooks.alerts import Alerts
from hadelay.server.webhooks.calls import Call
from hadelay.server.webhooks.pool import Pool

log = structlog.get_logger("hadelay")


class Webhooks:
    """Attaches itself to a node that has not started yet."""

    def __init__(self, node: Node, call: Call) -> None:
        self._node = node
        self.pool, self.alerts = Pool(node, call), Alerts(node, call)
        self._changed: dict[int, TopicState] = {}
        #: Numbers of topics in which messages have died.
        self._died: set[int] = set()
        node.on_topic = self.on_topic
        node.leadership.parts.append(self)

    def on_leader(self, term: int) -> None:
        self._died = {topic.number for topic in self._node.ledger.topics.all if topic.settled[Event.DEAD]}
        self.pool.on_leader(term)
        self.alerts.on_leader(term)

    def on_follower(self) -> None:
        self.pool.on_follower()
        self.alerts.on_follower()

    def on_topic(self, topic: TopicState) -> None:
        """The topic's settings changed, or messages of the topic died. Apply calls this, so the work is done later."""
        if topic.settled[Event.DEAD] and topic.number not in self._died:
            self._died.add(topic.number)
            log.warning("first_death", topic=topic.name, look=f"hadelay dead list {topic.name}")
        if not self._changed:
            self._node.runtime.call_soon(self._look)
        self._changed[topic.number] = topic

    def _look(self) -> None:
        changed, self._changed = self._changed, {}
        for topic in changed.values():
            self.pool.on_topic(topic)
            self.alerts.on_topic(topic)
