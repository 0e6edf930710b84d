"""Changes of the shard map during a run of several shards. Two admins change the map at the same time, and each change
stops after a different step. Publishers use new topic names, which these changes move to other shards."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from chaos.besides import insist
from chaos.history import History
from hadelay.cli import shardchange
from hadelay.cli.output import Remote
from hadelay.cli.remote import call
from hadelay.cli.shardchange import Edit
from hadelay.cli.shards import Shards
from hadelay.client import AsyncClient
from hadelay.errors import HadelayError
from hadelay.settings.shardmap import Rule, Shard, ShardMap

#: `_PAUSE_S`: shortest and longest pause between two changes of one admin, in seconds. `_ADMINS` and `_PUBLISHERS`:
#: numbers of admins and publishers.
_PAUSE_S, _ADMINS, _PUBLISHERS = (0.2, 1.5), 2, 3
#: `_PUT_S`: pause between two publishes of one publisher, in seconds. `_END_S`: limit of the time to complete the last
#: change of the map, in seconds.
_PUT_S, _END_S = 0.2, 90.0
#: Prefix of the topic names whose owning shard changes.
_MOVING = "moving-"
#: Delay of the messages in topics with the prefix `_MOVING`: none is due before the end of the run, when the pending
#: messages are counted.
_DELAY = "30d"
#: Prefix of the topics that belong to one shard; no change of the map moves these topics. {}: index of the shard.
OWN = "s{}."


class MapChanges:
    """Admins who change the shard map until `finish`. Records each change ("map-change"), and whether the last one was
    completed ("map-ended")."""

    def __init__(self, urls: Sequence[Sequence[str]], history: History, seed: int) -> None:
        self.at = {index: Remote(servers=",".join(some)) for index, some in enumerate(urls)}
        self.history, self.open = history, True
        self._shards, self._draw = Shards(self.at), random.Random(f"{seed} map")
        self._nodes = {index: {f"n{i + 1}": url for i, url in enumerate(some)} for index, some in enumerate(urls)}
        self._changes = 0

    async def begin(self) -> None:
        """Store the first shard map, which has all shards."""
        await self._insist()

    async def work(self) -> None:
        await asyncio.gather(*(self._change_again() for _ in range(_ADMINS)))

    async def finish(self) -> None:
        """End the changes: repeat one last change until it is completed."""
        self.open = False
        try:
            await asyncio.wait_for(self._insist(), _END_S)
        except TimeoutError:
            self.history.record("map-ended", t=self.history.clock(), ok=False)
            return
        self.history.record("map-ended", t=self.history.clock(), ok=True)

    async def _insist(self) -> None:
        while await asyncio.to_thread(self._change, self._edit(), -1):  # noqa: ASYNC110
            await asyncio.sleep(_PUT_S)

    async def _change_again(self) -> None:
        while self.open:
            await asyncio.sleep(self._draw.uniform(*_PAUSE_S))
            self._changes += 1
            # For each shard, a change has the steps Look, Prepare, Collect and Commit. Stop before each of these steps
            # in turn, or not at all.
            steps = self._changes % (4 * len(self.at) + 1)
            why = await asyncio.to_thread(self._change, self._edit(), steps)
            self.history.record("map-change", t=self.history.clock(), steps=steps, why=why)

    def _edit(self) -> Edit:
        """Draw a change of the map: other owners of the names with the prefix `_MOVING`, and a pin of one such name,
        which may not exist yet."""
        every = tuple(self.at)
        owners = self._draw.choice([(index,) for index in every] + [every])
        rule = Rule(f"{_MOVING}*", owners, self._draw.choice(("name", "number")))
        pinned = f"{_MOVING}{self._draw.randrange(10_000)}", self._draw.choice(every)

        def edit(base: ShardMap) -> ShardMap:
            groups = {index: base.shards.get(index, Shard(index)) for index in every}
            shards = {index: replace(one, nodes=self._nodes[index]) for index, one in groups.items()}
            own = [Rule(f"{OWN.format(index)}*", (index,)) for index in every]
            return replace(
                base, shards=shards, rules=(*own, rule, Rule("*", (0,))), pinned={**base.pinned, **dict([pinned])}
            )

        return edit

    def _change(self, edit: Edit, steps: int) -> str:
        """Do `steps` steps of a change of the shard map, or all (-1). Returns why the change was not completed, "" if
        it was. Blocks."""
        running = shardchange.change(self.at, edit)
        try:
            step = next(running)
            while steps:
                steps -= 1
                step = running.send(self._shards.take(step))
        except StopIteration:
            return ""
        except (HadelayError, OSError, shardchange.Stopped) as error:
            return f"{type(error).__name__}: {error}"
        return f"before {type(step).__name__} in shard {step.shard}"

    def look(self) -> None:
        """Record the topics of each shard ("topics"), with their numbers of pending messages. Blocks."""
        for index, at in self.at.items():
            names = self._shards.take(shardchange.Collect(index)).topics
            listed = call(at, "GET", "/v1/topics", needs="topics", query={"shard": index})["topics"]
            pending = {one["topic"]: one["scheduled"] for one in listed if one["topic"].startswith(_MOVING)}
            current = self._shards.take(shardchange.Look(index)).current
            owners = {name: None if current is None else current.owner(name) for name in names}
            self.history.record("topics", t=self.history.clock(), shard=index, owners=owners, pending=pending)


class NewNames:
    """Publishers: publish to a new topic name, under one idempotency key, through one shard and then again through
    another; record the ids in the answers ("named")."""

    def __init__(self, urls: Sequence[Sequence[str]], history: History) -> None:
        self.history, self.open = history, True
        self._clients = [AsyncClient(list(some), timeout=10.0) for some in urls]
        self._next = 0

    async def work(self) -> None:
        await asyncio.gather(*(self._publish() for _ in range(_PUBLISHERS)))

    async def _publish(self) -> None:
        while self.open:
            number, self._next = self._next, self._next + 1
            name, ids = f"{_MOVING}{number}", []
            for turn in range(2):
                client = self._clients[(number + turn) % len(self._clients)]
                receipt = await insist(
                    lambda: client.put(name, b"m", delay=_DELAY, idempotency_key=name)  # noqa: B023
                )
                ids.append(receipt.id)
            self.history.record("named", t=self.history.clock(), name=name, ids=ids)
            await asyncio.sleep(_PUT_S)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


def pending(history: History, shard: int) -> int:
    """Number of pending messages that a shard has in topics with the prefix `_MOVING`."""
    return sum(sum(event["pending"].values()) for event in history.of("topics") if event["shard"] == shard)


def divided(history: History) -> Iterator[tuple[str, str]]:
    """M1: each topic exists in one shard only, which is the one that the map names. One idempotency key is one message
    over all shards. A change of the map that stopped half-way is completed by its repetition."""
    homes = defaultdict[str, list[int]](list)
    stored = Counter[str]()
    for event in history.of("topics"):
        stored.update(event["pending"])
        for name, owner in event["owners"].items():
            homes[name].append(event["shard"])
            text = f"topic {name} exists in shard {event['shard']}, and the map says {owner}"
            yield "own shard", text if owner != event["shard"] else ""
    for name, shards in homes.items():
        yield "one shard", f"topic {name} exists in the shards {shards}" if len(shards) > 1 else ""
    for event in history.of("named"):
        wrong = len(set(event["ids"])) > 1 or stored[event["name"]] != 1
        text = f"the key of {event['name']} was answered with {event['ids']}, and {stored[event['name']]} are stored"
        yield "once", text if wrong else ""
    for event in history.of("map-ended"):
        yield "ended", "" if event["ok"] else "no repetition of a change ended it"
