"""A table to messages: CSV or Parquet, a file or a directory, with Spark or without.

Columns named as a message's fields are taken, others are left alone; `columns` says which column is which field where
the names differ. In CSV everything is text: what a field cannot be read from is rejected, row by row.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset

from hadelay import uris
from hadelay.errors import BadRequest, NotFound
from hadelay.pipeline.publish import Published, publish
from hadelay.pipeline.schema import PUBLISHED, WriteOptions, given
from hadelay.pipeline.session import check_spark
from hadelay.pipeline.tasks import cores
from hadelay.storage.locations import filesystem


@dataclass(frozen=True)
class ScheduleOptions:
    #: Its key_column is a column of the table.
    write: WriteOptions
    #: A file, or a directory of files of one format.
    table: str
    #: csv or parquet; as the file's name ends.
    format: str = ""
    #: field=column, separated by commas.
    columns: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("csv", "parquet"):
            raise BadRequest(f"{self.table}: say whether it is csv or parquet (--format)")
        for field in self.renamed:
            if field not in PUBLISHED:
                raise BadRequest(f"columns: {field} is none of a message's fields: {', '.join(PUBLISHED)}")
        if not uris.is_uri(self.table) and not os.path.exists(self.table):
            raise NotFound(f"{self.table}: no such file or directory")

    @property
    def kind(self) -> str:
        path = self.table.partition("?")[0] if uris.is_uri(self.table) else self.table
        return self.format or path.rpartition(".")[2].lower()

    @property
    def renamed(self) -> dict[str, str]:
        """field → column"""
        pairs = (part.partition("=") for part in self.columns.split(",") if part.strip())
        return {field.strip(): column.strip() for field, _, column in pairs}

    def taken(self, there: list[str]) -> list[tuple[str, str]]:
        """(column, what it is called by the writer). BadRequest for one that is not there."""
        renamed = self.renamed
        wanted = [(column, field) for field, column in renamed.items()]
        wanted += [(name, name) for name in there if name in PUBLISHED and name not in renamed]
        key = self.write.key_column
        if key not in (field for _, field in wanted):
            wanted.append((key, key))
        if missing := [column for column, _ in wanted if column not in there]:
            raise BadRequest(f"{self.table} has no column {missing[0]}; there are {', '.join(there)}")
        return wanted


def run(spark: Any, options: ScheduleOptions, progress: Callable[[Published], None] = lambda _: None) -> Published:
    """spark: a session, or None to do it in this process. progress: called now and then, without Spark only."""
    if spark is None:
        return publish(batches(options), options.write, os.urandom(6).hex(), progress=progress)
    wanted = cores(spark)
    check_spark(spark, "FILE", options.table)
    reader = spark.read
    frame = reader.parquet(options.table) if options.kind == "parquet" else reader.csv(options.table, header=True)
    frame = frame.select(*(frame[f"`{column}`"].alias(name) for column, name in options.taken(frame.columns)))
    if frame.rdd.getNumPartitions() < wanted:
        frame = frame.repartition(wanted)
    with tempfile.TemporaryDirectory() as directory:
        write = replace(options.write, summary=f"{directory}/summary")
        frame.write.format("hadelay").options(**given(write)).mode("append").save()
        with open(write.summary, encoding="utf-8") as file:
            return Published(**json.load(file))


def count(options: ScheduleOptions) -> int | None:
    """Rows, where that is known without reading them."""
    if options.kind == "csv":
        return None
    with _in_words(options):
        return int(_dataset(options, "parquet").count_rows())


def batches(options: ScheduleOptions) -> Iterator[pa.RecordBatch]:
    with _in_words(options):
        dataset = _dataset(options, _format(options))
        taken = options.taken(dataset.schema.names)
        for batch in dataset.to_batches(columns=[column for column, _ in taken]):
            yield pa.RecordBatch.from_arrays(batch.columns, names=[name for _, name in taken])


def _dataset(options: ScheduleOptions, format: Any) -> Any:
    if not uris.is_uri(options.table):
        return pyarrow.dataset.dataset(options.table, format=format)
    there, path = filesystem(options.table)
    return pyarrow.dataset.dataset(path, filesystem=there, format=format)


@contextmanager
def _in_words(options: ScheduleOptions) -> Iterator[None]:
    try:
        yield
    except pa.ArrowInvalid as error:
        raise BadRequest(f"{options.table} is no {options.kind}: {error}") from None


def _format(options: ScheduleOptions) -> Any:
    if options.kind == "parquet":
        return "parquet"
    names = _dataset(options, "csv").schema.names
    text = pyarrow.csv.ConvertOptions(
        column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=True, null_values=[""]
    )
    return pyarrow.dataset.CsvFileFormat(convert_options=text)
