"""(signatures; implementation follows)"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Heads(NamedTuple):
    """Per second of an hour (S2): globalIndex of its last entry (NONE32 if none), and how many it has. u4[3600] each."""

    last: npt.NDArray[np.uint32]
    count: npt.NDArray[np.uint32]


class HourStore:
    """All hour files of one group. Single-threaded: called on the loop only. See CONTRACT for the idea."""

    def count(self, hour: int) -> int:
        """Entries applied, 0 for an hour without any."""
        raise NotImplementedError

    def counts(self, hours: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        """`count` for many hours at once."""
        raise NotImplementedError

    def hours(self) -> list[int]:
        """Hours with entries that are not retired, ascending."""
        raise NotImplementedError

    def append(
        self,
        hours: int | npt.NDArray[np.int64],
        rows: npt.NDArray[np.void],
        blob: bytearray,
        headers: npt.NDArray[np.void] | None = None,
    ) -> npt.NDArray[np.uint32]:
        """File messages with their records; returns the globalIndex of each, in the order given.

        hours: the filing hour of all, or of each row. rows: INDEX with deliver_at_ms, tag_mask, size, topic, attempt,
        flags, second filled (first_id 0 = its own id); offset, index and first_id are filled here, in place. blob: the
        records one after another in the order of rows, each rows.size long. headers: RECORD array with everything
        but first_id and header_crc, completed and written over the first 48 bytes of each record here; None when the
        records are whole (copies). rows and blob belong to the store afterwards.
        """
        raise NotImplementedError

    def append_again(self, hour: int, rows: npt.NDArray[np.void]) -> int:
        """File entries that point at records their hour already has (offset, size, first_id filled): the return to
        waiting within the hour. Returns the first globalIndex."""
        raise NotImplementedError

    def entries(self, hour: int, indexes: npt.NDArray[np.integer] | slice) -> npt.NDArray[np.void]:
        """A copy of those INDEX rows."""
        raise NotImplementedError

    def entry(self, hour: int, index: int) -> np.void:
        """One INDEX row. IndexError beyond the applied length; DamagedFile if its CRC is wrong."""
        raise NotImplementedError

    def index_view(self, hour: int) -> npt.NDArray[np.void]:
        """All INDEX rows of an hour: zero-copy and read-only for mapped hours, read from disk otherwise."""
        raise NotImplementedError

    def pre_view(self, hour: int) -> memoryview:
        """The whole index as a memoryview of u4 ('I'): entry n's preGlobalIndex is `view[n * 16 + 11]`."""
        raise NotImplementedError

    def heads(self, hour: int) -> Heads:
        """Live arrays for a mapped hour (they change as entries are appended): do not keep them for others."""
        raise NotImplementedError

    def record(self, hour: int, offset: int, size: int, *, verify: bool = False) -> bytes:
        """One record, header included. With verify, DamagedFile unless both CRCs hold."""
        raise NotImplementedError

    def append_events(self, hour: int, rows: npt.NDArray[np.void]) -> int:
        """Append DISPATCH rows (crc filled here); returns the number of the first."""
        raise NotImplementedError

    def events(self, hour: int, numbers: npt.NDArray[np.integer] | slice = slice(None)) -> npt.NDArray[np.void]:
        """A copy of those DISPATCH rows."""
        raise NotImplementedError

    def event_count(self, hour: int) -> int:
        raise NotImplementedError

    def set_clock(self, now_hour: int) -> None:
        """Map the previous, current and next two hours, unmap the others. Called from apply when the hour changes."""
        raise NotImplementedError

    def mapped(self, hour: int) -> bool:
        raise NotImplementedError

    def lengths(self, hour: int) -> tuple[int, int, int]:
        """Bytes of .log, .idx, .dsp at the applied index."""
        raise NotImplementedError

    def topic_minutes(self, hour: int) -> npt.NDArray[np.void]:
        """COUNTER rows: entries per topic and minute, settled ones included. Derived lazily."""
        raise NotImplementedError

    def retire(self, hour: int) -> None:
        """Forget an hour now; its files go after the next durable checkpoint, when no pin is left."""
        raise NotImplementedError

    def pin(self) -> object:
        """While the returned token is held, no file is unlinked."""
        raise NotImplementedError

    def unpin(self, token: object) -> None:
        raise NotImplementedError

    def checksums(self) -> dict[str, tuple[int, int]]:
        """File name → (length, crc32c) at the applied index, for `check replicas`."""
        raise NotImplementedError

    #: Bytes waiting for far hours; the server starts a checkpoint when this passes `far_buffer_bytes`.
    far_bytes: int
