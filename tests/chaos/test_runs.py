"""Runs against real processes: a short one of everything that needs no root, and what an interruption leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from chaos import scenario, tools
from chaos.__main__ import main
from chaos.freeports import free_ports
from chaos.sim.failpoints import POINTS
from tests.scale import LONG, size
from tests.system.cluster import Cluster, environment, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
ROOT = Path(__file__).resolve().parents[2]
BY_ROOT = not any(map(tools.missing, ("root", "ip", "nft", "mkfs")))


def start(directory: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "chaos", *map(str, words), "--dir", str(directory), "-o", "json"]
    path = f"{ROOT / 'src'}:{ROOT}"
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment() | {"PYTHONPATH": path}
    )


def idle(found: dict[str, Any]) -> set[tuple[str, str]]:
    """Branches of checks that had nothing to decide in a run."""
    return {
        (name, branch)
        for name, verdict in found["verdicts"].items()
        for branch, cases in verdict["decided"].items()
        if not cases
    }


def test_smoke(tmp_path: Path) -> None:
    with start(tmp_path / "run", "run", "smoke", "--port-base", free_ports(6)) as run:
        out, err = run.communicate()
    assert run.returncode == 0, out + err
    found: dict[str, Any] = json.loads(out)
    assert found["ok"]
    assert found["faults"] == {"kill": 2, "pause": 1, "stop": 1, "transfer": 1, "wipe": 1}
    messages = found["messages"]
    assert messages["acknowledged"] > 100
    assert messages["handed out"] >= messages["acknowledged"] - messages["cancelled"] - messages["expired"]
    assert set(found["failover_ms"]) == {"kill", "pause", "stop"}
    # A branch that decides nothing tests nothing. (Crash points and shards have runs of their own.)
    assert {name for name, _ in idle(found)} <= {"crash points", "M1 shards"}, out
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()
    # What was written down is enough to judge it again.
    assert main(["report", str(tmp_path / "run")]) == 0


#: One of each kind of step; `python -m chaos run crash-points` goes through all. A node that lost its disk meets
#: the last one: between them they bring somebody to every point that there is.
AT = (
    "journal.pwritev:within", "dispatch.answer:before", "journal.vote:after", "snapshot.finish:after",
)  # fmt: skip


@pytest.mark.skipif(not LONG, reason="make long: the simulator crashes nodes at each step of I/O, too")
def test_a_node_that_ends_at_any_step_of_its_code_loses_nothing(tmp_path: Path) -> None:
    """And another one has the same files in the end."""
    crash = '[[faults]]\nkind = "crash"\nat = "{}"\ntarget = "{}"\nseconds = 20.0\nafter = 0.0\n'
    faults = [crash.format(point, ("leader", "follower")[i % 2]) for i, point in enumerate(AT)]
    head = 'seconds = 1.0\n[cluster]\nsettings = ["storage.checkpoint_interval_ms=1s"]\n[limits]\nrecovery_s = 60.0\n'
    load = "[load]\nrate = 80\ndelay_s = [0.0, 1.0]\nlease_s = 1.0\nrepeated = 0.3\npayload_bytes = [0, 60000]\n"
    (tmp_path / "points.toml").write_text(head + load + "".join(faults))
    with start(tmp_path / "run", "run", tmp_path / "points.toml", "--port-base", free_ports(6)) as run:
        out, err = run.communicate()
    assert run.returncode == 0, out + err
    found = json.loads(out)
    # Armed once more where nobody came by: on a quick machine the journal may still hold what a node lacks.
    assert {point: met for point, (met, _) in found["points"].items()} == dict.fromkeys(AT, 1)
    assert ("crash points", "met") not in idle(found)
    assert found["passed"] == sorted(POINTS), "a point that nobody comes by tests nothing"


@pytest.mark.timeout(400)
@pytest.mark.skipif(not LONG, reason="make long: two shards of three nodes each")
def test_shards_whose_map_changes_all_the_time(tmp_path: Path) -> None:
    with start(tmp_path / "run", "run", "shards", "--seconds", 20) as run:
        try:
            out, err = run.communicate(timeout=380)
        finally:
            run.kill()
    assert run.returncode == 0, out + err
    found = [json.loads(line) for line in out.splitlines()]
    assert all(one["ok"] for one in found)
    assert not {name for name, _ in idle(found[0])} & {"M1 shards"}
    assert all(one["messages"]["acknowledged"] > 100 for one in found)


@pytest.mark.parametrize(
    ("mutation", "verdict"),
    [("not_deferred", "I9 early"), ("local_apply", "I12 divergence")][: size(1, 2)],
)
def test_a_server_that_is_broken_on_purpose_is_noticed(tmp_path: Path, mutation: str, verdict: str) -> None:
    # What a diverged node lost stays owed: wait for it for seconds, not for a minute.
    calm = (scenario.HERE / "calm.toml").read_text()
    (tmp_path / "calm.toml").write_text(f"{calm}\n[limits]\ndrain_s = 2.0\n")
    words = ("run", tmp_path / "calm.toml", "--seconds", 2.5, "--mutation", mutation, "--port-base", free_ports(6))
    with start(tmp_path / "run", *words) as run:
        out, err = run.communicate()
    assert run.returncode == 1, err
    assert json.loads(out)["verdicts"][verdict]["violations"]


def processes_of(directory: Path) -> dict[int, str]:
    """pid → state of each process that was started with a file in that directory."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{directory}/n".encode() in (path / "cmdline").read_bytes():
                found[int(path.name)] = (path / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def leftovers() -> list[str]:
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "hdchaos" in line]
    spaces = Path("/run/netns")
    return mounts + ([path.name for path in spaces.glob("hdchaos*")] if spaces.exists() else [])


