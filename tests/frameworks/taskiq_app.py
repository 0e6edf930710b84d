"""The tasks that the workers of test_taskiq.py run."""

import asyncio
import time
from typing import Annotated

from taskiq import Context, SmartRetryMiddleware, TaskiqDepends

from hadelay.taskiq import HadelayBroker, HadelayResultBackend, HadelayScheduleSource
from tests.frameworks.say import say

broker = HadelayBroker(topic="taskiq.tests", lease="4s", prefetch=2)
broker.with_result_backend(HadelayResultBackend(broker)).with_middlewares(SmartRetryMiddleware(default_delay=0.1))
source = HadelayScheduleSource(broker)


@broker.task
async def hello(number: int, due: float) -> None:
    say("hello", number, time.time() - due)


@broker.task
async def add(a: int, b: int) -> int:
    return a + b


@broker.task(retry_on_error=True, max_retries=3)
def flaky(times: int, context: Annotated[Context, TaskiqDepends()]) -> int:
    tries = int(context.message.labels.get("_retries", 0)) + 1
    say("flaky", tries, time.time())
    if tries <= times:
        raise ConnectionError("gone")
    return tries


@broker.task
async def requeues(context: Annotated[Context, TaskiqDepends()]) -> str:
    count = int(context.message.labels.get("X-Taskiq-requeue", 0))
    if count < 2:
        await context.requeue()
    return f"requeued {count} times"


@broker.task
async def odd(what: str) -> object:
    if what == "large":
        return "x" * 100_000
    if what == "object":
        return object()
    raise ValueError("no such customer")


@broker.task(ack_type="manual")
async def forgets(context: Annotated[Context, TaskiqDepends()]) -> None:
    say("forgets")


@broker.task(ack_type="when_received")
async def early() -> int:
    return 1


@broker.task
async def slow(seconds: float) -> None:
    say("begins")
    await asyncio.sleep(seconds)
    say("ends")


@broker.task(schedule=[{"interval": 1, "args": ["label"]}])
async def tick(word: str) -> str:
    say("tick", word, time.time())
    return word
