"""Values that an adapter interprets, beside the framework's own code: each table runs both."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import celery
import dramatiq
import pycron
import pytest
from celery import Celery
from celery.exceptions import ImproperlyConfigured, InvalidTaskError
from celery.schedules import crontab
from celery.worker.request import Request
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage
from dramatiq.results import ResultMissing, Results, ResultTimeout
from dramatiq.results.backends import StubBackend
from taskiq import Context, InMemoryBroker, TaskiqDepends, TaskiqResult
from taskiq.api import run_receiver_task
from taskiq.exceptions import ResultGetError

from hadelay.celery import Scheduler
from hadelay.celery.beat import times_of
from hadelay.celery.messages import draft_of
from hadelay.client.wire import seconds_of
from hadelay.dramatiq import HadelayBackend
from hadelay.dramatiq import HadelayBroker as DramatiqBroker
from hadelay.taskiq import HadelayBroker, HadelayResultBackend, results
from hadelay.tasks import App
from hadelay.testing import LocalNode
from tests.system.cluster import until

NOW = datetime.now(UTC).replace(microsecond=0)
NAIVE = NOW.replace(tzinfo=None)
HOUR = timedelta(hours=1)
#: Times as programs give them to Celery: in half an hour, hours away if they are read in a wrong zone.
TIMES = {
    "utcnow": NAIVE + HOUR / 2,
    "aware": NOW + HOUR / 2,
    "aware elsewhere": (NOW + HOUR / 2).astimezone(timezone(timedelta(hours=-5))),
    "text": (NAIVE + HOUR / 2).isoformat(),
    "text with Z": (NAIVE + HOUR / 2).isoformat() + "Z",
    "text in basic format": (NAIVE + HOUR / 2).strftime("%Y%m%dT%H%M%S"),
    "text with an offset": (NOW + HOUR / 2).astimezone(timezone(timedelta(hours=2))).isoformat(),
    "the past": NAIVE - HOUR / 2,
    "no time": "in a moment",
}


def node_url(node: LocalNode, prefix: str) -> str:
    return f"hadelay://{node.url.removeprefix('http://')}/{prefix}"


@pytest.fixture
def celery_app(hadelay: LocalNode) -> Iterator[Celery]:
    app = Celery("shop", broker=node_url(hadelay, "shop"), backend="hadelay://")  # current, as in programs

    @app.task(name="add")
    def add(a: int, b: int) -> int:
        return a + b

    yield app
    app.close()
    celery._state._set_current_app(None)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Vienna", "America/New_York", None])
@pytest.mark.parametrize("utc", [True, False])
def test_celery_times(zone: str | None, utc: bool) -> None:
    """The due time and the expiry are those that Celery's worker computes from the same message."""
    app = Celery("times")  # current, as in programs
    app.conf.update(timezone=zone, enable_utc=utc)

    @app.task(name="t")
    def task() -> None: ...

    options: list[dict[str, Any]] = [{}, {"countdown": 60}, {"countdown": -5}, {"countdown": 0}, {"countdown": 1.5}]
    options += [{"expires": 90}, {"expires": 0.5}, {"countdown": 60, "expires": 90}, {"countdown": 90, "expires": 60}]
    options += [{name: given} for name in ("eta", "expires") for given in TIMES.values()]
    for given in options:
        headers, properties, body, _ = app.amqp.as_task_v2("an-id", "t", **given)
        draft = draft_of({"headers": dict(headers), "properties": properties, "body": body}, "topic", "queue", None)
        message = SimpleNamespace(
            headers=headers, body=body, payload=body, delivery_info={}, properties=properties, content_type="",
            content_encoding="",
        )  # fmt: skip
        try:
            request = Request(message, app=app, task=task, headers=headers, decoded=True)
        except InvalidTaskError:  # the worker refuses the task when it gets the message
            assert (draft.at, draft.ttl) == (None, None)
            continue
        assert draft.at == request.eta, given
        assert (draft.ttl is None) == (request.expires is None), given
        if draft.ttl is not None:
            now = datetime.now(UTC)
            begin = max(draft.at or now, now)
            expected = (request.expires - begin).total_seconds()
            assert seconds_of(draft.ttl) == pytest.approx(max(expected, 0.001), abs=30), given
    app.close()
    celery._state._set_current_app(None)


