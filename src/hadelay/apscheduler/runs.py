"""Runs due jobs: receives their messages, and passes the jobs to the executors of the scheduler in this process.

A message is acked once the executor says that the run ended; its lease is extended until then. The message of a process
that is killed comes again, in another process.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Waiting
from datetime import datetime
from functools import partial
from typing import Any

from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MAX_INSTANCES,
    EVENT_JOB_MISSED,
    EVENT_JOB_SUBMITTED,
    JobExecutionEvent,
    JobSubmissionEvent,
)
from apscheduler.executors.base import MaxInstancesReachedError
from apscheduler.job import Job

from hadelay.apscheduler import jobs
from hadelay.client import Client
from hadelay.client.sync import SyncMessage

log = logging.getLogger("hadelay.apscheduler")

#: Interval, in seconds, of checking that the executor still has a run.
_LOOK_S = 1.0
#: Delay, in seconds, of the nack of a message that this process cannot run now.
_BUSY_S = 1.0
#: Time, in seconds, that running jobs get to finish after a stop. It is long: a run that was given back while it goes
#: on here would run twice.
_DRAIN_S = 86_400.0
#: Timeout, in seconds, of waiting for the receiving thread to end.
_JOIN_S = 10.0


class Runs:
    """Receives the messages of one job store, while its scheduler runs and is not paused."""

    def __init__(
        self,
        client: Client,
        topic: str,
        lookup: Callable[[str], Job | None],
        *,
        concurrency: int,
        lease_s: float,
        retry: bool,
    ) -> None:
        """lookup: returns the present job with an id. retry: nack the message of a run that raised an exception, so
        that the run is repeated after the topic's backoff."""
        self._client, self._topic, self._lookup = client, topic, lookup
        self._concurrency, self._lease_s, self._retry = concurrency, lease_s, retry
        self._scheduler: Any = None
        self._alias = ""
        self._lock = threading.Lock()
        #: Runs under way in the executors of this process: (job id, time of the run) → future of the event that ends
        #: the run.
        self._running: dict[tuple[str, datetime], Future[JobExecutionEvent]] = {}
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    def attach(self, scheduler: Any, alias: str) -> None:
        if self._scheduler is not None:
            scheduler.remove_listener(self._ended)
        self._scheduler, self._alias = scheduler, alias
        scheduler.add_listener(self._ended, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_JOB_MISSED)

    def start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._work, args=(self._stop,), name="hadelay apscheduler", daemon=True
                )
                self._thread.start()

    def stop(self, wait: bool) -> None:
        """Stop receiving; messages that no executor has are given back. wait: whether to wait for the receiving thread;
        not if a run is still going on, because then the scheduler did not wait for its executors either."""
        with self._lock:
            thread, self._thread = self._thread, None
            if self._stop is not None:
                self._stop.set()
        if wait and thread is not None and not self._running:
            thread.join(_JOIN_S)

    def _work(self, stop: threading.Event) -> None:
        consuming = self._client.consume(self._topic, concurrency=self._concurrency, lease=self._lease_s)
        try:
            consuming.work(partial(self._run, stop), on_error=self._failed, stop=stop, drain=_DRAIN_S)
        except Exception:
            log.exception("no jobs are run in this process any more")

    def _failed(self, message: SyncMessage, error: Exception) -> None:
        log.warning("message %s was not run, and comes again: %s", message.id, error)

    def _run(self, stop: threading.Event, message: SyncMessage) -> None:
        """Run the job of one message until the run ends. After an exception, the message is nacked, and comes again
        after the topic's backoff."""
        if stop.is_set():
            # Nack with a delay: without it, the receive that is just being cancelled would get the message again.
            message.nack(_BUSY_S, reason="the scheduler stops, or is paused", count=False)
            return
        job = self._decoded(message)
        time = message.occurrence or message.deliver_at
        job.next_run_time = time.astimezone(self._scheduler.timezone)
        # Judge lateness by the cluster's clock, which also decided when the message is due.
        if message.attempt == 1 and job.misfire_grace_time and message.late_ms > job.misfire_grace_time * 1000:
            log.warning("run of job %s at %s was missed by %d ms", job.id, time, message.late_ms)
            self._tell(JobExecutionEvent(EVENT_JOB_MISSED, job.id, self._alias, job.next_run_time))
            return
        # Switch off APScheduler's own check of lateness: a run that began in time, in a process that was then killed,
        # is repeated however late it is.
        job.misfire_grace_time = None
        executor = self._scheduler._lookup_executor(job.executor)
        run, key = Future[JobExecutionEvent](), (job.id, job.next_run_time)
        with self._lock:
            taken = self._running.setdefault(key, run) is not run
        try:
            if taken:
                raise MaxInstancesReachedError(job)
            self._submit(executor, job)
        except MaxInstancesReachedError:
            event = JobSubmissionEvent(EVENT_JOB_MAX_INSTANCES, job.id, self._alias, [job.next_run_time])
            self._tell(event)
            message.nack(_BUSY_S, reason="max_instances of the job run in this process", count=False)
            return
        else:
            self._tell(JobSubmissionEvent(EVENT_JOB_SUBMITTED, job.id, self._alias, [job.next_run_time]))
            ended = self._wait(run, executor, job)
        finally:
            if not taken:
                self._running.pop(key, None)
        if self._retry and ended.code == EVENT_JOB_ERROR:
            raise ended.exception

    def _decoded(self, message: SyncMessage) -> Job:
        """Decode the job of a message. If the function named in the message does not exist any more, returns the job
        that the schedule has now. Raises LookupError if there is no such schedule either."""
        document: dict[str, Any] = message.json(dict)
        try:
            return jobs.decode(document, self._scheduler, self._alias)
        except LookupError:
            if message.schedule is None or (job := self._lookup(document["id"])) is None:
                raise
            return job

    def _submit(self, executor: Any, job: Job) -> None:
        loop = getattr(executor, "_eventloop", None)
        if loop is None:
            executor.submit_job(job, [job.next_run_time])
            return
        done = Future[None]()

        def submit() -> None:
            try:
                done.set_result(executor.submit_job(job, [job.next_run_time]))
            except BaseException as error:
                done.set_exception(error)

        loop.call_soon_threadsafe(submit)
        done.result()

    def _wait(self, run: "Future[JobExecutionEvent]", executor: Any, job: Job) -> JobExecutionEvent:
        """Wait for the event that ends a run. Raises RuntimeError if the executor lost the run, for example because its
        process pool broke."""
        lost = False
        while True:
            try:
                return run.result(_LOOK_S)
            except Waiting:
                if lost:
                    raise RuntimeError(f"executor {job.executor} lost the run of job {job.id}") from None
                lost = job.id not in executor._instances  # check once more: the event may be on its way

    def _ended(self, event: JobExecutionEvent) -> None:
        if event.jobstore == self._alias:
            run = self._running.get((event.job_id, event.scheduled_run_time))
            if run is not None and not run.done():
                run.set_result(event)

    def _tell(self, event: Any) -> None:
        self._scheduler._dispatch_event(event)
