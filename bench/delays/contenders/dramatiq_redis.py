"""Dramatiq with a delay, on Redis."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.delays.contender import Client, Contender, Message
from bench.delays.contenders.redis_zset import RedisServer


class Dramatiq(RedisServer):
    name = "dramatiq"
    setup = "Dramatiq, `delay`, one process of two threads per worker, Redis with appendfsync everysec"
    notes = (
        "workers take delayed messages before they are due; those of a dead worker are looked for by one command in a "
        "thousand (the default), so on an idle system they may wait for long, and count as lost"
    )
    modules = ("dramatiq", "redis")
    prefetches = True

    def connect(self) -> Client:
        return _Client(self)

    def worker(self) -> list[str]:
        app = "bench.delays.apps:broker"
        return [sys.executable, "-m", "dramatiq", app, "--processes", "1", "--threads", "2"]


def dramatiq_actor(contender: Contender) -> Any:
    import dramatiq
    from dramatiq.brokers.redis import RedisBroker

    from bench.delays.plan import task

    heartbeat_ms = int(min(60.0, contender.visibility_s) * 1000)  # 60 s: the library's default
    broker = RedisBroker(url=f"redis://127.0.0.1:{contender.port}/0", heartbeat_timeout=heartbeat_ms)
    dramatiq.set_broker(broker)

    @dramatiq.actor(broker=broker)  # type: ignore[untyped-decorator]
    def deliver(id: str, padding: str) -> None:
        task(id)

    return deliver


class _Client(Client):
    def __init__(self, contender: Contender) -> None:
        self._actor = dramatiq_actor(contender)

    def publish(self, messages: Sequence[Message]) -> None:
        for message in messages:
            delay = max(0, int(message.due_ms - time.time() * 1000) + 1)
            self._actor.send_with_options(args=(message.id, message.body().decode()), delay=delay)

    def close(self) -> None:
        self._actor.broker.close()
