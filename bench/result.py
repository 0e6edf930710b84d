"""What a row yields, and how a figure becomes a verdict."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.cluster import Cluster


@dataclass
class Target:
    """A bound on one figure. `limit` at least (or at most), `goal` beyond it; a row missed by over 20 % is failed."""

    figure: str
    limit: float
    goal: float | None = None
    at_most: bool = False

    def verdict(self, value: float) -> str:
        def within(bound: float) -> bool:
            return value <= bound if self.at_most else value >= bound

        if self.goal is not None and within(self.goal):
            return "goal"
        if within(self.limit):
            return "met"
        return "near" if within(self.limit * (1.2 if self.at_most else 0.8)) else "MISSED"


@dataclass
class Row:
    """One line of the table: figures by name, a value per round; the median speaks for it."""

    name: str
    title: str
    targets: list[Target]
    samples: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, figure: str, value: float, unit: str = "") -> None:
        self.samples.setdefault(figure, []).append(value)
        self.units[figure] = unit

    def ratio(self, figure: str, of: str, to: str) -> None:
        """Round by round, so that a slow moment of the machine hits both sides of it."""
        if to not in self.samples or of not in self.samples:
            return
        pairs = zip(self.samples[of], self.samples[to], strict=False)
        self.samples[figure] = [a / b for a, b in pairs if b]
        self.units[figure] = "×"

    def median(self, figure: str) -> float | None:
        values = self.samples.get(figure)
        return statistics.median(values) if values else None

    def verdicts(self) -> list[tuple[Target, float | None, str]]:
        found = []
        for target in self.targets:
            value = self.median(target.figure)
            found.append((target, value, "not measured" if value is None else target.verdict(value)))
        return found


@dataclass
class Setup:
    """Options that all rows get."""

    rounds: int
    quick: bool
    directory: Path
    port: int
    say: Callable[[str], None]
    #: Checkout of the version that the row `unused` compares with.
    before: Path | None = None

    def each_round(self, name: str) -> Iterator[int]:
        """Their numbers."""
        for number in range(self.rounds):
            self.say(f"{name}, round {number + 1}")
            yield number

    def cluster(self, **how: Any) -> Cluster:
        """A fresh one of three."""
        return Cluster.start(self.directory / "ours", self.port, **how)

    def seconds(self, full: float) -> float:
        return min(full, 4.0) if self.quick else full

    def many(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def machine() -> dict[str, Any]:
    model = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpus": os.cpu_count(),
        "cpu": model[0] if model else platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def save(rows: list[Row], path: Path) -> None:
    path.write_text(json.dumps({"machine": machine(), "rows": [asdict(row) for row in rows]}, indent=1))
