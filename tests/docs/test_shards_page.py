"""`hadelay dev --shards`, and the commands of docs/howto/shards.md, over two shards of two nodes each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.freeports import free_ports
from tests.cli.support import Dev, environment, hadelay, start
from tests.docs.test_pages import matches, steps
from tests.docs.test_shard_drill import PAGE, RESTORE
from tests.system.cluster import alive

pytestmark = pytest.mark.processes
CONSOLE = re.compile(r"^```(console)\n(.*?)^```$", re.M | re.S)


@pytest.fixture(scope="module")
def ports() -> int:
    return free_ports(8)


@contextlib.contextmanager
def running(directory: Path, *words: object) -> Iterator[Dev]:
    dev = start(directory, *words)
    try:
        yield dev
    finally:
        dev.end()


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory, ports: int) -> Iterator[Dev]:
    """Two shards, the second of which is younger than a topic of the first."""
    directory = tmp_path_factory.mktemp("shards")
    with running(directory, "--port-base", ports, "--nodes", 2) as dev:
        assert dev.run("msg", "put", "invoices", "x", "--delay", "1h").returncode == 0
    with running(directory, "--port-base", ports, "--shards", 2) as dev:
        yield dev


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_commands_of_the_page(grown: Dev, tmp_path: Path) -> None:
    command = tmp_path / "hadelay"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hadelay "$@"\n')
    command.chmod(0o755)
    shell = environment(PATH=f"{tmp_path}:{os.environ['PATH']}", HADELAY_SERVERS=grown.servers)
    # test_shard_drill.py runs the commands that restore a shard.
    for _, block in CONSOLE.findall(PAGE.read_text().partition(RESTORE)[0]):
        for typed, expected in steps(block):
            if typed.startswith("hadelay dev "):
                continue  # which the fixture did, with fewer nodes
            done = subprocess.run(
                ["bash", "-c", typed], env=shell, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            assert matches(expected, done.stdout), f"$ {typed}\nprinted\n{done.stdout}\ninstead of\n{expected}"


def test_the_topics_of_a_directory_that_grew_stay_in_its_first_shard(grown: Dev) -> None:
    assert [(node["name"], node["shard"]) for node in grown.nodes] == [
        ("n1", 0), ("n2", 0), ("n1-s1", 1), ("n2-s1", 1),
    ]  # fmt: skip
    found = json.loads(grown.run("shards", "list", "-o", "json").stdout)
    assert found["current"]["rules"] == [{"pattern": "*", "shards": [0, 1], "key": "prefix"}]
    assert found["current"]["pinned"] == {"invoices": 0}
    assert "invoices" in grown.run("topic", "list").stdout


def test_fewer_shards_are_refused(grown: Dev) -> None:
    refused = hadelay("dev", "--data-dir", grown.directory, "--shards", 1)
    assert "holds 2 shards, and no shard can be removed" in refused.stderr
    assert "expected 1 to 128" in hadelay("dev", "--data-dir", grown.directory / "new", "--shards", 129).stderr
    lost = hadelay("dev", "--data-dir", grown.directory, "--start", "n1-s2")
    assert "choose one of n1, n2, n1-s1, n2-s1" in lost.stderr


def test_leaders_are_spread_over_the_machines(grown: Dev) -> None:
    for shard in (0, 1):
        servers = [node["http"] for node in grown.nodes if node["shard"] == shard]
        moved = hadelay("cluster", "transfer", "n1", "--servers", ",".join(servers))
        assert moved.returncode == 0, moved.stderr
    planned = json.loads(grown.run("shards", "balance", "--dry-run", "-o", "json").stdout)
    assert planned == {
        "dry_run": True, "moves": [{"shard": 0, "from": "n1", "to": "n2"}], "leaders": {"n1": 1, "n2": 1},
    }  # fmt: skip
    done = grown.run("shards", "balance")
    assert done.returncode == 0, done.stderr
    assert matches("0      n1    n2\nn1    1\nn2    1", done.stdout)
    assert "No transfer makes the machines more alike." in grown.run("shards", "balance").stdout


def test_node_may_stop_once_all_its_shards_say_so(grown: Dev) -> None:
    """A shard of two nodes needs both."""
    asked = grown.run("check", "quorum", "n2", "-o", "json")
    assert asked.returncode == 1, asked.stderr
    rows = json.loads(asked.stdout)
    assert [(row["shard"], row["node"], row["may_stop"]) for row in rows] == [(0, "n2", False), (1, "n2", False)]
    assert grown.run("check", "quorum", "n3").returncode == 3


def test_one_interrupt_ends_all_shards_and_a_start_leaves_the_map_alone(grown: Dev, ports: int) -> None:
    before = grown.run("shards", "list", "-o", "json").stdout
    pids = [node["pid"] for node in grown.nodes]
    assert grown.end(signal.SIGINT) == 0
    assert not any(map(alive, pids))
    with running(grown.directory, "--port-base", ports) as again:
        assert json.loads(again.run("shards", "list", "-o", "json").stdout) == json.loads(before)
