"""Extra load of a chaos run: subscriptions that are created while messages are pending, and get these messages, too."""

import asyncio
from collections import Counter
from collections.abc import Iterator

from chaos.besides import Besides, insist, unended
from chaos.history import History
from hadelay.client import AsyncClient, Put, Receipt
from hadelay.errors import NotFound

#: `_ROUND_S`: pause between two rounds, in seconds. `_LOOK_S`: pause between two checks whether all copies exist, in
#: seconds.
_ROUND_S, _LOOK_S = 1.0, 0.2
#: `_MANY`: number of pending messages per round. `_MOVED`: one message in this many is rescheduled while the
#: subscription is filled. `_DELAY`: delay of the messages.
_MANY, _MOVED, _DELAY = 60, 10, "1h"


class Fills(Besides):
    """Creates subscriptions in rounds. Records which messages of a round had no copy in the end, or more than one
    ("filled")."""

    async def work(self, client: AsyncClient) -> None:
        rounds = 0
        while self.open:
            await self._round(client, f"{self.topic}-{rounds}")
            rounds += 1
            await asyncio.sleep(_ROUND_S)
        # `published` counts each message and its copy.
        self.history.record("aside", t=self.history.clock(), published=2 * rounds * _MANY, acked=0)
        self._ended.set()

    async def _round(self, client: AsyncClient, topic: str) -> None:
        """One round: publish messages to a new topic, create a subscription, wait until it is filled, and delete
        both."""
        await insist(lambda: client.put_topic(topic))
        puts = [Put(topic=topic, body=b"f", delay=_DELAY, key=str(n)) for n in range(_MANY)]
        ids: list[str] = []
        while len(ids) < _MANY:
            found = await insist(lambda: client.put_many(puts, idempotency_key=topic))
            ids = [one.id for one in found if isinstance(one, Receipt)]
        await insist(lambda: client.put_subscription(topic, "s", start="pending"))
        for message_id in ids[::_MOVED]:
            await insist(lambda: client.reschedule(message_id, delay=_DELAY))  # noqa: B023
        filling = True
        while filling:
            await asyncio.sleep(_LOOK_S)
            filling = await insist(lambda: self._is_filling(client, topic))

        async def copies() -> Counter[str | None]:
            return Counter([m.key async for m in client.messages(f"{topic}~s")])

        counts = await insist(copies)
        missing, doubled = [put.key for put in puts if not counts[put.key]], [k for k, n in counts.items() if n > 1]
        self.history.record("filled", t=self.history.clock(), topic=topic, missing=missing, doubled=doubled)
        await insist(lambda: self._delete(client, topic))

    async def _is_filling(self, client: AsyncClient, topic: str) -> bool:
        return any(job.subscription == f"{topic}~s" and not job.ended for job in await client.jobs())

    async def _delete(self, client: AsyncClient, topic: str) -> None:
        try:
            await client.delete_topic(topic, force=True)
        except NotFound:
            return  # done: an earlier request deleted the topic, and the answer to that request was lost


def unfilled(history: History) -> Iterator[tuple[str, str]]:
    """F1: a subscription that begins with the pending messages of its topic gets one copy of each."""
    for event in history.of("filled"):
        for branch, keys in (("each", event["missing"]), ("once", event["doubled"])):
            text = f"{len(keys)} messages of {event['topic']}, such as {keys[:1]}"
            yield branch, f"{text}, have {'no copy' if branch == 'each' else 'two copies'}" if keys else ""
    yield from unended(history, "fills")
