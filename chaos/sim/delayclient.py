"""Client of a topic with the setting `delay` in the simulated world."""

import random
from typing import Any

from chaos.sim.door import Client
from chaos.sim.owndelays import TOPIC
from hadelay.api.service import Actor, PublishDone, answered
from hadelay.errors import HadelayError
from hadelay.model import OWN_DELAY, Draft
from hadelay.server.service.node import NodeService

#: Share of runs with such a client; and delays, in ms, to which it sets the topic's `delay` (None removes the setting).
USED, _DELAYS_MS = 0.06, (None, 0, 300, 300, 1_500, 4_000)


class DelayClient(Client):
    """Client that changes the topic's delay, publishes messages with and without a due time, and consumes. In the drain
    (`good`: the end of the run, without faults), it only consumes."""

    def start(self) -> None:
        self.stopped = random.Random(f"{self.cluster.seed} client delays").random() >= USED
        if not self.stopped:
            self._next()

    def _next(self) -> None:
        self.world.after(0.3 if self.good else self.random.expovariate(1 / 0.12), self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        part, chance = self.next_act(), self.random.random()
        if self.good or chance < 0.4:
            self.take([TOPIC], "delayed messages taken")
        elif self.cluster.parts.take(part):
            if chance < 0.5:
                config = {"delay_ms": self.random.choice(_DELAYS_MS)}
                self.ask(lambda service: service.topics.put_topic(TOPIC, config, Actor()), lambda *_: None)
            else:
                self._publish()
        self._next()

    def _publish(self) -> None:
        due = [self.random.choice((OWN_DELAY, OWN_DELAY, 0, 700)) for _ in range(self.random.choice((1, 1, 3)))]
        drafts = [Draft(TOPIC, when_ms, True, 0, 0, b"", b"later") for when_ms in due]
        key = f"{self.name}.{self.acts}".encode()

        async def publish(service: NodeService) -> None:
            def begin(done: PublishDone) -> None:
                service.publish(drafts, key, done)

            await answered(begin)

        def replied(result: Any, error: HadelayError | None) -> None:
            self.note(f"publish with {due}: {error.type if error else 'stored'}")

        self.ask(publish, replied)
