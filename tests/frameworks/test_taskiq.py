"""taskiq's workers on three nodes."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from taskiq import ScheduledTask
from taskiq.exceptions import ResultGetError

from hadelay import Client
from hadelay.client.queues import topic_of
from hadelay.errors import Conflict, NotFound
from tests.frameworks.support import Running, broker_of, cancel, survives, write_page
from tests.system.cluster import Cluster, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
TOPIC = "taskiq.tests"


@pytest.fixture(scope="module")
def app(cluster: Cluster) -> Iterator[Any]:
    with broker_of("taskiq_app", cluster, TOPIC) as module:
        yield module
        module.broker.client.close()


def work(running: Running, *words: object) -> subprocess.Popen[bytes]:
    app = "tests.frameworks.taskiq_app:broker"
    return running.start(["-m", "taskiq", "worker", app, "--workers", "1", *words])


async def test_calls(app: Any, running: Running) -> None:
    client: Client = app.broker.client
    begun = datetime.now(UTC)
    begun -= timedelta(microseconds=begun.microsecond % 1000)  # events are told in milliseconds
    later = await app.add.kicker().with_labels(delay=1.5).kiq(40, 2)
    first, flaky, requeued = await app.add.kiq(1, 2), await app.flaky.kiq(2), await app.requeues.kiq()
    odd = [await app.odd.kiq(what) for what in ("large", "object", "error")]
    hopeless, early, forgets = await app.flaky.kiq(9), await app.early.kiq(), await app.forgets.kiq()
    cancelled = await app.add.kicker().with_labels(delay=60).kiq(5, 5)
    await app.add.kicker().with_task_id(cancelled.task_id).with_labels(delay=60).kiq(5, 5)
    await app.broker.cancel(cancelled.task_id)
    assert client.topic(TOPIC).scheduled == 1, "both calls with this task id are cancelled"
    junk = client.put(TOPIC, b"junk").id
    renamed = client.put(TOPIC, {"task_id": "x", "task_name": "renamed", "labels": {}, "args": [], "kwargs": {}}).id
    at = begun + timedelta(seconds=1)
    timed = await app.hello.schedule_by_time(app.source, at, 1, at.timestamp())
    gone = await app.hello.schedule_by_time(app.source, at, 2, at.timestamp())
    await gone.unschedule()
    by_cron = await app.tick.schedule_by_cron(app.source, "* * * * *", "cron")
    assert client.schedule(f"taskiq.{by_cron.schedule_id}").cron == "* * * * *"
    await by_cron.unschedule()
    by_interval = await app.tick.kicker().with_schedule_id("a b").schedule_by_interval(app.source, 1, "interval")
    worker = work(running)

    assert (await first.wait_result(timeout=30)).return_value == 3
    assert (await flaky.wait_result(timeout=30)).return_value == 3
    assert (await requeued.wait_result(timeout=30)).return_value == "requeued 2 times"
    results = [await one.wait_result(timeout=30) for one in (*odd, hopeless)]
    assert [result.is_err for result in results] == [True] * 4
    assert "the result has 100" in str(results[0].error)
    assert "Unable to serialize unknown type" in str(results[1].error)
    assert isinstance(results[2].error, ValueError)
    assert isinstance(results[3].error, ConnectionError)
    assert (await later.wait_result(timeout=30)).return_value == 42
    info = client.get(topic=TOPIC, key=later.task_id)
    assert next(event.at for event in info.history if event.event == "leased") >= begun + timedelta(seconds=1.5)
    for call in (cancelled, early):
        assert await call.is_ready()
        with pytest.raises(ResultGetError):
            await call.get_result()
    until(lambda: len(running.lines("forgets")) >= 2, "a call without an ack comes again")
    client.purge(TOPIC, ("ready", "scheduled"))
    assert forgets.task_id
    assert client.get(junk).state == "dead"
    assert "this worker has no task renamed" in [event.reason for event in client.get(renamed).history]
    cancel(client, renamed)
    until(lambda: running.lines("hello"), "the timed call runs")
    assert [number for number, _ in running.lines("hello")] == ["1"]
    assert timed.schedule_id
    until(lambda: {word for word, _ in running.lines("tick")} >= {"label", "interval"}, "both schedules run")
    label = topic_of("taskiq.", "tests.frameworks.taskiq_app:tick.0")
    occurrence = until(lambda: [one.id for one in client.schedule(label).last if one.state == "acked"], "one ends")[0]
    assert (await app.broker.result_backend.get_result(occurrence)).return_value == "label"
    client.delete_schedule(label)
    await by_interval.unschedule()
    with pytest.raises(NotFound):
        await by_interval.unschedule()

    slow = await app.slow.kiq(1.5)
    until(lambda: running.lines("begins"), "the slow call runs")
    with pytest.raises(Conflict):
        await app.broker.cancel(slow.task_id)
    worker.terminate()
    assert worker.wait(20) == 0
    assert running.lines("ends")
    assert await slow.is_ready()


async def test_a_schedule_has_a_time_zone(app: Any) -> None:
    task = partial(ScheduledTask, task_name="x", labels={}, args=[], kwargs={}, cron="0 9 * * *", schedule_id="morning")
    with pytest.raises(ValueError, match="cron_offset is a time zone"):
        await app.source.add_schedule(task(cron_offset=timedelta(hours=1)))
    await app.source.add_schedule(task(cron_offset="Europe/Vienna"))
    assert app.broker.client.schedule("taskiq.morning").timezone == "Europe/Vienna"
    await app.source.delete_schedule("morning")


def test_the_page(running: Running, tmp_path: Path) -> None:
    write_page("taskiq.md", tmp_path, running.cluster)
    running.start(["-m", "taskiq", "worker", "shop:broker", "--workers", "1"], cwd=tmp_path)
    bought = running.start(["buy.py"], cwd=tmp_path)
    assert bought.wait(60) == 0
    assert "reminded the customer of order 4711" in running.log.read_text()
    with Client(running.servers) as client:
        schedules = {found.cron: found for found in client.schedules("taskiq.")}
        assert schedules["0 9 * * MON-FRI"].timezone == "Europe/Vienna"


def test_none_lost_none_early_none_twice_but_in_killed_hands(app: Any, running: Running) -> None:
    def publish(number: int, due: float) -> None:
        at = datetime.fromtimestamp(due, UTC).isoformat()
        asyncio.run(app.hello.kicker().with_labels(deliver_at=at).kiq(number, due))

    survives(running, partial(work, running, "--max-async-tasks", "3"), publish, hands=5)
