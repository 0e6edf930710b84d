"""Part of `manage.py hadelay_worker` that each worker process runs: the tasks of one backend."""

from datetime import datetime
from typing import Any

import django
import msgspec
from django.db import close_old_connections
from django.utils import timezone

from hadelay.client.message import printable
from hadelay.client.types import Order
from hadelay.django.backend import HadelayBackend
from hadelay.django.compat import (
    DEFAULT_TASK_QUEUE_NAME,
    TaskContext,
    TaskError,
    TaskResultStatus,
    normalize_json,
    task_backends,
    task_finished,
    task_started,
)
from hadelay.django.results import Job, change, local, new_result, result_of, task_named
from hadelay.tasks.app import App
from hadelay.tasks.attempt import current
from hadelay.tasks.outcomes import Failed, Outcome, done, outcome_of
from hadelay.tasks.task import Task


class DjangoApp(App):
    """App (hadelay.tasks) with the tasks of one backend. A task is imported when a message names it, because Django has
    no list of tasks."""

    #: Receive from the topics in the listed order, so that topics of a higher priority come first.
    order: Order = "listed"

    def __init__(self, backend: HadelayBackend) -> None:
        super().__init__(backend.settings.urls, backend.settings.token, ca=backend.settings.ca)
        self._backend = backend

    @property
    def topics(self) -> list[str]:
        return self._backend.topics(self._backend.queue_names or [DEFAULT_TASK_QUEUE_NAME])

    def find(self, name: str) -> Task[..., Any]:
        if name not in self.tasks:
            task = task_named(name)

            # The parameters must have the names of Job's fields, because the arguments of a call are an encoded Job.
            def run(
                args: list[Any],
                kwargs: dict[str, Any],
                queue: str,
                enqueued_at: datetime,
                priority: int = 0,
                run_after: datetime | None = None,
            ) -> Any:
                return run_attempt(self._backend, task, Job(args, kwargs, queue, enqueued_at, priority, run_after))

            self.tasks[name] = Task(self, run, name, self.topic, self._backend.rules)
        return self.tasks[name]


def run_attempt(backend: HadelayBackend, task: Any, job: Job) -> Any:
    """Run one attempt of a task in this thread; returns the task's value, converted to JSON types. Raises Failed if the
    task raised an exception."""
    result = _begun(backend, task, job)
    context = (TaskContext(task_result=result),) if result.task.takes_context else ()
    close_old_connections()
    try:
        task_started.send(type(backend), task_result=result)
        value = normalize_json(result.task.call(*context, *result.args, **result.kwargs))
        done(value, backend.rules)
        change(result, status=TaskResultStatus.SUCCESSFUL, finished_at=local(timezone.now()), _return_value=value)
        task_finished.send(type(backend), task_result=result)
    except Exception as error:
        outcome = _outcome(backend, error)
        if outcome.kind == "dead":
            result.errors.append(
                TaskError(exception_class_path=_path(error), traceback=outcome.trace or outcome.reason)
            )
            change(result, status=TaskResultStatus.FAILED, finished_at=local(timezone.now()))
            task_finished.send(type(backend), task_result=result)
            # Leave out the traceback: Django's receiver of task_finished has logged the exception.
            outcome = msgspec.structs.replace(outcome, trace="")
        raise Failed(outcome) from error
    finally:
        close_old_connections()
    return value


def _begun(backend: HadelayBackend, task: Any, job: Job) -> Any:
    """TaskResult of the attempt that runs in this thread."""
    attempt = current()
    if attempt.number > 1:
        return result_of(backend.alias, backend.client.get(attempt.id, body=True))
    result, now = new_result(backend.alias, attempt.id, job.of(task, backend.alias), job), local(timezone.now())
    change(
        result, status=TaskResultStatus.RUNNING, started_at=now, last_attempted_at=now, worker_ids=[attempt.consumer]
    )
    return result


def _outcome(backend: HadelayBackend, error: Exception) -> Outcome:
    counted = current().counted
    outcome = outcome_of(error, backend.rules, counted)
    if outcome.kind == "snoozed":
        return outcome
    last = counted >= backend.settings.max_attempts
    # The reason begins with the exception's class, so that `get_result` can put the class into a TaskError.
    reason = printable(f"{_path(error)}: {error}")
    return msgspec.structs.replace(outcome, reason=reason, kind="dead" if last else outcome.kind)


def _path(error: Exception) -> str:
    return f"{type(error).__module__}.{type(error).__qualname__}"


def __getattr__(alias: str) -> DjangoApp:
    """App of the backend whose alias is the attribute's name: a worker imports its app as MODULE:NAME."""
    if alias.startswith("__"):
        raise AttributeError(alias)
    django.setup()
    backend = task_backends[alias]
    if not isinstance(backend, HadelayBackend):
        raise AttributeError(alias)
    return DjangoApp(backend)
