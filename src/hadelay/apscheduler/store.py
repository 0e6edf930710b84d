"""The job store: a job is a schedule of the cluster, and a run of the job is a message."""

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec
from apscheduler.events import (
    EVENT_JOB_MISSED,
    EVENT_SCHEDULER_PAUSED,
    EVENT_SCHEDULER_RESUMED,
    EVENT_SCHEDULER_STARTED,
    JobExecutionEvent,
    SchedulerEvent,
)
from apscheduler.job import Job
from apscheduler.jobstores.base import BaseJobStore, ConflictingIdError, JobLookupError
from apscheduler.schedulers.base import STATE_RUNNING

from hadelay.apscheduler import jobs, triggers
from hadelay.apscheduler.runs import Runs
from hadelay.client import Client
from hadelay.client.queues import topic_of
from hadelay.client.types import Delay, ScheduleInfo
from hadelay.client.wire import ADAPTER_TIMEOUT_S, seconds_of, servers
from hadelay.errors import Conflict, Impossible, NotFound

log = logging.getLogger("hadelay.apscheduler")

#: Modules of schedulers that are refused, because no other thread may call their executors.
_FOREIGN = ("gevent", "tornado", "twisted", "qt")
#: Limit of tries to replace a schedule that other processes change at the same time.
_TRIES = 5


