"""Runs one message's task, and settles the message by the outcome."""

import asyncio
import contextvars
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec

from hadelay.client import AsyncClient, AsyncMessage
from hadelay.client.threads import HandlerThreads
from hadelay.tasks.app import App
from hadelay.tasks.attempt import CURRENT, Attempt
from hadelay.tasks.channel import Report
from hadelay.tasks.cpu import CpuPool
from hadelay.tasks.outcomes import Rules, done, outcome_of, settle
from hadelay.tasks.progress import Progress
from hadelay.tasks.task import Call, Task
from hadelay.tasks.tracing import span

log = logging.getLogger(__name__)


class Runner:
    """Handler for `Consumer.work` that runs the message's task. tell: called with a Report when a message is settled.
    lease_s: length of the consumer's leases."""

    def __init__(
        self, app: App, client: AsyncClient, cpu: CpuPool, tell: Callable[[Report], None], lease_s: float = 30.0
    ) -> None:
        self._app, self._client, self._cpu, self._tell, self._lease_s = app, client, cpu, tell, lease_s
        self._threads = HandlerThreads()

    async def __call__(self, message: AsyncMessage) -> None:
        begun, name, rules = time.monotonic(), "unknown", Rules()
        counted = message.attempt - message.uncounted
        try:
            call = msgspec.json.decode(message.body, type=Call)
            task = self._app.find(call.task)
            name, rules = task.name, task.rules
            with span(name, message.id, message.traceparent):
                outcome = done(await self._attempt(task, call, message), rules)
        except Exception as error:
            outcome = outcome_of(error, rules, counted)
        except asyncio.CancelledError as error:
            asking = asyncio.current_task()
            if asking is not None and asking.cancelling():
                raise  # the worker stops: the consumer gives the message back
            outcome = outcome_of(RuntimeError(f"the task cancelled itself: {error}"), rules, counted)
        if outcome.kind == "failed" and rules.max_attempts is not None and counted >= rules.max_attempts:
            outcome = msgspec.structs.replace(outcome, kind="dead")
        if outcome.kind in ("failed", "dead"):
            log.warning("%s, attempt %d, %s: %s%s", name, message.attempt, outcome.kind, outcome.reason, outcome.trace)
        try:
            await settle(message, outcome, rules)
        except Exception:
            # Report the end of the lease, which is lost or runs out by itself: no give-back is needed.
            self._tell(Report(end=message.lease))
            raise
        self._tell(Report(end=message.lease, task=name, outcome=outcome.kind, seconds=time.monotonic() - begun))

    async def _attempt(self, task: Task[..., Any], call: Call, message: AsyncMessage) -> Any:
        over, returned, progress = False, None, Progress(message, self._lease_s)
        timeout_s = task.rules.timeout_s
        attempt = Attempt(
            task=task.name,
            id=message.id,
            topic=message.topic,
            key=message.key,
            number=message.attempt,
            counted=message.attempt - message.uncounted,
            deadline=None if timeout_s is None else datetime.now(UTC) + timedelta(seconds=timeout_s),
            meta=message.meta,
            consumer=self._client.consumer,
            _over=lambda: over or message.lost,
            _tell=progress,
        )
        token = CURRENT.set(attempt)

        async def call_it() -> None:
            nonlocal returned
            returned = await self._call(task, call, attempt)

        run: Callable[[], Awaitable[None]] = call_it
        for around in reversed(self._app.around):
            run = partial(around, attempt, run)
        try:
            await run()
            return returned
        finally:
            over = True
            progress.end()
            CURRENT.reset(token)

    async def _call(self, task: Task[..., Any], call: Call, attempt: Attempt) -> Any:
        timeout_s = task.rules.timeout_s
        if task.rules.cpu:
            async with self._cpu.process() as process, _limit(timeout_s):
                return await process.run(call, attempt)
        bound = task.arguments.decode(call.args)
        function = partial(task.function, *bound.args, **bound.kwargs)
        async with _limit(timeout_s):
            if inspect.iscoroutinefunction(task.function):
                return await function()
            returned: list[Any] = []
            await self._threads.run(contextvars.copy_context().run, lambda: returned.append(function()))
            return returned[0]

    def close(self) -> None:
        self._threads.close()
        self._cpu.close()


@asynccontextmanager
async def _limit(seconds: float | None) -> AsyncIterator[None]:
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimeoutError(f"the task ran longer than {seconds:g} s") from None
