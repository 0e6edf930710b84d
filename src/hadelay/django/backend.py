"""Backend for Django's tasks: publishes calls of tasks, and reads their results."""

import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from typing import Annotated, Any

import msgspec
from asgiref.sync import sync_to_async
from django.apps import apps
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.module_loading import import_string
from msgspec import Meta, Struct

from hadelay.client import Client, Put, exactjson
from hadelay.client.anyloop import awaited
from hadelay.client.queues import topic_of
from hadelay.client.wire import ADAPTER_TIMEOUT_S, seconds_of, servers
from hadelay.django.compat import (
    DEFAULT_TASK_QUEUE_NAME,
    BaseTaskBackend,
    TaskResultDoesNotExist,
    normalize_json,
    task_enqueued,
)
from hadelay.django.results import Job, message_of, new_result, result_id, result_of
from hadelay.errors import BadRequest, HadelayError, NotFound
from hadelay.tasks.outcomes import Rules
from hadelay.tasks.task import Call


def _tests_run() -> bool:
    """Whether Django's test runner or pytest-django has set up the test environment. Django has no public function for
    this."""
    return hasattr(getattr(sys.modules.get("django.test.utils"), "_TestState", None), "saved_data")


def _write(put: dict[str, Any]) -> str:
    """Write the call of a task into the outbox table; returns the id of its result."""
    from hadelay.django import outbox  # import late: works only where the outbox's Django app is installed

    key = str(uuid.uuid4())
    outbox.publish(Put(**put, key=key))
    return result_id(put["topic"], key)


class Options(Struct, kw_only=True, forbid_unknown_fields=True):
    """Settings in OPTIONS of the backend."""

    #: urls, token, ca: as for Client. Default of `urls`: the variable HADELAY_SERVERS, or else a node on loopback.
    urls: str | list[str] | None = None
    token: str | None = None
    ca: str | None = None
    #: Time after which `enqueue` fails if no node can store the call: seconds, or text such as "5s".
    timeout: float | str = ADAPTER_TIMEOUT_S
    #: Prefix of the names of all topics.
    prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "django"
    #: Whether `enqueue` writes into the outbox (hadelay.django.outbox), in the transaction around it.
    outbox: bool = False
    #: Limit of attempts of a task that raises exceptions.
    max_attempts: Annotated[int, Meta(ge=1)] = 1
    #: Wait before the next attempt, by exception class or its dotted path; a list has a wait for each attempt.
    retry: dict[Any, Any] = {}


class HadelayBackend(BaseTaskBackend):
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        #: True while `client` is connected to a test's own node.
        self.of_a_test = False
        #: Queues in the order of the settings: a worker prefers the first ones.
        self.queue_names = list(params.get("QUEUES", [DEFAULT_TASK_QUEUE_NAME]))

    @cached_property
    def settings(self) -> Options:
        return msgspec.convert(dict(self.options), Options)

    @cached_property
    def client(self) -> Client:
        """The client of this backend. Any thread may use it, also after a fork."""
        settings = self.settings
        return Client(servers(settings.urls), settings.token, timeout=seconds_of(settings.timeout), ca=settings.ca)

    @cached_property
    def rules(self) -> Rules:
        retry = {
            import_string(kind) if isinstance(kind, str) else kind: self.settings.retry[kind]
            for kind in self.settings.retry
        }
        return Rules(retry=retry, result=True)

    def topics(self, queues: Sequence[str]) -> list[str]:
        """Topics of these queues, highest priority first."""
        return [self._topic(queue, priority) for priority in (1, 0, -1) for queue in queues]

    def _topic(self, queue: str, priority: int) -> str:
        band = "-high" if priority > 0 else "-low" if priority < 0 else ""
        return topic_of(f"{self.settings.prefix}{band}.", queue)

    def _call(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Job, dict[str, Any]]:
        """Encode the call of a task. Returns the call, and the arguments of the client's `put` that publish it."""
        self.validate_task(task)
        if not self.of_a_test and _tests_run():
            raise ImproperlyConfigured(
                f"a test may not publish into the cluster of TASKS[{self.alias!r}]: use hadelay.django.testing.worker, "
                "or let the settings of tests name the backend hadelay.django.testing.ImmediateBackend"
            )
        at = task.run_after
        if at is not None and timezone.is_naive(at):
            at = timezone.make_aware(at)
        job = Job(normalize_json(args), normalize_json(kwargs), task.queue_name, datetime.now(UTC), task.priority, at)
        body = msgspec.json.encode(Call(task.module_path, msgspec.Raw(exactjson.encode(job, "call"))))
        topic = self._topic(task.queue_name, task.priority)
        return job, {"topic": topic, "body": body, "content_type": "application/json", "at": at}

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        job, put = self._call(task, args, kwargs)
        made = _write(put) if self.settings.outbox else self.client.put(**put).id
        result = new_result(self.alias, made, task, job)
        task_enqueued.send(type(self), task_result=result)
        return result

    async def aenqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        job, put = self._call(task, args, kwargs)
        if self.settings.outbox:
            # Write in a thread: transactions of Django belong to a thread, not to a coroutine.
            made = await sync_to_async(_write)(put)
        else:
            made = (await awaited(self.client, lambda client: client.put(**put))).id
        result = new_result(self.alias, made, task, job)
        await task_enqueued.asend(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        try:
            return result_of(self.alias, self.client.get(**message_of(result_id), body=True))
        except (NotFound, BadRequest) as error:
            raise TaskResultDoesNotExist(result_id) from error

    async def aget_result(self, result_id: str) -> Any:
        try:
            found = await awaited(self.client, lambda client: client.get(**message_of(result_id), body=True))
        except (NotFound, BadRequest) as error:
            raise TaskResultDoesNotExist(result_id) from error
        return result_of(self.alias, found)

    def check(self, **_: Any) -> Iterator[checks.CheckMessage]:
        where = f"TASKS[{self.alias!r}]"
        if self.options.get("outbox") and not apps.is_installed("hadelay.django.outbox"):
            hint = "Add 'hadelay.django.outbox' to INSTALLED_APPS, and run manage.py migrate."
            yield checks.Error("'outbox' in OPTIONS needs the table of the outbox.", hint, where, "hadelay.E004")
        if not apps.is_installed("hadelay.django"):
            hint = "Add 'hadelay.django' to INSTALLED_APPS."
            yield checks.Warning("manage.py has no command hadelay_worker.", hint, where, "hadelay.W001")
        try:
            retries = self.rules.retry
        except (msgspec.ValidationError, ImportError, ValueError, TypeError) as error:
            names = ", ".join(Options.__struct_fields__)
            yield checks.Error(
                f"OPTIONS: {error}", f"OPTIONS are {names}: see docs/howto/django.md.", where, "hadelay.E001"
            )
            return
        if retries and self.settings.max_attempts == 1:
            hint = "Add 'max_attempts' to OPTIONS: its default is 1."
            yield checks.Error("'retry' in OPTIONS has no effect.", hint, where, "hadelay.E002")
        try:
            Client(
                servers(self.settings.urls),
                self.settings.token,
                timeout=seconds_of(self.settings.timeout),
                ca=self.settings.ca,
            )
        except (HadelayError, ValueError, OSError) as error:
            yield checks.Error(f"OPTIONS: {error}", "Check 'urls', 'timeout' and 'ca'.", where, "hadelay.E003")
