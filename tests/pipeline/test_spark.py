"""With a real Spark: the data source, and that engines and ways of running agree."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from hadelay import Client
from hadelay.codec.formats import INDEX_SIZE
from hadelay.errors import DamagedFile
from hadelay.pipeline import forecast, lateness, load, reconcile, schedule, session
from hadelay.pipeline.jobs import ForecastOptions, JobOptions, ReconcileOptions
from hadelay.pipeline.schedule import ScheduleOptions
from hadelay.pipeline.schema import WriteOptions
from tests.cli.support import Dev, cluster, hadelay
from tests.ledger.world import START_MS, World
from tests.pipeline import exact_oracle, test_archive, test_archived, test_reconcile
from tests.pipeline.support import HOUR, at_random, one_of_each, options, write
from tests.pipeline.test_batches import NAME, read
from tests.pipeline.test_reconcile import check_one_of_each, judge

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "pipeline.md"
#: To publish for: the tests' clusters go by the clock, and take nothing for years ahead.
DAY = f"{datetime.now(UTC) + timedelta(days=30):%Y-%m-%d}"


def read_from(spark: Any, path: Path, **more: object) -> Any:
    given = {"asOf": START_MS + 6 * HOUR} | more
    return spark.read.format("hadelay").options(path=str(path), **given).load()


def plan(frame: Any) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    world, _ = at_random(1, 60)
    return world, write(world, tmp_path_factory.mktemp("busy"), checkpoint=True)


def test_rows_are_those_of_the_reader(spark: Any, busy: tuple[Any, Path]) -> None:
    world, path = busy
    given = options(world, path, columns="id,hour,entry,topic,deliver_at,state,tags,meta,body", batchRows=7)
    found = read_from(spark, path, columns=given.columns, batchRows=7, splitRows=20, asOf=given.as_of).collect()
    expected = [row | {"meta": dict(row["meta"])} for row in read(given)]
    assert [row.asDict() | {"deliver_at": None, "body": bytes(row.body)} for row in found] == [
        row | {"deliver_at": None} for row in expected
    ]
    assert [row.deliver_at.timestamp() for row in found] == [row["deliver_at"].timestamp() for row in expected]


def test_a_schema_of_ones_own_is_the_projection(spark: Any, busy: tuple[Any, Path]) -> None:
    _, path = busy
    reader = spark.read.format("hadelay").option("path", str(path))
    own = reader.schema("topic STRING, entry BIGINT").load()
    assert own.columns == ["topic", "entry"]
    theirs = read_from(spark, path, columns="topic,entry")
    assert [column.nullable for column in theirs.schema] == [True, False]  # what is never null need not be asked
    assert own.collect() == theirs.collect()
    with pytest.raises(Exception, match="column topic may be null"):
        reader.schema("topic STRING NOT NULL").load().collect()
    with pytest.raises(Exception, match="column topic has the type STRING; the schema asks for int"):
        reader.schema("topic INT").load().collect()
    with pytest.raises(Exception, match="no option colums"):
        read_from(spark, path, colums="topic").collect()


def test_a_session_of_ours_takes_arrow_apart_without_a_check_for_each_value(spark: Any) -> None:
    given = set(spark._jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments())
    assert given >= set(session.JAVA_OPTIONS.split())


def test_a_session_of_ours_keeps_the_collector_that_somebody_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A JVM that is told two does not start."""
    assert "GC" not in session._java_options({"spark.driver.extraJavaOptions": "-Xss4m -XX:+UseG1GC"})
    assert "ParallelGC" in session._java_options({"spark.driver.extraJavaOptions": "-Xss4m"})
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:+UseZGC")
    assert session._java_options({}) == session.JAVA_OPTIONS


def test_a_dataframe_counts_the_same_whatever_was_asked_of_it_before(spark: Any, busy: tuple[Any, Path]) -> None:
    """Spark 4.3 would keep the filters of the first query for the second (ADR 0204)."""
    world, path = busy
    everything = len(read(options(world, path)))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        with pytest.raises(Exception, match="option pushdown: Spark reuses the filters of a query"):
            read_from(spark, path, columns="topic,state", pushdown="true").count()
        frame = read_from(spark, path, columns="topic,state")
        some = frame.where("topic = 'a'").count()
        assert (0 < some < everything, frame.count()) == (True, everything)
        assert read_from(spark, path, columns="topic,state", topics="a").count() == some
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


