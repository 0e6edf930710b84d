"""RQ with `enqueue_at` and its own scheduler, which is part of a worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from bench.delays.contender import Client, Message
from bench.delays.contenders.redis_zset import RedisServer


class Rq(RedisServer):
    name = "rq"
    setup = "RQ, `enqueue_at` with three retries, `rq worker --with-scheduler`, Redis with appendfsync everysec"
    cancels = "`Job.delete`"
    notes = (
        "the scheduler looks each second, and a worker forks for each job; rq-scheduler, an older project, is left out"
    )
    modules = ("rq", "redis")

    def connect(self) -> Client:
        return _Client(self)

    def worker(self) -> list[str]:
        url = f"redis://127.0.0.1:{self.port}"
        run = "from rq.cli import main; main()"
        return [sys.executable, "-c", run, "worker", "--with-scheduler", "--quiet", "--url", url, "bench"]


class _Client(Client):
    def __init__(self, contender: Rq) -> None:
        import redis
        from rq import Queue

        self._redis = redis.Redis("127.0.0.1", contender.port, socket_timeout=10)
        self._queue = Queue("bench", connection=self._redis)

    def publish(self, messages: Sequence[Message]) -> None:
        from rq import Retry

        with self._redis.pipeline() as pipe:
            for m in messages:
                due = datetime.fromtimestamp(m.due_ms / 1000, UTC)
                self._queue.enqueue_at(
                    due, "bench.delays.plan.task", m.id, job_id=m.id, retry=Retry(max=3), result_ttl=0, pipeline=pipe,
                    meta={"padding": m.body().decode()},
                )  # fmt: skip
            pipe.execute()

    def cancel(self, ids: Sequence[str]) -> int:
        from rq.job import Job

        jobs = Job.fetch_many(list(ids), connection=self._redis)
        for job in jobs:
            if job is not None:
                job.delete()
        return sum(job is not None for job in jobs)

    def close(self) -> None:
        self._redis.close()
