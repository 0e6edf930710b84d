"""`hadelay inspect FILE`: print what docs/spec describes, and say where a byte is wrong."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hadelay.cli.output import Printing, emit_json, note, table
from hadelay.core.checksums import RowCrc
from hadelay.core.formats import DISPATCH, INDEX, RECORD_SIZE
from hadelay.errors import BadRequest, DamagedFile, NotFound
from hadelay.model import NONE32, Event, encode_id, hour_from_name, hour_name
from hadelay.raft.records import MAGIC, Torn, decode_segment_header, is_torn
from hadelay.raft.records import decode_record as decode_journal_record
from hadelay.storage.heads import decode_heads
from hadelay.storage.identity import decode_identity
from hadelay.storage.names import KINDS, decode_names
from hadelay.storage.records import check_record, decode_record

Row = dict[str, Any]
Reader = Callable[[bytes, Path], Iterator[Row]]
_CHUNK = 65_536
#: Bytes of a payload that a table shows.
_SHOWN = 48


def inspect(
    file: Path, /, *, skip: int = 0, limit: int = 0, verify: bool = False, printing: Printing | None = None
) -> int:
    """Print a file of a data directory: .log, .idx, .dsp, .heads, names, identity, state.mdb, or a journal segment.

    Reads only what is asked for, and never writes. Ends with 1 when something does not verify.

    Parameters
    ----------
    file
        Its name or its first bytes say what it is.
    skip
        Entries to leave out from the front.
    limit
        How many to print; 0 is all of them.
    verify
        Print nothing but what is wrong, and how many entries were read.
    """
    as_json = printing is not None and printing.output == "json"
    if not file.is_file():
        raise NotFound(f"{file}: no such file")
    rows = islice(_rows(file), skip, skip + limit if limit else None)
    count = 0
    try:
        if verify:
            for _ in rows:
                count += 1
        else:
            for part in _parts(rows):
                count += len(part)
                _print(part, as_json)
    except DamagedFile as damage:
        note(f"hadelay: {damage}")
        return 1
    note(f"{count:,} entries, every one verifies" if verify else f"{count:,} entries")
    return 0


def _parts(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows in portions that fit a table; what was read before damage is still printed."""
    part: list[Row] = []
    try:
        for row in rows:
            if part and (len(part) == 1000 or row.keys() != part[0].keys()):
                yield part
                part = []
            part.append(row)
    except DamagedFile:
        if part:
            yield part
        raise
    if part:
        yield part


def _print(part: list[Row], as_json: bool) -> None:
    if as_json:
        for row in part:
            emit_json(row)
    else:
        table(part, list(part[0]))
    sys.stdout.flush()


def _rows(path: Path) -> Iterator[Row]:
    if path.name == "state.mdb":
        yield from _tables(path)
        return
    with open(path, "rb") as file:
        size = path.stat().st_size
        data: Any = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
        yield from _reader(path, bytes(data[:16]))(data, path)


def _reader(path: Path, head: bytes) -> Reader:
    by_suffix: dict[str, Reader] = {".idx": _index, ".dsp": _dispatch, ".log": _log, ".heads": _heads}
    by_name: dict[str, Reader] = {"names": _names, "identity": _identity}
    if head.startswith(MAGIC):
        return _journal
    found = by_suffix.get(path.suffix) or by_name.get(path.name)
    if found is None:
        raise BadRequest(f"{path}: not a file of a data directory, as far as its name and first bytes say")
    return found


# --- the formats -----------------------------------------------------------------------------------------------------


def _structured(data: bytes, path: Path, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[np.void]]:
    """Verified rows in chunks, up to the reserved zeroes behind the last one."""
    crc, count = RowCrc(dtype), len(data) // dtype.itemsize
    for start in range(0, count, _CHUNK):
        rows = np.frombuffer(data, dtype, min(_CHUNK, count - start), start * dtype.itemsize).copy()
        bad = crc.bad(rows)
        if not len(bad):
            yield rows
            continue
        first = int(bad[0])
        yield rows[:first]
        offset = (start + first) * dtype.itemsize
        if any(data[offset : offset + dtype.itemsize]):
            raise DamagedFile(str(path), offset, f"entry {start + first} does not verify")
        return
    if len(data) % dtype.itemsize:
        raise DamagedFile(str(path), count * dtype.itemsize, "the last entry is cut off")


def _index(data: bytes, path: Path) -> Iterator[Row]:
    for rows in _structured(data, path, INDEX):
        for row in rows:
            yield {
                "globalIndex": int(row["index"]),
                "preGlobalIndex": _maybe(row["pre"]),
                "localIndex": int(row["local"]),
                "second": int(row["second"]),
                "deliver_at": _time(row["deliver_at_ms"]),
                "first_id": encode_id(int(row["first_id"])),
                "topic": int(row["topic"]),
                "attempt": int(row["attempt"]),
                "offset": int(row["offset"]),
                "size": int(row["size"]),
                "flags": f"{int(row['flags']):04x}",
            }


