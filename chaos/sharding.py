"""Changes of the shard map during the load of several shards: two admins make them at the same time, and stop at each
of the steps. A publisher uses new topic names, which these changes move to other shards."""

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

#: Shortest and longest pause between two changes of one admin, in seconds; number of admins, and of publishers.
_PAUSE_S, _ADMINS, _PUBLISHERS = (0.2, 1.5), 2, 3
#: Pause between two publishes of one publisher, and limits, in seconds, of the last change and of the last publish.
_PUT_S, _END_S = 0.2, 90.0
#: Prefix of the names whose owner changes.
_MOVING = "moving-"
#: Delay of the messages under these names: none is due before the end of the run, which counts those that are pending.
_DELAY = "30d"
#: Prefix of the topics of each shard; no change moves them.
OWN = "s{}."


class MapChanges:
    """Changes the map of shards until `finish`; records each change ("map-change") and the last one ("map-ended")."""

    def __init__(self, urls: Sequence[Sequence[str]], history: History, seed: int) -> None:
        self.at = {index: Remote(servers=",".join(some)) for index, some in enumerate(urls)}
        self.history, self.open = history, True
        self._shards, self._draw = Shards(self.at), random.Random(f"{seed} map")
        self._nodes = {index: {f"n{i + 1}": url for i, url in enumerate(some)} for index, some in enumerate(urls)}
        self._changes = 0

    async def begin(self) -> None:
        """Put the shards into one map."""
        await self._insist()

    async def work(self) -> None:
        await asyncio.gather(*(self._change_again() for _ in range(_ADMINS)))

    async def finish(self) -> None:
        """Repeat a change until it ends."""
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
            # A look, a PREPARE, the names and a COMMIT for each shard: stop before each of them, or not at all.
            steps = self._changes % (4 * len(self.at) + 1)
            why = await asyncio.to_thread(self._change, self._edit(), steps)
            self.history.record("map-change", t=self.history.clock(), steps=steps, why=why)

    def _edit(self) -> Edit:
        """Other owners of the moving names, and a pin of one that does not exist yet, perhaps."""
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
        """Take so many steps of a change, or all; returns why it did not end, "" if it ended. Blocks."""
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
    """Publishes to a new name, under a key, through one shard and once more through another; records the ids
    ("named")."""

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
    """Number of messages under new names that a shard has."""
    return sum(sum(event["pending"].values()) for event in history.of("topics") if event["shard"] == shard)


def divided(history: History) -> Iterator[tuple[str, str]]:
    """M1: no topic exists in two shards, each is in the shard that the map names, one key is one message over all
    shards, and a change of the map that stopped is ended by its repetition."""
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
