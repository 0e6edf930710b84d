"""`python -m bench.scaling`: the page is what its results say, the model adds up, and control groups are removed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench import cpushare
from bench.cpushare import PERIOD_US, shares
from bench.scaling import BUSY, PAGE, PLOT, RESULTS, Model, added, page, read
from bench.wrk_run import Missing
from hadelay.settings.shardmap import MAX_SHARDS

MODEL = Model(leader=40.0, follower=16.0, front=30.0, record=250.0, idle=10_000.0, memory=70.0)


def test_the_page_is_what_its_results_say() -> None:
    assert page(*read(RESULTS.read_text())) == PAGE.read_text()
    assert PLOT.name in PAGE.read_text()
    assert PLOT.stat().st_size > 1000


def test_rows_of_another_run_are_put_in() -> None:
    known = {"machine": 1, "note": "n", "rows": [{"name": "a", "v": 1}, {"name": "b", "v": 1}]}
    new = {"machine": 2, "rows": [{"name": "b", "v": 2}, {"name": "c", "v": 2}]}
    rows = [{"name": "a", "v": 1}, {"name": "b", "v": 2}, {"name": "c", "v": 2}]
    assert added(new, known) == {"machine": 1, "note": "n", "rows": rows}


def test_cores_of_the_model() -> None:
    assert MODEL.topic() == BUSY * 1e6 / 40
    assert MODEL.cores(2, 0.0) == pytest.approx(2 * (0.6 * (1 + 2 * 0.4) + 0.03))
    assert MODEL.cores(2, 0.5) == pytest.approx(MODEL.cores(2, 0.0) + 2 * 0.6 * 0.5 * 30 / 40)


def test_more_machines_carry_more_and_forwarding_costs() -> None:
    found = [MODEL.shards(machines) for machines in (3, 6, 12)]
    assert found == sorted(found)
    assert found[2] == pytest.approx(4 * found[0], rel=0.05)
    assert MODEL.shards(12, 1.0) < found[2]
    used = MODEL.limits(12, found[2])
    assert 0.9 < used["cores"] <= 1
    assert used["map"] == found[2] / MAX_SHARDS


def test_groups_limit_a_process_and_are_removed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            with shares() as limit:
                limit.give(process.pid, 0.25)
                (group,) = limit.groups
                assert (group / "cgroup.procs").read_text().split() == [str(process.pid)]
                file = "cpu.max" if limit.second else "cpu.cfs_quota_us"
                assert (group / file).read_text().split()[0] == str(PERIOD_US // 4)
        except Missing as missing:
            pytest.skip(str(missing))
        finally:
            process.kill()
        assert not group.exists()


def test_a_machine_without_groups_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_V1", "_V2"):
        monkeypatch.setattr(cpushare, name, tmp_path)
    with pytest.raises(Missing, match="cannot be limited"), shares():
        pass
