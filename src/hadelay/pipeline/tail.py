"""Job: stream new messages or events into Parquet files, partitioned by hour.

Spark keeps the position in the checkpoint, and the list of valid files in OUT/_spark_metadata: a restarted run
continues, and readers with Spark see each row of OUT once.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hadelay.errors import ConfigError, Conflict
from hadelay.pipeline.jobs import JobSummary, TailOptions
from hadelay.pipeline.schema import given
from hadelay.pipeline.session import check_spark
from hadelay.pipeline.stores import listing, open_store, refuse_empty
from hadelay.pipeline.tasks import no_connect

_LOOK_S = 0.5
#: Timeout of the lock, in seconds. A killed command leaves its Spark to end by itself, which takes a second or two.
_LOCK_S = 30.0
_LOCK = "hadelay.lock"


def run(spark: Any, options: TailOptions, progress: Callable[[JobSummary], bool | None] = lambda _: None) -> JobSummary:
    """Run the stream until it ends. progress: called after each micro-batch; ends the stream if it returns True."""
    if spark is None:
        raise ConfigError("tail needs Spark: set --master, for example local[*]")
    no_connect(spark)
    for option, where in (("--out", options.out), ("--checkpoint", options.checkpoint)):
        check_spark(spark, option, where)
    store = open_store(options.source)
    # List the files here, because the error for an unreadable store is shorter than Spark's error.
    found = listing(store, options.source)
    if not options.every:  # with `every`, the stream runs on, and may wait for hours and topics that do not exist yet
        refuse_empty(options.source, found, store.names())
    checkpoint = options.checkpoint or f"{options.out}/_checkpoint"
    _check_position(spark, options.out, checkpoint)
    with _locked(spark, checkpoint), _ending() as ending:
        frame = spark.readStream.format("hadelay").options(**given(options.source)).load()
        trigger = {"processingTime": f"{options.every} seconds"} if options.every else {"availableNow": True}
        query = (
            frame.writeStream.format("parquet")
            .partitionBy("hour")
            .option("path", options.out)
            .option("checkpointLocation", checkpoint)
            .option("compression", "zstd")
            .trigger(**trigger)
            .start()
        )
        try:
            return _follow(query, lambda summary: ending.is_set() or progress(summary), ending)
        finally:
            query.stop()


def _follow(query: Any, progress: Callable[[JobSummary], bool | None], ending: threading.Event) -> JobSummary:
    """Wait until the query ends, `progress` returns True after a micro-batch, or `ending` is set."""
    summary, newest = JobSummary("tail", batches=0, rows=0), -1
    while True:
        ended = not query.isActive or ending.is_set()
        for batch in query.recentProgress:
            if batch["batchId"] > newest and batch["numInputRows"]:
                newest = batch["batchId"]
                summary |= {"batches": summary.batches + 1, "rows": summary.rows + batch["numInputRows"]}
                ended = bool(progress(summary)) or ended
        if ended:
            if (failed := query.exception()) is not None:
                raise failed
            return summary
        query.awaitTermination(_LOOK_S)


@contextmanager
def _ending() -> Iterator[threading.Event]:
    """Provide an event that SIGINT and SIGTERM set, so that the stream ends between two calls of Spark. A second signal
    ends the command at once. Threads other than the main one get no signals."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def end(number: int, frame: object) -> None:
        event.set()
        signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _local(spark: Any, where: str) -> str | None:
    """Local path of a directory, as Spark understands its name; None if it is in an object store or the like."""
    path = spark._jvm.org.apache.hadoop.fs.Path(where)
    uri = path.getFileSystem(spark._jsc.hadoopConfiguration()).makeQualified(path).toUri()
    return str(uri.getPath()) if uri.getScheme() == "file" else None


def _check_position(spark: Any, out: str, checkpoint: str) -> None:
    """Raise Conflict if the target has rows of a stream whose position is elsewhere: Spark would silently pass over as
    many micro-batches as that stream wrote."""
    target, position = _local(spark, out), _local(spark, checkpoint)
    if target is None or position is None or not os.path.isdir(f"{target}/_spark_metadata"):
        return
    if not os.path.exists(f"{position}/metadata"):
        raise Conflict(
            f"--out {out} has the rows of another stream, whose position is not in --checkpoint {checkpoint}: name the "
            "checkpoint of that stream, or another target"
        )


@contextmanager
def _locked(spark: Any, checkpoint: str) -> Iterator[None]:
    """Hold a lock on the stream's position: two streams would write the same rows. Raises Conflict if another process
    holds the lock.

    Spark's process has the lock, since it writes the rows: it outlives this one if that is killed, and the operating
    system releases the lock when it ends. In object stores, Spark itself notices a second stream, at its next
    micro-batch."""
    if (directory := _local(spark, checkpoint)) is None:
        yield
        return
    os.makedirs(directory, exist_ok=True)
    path, jvm = f"{directory}/{_LOCK}", spark._jvm
    file = jvm.java.io.RandomAccessFile(path, "rw")
    try:
        deadline = time.monotonic() + _LOCK_S
        while not _lock(file.getChannel()):
            if time.monotonic() >= deadline:
                with open(path, encoding="utf-8", errors="replace") as lock:
                    who = lock.read(100).strip() or "unknown"
                raise Conflict(
                    f"another tail writes with the position {checkpoint}: process {who}. End that process, or name "
                    "another --checkpoint and --out"
                )
            time.sleep(_LOOK_S)
        file.setLength(0)
        file.writeBytes(f"{jvm.java.lang.ProcessHandle.current().pid()} of {os.uname().nodename}\n")
        yield
    finally:
        file.close()


def _lock(channel: Any) -> bool:
    try:
        return channel.tryLock() is not None
    except Exception as error:
        if "OverlappingFileLockException" in str(error):  # another stream of this process has the lock
            return False
        raise
