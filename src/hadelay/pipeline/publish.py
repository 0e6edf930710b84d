"""Rows of a table to messages of a cluster, each at most once however often it is sent.

Every row has an idempotency key, of a column: a task that runs again, or twice at once, a job that is started anew, a
request whose answer was lost, all send keys that the cluster knows, and knows what it answered. It remembers them for
`limits.idempotency_window_ms`, an hour unless told otherwise: a job has to be repeated within that.

Refusals are per row. What may succeed later (a rate, a full queue, a new leader) is sent again until `timeout`; what
cannot is put aside with the reason, in a Parquet file per task.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hadelay.client import Client, ClusterInfo, MessageInfo, Put, PutResult, Receipt
from hadelay.errors import HadelayError
from hadelay.pipeline.schema import PUBLISHED, WriteOptions, check_published
from hadelay.storage.locations import Location, absolute

#: Rows that are Python objects at once; the client sends them a thousand at a time.
_ROWS = 10_000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_REASONS = 100
#: A new leader's clock may be behind the old one's by less than this.
_SKEW = timedelta(seconds=1)


class Sender(Protocol):
    """Of Client, what is needed here."""

    def put_many(self, puts: Iterable[Put], *, timeout: float | None = None) -> list[PutResult]: ...
    def get(self, message_id: str) -> MessageInfo: ...
    def cluster(self) -> ClusterInfo: ...


@dataclass
class Published:
    """rows = published + duplicates + rejected."""

    rows: int = 0
    published: int = 0
    #: Were published before, under the same key; or the message of their client key was pending. Not those that were
    #: published by a request of this job whose answer was lost.
    duplicates: int = 0
    rejected: int = 0
    #: reason → rows; the hundred most frequent, in that order.
    reasons: dict[str, int] = field(default_factory=dict)
    #: Files with the rows that were rejected.
    aside: list[str] = field(default_factory=list)

    def add(self, other: Published) -> None:
        for name in ("rows", "published", "duplicates", "rejected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.reasons = dict((Counter(self.reasons) + Counter(other.reasons)).most_common(_REASONS))
        self.aside += other.aside

    def refusal(self) -> str:
        """What to tell if rows cannot be put aside."""
        reason, count = next(iter(self.reasons.items()))
        return (
            f"{self.rejected:,} of {self.rows:,} rows were rejected, {count:,} of them: {reason}; the others are "
            "published. The option rejected=DIR writes them aside instead"
        )


def publish(
    batches: Iterable[pa.RecordBatch], options: WriteOptions, name: str, *, client: Sender | None = None,
    progress: Callable[[Published], None] = lambda _: None,
) -> Published:  # fmt: skip
    """name: of the file with rejected rows, where options.rejected says that they are wanted."""
    if client is None:
        with Client(options.endpoint, options.token or None, timeout=options.timeout) as own:
            return publish(batches, options, name, client=own, progress=progress)
    done, ours = Published(), set[str]()
    with _Aside(options.rejected, name) as aside:
        for batch in batches:
            check_published({field.name: type_name(field.type) for field in batch.schema}, options)
            for start in range(0, batch.num_rows, _ROWS):
                some = batch.slice(start, _ROWS)
                done.add(_send(some, options, client, aside, ours))
                progress(done)
    done.aside = aside.written
    return done


def _send(batch: pa.RecordBatch, options: WriteOptions, client: Sender, aside: _Aside, ours: set[str]) -> Published:
    """ours: ids that count as published although they were told to be duplicates; more are added."""
    done, rejected = Published(rows=batch.num_rows), dict[int, str]()
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
    if unclear and since is not None:  # a leader was lost: what it published, and did not say so, is ours
        found = _published_since(client, since, unclear - ours)
        done.published, done.duplicates = done.published + len(found), done.duplicates - len(found)
        ours |= found
    if rejected:
        rows = sorted(rejected)
        done.rejected, done.reasons = len(rows), dict(Counter(rejected.values()))
        aside.put(batch.take(pa.array(rows)), [rejected[row] for row in rows])
    return done


def _cluster_time(client: Sender) -> datetime | None:
    """None where the token may not ask."""
    try:
        return client.cluster().time - _SKEW
    except HadelayError:
        return None


def _published_since(client: Sender, since: datetime, ids: Iterable[str]) -> set[str]:
    """Which of these messages were published then or later."""
    found = set()
    for message_id in ids:
        with suppress(HadelayError):  # gone, or none that the token may read: known as a duplicate, and no more
            if client.get(message_id).published_at >= since:
                found.add(message_id)
    return found


def messages(batch: pa.RecordBatch, options: WriteOptions) -> Iterator[Put | str]:
    """What each row publishes, or why it does not."""
    n = batch.num_rows
    columns = {name: _values(batch.column(name)) for name in batch.schema.names if name in PUBLISHED}
    topics = columns.pop("topic", [None] * n)
    bodies, ats = columns.pop("body", [None] * n), columns.pop("deliver_at", [None] * n)
    delays, tags = columns.pop("delay", [None] * n), columns.pop("tags", [None] * n)
    columns.pop("idempotency_key", None)
    keys = _values(batch.column(options.key_column))
    names, others = list(columns), list(zip(*columns.values(), strict=True)) or [()] * n
    for topic, body, at, delay, tagged, key, more in zip(topics, bodies, ats, delays, tags, keys, others, strict=True):
        if key is None or key == "":
            yield f"{options.key_column} is null: a row needs a key of its own, so that it is not published twice"
        elif at is None and delay is None:
            yield "deliver_at and delay are null: say when"
        elif not (topic or options.topic):
            yield "topic is null"
        else:
            given = dict(zip(names, more, strict=True))
            at = int(at) if isinstance(at, str) and at.isdigit() else at  # of CSV
            if isinstance(tagged, str):
                tagged = [tag.strip() for tag in tagged.split(",") if tag.strip()]
            if None in (given.get("meta") or {}).values() or None in (tagged or ()):
                yield "a value of meta or tags is null"
                continue
            yield Put(
                topic=topic or options.topic, body=b"" if body is None else body, at=at, delay=delay,
                tags=tagged, idempotency_key=f"{options.key_prefix}{key}", **given,
            )  # fmt: skip


def _values(column: pa.Array) -> list[Any]:
    """Times as Unix ms, rounded up: late by less than a millisecond, never early. Maps as dicts."""
    if pa.types.is_timestamp(column.type):
        micros = column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64())
        ms = -(-np.asarray(micros.fill_null(0)) // 1000)
        return list(pa.array(ms, mask=np.asarray(micros.is_null())).to_pylist())
    found: list[Any] = column.to_pylist()
    return [None if value is None else dict(value) for value in found] if pa.types.is_map(column.type) else found


def type_name(kind: pa.DataType) -> str:
    """As Spark SQL writes it; whole numbers are BIGINT, others DOUBLE."""
    types = pa.types
    if types.is_timestamp(kind):
        return "TIMESTAMP" if kind.tz else "TIMESTAMP_NTZ"
    if types.is_list(kind) or types.is_large_list(kind):
        return f"ARRAY<{type_name(kind.value_type)}>"
    if types.is_map(kind):
        return f"MAP<{type_name(kind.key_type)},{type_name(kind.item_type)}>"
    for name, is_one in (
        ("STRING", (types.is_string, types.is_large_string)), ("BINARY", (types.is_binary, types.is_large_binary)),
        ("BIGINT", (types.is_integer,)), ("DOUBLE", (types.is_floating,)),
    ):  # fmt: skip
        if any(test(kind) for test in is_one):
            return name
    return str(kind).upper()


class _Aside:
    """Rejected rows with their reasons, in DIR/NAME.parquet, which is there when it is whole. DIR may be a URI."""

    def __init__(self, directory: str, name: str) -> None:
        self.location, self.name = (Location(absolute(directory)) if directory else None), f"{name}.parquet"
        self.file = ExitStack()
        self.writer: pq.ParquetWriter | None = None
        self.written: list[str] = []

    def put(self, rows: pa.RecordBatch, reasons: list[str]) -> None:
        if self.location is None:
            return
        table = pa.Table.from_batches([rows]).append_column("reason", pa.array(reasons, pa.string()))
        if self.writer is None:
            self.location.make("")
            file = self.file.enter_context(self.location.create(self.name))
            self.writer = pq.ParquetWriter(file, table.schema, compression="zstd")
        self.writer.write_table(table)

    def __enter__(self) -> _Aside:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self.writer is None or self.location is None:
            return
        if kind is None:
            self.writer.close()
            self.written = [self.location.path(self.name)]
        else:
            with suppress(OSError):
                self.writer.close()
        self.file.__exit__(kind, error, trace)
