"""Publish a table's rows as messages: CSV or Parquet, one file or a directory, with or without Spark.

Columns with the name of a message's field are used, others are ignored; `columns` maps fields to columns with other
names. All values of CSV are text; a row with an unreadable value is rejected.
"""

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
from hadelay.pipeline.publish import RowTotals, publish
from hadelay.pipeline.schema import PUBLISHED, WriteOptions, given
from hadelay.pipeline.session import check_spark
from hadelay.pipeline.tasks import cores
from hadelay.storage.locations import filesystem


@dataclass(frozen=True)
class ScheduleOptions:
    #: Options of publishing, as for the Spark writer; key_column names a column of the table.
    write: WriteOptions
    #: Path or URI of the table: a file, or a directory of files of one format.
    table: str
    #: Format of the table, csv or parquet; default: the file's extension.
    format: str = ""
    #: Columns whose name differs from the message field: field=column, separated by commas.
    columns: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("csv", "parquet"):
            raise BadRequest(f"{self.table}: say whether it is csv or parquet (--format)")
        for field in self.renamed:
            if field not in PUBLISHED:
                raise BadRequest(f"columns: {field!r} is not a message field; choose from: {', '.join(PUBLISHED)}")
        if not uris.is_uri(self.table) and not os.path.exists(self.table):
            raise NotFound(f"{self.table}: no such file or directory")

    @property
    def kind(self) -> str:
        path = self.table.partition("?")[0] if uris.is_uri(self.table) else self.table
        return self.format or path.rpartition(".")[2].lower()

    @property
    def renamed(self) -> dict[str, str]:
        """Message field → table column, for columns with another name than the field."""
        pairs = (part.partition("=") for part in self.columns.split(",") if part.strip())
        return {field.strip(): column.strip() for field, _, column in pairs}

    def taken(self, there: list[str]) -> list[tuple[str, str]]:
        """Columns to read: (name in the table, name for the writer). Raises BadRequest for a missing column."""
        fields = self.renamed
        fields |= {name: name for name in there if name in PUBLISHED and name not in fields}
        fields.setdefault(self.write.key_column, self.write.key_column)
        if missing := [column for column in fields.values() if column not in there]:
            raise BadRequest(f"{self.table} has no column {missing[0]}; there are {', '.join(there)}")
        return [(column, field) for field, column in fields.items()]


def run(spark: Any, options: ScheduleOptions, progress: Callable[[RowTotals], None] = lambda _: None) -> RowTotals:
    """Publish the rows of the table. spark: a session, or None to run in this process; progress is called only without
    Spark."""
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
            return RowTotals(**json.load(file))


def count(options: ScheduleOptions) -> int | None:
    """Number of rows of the table; None for CSV: counting would read the whole file."""
    if options.kind == "csv":
        return None
    with _arrow_errors(options):
        return int(_dataset(options, "parquet").count_rows())


def batches(options: ScheduleOptions) -> Iterator[pa.RecordBatch]:
    with _arrow_errors(options):
        dataset = _dataset(options, options.kind)
        if options.kind == "csv":
            text = pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(dataset.schema.names, pa.string()),
                strings_can_be_null=True,
                null_values=[""],
            )
            dataset = _dataset(options, pyarrow.dataset.CsvFileFormat(convert_options=text))
        taken = options.taken(dataset.schema.names)
        for batch in dataset.to_batches(columns=[column for column, _ in taken]):
            yield pa.RecordBatch.from_arrays(batch.columns, names=[name for _, name in taken])


def _dataset(options: ScheduleOptions, format: Any) -> Any:
    there, path = filesystem(options.table) if uris.is_uri(options.table) else (None, options.table)
    return pyarrow.dataset.dataset(path, filesystem=there, format=format)


@contextmanager
def _arrow_errors(options: ScheduleOptions) -> Iterator[None]:
    """Raise errors of pyarrow as BadRequest."""
    try:
        yield
    except pa.ArrowInvalid as error:
        raise BadRequest(f"{options.table} cannot be read as {options.kind}: {error}") from None
