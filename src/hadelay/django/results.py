"""Conversion of a message and its history to Django's TaskResult."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
from django.conf import settings
from django.utils import timezone
from django.utils.module_loading import import_string
from msgspec import UNSET, Struct

from hadelay.client import MessageInfo
from hadelay.client.message import GIVE_BACK
from hadelay.django.compat import Task, TaskError, TaskResult, TaskResultDoesNotExist, TaskResultStatus
from hadelay.tasks.outcomes import SNOOZED
from hadelay.tasks.task import Call

#: Status of a result by the state of its message. The other states (dead, expired, cancelled) mean FAILED.
_STATUS = {
    "scheduled": TaskResultStatus.READY, "ready": TaskResultStatus.READY, "blocked": TaskResultStatus.READY,
    "leased": TaskResultStatus.RUNNING, "acked": TaskResultStatus.SUCCESSFUL,
}  # fmt: skip
#: Exception class in the TaskError of an attempt that failed without an exception, for example because its worker was
#: killed.
_NO_EXCEPTION = "hadelay.tasks.TaskFailed"


class Job(Struct, frozen=True):
    """Arguments of a call, and the options of the Task that was enqueued."""

    args: list[Any]
    kwargs: dict[str, Any]
    queue: str
    #: Time of the publish, by the publisher's clock.
    enqueued_at: datetime
    priority: int = 0
    run_after: datetime | None = None

    def of(self, task: Any, alias: str) -> Any:
        """A copy of the task that has the queue, priority and time of this published call."""
        return task.using(backend=alias, queue_name=self.queue, priority=self.priority, run_after=local(self.run_after))


#: Separator of topic and key in the id of a result whose call was published through the outbox.
_OUTBOX_MARK = "~"


def result_id(topic: str, key: str) -> str:
    """Id of a result whose call goes through the outbox: its message has no id yet, and is found by its key."""
    return f"{topic}{_OUTBOX_MARK}{key}"


def message_of(result_id: str) -> dict[str, Any]:
    """Arguments of the client's `get` for the message of a result."""
    topic, mark, key = result_id.partition(_OUTBOX_MARK)
    return {"topic": topic, "key": key} if mark else {"message_id": result_id}


def task_named(path: str) -> Any:
    """Import the task with this dotted path. Raises LookupError if there is none."""
    try:
        found = import_string(path)
    except ImportError as error:
        raise LookupError(f"this program has no task {path!r}: {error}") from None
    if not isinstance(found, Task):
        raise LookupError(f"{path!r} is no task: is the decorator missing?")
    return found


def new_result(alias: str, message_id: str, task: Any, job: Job) -> Any:
    """TaskResult of a task that has not run yet."""
    return TaskResult(
        task=task,
        id=message_id,
        status=TaskResultStatus.READY,
        enqueued_at=local(job.enqueued_at),
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=job.args,
        kwargs=job.kwargs,
        backend=alias,
        errors=[],
        worker_ids=[],
    )


def change(result: Any, **values: Any) -> None:
    """Set fields of a TaskResult, although its class is frozen."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def result_of(alias: str, info: MessageInfo) -> Any:
    """The result of the task whose call is in this message. Raises TaskResultDoesNotExist if the message is no call."""
    try:
        call = msgspec.json.decode(info.body or b"", type=Call)
        job = msgspec.json.decode(call.args, type=Job)
    except msgspec.DecodeError as error:
        raise TaskResultDoesNotExist(info.id) from error
    void = _uncounted(info)
    starts = [event for event in info.history if event.event == "leased" and event.attempt not in void]
    result = new_result(
        alias, result_id(info.topic, info.key) if info.key else info.id, job.of(task_named(call.task), alias), job
    )
    change(
        result,
        status=_STATUS.get(info.state, TaskResultStatus.FAILED),
        errors=_errors(info, void),
        worker_ids=[event.consumer or "" for event in starts],
    )
    if starts:
        change(result, started_at=local(starts[0].at), last_attempted_at=local(starts[-1].at))
    if result.is_finished:
        change(result, finished_at=local(info.history[-1].at))
    if info.result is not UNSET:
        change(result, _return_value=info.result)
    return result


def _uncounted(info: MessageInfo) -> list[int]:
    """Numbers of the attempts that do not count as failed: snoozed ones, and those that a stopping worker gave back."""
    ends = [(event.attempt, event.reason or "") for event in info.history if event.event == "nacked"]
    return [number for number, reason in ends if reason == GIVE_BACK.reason or reason.startswith(SNOOZED)]


def _errors(info: MessageInfo, void: Sequence[int]) -> list[Any]:
    """Errors of the failed attempts, and of a cancel or an expiry of the message."""
    failed = [
        event.reason or event.event
        for event in info.history
        if event.event in ("nacked", "lease_expired") and event.attempt not in void
    ]
    if info.state in ("cancelled", "expired"):
        failed.append(f"the message is {info.state}")
    return [_error(reason) for reason in failed]


def _error(reason: str) -> Any:
    """Error of a failed task, from the reason of its last nack: `dotted.path.of.Class: text of the exception`."""
    path = reason.partition(":")[0]
    known = "." in path and path.replace(".", "").isidentifier()
    return TaskError(exception_class_path=path if known else _NO_EXCEPTION, traceback=reason)


def local(at: datetime | None) -> datetime | None:
    """Convert a time to the form that the Django project uses: without a time zone if USE_TZ is off."""
    return at if at is None or settings.USE_TZ else timezone.make_naive(at)
