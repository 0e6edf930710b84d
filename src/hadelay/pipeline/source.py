"""Spark data source: `spark.read.format("hadelay")`, `df.write.format("hadelay")`, and streams of both (PySpark 4.2 or
newer).

The schema, readers and partitions are made in a process of the driver, `read` and `write` run in tasks: only options,
columns and splits go between them. Spark 4.3 requests all columns of the schema, so the schema is the projection; it
returns an empty list of partitions as `InputPartition(None)`; and filters that a query of a DataFrame pushed apply to
its next query, if that has none, so the reader takes no filters (ADR 0204).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import datasource
from pyspark.sql.datasource import InputPartition, WriterCommitMessage
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from hadelay.errors import BadRequest
from hadelay.model import hour_from_name, hour_name
from hadelay.pipeline import batches
from hadelay.pipeline.arrow import Split
from hadelay.pipeline.hourfiles import HourFiles, Listing
from hadelay.pipeline.schema import KINDS, Options, WriteOptions, check_published, parse_options, parse_write_options
from hadelay.pipeline.stores import listing, open_store
from hadelay.storage.locations import absolute

if TYPE_CHECKING:
    # Import the client for types only: its import took a third of the import time of a worker that reads.
    from hadelay.pipeline.publish import RowTotals

#: Lower-case names of Spark's own options for streams, which Spark also passes to data sources.
_SPARKS = {"checkpointlocation", "queryname"}

#: Position of a stream, by hour: {"asOf": ms, "hours": {"2026112018": [rows, entries, events, log_bytes], …}, "gone":
#: {"2026112010": ms}}. `rows` is the number of rows read. The next three are the committed sizes at that time, so that
#: the rows between two offsets are the same on any replica. A replica that is behind lists less, but an offset never
#: moves back. Deleted hours are kept for a day, because some replicas may still list them.
Offset = dict[str, Any]
_REMEMBERED_MS = 86_400_000


class HadelaySource(datasource.DataSource):
    """Spark data source for the hour files of hadelay. Options: docs/reference/pipeline.md."""

    @classmethod
    def name(cls) -> str:
        return "hadelay"

    def schema(self) -> str:
        options = parse_options(self.options)
        columns = {name: KINDS[options.kind][name] for name in options.projection()}
        return ", ".join(f"{name} {c.type}{'' if c.null else ' NOT NULL'}" for name, c in columns.items())

    def reader(self, schema: StructType) -> datasource.DataSourceReader:
        return _Reader(self._reads(schema), schema)

    def streamReader(self, schema: StructType) -> datasource.DataSourceStreamReader:
        return _StreamReader(self._reads(schema), schema)

    def _reads(self, schema: StructType) -> Options:
        options = parse_options(self.options)
        known = KINDS[options.kind]
        for column in schema:
            if column.name not in known:
                raise BadRequest(f"kind {options.kind} has no column {column.name}; there are {', '.join(known)}")
            kind, wanted = column.dataType.simpleString(), known[column.name]
            if kind.upper() != wanted.type:
                raise BadRequest(f"column {column.name} has the type {wanted.type}; the schema asks for {kind}")
            if wanted.null and not column.nullable:
                raise BadRequest(f"column {column.name} may be null: make it nullable in the schema")
        return options

    def writer(self, schema: StructType, overwrite: bool) -> datasource.DataSourceWriter:
        if overwrite:
            raise BadRequest("published messages cannot be overwritten: use mode('append')")
        return _Writer(self._writes(schema))

    def streamWriter(self, schema: StructType, overwrite: bool) -> datasource.DataSourceStreamWriter:
        options = self._writes(schema)
        if overwrite:
            raise BadRequest("published messages cannot be taken back: use outputMode('append')")
        if not options.rejected:
            raise BadRequest("a stream needs the option rejected, or each start would fail at the same refused row")
        return _StreamWriter(options)

    def _writes(self, schema: StructType) -> WriteOptions:
        own = {name: value for name, value in self.options.items() if name.lower() not in _SPARKS}
        options = parse_write_options(own)
        check_published({column.name: column.dataType.simpleString() for column in schema}, options)
        return replace(options, rejected=absolute(options.rejected))


def advance_offset(start: Offset, listing: Listing, options: Options, most: int | None = None) -> Offset:
    """Compute the next offset: after all listed rows, or after `most` rows more, oldest hours first. Returns `start`
    itself if there are no new rows."""
    known: dict[str, list[int]] = start.get("hours", {})
    hours, left = dict(known), most
    for files in sorted(listing.hours):
        name = hour_name(files.hour)
        have = known[name][0] if name in known else 0
        new = (files.entries if options.kind == "messages" else files.events) - have
        new = new if left is None else min(new, left)
        if new > 0 and options.takes(files.hour):
            hours[name] = [have + new, files.entries, files.events, files.log_bytes]
            left = None if left is None else left - new
    if hours == known:
        return start
    as_of_ms = max(start.get("asOf", 0), listing.as_of_ms)
    missing = known.keys() - {hour_name(files.hour) for files in listing.hours}
    gone = {name: start["gone"].get(name, as_of_ms) for name in sorted(missing)}
    for name in [name for name, since_ms in gone.items() if as_of_ms - since_ms > _REMEMBERED_MS]:
        del hours[name], gone[name]
    return {"asOf": as_of_ms, "hours": hours, "gone": gone}


def splits_between(start: Offset, end: Offset, options: Options) -> list[Split]:
    """Split the rows between two offsets of a stream into parts for tasks."""
    known: dict[str, list[int]] = start.get("hours", {})
    found = []
    for name, (stop, entries, events, log_bytes) in end.get("hours", {}).items():
        files = HourFiles(hour_from_name(name), entries, events, log_bytes)
        first = known[name][0] if name in known else 0
        for at in range(first, stop, options.split_rows):
            found.append(Split(files, at, min(at + options.split_rows, stop), end["asOf"]))
    return found


class _Reads:
    def __init__(self, options: Options, schema: StructType) -> None:
        self.options, self.columns = options, schema.fieldNames()
        self.required = {column.name for column in schema if not column.nullable}
        self.store = open_store(options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if (split := partition.value) is not None:
            yield from batches.read(self.store, self.options, self.columns, split, required=self.required)


class _Reader(_Reads, datasource.DataSourceReader):
    def partitions(self) -> list[InputPartition]:
        found = listing(self.store, self.options)
        return [InputPartition(split) for split in batches.splits(found, self.options, even=True)]


class _StreamReader(_Reads, datasource.DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reader of a stream, made once per query, in a process of the driver."""

    #: Hours and their files, listed at the start of the query. Only a query with the trigger availableNow has this
    #: list, as it must end with the data that existed at its start; other queries list the hours anew for each batch.
    listed: Listing | None = None

    def initialOffset(self) -> Offset:
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self.options.max_rows_per_trigger
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        self.listed = listing(self.store, self.options)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        found = self.listed or listing(self.store, self.options)
        return advance_offset(start, found, self.options, limit.max_rows if isinstance(limit, ReadMaxRows) else None)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        return [InputPartition(split) for split in splits_between(start, end, self.options)]


