"""Celery's workers and beat on three nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chord, group
from celery.exceptions import ImproperlyConfigured, TaskRevokedError, TimeoutError
from celery.schedules import BaseSchedule, crontab, schedule
from kombu.exceptions import OperationalError

from hadelay import Client
from hadelay.celery import Scheduler
from hadelay.celery.beat import times_of
from tests.frameworks.support import FULL, HERE, Running, survives, write_page
from tests.system.cluster import Cluster, environment, until

Start = Callable[..., subprocess.Popen[bytes]]
full = pytest.mark.skipif(not FULL, reason="part of `make frameworks` only")


class Shop:
    """The app of celery_app.py, and its workers."""

    def __init__(self, cluster: Cluster, directory: Path, prefix: str) -> None:
        self.prefix, self.running = prefix, Running(cluster, directory)
        hosts = ",".join(url.removeprefix("http://") for url in cluster.urls.values())
        self.broker = f"hadelay://{hosts}/{prefix}"
        self.client = Client(list(cluster.urls.values()))
        self.running.log.touch()
        self.app = Celery("celery_app", broker=self.broker, backend="hadelay://")
        self.app.conf.update(task_routes={"routed": {"queue": "second"}})
        self.lines = self.running.lines

    def send(self, task: str, *args: Any, **options: Any) -> Any:
        return self.app.send_task(task, args, **options)

    def sig(self, task: str, *args: Any) -> Any:
        return self.app.signature(task, args)

    def begin(self, *words: object, app: str = "tests.frameworks.celery_app", cwd: Path = HERE) -> Any:
        return self.running.start(["-m", "celery", "-A", app, *words], cwd=cwd, BROKER=self.broker)

    def worker(
        self, name: str, pool: str = "prefork", concurrency: int = 2, options: Sequence[object] = (), **where: Any
    ) -> subprocess.Popen[bytes]:  # fmt: skip
        """A worker that is ready."""
        before = self.running.log.read_text().count(" ready.")
        words = ["-P", pool, "-c", concurrency, "-l", "INFO", "-n", name, "-Q", "celery,second", *options]
        worker: subprocess.Popen[bytes] = self.begin("worker", *words, **where)
        until(lambda: self.running.log.read_text().count(" ready.") > before, "the worker is ready")
        return worker

    def topic(self, queue: str = "celery") -> Any:
        return self.client.topic(f"{self.prefix}.{queue}")

    def close(self) -> None:
        self.running.close()
        self.app.close()
        for stored in self.client.schedules(f"{self.prefix}."):
            self.client.delete_schedule(stored.schedule)
        for topic in self.client.topics(prefix=f"{self.prefix}."):
            self.client.purge(topic.topic, ("scheduled", "ready", "dead"))
        self.client.close()


@pytest.fixture
def shop(request: pytest.FixtureRequest, cluster: Cluster, tmp_path: Path) -> Iterator[Shop]:
    made = Shop(cluster, tmp_path, request.node.name.partition("[")[0])
    yield made
    made.close()


@pytest.fixture(scope="module")
def one(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A shop with one worker, which tests share."""
    made = Shop(cluster, tmp_path_factory.mktemp("one"), "one")
    made.worker("one")
    yield made
    made.close()


def test_delayed_tasks_are_not_in_the_worker(one: Shop) -> None:
    now = time.time()
    one.send("timed", 1, now + 2, countdown=2)
    one.send("timed", 2, now + 2, eta=datetime.fromtimestamp(now + 2, UTC))
    with ThreadPoolExecutor(16) as threads:
        for _ in threads.map(
            lambda number: one.send("timed", number, now, countdown=3_600), range(5_000 if FULL else 20)
        ):
            pass
    inspect = one.app.control.inspect(timeout=10, limit=1)
    assert inspect.scheduled() == {"celery@one": []}
    assert inspect.reserved() == {"celery@one": []} or len(one.lines("hello")) < 2
    until(lambda: len(one.lines("hello")) == 2, "the delayed tasks run")
    assert all(0 <= float(late) < 2 for _, late in one.lines("hello"))
    assert one.app.control.purge() >= 20


def test_retries_routes_rejects_and_replacements(one: Shop) -> None:
    one.send("flaky")
    one.send("routed", 5)
    one.send("rejects")
    replaced = one.send("replaced", 2)
    until(lambda: len(one.lines("flaky")) == 4, "three retries")
    assert [int(retries) for retries, _ in one.lines("flaky")] == [0, 1, 2, 3]
    until(lambda: one.lines("routed") == [["5"]], "the other queue is consumed")
    (dead,) = until(lambda: list(one.client.dead("one.celery")), "a rejected task is a dead letter")
    assert dead.errors[-1].reason == "rejected"
    until(lambda: one.lines("replaced") == [[replaced.id]], "a task that replaced itself ran, with its id")


