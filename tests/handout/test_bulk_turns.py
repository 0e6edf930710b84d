"""Bulk jobs of one leader take turns."""

from __future__ import annotations

from typing import Any

import pytest

from hadelay.codec import commands
from hadelay.codec.jobcommands import JobBegin, JobSpec
from hadelay.ledger.jobs.bulkscan import SLICE, JobScan
from hadelay.model import HOUR_MS
from tests.handout.desk import START_MS, Desk


def test_a_long_search_holds_up_no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []
    step = JobScan.step

    def noted(scan: JobScan, now_ms: int) -> Any:
        searched.append(scan.spec.topic)
        return step(scan, now_ms)

    monkeypatch.setattr(JobScan, "step", noted)
    desk = Desk(checking=False)
    desk.lead()
    desk.run(10)
    desk.publish_many(20 * SLICE, topic="many", at=HOUR_MS + 60_000)
    desk.publish_many(3, topic="few", at=60_000)
    nothing = JobSpec("cancel", "many", from_ms=START_MS + HOUR_MS, to_ms=START_MS + HOUR_MS + 1)
    for spec in (nothing, JobSpec("cancel", "few")):
        desk.do(commands.encode_job_begin(JobBegin("n1", "", b"", [spec.topic], spec)))
    desk.delivery.before_settlement()
    desk.until(lambda: all(job.ended_ms for job in desk.ledger.jobs.values()))
    assert [job.done for job in desk.ledger.jobs.values()] == [0, 3]
    assert searched.count("many") > 20
    assert searched.index("few") < 3


def test_jobs_that_copy_records_wait_for_disk_space() -> None:
    full = True
    desk = Desk(checking=False)
    desk.delivery.has_space = lambda: not full
    desk.lead()
    desk.run(10)
    for topic in ("moved", "ended"):
        desk.publish_many(3, topic=topic, at=60_000)
    for spec in (JobSpec("reschedule", "moved", shift_ms=HOUR_MS), JobSpec("cancel", "ended")):
        desk.do(commands.encode_job_begin(JobBegin("n1", "", b"", [spec.topic], spec)))
    moved, ended = desk.ledger.jobs.values()
    desk.until(lambda: ended.ended_ms > 0)
    desk.run(2_000)
    assert (moved.done, ended.done) == (0, 3)
    full = False
    desk.until(lambda: moved.ended_ms > 0)
    assert moved.done == 3
