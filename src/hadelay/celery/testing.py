"""Helper for tests of Celery tasks: runs due tasks, on a node whose clock the test moves (docs/howto/celery.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from celery import Celery
from celery.worker.request import Request

from hadelay.celery import address, messages
from hadelay.celery.results import Backend
from hadelay.client import Client
from hadelay.client.due import MovedNode, endless, ready, settled

#: Limit of attempts in one call of `run_due`; a further attempt raises an error.
_MOST = 10_000


class Worker:
    """Runs tasks in the thread of the test, with Celery's own code for retries, callbacks and results."""

    def __init__(self, app: Celery, client: Client) -> None:
        self._app, self._client = app, client

    def run_due(self) -> int:
        """Run the tasks that are due by the node's clock until none is left; returns the number of attempts."""
        count = 0
        with self._app.connection_for_read() as connection:
            channel = connection.default_channel
            queues = {channel._topic(name): name for name in self._app.amqp.queues.consume_from}
            while topics := ready(self._client, list(queues)):
                raw = channel.basic_get(queues[topics[0]])
                if raw is None:
                    break
                self._run(raw)
                count += 1
                if count == _MOST:
                    raise endless()
                settled(self._client, topics[:1])
        return count

    def _run(self, message: Any) -> None:
        name = message.headers.get("task")
        if name not in self._app.tasks:
            message.reject()
            return
        Request(
            message,
            app=self._app,
            task=self._app.tasks[name],
            hostname="test",
            on_ack=message.ack_log_error,
            on_reject=message.reject_log_error,
        ).execute()


@contextlib.contextmanager
def worker(app: Celery, node: MovedNode) -> Iterator[Worker]:
    """Context manager in which the app uses the test's node, and computes times such as `countdown` from the node's
    clock."""
    client, backend = Client(node.url), app.backend
    results = backend if isinstance(backend, Backend) else None
    before = results._client if results is not None else None
    address.of_a_test = client
    app._after_fork()  # forget connection pools to the cluster that the settings name
    utc_now, messages.utc_now = messages.utc_now, lambda: datetime.fromtimestamp(node.clock.now(), UTC)
    app.now = lambda: messages.utc_now().astimezone(app.timezone)
    if results is not None:
        results._client = client
    try:
        yield Worker(app, client)
    finally:
        address.of_a_test, messages.utc_now = None, utc_now
        app._after_fork()
        del app.now
        if results is not None and before is not None:
            results._client = before
        client.close()