def test_revoke_cancels_what_is_not_handed_out(one: Shop) -> None:
    far = [one.send("add", n, n, countdown=3_600) for n in range(3)]
    assert one.topic().scheduled == 3
    one.app.control.revoke([task.id for task in far])
    assert one.topic().scheduled == 0
    (revoked,) = one.app.control.inspect(timeout=10, limit=1).revoked().values()
    assert set(revoked) == {task.id for task in far}
    with pytest.raises(TaskRevokedError):
        far[0].get(timeout=10)


def test_a_task_expires_in_the_queue(one: Shop) -> None:
    one.app.control.cancel_consumer("second", reply=True, timeout=10, limit=1)
    one.send("routed", 6, expires=0.2)
    one.send("routed", 7, expires=60)
    until(lambda: one.topic("second").ready == 1, "the first has expired")
    one.app.control.add_consumer("second", reply=True, timeout=10, limit=1)
    until(lambda: one.lines("routed")[-1:] == [["7"]], "the queue is consumed again")
    assert ["6"] not in one.lines("routed")


def test_events(one: Shop) -> None:
    seen: set[str] = set()
    with one.app.connection_for_read() as connection:
        receiver = one.app.events.Receiver(connection, handlers={"*": lambda event: seen.add(event["type"])})
        with receiver.consumer_context(wakeup=False) as (connected, _, _):
            one.app.control.enable_events(reply=True, timeout=10, limit=1)

            def received() -> bool:
                # A worker looks once per second whether somebody listens, so the events of the first task may be lost.
                one.send("timed", 3, time.time())
                connected.drain_events(timeout=1)
                return {"task-received", "task-succeeded"} <= seen

            until(received, "events of a task", every=0.1)


def test_results(one: Shop) -> None:
    assert one.send("add", 2, 3).get(timeout=20) == 5
    with pytest.raises(KeyError, match="no such order"):
        one.send("fails").get(timeout=20)
    parts = group(one.sig("add", n, n) for n in range(4)).apply_async()
    assert parts.get(timeout=20) == [0, 2, 4, 6]
    assert chord([one.sig("add", n, 1) for n in range(3)], one.sig("total")).apply_async().get(timeout=30) == 6
    parts.save()
    assert one.app.GroupResult.restore(parts.id).get(timeout=5) == [0, 2, 4, 6]
    done = parts.results[0]
    assert done.state == "SUCCESS"
    done.forget()
    assert done.state == "PENDING"
    with pytest.raises(TimeoutError):
        done.get(timeout=0.2)


def test_a_waiting_reader_sees_a_new_state_at_once(one: Shop) -> None:
    backend = one.app.backend
    later = threading.Timer(0.4, backend.store_result, ("waited-for", 7, "SUCCESS"))
    begun = time.monotonic()
    backend.store_result("waited-for", None, "STARTED")
    later.start()
    assert one.app.AsyncResult("waited-for").get(timeout=20, interval=10) == 7
    assert time.monotonic() - begun < 5
    later.join()


def test_a_late_ack_is_extended_and_survives_a_warm_shutdown(one: Shop) -> None:
    """The last test with this worker: it ends the worker while a task runs longer than its lease of 2 s."""
    one.send("long", 1, 3)
    until(lambda: one.lines("begin"), "the task runs")
    (worker,) = one.running.workers
    worker.terminate()
    assert worker.wait(30) == 0
    assert one.lines("end") == [["1"]]
    until(lambda: one.topic().leased == 0, "the task is acked")
    assert one.topic().ready == 0


def test_killed_workers_a_killed_leader_and_restarts(shop: Shop) -> None:
    names = iter("abcdef")

    def publish(number: int, due: float) -> None:
        shop.send("timed", number, due, 0.02, eta=datetime.fromtimestamp(due, UTC))

    survives(shop.running, lambda: shop.worker(next(names)), publish, hands=4)


def test_tasks_that_are_too_large(shop: Shop) -> None:
    """What the page says: about 780 KB of arguments fit, and more with compression."""
    shop.send("add", "x" * 780_000, "", countdown=600)
    with pytest.raises(OperationalError, match="1048576"):
        shop.send("add", "x" * 800_000, "")
    shop.send("add", "x" * 2_000_000, "", compression="gzip", countdown=600)


