"""Real Celery workers on three nodes: ETA, retries, routes, expiry, revoke, control, events, late acks, shutdown."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from celery import Celery

from hadelay import Client
from tests.frameworks.support import FULL, Running, survives
from tests.system.cluster import Cluster, until

Start = Callable[..., subprocess.Popen[bytes]]
full = pytest.mark.skipif(not FULL, reason="part of `make frameworks` only")


@pytest.fixture(scope="module")
def broker(cluster: Cluster) -> str:
    return "hadelay://" + ",".join(url.removeprefix("http://") for url in cluster.urls.values()) + "/shop"


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[Client]:
    with Client(list(cluster.urls.values())) as made:
        yield made


@pytest.fixture
def app(broker: str, client: Client) -> Iterator[Celery]:
    """The app of celery_app.py, for publishes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BROKER", broker)
        from tests.frameworks.celery_app import app

        app.conf.broker_url = broker
        yield app
    app.close()
    for topic in client.topics(prefix="shop."):
        client.purge(topic.topic, ("scheduled", "ready", "dead"))


@pytest.fixture
def start(running: Running, broker: str) -> Start:
    def started(name: str = "one", *words: object, pool: str = "prefork", wait: bool = True) -> subprocess.Popen[bytes]:
        """Start a worker, and wait until it is ready."""
        before = running.log.read_text().count(" ready.") if running.log.exists() else 0
        options = ["-P", pool, "-c", "2", "-l", "INFO", "-n", name, "-Q", "celery,second", *words]
        worker = running.start(["-m", "celery", "-A", "tests.frameworks.celery_app", "worker", *options], BROKER=broker)
        if wait:
            until(lambda: running.log.read_text().count(" ready.") > before, "the worker is ready")
        return worker

    return started


def test_a_worker(running: Running, start: Start, app: Celery, client: Client) -> None:
    """Everything that one worker shows, in one test: workers start slowly."""
    worker = start()
    control, tasks = app.control, app.tasks
    now = time.time()
    # Delayed tasks are in the cluster, and neither in the worker's timer nor among its reserved tasks.
    app.send_task("timed", (1, now + 3), countdown=3)
    app.send_task("timed", (2, now + 3), eta=datetime.fromtimestamp(now + 3, UTC))
    far = [tasks["timed"].apply_async((n, now), countdown=3_600) for n in range(20)]
    tasks["flaky"].delay()
    tasks["routed"].delay(5)
    replaced = tasks["replaced"].delay(2)
    tasks["rejects"].delay()
    inspect = control.inspect(timeout=5, limit=1)
    (scheduled,) = inspect.scheduled().values()
    (reserved,) = inspect.reserved().values()
    assert scheduled == []
    assert not {task["id"] for task in reserved} & {task.id for task in far}
    assert control.ping(timeout=5, limit=1) == [{"celery@one": {"ok": "pong"}}]
    # A revoked task is cancelled in the cluster. The worker knows of it, too.
    control.revoke([task.id for task in far])
    info = client.topic("shop.celery")
    assert info.scheduled <= 3, "those due in a moment, and perhaps a retry"
    (revoked,) = inspect.revoked().values()
    assert set(revoked) == {task.id for task in far}
    until(lambda: running.lines("flaky") and running.lines("flaky")[-1][0] == "3", "three retries")
    assert [int(retries) for retries, _ in running.lines("flaky")] == [0, 1, 2, 3]
    until(lambda: running.lines("routed") == [["5"]], "the other queue is consumed")
    assert client.topic("shop.second").topic == "shop.second"
    until(lambda: running.lines("replaced") == [[replaced.id]], "a task that replaces itself runs, with its id")
    (dead,) = until(lambda: list(client.dead("shop.celery")), "a rejected task is a dead letter")
    assert dead.errors[-1].reason == "rejected"
    until(lambda: len(running.lines("hello")) == 2, "the delayed tasks run")
    assert all(0 <= float(late) < 2 for _, late in running.lines("hello"))
    # Expired before a worker could take it: the queue's consumer is cancelled first.
    control.cancel_consumer("second", reply=True, timeout=5, limit=1)
    tasks["routed"].apply_async((6,), expires=0.2)
    tasks["routed"].apply_async((7,), expires=60)
    time.sleep(0.3)
    control.add_consumer("second", reply=True, timeout=5, limit=1)
    until(lambda: running.lines("routed")[-1] == ["7"], "the queue is consumed again")
    assert ["6"] not in running.lines("routed")
    # Events.
    seen: list[dict[str, Any]] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})
        with receiver.consumer_context(wakeup=False) as (connected, _, _):
            control.enable_events()
            tasks["timed"].delay(3, time.time())
            until(lambda: _drained(connected, seen, "task-received"), "an event of the task", every=0)
    # A late ack: a task that runs longer than its lease runs once, also over a warm shutdown.
    tasks["long"].delay(1, 7)
    until(lambda: running.lines("begin"), "the long task runs")
    worker.terminate()
    assert worker.wait(30) == 0
    assert running.lines("end") == [["1"]]
    until(lambda: client.topic("shop.celery").leased == 0, "nothing is leased")
    assert client.topic("shop.celery").ready == 0


def _drained(connection: Any, seen: list[dict[str, Any]], kind: str) -> bool:
    with contextlib.suppress(TimeoutError):
        connection.drain_events(timeout=1)
    return any(event["type"] == kind for event in seen)


def test_killed_workers_leader_and_restarts(running: Running, start: Start, app: Celery) -> None:
    numbers = iter(range(10))

    def publish(number: int, due: float) -> None:
        app.send_task("timed", (number, due, 0.02), eta=datetime.fromtimestamp(due, UTC))

    survives(running, lambda: start(f"kill{next(numbers)}"), publish, hands=4)
