"""Messages and a loop for storage tests."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import DISPATCH, INDEX, RECORD, RECORD_SIZE
from hadelay.model import HOUR_MS, NONE32
from hadelay.platform.disk import Disk
from hadelay.platform.runtime import Ended
from hadelay.storage.identity import Identity
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.store import Storage
from hadelay.storage.tables import HOUR_STATES, Backend, Put

NOW = 490_000  # an hour in November 2025
IDENTITY = Identity("test", 3, "n1")


class Loop:
    """A Runtime whose threads run when nothing else is left to do."""

    def __init__(self) -> None:
        self.random, self.now = random.Random(1), 0.0
        self._soon: deque[Callable[[], None]] = deque()

    def monotonic(self) -> float:
        return self.now

    def wall_ms(self) -> int:
        return 0

    def call_soon(self, fn: Callable[..., None], *args: Any) -> None:
        self._soon.append(lambda: fn(*args))

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> Any:
        assert delay_s <= 0.01, "more than a pause between two slices: time passes only between"
        self.call_soon(fn, *args)

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Ended, *, brief: bool = False) -> None:
        def run() -> None:
            try:
                result = fn()
            except Exception as error:
                done(None, error)
            else:
                done(result, None)

        self._soon.append(run)

    def join(self, lane: str) -> None:
        pass

    def run(self) -> None:
        while self._soon:
            self._soon.popleft()()


def messages(
    hours: Any, *, sizes: list[int], seed: int = 0, topic: int = 1, copies: list[int] | None = None
) -> tuple[Any, ...]:
    """Arguments of HourStore.append: payloads of `sizes` bytes, due somewhere in `hours` (one, or one each). copies:
    number of entries that share each record."""
    n, rng = len(sizes), np.random.default_rng(seed)
    rows, headers = np.zeros(n, INDEX), np.zeros(n, RECORD)
    rows["second"] = rng.integers(0, 3600, n)
    rows["deliver_at_ms"] = np.asarray(hours) * HOUR_MS + rows["second"] * 1000 + rng.integers(0, 1000, n)
    rows["topic"] = headers["topic"] = topic
    rows["size"] = np.array(sizes) + RECORD_SIZE
    headers["body_size"] = sizes
    headers["deliver_at_ms"] = rows["deliver_at_ms"]
    headers["published_at_ms"] = NOW * HOUR_MS
    blob = bytearray()
    for i, size in enumerate(sizes):
        payload = rng.bytes(size)
        headers["payload_crc"][i] = crc32c(payload)
        blob += bytes(RECORD_SIZE) + payload
    if copies is None:
        return hours, rows, blob, headers
    entries = np.array(copies) + 1
    shared = np.ones(entries.sum(), bool)
    shared[entries.cumsum() - entries] = False
    rows = rows.repeat(entries)
    rows["topic"] += np.arange(len(rows), dtype=np.uint32)
    return hours if isinstance(hours, int) else hours.repeat(entries), rows, blob, headers, shared


def events(indexes: list[int], event: int = 1) -> np.ndarray[Any, Any]:
    rows = np.zeros(len(indexes), DISPATCH)
    rows["index"], rows["event"] = indexes, event
    rows["previous"] = rows["other_hour"] = NONE32
    return rows


def open_storage(
    disk: Disk,
    directory: str,
    runtime: Any,
    *,
    identity: Identity = IDENTITY,
    backend: Callable[[str], Backend] = LmdbBackend,
    far_buffer_bytes: int = 1 << 20,
    mapped: bool = True,
) -> Storage:
    storage = Storage(disk, directory, runtime, identity, backend=backend, far_buffer_bytes=far_buffer_bytes)
    if mapped:
        storage.hours.set_clock(NOW)
    return storage


def puts(hours: dict[int, bytes]) -> list[Put]:
    return [(HOUR_STATES, hour.to_bytes(4, "big"), state or None) for hour, state in hours.items()]


def hour_states(storage: Storage) -> dict[int, bytes]:
    (rows,) = storage.core_rows([HOUR_STATES]).values()
    return {int.from_bytes(key, "big"): value for key, value in rows}


def checkpoint(storage: Storage, loop: Loop, index: int, **kw: Any) -> None:
    """Take one, and raise what it ends with."""
    outcome: list[BaseException | None] = []
    storage.checkpoint(index, 1, kw.get("core", b"core %d" % index), [puts(kw.get("hours", {}))], outcome.append)
    loop.run()
    assert outcome, "the checkpoint did not end"
    if outcome[0] is not None:
        raise outcome[0]