def test_ctrl_c_in_the_middle_of_faults_heals_everything_and_leaves_nothing(tmp_path: Path) -> None:
    before = leftovers()
    kinds = ["pause", "cut", "stalled-disk"] if BY_ROOT else ["pause"]
    fault = '[[faults]]\nkind = "{}"\ntarget = "n{}"\nseconds = 600.0\nalong = true\n'
    (tmp_path / "long.toml").write_text("".join(fault.format(kind, i + 1) for i, kind in enumerate(kinds)))
    directory = tmp_path / "run"
    with start(directory, "run", tmp_path / "long.toml", "--port-base", free_ports(6)) as run:
        assert run.stderr is not None
        for kind in kinds:
            assert kind in run.stderr.readline()
        until(lambda: "T" in processes_of(directory).values(), "a node is paused")
        assert bool(set(leftovers()) - set(before)) == BY_ROOT
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert processes_of(directory) == {}
    assert set(leftovers()) <= set(before)
    found = json.loads(out)
    assert found["interrupted"]
    assert found["faults"] == dict.fromkeys(sorted(kinds), 1)


def test_a_cluster_that_runs_already(tmp_path: Path) -> None:
    """Only what its file names is touched; interrupted in the middle of a fault, it goes on as before."""
    with Cluster(tmp_path / "cluster") as cluster:
        (tmp_path / "long.toml").write_text('[[faults]]\nkind = "pause"\ntarget = "n2"\nseconds = 600.0\n')
        nodes = {
            name: f'[nodes.{name}]\nhttp = "{url}"\npause = "kill -STOP {cluster.pids[name]}"\n'
            f'resume = "kill -CONT {cluster.pids[name]}"\n'
            for name, url in cluster.urls.items()
        }
        (tmp_path / "all.toml").write_text("".join(nodes.values()))
        (tmp_path / "two.toml").write_text(nodes["n1"] + nodes["n2"])

        with start(tmp_path / "refused", "run", tmp_path / "long.toml", "--cluster", tmp_path / "two.toml") as run:
            assert "the cluster has the member n3 at" in run.communicate(timeout=60)[1]
        assert run.returncode == 2

        state = Path(f"/proc/{cluster.pids['n2']}/stat")
        with start(tmp_path / "run", "run", tmp_path / "long.toml", "--cluster", tmp_path / "all.toml") as run:
            until(lambda: ") T " in state.read_text(), "n2 is paused")
            run.send_signal(signal.SIGINT)
            assert run.wait(60) == 130
        assert ") T " not in state.read_text()
        cluster.publish("n2", "after")
