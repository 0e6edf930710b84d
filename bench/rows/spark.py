"""The pipeline, on an hour of five million messages of 200 bytes, all delivered; beside pyarrow, and a plain client."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.cluster import Void
from bench.result import Row, Setup, Target
from bench.wrk_run import Missing
from hadelay import Client, Put
from hadelay.codec.checksums import crc32c
from hadelay.codec.formats import (
    CONSUMER,
    DISPATCH,
    INDEX,
    NODE,
    RECORD,
    RECORD_MAGIC,
    RECORD_SIZE,
    RECORD_VERSION,
    TOPIC,
)
from hadelay.codec.linking import DISPATCH_CRC, INDEX_CRC
from hadelay.codec.meta import Meta, pack
from hadelay.errors import ConfigError
from hadelay.model import HOUR_MS, NONE32, Event, hour_name
from hadelay.storage.names import encode_name

_TOPICS, _CONSUMERS = 20, 8
#: 200 bytes, of which a 0 stands for a digit of its own in every message.
_TEMPLATE = (
    b'{"order":"00000000","customer":"000000","total":"0000.00","currency":"EUR","action":"cancel_unpaid",'
    b'"items":[{"sku":"A-00000","qty":2}],"shop":"example-00","trace":"000000000000000000000","version":1}'
)
_BODY = len(_TEMPLATE)
_INDEX_COLUMNS = "first_id,hour,entry,topic,deliver_at,attempt,flags,tag_mask,size"


def pipeline(setup: Setup) -> list[Row]:
    try:
        from hadelay.pipeline.session import session

        spark = session("local[2]", "2g", **{"spark.sql.shuffle.partitions": "4"})
    except (ConfigError, ImportError) as error:
        raise Missing(f"the pipeline: {error}") from None
    try:
        setup.say("spark, writing the hour")
        data = setup.directory / "node"
        count = setup.many(5_000_000, 100_000)
        listed = write_hour(data, count)
        rows = [_hour(setup, spark, data, listed)]
        # What fails takes only its own figures along.
        for name, part in (("spark exact", partial(_exact, data, listed)), ("spark publish", _published)):
            try:
                rows.append(part(setup, spark))
            except Exception as error:
                rows.append(Row(name, "failed", [], notes=[f"VOID: {type(error).__name__}: {error}"]))
        return rows
    finally:
        spark.stop()
        shutil.rmtree(setup.directory / "node", ignore_errors=True)


def write_hour(directory: Path, count: int) -> Any:
    """The files of an hour that is over, each message handed out and acked; the Listing that a checkpoint would give.
    The CRCs of rows and files are right, those of records are not: nothing here looks at them."""
    from hadelay.pipeline.hourfiles import HourFiles, Listing

    hour = int(time.time() * 1000) // HOUR_MS - 3
    meta = np.frombuffer(pack(Meta()), np.uint8)
    size = RECORD_SIZE + len(meta) + _BODY
    (directory / "hours").mkdir(parents=True)
    number = np.arange(count, dtype=np.uint64)
    due = hour * HOUR_MS + (number * np.uint64(HOUR_MS) // np.uint64(count)).astype(np.int64)

    index = np.zeros(count, INDEX)
    index["offset"], index["size"], index["index"] = number * np.uint64(size), size, number
    index["first_id"], index["deliver_at_ms"] = np.uint64(hour << 32) | number, due
    index["topic"], index["pre"] = number % np.uint64(_TOPICS), NONE32
    index["second"] = (due - hour * HOUR_MS) // 1000
    INDEX_CRC.seal(index)

    events = np.zeros(2 * count, DISPATCH)
    events["index"], events["attempt"], events["other_hour"] = np.repeat(number, 2), 1, NONE32
    events["event"], events["at_ms"] = np.tile([Event.LEASED, Event.ACKED], count), np.repeat(due, 2) + 5
    events["consumer"], events["node"] = events["index"] % _CONSUMERS, 0
    events["previous"] = np.where(np.arange(2 * count) % 2, np.arange(2 * count) - 1, NONE32)
    DISPATCH_CRC.seal(events)

    stem = f"{directory}/hours/{hour_name(hour)}"
    crcs = [0, 0, 0]
    random, template = np.random.default_rng(1), np.frombuffer(_TEMPLATE, np.uint8)
    digits = np.flatnonzero(template == ord("0"))
    with open(f"{stem}.log", "wb") as log:
        for at in range(0, count, 1 << 16):
            part = slice(at, min(at + (1 << 16), count))
            n = part.stop - part.start
            heads = np.zeros(n, RECORD)
            heads["magic"], heads["version"], heads["topic"] = RECORD_MAGIC, RECORD_VERSION, index["topic"][part]
            heads["meta_size"], heads["body_size"] = len(meta), _BODY
            heads["first_id"], heads["deliver_at_ms"] = index["first_id"][part], due[part]
            heads["published_at_ms"] = due[part] - 60_000
            bodies = np.tile(template, (n, 1))
            bodies[:, digits] = random.integers(ord("0"), ord("9") + 1, (n, len(digits)), np.uint8)
            records = np.concatenate([heads.view(np.uint8).reshape(n, -1), np.tile(meta, (n, 1)), bodies], axis=1)
            data = records.tobytes()
            crcs[0] = crc32c(data, crcs[0])
            log.write(data)
    for place, suffix, rows in ((1, "idx", index), (2, "dsp", events)):
        crcs[place] = crc32c(rows.tobytes())
        rows.tofile(f"{stem}.{suffix}")
    _write_names(directory / "names")
    os.sync()  # nothing of this is written while something else is measured
    files = HourFiles(hour, count, 2 * count, count * size, (crcs[0], crcs[1], crcs[2]))
    return Listing([files], (hour + 3) * HOUR_MS)


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    found = work()
    return time.perf_counter() - began, found


def _write_names(path: Path) -> None:
    with path.open("wb") as names:
        for kind, many in ((TOPIC, _TOPICS), (CONSUMER, _CONSUMERS), (NODE, 3)):
            for named in range(many):
                names.write(encode_name(kind, named, f"t{named}"))


def _scans(spark: Any, options: Any, count: int, gigabytes: float) -> list[tuple[str, float, str, Callable[[], None]]]:
    """Name, size, unit and function of each scan of the hour."""

    def rows(columns: str, topics: str = "") -> Any:
        known = {"path": options.path, "listing": options.listing, "verify": "false"}
        reader = spark.read.format("hadelay").options(columns=columns, **known)
        return reader.option("topics", topics).load()

    def index_columns() -> None:
        _right(_one(rows(_INDEX_COLUMNS), "sum(size)") > count * _BODY, "bytes of records")

    def by_topic() -> None:
        _right(len(rows(_INDEX_COLUMNS).groupBy("topic").sum("size").collect()) == _TOPICS, "topics")

    def bodies() -> None:
        _right(_one(rows("body"), "sum(length(body))") == count * _BODY, "bytes of bodies")

    def a_topic(topics: str) -> None:
        of_one = rows("topic,entry,body", topics).where("topic = 't7'")
        _right(_one(of_one, "count(body)") == len(range(7, count, _TOPICS)), "rows of a topic")

    return [
        ("index columns", count, "/s", index_columns),
        ("index columns, by topic", count, "/s", by_topic),
        ("with bodies", gigabytes, "GB/s", bodies),
        ("a topic, by where", count, "/s", partial(a_topic, "")),
        ("a topic, of the reader", count, "/s", partial(a_topic, "t7")),
    ]


def _hour(setup: Setup, spark: Any, data: Path, listed: Any) -> Row:
    from hadelay.pipeline import archive
    from hadelay.pipeline.jobs import ArchiveOptions
    from hadelay.pipeline.schema import Options

    row = Row(
        "spark",
        "an hour of 5 million delivered messages of 200 bytes; local[2], 2 GB heap",
        [
            Target("index columns", 5e6), Target("with bodies", 0.8), Target("archive against pyarrow", 1.3),
            Target("reconciled", 5e6), Target("a topic, by option", 3.0),
        ],
    )  # fmt: skip
    count, out = listed.hours[0].entries, setup.directory / "archive"
    options = Options(path=str(data), listing=listed.encode(), verify=False)
    gigabytes = (count * INDEX.itemsize + listed.hours[0].log_bytes) / 1e9

    scans = _scans(spark, options, count, gigabytes)
    setup.say("spark, warming up: the JVM compiles what runs often")
    for _ in range(setup.many(3, 1)):
        for _, _, _, scan in scans:
            scan()
    for _ in setup.each_round("spark"):
        for figure, size, unit, scan in scans:
            took, _ = _timed(scan)
            row.add(figure, size / took, unit)

        shutil.rmtree(out, ignore_errors=True)
        took, summary = _timed(lambda: archive.run(spark, ArchiveOptions(options, str(out))))
        _right(summary.hours[0]["status"] == "archived", "archived hours")
        row.add("archive", count / took, "/s")
        row.add("pyarrow on one thread", count / _pyarrow(options, listed, setup.directory), "/s")

        took, summary = _timed(lambda: _judged(spark, data, listed, "fast"))
        _right(summary.verdicts["ok"] == count, "messages that are ok")
        row.add("reconciled", count / took, "/s")
    row.ratio("archive against pyarrow", "archive", "pyarrow on one thread")
    row.ratio("a topic, by option", "a topic, of the reader", "a topic, by where")
    return row


def _exact(data: Path, listed: Any, setup: Setup, spark: Any) -> Row:
    """Once: it is there to agree."""
    row = Row("spark exact", "the same reconciled by one SQL query, which has to agree", [])
    setup.say("spark exact")
    took, exact = _timed(lambda: _judged(spark, data, listed, "exact"))
    _right(exact.table == _judged(spark, data, listed, "fast").table, "agreement of the engines")
    row.add("reconciled by SQL", listed.hours[0].entries / took, "/s")
    return row


def _judged(spark: Any, data: Path, listed: Any, engine: str) -> Any:
    from hadelay.pipeline import reconcile
    from hadelay.pipeline.jobs import ReconcileOptions
    from hadelay.pipeline.schema import Options
    from tests.pipeline import exact_oracle

    run = exact_oracle.run if engine == "exact" else reconcile.run
    return run(spark, ReconcileOptions(Options(path=str(data), listing=listed.encode(), verify=False)))


def _one(frame: Any, expression: str) -> Any:
    return frame.selectExpr(expression).collect()[0][0]


def _right(found: bool, what: str) -> None:
    if not found:
        raise Void(f"wrong: {what}")


def _pyarrow(options: Any, listed: Any, directory: Path) -> float:
    """Seconds to write what the archive has from memory, to one file of each kind; with the same level."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hadelay.pipeline import batches
    from hadelay.pipeline.schema import KINDS
    from hadelay.pipeline.stores import open_store

    store, took = open_store(options), 0.0
    for kind in ("messages", "events"):
        columns = [name for name in KINDS[kind] if name not in ("hour", "dead")]
        given = replace(options, kind=kind)
        parts = [part for split in batches.splits(listed, given) for part in batches.read(store, given, columns, split)]
        table = pa.Table.from_batches(parts)
        path = directory / "plain.parquet"
        took += _timed(lambda t=table, p=path: pq.write_table(t, p, compression="zstd", compression_level=3))[0]  # type: ignore[misc]
        path.unlink()
    return took


