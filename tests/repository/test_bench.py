"""The harness itself: verdicts, the report, and what voids a run. The figures are `make bench`'s business."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench.cluster import Cluster, Node, Void
from bench.load import Tally, now_ms
from bench.report import write_report
from bench.result import Row, Setup, Target, save
from bench.rows import ROWS
from bench.rows.schedules import Occurrences


def test_verdicts() -> None:
    rate, late = Target("rate", 100, 200), Target("late", 50, 10, at_most=True)
    assert [rate.verdict(v) for v in (200, 100, 85, 79)] == ["goal", "met", "near", "MISSED"]
    assert [late.verdict(v) for v in (10, 50, 59, 61)] == ["goal", "met", "near", "MISSED"]


def test_medians_and_ratios_within_rounds() -> None:
    row = Row("x", "x", [Target("ratio", 1.5)])
    for ours, theirs in ((10, 5), (30, 30), (9, 3)):
        row.add("ours", ours)
        row.add("theirs", theirs)
    row.ratio("ratio", "ours", "theirs")
    assert row.samples["ratio"] == [2, 1, 3]
    assert row.median("ratio") == 2
    row.ratio("nothing", "ours", "absent")
    assert row.median("nothing") is None


@pytest.mark.parametrize(("value", "note", "code"), [(120, "", 0), (70, "", 1), (120, "VOID: lost", 1)])
def test_report(tmp_path: Path, value: float, note: str, code: int) -> None:
    row = Row("single", "one message", [Target("rate", 100)], notes=[note] if note else [])
    row.add("rate", value, "/s")
    row.add("p50", 3.0, "ms")
    setup = Setup(1, False, tmp_path, 1, lambda text: None)
    save([row], tmp_path / "results.json")
    assert write_report([row], tmp_path, setup) == code
    assert "single" in (tmp_path / "report.md").read_text()
    assert 'src="single.svg"' in (tmp_path / "report.html").read_text()
    assert (tmp_path / "single.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("pending", "unsure", "void"),
    [((7, 7, 7), 0, False), ((6, 6, 6), 0, True), ((7, 7, 8), 2, True), ((8, 8, 8), 2, False), ((10, 10, 10), 2, True)],
)
def test_a_run_is_void_unless_every_node_adds_up(
    monkeypatch: pytest.MonkeyPatch, pending: tuple[int, ...], unsure: int, void: bool
) -> None:
    cluster = Cluster(Path("/"), 1, [Node(f"n{i}", 0, str(i)) for i in range(3)])
    monkeypatch.setattr(cluster, "settle", lambda: None)
    monkeypatch.setattr(cluster, "pending", lambda node, topics: pending[int(node.http)])
    if void:
        with pytest.raises(Void):
            cluster.account(["t"], 10, 3, unsure=unsure)
    else:
        cluster.account(["t"], 10, 3, unsure=unsure)


def test_the_tally_sees_what_is_early_and_what_comes_twice() -> None:
    tally, now = Tally(), now_ms()
    late, early = (now - 50).to_bytes(8, "little"), (now + 5000).to_bytes(8, "little")
    tally.received([{"id": "a", "body": late}, {"id": "b", "body": early}, {"id": "a", "body": late}])
    assert (tally.early, tally.duplicates, len(tally.seen)) == (1, 1, 2)
    assert 50 <= tally.late(0.5) < 5000


def test_every_row_of_the_readme_can_be_measured() -> None:
    page = (Path(__file__).resolve().parents[2] / "bench" / "README.md").read_text()
    assert all(f"| `{name}` |" in page for name in ROWS)


@pytest.mark.parametrize(
    ("occurrence_ms", "in_ms", "wrong"),
    [
        (0, 0, ""), (60_000, 60_000, ""), (60_000, 59_500, "1 early"), (59_500, 59_500, "no schedule asks for"),
        (-1_000, 0, "no schedule asks for"), (500, 500, "no schedule asks for"),
    ],
)  # fmt: skip
def test_schedules_are_judged_by_the_times_that_they_ask_for(
    monkeypatch: pytest.MonkeyPatch, occurrence_ms: int, in_ms: int, wrong: str
) -> None:
    """A cluster that files half a second early says so in deliver_at, and perhaps in the occurrence."""
    start_ms = 1_795_197_600_000
    monkeypatch.setattr(time, "time", lambda: (start_ms + in_ms) / 1000)
    said = datetime.fromtimestamp((start_ms + occurrence_ms) / 1000, UTC).isoformat(timespec="milliseconds")
    deliver_at = datetime.fromtimestamp((start_ms + in_ms) / 1000, UTC).isoformat(timespec="milliseconds")
    tally = Occurrences(start_ms, 1_000)
    tally.received([{"schedule": "s", "occurrence": said, "deliver_at": deliver_at}])
    assert wrong in tally.void() if wrong else not tally.void()
    tally.received([{"schedule": "s", "occurrence": said, "deliver_at": deliver_at}])
    assert "1 twice" in tally.void()
