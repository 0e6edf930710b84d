"""Publish the rows of a table as messages, each row at most once, even if it is sent repeatedly.

Every row has an idempotency key, from a column. Repeated or concurrent tasks, restarted jobs and retried requests send
keys that the cluster knows, and get the earlier answers. The cluster remembers keys for `limits.idempotency_window_ms`,
an hour by default: repeat a job within this time.

Rows are rejected one by one. Temporary errors (a rate, a full queue, a new leader) are retried until `timeout`; rows
with other errors are written to a Parquet file per task, with the reason.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hadelay.api.publishoptions import OPTIONS
from hadelay.client import Client, Put, Receipt
from hadelay.client.wire import own_or_new_key, plain
from hadelay.errors import HadelayError
from hadelay.pipeline.schema import PUBLISHED, WriteOptions, check_published
from hadelay.storage.locations import Location, absolute

#: Maximum number of rows kept as Python objects at a time; the client sends a thousand per request.
_ROWS = 10_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_REASONS = 100
#: _DURATIONS: columns with durations, whose values may be numbers. _LONG: number of digits from which a number in the
#: column deliver_at is too long for a Unix time.
_DURATIONS, _LONG = [name for name, row in OPTIONS.items() if row.kind.name == "duration"], 18
#: Maximum time by which a new leader's clock may be behind the previous leader's.
_SKEW = timedelta(seconds=1)


@dataclass
class RowTotals:
    """Counts of the rows of a job; rows = published + duplicates + rejected."""

    rows: int = 0
    published: int = 0
    #: Number of rows whose idempotency key, or pending client key, was known before this job. Rows that the job sent
    #: again, because an answer was lost, are not counted.
    duplicates: int = 0
    rejected: int = 0
    #: Number of rejected rows by reason; the hundred most frequent reasons, in descending order.
    reasons: dict[str, int] = field(default_factory=dict)
    #: Paths of the files with the rejected rows.
    aside: list[str] = field(default_factory=list)

    def add(self, other: RowTotals) -> None:
        for name in ("rows", "published", "duplicates", "rejected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons = dict((Counter(self.reasons) + Counter(other.reasons)).most_common(_REASONS))
        self.aside += other.aside

    def refusal(self) -> str:
        """Error text for rejected rows without a directory to write them to."""
        reason, count = next(iter(self.reasons.items()))
        return (
            f"{self.rejected:,} of {self.rows:,} rows were rejected, {count:,} of them: {reason}; the others are "
            "published. The option rejected=DIR writes them aside instead"
        )


def publish(
    batches: Iterable[pa.RecordBatch],
    options: WriteOptions,
    name: str,
    *,
    client: Client | None = None,
    progress: Callable[[RowTotals], None] = lambda _: None,
) -> RowTotals:
    """Publish all rows. name: file name for rejected rows, below options.rejected."""
    opened = nullcontext(client) if client else Client(options.endpoint, options.token or None, timeout=options.timeout)
    done, ours = RowTotals(), set[str]()
    with opened as sender, _Aside(options.rejected, name) as aside:
        for batch in batches:
            check_published({field.name: type_name(field.type) for field in batch.schema}, options)
            for start in range(0, batch.num_rows, _ROWS):
                done.add(_send(batch.slice(start, _ROWS), options, sender, aside, ours))
                progress(done)
    done.aside = aside.written
    return done


def _send(batch: pa.RecordBatch, options: WriteOptions, client: Client, aside: _Aside, ours: set[str]) -> RowTotals:
    """Publish a batch of rows. ours: ids of messages that this job published although the last answer called their rows
    duplicates; the function adds to this set."""
    done, rejected = RowTotals(rows=batch.num_rows), dict[int, str]()
    since, unclear = _cluster_time(client), set[str]()
    left: list[tuple[int, Put]] = []
    for row, put in enumerate(messages(batch, options)):
        if isinstance(put, Put):
            left.append((row, put))
        else:
            rejected[row] = put
    deadline, pause_s = time.monotonic() + options.timeout, _FIRST_PAUSE_S
    while left:
        results = client.put_many([put for _, put in left], timeout=options.timeout)
        again: list[tuple[int, Put]] = []
        wait_s = pause_s
        for (row, put), result in zip(left, results, strict=True):
            if isinstance(result, Receipt):
                if result.duplicate and result.resent:
                    unclear.add(result.id)
                done.duplicates += result.duplicate
                done.published += not result.duplicate
            elif result.retryable and time.monotonic() < deadline:
                again.append((row, put))
                wait_s = max(wait_s, (result.retry_after_ms or 0) / 1000)
            else:
                rejected[row] = str(result)
        left = again
        if left:
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    # Find duplicates that this job published itself: their first answers were lost, for example at a leader change
    if unclear and since is not None:
        found = _published_since(client, since, unclear - ours)
        done.published, done.duplicates = done.published + len(found), done.duplicates - len(found)
        ours |= found
    if rejected:
        rows = sorted(rejected)
        done.rejected, done.reasons = len(rows), dict(Counter(rejected.values()))
        aside.put(batch.take(pa.array(rows)), [rejected[row] for row in rows])
    return done


def _cluster_time(client: Client) -> datetime | None:
    """Cluster time, less a margin for clocks of leaders that differ; None if the token does not allow the request."""
    try:
        return client.cluster().time - _SKEW
    except HadelayError:
        return None


def _published_since(client: Client, since: datetime, ids: Iterable[str]) -> set[str]:
    """The given ids whose messages were published at `since` or later."""
    found = set()
    for message_id in ids:
        with suppress(HadelayError):  # a message that cannot be looked up still counts as a duplicate
            if client.get(message_id).published_at >= since:
                found.add(message_id)
    return found


def messages(batch: pa.RecordBatch, options: WriteOptions) -> Iterator[Put | str]:
    """Make the message of each row; a string is the reason why the row is rejected."""
    columns = {name: batch.column(name) for name in batch.schema.names if name in PUBLISHED}
    columns["idempotency_key"] = batch.column(options.key_column)
    for row in zip(*map(_values, columns.values()), strict=True):
        yield _message(dict(zip(columns, row, strict=True)), options)


def _message(row: dict[str, Any], options: WriteOptions) -> Put | str:
    key, topic, body = row.pop("idempotency_key"), row.pop("topic", None) or options.topic, row.pop("body", None)
    at, delay, tags = row.pop("deliver_at", None), row.get("delay"), row.pop("tags", None)
    if key is None or key == "":
        return f"{options.key_column} is null: a row needs a key of its own, so that it is not published twice"
    if at is None and delay is None:
        return "deliver_at and delay are null: say when"
    if not topic:
        return "topic is null"
    if isinstance(at, str) and at.isascii() and at.isdigit() and len(at) < _LONG:
        at = int(at)  # due times from CSV files may be numbers as text
    if isinstance(tags, str):
        tags = [tag.strip() for tag in tags.split(",") if tag.strip()]
    if None in (*(row.get("meta") or {}).values(), *(row.get("forward") or {}).values(), *(tags or ())):
        return "a value of meta, forward or tags is null"
    body = b"" if body is None else body
    try:
        own = own_or_new_key(f"{options.key_prefix}{key}")
        plain([row.get(name) for name in _DURATIONS])
    except ValueError as error:
        return str(error)
    return Put(topic=topic, body=body, at=at, tags=tags, idempotency_key=own, **row)


def _values(column: pa.Array) -> list[Any]:
    """Python values of a column. Times become Unix ms, rounded up, so that messages are never early. Maps become
    dicts."""
    if pa.types.is_timestamp(column.type):
        micros = column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64())
        ms = -(-np.asarray(micros.fill_null(0)) // 1000)
        return list(pa.array(ms, mask=np.asarray(micros.is_null())).to_pylist())
    found: list[Any] = column.to_pylist()
    return [None if value is None else dict(value) for value in found] if pa.types.is_map(column.type) else found


def type_name(kind: pa.DataType) -> str:
    """Spark SQL type of an Arrow type; BIGINT for all integers, DOUBLE for all floats."""
    types = pa.types
    if types.is_timestamp(kind):
        return "TIMESTAMP" if kind.tz else "TIMESTAMP_NTZ"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"ARRAY<{type_name(kind.value_type)}>"
    if types.is_map(kind):
        return f"MAP<{type_name(kind.key_type)},{type_name(kind.item_type)}>"
    if types.is_string(kind) or types.is_large_string(kind):
        return "STRING"
    if types.is_binary(kind) or types.is_large_binary(kind):
        return "BINARY"
    return "BIGINT" if types.is_integer(kind) else "DOUBLE" if types.is_floating(kind) else str(kind).upper()


class _Aside(ExitStack):
    """Writes rejected rows, with the reasons, to DIR/NAME.parquet; the file appears when it is complete. DIR may be a
    URI."""

    def __init__(self, directory: str, name: str) -> None:
        super().__init__()
        self.directory, self.name, self.written = directory, f"{name}.parquet", list[str]()
        self.writer: pq.ParquetWriter | None = None

    def put(self, rows: pa.RecordBatch, reasons: list[str]) -> None:
        if not self.directory:
            return
        table = pa.Table.from_batches([rows]).append_column("reason", pa.array(reasons, pa.string()))
        if self.writer is None:
            location = Location(absolute(self.directory))
            location.make("")
            file = self.enter_context(location.create(self.name))
            self.writer = self.enter_context(pq.ParquetWriter(file, table.schema, compression="zstd"))
            self.written = [location.path(self.name)]
        self.writer.write_table(table)
