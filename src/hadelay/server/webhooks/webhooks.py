"""What a node has of webhooks: the pool, the alerts, the guard; told when the node leads and what happens to topics."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from hadelay.ledger.topics import Topic
from hadelay.model import Event
from hadelay.platform.runtime import Runtime
from hadelay.raft.ports import Propose
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.server.reading import Reader
from hadelay.server.replica import Replica
from hadelay.server.webhooks.alerts import Alerts
from hadelay.server.webhooks.call import Caller
from hadelay.server.webhooks.pool import Pool
from hadelay.settings.node import Config

log = structlog.get_logger("hadelay")


class Webhooks:
    """Webhooks of one node: calls about messages, and alerts about dead letters. Idle until the pool has a caller."""

    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        replica: Replica,
        now_ms: Callable[[], int],
        propose: Propose,
        *,
        dispatcher: DeliveryLoop,
        reader: Reader,
    ) -> None:
        """now_ms: cluster time, Unix ms."""
        self._runtime, self._replica = runtime, replica
        self.pool = Pool(config, runtime, replica, now_ms, propose, dispatcher=dispatcher, reader=reader)
        self.alerts = Alerts(config, runtime, replica, now_ms, propose)
        self._changed: dict[int, Topic] = {}
        #: Numbers of topics in which messages have died.
        self._died: set[int] = set()

    def call_by(self, caller: Caller) -> None:
        """Before the node is started."""
        self.pool.caller = self.alerts.caller = caller

    def on_leader(self, term: int) -> None:
        """Once the dispatcher works."""
        self._died = {topic.number for topic in self._replica.ledger.topics.all if topic.settled[Event.DEAD]}
        if self.pool.caller is not None:
            self.pool.on_leader(term)
            self.alerts.on_leader(term)

    def on_follower(self) -> None:
        self.pool.on_follower()
        self.alerts.on_follower()

    def on_topic(self, topic: Topic) -> None:
        """Its settings changed, or messages of it died. Called by apply, so nothing is done here and now."""
        if self.pool.caller is None:
            return
        if topic.settled[Event.DEAD] and topic.number not in self._died:
            self._died.add(topic.number)
            log.warning("first_death", topic=topic.name, look=f"hadelay dead list {topic.name}")
        if not self._changed:
            self._runtime.call_soon(self._look)
        self._changed[topic.number] = topic

    def _look(self) -> None:
        changed, self._changed = self._changed, {}
        for topic in changed.values():
            self.pool.on_topic(topic)
            self.alerts.on_topic(topic)

    @property
    def busy(self) -> bool:
        """Calls are under way, or what came of them is not on record yet."""
        return self.pool.busy
