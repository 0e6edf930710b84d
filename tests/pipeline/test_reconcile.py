"""A verdict per message, whatever became of it, and wherever it went."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest

from hadelay.codec.commandtypes import Job
from hadelay.errors import BadRequest
from hadelay.model import encode_id
from hadelay.pipeline import archive, lateness, tail
from hadelay.pipeline.jobs import VERDICTS, ArchiveOptions, JobOptions, JobSummary, ReconcileOptions, TailOptions
from hadelay.pipeline.reconcile import run
from tests.cli.support import hadelay
from tests.ledger.world import START_HOUR, START_MS, World
from tests.pipeline import exact_oracle
from tests.pipeline.support import HOUR, at_random, message, one_of_each, options, write


def judge(world: Any, directory: Path, spark: Any = None, engine: str = "fast", **source: Any) -> JobSummary:
    out = directory / "out"
    chosen = exact_oracle.run if engine == "exact" else run
    return chosen(spark, ReconcileOptions(options(world, directory, **source), out=str(out)))


def offending(directory: Path) -> dict[str, set[str | None]]:
    found: dict[str, set[str | None]] = {}
    for row in pq.read_table(directory / "out" / "offending.parquet").to_pylist():
        found.setdefault(row["verdict"], set()).add(row["id"])
    return found


def check_one_of_each(summary: JobSummary, said: dict[str, list[int]], directory: Path) -> None:
    assert summary.verdicts == {name: len(said.get(name, ())) for name in VERDICTS} | {"orphan": 1}
    assert summary.messages == sum(map(len, said.values()))
    named: dict[str, set[str | None]] = {
        name: set(map(encode_id, said[name])) for name in ("undelivered", "duplicate", "early", "late", "unacked")
    }
    assert offending(directory) == named | {"orphan": {None}}
    assert summary.failed
    assert json.loads((directory / "out" / "summary.json").read_text())["verdicts"] == summary.verdicts


def test_one_of_each(tmp_path: Path) -> None:
    world, said = one_of_each()
    check_one_of_each(judge(world, write(world, tmp_path)), said, tmp_path)


def test_a_large_hour_is_judged_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No task sends more than a few of the rows that it judged: an executor had 10 million of them in one answer."""
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install 'hadelay[spark]'")
    monkeypatch.setattr("hadelay.pipeline.reconcile._ROWS_AT_ONCE", 2)
    monkeypatch.setattr("hadelay.pipeline.reconcile._SENT_AT_ONCE", 3)
    _Tasks.parts.clear()
    world, said = one_of_each()
    context = SimpleNamespace(
        defaultParallelism=50, parallelize=lambda items, _: _Tasks(items), union=lambda some: _Tasks(chain(*some))
    )
    summary = judge(world, write(world, tmp_path), SimpleNamespace(sparkContext=context), splitRows=3)
    check_one_of_each(summary, said, tmp_path)
    assert set(_Tasks.parts) == {-(-summary.offending // 3)}


class _Tasks(list[Any]):
    """Of Spark, what runs tasks; one after the other, each with what came out of a pickle. parts: asked for."""

    parts: ClassVar[list[int]] = []

    def map(self, work: Callable[[Any], Any]) -> _Tasks:
        return _Tasks(pickle.loads(pickle.dumps(work))(item) for item in self)

    def flatMap(self, work: Callable[[Any], Any]) -> _Tasks:
        return _Tasks(chain(*self.map(work)))

    def partitionBy(self, groups: int) -> _Tasks:
        return _Tasks([pair for pair in self if pair[0] == group] for group in range(groups))

    def mapPartitions(self, work: Callable[[Any], Any]) -> _Tasks:
        return _Tasks(chain(*map(work, self)))

    def repartition(self, parts: int) -> _Tasks:
        self.parts.append(parts)
        return self

    def collect(self) -> list[Any]:
        return self

    def persist(self, _: Any) -> _Tasks:
        return self

    def unpersist(self) -> None:
        self.clear()

    def toLocalIterator(self) -> Iterator[Any]:
        return iter(self)


def test_a_job_says_how_far_it_is(tmp_path: Path) -> None:
    world, _ = one_of_each()
    reported: list[tuple[int, int]] = []
    given = ReconcileOptions(options(world, write(world, tmp_path)))
    run(None, given, lambda done, total: reported.append((done, total)))
    assert reported[0][0] == 1
    assert reported[-1][0] == reported[-1][1] == len(reported) == 4 * 7  # three files and a verdict of each hour


def test_a_session_of_spark_connect_is_refused_in_words(tmp_path: Path) -> None:
    world, _ = one_of_each()
    kind = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})
    given = options(world, write(world, tmp_path))
    jobs: list[Callable[[], Any]] = [
        lambda: run(kind(), ReconcileOptions(given)),
        lambda: exact_oracle.run(kind(), ReconcileOptions(given, check=False)),
        lambda: archive.run(kind(), ArchiveOptions(given, str(tmp_path / "out"))),
        lambda: lateness.run(kind(), JobOptions(given)),
        lambda: tail.run(kind(), TailOptions(replace(given, columns="hour"), str(tmp_path / "out"))),
    ]
    for job in jobs:
        with pytest.raises(BadRequest, match=r"a Spark Connect session cannot run this job.*use a classic session"):
            job()


def test_hours_are_those_in_which_messages_were_first_filed(tmp_path: Path) -> None:
    world, said = one_of_each()
    write(world, tmp_path)
    everything = judge(world, tmp_path)
    first = judge(world, tmp_path, hour_from=2026112018, hour_to=2026112018)
    assert first.table == [row for row in everything.table if row["hour"] == 2026112018]
    assert sum(row["count"] for row in first.table) == sum(map(len, said.values())) - 3 + 1
    assert judge(world, tmp_path, hour_from=2026112019, hour_to=2026112020).table == []


