"""`App`: the tasks of a program, and the cluster that keeps their messages."""

import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, overload

import msgspec

from hadelay.client import Client, Delay, MessageInfo, Put, Receipt
from hadelay.client.anyloop import awaited
from hadelay.client.batches import On
from hadelay.client.types import Order
from hadelay.client.wire import ADAPTER_TIMEOUT_S, seconds_of, servers
from hadelay.tasks.attempt import Attempt
from hadelay.tasks.batch import Batch
from hadelay.tasks.inline import Inline
from hadelay.tasks.outcomes import Rules
from hadelay.tasks.task import Finished, Task

P = ParamSpec("P")
R = TypeVar("R")
Retry = Mapping[type[BaseException], Delay | Sequence[Delay]]
#: Code around each attempt: gets the attempt, and a function that runs the task or the next middleware.
Middleware = Callable[[Attempt, Callable[[], Awaitable[None]]], Awaitable[None]]
_NO_RETRY: Retry = {}
M = TypeVar("M", bound=Middleware)
B = TypeVar("B", bound=Callable[[Put], None])


class App:
    """Tasks, by name. `hadelay work MODULE:APP` runs them.

        app = App("http://n1:8400,http://n2:8400,http://n3:8400")

        @app.task(retry={ConnectionError: ["1s", "1m"]}, timeout="30s")
        async def remind(order: int) -> None: ...

        await remind.options(delay="3d").put(4711)

    urls, token, ca: as of AsyncClient. Default of urls: the variable HADELAY_SERVERS at each publish, or a node on
    loopback. topic: topic of tasks that name none. timeout: time after which a publish fails if no node can store it.
    """

    #: Order in which a worker receives messages from the topics of the app.
    order: Order = "turns"

    def __init__(
        self,
        urls: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        ca: str | None = None,
        topic: str = "tasks",
        timeout: Delay = ADAPTER_TIMEOUT_S,
    ) -> None:
        self._urls = urls
        self.token, self.ca, self.topic, self.timeout_s = token, ca, topic, seconds_of(timeout)
        self.tasks: dict[str, Task[..., Any]] = {}
        self.around: list[Middleware] = []
        self._before_put: list[Callable[[Put], None]] = []
        self._inline: Inline | None = None
        #: The client that all publishes use, and the node addresses that the client was made for.
        self._client: tuple[Client, str | Sequence[str]] | None = None

    @property
    def urls(self) -> str | Sequence[str]:
        """Addresses of nodes. HADELAY_SERVERS is read at each use: a test may set the variable after it has imported
        the app."""
        return servers(self._urls)

    @property
    def client(self) -> Client:
        """The blocking client that all publishes use. Any thread may use it."""
        urls = self.urls
        if self._client is None or self._client[1] != urls:
            self._client = Client(urls, self.token, timeout=self.timeout_s, ca=self.ca), urls
        return self._client[0]

    @property
    def topics(self) -> list[str]:
        return sorted({task.topic for task in self.tasks.values()})

    def find(self, name: str) -> Task[..., Any]:
        """The task with this name. LookupError if this program has no such task."""
        if name not in self.tasks:
            raise LookupError(f"this worker has no task {name!r}")
        return self.tasks[name]

    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        /,
        *,
        name: str | None = None,
        topic: str | None = None,
        retry: Retry = ...,
        max_attempts: int | None = None,
        timeout: Delay | None = None,
        unique: bool | Delay = False,
        cpu: bool = False,
        result: bool = False,
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...
    def task(
        self,
        function: Any = None,
        /,
        *,
        name: str | None = None,
        topic: str | None = None,
        retry: Retry = _NO_RETRY,
        max_attempts: int | None = None,
        timeout: Delay | None = None,
        unique: bool | Delay = False,
        cpu: bool = False,
        result: bool = False,
    ) -> Any:
        """Make a function, async or plain, a task. Plain functions run in threads.

        name: default: module and name of the function. retry: waits before the next attempt by class of the
        exception, the most specific one; a list has a wait for each attempt. Other exceptions wait the topic's backoff.
        max_attempts: then the message is dead; None: as the topic says. timeout: limit of one attempt. unique: drop a
        publish while a message with the same arguments is pending; unique="1d": for a day after one was stored, pending
        or settled. cpu: run the plain function in a process of its own,
        which the timeout kills. result: keep what the function returns, at most 64 KiB of JSON, for `result`.
        """
        rules = Rules(
            retry=retry,
            max_attempts=max_attempts,
            timeout_s=None if timeout is None else seconds_of(timeout),
            unique=unique is not False,
            unique_for=None if isinstance(unique, bool) else unique,
            cpu=cpu,
            result=result,
        )

        def add(function: Callable[P, R]) -> Task[P, R]:
            of = name or f"{_module(function)}.{function.__qualname__}"
            if of in self.tasks:
                raise ValueError(f"there are two tasks {of!r}: give one of them another name=")
            if cpu and inspect.iscoroutinefunction(function):
                raise TypeError(f"{of}: cpu=True is for plain functions, not for async def")
            self.tasks[of] = task = Task(self, function, of, topic or self.topic, rules)
            return task

        return add if function is None else add(function)

    def periodic(
        self,
        cron: str | None = None,
        tz: str = "UTC",
        *,
        every: Delay | None = None,
        jitter: Delay | None = None,
        catch_up: Literal["one", "none", "all"] = "one",
        overlap: Literal["allow", "skip", "wait"] = "skip",
        **options: Any,
    ) -> Callable[[Callable[[], R]], Task[[], R]]:
        """Make a function a task that the cluster calls again and again: by `cron` in the time zone `tz`, or `every`.

        Workers store it as a schedule of the cluster when they start. Each occurrence is one message, however many
        workers there are. jitter, catch_up, overlap: as of `put_schedule`. options: as of `task`.
        """

        def add(function: Callable[[], R]) -> Task[[], R]:
            task: Task[[], R] = self.task(**options)(function)
            task.arguments.encode((), {})  # TypeError if the function needs arguments: the cluster passes none
            task.schedule = {
                "cron": cron, "every": every, "timezone": tz, "jitter": jitter, "catch_up": catch_up, "overlap": overlap
            }  # fmt: skip
            return task

        return add

    def batch(self, key: str | None = None, *, on: On = "complete", ttl: Delay | None = None) -> Batch:
        """Make a batch: calls of tasks, and one more call once all of them have ended:

            async with app.batch(on="success").then(report, 7) as batch:
                await batch.put(load, "a.csv")

        key: name of the batch. Default: a random one. on: call in any case ("complete"), if every call succeeded
        ("success"), or if one is a dead letter ("death"). ttl: an unfinished batch expires after this time, without
        the call. Default: 7 days.
        """
        return Batch(self, key, on, ttl)

    @property
    def inline(self) -> bool:
        """Whether publishes are collected instead of sent, because a context of `testing` is open."""
        return self._inline is not None

    def middleware(self, around: M) -> M:
        """Run `async def around(attempt, proceed)` around each attempt in the worker; it awaits `proceed()`."""
        self.around.append(around)
        return around

    def before_put(self, change: B) -> B:
        """Call `change(put)` before each publish; it may set fields of the Put, such as `meta`."""
        self._before_put.append(change)
        return change

    def testing(self, *, inline: bool = False) -> Inline:
        """Context for tests, without a cluster: publishes are collected in `puts` of the object that `with` yields.
        inline: a publish runs its task at once, whatever the delay, and raises the task's exception."""
        return Inline(self.tasks, inline, self._set_inline)

    def _set_inline(self, inline: Inline | None) -> Inline | None:
        before, self._inline = self._inline, inline
        return before

    async def publish(self, put: Put) -> Receipt:
        """Publish a message of a task; from any event loop."""
        self._prepare(put)
        if self._inline is not None:
            return await self._inline.put(put)
        fields = msgspec.structs.asdict(put)
        return await awaited(self.client, lambda client: client.put(**fields))

    def publish_sync(self, put: Put) -> Receipt:
        self._prepare(put)
        if self._inline is not None:
            return self._inline.put_sync(put)
        return self.client.put(**msgspec.structs.asdict(put))

    async def finished(self, message_id: str, timeout: float | None) -> Finished:
        """Wait until a task's message has ended: acked, dead, cancelled or expired."""
        if self._inline is not None:
            return self._inline.finished(message_id)
        return _finished(await awaited(self.client, lambda client: client.wait_for(message_id, timeout=timeout)))

    def finished_sync(self, message_id: str, timeout: float | None) -> Finished:
        if self._inline is not None:
            return self._inline.finished(message_id)
        return _finished(self.client.wait_for(message_id, timeout=timeout))

    def _prepare(self, put: Put) -> None:
        for change in self._before_put:
            change(put)


def _finished(info: MessageInfo) -> Finished:
    reasons = [event.reason for event in info.history if event.reason]
    # An ack of a task that returned None carries no result.
    return Finished(info.state, None if info.result is msgspec.UNSET else info.result, reasons[-1] if reasons else None)


def _module(function: Callable[..., Any]) -> str:
    """Name under which workers import the function's module, also if the module is the running program (`__main__`)."""
    if function.__module__ != "__main__":
        return function.__module__
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return str(spec.name)
    return Path(path).stem if path else "__main__"
