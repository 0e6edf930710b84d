"""The `conftest` and `common` modules of Dramatiq's own tests, which its source package does not have."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest

from hadelay.dramatiq import HadelayBackend, HadelayBroker
from hadelay.testing import LocalNode


@pytest.fixture(scope="session")
def node() -> Iterator[LocalNode]:
    with LocalNode() as running:
        yield running


@pytest.fixture
def stub_broker(node: LocalNode) -> Iterator[HadelayBroker]:
    """Takes the place of Dramatiq's broker in memory."""
    broker = HadelayBroker(node.url, prefix=f"{uuid.uuid4().hex[:8]}.")
    broker.emit_after("process_boot")
    dramatiq.set_broker(broker)
    yield broker
    broker.emit_before("process_stop")
    broker.close()


@pytest.fixture
def stub_worker(stub_broker: HadelayBroker) -> Iterator[dramatiq.Worker]:
    with worker(stub_broker, worker_timeout=100, worker_threads=8) as running:
        yield running


@pytest.fixture
def result_backend(stub_broker: HadelayBroker) -> HadelayBackend:
    return HadelayBackend(stub_broker)


@contextlib.contextmanager
def worker(*args: Any, **options: Any) -> Iterator[dramatiq.Worker]:
    running = dramatiq.Worker(*args, **options)
    running.start()
    try:
        yield running
    finally:
        running.stop()


def run_anyway(function: Any) -> Any:
    """Marks of tests that are skipped on some machines."""
    return function


skip_on_windows = skip_in_ci = skip_on_pypy = skip_with_gevent = run_anyway
