"""APScheduler's schedulers and executors, with jobs on the cluster."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from hadelay.testing import LocalNode
from tests.frameworks.support import FULL, Running, survives, write_page
from tests.system.cluster import until

pytest.importorskip("apscheduler", reason="the package apscheduler is not installed")
from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MISSED,
    EVENT_JOB_SUBMITTED,
    JobExecutionEvent,
)
from apscheduler.executors.pool import ProcessPoolExecutor
from apscheduler.jobstores.base import ConflictingIdError, JobLookupError
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.cron import CronTrigger

from hadelay.apscheduler import HadelayJobStore
from hadelay.apscheduler.triggers import from_json, pattern_of, to_json, zone_of

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
STORE = {"class": "hadelay.apscheduler:HadelayJobStore"}
VIENNA = "Europe/Vienna"
DID: list[Any] = []
GO = threading.Event()


def did(*what: Any) -> None:
    DID.append(what)


def fails() -> None:
    DID.append("failed")
    raise ValueError("no such order")


def waits() -> None:
    DID.append("waits")
    GO.wait(20)


async def did_async(what: str) -> None:
    await asyncio.sleep(0)
    DID.append(what)


class Shop:
    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as found:
        yield found


@pytest.fixture
def scheduler(node: LocalNode, request: pytest.FixtureRequest) -> Iterator[BackgroundScheduler]:
    """A running scheduler, with a topic of the test's own."""
    DID.clear()
    GO.clear()
    found = BackgroundScheduler(timezone=VIENNA)
    found.add_jobstore(HadelayJobStore(node.url, topic=request.node.name[:60].strip("[]"), retry=False))
    found.start()
    yield found
    GO.set()
    if found.running:
        found.shutdown()


CRONS: list[dict[str, Any]] = [
    {"minute": "*"}, {"second": "*/10"}, {"minute": "5/20"}, {"hour": "9-17/2", "minute": "30"},
    {"day_of_week": "mon-fri", "hour": 9}, {"day_of_week": "0,6", "hour": "0"}, {"day": "1,15"}, {"day": "last"},
    {"day": "3rd fri", "hour": 7}, {"day": "last sun"}, {"month": "*/3", "day": 1}, {"month": "jan-mar", "day": "*/2"},
    {"hour": "*"}, {"day": "28-31", "hour": 1},
]  # fmt: skip


def test_cron_times_are_those_of_apscheduler(node: LocalNode) -> None:
    # In a zone without clock changes: APScheduler skips the first of April if the clock changes before it.
    zone = "Asia/Tokyo"
    begin = datetime(2027, 1, 10, 3, 7, 5, tzinfo=ZoneInfo(zone))
    for fields in CRONS:
        trigger = CronTrigger(**fields, timezone=zone)
        expected: list[datetime] = []
        while len(expected) < 20:
            after = expected[-1] + timedelta(seconds=1) if expected else begin + timedelta(seconds=1)
            expected.append(trigger.get_next_fire_time(None, after))
        found = node.client.preview_schedule(
            cron=pattern_of(trigger), timezone=zone_of(trigger.timezone), count=20, after=begin
        )
        assert [one.at for one in found.next] == expected, fields
        assert str(from_json(to_json(trigger))) == str(trigger)


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (did, {"trigger": "cron", "year": 2030}, "no year"),
    (did, {"trigger": "cron", "week": "*/2"}, "no week"),
    (did, {"trigger": "cron", "day": 13, "day_of_week": "fri"}, "days that fit both"),
    (did, {"trigger": "cron", "day": "1st mon,3rd mon"}, "one position"),
    (did, {"trigger": "interval", "seconds": 0.5}, "shortest interval is 1 s"),
    (did, {"trigger": CalendarIntervalTrigger(months=1, timezone=VIENNA)}, "no equivalent of Calendar"),
    (did, {"trigger": "cron", "hour": 9, "next_run_time": datetime.now(UTC).replace(minute=5) + timedelta(days=2)},
     "is no time of"),
    (did, {"trigger": "cron", "hour": 9, "timezone": "Etc/GMT+1", "args": [{1, 2}]}, "no JSON values"),
    (did, {"args": [datetime(2027, 1, 1)]}, "no JSON values"),
    (lambda: None, {}, "no name that another process could import"),
    (partial(did, 1), {"name": "x"}, "no name that another process could import"),
    (Shop().close, {}, "no JSON values"),
]  # fmt: skip


