"""Pages that break, stop and restore a cluster: their commands are run against one of their own, in their order.

`hadelay serve` and `hadelay dev` are started in the background; before the next command all that were started say that
they are ready. What happens to machines stands in the page as comments: `lose: n3` ends a node and its disk, `end: n1`
stops one as its service manager would, `end: alone` what was started last.
"""

from __future__ import annotations

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
from tests.commands import Hadelay
from tests.docs.test_pages import ROOT, matches, steps
from tests.system.cluster import Cluster, environment, ready_line

#: In the order in which they stand in a page: comments, and console blocks.
_STEPS = re.compile(r"^<!-- (lose|end): (.*?) -->$|^```console\n(.*?)^```$", re.M | re.S)
pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


class Lab:
    """A cluster in a directory, and a shell beside it."""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        self.directory = directory
        self.cluster = cluster
        self.waiting: list[tuple[subprocess.Popen[bytes], Path]] = []
        self.last: subprocess.Popen[bytes] | None = None
        command = directory / "bin" / "hadelay"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m hadelay "$@"\n')
        command.chmod(0o755)
        alone = free_ports(2)
        self.ports = {"127.0.0.1:8490": f"127.0.0.1:{alone}", "127.0.0.1:8590": f"127.0.0.1:{alone + 1}"}

    def run(self, text: str) -> None:
        for verb, names, block in _STEPS.findall(text):
            for name in names.split():
                self.stop(verb, name)
            for command, expected in steps(block):
                for theirs, ours in self.ports.items():
                    command = command.replace(theirs, ours)
                if re.match("hadelay (serve|dev) ", command):
                    self.start(command)
                else:
                    self.do(command, expected)

    def stop(self, verb: str, name: str) -> None:
        if name == "alone":
            assert self.last is not None
            self.last.send_signal(signal.SIGTERM)
            self.last.wait(30)
            return
        self.cluster.kill(name, number=signal.SIGKILL if verb == "lose" else signal.SIGTERM)
        if verb == "lose":
            shutil.rmtree(self.cluster.directory / name.replace("-", "/"))

    def start(self, command: str) -> None:
        errors = self.directory / f"{len(self.cluster.children)}.err"
        with open(errors, "ab") as log:
            self.last = Hadelay(
                [sys.executable, "-m", "hadelay", *command.split()[1:], "-o", "json"], cwd=self.directory,
                env=self.environment(), stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.cluster.children.append(self.last)
        self.waiting.append((self.last, errors))

    def do(self, command: str, expected: str) -> None:
        for process, errors in self.waiting:
            node = ready_line(process, errors)["nodes"][0]
            if command_of(process)[2:3] == ["dev"]:
                self.cluster.pids[node["name"]] = node["pid"]
        self.waiting.clear()
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.directory, env=self.environment(), capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        assert matches(expected, done.stdout), f"$ {command}\nprinted\n{done.stdout}\ninstead of\n{expected}"

    def environment(self) -> dict[str, str]:
        path = f"{self.directory / 'bin'}:{os.environ['PATH']}"
        return environment() | {"PATH": path, "HADELAY_SERVERS": ",".join(self.cluster.urls.values())}


def command_of(process: subprocess.Popen[bytes]) -> list[str]:
    words = process.args
    assert isinstance(words, list)
    return [str(word) for word in words[1:]]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path, Cluster(tmp_path / "lab"))
    with lab.cluster:  # which ends what was started
        yield lab


@pytest.mark.parametrize("page", ["disaster-recovery", "upgrade", "members"])
def test_every_command(lab: Lab, page: str) -> None:
    lab.run((ROOT / "docs" / "howto" / f"{page}.md").read_text())
