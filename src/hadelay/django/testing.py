"""Helper for tests of a Django project: runs due tasks, on a node whose clock the test moves (docs/howto/django.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import django
import msgspec

from hadelay.client import AsyncMessage, Client
from hadelay.client.background import wait
from hadelay.client.due import MovedNode, due
from hadelay.django.backend import HadelayBackend
from hadelay.django.compat import task_backends
from hadelay.django.results import Job, task_named
from hadelay.django.worker import run_attempt
from hadelay.tasks.attempt import CURRENT, Attempt
from hadelay.tasks.outcomes import done, outcome_of, settle
from hadelay.tasks.task import Call

if django.VERSION >= (6, 0):
    from django.tasks.backends.immediate import ImmediateBackend as _ImmediateBackend
else:
    from django_tasks.backends.immediate import ImmediateBackend as _ImmediateBackend


class ImmediateBackend(_ImmediateBackend):
    """Runs each task in `enqueue`, as Django's ImmediateBackend does, also a task with `run_after`."""

    supports_defer = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, {**params, "OPTIONS": {}})


class Worker:
    """Runs tasks in the thread of the test, so that they see what the test's transaction has written."""

    def __init__(self, backend: HadelayBackend) -> None:
        self._backend = backend

    def run_due(self) -> int:
        """Run the tasks that are due by the node's clock until none is left; returns the number of attempts."""
        topics, count = self._backend.topics(self._backend.queue_names), 0
        for message in due(self._backend.client, topics):
            self._run(message)
            count += 1
        return count

    def _run(self, message: AsyncMessage) -> None:
        rules, counted = self._backend.rules, message.attempt - message.uncounted
        token = CURRENT.set(
            Attempt(
                task="",
                id=message.id,
                topic=message.topic,
                key=message.key,
                number=message.attempt,
                counted=counted,
                meta=message.meta,
                consumer="test",
            )
        )
        try:
            call = msgspec.json.decode(message.body, type=Call)
            job = msgspec.json.decode(call.args, type=Job)
            outcome = done(run_attempt(self._backend, task_named(call.task), job), rules)
        except Exception as error:
            outcome = outcome_of(error, rules, counted)
        finally:
            CURRENT.reset(token)
        wait(settle(message, outcome, rules))


@contextlib.contextmanager
def worker(node: MovedNode, backend: str = "default") -> Iterator[Worker]:
    """Context manager in which the backend with this alias uses the test's node."""
    found = task_backends[backend]
    if not isinstance(found, HadelayBackend):
        raise TypeError(f"TASKS[{backend!r}] is no hadelay.django.HadelayBackend: choose another backend")
    before, found.__dict__["client"] = found.__dict__.get("client"), Client(node.url)
    found.of_a_test = True
    try:
        yield Worker(found)
    finally:
        found.of_a_test = False
        found.__dict__.pop("client").close()
        if before is not None:
            found.__dict__["client"] = before


def run_after(node: MovedNode, delay: timedelta) -> datetime:
    """The time after `delay` by the node's clock, for `run_after` of a task in a test that has moved the clock."""
    return datetime.fromtimestamp(node.clock.now(), UTC) + delay
