"""`app.testing()`: tasks without a cluster and without workers."""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from hadelay.client import Put, Receipt
from hadelay.client.wire import seconds_of
from hadelay.tasks.attempt import CURRENT, Attempt
from hadelay.tasks.outcomes import done
from hadelay.tasks.task import Call, Finished, Task


class Inline(AbstractContextManager["Inline"]):
    """Collects the publishes of an app instead of sending them."""

    def __init__(
        self, tasks: Mapping[str, Task[..., Any]], inline: bool, switch: Callable[["Inline | None"], "Inline | None"]
    ) -> None:
        #: Collected publishes, in the order of the calls.
        self.puts: list[Put] = []
        self._tasks, self._inline, self._switch = tasks, inline, switch
        self._before: Inline | None = None
        #: Message id → result of the call.
        self._results: dict[str, Any] = {}

    def __enter__(self) -> "Inline":
        self._before = self._switch(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._switch(self._before)

    async def put(self, put: Put) -> Receipt:
        receipt = self._receipt(put)
        if self._inline:
            result = self._call(put, receipt)
            self._keep(put, receipt, await result if inspect.isawaitable(result) else result)
        return receipt

    def put_sync(self, put: Put) -> Receipt:
        receipt = self._receipt(put)
        if self._inline:
            result = self._call(put, receipt)
            if inspect.iscoroutine(result):
                # a new thread, because this one may have a running event loop, where asyncio.run fails
                with ThreadPoolExecutor(1) as thread:
                    result = thread.submit(asyncio.run, result).result()
            self._keep(put, receipt, result)
        return receipt

    def finished(self, message_id: str) -> Finished:
        if message_id not in self._results:
            raise TimeoutError(f"message {message_id} was not run: use testing(inline=True)")
        return Finished("acked", self._results[message_id])

    def _keep(self, put: Put, receipt: Receipt, result: Any) -> None:
        # raise the errors that a worker would raise, for example for a result that JSON cannot carry
        done(result, self._tasks[msgspec.json.decode(put.body, type=Call).task].rules)
        self._results[receipt.id] = msgspec.to_builtins(result)

    def _receipt(self, put: Put) -> Receipt:
        self.puts.append(put)
        due = put.at if isinstance(put.at, datetime) else datetime.now(UTC)
        due += timedelta(seconds=seconds_of(put.delay or 0))
        return Receipt(id=f"inline-{len(self.puts)}", deliver_at=due, topic=put.topic, duplicate=False, key=put.key)

    def _call(self, put: Put, receipt: Receipt) -> Any:
        call = msgspec.json.decode(put.body, type=Call)
        task = self._tasks[call.task]
        bound = task.arguments.decode(call.args)
        attempt = Attempt(
            task=task.name, id=receipt.id, topic=put.topic, key=put.key, number=1, counted=1, meta=put.meta or {}
        )
        token = CURRENT.set(attempt)
        try:
            result = task.function(*bound.args, **bound.kwargs)
        finally:
            CURRENT.reset(token)
        return _within(attempt, result) if inspect.iscoroutine(result) else result


async def _within(attempt: Attempt, coroutine: Any) -> Any:
    token = CURRENT.set(attempt)
    try:
        return await coroutine
    finally:
        CURRENT.reset(token)
