"""Real clusters for tests, by `hadelay dev`, and the command line as a shell sees it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.freeports import free_ports
from tests.commands import command, started

SOURCE = Path(__file__).resolve().parents[2] / "src"


def environment(**more: str) -> dict[str, str]:
    """Ours without any HADELAY_ of the developer, so that a test means the same everywhere."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HADELAY_")}
    return {**clean, "PYTHONPATH": str(SOURCE), "COLUMNS": "200", **more}


def hadelay(*words: object, stdin: bytes = b"", **variables: str) -> subprocess.CompletedProcess[str]:
    return command(words, environment(**variables), stdin)


@dataclass
class Dev:
    """A `hadelay dev` in the background."""

    process: subprocess.Popen[bytes]
    directory: Path
    nodes: list[dict[str, Any]] = field(default_factory=list)

    def run(self, *words: object, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        return hadelay(*words, stdin=stdin, HADELAY_SERVERS=self.servers)

    @property
    def servers(self) -> str:
        return ",".join(node["http"] for node in self.nodes)

    def line(self) -> dict[str, Any]:
        """The next line of its output; the test's own time limit is the limit."""
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(40)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def start(directory: Path, *words: object, errors: Any = None) -> Dev:
    command = ("dev", "--data-dir", directory, "-o", "json", *words)
    process = started(command, environment(), stdout=subprocess.PIPE, stderr=errors, start_new_session=True)
    dev = Dev(process, directory)
    try:
        dev.nodes = dev.line()["nodes"]
    except ValueError:
        dev.end()
        raise
    return dev


@contextlib.contextmanager
def cluster(directory: Path, *words: object, errors: Any = None) -> Iterator[Dev]:
    dev = start(directory, "--port-base", free_ports(6), *words, errors=errors)
    try:
        yield dev
    finally:
        dev.end()