def test_refusals_are_in_words(scheduler: BackgroundScheduler) -> None:
    for func, options, words in REFUSED:
        with pytest.raises(ValueError, match=words):
            scheduler.add_job(func, **options)
    assert scheduler.get_jobs() == []


def test_jobs_are_added_changed_and_removed(scheduler: BackgroundScheduler) -> None:
    at = datetime.now(UTC) + timedelta(hours=3)
    one = scheduler.add_job(did, "date", run_date=at, args=[1], kwargs={}, id="one", name="the first")
    scheduler.add_job(did, "cron", hour=9, id="a/b ä", args=[2])
    with pytest.raises(ConflictingIdError):
        scheduler.add_job(did, "interval", hours=1, id="one")
    jobs = scheduler.get_jobs()
    assert {job.id for job in jobs} == {"one", "a/b ä"}
    assert jobs == sorted(jobs, key=lambda job: job.next_run_time)
    found = scheduler.get_job("one")
    assert (found.name, found.args, found.func, found.executor) == ("the first", (1,), did, "default")
    assert abs(found.next_run_time - at) < timedelta(milliseconds=2)
    one.modify(args=[5], max_instances=3, misfire_grace_time=60)
    found = scheduler.get_job("one")
    assert (found.args, found.max_instances, found.misfire_grace_time) == ((5,), 3, 60)
    scheduler.reschedule_job("one", trigger="interval", minutes=5)
    soon = scheduler.get_job("one").next_run_time
    assert timedelta(minutes=4) < soon - datetime.now(UTC) <= timedelta(minutes=5)
    scheduler.pause_job("one")
    assert scheduler.get_job("one").next_run_time is None
    assert scheduler.get_jobs()[-1].id == "one"
    scheduler.resume_job("one")
    assert scheduler.get_job("one").next_run_time is not None
    scheduler.remove_job("one")
    with pytest.raises(JobLookupError):
        scheduler.remove_job("one")
    with pytest.raises(JobLookupError):
        scheduler.modify_job("one", args=[])
    scheduler.remove_all_jobs()
    assert scheduler.get_jobs() == []


def test_runs_and_their_events(scheduler: BackgroundScheduler) -> None:
    events: list[Any] = []
    mask = EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_JOB_MISSED | EVENT_JOB_SUBMITTED
    scheduler.add_listener(events.append, mask)
    scheduler.add_job(did, args=["now"], id="now")
    scheduler.add_job(fails, id="fails")
    hour_ago = datetime.now(UTC) - timedelta(hours=1)
    scheduler.add_job(did, "date", run_date=hour_ago, args=["missed"], id="missed")
    scheduler.add_job(did, "date", run_date=hour_ago, args=["late"], id="late", misfire_grace_time=None)
    scheduler.add_job(did, "interval", hours=1, args=["both"], id="both", next_run_time=datetime.now(UTC))
    scheduler.add_job(did, "cron", hour=9, args=["cron"], id="cron", next_run_time=datetime.now(UTC))
    until(lambda: len({str(one) for one in DID}) == 5, "all jobs run")
    assert sorted(map(str, DID)) == ["('both',)", "('cron',)", "('late',)", "('now',)", "failed"]
    until(lambda: [e.job_id for e in events if e.code == EVENT_JOB_ERROR] == ["fails"], "the error is told")
    (error,) = [e for e in events if e.code == EVENT_JOB_ERROR]
    assert isinstance(error, JobExecutionEvent)
    assert isinstance(error.exception, ValueError)
    assert [e.job_id for e in events if e.code == EVENT_JOB_MISSED] == ["missed"]
    assert {job.id for job in scheduler.get_jobs()} == {"both", "cron"}
    both = scheduler.get_job("both").next_run_time - datetime.now(UTC)
    assert timedelta(minutes=59) < both <= timedelta(hours=1)


def test_an_interval_added_again_keeps_its_phase(scheduler: BackgroundScheduler) -> None:
    add = partial(scheduler.add_job, did, "interval", minutes=30, id="x", replace_existing=True)
    add()
    first = scheduler.get_job("x").next_run_time
    for _ in range(2):
        time.sleep(0.01)
        add()
        assert scheduler.get_job("x").next_run_time == first
    add(start_date=first + timedelta(minutes=7))
    assert scheduler.get_job("x").next_run_time - first == timedelta(minutes=7)