class HadelayJobStore(BaseJobStore):
    """Job store that keeps jobs in a cluster, for any number of processes; each run of a job happens in one of them.

        scheduler.add_jobstore(HadelayJobStore("http://n1:8400,http://n2:8400"))

    The scheduler's own loop never finds a due job here. While it runs, a thread receives the messages of due jobs, and
    gives them to the scheduler's executors.

    urls: Default: the variable HADELAY_SERVERS, or a node on loopback. topic: of the messages; programs that must not
    run each other's jobs have topics of their own. concurrency: Limit of runs at a time in this process. lease: time
    after which the run of a process that was killed is repeated. retry: repeat a run that raised, by the topic's
    backoff; without it, such a run is over, as in APScheduler.
    """

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        topic: str = "apscheduler",
        concurrency: int = 10,
        lease: Delay = 30,
        retry: bool = False,
    ) -> None:
        super().__init__()
        self.client = Client(servers(urls), token, timeout=ADAPTER_TIMEOUT_S)
        self.topic = topic
        lease_s = seconds_of(lease)
        self._runs = Runs(self.client, topic, self.lookup_job, concurrency=concurrency, lease_s=lease_s, retry=retry)

    def start(self, scheduler: Any, alias: str) -> None:
        super().start(scheduler, alias)
        modules = {kind.__module__.rpartition(".")[2] for kind in type(scheduler).__mro__}
        if found := modules.intersection(_FOREIGN):
            raise ValueError(
                f"HadelayJobStore runs jobs from a thread, which executors of {min(found)} cannot: use a "
                "BackgroundScheduler, a BlockingScheduler or an AsyncIOScheduler"
            )
        self._runs.attach(scheduler, alias)
        events = EVENT_SCHEDULER_STARTED | EVENT_SCHEDULER_PAUSED | EVENT_SCHEDULER_RESUMED
        scheduler.add_listener(self._changed, events)
        if scheduler.state == STATE_RUNNING:
            self._runs.start()

    def shutdown(self) -> None:
        self._scheduler.remove_listener(self._changed)
        self._runs.stop(wait=True)

    def _changed(self, _: SchedulerEvent) -> None:
        if self._scheduler.state == STATE_RUNNING:
            self._runs.start()
        else:
            self._runs.stop(wait=False)

    def get_due_jobs(self, now: datetime) -> list[Job]:
        """Always an empty list: the cluster decides which jobs are due, and gives each run to one process."""
        return []

    def get_next_run_time(self) -> datetime | None:
        return None

    def lookup_job(self, job_id: str) -> Job | None:
        found = self._found(job_id)
        return None if found is None else self._job(found)

    def get_all_jobs(self) -> list[Job]:
        made = []
        for schedule in list(self.client.schedules(f"{self.topic}.")):
            if schedule.state != "finished" and schedule.topic == self.topic:
                try:
                    made.append(self._job(self.client.schedule(schedule.schedule, body=True)))
                except NotFound:
                    continue  # skip the job: its schedule was deleted meanwhile
                except LookupError as error:
                    log.warning("job of schedule %s: %s", schedule.schedule, error)
        made.sort(key=lambda job: job.next_run_time.timestamp() if job.next_run_time else 0.0)
        self._fix_paused_jobs_sorting(made)
        return made

    def add_job(self, job: Job) -> None:
        try:
            self._store(job, 0)
        except Conflict:
            found = self._found(job.id, finished=True)
            if found is not None and found.state != "finished":
                raise ConflictingIdError(job.id) from None
            self._store(job, found.version if found else 0)

    def update_job(self, job: Job) -> None:
        for attempt in range(_TRIES):
            found = self._found(job.id)
            if found is None:
                raise JobLookupError(job.id)
            try:
                self._store(job, found.version, found)
            except Conflict:
                if attempt == _TRIES - 1:
                    raise
            else:
                return

    def remove_job(self, job_id: str) -> None:
        if self._found(job_id) is None:
            raise JobLookupError(job_id)
        self.client.delete_schedule(self._name(job_id))

    def remove_all_jobs(self) -> None:
        for schedule in list(self.client.schedules(f"{self.topic}.")):
            if schedule.topic == self.topic:
                self.client.delete_schedule(schedule.schedule)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} (topic={self.topic})>"

    def _name(self, job_id: str) -> str:
        return topic_of(f"{self.topic}.", job_id)

    def _found(self, job_id: str, finished: bool = False) -> ScheduleInfo | None:
        try:
            found = self.client.schedule(self._name(job_id), body=True)
        except NotFound:
            return None
        return found if finished or found.state != "finished" else None

    def _job(self, schedule: ScheduleInfo) -> Job:
        job = jobs.decode(_body(schedule), self._scheduler, self._alias)
        if schedule.state == "active" and schedule.next:
            zone = getattr(job.trigger, "timezone", None) or self._scheduler.timezone
            job.next_run_time = schedule.next[0].astimezone(zone)
        return job

    def _store(self, job: Job, version: int, old: ScheduleInfo | None = None) -> None:
        """Create or replace the schedule of a job; if the job's next run time has come, also trigger a run. old: the
        schedule to replace."""
        zone, paused = self._scheduler.timezone, job.next_run_time is None
        first: datetime | None = job.next_run_time or job.trigger.get_next_fire_time(None, datetime.now(zone))
        due = first is not None and not paused and first <= datetime.now(zone)
        if old is not None and not paused and (start := _kept(old, job)) is not None:
            first, due = start, False
        if first is None:
            raise ValueError(f"job {job.id} has no time left to run at: {job.trigger}")
        times = triggers.times_of(job.trigger, first)
        name, body = self._name(job.id), jobs.encode(job)
        try:
            self.client.put_schedule(
                name, self.topic, body, version=version, paused=paused, **_rules(job, name), **times
            )
        except Impossible:
            if not due:
                raise
            if old is not None:
                self.client.delete_schedule(name)
            self._run_once(job, first, body)
            return
        if due:
            try:
                self.client.trigger(name, idempotency_key=_once(name, first))
            except Conflict:
                log.info("job %s is not run now: another run of it is pending", job.id)

    def _run_once(self, job: Job, first: datetime, body: dict[str, Any]) -> None:
        """Publish the message of a job's last run, whose time has come: such a job needs no schedule. A run that is
        later than misfire_grace_time is reported as missed instead."""
        grace_s, name = job.misfire_grace_time, self._name(job.id)
        if grace_s is not None and datetime.now(first.tzinfo) - first > timedelta(seconds=grace_s):
            log.warning("run of job %s at %s was missed", job.id, first)
            self._scheduler._dispatch_event(JobExecutionEvent(EVENT_JOB_MISSED, job.id, self._alias, first))
            return
        self.client.put(self.topic, body, key=name, idempotency_key=_once(name, first))


def _body(schedule: ScheduleInfo) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(schedule.body or b"{}")
    return found


def _kept(old: ScheduleInfo, job: Job) -> datetime | None:
    """First time of the schedule's series if `job` continues the series (the job then keeps the schedule's trigger);
    None if the job begins a new series."""
    if old.state != "active" or not old.next:
        return None
    before = triggers.from_json(_body(old)["trigger"])
    if triggers.to_json(before) == triggers.to_json(job.trigger):
        again = job.next_run_time == old.next[0]
    else:
        again = triggers.keeps_phase(before, job.trigger, job.next_run_time)
    if again:
        job._modify(trigger=before)
    return (old.start or old.next[0]) if again else None


def _rules(job: Job, name: str) -> dict[str, Any]:
    """Options of the schedule for runs that overlap or were missed."""
    rules: dict[str, Any] = {"catch_up": "one" if job.coalesce else "all", "overlap": "allow"}
    if job.max_instances == 1:
        rules |= {"overlap": "skip"} if job.coalesce else {"group": name}
    return rules


def _once(name: str, first: datetime) -> str:
    """Idempotency-Key of a job's run at the time `first`, so that several processes that add the job at once cause one
    run."""
    return f"{name}.{first.timestamp():.3f}"