def test_headers_of_other_messages_are_their_own() -> None:
    """`eta` and `expires` mean something in a message of a task alone."""
    draft = draft_of({"headers": {"eta": "2099-01-01", "expires": "tomorrow"}}, "topic", "queue", None)
    assert (draft.at, draft.ttl) == (None, None)


CRONTABS: list[dict[str, Any]] = [
    {"minute": "*/20", "hour": "9,17", "day_of_week": "mon-fri"},
    {"minute": 30, "hour": 4, "day_of_week": 0},
    {"minute": 0, "hour": "*/7", "day_of_month": "*/10"},
    {"minute": "5-59/25", "hour": 3, "month_of_year": "*/5", "day_of_month": 31},
    {"minute": 0, "hour": 0, "day_of_month": "1-7"},
    {"minute": 0, "hour": 12, "day_of_week": "fri-sun"},
]


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Asia/Kathmandu"])
def test_celery_crontabs(hadelay: LocalNode, zone: str) -> None:
    app = Celery("crontabs", set_as_current=False)
    app.conf.timezone = zone
    for fields in CRONTABS:
        settings = times_of("x", crontab(**fields, app=app))
        found = [one.at for one in hadelay.client.preview_schedule(**settings).next]
        last = app.now()
        when = crontab(**fields, app=app, nowfun=lambda: last)  # noqa: B023
        for at in found[:6]:
            start, delta, _ = when.remaining_delta(last)
            last = start + delta
            assert at == last, fields


@pytest.mark.parametrize(
    "cron", ["*/20 9-17 * * MON-FRI", "0 0 1,15 * 1", "0 12 1 * *", "5 4 * * SUN", "0 */7 */10 * *", "1-9/4 3 * 2,11 *"]
)
def test_taskiq_crons(hadelay: LocalNode, cron: str) -> None:
    found = [one.at for one in hadelay.client.preview_schedule(cron=cron, timezone="UTC").next]
    at, expected = datetime.now(UTC).replace(second=0, microsecond=0), []
    while len(expected) < len(found[:4]):
        at += timedelta(minutes=1)
        if pycron.is_now(cron, at):
            expected.append(at)
    assert found[:4] == expected


def pending(node: LocalNode, topic: str) -> int:
    info = node.client.topic(topic)
    return int(info.scheduled + info.ready + info.leased)


def test_a_revoke_cancels_all_messages_of_a_task_id(hadelay: LocalNode, celery_app: Celery) -> None:
    for task in ("twice", "x" * 300, "ä" * 200):
        for number in range(4):
            celery_app.send_task("add", (number, 1), task_id=task, countdown=600)
        assert pending(hadelay, "shop.celery") == 4
        celery_app.control.revoke(task)
        assert pending(hadelay, "shop.celery") == 0
        assert celery_app.AsyncResult(task).state == "REVOKED"


def test_results_of_long_task_ids(celery_app: Celery) -> None:
    ids = ["x" * 255, "x" * 254 + "y", "é" * 1000]
    for number, task in enumerate(ids):
        celery_app.backend.store_result(task, number, "SUCCESS")
    assert [celery_app.AsyncResult(task).get(timeout=5) for task in ids] == [0, 1, 2]
    celery_app.AsyncResult(ids[0]).forget()
    assert celery_app.AsyncResult(ids[0]).state == "PENDING"
    assert celery_app.AsyncResult(ids[1]).get(timeout=5) == 1


def beat(node: LocalNode, main: str | None, entries: dict[str, Any]) -> list[str]:
    """Run the start of a beat; returns the names of all schedules."""
    app = Celery(main, broker=node_url(node, "shop"), set_as_current=False)
    app.conf.beat_schedule = entries
    Scheduler(app)
    app.close()
    return [found.schedule for found in node.client.schedules("shop.")]


def test_beats_of_other_apps(hadelay: LocalNode) -> None:
    entry = {"task": "t", "schedule": 3600.0}
    apps = ["shop", "shop.reports", "shop-reports", "shop reports", "s" * 80, "s" * 79 + "."]
    for app in apps:
        found = beat(hadelay, app, {"nightly": entry, "reports.nightly": entry})
    assert len(found) == 2 * len(apps)
    for app in apps:
        found = beat(hadelay, app, {"nightly": entry})
    assert len(found) == len(apps)
    assert "shop.celery.shop.nightly" in found
    with pytest.raises(ImproperlyConfigured, match="the app has no name"):
        beat(hadelay, None, {"nightly": entry})


