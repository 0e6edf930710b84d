"""A worker process: `python -m hadelay.tasks.worker FD`, started by the supervisor, which sends a Start."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from functools import partial
from typing import Any

import msgspec

from hadelay.client import AsyncClient, AsyncMessage, Consumer
from hadelay.errors import ConfigError, HadelayError
from hadelay.tasks.app import App
from hadelay.tasks.channel import Report, Start, send
from hadelay.tasks.cpu import CpuPool
from hadelay.tasks.load import load
from hadelay.tasks.runner import Runner

log = logging.getLogger(__name__)

#: Exit code of a worker whose app cannot be loaded: a new start would not help.
UNUSABLE = 2
#: _ALIVE_S: interval, in seconds, of the reports to the supervisor that this worker is alive. _AGAIN_S: pause, in
#: seconds, after an error before a schedule is stored again.
_ALIVE_S, _AGAIN_S = 1.0, 5.0


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    supervisor = socket.socket(fileno=int(sys.argv[1]))
    with supervisor.makefile("rb") as lines:
        start = msgspec.json.decode(lines.readline(), type=Start)
    try:
        app = load(start.app)
    except (ConfigError, TypeError) as error:
        print(f"hadelay work: {error}", file=sys.stderr)
        return UNUSABLE
    try:
        asyncio.run(_run(app, start, supervisor))
    except HadelayError as error:
        log.error("the worker process ends: %s", error)
        return 1
    return 0


class _ReportingClient(AsyncClient):
    """A client that reports each received lease to the supervisor at once: if this worker crashes, the supervisor has
    the message given back."""

    supervisor: socket.socket

    async def receive(self, *args: Any, **options: Any) -> list[AsyncMessage]:
        messages = await super().receive(*args, **options)
        for message in messages:
            send(self.supervisor, Report(take=message.lease))
        return messages


async def _run(app: App, start: Start, supervisor: socket.socket) -> None:
    client = _ReportingClient(app.urls, app.token, ca=app.ca)
    client.supervisor = supervisor
    async with client:
        if start.orphans:
            outcomes = await client.nack(start.orphans, reason="the worker process ended")
            log.warning("gave back %d messages of a worker process that ended", outcomes.count("nacked"))
            for lease in start.orphans:
                send(supervisor, Report(end=lease))
        if not start.only_orphans:
            await _work(app, client, start, supervisor)


async def _work(app: App, client: AsyncClient, start: Start, supervisor: socket.socket) -> None:
    loop, working = asyncio.get_running_loop(), asyncio.current_task()
    assert working is not None
    topics = start.topics or app.topics
    consumer = client.consume(topics, concurrency=start.concurrency, lease=start.lease_s, order=app.order)

    def stop() -> None:
        """First call: receive no more, and let running tasks finish. Second call: cancel the tasks, and give their
        messages back."""
        if consumer.stopped:
            working.cancel()
        else:
            log.info("stopping: running tasks have %g s to finish; a second signal gives them back now", start.drain_s)
        consumer.stop()

    def supervisor_ended() -> None:
        loop.remove_reader(supervisor)
        if not consumer.stopped:
            stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_reader(supervisor, supervisor_ended)
    runner = Runner(app, client, CpuPool(start.app), partial(send, supervisor), start.lease_s)
    beside = [
        asyncio.create_task(_live(supervisor)),
        asyncio.create_task(store_schedules(app, client)),
        asyncio.create_task(_say_working(consumer, f"topics {', '.join(topics)}, at {app.urls}")),
    ]
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await consumer.work(runner, drain=start.drain_s)
    finally:
        runner.close()
        for task in beside:
            task.cancel()


async def _say_working(consumer: Consumer, what: str) -> None:
    """Log that this worker works, once a node has answered. Before that, the consumer logs what it waits for."""
    await consumer.reached.wait()
    log.info("working: %s", what)


async def _live(supervisor: socket.socket) -> None:
    while True:
        send(supervisor, Report())
        await asyncio.sleep(_ALIVE_S)


async def store_schedules(app: App, client: AsyncClient) -> None:
    """Store the schedules of periodic tasks; an unchanged one stays as it is."""
    for task in app.tasks.values():
        while task.schedule is not None:
            try:
                await client.put_schedule(
                    f"task.{task.name}"[:128],
                    task.topic,
                    task.message().body,
                    content_type="application/json",
                    **task.schedule,
                )
                break
            except HadelayError as error:
                log.error("the schedule of %s was not stored: %s", task.name, error)
                if not error.retryable:
                    break
                await asyncio.sleep(_AGAIN_S)


if __name__ == "__main__":
    sys.exit(main())