def test_a_paused_scheduler_runs_nothing(scheduler: BackgroundScheduler) -> None:
    scheduler.pause()
    scheduler.add_job(did, id="x", misfire_grace_time=None)
    other = BackgroundScheduler(timezone=VIENNA)
    (store,) = scheduler._jobstores.values()
    other.add_jobstore(HadelayJobStore(store.client._new.args[0], topic=store.topic))
    other.start(paused=True)
    time.sleep(0.3)
    assert DID == []
    other.shutdown()
    scheduler.resume()
    until(lambda: DID == [()], "the job runs")


def test_one_run_at_a_time(scheduler: BackgroundScheduler) -> None:
    (store,) = scheduler._jobstores.values()
    scheduler.add_job(waits, "interval", seconds=1, id="x", next_run_time=datetime.now(UTC), misfire_grace_time=None)
    until(lambda: DID, "the first run begins")
    until(lambda: store.client.schedule(f"{store.topic}.x").overlapped >= 2, "two occurrences are skipped")
    assert DID == ["waits"]
    GO.set()
    until(lambda: len(DID) >= 2, "it goes on")


def test_a_failed_run_is_repeated_with_retry(node: LocalNode) -> None:
    DID.clear()
    node.client.put_topic("again", backoff=["0.01s"], max_attempts=3)
    scheduler = BackgroundScheduler(timezone=VIENNA)
    scheduler.add_jobstore(HadelayJobStore(node.url, topic="again", retry=True))
    scheduler.start()
    scheduler.add_job(fails, id="x")
    until(lambda: node.client.topic("again").dead == 1, "the run is dead")
    scheduler.shutdown()
    assert DID == ["failed"] * 3


async def test_an_asyncio_scheduler(node: LocalNode) -> None:
    DID.clear()
    scheduler = AsyncIOScheduler(timezone=VIENNA)
    scheduler.configure({"apscheduler.jobstores.default": STORE | {"urls": node.url, "topic": "aio"}})
    scheduler.start()
    scheduler.add_job(did_async, args=["async"], id="x", misfire_grace_time=None)
    await asyncio.wait_for(asyncio.to_thread(until, lambda: DID == ["async"], "the coroutine runs"), 30)
    scheduler.shutdown()


@pytest.mark.skipif(not FULL, reason="make frameworks: starts processes of a pool")
def test_an_executor_that_loses_a_run(node: LocalNode) -> None:
    """The process of a pool is killed by its job; the message comes again, and another executor runs it."""
    node.client.put_topic("pool", backoff=["0.01s"])
    scheduler = BackgroundScheduler(timezone=VIENNA, executors={"default": ProcessPoolExecutor(1)})
    scheduler.add_jobstore(HadelayJobStore(node.url, topic="pool"))
    scheduler.start()
    scheduler.add_job(os._exit, args=[1], id="x", misfire_grace_time=None)
    until(lambda: [m for m in node.client.messages("pool", state="all") if m.attempt > 1], "the message comes again")
    scheduler.shutdown()


def test_the_page(running: Running, tmp_path: Path) -> None:
    write_page("apscheduler.md", tmp_path, running.cluster)
    clocks = [running.start(["clock.py"], cwd=tmp_path) for _ in range(2)]
    until(lambda: running.log.read_text().count("tick") >= 3, "it ticks")
    web = running.start(["web.py"], cwd=tmp_path)
    assert web.wait(60) == 0
    until(lambda: "report of yesterday" in running.log.read_text(), "the job of the web server runs")
    assert "['report', 'tick']" in running.log.read_text()
    assert running.log.read_text().count("report of") == 1
    for clock in clocks:
        clock.kill()


def test_none_lost_none_early_none_twice_but_in_killed_hands(running: Running) -> None:
    store = HadelayJobStore(list(running.cluster.urls.values()), topic="clock")
    scheduler = BackgroundScheduler(timezone="UTC")
    scheduler.add_jobstore(store)
    scheduler.start(paused=True)

    def publish(number: int, due: float) -> None:
        at = datetime.fromtimestamp(due, UTC)
        scheduler.add_job(
            "tests.frameworks.apscheduler_app:hello", "date", run_date=at, args=[number, due], id=f"hello-{number}",
            misfire_grace_time=None,
        )  # fmt: skip

    survives(running, lambda: running.start(["-m", "tests.frameworks.apscheduler_app"]), publish, hands=3)
    scheduler.remove_job("tick")
    # Of the interval of all processes, a run per occurrence.
    made = [m for m in store.client.messages("clock", state="acked") if m.schedule == "clock.tick"]
    assert len(made) <= len(running.lines("tick")) <= len(made) + 2
    scheduler.shutdown()
