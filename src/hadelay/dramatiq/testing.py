"""Helper for tests of actors: runs due messages, on a node whose clock the test moves (docs/howto/dramatiq.md)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import dramatiq

from hadelay.client import Client
from hadelay.client.due import MovedNode, ready, settled
from hadelay.dramatiq.broker import HadelayBroker

#: Pause between two checks for due messages, in seconds.
_LOOK_S = 0.02
#: Time, in seconds, after which `run_due` gives up on due messages that are not handed out, for example because their
#: topic is paused.
_STUCK_S = 5.0


class _Count(dramatiq.Middleware):
    def __init__(self) -> None:
        self.processed = 0

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        self.processed += 1


class Worker:
    """Runs due messages with Dramatiq's own worker, in one thread."""

    def __init__(self, broker: HadelayBroker) -> None:
        self._broker = broker

    def run_due(self) -> int:
        """Run the messages that are due by the node's clock until none is left; returns their number."""
        broker, topics = self._broker, list(self._broker.queues.values())
        if not ready(broker.client, topics):
            return 0
        count = _Count()
        broker.add_middleware(count)
        worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=1)
        worker.start()
        try:
            seen, until = 0, time.monotonic() + _STUCK_S
            while ready(broker.client, topics) and time.monotonic() < until:
                settled(broker.client, topics)
                if count.processed > seen:
                    seen, until = count.processed, time.monotonic() + _STUCK_S
                time.sleep(_LOOK_S)
            settled(broker.client, topics)
        finally:
            worker.stop()
            broker.middleware.remove(count)
        return count.processed


@contextlib.contextmanager
def worker(broker: HadelayBroker, node: MovedNode) -> Iterator[Worker]:
    """Context manager in which the broker uses the test's node."""
    before, broker.client = broker.client, Client(node.url)
    try:
        yield Worker(broker)
    finally:
        broker.client.close()
        broker.client = before
