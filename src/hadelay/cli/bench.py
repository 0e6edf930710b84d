"""`hadelay bench`: a quick load test of a running cluster. The real benchmarks are in bench/."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

from hadelay.cli.output import Remote, note, progress, show
from hadelay.cli.remote import call
from hadelay.client import AsyncClient, Put
from hadelay.errors import BadRequest, HadelayError


def bench(
    *,
    count: int = 10_000,
    batch: int = 100,
    size: int = 200,
    delay: str = "2s",
    threads: int = 4,
    remote: Remote = Remote(),
) -> None:
    """Publish, receive and ack messages on a running cluster, and print rates and latencies.

    One Python process makes the load, so the rates are lower bounds; `make bench` in a checkout measures the cluster
    itself. The command deletes its topic at the end.

    Args:
        count: Number of messages.
        batch: Messages per request.
        size: Size of each payload, in bytes.
        delay: Delay of each message.
        threads: Number of producers, and of consumers.
    """
    if min(count, batch, threads) < 1 or size < 0:
        raise BadRequest("--count, --batch and --threads must be at least 1")
    # Test first whether a cluster answers, with a request that is not retried: the client would go on trying for long.
    call(remote, "GET", "/v1/cluster", needs="members")
    topic = f"bench-{secrets.token_hex(3)}"
    batches = iter([batch] * (count // batch) + [count % batch] * (count % batch > 0))
    note(f"{count:,} messages on topic {topic}")
    load = _Load(topic, "x" * size, delay, batches)
    began = time.perf_counter()
    with progress(count) as update:
        publish_s = asyncio.run(load.run(remote, threads, count, update))
    took = time.perf_counter() - began
    found: dict[str, Any] = {
        "published": count, "acked": load.acked, "published_per_s": round(count / publish_s),
        "end_to_end_s": round(took, 2), **_quantiles("request_ms", load.publish_ms),
        **_quantiles("late_ms", load.late_ms),
    }  # fmt: skip
    show(found, remote)


class _Load:
    def __init__(self, topic: str, body: str, delay: str, batches: Iterator[int]) -> None:
        self.topic, self.body, self.delay, self.batches = topic, body, delay, batches
        self.acked = 0
        self.publish_ms: list[float] = []
        self.late_ms: list[int] = []

    async def run(self, remote: Remote, workers: int, count: int, update: Callable[..., None]) -> float:
        """Publish and ack everything; returns the seconds until all messages were published. Raises the first error."""
        began = time.perf_counter()
        async with AsyncClient(remote.addresses(), remote.token) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    producers = [group.create_task(self.produce(client)) for _ in range(workers)]
                    for _ in range(workers):
                        group.create_task(self.consume(client, count, update))
                    await asyncio.wait(producers)
                    return time.perf_counter() - began
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                with contextlib.suppress(HadelayError):
                    await client.delete_topic(self.topic, force=True)

    async def produce(self, client: AsyncClient) -> None:
        for some in self.batches:
            puts = [Put(topic=self.topic, body=self.body, delay=self.delay)] * some
            began = time.perf_counter()
            for result in await client.put_many(puts):
                if isinstance(result, HadelayError):
                    raise result
            self.publish_ms.append((time.perf_counter() - began) * 1000)

    async def consume(self, client: AsyncClient, count: int, update: Callable[..., None]) -> None:
        while self.acked < count:
            if messages := await client.receive(self.topic, max=100, wait=1):
                outcomes = await client.ack(messages)
                self.acked += outcomes.count("acked")
                self.late_ms += [message.late_ms for message in messages]
                update(completed=self.acked)


def _quantiles(name: str, values: list[Any]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"{name}_p{part}": round(ordered[len(ordered) * part // 100], 1) for part in (50, 99) if ordered}
