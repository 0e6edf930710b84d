"""Open grants: leased messages and the ends of their leases. One array per grant, no object per message."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import Mask, Rows
from hadelay.ledger.changedrows import HasRow

#: Row of an OpenGrant, one per message. `event`: number of its `leased` event in the dispatch log; `batch`: number of
#: the message's batch, 0 if it is in no batch; `open`: 1 while the message is leased.
LEASED = np.dtype(
    [
        ("hour", "<u4"),
        ("index", "<u4"),
        ("topic", "<u4"),
        ("event", "<u4"),
        ("until_ms", "<i8"),
        ("batch", "<u8"),
        ("size", "<u4"),
        ("attempt", "<u2"),
        ("second", "<u2"),
        ("open", "u1"),
    ]
)


@dataclass(slots=True)
class OpenGrant(HasRow):
    """Messages leased together to one consumer. The fields are a row of a checkpoint, in this order
    (ledger/rowformats.py).

    Row n is position n of the lease tokens; rows that apply did not grant, or that are settled, have `open` 0.
    """

    term: int
    seq: int
    consumer: str
    #: Number of the consumer's name; NONE32 if there are too many names.
    consumer_number: int
    request_id: bytes
    granted_at_ms: int
    rows: Rows
    #: Number of messages still leased; at 0 the grant is deleted.
    left: int = field(init=False)
    #: Position of a leased message in the grant → progress that its handler reported.
    progress: dict[int, str] = field(default_factory=dict)
    #: Number of the grant among all grants ever made.
    number: int = 0

    def __post_init__(self) -> None:
        self.left = int(np.count_nonzero(self.rows["open"]))

    @property
    def key(self) -> tuple[int, int]:
        return self.term, self.seq

    def next_until_ms(self) -> int:
        """Time at which the first open lease of the grant runs out."""
        return int(self.rows["until_ms"][self.rows["open"] == 1].min())

    def progress_of(self, hour: int, index: int) -> str | None:
        """Progress of the leased entry; None if its handler reported none."""
        rows = self.rows
        at = np.flatnonzero((rows["hour"] == hour) & (rows["index"] == index) & (rows["open"] == 1))
        return self.progress.get(int(at[0])) if len(at) else None

    def take(self, leases: Rows) -> tuple[NDArray[np.intp], Mask]:
        """Look up LEASE rows in this grant: (positions, mask of open leases). open: leased, and of the same message.

        Of leases that name the same position twice only the first is open.
        """
        at = np.minimum(leases["pos"], len(self.rows) - 1).astype(np.intp)
        rows = self.rows[at]
        is_open = rows["open"] == 1
        is_open &= (leases["pos"] == at) & (rows["index"] == leases["index"]) & (rows["hour"] == leases["hour"])
        if len(at) > 1 and not (at[1:] > at[:-1]).all():
            first = np.zeros(len(at), bool)
            # If leases name a position twice, take the first that is open: an invalid lease must not hide a valid one.
            right = np.flatnonzero(is_open)
            first[right[np.unique(at[right], return_index=True)[1]]] = True
            is_open &= first
        return at, is_open

    def extend(self, positions: NDArray[np.intp], until_ms: int, progress: str) -> None:
        """Extend these leases: they end at until_ms. progress: text that their handler reported; "" keeps the earlier
        text."""
        self.before_change()
        self.rows["until_ms"][positions] = until_ms
        if progress:
            self.progress.update(dict.fromkeys(positions.tolist(), progress))

    def close(self, positions: NDArray[np.intp]) -> None:
        self.before_change()
        self.rows["open"][positions] = 0
        for at in positions.tolist() if self.progress else ():
            self.progress.pop(at, None)
        self.left -= len(positions)


class NamedLeases(NamedTuple):
    """Leases of one grant that a command names."""

    grant: OpenGrant
    #: Positions of the leases in the grant.
    positions: NDArray[np.intp]
    #: Rows of the command (an extend, ack or nack), in the order of `positions`: each row names one of these leases.
    where: slice | NDArray[np.intp]