def test_beat_entries_that_expire(hadelay: LocalNode) -> None:
    """`expires` in seconds is of each occurrence; a time ends the schedule."""
    until = datetime.now(UTC) + timedelta(minutes=3)
    given = {
        "seconds": 30, "float": 1.5, "aware": until, "naive": until.replace(tzinfo=None), "text": until.isoformat(),
        "past": until - HOUR,
    }  # fmt: skip
    entries = {
        name: {"task": "t", "schedule": 60.0, "options": {"expires": expires}} for name, expires in given.items()
    }
    for _ in range(2):
        assert len(beat(hadelay, "shop", entries)) == len(given) - 1
    found = {one.schedule.rpartition(".")[2]: one for one in hadelay.client.schedules("shop.")}
    assert {one.version for one in found.values()} == {1}, "the second start of beat changed nothing"
    assert (found["seconds"].ttl, found["float"].ttl) == ("30s", "1s500ms")
    for name in ("aware", "naive", "text"):
        end = found[name].end
        assert end is not None
        assert abs(end - until) < timedelta(milliseconds=1)
        assert found[name].ttl is None
    hadelay.clock.advance("10m")
    for message in hadelay.client.receive("shop.celery", max=100, wait="2s"):
        assert message.schedule is not None
        if message.schedule.rpartition(".")[2] in ("aware", "naive", "text"):
            assert message.occurrence is not None
            assert message.occurrence <= until
            # A worker that finds the message after the time refuses it.
            assert datetime.fromisoformat(message.json()["headers"]["expires"]) == until


def dramatiq_broker(node: LocalNode, **options: Any) -> Any:
    return DramatiqBroker(node.url, prefix="shop.", **options)


def test_dramatiq_messages_that_are_enqueued_again(hadelay: LocalNode) -> None:
    """A message may be enqueued while others with its id are pending or running, and their retries as well."""
    broker, ran = dramatiq_broker(hadelay), list[tuple[int, int]]()
    broker.add_middleware(CurrentMessage())

    @dramatiq.actor(broker=broker, max_retries=3, min_backoff=1)
    def again(number: int) -> None:
        message: Any = CurrentMessage.get_current_message()
        retries = message.options.get("retries", 0)
        ran.append((number, retries))
        if number < 3 and retries == 1:
            broker.enqueue(message.copy(args=(number + 1,), options={"retries": 0}))
            broker.enqueue(message.copy(args=(10 + number,)), delay=-20)
        if number < 10 and retries < 2:
            raise ConnectionError("gone")

    worker = dramatiq.Worker(broker, worker_timeout=100, worker_threads=1)
    worker.start()
    try:
        again.send(1)
        expected = sorted([(n, r) for n in (1, 2, 3) for r in (0, 1, 2)] + [(11, 1), (12, 1)])
        until_equal(lambda: sorted(ran), expected)
    finally:
        worker.stop()
    broker.close()


def until_equal(look: Any, expected: Any) -> None:
    until(lambda: look() == expected, f"{expected}", seconds=30)


@pytest.mark.parametrize("delay", [None, 0, -1, -5_000])
def test_dramatiq_delays(hadelay: LocalNode, delay: int | None) -> None:
    for broker in (StubBroker(), dramatiq_broker(hadelay)):
        ran: list[int] = []
        dramatiq.actor(broker=broker, actor_name="note")(ran.append)
        worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
        worker.start()
        broker.get_actor("note").send_with_options(args=(1,), delay=delay)
        until_equal(lambda ran=ran: ran, [1])
        worker.stop()
        broker.close()


