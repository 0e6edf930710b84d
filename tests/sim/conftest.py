"""Runs of `chaos sim` in this process end with what its other tests need."""

import gc
import logging
from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """Undo what `chaos sim` does to its process: no logs, no garbage collection."""
    yield
    logging.disable(logging.NOTSET)
    structlog.reset_defaults()
    gc.unfreeze()
    gc.enable()
