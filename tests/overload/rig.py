"""Three nodes as chaos starts them (so that they can be paused, and their disks stall), and clients that count."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import aiohttp

from chaos.cluster import LocalCluster
from chaos.faults import strike
from chaos.flat import anonymous_bytes
from chaos.scenario import ClusterPart, Fault, Scenario

T = TypeVar("T")
MIB = 1 << 20
#: The longest any single condition may take: slow machines, not slow code.
PATIENCE_S = 90.0
#: What says "nothing happened, come again".
REFUSALS = (429, 503)


class Answer(NamedTuple):
    status: int
    headers: Any
    body: Any


@contextmanager
def nodes(directory: Path, *settings: str) -> Iterator[LocalCluster]:
    """n1 to n3, started; ended whatever happens."""
    directory.mkdir(parents=True, exist_ok=True)
    cluster = LocalCluster(Scenario(cluster=ClusterPart(settings=list(settings))), directory, set())
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.close()


class Rig:
    """One event loop's view of them; use it in an `async with`."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.names, self.urls = cluster.names, cluster.urls

    async def __aenter__(self) -> Rig:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=PATIENCE_S)
        )
        await self.ready()
        return self

    async def __aexit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        await self._http.close()

    # asking

    async def ask(self, name: str, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """body: bytes as they are, anything else as JSON. Broken connections are raised."""
        head = {key.replace("_", "-"): value for key, value in headers.items()}
        if body is not None and not isinstance(body, bytes):
            body, head = json.dumps(body).encode(), {"Content-Type": "application/json", **head}
        data = None if body is None else io.BytesIO(body)  # aiohttp warns of large bodies that are bytes
        async with self._http.request(method, self.urls[name] + path, data=data, headers=head) as answer:
            raw = await answer.read()
            return Answer(answer.status, answer.headers, json.loads(raw) if raw[:1] in (b"{", b"[") else raw)

    async def metrics(self, name: str) -> dict[str, float]:
        """Every series of a node, by its name with its labels."""
        answer = await self.ask(name, "GET", "/metrics")
        assert answer.status == 200, answer
        lines = answer.body.decode().splitlines()
        return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}

    async def leader(self) -> str:
        async def find() -> str | None:
            for name in self.names:
                answer = await self.ask(name, "GET", "/v1/cluster")
                if answer.status == 200 and answer.body["leader"] == name:
                    return name
            return None

        return await self.until(find, "a leader")

    async def ready(self) -> None:
        async def all_ready() -> bool:
            return [(await self.ask(name, "GET", "/readyz")).status for name in self.names] == [200] * len(self.names)

        await self.until(all_ready, "every node ready")
        self.cluster.founded()

    async def until(self, condition: Callable[[], Awaitable[T]], what: str) -> T:
        """Its first true answer; a refused connection is a no."""
        end = time.monotonic() + PATIENCE_S
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                if answer := await condition():
                    return answer
            assert time.monotonic() < end, f"not within {PATIENCE_S:.0f} s: {what}"
            await asyncio.sleep(0.05)

    # messages

    async def publish(self, name: str, topic: str, body: bytes = b"x", query: str = "", key: str = "") -> Answer:
        key = key or os.urandom(12).hex()
        return await self.ask(name, "POST", f"/v1/topics/{topic}/messages{query}", body, Idempotency_Key=key)

    async def publish_surely(self, topic: str, count: int, query: str = "") -> list[str]:
        """Ids of so many small ones; each is tried, under its key, until it is stored."""
        ids = []
        for n in range(count):
            key = os.urandom(12).hex()

            async def stored(n: int = n, key: str = key) -> str | None:
                answer = await self.publish(self.names[n % len(self.names)], topic, b"%d" % n, query, key)
                return str(answer.body["id"]) if answer.status in (200, 201) else None

            ids.append(await self.until(stored, "a publish that is answered yes"))
        return ids

    async def receive(self, topic: str, most: int = 1_000, wait: str = "250ms") -> list[Any]:
        """What was due, acked; follows whoever leads."""
        for name in self.names:
            options = {"max": most, "wait": wait, "lease": "60s"}
            answer = await self.ask(name, "POST", f"/v1/topics/{topic}/receive?redirect=false", options)
            if answer.status == 200:
                messages: list[Any] = answer.body["messages"]
                leases = [message["lease"] for message in messages]
                if leases:
                    assert (await self.ask(name, "POST", "/v1/leases:ack", {"leases": leases})).status == 200
                return messages
        return []

    async def drain(self, topic: str, ids: set[str]) -> list[Any]:
        """All of these, each once."""
        found: list[Any] = []

        async def came() -> bool:
            found.extend(await self.receive(topic))
            return {message["id"] for message in found} >= ids

        await self.until(came, f"{len(ids)} messages of {topic}")
        seen = Counter(message["id"] for message in found)
        assert max(seen.values(), default=1) == 1, "a message came twice"
        return found

    async def late_ms(self, topic: str, count: int = 50) -> float:
        """The median lateness of some messages, now."""
        ids = await self.publish_surely(topic, count, "?delay=500ms")
        return sorted(message["late_ms"] for message in await self.drain(topic, set(ids)))[count // 2]

    async def equal(self) -> None:
        """Every node has the same hour files, at one applied index."""

        async def same() -> bool:
            found = [(await self.ask(name, "GET", "/v1/hours")).body for name in self.names]
            kept = [
                (one["applied_index"], [{k: v for k, v in hour.items() if k != "mapped"} for hour in one["hours"]])
                for one in found
            ]
            return all(one == kept[0] for one in kept)

        await self.until(same, "equal files on all nodes")

    # what the kernel says

    def anonymous_mib(self, name: str) -> float:
        pid = self.cluster.pid(name)
        assert pid is not None, f"{name} ended by itself"
        return anonymous_bytes(pid) / MIB

    def descriptors(self, name: str) -> int:
        return len(os.listdir(f"/proc/{self.cluster.pid(name)}/fd"))

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[Most]:
        """The most that was seen of each node's memory, and of its buffers."""
        most = Most(self)
        task = asyncio.ensure_future(most.look())
        try:
            yield most
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    @contextmanager
    def broken(self, kind: str, *names: str, ms: int | None = None) -> Iterator[None]:
        """One of chaos's faults."""
        with strike(self.cluster, list(names), Fault(kind=kind, ms=ms)):
            yield


class Most:
    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.before = {name: rig.anonymous_mib(name) for name in rig.names}
        self.anonymous = dict(self.before)
        #: By the label of hadelay_buffer_bytes; and "reading".
        self.buffers = Counter[str]()

    async def look(self) -> None:
        while True:
            for name in self._rig.names:
                self.anonymous[name] = max(self.anonymous[name], self._rig.anonymous_mib(name))
                with suppress(aiohttp.ClientError, TimeoutError):
                    for series, value in (await self._rig.metrics(name)).items():
                        buffer = series.partition('_bytes{buffer="')[2].rstrip('"}')
                        buffer = "reading" if series == "hadelay_http_reading_bytes" else buffer
                        if buffer:
                            self.buffers[buffer] = max(self.buffers[buffer], int(value))
            await asyncio.sleep(0.1)

    @property
    def growth_mib(self) -> float:
        """Of the node whose memory grew most."""
        return max(self.anonymous[name] - self.before[name] for name in self.before)
