"""Job: stream new messages or events into Parquet files, partitioned by hour.

Spark keeps the position in the checkpoint, and the list of valid files in OUT/_spark_metadata: a restarted run
continues, and readers with Spark see each row of OUT once.
"""

from collections.abc import Callable
from typing import Any

from hadelay.errors import ConfigError
from hadelay.pipeline.jobs import JobSummary, TailOptions
from hadelay.pipeline.schema import given
from hadelay.pipeline.session import check_spark
from hadelay.pipeline.stores import open_store
from hadelay.pipeline.tasks import no_connect

_LOOK_S = 0.5


def run(spark: Any, options: TailOptions, progress: Callable[[JobSummary], bool | None] = lambda _: None) -> JobSummary:
    """Run the stream until it ends. progress: called after each micro-batch; ends the stream if it returns True."""
    if spark is None:
        raise ConfigError("tail needs Spark: set --master, for example local[*]")
    no_connect(spark)
    for option, where in (("--out", options.out), ("--checkpoint", options.checkpoint)):
        check_spark(spark, option, where)
    open_store(options.source).list()  # a store that cannot be read fails here, with a shorter error text than Spark's
    frame = spark.readStream.format("hadelay").options(**given(options.source)).load()
    trigger = {"processingTime": f"{options.every} seconds"} if options.every else {"availableNow": True}
    query = (
        frame.writeStream.format("parquet").partitionBy("hour")
        .option("path", options.out)
        .option("checkpointLocation", options.checkpoint or f"{options.out}/_checkpoint")
        .option("compression", "zstd").trigger(**trigger).start()
    )  # fmt: skip
    summary, told = JobSummary("tail", batches=0, rows=0), -1
    try:
        while True:
            ended = not query.isActive
            for batch in query.recentProgress:
                if batch["batchId"] > told and batch["numInputRows"]:
                    told = batch["batchId"]
                    summary |= {"batches": summary.batches + 1, "rows": summary.rows + batch["numInputRows"]}
                    ended = bool(progress(summary)) or ended
            if ended:
                if (failed := query.exception()) is not None:
                    raise failed
                return summary
            query.awaitTermination(_LOOK_S)
    finally:
        query.stop()
