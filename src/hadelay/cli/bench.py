"""`hadelay bench`: a quick load test of a running cluster. The real benchmarks are in bench/."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hadelay.cli.output import Remote, note, show
from hadelay.cli.remote import call
from hadelay.errors import BadRequest, HadelayError


class _Load:
    def __init__(self, remote: Remote, count: int, batch: int, size: int, delay: str) -> None:
        self.remote, self.left, self.batch, self.delay = remote, count, batch, delay
        self.topic, self.body = f"bench-{secrets.token_hex(3)}", "x" * size
        self.lock = threading.Lock()
        self.published = self.acked = 0
        self.publish_ms: list[float] = []
        self.late_ms: list[float] = []
        self.failure: Exception | None = None
        #: Callback after each publish and ack.
        self.counted: Callable[[], None] = lambda: None

    def take(self) -> int:
        with self.lock:
            some = min(self.batch, self.left)
            self.left -= some
            return some

    def produce(self) -> None:
        while (some := self.take()) and self.failure is None:
            items = [{"topic": self.topic, "body": self.body, "delay": self.delay}] * some
            key = {"Idempotency-Key": secrets.token_hex(16)}
            began = time.perf_counter()
            call(self.remote, "POST", "/v1/messages:batch", items, needs="results", headers=key)
            with self.lock:
                self.published += some
                self.publish_ms.append((time.perf_counter() - began) * 1000)
            self.counted()

    def consume(self, total: int) -> None:
        consumer, path = f"bench-{secrets.token_hex(4)}", f"/v1/topics/{self.topic}/receive"
        while self.acked < total and self.failure is None:
            wish = {"max": 100, "wait": "1s", "consumer": consumer, "request_id": secrets.token_hex(8)}
            messages = call(self.remote, "POST", path, wish, needs="messages", timeout_s=30)["messages"]
            if not messages:
                continue
            leases = {"leases": [message["lease"] for message in messages]}
            results = call(self.remote, "POST", "/v1/leases:ack", leases, needs="results")["results"]
            with self.lock:
                self.acked += sum(result["outcome"] == "acked" for result in results)
                self.late_ms += [message["late_ms"] for message in messages]
            self.counted()


def bench(
    *, count: int = 10_000, batch: int = 100, size: int = 200, delay: str = "2s", threads: int = 4,
    remote: Remote = Remote(),
) -> None:  # fmt: skip
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
        raise BadRequest("--count, --batch and --threads are at least 1")
    load = _Load(remote, count, batch, size, delay)
    began = time.perf_counter()
    try:
        with _progress(load, count):
            publish_s = _run(load, [load.produce] * threads, [lambda: load.consume(count)] * threads)
    finally:
        with contextlib.suppress(HadelayError, OSError):
            call(remote, "DELETE", f"/v1/topics/{load.topic}", query={"force": "true"})
    took = time.perf_counter() - began
    found: dict[str, Any] = {
        "published": load.published, "acked": load.acked, "published_per_s": round(load.published / publish_s),
        "end_to_end_s": round(took, 2), **_quantiles("request_ms", load.publish_ms),
        **_quantiles("late_ms", load.late_ms),
    }  # fmt: skip
    show(found, remote)


def _run(load: _Load, producers: list[Any], consumers: list[Any]) -> float:
    """Run all threads to the end; returns the seconds until all messages were published. Raises the first failure."""

    def guarded(work: Any) -> None:
        try:
            work()
        except Exception as error:
            load.failure = load.failure or error

    began = time.perf_counter()
    making = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in producers]
    taking = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in consumers]
    for thread in [*making, *taking]:
        thread.start()
    for thread in making:
        thread.join()
    published_s = time.perf_counter() - began
    for thread in taking:
        thread.join()
    if load.failure is not None:
        raise load.failure
    return published_s


@contextlib.contextmanager
def _progress(load: _Load, count: int) -> Iterator[None]:
    """Progress bars on stderr; only a line if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        note(f"{count:,} messages on topic {load.topic}")
        yield
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:
        published, acked = bars.add_task("published", total=count), bars.add_task("acked", total=count)

        def counted() -> None:
            bars.update(published, completed=load.published)
            bars.update(acked, completed=load.acked)

        load.counted = counted
        yield


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"{name}_p50": round(ordered[len(ordered) // 2], 1),
        f"{name}_p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 1),
    }