@pytest.fixture(scope="module")
def each_kind(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, list[int]], Path]:
    world, said = one_of_each()
    return world, said, write(world, tmp_path_factory.mktemp("each"))


@pytest.mark.parametrize("engine", ["fast", "exact"])
def test_one_of_each(spark: Any, engine: str, each_kind: tuple[Any, dict[str, list[int]], Path]) -> None:
    world, said, path = each_kind
    check_one_of_each(judge(world, path, spark, engine), said, path)


def test_both_engines_agree_about_what_happened_at_random(spark: Any, tmp_path: Path) -> None:
    world, _ = at_random(3)
    write(world, tmp_path)
    hours = {"hour_from": 2026112018, "hour_to": 2026112021}
    exact = judge(world, tmp_path, spark, "exact", **hours)
    named = test_reconcile.offending(tmp_path)
    fast = judge(world, tmp_path, **hours)
    assert fast.table == exact.table
    assert fast.messages == exact.messages
    assert test_reconcile.offending(tmp_path) == named != {}


def test_an_hour_without_messages_has_nothing_to_judge(spark: Any, tmp_path: Path) -> None:
    world = World()
    write(world, tmp_path)
    assert read_from(spark, tmp_path).collect() == []
    for engine in ("exact", "fast"):
        summary = judge(world, tmp_path, spark, engine)
        assert (summary.messages, summary.table, summary.failed) == (0, [], False)


@pytest.mark.parametrize("rows", [4, 1_000_000])  # an hour of several parts, each a task, and an hour that is one
def test_tasks_archive_what_one_process_does(spark: Any, tmp_path: Path, rows: int) -> None:
    found = []
    for name, runner in (("here", None), ("spark", spark)):
        world = test_archive.settled(tmp_path / name)
        assert test_archive.run(world, tmp_path / name, runner, splitRows=str(rows)).hours[0]["status"] == "archived"
        found.append(test_archive.contents(tmp_path / name))
    assert found[0] == found[1]


def test_sql_reads_live_and_archived_hours_as_one(spark: Any, tmp_path: Path) -> None:
    world = test_archived.two_hours(tmp_path)
    before = test_reconcile.judge(world, tmp_path, spark, "exact")
    named = test_reconcile.offending(tmp_path)
    given = test_archived.delete_first(world, tmp_path)
    for run in (exact_oracle.run, reconcile.run):
        summary = run(spark, ReconcileOptions(given, **test_archived.where(tmp_path)))
        assert summary.table == before.table
        assert test_reconcile.offending(tmp_path) == named


def test_sql_joins_a_message_with_its_copies_live_and_archived(spark: Any, tmp_path: Path) -> None:
    world = test_archived.fanned_out(tmp_path)
    before = test_reconcile.judge(world, tmp_path, spark, "exact")
    columns = "id,published_id,topic,subscription,state,group,occurrence,forward"
    live = read_from(spark, tmp_path, columns=columns)
    query = """SELECT topic, coalesce(published_id, id) AS published,
        collect_set(subscription || ' ' || state) AS copies FROM {rows} GROUP BY topic, published ORDER BY published"""
    found = [(row.topic, row.copies) for row in spark.sql(query, rows=live).collect()]
    assert found == [("orders", [f"billing {state}"]) for state in ("acked", "cancelled", "acked")]
    given = test_archived.delete_first(world, tmp_path)
    old = spark.read.parquet(str(tmp_path / "archive" / "messages")).selectExpr(*columns.split(","))
    assert [(row.topic, row.copies) for row in spark.sql(query, rows=old).collect()] == found
    assert exact_oracle.run(spark, ReconcileOptions(given, **test_archived.where(tmp_path))).table == before.table


def test_tasks_count_what_one_process_does(spark: Any, busy: tuple[Any, Path]) -> None:
    given = options(*busy)
    wanted = ForecastOptions(given, threshold=1, hours=48)
    for run, asked in ((lateness.run, JobOptions(given)), (load.run, JobOptions(given)), (forecast.run, wanted)):
        found = run(spark, asked)  # type: ignore[arg-type]
        assert found == run(None, asked)  # type: ignore[arg-type]
        assert found.table


