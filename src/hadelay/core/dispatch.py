"""(signatures; implementation follows within the half hour)

The leader's dispatcher, pure: told the time and what apply did; answers which grants to propose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hadelay.errors import HadelayError

U32 = npt.NDArray[np.uint32]


class Delivery(NamedTuple):
    """What a consumer gets: a grant, or what is still held of it. Arrays run in parallel; all empty at a timeout."""

    term: int
    seq: int
    positions: npt.NDArray[np.uint16]  # of each message in the grant: part of its lease token
    hours: U32
    indexes: U32
    attempts: npt.NDArray[np.uint16]  # 1 for the first hand-out
    rows: npt.NDArray[np.void]  # INDEX rows: offset, size, first_id, deliver_at_ms, topic
    until_ms: npt.NDArray[np.int64]
    redelivered: npt.NDArray[np.bool_]
    now_ms: int  # cluster time of the answer


@dataclass(eq=False, slots=True)
class Poll:
    """A waiting receive. `done` is called exactly once unless the poll is cancelled: with a Delivery, which is empty
    when nothing came within wait_ms, or with an error."""

    consumer: str
    request_id: bytes  # b"" for none
    topics: tuple[str, ...]
    max: int
    lease_ms: int
    wait_ms: int
    done: Callable[[Delivery | None, HadelayError | None], None]