def _published(setup: Setup, spark: Any) -> Row:
    """Rows of a DataFrame into a cluster, beside the client alone, with keys both."""
    row = Row(
        "spark publish", "rows of a DataFrame into a cluster of three, each with a key",
        [Target("against the client", 0.5)],
    )  # fmt: skip
    count = setup.many(200_000, 5_000)
    for _ in setup.each_round("spark publish"):
        with setup.cluster() as cluster:
            servers = ",".join(node.http for node in cluster.nodes)
            body = "x" * _BODY
            frame = spark.range(count).selectExpr(
                "id AS idempotency_key", "'spark' AS topic", f"'{body}' AS body", "'2h' AS delay"
            )
            writer = frame.write.format("hadelay").options(endpoint=servers, keyPrefix="spark:").mode("append")
            with Client(servers) as client:
                puts = (Put(topic="plain", body=body, delay="2h", idempotency_key=f"plain:{n}") for n in range(count))
                took, _ = _timed(lambda c=client, p=puts: c.put_many(p))  # type: ignore[misc]
                row.add("client", count / took, "/s")
                took, _ = _timed(writer.save)
                row.add("spark", count / took, "/s")
                for topic in ("plain", "spark"):
                    _right(client.topic(topic).scheduled == count, f"messages of {topic}")
    row.ratio("against the client", "spark", "client")
    return row
