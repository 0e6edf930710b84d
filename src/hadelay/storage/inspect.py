"""Decode any file of a data directory into printable rows (`hadelay inspect FILE`). Journals are decoded in raft/.

A row whose bytes do not verify gets the key `damage`, and decoding continues if the format allows it. The first entry
of zeroes (space allocated ahead) ends a file. docs/spec/on-disk-format.md describes the rows.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt

from hadelay.codec import formats
from hadelay.codec.checksums import RowCrc
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.codec.records import check_record, decode_record
from hadelay.errors import BadRequest, DamagedFile
from hadelay.model import MOVES, NONE32, Event, encode_id, hour_from_name, hour_name
from hadelay.platform.disk import Disk, File, ReadOnlyDisk
from hadelay.storage.headsfile import decode_heads
from hadelay.storage.identity import decode_identity
from hadelay.storage.lmdbtables import LmdbBackend
from hadelay.storage.names import KINDS, decode_names
from hadelay.storage.tables import CHECKPOINT, CORE, HOURS, scan_all

Row = dict[str, Any]
_CHUNK_ROWS = 4096
_NO_NODE = 0xFF


def inspect(path: str, disk: Disk | None = None) -> Iterator[Row]:
    """Decode the file at `path` into printable rows. Raises BadRequest for an unknown file name."""
    name = os.path.basename(path)
    decode = _BY_NAME.get(name) or _BY_SUFFIX.get(os.path.splitext(name)[1])
    if decode is None:
        known = ", ".join([*_BY_NAME, *(f"<hour>{suffix}" for suffix in _BY_SUFFIX)])
        raise BadRequest(f"{name} is not a file of a data directory; known names: {known}")
    with closing((disk or ReadOnlyDisk()).open(path)) as file:
        yield from decode(file, path)


def _shows_damage(decode: Callable[[bytes, str], Iterator[Row]]) -> Callable[[File, str], Iterator[Row]]:
    """Wrap a decoder: if it raises DamagedFile, the error becomes the last row."""

    def rows(file: File, path: str) -> Iterator[Row]:
        try:
            yield from decode(file.pread(file.size(), 0), path)
        except DamagedFile as damage:
            yield {"offset": damage.offset, "damage": str(damage)}

    return rows


def _log(file: File, path: str) -> Iterator[Row]:
    at, end = 0, file.size()
    while at < end:
        head = file.pread(formats.RECORD_SIZE, at)
        if not any(head):
            return
        size = formats.RECORD_SIZE
        if len(head) == formats.RECORD_SIZE:
            size += int.from_bytes(head[4:8], "little") + int.from_bytes(head[8:12], "little")
        data = file.pread(min(size, end - at), at)
        damage = check_record(data)
        if damage and "payload" not in damage:
            yield {"offset": at, "damage": damage}
            return  # stop here: behind a damaged header, the start of the next record is unknown
        record = decode_record(data)
        row: Row = {"offset": at, "size": record.size} | record._asdict()
        row |= {"first_id": encode_id(record.first_id), "meta": _unpacked(record.meta)}
        yield row | ({"damage": damage} if damage else {})
        at += record.size


def _entries(dtype: np.dtype[Any], crc: RowCrc, show: Callable[[Row], Row]) -> Callable[[File, str], Iterator[Row]]:
    def decode(file: File, path: str) -> Iterator[Row]:
        names, size = dtype.names or (), dtype.itemsize
        at, end = 0, file.size()
        while at < end:
            data = file.pread(_CHUNK_ROWS * size, at)
            rows = np.frombuffer(data, dtype, len(data) // size)
            bad = set(crc.bad(rows).tolist())
            for n, values in enumerate(rows.tolist()):
                if not any(values):
                    return
                row = {"n": at // size + n} | dict(zip(names, values, strict=True))
                with suppress(ValueError, OverflowError):  # show the raw values of a damaged row with invalid times
                    row = show(row)
                yield row | ({"damage": "the CRC is wrong"} if n in bad else {})
            if len(data) % size:
                yield {"n": (at + len(data)) // size, "damage": "the entry is cut off"}
            at += len(data)

    return decode


def _show_entry(row: Row) -> Row:
    pre = row["pre"]
    return row | {"first_id": encode_id(row["first_id"]), "pre": None if pre == NONE32 else pre}


def _show_event(row: Row) -> Row:
    """Make a DISPATCH row printable. Consumer, node and reason stay numbers: their names are in the file `names`."""
    event, other, consumer = row["event"], row["other_hour"], row["consumer"]
    shown = row | {
        "event": Event(event).name.lower() if event in list(Event) else event,
        "at": datetime.fromtimestamp(row["at_ms"] / 1000, UTC).isoformat(timespec="milliseconds"),
        "previous": None if row["previous"] == NONE32 else row["previous"],
        "other_hour": None,
        "consumer": None if consumer == NONE32 else consumer,
        "node": None if row["node"] == _NO_NODE else row["node"],
    }
    if event in MOVES:
        shown |= {"other_hour": hour_name(other), "other_index": consumer, "consumer": None}
    elif event == Event.NACKED:
        reason = formats.nack_reason(np.array(other, np.uint32))
        shown["reason"] = None if reason == NONE32 else int(reason)
    if event in (Event.ACKED, Event.NACKED):
        delay_ms = formats.handout_delay_ms(np.array([(event, other)], [("event", "u1"), ("other_hour", "<u4")]))[0]
        shown["handout_delay_ms"] = None if delay_ms < 0 else int(delay_ms)
    return shown


def _heads(file: File, path: str) -> Iterator[Row]:
    hour = hour_from_name(os.path.basename(path).partition(".")[0])
    derived = decode_heads(file.pread(file.size(), 0), hour)
    if derived is None:
        yield {"damage": "the file does not verify; it is a cache, and the node will write it again"}
        return
    last, count = derived.heads
    yield {"hour": hour_name(hour), "entries": derived.entries, "counted": derived.counted}
    for second in range(formats.SECONDS_PER_HOUR):
        if count[second]:
            yield {"second": second, "last": int(last[second]), "count": int(count[second])}
    for topic, minute, n in derived.counters.tolist():
        yield {"topic": topic, "minute": minute, "count": n}


@_shows_damage
def _names(data: bytes, path: str) -> Iterator[Row]:
    for name in decode_names(data, path):
        yield name._asdict() | {"kind": KINDS.get(name.kind, name.kind)}


@_shows_damage
def _identity(data: bytes, path: str) -> Iterator[Row]:
    yield decode_identity(data, path)


def _tables(file: File, path: str) -> Iterator[Row]:
    with closing(LmdbBackend(path, readonly=True)) as backend:
        for table in backend.tables():
            for key, value in scan_all(backend, table):
                yield {"table": table.decode(errors="replace")} | _table_row(table, key, value)


def _table_row(table: bytes, key: bytes, value: bytes) -> Row:
    if table == HOURS:
        names = formats.HOUR_ROW.names or ()
        row: npt.NDArray[np.void] = np.frombuffer(value, formats.HOUR_ROW)
        return {"hour": hour_name(int.from_bytes(key, "big"))} | dict(zip(names, row[0].tolist(), strict=True))
    if table == CHECKPOINT and key != CORE:
        return {"key": key.decode(), **_unpacked(value)}
    return {"key": key.hex(), "value_bytes": len(value), "value": value[:64].hex()}


def _unpacked(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False) if data else {}
    except ValueError:
        return data.hex()


_BY_NAME = {"state.mdb": _tables, "names": _names, "identity": _identity}
_BY_SUFFIX = {
    ".log": _log,
    ".idx": _entries(formats.INDEX, INDEX_CRC, _show_entry),
    ".dsp": _entries(formats.DISPATCH, DISPATCH_CRC, _show_event),
    ".heads": _heads,
}
