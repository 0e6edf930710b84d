"""A task: a function that can be called later."""

import copy
import hashlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import update_wrapper
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

import msgspec

from hadelay.client import Delay, OnConflict, Put, Receipt, When
from hadelay.tasks.arguments import Arguments
from hadelay.tasks.outcomes import Rules

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
T = TypeVar("T")


class Options(TypedDict, total=False):
    """Options of a publish; they mean what the arguments of the client's `put` mean."""

    delay: Delay | None
    at: When | None
    batch: str | None
    key: str | None
    on_conflict: OnConflict | None
    max_wait: Delay | None
    unique_for: Delay | None
    tags: Sequence[str] | None
    ttl: Delay | None
    group: str | None
    meta: Mapping[str, str] | None
    traceparent: str | None
    idempotency_key: str | None


class Finished(NamedTuple):
    """How a task's message ended: state `acked` with the result, or another state with the last reason in the
    history."""

    state: str
    result: Any = None
    reason: str | None = None


class TaskFailed(Exception):
    """A call has no result, because its message is dead, cancelled or expired."""

    def __init__(self, state: str, reason: str | None) -> None:
        super().__init__(f"the message is {state}" + (f": {reason}" if reason else ""))
        self.state, self.reason = state, reason


class Publisher(Protocol):
    """Interface of the App that a task publishes messages through."""

    async def publish(self, put: Put) -> Receipt: ...
    def publish_sync(self, put: Put) -> Receipt: ...
    async def finished(self, message_id: str, timeout: float | None) -> "Finished": ...
    def finished_sync(self, message_id: str, timeout: float | None) -> "Finished": ...


class Call(msgspec.Struct, frozen=True):
    """Payload of a task's message. args: the arguments, a JSON object by parameter name."""

    task: str
    args: msgspec.Raw


class Task(Generic[P, R]):
    """A function with a name and a topic. Calling the task calls the function, here and now; `put` publishes a message,
    and a worker calls the function.

    Python's types cannot add options to a function's parameters, so options come first:
    `await remind.options(delay="3d", key="order-4711").put(4711)`.
    """

    def __init__(self, publisher: Publisher, function: Callable[P, R], name: str, topic: str, rules: Rules) -> None:
        self._publisher, self.function = publisher, function
        self.name, self.topic, self.rules = name, topic, rules
        self.arguments = Arguments(name, function)
        self._options: Options = {}
        #: Settings of the schedule of a periodic task; None for other tasks.
        self.schedule: dict[str, Any] | None = None
        update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def options(self, **options: Unpack[Options]) -> "Task[P, R]":
        """A copy of the task with options for its publishes: `delay`, `at`, `key`, … ."""
        unknown = options.keys() - Options.__annotations__.keys()
        if unknown:
            raise TypeError(f"{self.name}: a publish has no option {min(unknown)!r}")
        task = copy.copy(self)
        task._options = {**self._options, **options}
        return task

    async def put(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Publish a call; from any event loop. TypeError if the function does not take these arguments."""
        return await self._publisher.publish(self.message(*args, **kwargs))

    def put_sync(self, *args: P.args, **kwargs: P.kwargs) -> Receipt:
        """Like `put`, but blocking."""
        return self._publisher.publish_sync(self.message(*args, **kwargs))

    @overload
    async def result(
        self: "Task[P, Coroutine[Any, Any, T]]", of: Receipt | str, *, timeout: float | None = None
    ) -> T: ...
    @overload
    async def result(self, of: Receipt | str, *, timeout: float | None = None) -> R: ...
    async def result(self, of: Receipt | str, *, timeout: float | None = None) -> Any:
        """Wait until the call with this receipt or id has ended; returns what the function returned. Raises TypeError
        if the task has not `result=True`, TimeoutError after `timeout` seconds, and TaskFailed if the message is dead,
        cancelled or expired."""
        return self._result(await self._publisher.finished(self._has_result(of), timeout))

    @overload
    def result_sync(
        self: "Task[P, Coroutine[Any, Any, T]]", of: Receipt | str, *, timeout: float | None = None
    ) -> T: ...
    @overload
    def result_sync(self, of: Receipt | str, *, timeout: float | None = None) -> R: ...
    def result_sync(self, of: Receipt | str, *, timeout: float | None = None) -> Any:
        """Like `result`, but blocking."""
        return self._result(self._publisher.finished_sync(self._has_result(of), timeout))

    def _has_result(self, of: Receipt | str) -> str:
        """Message id of the call. TypeError if the task keeps no results."""
        if not self.rules.result:
            raise TypeError(f"{self.name} keeps no results: give it result=True")
        return of if isinstance(of, str) else of.id

    def _result(self, finished: Finished) -> Any:
        if finished.state != "acked":
            raise TaskFailed(finished.state, finished.reason)
        return self.arguments.returned(finished.result)

    def message(self, *args: P.args, **kwargs: P.kwargs) -> Put:
        """The message of a call, for the client's `put_many`."""
        encoded = self.arguments.encode(args, kwargs)
        options = dict(self._options)
        if self.rules.unique and options.get("key") is None:
            options["key"] = f"{self.name[-200:]}:{hashlib.sha256(encoded).hexdigest()[:32]}"
        if self.rules.unique_for is not None:
            options.setdefault("unique_for", self.rules.unique_for)
        body = msgspec.json.encode(Call(self.name, msgspec.Raw(encoded)))
        return Put(topic=self.topic, body=body, content_type="application/json", **options)  # type: ignore[arg-type]
