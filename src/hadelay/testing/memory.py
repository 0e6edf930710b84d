"""Hours, tables and names in plain lists and dicts: what storage does, with nothing left that could go wrong.

For unit tests of the core, and a model for storage itself: the same calls must give the same answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
from google_crc32c import value as crc32c
from numpy.typing import NDArray

from hadelay.core.formats import DISPATCH, INDEX, RECORD, RECORD_MAGIC, RECORD_SIZE, RECORD_VERSION
from hadelay.errors import DamagedFile
from hadelay.model import NONE32, pack_id


class Heads(NamedTuple):
    last: NDArray[np.uint32]
    count: NDArray[np.uint32]  # type: ignore[assignment]  # a tuple has a method of that name


class MemoryHour:
    """One hour's three files, whole."""

    def __init__(self) -> None:
        self.log = bytearray()
        self.idx: list[np.void] = []
        self.dsp: list[np.void] = []
        self.last = np.full(3600, NONE32, np.uint32)
        self.count = np.zeros(3600, np.uint32)


class MemoryHours:
    """The in-memory HourStore (core/ports.py; storage/hours.py has the docstrings)."""

    def __init__(self, group: int = 0) -> None:
        self.group = group
        self.files: dict[int, MemoryHour] = {}
        self.retired: set[int] = set()
        self.now_hour = 0

    def count(self, hour: int) -> int:
        found = self.files.get(hour)
        return len(found.idx) if found else 0

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
    ) -> NDArray[np.uint32]:
        starts = np.cumsum(rows["size"], dtype=np.int64) - rows["size"]
        for n in range(len(rows)):
            hour = hours if isinstance(hours, int) else int(hours[n])
            row = rows[n]
            row["first_id"] = row["first_id"] or pack_id(self.group, hour, self.count(hour))
            start = int(starts[n])
            record = blob[start : start + int(row["size"])]
            if headers is not None:
                headers[n]["magic"], headers[n]["version"] = RECORD_MAGIC, RECORD_VERSION
                headers[n]["first_id"] = row["first_id"]
                headers[n]["header_crc"] = crc32c(headers[n].tobytes()[:44])
                record[:RECORD_SIZE] = headers[n].tobytes()
            file = self._file(hour)
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
        row["index"], row["pre"], row["local"] = len(file.idx), file.last[second], file.count[second]
        file.last[second] = row["index"]
        file.count[second] += 1
        row["crc"] = crc32c(row.tobytes()[:60])
        file.idx.append(row.copy())

    def mapped(self, hour: int) -> bool:
        return True

    def entries(self, hour: int, indexes: NDArray[np.integer] | slice, *, verify: bool = True) -> NDArray[np.void]:
        rows = self.files[hour].idx
        some = rows[indexes] if isinstance(indexes, slice) else [rows[n] for n in indexes.tolist()]
        return np.array(some, INDEX)

    def entry(self, hour: int, index: int) -> np.void:
        return self.files[hour].idx[index]

    def index_view(self, hour: int) -> NDArray[np.void]:
        return self.entries(hour, slice(None))

    def pre_view(self, hour: int) -> memoryview:
        return memoryview(self.index_view(hour).tobytes()).cast("I")

    def heads(self, hour: int) -> Heads:
        return Heads(self.files[hour].last, self.files[hour].count)

    def record(self, hour: int, offset: int, size: int, *, verify: bool = False) -> bytes:
        record = bytes(self.files[hour].log[offset : offset + size])
        if verify:
            header = np.frombuffer(record, RECORD, 1)[0]
            if crc32c(record[:44]) != header["header_crc"] or crc32c(record[48:]) != header["payload_crc"]:
                raise DamagedFile(f"{hour}.log", offset, "a record does not verify")
        return record

    def append_events(self, hour: int, rows: NDArray[np.void]) -> int:
        file = self.files[hour]
        first = len(file.dsp)
        for n in range(len(rows)):
            row = rows[n].copy()
            row["crc"] = crc32c(row.tobytes()[:28])
            file.dsp.append(row)
        return first

    def events(
        self, hour: int, numbers: NDArray[np.integer] | slice = slice(None), *, verify: bool = True
    ) -> NDArray[np.void]:
        rows = self.files[hour].dsp
        some = rows[numbers] if isinstance(numbers, slice) else [rows[n] for n in numbers.tolist()]
        return np.array(some, DISPATCH)

    def event_count(self, hour: int) -> int:
        found = self.files.get(hour)
        return len(found.dsp) if found else 0

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
            out[f"{hour}.idx"] = np.array(file.idx, INDEX).tobytes()
            out[f"{hour}.dsp"] = np.array(file.dsp, DISPATCH).tobytes()
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

    def drop_table(self, table: bytes) -> None:
        self.rows.pop(table, None)

    def range(
        self, table: bytes, start: bytes = b"", end: bytes | None = None, limit: int = 1000
    ) -> list[tuple[bytes, bytes]]:
        rows = self.rows.get(table, {})
        return [(key, rows[key]) for key in sorted(rows) if key >= start and (end is None or key < end)][:limit]


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