def test_a_message_whose_hour_was_deleted_is_gone_and_one_whose_hour_is_missing_is_lost(tmp_path: Path) -> None:
    world, said = one_of_each()
    write(world, tmp_path)
    # What was not delivered was carried to the next hour, which could have been deleted by now, but not two hours ago.
    carried = len(said["undelivered"]) + 1
    for path in (tmp_path / "hours").glob("2026112019.*"):
        path.unlink()
    assert judge(world, tmp_path).verdicts["gone"] == carried
    early = judge(world, tmp_path, as_of=START_MS + 3 * 3_600_000)
    assert (early.verdicts["gone"], early.verdicts["undelivered"]) == (0, carried)


def test_nothing_is_lost_at_random(tmp_path: Path) -> None:
    """What the state machine did is never undelivered, early or an orphan; and every message has one verdict."""
    for seed in range(4):
        world, ids = at_random(seed)
        directory = write(world, tmp_path / str(seed))
        summary = judge(world, directory)
        overdue = {i for i in ids if world.states(i) == ["ready"]}
        assert summary.messages == len(ids)
        assert summary.verdicts["orphan"] == summary.verdicts["early"] == summary.verdicts["gone"] == 0
        assert summary.verdicts["undelivered"] <= len(overdue)
        for name in ("cancelled", "dead"):
            count = sum(state == name for state in world.states(*ids))
            # One that was delivered twice before is a duplicate, whatever became of it then.
            assert count - summary.verdicts["duplicate"] <= summary.verdicts[name] <= count


def test_options_of_reconcile(tmp_path: Path) -> None:
    world, _ = one_of_each()
    given = options(world, write(world, tmp_path))
    assert not run(None, ReconcileOptions(given, fail_on="gone")).failed
    assert run(None, ReconcileOptions(given, late_ms=10**9)).verdicts["late"] == 0
    assert run(None, ReconcileOptions(given, grace_ms=10**9)).verdicts["undelivered"] == 0
    with pytest.raises(BadRequest, match="no such verdict"):
        ReconcileOptions(given, fail_on="lots")
    with pytest.raises(BadRequest, match=r"engine 'exact': leave it out\. The SQL engine was removed"):
        ReconcileOptions(given, engine="exact")


def test_the_command_ends_with_1_when_something_is_lost(tmp_path: Path) -> None:
    world, said = one_of_each()
    write(world, tmp_path)
    as_of = START_MS + world.now
    words = ("pipeline", "reconcile", "--master", "none", "--path", tmp_path, "--as-of", as_of, "-o", "json")
    done = hadelay(*words)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["verdicts"]["undelivered"] == len(said["undelivered"])
    assert f"{len(said['ok'])} ok" in done.stderr
    assert hadelay(*words, "--fail-on", "gone").returncode == 0
    assert hadelay("pipeline", "reconcile", "--master", "none", "--path", tmp_path / "x").returncode == 3


def test_a_message_carried_on_is_judged_by_its_first_entry(tmp_path: Path) -> None:
    world, said = one_of_each()
    (far,) = said["pending"]
    hour = START_HOUR + 30
    world.now = 31 * 3_600_000
    while not world.maintain(Job.ROLL_FORWARD, hour).done:
        pass
    summary = judge(world, write(world, tmp_path))
    rows = [row for row in summary.table if row["topic"] == "far"]
    assert rows == [{"hour": 2026112200, "topic": "far", "verdict": "undelivered", "count": 1}]
    assert encode_id(far) in offending(tmp_path)["undelivered"]


def test_only_the_chosen_topics_are_judged_moved_messages_too(tmp_path: Path) -> None:
    world, said = one_of_each()
    directory = write(world, tmp_path)
    for topics in ("far", "t", "dying,t"):
        every = [row for row in judge(world, directory).table if row["topic"] in (None, *topics.split(","))]
        assert judge(world, directory, topics=topics).table == every
    (pending,) = said["pending"]
    assert judge(world, directory, topics="far").verdicts["pending"] == len([pending])


class _Assets(HTMLParser):
    """Addresses that a page loads, and its texts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: Counter[str] = Counter()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"


def test_the_report_is_one_page_that_loads_nothing_and_obeys_nobody(tmp_path: Path) -> None:
    world, said = one_of_each()
    evil = "<script>alert(1)</script>&amp;"
    world.ids(message(evil, 7 * HOUR))
    summary = run(None, ReconcileOptions(options(world, write(world, tmp_path)), str(tmp_path / "out")))
    page = (tmp_path / "out" / "report.html").read_text()
    found = _Assets(page)
    assert (found.loaded, found.tags["script"], found.tags["svg"], found.tags["link"]) == ([], 0, 1, 0)
    assert "url(" not in page
    assert evil in found.text
    for name, count in summary.verdicts.items():
        assert count == 0 or name in found.text, name
    assert f"{summary.offending} have a problem" in found.text
    for message_id in said["undelivered"] + said["duplicate"]:
        assert encode_id(message_id) in found.text
    assert f"report: {tmp_path}/out/report.html" in summary.notes


def test_the_report_of_nothing(tmp_path: Path) -> None:
    world = World()
    run(None, ReconcileOptions(options(world, write(world, tmp_path)), str(tmp_path / "out")))
    found = _Assets((tmp_path / "out" / "report.html").read_text())
    assert "nothing to judge. None has a problem." in found.text
