"""Applications of frameworks, which their own workers load by name. Each is made from the plan in the environment when
it is asked for, so this module can be imported without a plan and without the frameworks."""

from __future__ import annotations

import functools
from typing import Any

from bench.delays.contenders import contender_of
from bench.delays.contenders.celery_countdown import celery_app
from bench.delays.contenders.dramatiq_redis import dramatiq_actor
from bench.delays.contenders.procrastinate_postgres import procrastinate_app
from bench.delays.plan import plan


@functools.cache
def __getattr__(name: str) -> Any:
    match name:
        case "celery":
            return celery_app(contender_of(plan()))
        case "broker":
            return dramatiq_actor(contender_of(plan())).broker
        case "procrastinate":
            return procrastinate_app(contender_of(plan()), stalled=True)
        case _:
            raise AttributeError(name)