def test_a_damaged_entry_is_named_in_a_line_or_left_out(spark: Any, tmp_path: Path) -> None:
    world = test_archive.settled(tmp_path)
    path = tmp_path / "hours" / f"{NAME}.idx"
    data = bytearray(path.read_bytes())
    data[3 * INDEX_SIZE] ^= 1
    path.write_bytes(data)
    asked = {"asOf": options(world, tmp_path).as_of, "columns": "entry", "hourTo": NAME, "verify": "true"}
    with pytest.raises(Exception, match="CRC") as caught:
        read_from(spark, tmp_path, **asked).collect()
    reported = session.plain(caught.value)
    assert isinstance(reported, DamagedFile)
    assert re.fullmatch(rf"\S+{NAME}\.idx.*hour {NAME}, entry 3: the entry's CRC is wrong.*", str(reported))
    left = read_from(spark, tmp_path, onTorn="skip", **asked).collect()
    assert [row.entry for row in left] == [0, 1, 2]  # a copy without a checkpoint ends before what does not verify


def test_engines_agree_about_a_copy_with_damaged_rows(spark: Any, tmp_path: Path) -> None:
    """An entry lost from the index leaves every later one in a place that is not its own."""
    world, _ = one_of_each()
    path = write(world, tmp_path) / "hours" / f"{NAME}.idx"
    data = path.read_bytes()
    path.write_bytes(data[: 3 * INDEX_SIZE] + data[4 * INDEX_SIZE :])
    # With the check both do the same before they begin.
    for run, check in ((reconcile.run, True), (reconcile.run, False), (exact_oracle.run, False)):
        given = ReconcileOptions(options(world, tmp_path), check=check)
        with pytest.raises(Exception, match="entry 4 is at this position") as caught:
            run(spark, given)
        assert f"{NAME}.idx, offset {3 * INDEX_SIZE}: hour {NAME}, entry 3" in str(session.plain(caught.value))
    reported = [judge(world, tmp_path, spark, engine, onTorn="skip", verify="true") for engine in ("fast", "exact")]
    assert reported[0].table == reported[1].table
    assert reported[0].verdicts["orphan"] > 1


def test_a_job_says_one_line_and_java_none(spark: Any, tmp_path: Path) -> None:
    """Also when a task fails. A process of its own: the session of the tests began before."""
    world = test_archive.settled(tmp_path)
    path = tmp_path / "hours" / f"{NAME}.idx"
    data = bytearray(path.read_bytes())
    data[3 * INDEX_SIZE] ^= 1
    path.write_bytes(data)
    words = ("--path", tmp_path, "--as-of", options(world, tmp_path).as_of, "--master", "local[1]", "--no-verify")
    done = hadelay("pipeline", "reconcile", *words, JAVA_TOOL_OPTIONS="-Dx=y")
    assert done.returncode == 1
    assert re.fullmatch(rf"hadelay: \S+{NAME}\.idx, offset 192: .*\n", done.stderr), done.stderr


