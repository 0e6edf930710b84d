"""For tests of an App: runs the calls that are due, with a node whose clock the test moves (docs/howto/testing.md)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from hadelay.client import AsyncClient, Client
from hadelay.client.due import MovedNode, endless, ready
from hadelay.tasks.app import App
from hadelay.tasks.cpu import CpuPool
from hadelay.tasks.runner import Runner

#: Limit of the attempts in one call of `run_due`: more of them look like an endless loop.
_MOST = 10_000


class Worker:
    """Runs the tasks of an app, as `hadelay work` does. Tasks with `cpu=True` are refused."""

    def __init__(self, app: App, node: MovedNode) -> None:
        self._app, self._node = app, node

    def run_due(self) -> int:
        """Run the calls that are due by the node's clock, until no call is due; returns the number of attempts."""
        if names := [task.name for task in self._app.tasks.values() if task.rules.cpu]:
            raise TypeError(f"{names[0]} has cpu=True: test it with `hadelay work`")
        # Run in a new thread: the test may run in an event loop, where asyncio.run would fail.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._run()).result()

    async def _run(self) -> int:
        async with AsyncClient(self._node.url) as client:
            runner, count = Runner(self._app, client, CpuPool(""), lambda report: None), 0
            while topics := await asyncio.to_thread(ready, self._app.client, self._app.topics):
                for message in await client.receive(topics, max=1, wait=2, order=self._app.order):
                    await runner(message)
                    count += 1
                    break
                else:
                    break  # no due message: the topic is paused, or the message is blocked by its group
                if count == _MOST:
                    raise endless()
            runner.close()
            return count


@contextlib.contextmanager
def worker(app: App, node: MovedNode) -> Iterator[Worker]:
    """While this context lasts, the app uses the node of the test."""
    urls, client, app._urls = app._urls, app._client, node.url
    app._client = Client(node.url), node.url
    try:
        yield Worker(app, node)
    finally:
        app._client[0].close()
        app._urls, app._client = urls, client
