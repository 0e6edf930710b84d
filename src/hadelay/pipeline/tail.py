"""What is filed, as it is: a stream of messages or events into Parquet, partitioned by hour.

Spark keeps in the checkpoint how far it is, and in OUT/_spark_metadata which files count: a run that is ended goes on
where it was, and reading OUT with Spark sees every row once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hadelay.errors import BadRequest, ConfigError
from hadelay.pipeline.places import check_spark
from hadelay.pipeline.schema import Options, given
from hadelay.pipeline.stores import open_store
from hadelay.pipeline.tasks import no_connect

_LOOK_S = 0.5


@dataclass(frozen=True)
class TailOptions:
    source: Options
    #: Directory that every task can write to, or a URI of a file system that Spark has (Hadoop's: s3a://, hdfs://).
    out: str
    #: Where the stream remembers how far it is; OUT/_checkpoint without it.
    checkpoint: str = ""
    #: Seconds between micro-batches; 0: read what is there, and end.
    every_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.out:
            raise BadRequest("tail: out has to say where to")
        if self.every_s < 0:
            raise BadRequest("tail: every is 0 or more")
        if "hour" not in self.source.projection():
            raise BadRequest("tail: the columns have to include hour, by which the files are partitioned")


@dataclass
class Summary:
    batches: int = 0
    rows: int = 0


def run(spark: Any, options: TailOptions, progress: Callable[[Summary], bool | None] = lambda _: None) -> Summary:
    """progress: called after each micro-batch; True ends it."""
    if spark is None:
        raise ConfigError("tail is a stream of Spark: it needs a master, such as local[*]")
    no_connect(spark)
    for option, where in (("--out", options.out), ("--checkpoint", options.checkpoint)):
        check_spark(spark, option, where)
    open_store(options.source).list()  # what is wrong with it is said here in fewer words
    frame = spark.readStream.format("hadelay").options(**given(options.source)).load()
    trigger = {"processingTime": f"{options.every_s} seconds"} if options.every_s else {"availableNow": True}
    query = (
        frame.writeStream.format("parquet").partitionBy("hour")
        .option("path", options.out)
        .option("checkpointLocation", options.checkpoint or f"{options.out}/_checkpoint")
        .option("compression", "zstd").trigger(**trigger).start()
    )  # fmt: skip
    summary, told = Summary(), -1
    try:
        while True:
            ended = not query.isActive
            for batch in query.recentProgress:
                if batch["batchId"] > told and batch["numInputRows"]:
                    told = batch["batchId"]
                    summary.batches, summary.rows = summary.batches + 1, summary.rows + batch["numInputRows"]
                    ended = bool(progress(summary)) or ended
            if ended:
                if (failed := query.exception()) is not None:
                    raise failed
                return summary
            query.awaitTermination(_LOOK_S)
    finally:
        query.stop()
