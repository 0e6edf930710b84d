"""Hours, tables and names in plain lists and dicts: what storage does, with nothing left that could go wrong.

For unit tests of the core, and a model for storage itself: the same calls must give the same answers.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from itertools import islice

import numpy as np
from google_crc32c import value as crc32c
from numpy.typing import NDArray

from hadelay.codec.checksums import masked
from hadelay.codec.formats import DISPATCH, INDEX, RECORD, RECORD_MAGIC, RECORD_SIZE, RECORD_VERSION
from hadelay.codec.linking import Heads
from hadelay.errors import DamagedFile
from hadelay.model import NONE32, pack_id


class _Rows:
    """An array that grows at its end."""

    def __init__(self, kind: np.dtype[np.void]) -> None:
        self._room = np.zeros(16, kind)
        self.count = 0

    def append(self, row: np.void) -> None:
        if self.count == len(self._room):
            self._room = np.concatenate([self._room, np.zeros_like(self._room)])
        self._room[self.count] = row
        self.count += 1

    @property
    def all(self) -> NDArray[np.void]:
        """No copy: who writes into it changes the file."""
        return self._room[: self.count]


class MemoryHour:
    """One hour's three files, whole."""

    def __init__(self) -> None:
        self.log = bytearray()
        self.idx = _Rows(INDEX)
        self.dsp = _Rows(DISPATCH)
        self.last = np.full(3600, NONE32, np.uint32)
        self.count = np.zeros(3600, np.uint32)


class MemoryHours:
    """The in-memory HourStore (ledger/ports.py; storage/hours.py has the docstrings)."""

    def __init__(self, group: int = 0) -> None:
        self.group = group
        self.files: dict[int, MemoryHour] = {}
        self.retired: set[int] = set()
        self.now_hour = 0

    def count(self, hour: int) -> int:
        found = self.files.get(hour)
        return found.idx.count if found else 0

    def counts(self, hours: NDArray[np.int64]) -> NDArray[np.uint32]:
        return np.array([self.count(hour) for hour in hours.tolist()], np.uint32)

    def hours(self) -> list[int]:
        return sorted(self.files)

    def append(
        self,
        hours: int | NDArray[np.int64],
        rows: NDArray[np.void],
        blob: bytearray,
        headers: NDArray[np.void] | None = None,
        copies: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.uint32]:
        start = written = 0
        for n in range(len(rows)):
            hour = hours if isinstance(hours, int) else int(hours[n])
            row, file = rows[n], self._file(hour)
            row["first_id"] = row["first_id"] or pack_id(self.group, hour, self.count(hour))
            if copies is not None and copies[n]:
                row["offset"] = file.idx.all[-1]["offset"]
                self._link(file, row)
                continue
            record = blob[start : start + int(row["size"])]
            start += int(row["size"])
            if headers is not None:
                header = headers[written]
                header["magic"], header["version"] = RECORD_MAGIC, RECORD_VERSION
                header["first_id"] = row["first_id"]
                header["header_crc"] = masked(crc32c(header.tobytes()[:44]))
                record[:RECORD_SIZE] = header.tobytes()
            written += 1
            row["offset"] = len(file.log)
            file.log += record
            self._link(file, row)
        return rows["index"].copy()

    def append_again(self, hour: int, rows: NDArray[np.void]) -> int:
        first = self.count(hour)
        for n in range(len(rows)):
            self._link(self.files[hour], rows[n])
        return first

    def _file(self, hour: int) -> MemoryHour:
        assert hour not in self.retired, f"hour {hour} is retired"
        return self.files.setdefault(hour, MemoryHour())

    def _link(self, file: MemoryHour, row: np.void) -> None:
        second = row["second"]
        row["index"], row["pre"], row["local"] = file.idx.count, file.last[second], file.count[second]
        file.last[second] = row["index"]
        file.count[second] += 1
        row["crc"] = masked(crc32c(row.tobytes()[:60]))
        file.idx.append(row)

    def mapped(self, hour: int) -> bool:
        return hour in self.files

    def entries(self, hour: int, indexes: NDArray[np.integer] | slice, *, verify: bool = True) -> NDArray[np.void]:
        return self.files[hour].idx.all[indexes].copy()

    def index_view(self, hour: int) -> NDArray[np.void]:
        return self.files[hour].idx.all

    def pre_view(self, hour: int) -> memoryview:
        return self.index_view(hour).view(np.uint32).data

    def heads(self, hour: int) -> Heads:
        return Heads(self.files[hour].last, self.files[hour].count)

    def record(self, hour: int, offset: int, size: int, *, verify: bool = False) -> bytes:
        record = bytes(self.files[hour].log[offset : offset + size])
        if verify:
            header = np.frombuffer(record, RECORD, 1)[0]
            if masked(crc32c(record[:44])) != header["header_crc"] or crc32c(record[48:]) != header["payload_crc"]:
                raise DamagedFile(f"{hour}.log", offset, "a record does not verify")
        return record

    def append_events(self, hour: int, rows: NDArray[np.void]) -> int:
        file = self.files[hour]
        first = file.dsp.count
        for n in range(len(rows)):
            row = rows[n].copy()
            row["crc"] = masked(crc32c(row.tobytes()[:28]))
            file.dsp.append(row)
        return first

    def events(
        self, hour: int, numbers: NDArray[np.integer] | slice = slice(None), *, verify: bool = True
    ) -> NDArray[np.void]:
        return self.files[hour].dsp.all[numbers].copy()

    def event_count(self, hour: int) -> int:
        found = self.files.get(hour)
        return found.dsp.count if found else 0

    def sums(self, hour: int) -> tuple[int, int, int, tuple[int, int, int]]:
        file = self.files[hour]
        log, idx, dsp = (crc32c(bytes(data)) for data in (file.log, file.idx.all.tobytes(), file.dsp.all.tobytes()))
        return file.idx.count, file.dsp.count, len(file.log), (log, idx, dsp)

    def set_clock(self, now_hour: int) -> None:
        assert now_hour >= self.now_hour or not self.now_hour
        self.now_hour = now_hour

    def retire(self, hour: int) -> None:
        del self.files[hour]
        self.retired.add(hour)

    def bytes_of(self) -> dict[str, bytes]:
        """Every file, for byte-by-byte comparison."""
        out = {}
        for hour in self.hours():
            file = self.files[hour]
            out[f"{hour}.log"] = bytes(file.log)
            out[f"{hour}.idx"] = file.idx.all.tobytes()
            out[f"{hour}.dsp"] = file.dsp.all.tobytes()
        return out


