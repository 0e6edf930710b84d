"""`hadelay inspect FILE`: print a file of a data directory (docs/spec), and locate damage."""

from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from hadelay.api.text import END_OF_YEARS_MS
from hadelay.cli.output import Printing, emit_json, note, table
from hadelay.errors import BadRequest, DamagedFile, NotFound
from hadelay.platform.disk import ReadOnlyDisk
from hadelay.raft.records import MAGIC, SEGMENT_HEADER_BYTES, Torn, decode_record, decode_segment_header, is_torn
from hadelay.raft.segment import SUFFIX, end_of
from hadelay.storage.inspect import inspect as storage_rows

Row = dict[str, Any]
#: Limit of rows per printed table: to compute column widths, all rows of a table are in memory.
_TABLE_ROWS = 1000
#: Limit of the payload bytes shown in a table cell.
_SHOWN = 48


def inspect(
    file: Path, /, *, skip: int = 0, limit: int = 0, verify: bool = False, printing: Printing = Printing()
) -> int:
    """Print a file of a data directory: .log, .idx, .dsp, .heads, names, identity, state.mdb, or a journal segment.

    Exit code 1 if an entry is damaged.

    Args:
        file: Path of the file. The journal directory (raft/g0) of a stopped node: print its node and last entry.
        skip: Number of entries to skip.
        limit: Number of entries to print; 0: all.
        verify: Print only damaged entries.
    """
    if file.is_dir():
        return _directory(file, printing)
    if not file.is_file():
        raise NotFound(f"{file}: no such file")
    count, damaged = 0, 0
    chosen = islice(_rows(file), skip, skip + limit if limit else None)
    for columns, rows in groupby(chosen, key=tuple):
        while part := list(islice(rows, _TABLE_ROWS)):
            count += len(part)
            bad = [row for row in part if "damage" in row]
            damaged += len(bad)
            _print(bad if verify else part, columns, printing)
    note(f"{count:,} entries" + (f", {damaged:,} of them damaged" if damaged else ""))
    return 1 if damaged else 0


def _directory(path: Path, printing: Printing) -> int:
    if not any(path.glob(f"*{SUFFIX}")):
        raise BadRequest(f"{path} is a directory without a journal: name a file in it, or raft/g0")
    row = end_of(ReadOnlyDisk(), str(path))
    _print([row], tuple(row), printing)
    return 0


def _rows(path: Path) -> Iterator[Row]:
    with open(path, "rb") as file:
        journal = file.read(len(MAGIC)) == MAGIC
    try:
        yield from _journal(path) if journal else storage_rows(str(path))
    except ValueError as error:
        raise BadRequest(f"{path}: {error}: give the file the name that it has in the data directory") from None


def _journal(path: Path) -> Iterator[Row]:
    data = path.read_bytes()
    try:
        header = decode_segment_header(data, str(path))
    except DamagedFile as damage:
        yield {"offset": 0, "damage": str(damage)}
        return
    if header is None:
        return
    yield {name: getattr(header, name) for name in header.__dataclass_fields__}
    at = SEGMENT_HEADER_BYTES
    while True:
        try:
            record = decode_record(data, at)
        except Torn:
            # A torn write at the end is not damage: it was never acknowledged, and recovery cuts it off.
            yield {"offset": at, "torn": True} if is_torn(data, at) else {"offset": at, "damage": "wrong record"}
            return
        if record is None:
            return
        kind = record.kind.to_bytes(4, "little").decode().lower()
        yield {"offset": at, "kind": kind, "index": record.index, "term": record.term, "bytes": len(record.payload)}
        at = record.end


def _print(rows: list[Row], columns: tuple[str, ...], printing: Printing) -> None:
    if printing.output == "json":
        for row in rows:
            emit_json({name: _text(value) for name, value in row.items()})
    elif rows:
        table([{name: _cell(name, value) for name, value in row.items()} for row in rows], columns)


def _cell(name: str, value: Any) -> Any:
    # Show a time as a date only if it is plausible: other numbers come from damaged rows.
    if name.endswith("_ms") and isinstance(value, int) and 0 < value < END_OF_YEARS_MS:
        return f"{datetime.fromtimestamp(value // 1000, UTC):%Y-%m-%d %H:%M:%S}.{value % 1000:03}"
    if isinstance(value, bytes):
        return _text(value[:_SHOWN]) + ("…" if len(value) > _SHOWN else "")
    # No thousands separators: users compare sizes and offsets with the spec, and copy them.
    return str(value) if isinstance(value, int) else value


def _text(value: Any) -> Any:
    if not isinstance(value, bytes):
        return value
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex()
    return text if text.isprintable() else value.hex()
