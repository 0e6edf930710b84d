"""What other users of a machine may read of what a node, its backups and its commands write: whatever the umask."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.freeports import free_ports
from chaos.sim.cluster import SimCluster
from hadelay.platform.disk import DIRECTORY, PRIVATE, SHARED, Disk, mode_of
from tests.system.cluster import ask, end, environment, ready_line, spawn

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

SERVE = """
import os, sys
os.umask(int(sys.argv.pop(1), 8))
from hadelay.__main__ import main
main()
"""
SECRET = "Bearer 0123456789abcdef"


def modes(directory: Path) -> dict[str, int]:
    paths = [directory, *directory.rglob("*")]
    return {str(path.relative_to(directory)): stat.S_IMODE(path.stat().st_mode) for path in paths}


def expected(directory: Path, *, backup: bool = False) -> dict[str, int]:
    def one(path: Path) -> int:
        if path.is_dir():
            return DIRECTORY
        return PRIVATE if backup else mode_of(str(path))

    paths = [directory, *directory.rglob("*")]
    return {str(path.relative_to(directory)): one(path) for path in paths}


def run(umask: int, *words: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVE, f"{umask:o}", *map(str, words)], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_no_other_user_reads_what_a_node_writes(tmp_path: Path) -> None:
    assert (DIRECTORY, PRIVATE, SHARED) == (0o750, 0o600, 0o640)
    port, data, errors = free_ports(2), tmp_path / "data", tmp_path / "errors"
    words = (
        "serve", "--output", "json", "--set", "cluster.init=true", "--set", f"node.data_dir={data}",
        "--set", f"http.listen=127.0.0.1:{port}", "--set", f"raft.listen=127.0.0.1:{port + 1}",
        "--set", "storage.checkpoint_interval_ms=200", "--set", "log.format=json",
    )  # fmt: skip
    serve(words, 0o000, errors, tmp_path / "backup")
    found = modes(data)
    assert found == expected(data)
    assert {"g0/state.mdb", "g0/state.mdb-lock", "g0/identity", "g0/names", "raft/g0.lock"} <= found.keys()
    assert modes(tmp_path / "backup") == expected(tmp_path / "backup", backup=True)
    # As an earlier version left it, or a copy. What somebody else put there stays.
    for path in data.rglob("*"):
        path.chmod(0o777 if path.is_dir() else 0o644)
    (data / "notes").touch()
    (data / "notes").chmod(0o664)
    serve(words, 0o077, errors)
    assert modes(data) == expected(data) | {"notes": 0o664}
    assert '"modes_corrected"' in errors.read_text()
    other = (f"node.data_dir={tmp_path}/restored", "cluster.id=other", "cluster.group=1")
    run(0, "restore", tmp_path / "backup", *(word for setting in other for word in ("--set", setting)))
    assert modes(tmp_path / "restored") == expected(tmp_path / "restored")


def serve(words: tuple[str, ...], umask: int, errors: Path, backup: Path | None = None) -> None:
    """A node that gets messages of several hours, and is stopped."""
    process = spawn(f"{umask:o}", *words, errors=errors, program=SERVE)
    try:
        url = ready_line(process, errors)["nodes"][0]["http"]
        webhook = {"url": "https://receiver.example/", "headers": {"Authorization": SECRET}}
        assert ask(url, "PUT", "/v1/topics/t", {"webhook": webhook}).status in (200, 201)
        for delay in ("0", "1h", f"{50 + umask}d"):
            assert ask(url, "POST", f"/v1/topics/t/messages?delay={delay}", b"x").status == 201
        if backup is not None:
            run(umask, "backup", "create", backup, "--servers", url)
        process.terminate()
        assert process.wait(30) == 0
    finally:
        end(process)


def test_a_group_that_a_directory_hands_down_stays(tmp_path: Path) -> None:
    """Of volumes in Kubernetes (fsGroup), and where a data engineer's group is to read hours."""
    parent = tmp_path / "volume"
    parent.mkdir()
    parent.chmod(0o2775)
    Disk().makedirs(f"{parent}/node/hours")
    assert stat.S_IMODE(os.stat(parent / "node/hours").st_mode) == 0o2750
    Disk().protect(str(parent))
    assert stat.S_IMODE(parent.stat().st_mode) == 0o2750


def test_a_simulated_disk_has_modes_too() -> None:
    cluster = SimCluster(1, names=("n1",))
    cluster.start_all()
    cluster.world.run_for(2.0)
    disk = cluster.machines["n1"].disk
    assert disk.modes()
    assert disk.modes() == {path: mode_of(path) for path in disk.modes()}
    for path in disk.modes():
        disk._lookup(path).mode = 0o644
    cluster.kill("n1")
    cluster.start("n1")
    cluster.world.run_for(2.0)
    assert disk.modes() == {path: mode_of(path) for path in disk.modes()}
