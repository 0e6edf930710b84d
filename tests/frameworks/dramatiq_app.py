"""The actors that the workers of test_dramatiq.py run."""

import time

import dramatiq
from dramatiq.middleware import CurrentMessage
from dramatiq.results import Results

from hadelay.dramatiq import HadelayBackend, HadelayBroker
from tests.frameworks.say import say

broker = HadelayBroker(prefix="dramatiq-tests.", lease="4s")
broker.add_middleware(Results(backend=HadelayBackend(broker)))
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)


@dramatiq.actor
def hello(number: int, due: float) -> None:
    say("hello", number, time.time() - due)


@dramatiq.actor(store_results=True, queue_name="sums")
def add(a: int, b: int) -> int:
    return a + b


@dramatiq.actor(store_results=True, max_retries=2, min_backoff=100)
def flaky(times: int) -> int:
    message = CurrentMessage.get_current_message()
    assert message is not None
    tries = int(message.options.get("retries", 0)) + 1
    say("flaky", tries, time.time())
    if tries <= times:
        raise ConnectionError("gone")
    return tries


@dramatiq.actor(store_results=True, max_retries=0)
def broken() -> None:
    raise ValueError("no such customer")


@dramatiq.actor(store_results=True)
def large() -> str:
    return "x" * 100_000


@dramatiq.actor
def slow(seconds: float) -> None:
    say("begins")
    time.sleep(seconds)
    say("ends")
