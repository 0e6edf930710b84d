"""The first start of three nodes that nobody told to found a cluster: what they say, and the way out of it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.freeports import free_ports
from tests.system.cluster import ask, end, ready_line, spawn, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
NAMES = ("n1", "n2", "n3")


class Three:
    """Nodes with a file each, as in docs/howto/three-machines.md."""

    def __init__(self, directory: Path) -> None:
        self.directory, port = directory, free_ports(6)
        self.urls = {name: f"http://127.0.0.1:{port + n}" for n, name in enumerate(NAMES)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        peers = "".join(f'{name} = "127.0.0.1:{port + 3 + n}"\n' for n, name in enumerate(NAMES))
        for n, name in enumerate(NAMES):
            (directory / f"{name}.toml").write_text(
                f'[node]\nname = "{name}"\ndata_dir = "{directory / name}"\n[cluster]\nid = "first"\n'
                f'[http]\nlisten = "127.0.0.1:{port + n}"\n[raft]\nlisten = "127.0.0.1:{port + 3 + n}"\n'
                f"[raft.peers]\n{peers}"
            )

    def start(self, *names: str, init: bool = False) -> None:
        for name in names:
            words = ("serve", self.directory / f"{name}.toml", "-o", "json", *(["--init"] if init else []))
            self.processes[name] = spawn(*words, errors=self.directory / f"{name}.log")

    def stop(self, *names: str) -> None:
        for name in names:
            end(self.processes.pop(name))

    def why(self, name: str) -> str:
        """What /readyz says of the leader."""
        checks = ask(self.urls[name], "GET", "/readyz?verbose").json["checks"]
        return str(next(check["detail"] for check in checks if check["name"] == "leader"))


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Three]:
    nodes = Three(tmp_path)
    yield nodes
    nodes.stop(*nodes.processes)


def test_nodes_without_an_order_to_found_a_cluster_say_so_and_found_one_on_order(three: Three) -> None:
    three.start("n1", "n2")
    expected = (
        "the data directory is empty, and this node may not found a cluster. Very first start: stop all nodes and "
        "start each once with --init (or cluster.init = true). Otherwise the node waits for members that hold data: n3 "
        "is not connected; n2 is connected, but without data and without a vote"
    )
    until(lambda: three.why("n1") == expected, "the words")
    log = three.directory / "n1.log"

    def said() -> list[str]:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return next((line["why"] for line in lines if line["event"] == "not_ready"), [])

    assert expected in until(said, "the log says it too")
    # What they made of their directories meanwhile does not keep them from founding one: not all at once either.
    three.stop("n1")
    three.start("n1", init=True)
    until(lambda: "no majority can be reached" in three.why("n1"), "n1 would found one")
    assert "n2 is connected, but without data and without a vote" in until(
        lambda: three.why("n1") if "n2 is connected" in three.why("n1") else "", "n2 came"
    )
    three.stop("n2")
    three.start("n2", init=True)
    for name in ("n1", "n2"):
        ready_line(three.processes[name], three.directory / f"{name}.log")
    assert ask(three.urls["n2"], "POST", "/v1/topics/t/messages", b"x").status == 201
    # A third one needs no --init any more.
    three.start("n3")
    ready_line(three.processes["n3"], three.directory / "n3.log")


def test_a_disk_that_was_lost_founds_nothing(three: Three) -> None:
    """With `init` still in the file: the node is as empty as at a first start, and knows that it once was not."""
    three.start(*NAMES, init=True)
    for name in NAMES:
        ready_line(three.processes[name], three.directory / f"{name}.log")
    three.stop(*NAMES)
    identity = three.directory / "n1/g0/identity"
    os.unlink(identity)
    for _ in range(2):
        three.start("n1", init=True)
        until(lambda: "may not found a cluster" in three.why("n1"), "it waits for the others")
        three.stop("n1")
