"""Clients that open, fill, seal and cancel batches in the simulated world, and handle their messages."""

import random
from typing import Any

from chaos.sim.batches import CALLBACKS, MEMBERS, on_of
from chaos.sim.door import Client
from hadelay.api.service import Actor, PublishDone, answered
from hadelay.codec.batches import On, Spec
from hadelay.codec.meta import Meta, pack
from hadelay.errors import HadelayError
from hadelay.model import Draft
from hadelay.server.service.node import NodeService

#: `USED`: share of runs with a BatchClient. `_MOST`: limit of the batches that the client opens.
USED, _MOST = 0.12, 12
_LIFETIMES_MS = (86_400_000, 86_400_000, 1_500)


def used(seed: int) -> bool:
    """Whether the run of this seed has a BatchClient. Only some runs have one, because its requests change what the
    other clients of the run meet."""
    return random.Random(f"{seed} batching").random() < USED


class BatchClient(Client):
    """Client that opens batches, publishes members, and lets some of them fail. In the drain (`good`: the end of the
    run, without faults), it seals all batches, and consumes their members and callbacks."""

    def start(self) -> None:
        self.stopped = not used(self.cluster.seed)
        #: Keys of batches that may be open, in the order of their openings.
        self.open: list[str] = []
        self.opened = 0
        self._made = False
        if not self.stopped:
            self._next()

    def _next(self) -> None:
        self.world.after(0.2 if self.good else self.random.expovariate(1 / 0.1), self._act)

    def _act(self) -> None:
        if self.stopped:
            return
        part = self.next_act()
        rng = self.random
        chance = rng.random()
        if not self._made:
            self._make()
        elif self.good and self.open and chance < 0.5:
            self._close(self.open[0], cancel=False)
        elif self.good or chance < 0.35:
            fails = not self.good and self.random.random() < 0.4
            self.take([MEMBERS, CALLBACKS], "members of batches taken", fails=fails)
        elif self.cluster.parts.take(part):
            if chance < 0.45 and self.opened < _MOST:
                self._open()
            elif chance < 0.85 and self.open:
                self._publish(rng.choice(self.open))
            elif self.open:
                self._close(rng.choice(self.open), cancel=rng.random() < 0.3)
        self._next()

    def _make(self) -> None:
        def replied(result: Any, error: HadelayError | None) -> None:
            self._made |= error is None

        # In every other run max_attempts is 1, so the first failed attempt makes a dead letter.
        config = {"max_attempts": 1 + self.cluster.seed % 2, "backoff": [100], "ttl_ms": 20_000}
        self.ask(lambda service: service.topics.put_topic(MEMBERS, config, Actor()), replied)

    def _open(self) -> None:
        self.opened += 1
        key = f"{self.random.choice(list(On)).name.lower()}-{self.opened}"
        spec = Spec(CALLBACKS, on_of(key), 0, 0, 0, b"", None, self.random.choice(_LIFETIMES_MS))
        self.open.append(key)
        self.ask(lambda service: service.batches.open(key, spec, Actor()), self._noted(f"open {key}"))

    def _publish(self, key: str) -> None:
        rng = self.random
        drafts = [
            Draft(MEMBERS, rng.choice((0, 0, 300, 2_000)), True, 0, 0, pack(Meta(batch=key)), b"m", batched=True)
            for _ in range(rng.choice((1, 1, 2, 5)))
        ]

        async def publish(service: NodeService) -> int:
            def begin(done: PublishDone) -> None:
                service.publish(drafts, None, done)

            return len((await answered(begin)).ids)

        self.ask(publish, self._noted(f"publish {len(drafts)} into {key}"))

    def _close(self, key: str, *, cancel: bool) -> None:
        def replied(result: Any, error: HadelayError | None) -> None:
            if (error is None or error.type == "not-found") and key in self.open:
                self.open.remove(key)
            self.note(f"{'cancel' if cancel else 'seal'} {key}: {error.type if error else 'done'}")

        def request(service: NodeService) -> Any:
            return (service.batches.cancel if cancel else service.batches.seal)(key)

        self.ask(request, replied)

    def _noted(self, what: str) -> Any:
        def replied(result: Any, error: HadelayError | None) -> None:
            self.note(f"{what}: {error.type if error else 'done'}")

        return replied
