"""wrk, the C load generator: one run, its figures."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "wrk"


class Missing(Exception):
    """A program that is not installed: its row is left out, with a note."""


@dataclass
class Figures:
    requests: int
    bad: int
    status: int
    seconds: float
    p50: float
    p99: float
    max: float

    @property
    def rate(self) -> float:
        """Good answers per second."""
        return (self.requests - self.status) / self.seconds


def wrk(url: str, script: str, connections: int, seconds: float, **environment: str) -> Figures:
    if shutil.which("wrk") is None:
        raise Missing("wrk is not installed (bench/install-peers)")
    command = ["wrk", "-t", "2", "-c", str(connections), "-d", f"{max(1, round(seconds))}s", "--timeout", "30s"]
    command += ["-s", str(SCRIPTS / f"{script}.lua"), url]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ, **environment), check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise Missing(f"wrk gave no result: {done.stderr.strip() or done.stdout.strip()}")
    return Figures(**json.loads(lines[0].removeprefix("RESULT ")))
