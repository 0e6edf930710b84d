"""Dramatiq's workers on three nodes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from dramatiq.errors import ConnectionClosed
from dramatiq.results import ResultFailure, ResultMissing, ResultTimeout

from hadelay import AsyncClient, Client
from hadelay.client.queues import topic_of
from hadelay.errors import Conflict, NoLeader, NotFound
from tests.frameworks.support import Running, broker_of, cancel, survives, write_page
from tests.system.cluster import Cluster, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
TOPIC = "dramatiq-tests.default"


@pytest.fixture(scope="module")
def app(cluster: Cluster) -> Iterator[Any]:
    with broker_of("dramatiq_app", cluster, TOPIC) as module:
        yield module
        module.broker.close()


def work(running: Running, *words: object) -> subprocess.Popen[bytes]:
    return running.start(["-m", "dramatiq", "tests.frameworks.dramatiq_app", "--processes", "1", *words])


def test_messages(app: Any, running: Running) -> None:
    client: Client = app.broker.client
    begun = time.time_ns() // 1_000_000 / 1000  # events are told in milliseconds
    later, first = app.add.send_with_options(args=(40, 2), delay=1500), app.add.send(1, 2)
    flaky, hopeless, broken, large = app.flaky.send(2), app.flaky.send(9), app.broken.send(), app.large.send()
    cancelled = app.add.send_with_options(args=(5, 5), delay=60_000)
    app.broker.enqueue(cancelled, delay=60_000)
    with pytest.raises(ResultMissing):
        cancelled.get_result()
    with pytest.raises(ResultTimeout):
        cancelled.get_result(block=True, timeout=200)
    app.broker.cancel(cancelled)
    junk = client.put(TOPIC, b"junk").id
    renamed = app.hello.message(1, begun).copy(actor_name="renamed")
    app.broker.enqueue(renamed)
    worker = work(running, "--threads", "4")
    get = {"block": True, "timeout": 30_000}
    assert first.get_result(**get) == 3
    assert flaky.get_result(**get) == 3
    failures = ((hopeless, "ConnectionError: gone"), (broken, "ValueError: no such customer"), (cancelled, "cancelled"))
    for message, said in failures:
        with pytest.raises(ResultFailure, match=f"actor raised {said}"):
            message.get_result(**get)
    with pytest.raises(ResultFailure, match="the result has 100002 bytes of JSON"):
        large.get_result(**get)
    with pytest.raises(ResultMissing):
        app.hello.message(1, 1).get_result()
    assert later.get_result(**get) == 42
    info = client.get(topic=topic_of("dramatiq-tests.", "sums"), key=later.message_id)
    assert next(event.at.timestamp() for event in info.history if event.event == "leased") >= begun + 1.5
    assert client.get(junk).state == "dead"
    assert {letter.key for letter in client.dead(TOPIC)} >= {f"{hopeless.message_id}.2", broken.message_id}
    info = client.get(topic=TOPIC, key=renamed.message_id)
    assert any((event.reason or "").startswith("ActorNotFound") for event in info.history)
    cancel(client, info.id)

    slow = app.slow.send(1.5)
    until(lambda: running.lines("begins"), "the slow actor runs")
    with pytest.raises(Conflict):
        app.broker.cancel(slow)
    worker.terminate()
    assert worker.wait(20) == 0
    assert running.lines("ends")
    assert client.get(topic=TOPIC, key=slow.message_id).state == "acked"

    app.hello.send_with_options(args=(1, begun), delay=60_000)
    app.broker.flush_all()
    assert client.topic(TOPIC).scheduled == 0
    with pytest.raises(NotFound):
        app.broker.cancel(app.hello.message(1, 1))


def test_a_retry_that_was_not_published_is_not_lost(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dramatiq logs errors of middleware, and acks the message."""
    message = app.flaky.send(9)
    consumer = app.broker.consume("default", timeout=20_000)
    leased = next(consumer)
    assert leased.message_id == message.message_id
    with monkeypatch.context() as patch:
        patch.setattr(AsyncClient, "put", lambda *_, **__: (_ for _ in ()).throw(NoLeader("no leader")))
        app.broker.emit_after("process_message", leased, exception=ConnectionError("gone"))
    consumer.ack(leased)
    found = app.broker.client.get(topic=TOPIC, key=message.message_id)
    assert found.state == "scheduled"
    assert "the retry was not published" in [event.reason for event in found.history]
    app.broker.cancel(message)

    app.hello.send(1, time.time())
    leased = next(consumer)
    with monkeypatch.context() as patch:
        patch.setattr(type(leased.leased), "ack", lambda _: (_ for _ in ()).throw(NoLeader("no leader")))
        with pytest.raises(ConnectionClosed):
            consumer.ack(leased)
    consumer.requeue([leased])
    again = next(consumer)
    assert again.leased.attempt == 2
    consumer.ack(again)
    consumer.close()


def test_the_page(running: Running, tmp_path: Path) -> None:
    write_page("dramatiq.md", tmp_path, running.cluster)
    running.start(["-m", "dramatiq", "shop", "--processes", "1", "--threads", "2"], cwd=tmp_path)
    bought = running.start(["buy.py"], cwd=tmp_path)
    assert bought.wait(60) == 0
    assert "reminded the customer of order 4711" in running.log.read_text()


def test_none_lost_none_early_none_twice_but_in_killed_hands(app: Any, running: Running) -> None:
    def publish(number: int, due: float) -> None:
        # Delays are in milliseconds: at least one more, so that the message is not early.
        app.hello.send_with_options(args=(number, due), delay=int((due - time.time()) * 1000) + 2)

    survives(running, partial(work, running, "--threads", "2"), publish, hands=4)
