"""Streams: every row once, in pieces of the size asked for, also when they are ended and started again."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hadelay.errors import BadRequest, ConfigError, Conflict, NotFound
from hadelay.model import hour_from_name
from hadelay.pipeline import schedule, source, tail
from hadelay.pipeline.hourfiles import HourFiles, Listing
from hadelay.pipeline.jobs import JobSummary, ReconcileOptions, TailOptions
from hadelay.pipeline.schedule import ScheduleOptions
from hadelay.pipeline.schema import WriteOptions, parse_options
from tests.pipeline import exact_oracle
from tests.pipeline.support import at_random, message, options, write
from tests.pipeline.test_batches import read

FIRST, SECOND = hour_from_name("2026112018"), hour_from_name("2026112019")
DAY_MS = 86_400_000
GIVEN = parse_options({"path": "/x", "splitRows": "4"})


def listed(*hours: tuple[int, int], at: int = 1) -> Listing:
    """(hour, entries), two events and ten bytes of each."""
    return Listing([HourFiles(hour, n, 2 * n, 10 * n) for hour, n in hours], at)


def ranges(start: source.Offset, end: source.Offset) -> list[tuple[int, int, int]]:
    return [(split.files.hour, split.start, split.stop) for split in source.splits_between(start, end, GIVEN)]


def test_a_stream_takes_as_many_rows_as_it_may_oldest_first_until_nothing_is_new() -> None:
    there = listed((SECOND, 3), (FIRST, 5))
    offsets: list[source.Offset] = [{}]
    while (after := source.advance_offset(offsets[-1], there, GIVEN, 4)) is not offsets[-1]:
        offsets.append(json.loads(json.dumps(after)))
    pieces = [ranges(a, b) for a, b in itertools.pairwise(offsets)]
    assert pieces == [[(FIRST, 0, 4)], [(FIRST, 4, 5), (SECOND, 0, 3)]]
    # All at once it is the same; and what was committed then goes with it.
    whole = source.advance_offset({}, there, GIVEN)
    assert ranges({}, whole) == [(FIRST, 0, 4), (FIRST, 4, 5), (SECOND, 0, 3)]
    assert {split.files for split in source.splits_between({}, whole, GIVEN)} == set(there.hours)
    events = source.advance_offset({}, there, parse_options({"path": "/x", "kind": "events"}))
    assert events["hours"]["2026112018"][0] == 10
    assert list(source.advance_offset({}, there, parse_options({"path": "/x", "hourFrom": "2026112019"}))["hours"]) == [
        "2026112019"
    ]


def test_a_replica_that_is_behind_takes_nothing_back() -> None:
    before = source.advance_offset({}, listed((FIRST, 5), (SECOND, 3), at=7), GIVEN)
    assert source.advance_offset(before, listed((FIRST, 4), at=6), GIVEN) is before
    after = source.advance_offset(before, listed((FIRST, 6), at=6), GIVEN)
    assert ranges(before, after) == [(FIRST, 5, 6)]
    assert (after["asOf"], after["hours"]["2026112019"][0], after["gone"]) == (7, 3, {"2026112019": 7})
    back = source.advance_offset(after, listed((FIRST, 7), (SECOND, 3), at=8), GIVEN)
    assert (ranges(after, back), back["gone"]) == ([(FIRST, 6, 7)], {})


def test_a_deleted_hour_is_forgotten_after_a_day() -> None:
    at = source.advance_offset({}, listed((FIRST, 5), (SECOND, 1)), GIVEN)
    for n, ms in ((2, 1_000), (3, DAY_MS), (4, DAY_MS + 2_000)):
        at = source.advance_offset(at, listed((SECOND, n), at=ms), GIVEN)
        assert ("2026112018" in at["hours"]) == (n < 4)


def test_wrong_options_of_a_stream_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="maxRowsPerTrigger must be 0 or more"):
        parse_options({"path": "/x", "maxRowsPerTrigger": "-1"})
    with pytest.raises(BadRequest, match="must include hour"):
        TailOptions(parse_options({"path": "/x", "columns": "id"}), "out")
    with pytest.raises(ConfigError, match="tail needs Spark"):
        tail.run(None, TailOptions(GIVEN, "out"))
    with pytest.raises(NotFound, match="no such directory"):
        tail.run("a session", TailOptions(parse_options({"path": str(tmp_path / "x")}), "out"))
    world, _ = at_random(4)
    source = write(world, tmp_path / "node")
    for given, said in (
        ({"topics": "nosuch"}, "no topic nosuch"),
        ({"hour_from": 2099010100}, "no hour is in this range"),
    ):
        with pytest.raises(NotFound, match=said):
            tail.run("a session", TailOptions(options(world, source, **given), "out"))


def rows_of(spark: Any, path: Path) -> list[tuple[int, int]]:
    return sorted((row.hour, row.entry) for row in spark.read.parquet(str(path)).where("NOT dead").collect())


def test_the_tail_is_every_row_once_also_after_a_restart(spark: Any, tmp_path: Path) -> None:
    world, _ = at_random(4, 40)
    source, out = write(world, tmp_path / "node"), tmp_path / "out"
    given = options(world, source, columns="hour,dead,entry,topic,body", max_rows_per_trigger=20, dead="false")
    expected = read(given)
    summary = tail.run(spark, TailOptions(given, str(out)))
    assert (summary.rows, summary.batches) == (len(expected), -(-len(expected) // 20))
    assert tail.run(spark, TailOptions(given, str(out))).rows == 0
    # What is filed while it goes on is read when it is there, and only that.
    world.ids(*[message("new", world.now + n, b"%d" % n) for n in range(5)])
    seen: list[int] = []

    def until_it_came(summary: JobSummary) -> bool:
        seen.append(summary.rows)
        return True

    write(world, source)
    tail.run(spark, TailOptions(given, str(out), every=0.1), until_it_came)
    assert seen == [5]
    assert rows_of(spark, out) == sorted((row["hour"], row["entry"]) for row in read(given))
    found = spark.read.parquet(str(out)).where("topic = 'new'").collect()
    assert sorted(bytes(row.body) for row in found) == [b"%d" % n for n in range(5)]


#: Locks the file in its first argument as Java does, and waits.
_HOLD = (
    "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); "
    "print('4711 of there', file=file, flush=True); print(); sys.stdout.flush(); sys.stdin.read()"
)


def test_two_tails_do_not_write_the_same_rows(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = at_random(4, 20)
    given, out = options(world, write(world, tmp_path / "node"), dead="false"), tmp_path / "out"
    lock = out / "_checkpoint" / "hadelay.lock"
    lock.parent.mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", _HOLD, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout
        other.stdout.readline()
        monkeypatch.setattr(tail, "_LOCK_S", 0.1)
        with pytest.raises(Conflict, match=r"another tail writes with .*out/_checkpoint: process 4711 of there"):
            tail.run(spark, TailOptions(given, str(out)))
        other.kill()  # the lock ends with its process, the file stays
    assert tail.run(spark, TailOptions(given, str(out))).rows == len(read(given))
    refused: list[Conflict] = []

    def again(_: JobSummary) -> bool:
        with pytest.raises(Conflict, match=f"process [0-9]+ of {os.uname().nodename}"):
            tail.run(spark, TailOptions(given, str(out)))
        refused.append(Conflict(""))
        return True

    world.ids(message("new", world.now))
    write(world, tmp_path / "node")
    tail.run(spark, TailOptions(given, str(out), every=0.1), again)
    assert len(refused) == 1
    with pytest.raises(Conflict, match=r"rows of another stream, whose position is not in --checkpoint \S+/other:"):
        tail.run(spark, TailOptions(given, str(out), checkpoint=str(tmp_path / "other")))


def test_locations_that_only_spark_reads_and_writes_have_to_be_known_to_spark(spark: Any, tmp_path: Path) -> None:
    world, _ = at_random(3)
    given = options(world, write(world, tmp_path))
    known = "Spark reads and writes this itself, and has no file system for"
    one_key = WriteOptions(endpoint="x", topic="t", key_column="id")
    for uri, said in (
        ("s3://bucket/a.csv?scheme=http", rf"s3://bucket/a.csv: {known} s3://; Hadoop's name for it is s3a://"),
        ("s3a://bucket/a.csv", rf"s3a://bucket/a.csv: {known} s3a:// \(org.apache.hadoop:hadoop-aws\)"),
    ):
        with pytest.raises(ConfigError, match=f"--out {said}"):
            tail.run(spark, TailOptions(given, uri))
        with pytest.raises(ConfigError, match=f"FILE {said}"):
            schedule.run(spark, ScheduleOptions(one_key, uri))
    with pytest.raises(ConfigError, match=f"--archive s3://bucket/a: {known} s3://"):
        exact_oracle.judge(spark, None, None, None, ReconcileOptions(given, archive="s3://bucket/a"))  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"leave out the \? and the options after it"):
        tail.run(spark, TailOptions(given, f"file://{tmp_path}/out?x=1"))
    tail.run(spark, TailOptions(given, f"file://{tmp_path}/out"))
    assert list((tmp_path / "out").glob("hour=*"))
