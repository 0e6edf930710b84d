"""How late, how much, and what is coming: the figures are those of the events, and the reports say them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from hadelay.codec import commands, durations, settlement
from hadelay.codec.commandtypes import Job
from hadelay.errors import BadRequest
from hadelay.pipeline import forecast, lateness, load, timing
from hadelay.pipeline.forecast import drain, jitter
from hadelay.pipeline.jobs import ForecastOptions, JobOptions
from tests.cli.support import hadelay
from tests.ledger.world import START_HOUR, START_MS, World
from tests.pipeline.support import HOUR, MINUTE, SECOND, at_random, message, options, write
from tests.pipeline.test_batches import read

#: Of START_MS.
FIRST = 2026112018


def handed_out(directory: Path, late_ms: list[int]) -> World:
    """Messages of t due at second 10, handed out so much later; one of u cancelled, one carried, one still to come."""
    world = World()
    ids = world.ids(*[message("t", 10 * SECOND) for _ in late_ms])
    (cancelled,) = world.ids(message("u", 20 * SECOND))
    world.ids(message("u", 30 * SECOND), message("u", 5 * HOUR))
    world.cancel(cancelled)
    for late, message_id in sorted(zip(late_ms, ids, strict=True)):
        world.now = 10 * SECOND + late
        world.ack(world.lease(message_id))
    world.now = HOUR + MINUTE
    while not world.maintain(Job.ROLL_FORWARD, START_HOUR).done:
        pass
    write(world, directory)
    return world


def test_lateness_is_that_of_the_first_time_per_topic_and_hour_of_being_due(tmp_path: Path) -> None:
    late = [3, 3, 3, 3, 3, 3, 3, 3, 900, 70_000]
    world = handed_out(tmp_path, late)
    summary = lateness.run(None, JobOptions(options(world, tmp_path), str(tmp_path / "out")))
    assert (summary.handed_out, summary.overdue) == (10, 1)
    reported = {"p50_ms": 3, "p90_ms": 900, "p99_ms": 70_000, "p999_ms": 70_000, "max_ms": 70_000}
    assert summary.overall == reported
    assert summary.table == [
        {"hour": FIRST, "topic": None, "count": 10} | reported,
        {"hour": FIRST, "topic": "t", "count": 10} | reported,
    ]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["overall"] == reported
    of_u = lateness.run(None, JobOptions(options(world, tmp_path, topics="u")))
    assert (of_u.handed_out, of_u.overdue, of_u.not_measured, of_u.table) == (0, 1, 0, [])
    of_t = lateness.run(None, JobOptions(options(world, tmp_path, topics="t")))
    assert (of_t.handed_out, of_t.overdue, of_t.not_measured) == (10, 0, summary.not_measured)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "half were handed out within 3 ms" in page
    assert "1 messages are due and were not handed out yet" in page
    assert lateness.run(None, JobOptions(options(world, tmp_path, topics="u"))).handed_out == 0


def test_quantiles_are_exact_below_a_second_and_close_above() -> None:
    rng = np.random.default_rng(1)
    late = np.sort(np.concatenate([rng.integers(0, 1024, 5_000), rng.integers(0, 1 << 40, 5_000)]))
    codes = durations.encode(late)
    assert (np.diff(codes) >= 0).all()
    assert codes.max() < 1 << 14
    largest = durations.decode(codes)
    assert ((late <= largest) & (largest <= late * 1.008)).all()
    rows = timing._late_rows(np.full(len(late), 7, np.int64), rng.permutation(late))
    for q in (0.001, 0.25, 0.5, 0.9, 0.999, 1.0):
        true = int(late[max(0, int(np.ceil(q * len(late))) - 1)])
        (found,) = timing.quantiles(rows, [q])
        assert true <= found <= true * 1.008
    assert timing.quantiles(rows, [1.0]) == [int(late[-1])]


def test_load_counts_what_the_events_say(tmp_path: Path) -> None:
    for seed in (1, 5):
        world, _ = at_random(seed)
        directory = write(world, tmp_path / str(seed))
        out = directory / "out"
        summary = load.run(None, JobOptions(options(world, directory), str(out)))
        entries = {(m["hour"], m["entry"]): m for m in read(options(world, directory)) if not m["dead"]}
        events = [e for e in read(options(world, directory, kind="events")) if not e["dead"]]
        leased = {(e["hour"], e["entry"]) for e in events if e["event"] == "leased"}
        due = [
            m
            for place, m in entries.items()
            if place in leased
            or (m["state"] not in ("cancelled", "moved") and m["deliver_at"].timestamp() * 1000 <= summary.as_of_ms)
        ]
        assert summary.due == len(due)
        assert summary.handed_out == len(leased)
        assert summary.acked == sum(e["event"] == "acked" for e in events)
        assert summary.due > summary.handed_out > summary.acked > 0
        rows = pq.read_table(out / "seconds.parquet").to_pylist()
        expected: dict[tuple[str, int], int] = {}
        for m in due:
            place = (m["topic"], int(m["deliver_at"].timestamp()))
            expected[place] = expected.get(place, 0) + 1
        assert {(r["topic"], int(r["second"].timestamp())): r["due"] for r in rows if r["due"]} == expected
        for name in ("due", "handed_out", "acked"):
            whole = [row for row in summary.table if row["topic"] is None]
            assert sum(row[name] for row in whole) == getattr(summary, name)
            assert sum(row[name] for row in summary.table) == 2 * getattr(summary, name)
        assert max(row["peak_due"] for row in summary.table if row["topic"]) == max(expected.values())


def coming(directory: Path) -> World:
    """30 in one second, 5 in another, 2 overdue; what was cancelled, delivered, or is too far does not come."""
    world = World()
    (done, cancelled) = world.ids(message("a", SECOND), message("a", 2 * HOUR))
    world.ids(*[message("a", 2 * HOUR) for _ in range(20)], *[message("b", 2 * HOUR) for _ in range(10)])
    world.ids(*[message("b", 3 * HOUR + 500) for _ in range(5)], message("b", 40 * HOUR))
    world.ids(message("a", 2 * SECOND), message("a", 2 * SECOND))
    world.cancel(cancelled)
    world.now = MINUTE
    world.ack(world.lease(done))
    write(world, directory)
    return world


def test_forecast_names_hot_seconds_and_says_what_helps(tmp_path: Path) -> None:
    world = coming(tmp_path)
    summary = forecast.run(None, ForecastOptions(options(world, tmp_path), str(tmp_path / "out"), threshold=10))
    assert (summary.coming, summary.overdue, summary.hot_seconds) == (35, 2, 1)
    at = timing.instant(START_MS // 1000 + 2 * 3600)
    assert summary.hot == [{"second": at, "messages": 30, "topics": {"a": 20, "b": 10}}]
    assert [(row["hour"], row["messages"], row["peak"], row["hot_seconds"]) for row in summary.table] == [
        (FIRST + 2, 30, 30, 1),
        (FIRST + 3, 5, 5, 0),
    ]
    assert (summary.backlog, summary.wait_s, summary.jitter_s, summary.catch_up_rate) == (20, 2.0, 3, 10)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "1 seconds have more than 10 messages" in page
    assert "a random part of 3 s added to deliver_at" in page
    assert "2 are overdue. A catch_up_rate of 10" in page
    calm = forecast.run(None, ForecastOptions(options(world, tmp_path), threshold=30, hours=2))
    assert (calm.coming, calm.hot_seconds, calm.jitter_s) == (30, 0, 0)
    assert "nothing has to be done" in calm.advice[0]
    assert "only the nodes know them, so set --endpoint" in calm.advice[-1]
    far = forecast.run(None, ForecastOptions(options(world, tmp_path, topics="b"), threshold=30, hours=48))
    assert far.coming == 16
    with pytest.raises(BadRequest, match="threshold must be at least 1"):
        ForecastOptions(options(world, tmp_path), threshold=0)


def test_draining_and_jitter_are_what_working_it_off_second_by_second_says() -> None:
    rng = np.random.default_rng(2)
    for _ in range(50):
        counts = rng.integers(0, 30, 60) * (rng.random(60) < 0.4)
        rate, waiting = int(rng.integers(1, 20)), int(rng.integers(0, 40))
        backlog, worst, clear = waiting, waiting, 0
        for second, count in enumerate(counts.tolist()):
            backlog = max(0, backlog + count - rate)
            worst = max(worst, backlog)
            clear = second + 1 if backlog else clear
        assert drain(counts, rate, waiting) == (worst, worst / rate, clear if clear < 60 else None)
        spread = jitter(counts, rate)
        assert spread is not None
        if spread == 0:
            assert counts.max() <= rate
        else:
            peak = np.convolve(counts, np.full(spread, 1 / spread)).max()
            assert peak <= rate + 1e-9
            assert np.convolve(counts, np.full(spread - 1, 1 / (spread - 1))).max() > rate - 1e-9


def test_no_jitter_is_enough_where_it_is_too_much_for_hours() -> None:
    assert jitter(np.full(2 * 3600, 11), 10) is None
    assert drain(np.full(2 * 3600, 11), 10) == (7200, 720.0, None)


def test_reports_say_so_when_there_is_nothing(tmp_path: Path) -> None:
    given = options(World(), write(World(), tmp_path))
    runs: list[Any] = [
        lateness.run(None, JobOptions(given, str(tmp_path / "a"))),
        load.run(None, JobOptions(given, str(tmp_path / "b"))),
        forecast.run(None, ForecastOptions(given, str(tmp_path / "c"))),
    ]
    assert [summary.table for summary in runs] == [[], [], []]
    assert "Nothing was handed out" in (tmp_path / "a" / "report.html").read_text()
    assert "Nothing fell due" in (tmp_path / "b" / "report.html").read_text()
    assert "nothing has to be done" in (tmp_path / "c" / "report.html").read_text()


def test_the_page_is_whole_and_names_are_escaped(tmp_path: Path) -> None:
    world = World()
    (one,) = world.ids(message("<b>", SECOND))
    world.now = 2 * SECOND
    world.ack(world.lease(one))
    write(world, tmp_path)
    for run, name in ((lateness.run, "a"), (load.run, "b")):
        run(None, JobOptions(options(world, tmp_path), str(tmp_path / name)))
        page = (tmp_path / name / "report.html").read_text()
        assert "&lt;b&gt;" in page
        assert "<b>" not in page
        assert not re.search(r'(src|href)="|nan', page)


def test_the_commands_print_tables_and_json(tmp_path: Path) -> None:
    world = coming(tmp_path)
    where = ("--master", "none", "--path", tmp_path, "--as-of", START_MS + world.now)
    done = hadelay("pipeline", "lateness", *where, "-o", "json")
    assert json.loads(done.stdout)["handed_out"] == 1, done.stderr
    done = hadelay("pipeline", "load", *where, "--out", tmp_path / "out")
    assert re.search(rf"{FIRST} +a +3 +1 +1 ", done.stdout), done.stdout + done.stderr
    assert f"report: {tmp_path}/out/report.html" in done.stderr
    done = hadelay("pipeline", "forecast", *where, "--threshold", 10, "--fail")
    assert done.returncode == 1
    assert "1 seconds have more than 10 messages" in done.stderr
    assert hadelay("pipeline", "forecast", *where, "--fail").returncode == 0


def test_lateness_ends_when_the_consumer_has_the_message(tmp_path: Path) -> None:
    """A message that was granted in time and answered late is late; of one that nobody settled that is not known."""
    world = World()
    ids = world.ids(*[message("t", 10 * SECOND) for _ in range(4)])
    world.now = 10 * SECOND + 5
    taken = [world.lease(message_id) for message_id in ids]
    world.now += 20 * SECOND
    for rows, delay_ms in zip(taken[:2], (0, 19_700), strict=False):
        world.one(settlement.with_delays(commands.encode_ack("n1", rows), np.array([delay_ms], np.uint32)))
    nack = commands.encode_nack("n1", taken[2], HOUR, "no")
    world.one(settlement.with_delays(nack, np.array([1_000], np.uint32)))
    write(world, tmp_path)
    summary = lateness.run(None, JobOptions(options(world, tmp_path)))
    assert (summary.handed_out, summary.not_measured) == (4, 1)
    assert summary.overall["max_ms"] == 19_705
    assert summary.overall["p50_ms"] == 5
