"""The patrol reads all files at rest slowly, and compares them with their checksums. Damaged bytes are repaired from
other nodes, before they are needed, and before the other copies are damaged, too.

It checks the hour files, the file of names, the identity, and the values of the tables, in rounds. Entries and records
of hour files are repaired as those that a read finds damaged (server/reading.py); the identity is written again. Other
damage is logged and counted: the node's directories have to be replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from functools import partial
from typing import Any, Literal

from hadelay.errors import WAY_OUT, DamagedFile
from hadelay.platform.disk import Disk, read_file
from hadelay.platform.runtime import Handle, Runtime
from hadelay.server.checkpoints import Replica
from hadelay.server.reading import VerifiedReader
from hadelay.storage.filecheck import Expected, check_file
from hadelay.storage.hours import DiskHourStore
from hadelay.storage.identity import decode_identity
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.store import Storage
from hadelay.storage.tablecheck import TableCheck

log = logging.getLogger(__name__)

#: Pauses in seconds: before the first round of the patrol after the start of the process, and between two rounds.
_FIRST_S, _PAUSE_S = 30.0, 600.0
#: While a user waits for a check of all files: limit of bytes read per second, and pause between two rounds in seconds.
_HURRY, _HURRY_PAUSE_S = 32 << 20, 1.0
#: Minimum number of bytes that a piece of a file counts as for the rate of reads, because opening a file takes time,
#: too.
_LEAST = 4 << 10
_LANE, _TABLES = "patrol", "patrol-tables"
#: Suffixes of an hour's files in the order of the check. The index is first: its entries locate the records.
_SUFFIXES = (".idx", ".dsp", ".log")

#: A step for which a round waits: a function that starts the step, and calls its argument with the outcome.
Wait = Callable[[Callable[..., None]], object]
Work = Generator[Wait, Any, None]


class Patrol:
    def __init__(
        self,
        disk: Disk,
        replica: Replica,
        runtime: Runtime,
        reader: VerifiedReader,
        on_repaired: Callable[[int], None],
        bytes_per_s: int,
    ) -> None:
        """on_repaired: called with an hour after its index was repaired. bytes_per_s: limit of the reads; 0: no patrol
        rounds, except when a user asks for a check."""
        self._disk, self._replica, self._runtime, self._reader = disk, replica, runtime, reader
        self._on_repaired, self._rate = on_repaired, bytes_per_s
        #: Monotonic time at which the last full round ended, or the process began; and number of full rounds.
        self.finished, self.rounds = runtime.monotonic(), 0
        #: Cluster time at which the last full round ended, in Unix ms; 0 before the first one. And value of `rounds` at
        #: which the check that a user asked for is complete.
        self.finished_ms, self.wanted = 0, 0
        self.bytes_read = 0
        #: Paths of files that were damaged at their last check, and could not be repaired.
        self.damaged: set[str] = set()
        self._work: Work | None = None
        self._alarm: Handle | None = None
        self._tables: TableCheck | None = None
        self._stopped = False

    @property
    def age_s(self) -> float:
        """Time since the last full round ended, or the process began, in seconds."""
        return self._runtime.monotonic() - self.finished

    @property
    def repaired(self) -> int:
        return self._reader.repairs

    def start(self) -> None:
        if self._rate:
            self._alarm = self._runtime.call_later(_FIRST_S, self._begin)

    @property
    def _hurries(self) -> bool:
        return self.rounds < self.wanted

    @property
    def _bytes_per_s(self) -> int:
        return max(self._rate, _HURRY) if self._hurries else self._rate

    def check_now(self) -> None:
        """Check all files now, faster than usual. The check is complete once `rounds` has reached `wanted`; a round
        that has begun before does not count."""
        self.wanted = self.rounds + 1 + (self._work is not None)
        if self._tables is not None:
            self._tables.stop()  # end the check of the tables, which is slow: the next round begins it anew
        if self._work is None:
            if self._alarm is not None:
                self._alarm.cancel()
            self._begin()

    def stop(self) -> None:
        self._stopped = True
        if self._tables is not None:
            self._tables.stop()

    def _begin(self) -> None:
        if not self._stopped:
            self._work = self._round()
            self._advance()

    def _advance(self, outcome: Any = None) -> None:
        """Continue the round until it waits again; after its end, begin the next round later."""
        if self._stopped or self._work is None:
            return
        try:
            wait = self._work.send(outcome)
        except StopIteration:
            self._rest()
        # the round failed, for example because the disk is full: begin another round later nevertheless
        except Exception as error:
            log.warning("patrol_failed", extra={"error": repr(error)})
            self._rest()
        else:
            wait(self._advance)

    def _rest(self) -> None:
        self._work = None
        if self._bytes_per_s:
            self._alarm = self._runtime.call_later(_HURRY_PAUSE_S if self._hurries else _PAUSE_S, self._begin)

    def _round(self) -> Work:
        storage, began, read = self._replica.storage, self._runtime.monotonic(), self.bytes_read
        # Begin with a random hour: else a node that is often restarted would never reach the last hours.
        hours = storage.hours.hours()
        first = self._runtime.random.randrange(len(hours)) if hours else 0
        paths = set[str]()
        for hour in hours[first:] + hours[:first]:
            for suffix in _SUFFIXES:
                if self._replica.storage is not storage:
                    return  # end the round: a snapshot has replaced the files
                paths.add(storage.hours.path(hour) + suffix)
                yield from self._check_hour(storage.hours, hour, suffix)
        yield from self._check_names(storage)
        self._check_identity(storage)
        yield from self._check_tables(storage)
        if self._replica.storage is not storage:
            return
        own = {f"{storage.directory}/{name}" for name in ("names", "identity", "state.mdb")}
        self.damaged &= paths | own  # forget damage in files that were deleted
        self.finished, self.rounds = self._runtime.monotonic(), self.rounds + 1
        self.finished_ms = self._replica.ledger.now_ms
        log.info(
            "patrol_round",
            extra={
                "hours": len(hours), "bytes": self.bytes_read - read, "seconds": round(self.finished - began, 1),
                "damaged_files": len(self.damaged),
            },
        )  # fmt: skip

    def _check_hour(self, store: DiskHourStore, hour: int, suffix: str) -> Work:
        found: list[DamagedFile] = []
        for repaired in (False, True):
            expected = store.written_file(hour, suffix)
            found = [] if expected is None else (yield from self._read(expected))
            if not store.count(hour) or self._replica.storage.hours is not store:
                found = []  # not damage: the hour was retired meanwhile, or a snapshot has replaced the files
            if not found or repaired:
                break
            for damage in found:
                if damage.size:
                    yield partial(self._repair, damage)
            if suffix == ".idx":
                self._on_repaired(hour)
        self._judge(store.path(hour) + suffix, found)

    def _check_names(self, storage: Storage) -> Work:
        names = storage.names
        if names.length:
            found = yield from self._read(Expected(names.path, names.length, names.crc))
            self._judge(names.path, found if self._replica.storage is storage else [])

    def _check_identity(self, storage: Storage) -> None:
        if self._replica.storage is not storage:
            return
        path = f"{storage.directory}/identity"
        try:
            decode_identity(read_file(self._disk, path), path)
        except (DamagedFile, FileNotFoundError) as error:
            storage.set_identity()
            log.warning("repaired", extra={"file": "identity", "what": str(error)})

    def _check_tables(self, storage: Storage) -> Work:
        backend = storage.tables.backend
        if not isinstance(backend, LmdbBackend):
            return
        check = self._tables = TableCheck(backend.path, self._bytes_per_s)
        result, error = yield partial(self._in_thread, _TABLES, check.run)
        self._tables = None
        if self._replica.storage is not storage:
            return
        backend.forget_readers()
        if error is not None:
            log.warning("patrol_failed", extra={"path": backend.path, "error": str(error)})
            return
        size, what = result
        self.bytes_read += size
        self._judge(backend.path, [DamagedFile(backend.path, 0, what)] if what else [])

    def _read(self, expected: Expected) -> Generator[Wait, Any, list[DamagedFile]]:
        """Check a file in a thread, at the patrol's rate. Returns the damages found."""
        with closing(check_file(self._disk, expected)) as pieces:
            while True:
                found, error = yield partial(self._in_thread, _LANE, partial(_next, pieces))
                if error is not None:
                    return [DamagedFile(expected.path, 0, f"it cannot be read: {error}")]
                if isinstance(found, list):
                    return found
                self.bytes_read += found
                yield partial(self._runtime.call_later, max(found, _LEAST) / (self._bytes_per_s or _HURRY))

    def _in_thread(self, lane: str, fn: Callable[[], Any], then: Callable[..., None]) -> None:
        self._runtime.in_thread(lane, fn, lambda result, error: then((result, error)))

    def _repair(self, damage: DamagedFile, then: Callable[..., None]) -> None:
        self._reader.repair(damage, lambda data: self._runtime.call_soon(then, data))

    def _judge(self, path: str, found: list[DamagedFile]) -> None:
        """Note whether a file is still damaged after the repairs; if so, log it."""
        if not found:
            self.damaged.discard(path)
            return
        self.damaged.add(path)
        whole = {"path": path, "offset": found[0].offset, "what": found[0].what, "places": len(found)}
        log.error("patrol_damaged", extra=whole | {"next": WAY_OUT})


def _next(pieces: Iterator[int]) -> int | list[DamagedFile]:
    """Check the next piece of a file. Returns its number of bytes; after the last piece, the damages of the file."""
    try:
        return next(pieces)
    except StopIteration as end:
        found: list[DamagedFile] = end.value
        return found


#: Metrics of the patrol: name, kind, meaning, and value.
METRICS: list[tuple[str, Literal["counter", "gauge"], str, Callable[[Patrol], float]]] = [
    ("patrol_rounds_total", "counter", "Rounds of the patrol, which compares all files at rest with their checksums",
     lambda patrol: patrol.rounds),
    ("patrol_age_seconds", "gauge", "Since the last full round of the patrol ended, or the process began",
     lambda patrol: patrol.age_s),
    ("patrol_read_bytes_total", "counter", "Bytes that the patrol has read", lambda patrol: patrol.bytes_read),
    ("patrol_damaged_files", "gauge", "Files whose damage could not be repaired from another node",
     lambda patrol: len(patrol.damaged)),
    ("patrol_repaired_total", "counter",
     "Damaged entries and records that were repaired from another node, found by the patrol or by a read",
     lambda patrol: patrol.repaired),
]  # fmt: skip
