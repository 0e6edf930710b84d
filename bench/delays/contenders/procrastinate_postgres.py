"""procrastinate on PostgreSQL, with the periodic task that its documentation gives for stalled jobs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from bench.delays.contender import Client, Contender, Message
from bench.delays.contenders.postgres_skip_locked import Postgres

#: Interval in seconds at which workers look for due jobs; the default of 5 s would be the lateness.
_POLL_S = 0.1


class Procrastinate(Postgres):
    name = "procrastinate"
    setup = (
        f"procrastinate, `schedule_at`, workers with concurrency 100 that poll every {_POLL_S:g} s (default: 5 s) and "
        "delete finished jobs; a periodic task retries stalled jobs"
    )
    cancels = "`cancel_job_by_id`, with the id that the publish returned"
    modules = ("procrastinate", "psycopg")

    def prepare(self) -> None:
        with procrastinate_app(self).open() as app:
            app.schema_manager.apply_schema()

    def connect(self) -> Client:
        return _Client(self)

    def worker(self) -> list[str]:
        command = [sys.executable, "-m", "procrastinate", "--app=bench.delays.apps.procrastinate", "worker"]
        command += ["--concurrency", "100", "--delete-jobs", "always"]
        return [*command, "--fetch-job-polling-interval", str(_POLL_S)]


def procrastinate_app(contender: Contender, *, stalled: bool = False) -> Any:
    """stalled: for workers, which are asynchronous and retry the jobs of dead workers."""
    import procrastinate

    from bench.delays.plan import plan, writer

    assert isinstance(contender, Postgres)
    kind = procrastinate.PsycopgConnector if stalled else procrastinate.SyncPsycopgConnector
    beat_s = contender.visibility_s / 3
    defaults = {"update_heartbeat_interval": beat_s, "stalled_worker_timeout": contender.visibility_s}
    app = procrastinate.App(connector=kind(conninfo=contender.url()), worker_defaults=defaults)

    @app.task(name="deliver", queue="bench", retry=3)  # type: ignore[untyped-decorator]
    async def deliver(id: str, padding: str) -> None:
        writer("work").got([id])
        if plan().hold:
            await asyncio.Event().wait()
        writer("work").done([id])

    if stalled:

        @app.periodic(cron="* * * * * */2")  # type: ignore[untyped-decorator]
        @app.task(name="retry_stalled", queueing_lock="retry_stalled", queue="maintenance")  # type: ignore[untyped-decorator]
        async def retry_stalled(timestamp: int) -> None:
            for job in await app.job_manager.get_stalled_jobs(seconds_since_heartbeat=contender.visibility_s):
                await app.job_manager.retry_job(job)

    return app


class _Client(Client):
    def __init__(self, contender: Contender) -> None:
        self._app = procrastinate_app(contender)
        self._app.open()
        self._jobs: dict[str, int] = {}

    def publish(self, messages: Sequence[Message]) -> None:
        for message in messages:
            due = datetime.fromtimestamp(message.due_ms / 1000, UTC)
            task = self._app.configure_task("deliver", queue="bench", schedule_at=due)
            self._jobs[message.id] = task.defer(id=message.id, padding=message.body().decode())

    def cancel(self, ids: Sequence[str]) -> int:
        jobs = [self._jobs.pop(id) for id in ids if id in self._jobs]
        return sum(self._app.job_manager.cancel_job_by_id(job, delete_job=True) for job in jobs)

    def close(self) -> None:
        self._app.close()
