"""A process with a scheduler, for the tests: `python -m tests.frameworks.apscheduler_app`."""

from __future__ import annotations

import os
import signal
import time

from apscheduler.schedulers.blocking import BlockingScheduler

from hadelay.apscheduler import HadelayJobStore
from tests.frameworks.say import say


def hello(number: int, due: float) -> None:
    say("hello", number, f"{time.time() - due:.3f}")


def tick() -> None:
    say("tick", os.getpid())


if __name__ == "__main__":
    scheduler = BlockingScheduler(timezone="UTC")
    scheduler.add_jobstore(HadelayJobStore(topic="clock", concurrency=3, lease=5))
    scheduler.add_job(tick, "interval", seconds=1, id="tick", replace_existing=True, misfire_grace_time=None)

    def stop(*_: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, stop)
    try:
        scheduler.start()
    finally:
        scheduler.shutdown()
