"""Celery with an ETA, on Redis and on hadelay: the same application, another broker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bench.delays.contender import Client, Contender, Message
from bench.delays.contenders.hadelay_client import Hadelay
from bench.delays.contenders.redis_zset import RedisServer


class CeleryRedis(RedisServer):
    name = "celery-redis"
    setup = "Celery, `eta`, acks_late, prefork workers of two processes, Redis with appendfsync everysec"
    cancels = "`control.revoke`: workers remember it in memory, and nobody confirms it"
    notes = "workers take tasks before they are due; visibility_timeout is the default (1 h) but in (e) and (f)"
    modules = ("celery", "redis")
    prefetches = True

    def broker(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def connect(self) -> Client:
        return _Client(self)

    def worker(self) -> list[str]:
        return _WORKER


class CeleryHadelay(Hadelay):
    name = "celery-hadelay"
    setup = "Celery, `eta`, acks_late, prefork workers of two processes, hadelay as the broker (three nodes)"
    cancels = "`control.revoke`, which cancels the message in the cluster"
    modules = ("celery",)

    def broker(self) -> str:
        return f"hadelay://{','.join(self.addresses())}/bench"

    def connect(self) -> Client:
        return _Client(self)

    def worker(self) -> list[str]:
        return _WORKER


_WORKER = [sys.executable, "-m", "celery", "-A", "bench.delays.apps:celery", "worker"]
_WORKER += ["--concurrency", "2", "--loglevel", "WARNING", "--without-mingle", "--without-gossip"]


def celery_app(contender: Contender) -> Any:
    from celery import Celery

    import hadelay.celery  # noqa: F401  # makes the scheme known
    from bench.delays.plan import task

    assert isinstance(contender, CeleryRedis | CeleryHadelay)
    app = Celery("delays", broker=contender.broker())
    app.conf.update(task_acks_late=True, task_ignore_result=True, broker_connection_retry_on_startup=True)
    if isinstance(contender, CeleryRedis):
        app.conf.broker_transport_options = {"visibility_timeout": contender.visibility_s}
    else:
        app.conf.broker_transport_options = {"lease": contender.visibility_s}

    @app.task(name="deliver")  # type: ignore[untyped-decorator]
    def deliver(id: str, padding: str) -> None:
        task(id)

    return app


class _Client(Client):
    def __init__(self, contender: Contender) -> None:
        self._app = celery_app(contender)

    def publish(self, messages: Sequence[Message]) -> None:
        deliver = self._app.tasks["deliver"]
        for message in messages:
            due = datetime.fromtimestamp(message.due_ms / 1000, UTC)
            deliver.apply_async((message.id, message.body().decode()), task_id=message.id, eta=due)

    def cancel(self, ids: Sequence[str]) -> int:
        for id in ids:
            self._app.control.revoke(id)
        return len(ids)

    def close(self) -> None:
        self._app.close()
