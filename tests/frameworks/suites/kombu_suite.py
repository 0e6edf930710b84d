"""kombu's own tests of a transport, on a node. `common` is a module of kombu's source package."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import common  # type: ignore[import-not-found]
import kombu
import pytest

import hadelay.celery  # noqa: F401 (registers the transport)
from hadelay.testing import LocalNode


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    with LocalNode() as running:
        yield running.url.removeprefix("http://")


@pytest.fixture
def connection(address: str) -> Any:
    return kombu.Connection(f"hadelay://{address}/{uuid.uuid4().hex[:8]}")


@pytest.fixture
def invalid_connection() -> Any:
    return kombu.Connection("hadelay://127.0.0.1:1/")


@pytest.fixture
def failover_connection(address: str) -> Any:
    return kombu.Connection(f"hadelay://127.0.0.1:1/;hadelay://{address}/{uuid.uuid4().hex[:8]}", connect_timeout=10)


for _name in ("BasicFunctionality", "BaseExchangeTypes", "BaseTimeToLive", "BaseMessage", "BaseFailover",
              "BaseEventLoop", "BasePriority"):  # fmt: skip
    globals()[f"Test{_name}"] = type(f"Test{_name}", (getattr(common, _name),), {})