def test_times_of_a_schedule() -> None:
    app = Celery("times", set_as_current=False)
    app.conf.timezone = "Europe/Vienna"
    daily = crontab(minute="*/20", hour="9,17", day_of_week="mon-fri", app=app)
    assert times_of("x", daily) == {"cron": "0,20,40 9,17 * * 1,2,3,4,5", "timezone": "Europe/Vienna"}
    assert times_of("x", schedule(timedelta(minutes=5), app=app)) == {"every": 300}
    for wrong, why in [
        (crontab(0, 0, day_of_week=1, day_of_month="1-7", app=app), "days that fit both"),
        (schedule(0.5, app=app), "shortest interval is 1 s"),
        (BaseSchedule(app=app), "no equivalent of <celery.schedules.BaseSchedule"),  # solar is one that needs a package
    ]:
        with pytest.raises(ImproperlyConfigured, match=why):
            times_of("x", wrong)


@full
def test_two_beats_send_each_occasion_once_and_none_is_needed(shop: Shop) -> None:
    for count in (1, 2):
        shop.begin("beat", "-S", "hadelay.celery:Scheduler", "-l", "INFO")
        until(
            lambda n=count: shop.running.log.read_text().count("stored the schedule") == n, "a beat stores its schedule"
        )
    for beat in shop.running.workers:
        os.killpg(beat.pid, signal.SIGKILL)
    (stored,) = shop.client.schedules(f"{shop.prefix}.")
    assert stored.version == 1, "the second beat changed nothing"
    shop.worker("beat", pool="solo")
    until(lambda: len(shop.lines("tick")) >= 4, "the cluster publishes without a beat")
    ticks = shop.lines("tick")
    assert len({task for task, _ in ticks}) == len(ticks)
    found = {m.occurrence: m.id for m in shop.client.messages(f"{shop.prefix}.celery", state="all")}
    assert len(found) == len(set(found.values()))
    # An entry that is gone takes its schedule along.
    assert shop.app.conf.beat_schedule == {}
    Scheduler(shop.app)
    assert list(shop.client.schedules(f"{shop.prefix}.")) == []


def test_the_page(shop: Shop, tmp_path: Path) -> None:
    write_page("celery.md", tmp_path, shop.running.cluster)
    shop.begin("worker", "-P", "solo", "-l", "INFO", app="shop", cwd=tmp_path)
    shop.begin("beat", "-S", "hadelay.celery:Scheduler", "-l", "INFO", app="timetable", cwd=tmp_path)
    publish = [sys.executable, "publish.py"]
    done = subprocess.run(publish, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "reminded the customer of order 4711\n", done.stderr
    until(lambda: len(list(shop.client.schedules("shop.celery.shop."))) == 2, "beat stored the schedules")
    morning = shop.client.schedule("shop.celery.shop.morning")
    assert (morning.cron, morning.timezone) == ("0 9 * * 1,2,3,4,5", "Europe/Vienna")
    until(lambda: "reminded the customer of order 2" in shop.running.log.read_text(), "the cluster publishes")
    for stored in shop.client.schedules("shop."):
        shop.client.delete_schedule(stored.schedule)


@full
@pytest.mark.parametrize("pool", ["gevent", "threads"])
def test_other_pools(shop: Shop, pool: str) -> None:
    worker = shop.worker(pool, pool=pool, concurrency=20)
    now = time.time()
    for number in range(40):
        shop.send("timed", number, now + 1, 1, countdown=1)
    assert shop.send("add", 1, 2).get(timeout=20) == 3
    until(lambda: len(shop.lines("hello")) == 40, "all tasks run")
    assert shop.app.control.ping(timeout=10, limit=1)
    worker.terminate()
    assert worker.wait(30) == 0


@full
def test_a_task_whose_process_is_killed_runs_again(shop: Shop) -> None:
    shop.worker("one")
    shop.send("long", 1, 3)
    ((_, pid, _),) = until(lambda: shop.lines("begin"), "the task runs")
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid), signal.SIGKILL)
    until(lambda: shop.lines("end") == [["1"]], "the task runs again")
    assert [again for _, _, again in shop.lines("begin")] == ["False", "True"]


@full
def test_pool_processes_that_are_forked_later(shop: Shop) -> None:
    """Each runs one task, publishes and stores a result, while the worker's client has connections."""
    shop.worker("forks", "prefork", 2, options=("--max-tasks-per-child", 1))
    parts = [shop.sig("add", n, 1) | shop.sig("add", 10) for n in range(10)]
    assert group(parts, app=shop.app).apply_async().get(timeout=60) == [n + 11 for n in range(10)]