class MemoryTables:
    def __init__(self) -> None:
        self.rows: dict[bytes, dict[bytes, bytes]] = {}

    def get(self, table: bytes, key: bytes) -> bytes | None:
        return self.rows.get(table, {}).get(key)

    def get_many(self, table: bytes, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(table, key) for key in keys]

    def put_many(self, table: bytes, rows: Mapping[bytes, bytes]) -> None:
        self.rows.setdefault(table, {}).update(rows)

    def put(self, table: bytes, key: bytes, value: bytes) -> None:
        self.rows.setdefault(table, {})[key] = value

    def delete(self, table: bytes, key: bytes) -> None:
        self.rows.get(table, {}).pop(key, None)

    def put_new(self, table: bytes, rows: Mapping[bytes, bytes]) -> None:
        known = self.rows.setdefault(table, {})
        assert known.keys().isdisjoint(rows), "the table has a row already"
        known.update(rows)

    def delete_many(self, table: bytes, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.delete(table, key)

    def drop_table(self, table: bytes) -> None:
        self.rows.pop(table, None)

    def next_key(self, table: bytes, start: bytes) -> bytes | None:
        return min((key for key in self.rows.get(table, {}) if key >= start), default=None)

    def range(
        self, table: bytes, start: bytes = b"", end: bytes | None = None, limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        rows = self.rows.get(table, {})
        return [(key, rows[key]) for key in sorted(rows) if key >= start and (end is None or key < end)][:limit]

    def range_slices(
        self, table: bytes, start: bytes, end: bytes | None, limit: int
    ) -> Generator[None, None, list[tuple[bytes, bytes]]]:
        yield
        return self.range(table, start, end, limit)


class MemoryNames:
    def __init__(self) -> None:
        #: Per kind: each name and its number, in the order of the numbers.
        self.known: dict[int, dict[str, int]] = {}

    def number(self, kind: int, name: str) -> int:
        return self.known.get(kind, {})[name]

    def name(self, kind: int, number: int) -> str:
        for name in islice(self.known[kind], number, None):
            return name
        raise KeyError(number)

    def register(self, kind: int, name: str) -> int:
        names = self.known.setdefault(kind, {})
        return names.setdefault(name, len(names))
