"""The Celery app of the tests. BROKER names the cluster; tasks append lines to the file OUT."""

from __future__ import annotations

import os
import time
from typing import Any

from celery import Celery
from celery.exceptions import Reject

import hadelay.celery  # noqa: F401

app = Celery("celery_app", broker=os.environ.get("BROKER", "hadelay://"), set_as_current=False)
app.conf.update(
    result_backend="hadelay://",
    beat_schedule={"tick": {"task": "tick", "schedule": 1.0, "options": {"expires": 30}}},
    task_routes={"routed": {"queue": "second"}},
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    broker_transport_options={"lease": 2},
)


def write(*words: object) -> None:
    with open(os.environ["OUT"], "a") as out:
        out.write(" ".join(map(str, words)) + "\n")


@app.task(name="timed", ignore_result=True)
def timed(number: int, due: float, takes: float = 0) -> None:
    write("hello", number, time.time() - due)
    time.sleep(takes)


@app.task(name="long", bind=True)
def long(self: Any, number: int, seconds: float) -> None:
    write("begin", number, os.getpid(), self.request.delivery_info["redelivered"])
    time.sleep(seconds)
    write("end", number)


@app.task(name="flaky", bind=True, max_retries=3)
def flaky(self: Any) -> None:
    write("flaky", self.request.retries, time.time())
    if self.request.retries < 3:
        raise self.retry(countdown=0.1)


@app.task(name="routed")
def routed(number: int) -> None:
    write("routed", number)


@app.task(name="rejects")
def rejects() -> None:
    raise Reject("no use", requeue=False)


@app.task(name="replaced", bind=True)
def replaced(self: Any, number: int) -> None:
    if number:
        raise self.replace(replaced.s(number - 1))
    write("replaced", self.request.id)


@app.task(name="tick", bind=True, ignore_result=True)
def tick(self: Any) -> None:
    write("tick", self.request.id, time.time())


@app.task(name="add")
def add(a: int, b: int) -> int:
    return a + b


@app.task(name="total")
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(name="fails")
def fails() -> None:
    raise KeyError("no such order")