def _dispatch(data: bytes, path: Path) -> Iterator[Row]:
    number = 0
    for rows in _structured(data, path, DISPATCH):
        for row in rows:
            other = _maybe(row["other_hour"])
            yield {
                "event_number": number,
                "event": Event(int(row["event"])).name.lower(),
                "globalIndex": int(row["index"]),
                "previous": _maybe(row["previous"]),
                "at": _time(row["at_ms"]),
                "attempt": int(row["attempt"]),
                "consumer": _maybe(row["consumer"]),
                "node": int(row["node"]),
                "moved_to": None if other is None else hour_name(other),
            }
            number += 1


def _log(data: bytes, path: Path) -> Iterator[Row]:
    at = 0
    while at < len(data):
        head = bytes(data[at : at + RECORD_SIZE])
        if not any(head):
            return
        size = RECORD_SIZE + int.from_bytes(head[4:8], "little") + int.from_bytes(head[8:12], "little")
        piece = bytes(data[at : at + size])
        if problem := check_record(piece):
            raise DamagedFile(str(path), at, problem)
        record = decode_record(piece)
        yield {
            "offset": at,
            "size": size,
            "first_id": encode_id(record.first_id),
            "topic": record.topic,
            "published_at": _time(record.published_at_ms),
            "deliver_at": _time(record.deliver_at_ms),
            "meta_bytes": record.meta_size,
            "body_bytes": record.body_size,
            "body": _shown(record.body),
        }
        at += size


def _heads(data: bytes, path: Path) -> Iterator[Row]:
    derived = decode_heads(bytes(data), hour_from_name(path.stem))
    if derived is None:
        raise DamagedFile(str(path), 0, "it does not verify; it is derived from the .idx beside it and may be removed")
    used = np.flatnonzero(derived.heads.count)
    for second in used.tolist():
        last, count = int(derived.heads.last[second]), int(derived.heads.count[second])
        yield {"second": second, "last_globalIndex": last, "count": count}


def _names(data: bytes, path: Path) -> Iterator[Row]:
    for name in decode_names(bytes(data), str(path)):
        yield {"offset": name.offset, "kind": KINDS.get(name.kind, name.kind), "number": name.number, "name": name.name}


def _identity(data: bytes, path: Path) -> Iterator[Row]:
    yield decode_identity(bytes(data), str(path))


def _journal(data: bytes, path: Path) -> Iterator[Row]:
    header = decode_segment_header(bytes(data[:512]), str(path))
    if header is None:
        return
    yield {
        "segment": header.seq,
        "first_index": header.first_index,
        "term": header.term,
        "vote": header.vote,
        "node": header.node,
        "incarnation": header.incarnation,
        "cluster_id": header.cluster_id,
        "group": header.group,
    }
    everything, at = bytes(data), 512
    while True:
        try:
            record = decode_journal_record(everything, at)
        except Torn:
            if is_torn(everything, at):
                note(f"{path}, offset {at}: a torn write; recovery cuts it off")
                return
            raise DamagedFile(str(path), at, "the record does not verify") from None
        if record is None:
            return
        yield {
            "offset": at,
            "kind": record.kind.to_bytes(4, "little").decode("ascii", "replace").lower(),
            "index": record.index,
            "term": record.term,
            "bytes": len(record.payload),
        }
        at = record.end


def _tables(path: Path) -> Iterator[Row]:
    from hadelay.storage.lmdbtables import LmdbBackend

    backend = LmdbBackend(str(path), readonly=True)
    for name in backend.tables():
        start = b""
        while rows := backend.scan(name, start, 1000):
            for key, value in rows:
                yield {"table": _shown(name), "key": _shown(key), "bytes": len(value), "value": _shown(value)}
            start = rows[-1][0] + b"\0"


def _maybe(value: Any) -> int | None:
    return None if int(value) == NONE32 else int(value)


def _time(ms: Any) -> str:
    at = datetime.fromtimestamp(int(ms) // 1000, UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{int(ms) % 1000:03}Z"


def _shown(data: bytes) -> str:
    """Text if it is text, hex otherwise, and not all of it."""
    part, more = data[:_SHOWN], "…" if len(data) > _SHOWN else ""
    try:
        text = part.decode()
    except UnicodeDecodeError:
        return part.hex(" ", 4) + more
    return (text if text.isprintable() else part.hex(" ", 4)) + more
