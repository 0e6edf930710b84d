"""Records that are read while the node goes on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hadelay.errors import DamagedFile
from hadelay.server.reading import VerifiedReader
from tests.server.test_copies import HOUR, Fake


async def test_a_record_whose_hour_was_retired_meanwhile_is_damaged() -> None:
    """No file is there to read: callers expect DamagedFile, and no node can repair it."""
    node = Fake()
    node.publish()
    rows = node.storage.hours.entries(HOUR, slice(0, 1))

    def repair(hour: int, suffix: str, offset: int, size: int, done: Callable[[bytes | None], None]) -> None:
        done(None)

    replica: Any = node
    repairer: Any = SimpleNamespace(repair=repair)
    reader = VerifiedReader(replica, node.runtime, repairer)  # type: ignore[arg-type]
    with pytest.raises(DamagedFile, match="CRC"):  # the record is there: this one does not verify
        await reader.records(np.array([HOUR]), rows)
    node.storage.hours.retire(HOUR)
    node.begin()
    with pytest.raises(DamagedFile, match="retention"):
        await reader.records(np.array([HOUR]), rows)
