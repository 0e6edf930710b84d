"""Client that publishes messages with `unique_for` (one message per key and period) in the simulated world."""

import random
from typing import Any

from chaos.sim.door import Client
from chaos.sim.uniques import TOPIC
from hadelay.api.service import Actor, PublishDone, answered
from hadelay.codec.meta import Meta, pack
from hadelay.errors import HadelayError
from hadelay.model import KEEP, REPLACE, Draft
from hadelay.server.service.node import NodeService

#: `USED`: share of runs with a UniqueClient. `_KEYS`: number of client keys that the client uses. `_PERIODS_MS`:
#: periods (unique_for) that the client chooses from, in ms.
USED, _KEYS, _PERIODS_MS = 0.3, 3, (200, 1_000, 2_500)
_EXPIRES_MS = 60_000


class UniqueClient(Client):
    """Client that publishes messages with `unique_for`, and consumes. In the drain (`good`: the end of the run, without
    faults), it only consumes."""

    def start(self) -> None:
        self.stopped = random.Random(f"{self.cluster.seed} uniques").random() >= USED
        #: Whether the cluster has accepted the topic's settings.
        self.made = False
        if not self.stopped:
            self._next()

    def _make(self) -> None:
        """Create the topic. The cluster deletes the topic when it is unused for long: during a suspension of all
        machines, or in the hours at the end of a run."""

        def replied(result: Any, error: HadelayError | None) -> None:
            self.made |= error is None

        config = {"expires_after_ms": _EXPIRES_MS}
        self.ask(lambda service: service.topics.put_topic(TOPIC, config, Actor()), replied)

    def _next(self) -> None:
        self.world.after(0.3 if self.good else self.random.expovariate(1 / 0.12), self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        part = self.next_act()
        if not self.made:
            self._make()
        elif self.good or self.random.random() < 0.4:
            self.take([TOPIC], "unique messages taken")
        elif self.cluster.parts.take(part):
            self._publish()
        self._next()

    def _publish(self) -> None:
        """Publish one to three messages, at times some of them without unique_for, or to replace a pending one."""
        rng, drafts = self.random, []
        for _ in range(rng.choice((1, 1, 1, 3))):
            key, plain = f"o{rng.randrange(_KEYS)}", rng.random() < 0.2
            mode = rng.choice((KEEP, REPLACE)) if plain else KEEP
            unique_ms = 0 if plain else rng.choice(_PERIODS_MS)
            due_ms, meta = rng.choice((0, 0, 400)), pack(Meta(key=key))
            drafts.append(
                Draft(TOPIC, due_ms, True, 0, 0, meta, b"once", None, key.encode(), mode, unique_ms=unique_ms)
            )
        idem = f"{self.name}.{self.acts}".encode() if rng.random() < 0.3 else None
        self._send(drafts, idem, 3)

    def _send(self, drafts: list[Draft], idem: bytes | None, tries: int) -> None:
        async def publish(service: NodeService) -> int:
            def begin(done: PublishDone) -> None:
                service.publish(drafts, idem, done)

            return len((await answered(begin)).duplicates)

        def replied(dropped: int | None, error: HadelayError | None) -> None:
            self.note(f"publish of {[d.key for d in drafts]}: {error.type if error else f'{dropped} dropped'}")
            if error is None:
                self.history.count("unique publishes dropped", dropped or 0)
            if error is not None and idem is not None and tries and not self.stopped:
                self.world.after(0.2, self._send, drafts, idem, tries - 1)

        self.ask(publish, replied)
