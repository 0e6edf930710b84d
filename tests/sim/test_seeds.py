"""The simulator at work: 300 seeds keep every promise, one seed is one trace, and a failure can be replayed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from hadelay.testing import cli
from hadelay.testing.nemesis import FAMILIES
from hadelay.testing.run import run_seed

SEEDS = int(os.environ.get("HADELAY_SIM_SEEDS", "300"))


@pytest.mark.timeout(900)
def test_seeds_keep_every_promise():
    failed, counts = [], Counter()
    for report in cli.run_seeds(range(1, SEEDS + 1)):
        counts.update(report.counts)
        if report.failure:
            failed.append(cli.story(report))
    assert not failed, "\n".join(failed)
    # What never happened was not tested.
    wanted = [*FAMILIES, "published", "handed out", "ack DONE", "ack LEASE_LOST", "ack ALREADY_ACKED", "nack DONE"]
    wanted += ["extend DONE", "cancel CANCELLED", "cancel LEASED", "cancel ACKED", "publish outcome-unknown"]
    wanted += ["replaced", "reschedule DONE", "reschedule LEASED", "reschedule ACKED"]
    wanted += ["consumer vanished", "publish no-leader", "redelivered", "duplicate receipt", "snapshot installed"]
    assert [what for what in wanted if not counts[what]] == []


def trace_in_another_process(seed: int, hash_seed: str) -> str:
    code = (
        f"from hadelay.testing.cli import _quiet, run_seed; _quiet(); r = run_seed({seed}); print(r.trace, r.entries)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("seed", [7, 15, 34])
def test_one_seed_is_one_trace_in_every_process(seed: int):
    assert len({trace_in_another_process(seed, hash_seed) for hash_seed in ("0", "1", "random")}) == 1


def test_another_seed_is_another_trace():
    assert run_seed(1, {}).trace != run_seed(2, {}).trace


def test_a_failure_tells_how_to_replay_it(capsys: pytest.CaptureFixture[str]):
    from hadelay.testing.mutations import broken

    with broken("five_ms_early"):
        code = cli.main(seed=1, count=1, jobs=1)
    out = capsys.readouterr().out
    assert code == 1
    assert "I9 early" in out
    assert "replay: hadelay sim --seed 1" in out
    assert "handed out" in out
