"""A chaos run over several shards. Each shard has a run with its own faults, load and history; all these runs go on at
the same time, and their clients know the nodes of all shards. chaos.sharding changes the shard map beside them."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from chaos.cluster import LocalCluster
from chaos.history import History
from chaos.load import Traffic
from chaos.run import Run, Say
from chaos.scenario import Scenario
from chaos.sharding import OWN, MapChanges, NewNames, pending

#: Timeout, in seconds, of the publishes to new topic names that are under way when the load ends.
_END_S = 90.0


class ShardRuns:
    """All shards of a run. `up` and `close` start and end their nodes."""

    def __init__(self, scenario: Scenario, directory: Path, kinds: set[str], say: Say) -> None:
        self.histories: list[History] = []
        self.directories = [directory / f"s{index}" for index in range(scenario.cluster.shards)]
        self.clusters = []
        for index, there in enumerate(self.directories):
            there.mkdir(exist_ok=True)
            own = [f"cluster.group={index}", f"cluster.id=chaos-{os.getpid()}-s{index}"]
            part = replace(scenario.cluster, settings=[*scenario.cluster.settings, *own])
            self.clusters.append(LocalCluster(replace(scenario, cluster=part), there, kinds))
            self.histories.append(History(file=open(there / "history.jsonl", "wb", buffering=1 << 16)))  # noqa: SIM115
        urls = [list(cluster.urls.values()) for cluster in self.clusters]
        self.runs = [self._run(scenario, index, urls, say) for index in range(len(urls))]
        self.changes = MapChanges(urls, self.histories[0], scenario.seed)
        self.names = NewNames(urls, self.histories[0])
        self._working: list[asyncio.Task[None]] = []
        self._founded = asyncio.Barrier(len(urls))
        self._broken = asyncio.Barrier(len(urls))

    def _run(self, scenario: Scenario, index: int, urls: Sequence[Sequence[str]], say: Say) -> "ShardRun":
        seed, cluster, history = scenario.seed + 1_000_000 * index, self.clusters[index], self.histories[index]
        # List the nodes of other shards first, so that nodes have to forward requests to the right shard.
        known = [url for turn in range(1, len(urls) + 1) for url in urls[(index + turn) % len(urls)]]
        traffic = Traffic(known, scenario.load, history, seed, cluster, OWN.format(index))
        return ShardRun(scenario, seed, self, index, lambda text: say(f"shard {index}: {text}"), traffic)

    def up(self) -> None:
        for cluster in self.clusters:
            cluster.up()

    def close(self) -> None:
        for cluster in self.clusters:
            cluster.close()
        for history in self.histories:
            if history.file is not None:
                history.file.close()
                history.file = None

    async def all(self, kinds: list[str]) -> None:
        """Do the whole run. Raises CancelledError when interrupted; all faults are healed by then."""
        try:
            async with asyncio.TaskGroup() as runs:
                for run in self.runs:
                    runs.create_task(run.all(kinds))
            await asyncio.to_thread(self.changes.look)
            for index, history in enumerate(self.histories):
                history.record("aside", t=history.clock(), published=pending(self.histories[0], index), acked=0)
        finally:
            for task in self._working:
                task.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)
            await self.names.close()

    async def begin(self) -> None:
        """Called by each shard once its nodes are ready: returns once the map of all shards is in force."""
        if await self._founded.wait() == 0:
            await self.changes.begin()
            self._working = [asyncio.create_task(work.work()) for work in (self.changes, self.names)]
        await self._founded.wait()

    async def end(self) -> None:
        """Called by each shard once its faults are healed: returns once this holds for all shards, and no change of the
        shard map is under way."""
        if await self._broken.wait() == 0:
            await self.changes.finish()
            self.names.open = False
            await asyncio.wait(self._working, timeout=_END_S)
        await self._broken.wait()


class ShardRun(Run):
    """The run of one shard; it waits for the other shards at its begin and its end."""

    def __init__(self, scenario: Scenario, seed: int, runs: ShardRuns, index: int, say: Say, traffic: Traffic) -> None:
        super().__init__(scenario, seed, runs.clusters[index], runs.histories[index], say, traffic)
        self._runs = runs

    async def _found(self) -> None:
        await super()._found()
        await self._runs.begin()

    async def _settle(self) -> None:
        await self._recovered()
        await self._runs.end()
        await super()._settle()