def test_a_dramatiq_pipeline_has_a_result(hadelay: LocalNode) -> None:
    """`get_result` of a message that is not published yet waits, as with Dramatiq's own backends."""
    for broker in (StubBroker(), dramatiq_broker(hadelay)):
        backend = StubBackend() if isinstance(broker, StubBroker) else HadelayBackend(broker)
        broker.add_middleware(Results(backend=backend))

        @dramatiq.actor(broker=broker, store_results=True)
        def add(a: int, b: int) -> int:
            return a + b

        pipe = dramatiq.pipeline([add.message(1, 1), add.message(10)], broker=broker)
        with pytest.raises(ResultMissing):
            pipe.get_result()
        with pytest.raises(ResultTimeout):
            pipe.get_result(block=True, timeout=300)
        pipe.run()
        worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=1)
        worker.start()
        assert pipe.get_result(block=True, timeout=20_000) == 12
        assert list(pipe.get_results(block=True, timeout=20_000)) == [2, 12]
        worker.stop()
        broker.close()


async def calls_of(broker: Any) -> Any:
    """Three calls with one task id; returns what the first one saw."""
    ran, all_ran = list[int](), asyncio.Event()

    async def labels(number: int, context: Any = TaskiqDepends(Context)) -> Any:  # noqa: B008
        ran.append(number)
        if len(ran) == 3:
            all_ran.set()
        given = {k: v for k, v in context.message.labels.items() if k in ("text", "number", "flag", "raw", "delay")}
        return {"labels": {k: repr(v) for k, v in given.items()}, "id": context.message.task_id}

    task = broker.register_task(labels, task_name="labels")
    await broker.startup()
    worker = asyncio.create_task(run_receiver_task(broker)) if isinstance(broker, HadelayBroker) else None
    assert await broker.result_backend.is_result_ready("nobody") is False
    with pytest.raises((ResultGetError, KeyError)):
        await broker.result_backend.get_result("nobody")
    kicker = task.kicker().with_labels(text="a", number=1, flag=True, raw=b"\xff", delay=-0.5)
    call = await kicker.with_task_id("one").kiq(1)
    for number in (2, 3):
        await task.kicker().with_task_id("one").kiq(number)
    found = (await call.wait_result(timeout=20)).return_value
    await asyncio.wait_for(all_ran.wait(), 20)
    assert sorted(ran) == [1, 2, 3]
    if worker is not None:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    await broker.shutdown()
    return found


async def test_taskiq_calls(hadelay: LocalNode) -> None:
    """Beside taskiq's broker in memory: labels, results, unknown results, delays below zero, and one id thrice."""
    broker = HadelayBroker(hadelay.url)
    assert await calls_of(InMemoryBroker()) == await calls_of(broker.with_result_backend(HadelayResultBackend(broker)))


def test_all_adapters_give_up_after_the_same_time(hadelay: LocalNode, celery_app: Celery) -> None:
    with celery_app.connection_for_write() as connection:
        clients = [connection.transport.cluster, celery_app.backend._client]
    clients += [App().client, HadelayBroker().client, DramatiqBroker().client]
    assert {client._async()._transport.timeout_s for client in clients} == {10.0}


@pytest.mark.parametrize("value", [math.nan, {"a": [math.inf]}])
def test_a_result_that_json_has_not_is_an_error_and_never_null(value: Any) -> None:
    message = SimpleNamespace(result=None)
    HadelayBackend(DramatiqBroker("http://127.0.0.1:1")).store_result(message, value, 0)  # type: ignore[arg-type]
    assert b"JSON has no" in message.result
    kept: list[bytes] = []
    result = TaskiqResult(is_err=False, log=None, return_value=value, execution_time=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "keep", lambda encoded: kept.append(encoded) or True)
        asyncio.run(HadelayResultBackend(HadelayBroker("http://127.0.0.1:1")).set_result("1", result))
    (encoded,) = kept
    assert b"JSON has no" in encoded
    assert b'"is_err":true' in encoded


def test_celery_results_tell_each_state(hadelay: LocalNode, celery_app: Celery) -> None:
    """`get(on_message=…)`, as of Celery's backends in Redis and in a database of RabbitMQ."""
    backend, seen = celery_app.backend, list[Any]()
    states = [("PROGRESS", {"i": 0}), ("PROGRESS", {"i": 1}), ("SUCCESS", "end")]

    def reported(meta: dict[str, Any]) -> None:
        seen.append((meta["status"], meta["result"]))
        if len(seen) < len(states):
            state, result = states[len(seen)]
            backend.store_result("told", result, state)

    backend.store_result("told", states[0][1], states[0][0])
    assert celery_app.AsyncResult("told").get(timeout=20, on_message=reported) == "end"
    assert seen == states
