"""A reader of the simulated world."""

from chaos.sim.door import Client
from hadelay.api.service import ListRequest
from hadelay.errors import HadelayError, NotFound
from hadelay.model import FIRST, Key, State
from hadelay.server.service.node import NodeService


class Reader(Client):
    """Asks any node what became of a message, and pages through a topic: what was answered before it asked is there."""

    def start(self) -> None:
        self.stopped = not self.cluster.parts.take(self.name)
        self._next()

    def _next(self) -> None:
        if not self.stopped:
            self.world.after(self.random.expovariate(1 / 0.6), self._read)

    def _read(self) -> None:
        known = [m for m in self.history.messages[-60:] if m.id is not None]
        process = self.cluster.any_process(self.random)
        self._next()
        if process is None or not known or self.stopped:
            return
        message = self.random.choice(known)
        number = message.id or 0
        listed = self.random.choice((None, *State))

        async def read(service: NodeService) -> bool:
            if listed is not None:
                await self._page(service, message.topic, listed)
            try:
                await service.messages.describe(number, body=False, stale=False)
            except NotFound:
                return False
            return True

        def replied(found: bool | None, error: HadelayError | None) -> None:
            if error is not None:
                self.history.count(f"read {error.type}")
                return
            # After hours what ended may be gone.
            unknown = not found and not self.history.slept and not self.history.meant("purge", message, number)
            text = f"{process.name} knows nothing of message {message.number}, which was answered as stored before"
            self.cluster.decide("stale read", unknown, text, number)

        self.door.ask(process, read, replied)

    async def _page(self, service: NodeService, topic: str, listed: State) -> None:
        """All pages: each begins behind the one before, and has no message twice."""
        after: Key | None = FIRST
        while after is not None:
            ask = ListRequest(frozenset({listed}), 0, 1 << 52, (), after, 7)
            messages, behind = await service.messages.list_messages(topic, ask, stale=False)
            ids = {message.id for message in messages}
            assert len(ids) == len(messages), messages
            assert behind is None or behind > after, (behind, after)
            self.history.count("listed", len(ids))
            after = behind