def test_the_page_shows_what_runs(spark: Any, busy: tuple[Any, Path], capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```pyspark\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    for block in blocks:
        exec(block.replace("/var/lib/hadelay/n1", str(busy[1])), {})
    assert "max(late_ms)" in capsys.readouterr().out


def test_the_doctor_finds_everything(spark: Any) -> None:
    assert [check for check in session.doctor() if not check["ok"]] == []


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    with cluster(tmp_path_factory.mktemp("written")) as running:
        yield running


def fails_once(rows: Iterator[Any]) -> Iterator[Any]:
    """The first attempt of the first task fails when a part of its rows is published."""
    from pyspark import TaskContext

    context = TaskContext.get()
    for n, row in enumerate(rows):
        if n == 1_000 and context.partitionId() == 0 and context.attemptNumber() == 0:
            raise RuntimeError("an executor is lost")
        yield row


@pytest.mark.processes
def test_a_task_that_runs_again_publishes_nothing_twice(spark: Any, dev: Dev, tmp_path: Path) -> None:
    count = 3_000
    due = datetime.fromisoformat(f"{DAY}T00:00:00Z")
    rows = [
        (f"row {n}", "no topic!" if n == 7 else "written", due + timedelta(seconds=n), f"{n}", ["a"], {"n": f"{n}"})
        for n in range(count)
    ]
    schema = (
        "idempotency_key STRING, topic STRING, deliver_at TIMESTAMP, body STRING, tags ARRAY<STRING>, "
        "meta MAP<STRING,STRING>"
    )
    lines = spark.sparkContext.parallelize(rows, 2)
    frame, failing = (spark.createDataFrame(given, schema) for given in (lines, lines.mapPartitions(fails_once)))
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "400")
    try:
        writer = failing.write.format("hadelay").option("endpoint", dev.servers).mode("append")
        writer.option("rejected", str(tmp_path / "aside")).save()
        with Client(dev.servers) as client:
            assert client.topic("written").scheduled == count - 1
            last = list(client.messages("written"))[-1]
            found = client.get(last.id, body=True)
            assert (found.body, found.tags, found.meta) == (b"%d" % (count - 1), ["a"], {"n": str(count - 1)})
        (row,) = spark.read.parquet(str(tmp_path / "aside")).collect()
        assert (row.idempotency_key, "topic" in row.reason) == ("row 7", True)
        # Written again, it is known; and without a place for what is rejected, the write says so.
        with pytest.raises(Exception, match=r"1 of 3,000 rows were rejected, 1 of them: .*the others are published"):
            frame.write.format("hadelay").option("endpoint", dev.servers).mode("append").save()
        with Client(dev.servers) as client:
            assert client.topic("written").scheduled == count - 1
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")


def test_a_job_that_cannot_write_is_refused_before_it_begins(spark: Any) -> None:
    frame = spark.range(1).selectExpr("id AS idempotency_key", "'t' AS topic", "id AS delver_at", "'1h' AS delay")
    writer = frame.write.format("hadelay").option("endpoint", "http://127.0.0.1:1")
    with pytest.raises(Exception, match="column delver_at is not a message field"):
        writer.mode("append").save()
    with pytest.raises(Exception, match="cannot be overwritten"):
        writer.mode("overwrite").save()


@pytest.mark.processes
def test_tasks_schedule_a_table(spark: Any, dev: Dev, tmp_path: Path) -> None:
    rows = spark.range(500).selectExpr("id AS n", f"'{DAY}T00:00:00Z' AS deliver_at", "'x' AS body")
    rows.write.parquet(str(tmp_path / "table"))
    write = WriteOptions(dev.servers, topic="tasks", key_column="n", key_prefix="tasks:")
    given = ScheduleOptions(write, str(tmp_path / "table"), "parquet")
    for published in (500, 0):
        done = schedule.run(spark, given)
        assert (done.rows, done.published, done.duplicates) == (500, published, 500 - published)
    with Client(dev.servers) as client:
        assert client.topic("tasks").scheduled == 500


@pytest.mark.processes
def test_a_stream_publishes_each_row_once(spark: Any, busy: tuple[Any, Path], dev: Dev, tmp_path: Path) -> None:
    world, path = busy
    given = options(world, path, columns="hour,dead,entry")
    count = len(read(given))
    stream = spark.readStream.format("hadelay").options(path=str(path), columns=given.columns).load()
    rows = stream.selectExpr(
        "concat(hour, dead, entry) AS idempotency_key",
        "IF(entry = 0, 'no topic!', 'streamed') AS topic",
        "'1h' AS delay",
    )

    def published(checkpoint: str, **more: str) -> None:
        writer = rows.writeStream.format("hadelay").options(endpoint=dev.servers, **more).outputMode("append")
        writer.trigger(availableNow=True).option(
            "checkpointLocation", str(tmp_path / checkpoint)
        ).start().awaitTermination()

    with pytest.raises(Exception, match="a stream needs the option rejected"):
        published("refused")
    aside, reported = tmp_path / "aside", tmp_path / "told"
    refused = sum(row["entry"] == 0 for row in read(given))
    for checkpoint, new in (("one", count - refused), ("one", None), ("two", 0)):
        reported.unlink(missing_ok=True)
        published(checkpoint, rejected=str(aside), summary=str(reported))
        if new is None:  # the checkpoint knows that all was sent
            assert not reported.exists()
        else:
            found = json.loads(reported.read_text())
            assert (found["rows"], found["published"], found["rejected"]) == (count, new, refused)
    with Client(dev.servers) as client:
        assert client.topic("streamed").scheduled == count - refused
    names = sorted(path.name for path in aside.iterdir())
    assert len(names) == len(set(names)) >= 2
    assert all(re.fullmatch(r"[0-9a-f-]{36}-000000-\d{5}\.parquet", name) for name in names)