@dataclass
class _Written(WriterCommitMessage):
    done: RowTotals


class _Writes:
    def __init__(self, options: WriteOptions) -> None:
        self.options, self.job = options, os.urandom(6).hex()

    def name(self, context: TaskContext | None) -> str:
        """File name for a task's rejected rows; equal in all attempts of the task."""
        return f"{self.job}-{context.partitionId() if context else 0:05}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        from hadelay.pipeline.publish import publish

        return _Written(publish(iterator, self.options, self.name(TaskContext.get())))


class _Writer(_Writes, datasource.DataSourceArrowWriter):
    """Writer of a table, made once per write, and sent to every attempt of every task."""

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        done = _finish(messages, self.options)
        if done.rejected and not self.options.rejected:
            raise BadRequest(done.refusal())


class _StreamWriter(_Writes, datasource.DataSourceStreamArrowWriter):
    """Writer of a stream, made for each micro-batch, and again for its commit."""

    def name(self, context: TaskContext | None) -> str:
        # Use ids of query and micro-batch that stay the same when the query is restarted.
        assert context is not None
        query, batch = map(context.getLocalProperty, ("sql.streaming.queryId", "streaming.sql.batchId"))
        return f"{query}-{batch:0>6}-{context.partitionId():05}"

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        _finish(messages, self.options)


def _finish(messages: list[WriterCommitMessage | None], options: WriteOptions) -> RowTotals:
    """Add up the row counts of all tasks; write the sum to the file in options.summary, if any."""
    from hadelay.pipeline.publish import RowTotals

    done = RowTotals()
    for message in messages:
        if isinstance(message, _Written):
            done.add(message.done)
    if options.summary:
        with open(options.summary, "w", encoding="utf-8") as file:
            json.dump(asdict(done), file)
    return done
