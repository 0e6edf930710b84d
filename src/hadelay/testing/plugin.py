"""The pytest plugin. pytest loads it by itself where hadelay is installed."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hadelay.testing.node import LocalNode


@pytest.fixture
def hadelay() -> "Iterator[LocalNode]":
    """Fixture: a node for one test, with `url`, `client`, and a `clock` to `advance`."""
    from hadelay.testing.node import LocalNode

    with LocalNode() as node:
        yield node
