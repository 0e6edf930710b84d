"""What the Makefile and the pages start by path or by name can be imported, from any directory."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("bench", "chaos", "tools")
    for path in (ROOT / package).rglob("*.py")
    if path.name != "__main__.py"
)


def test_the_demo_starts_from_any_directory(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, ROOT / "cluster" / "local" / "demo.py", "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "make demo" in done.stdout


PUBLISHED = {"id": "m1", "due": 5_000, "producer": 0, "n": 1}


@pytest.mark.parametrize(
    ("delivered", "count"),
    [
        # What the cluster says of its own delivery does not count: it filed the message 500 ms early.
        ({"id": "m1", "at": 4_500.0, "due": 4_500, "deliver_at": 4_500, "producer": 0, "n": 1}, "early"),
        ({"id": "m2", "at": 5_001.0, "producer": 0, "n": 1}, "phantom"),
        ({"id": "m1", "at": 5_001.0, "producer": 0, "n": 2}, "phantom"),
    ],
)
def test_the_demo_judges_by_what_producers_asked_for(tmp_path: Path, delivered: dict[str, object], count: str) -> None:
    demo = runpy.run_path(str(ROOT / "cluster" / "local" / "demo.py"))
    right = {"id": "m1", "at": 5_002.0, "producer": 0, "n": 1}
    for deliveries, expected in (([right], 0), ([right, delivered], 1)):
        (tmp_path / "published0").write_text(json.dumps(PUBLISHED) + "\n")
        (tmp_path / "consumed0").write_text("".join(json.dumps(note) + "\n" for note in deliveries))
        outcome = demo["_judge"](tmp_path, 1_000.0)
        assert (getattr(outcome, count), outcome.lost, outcome.failed("interval")) == (expected, 0, bool(expected))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_beside_the_package_can_be_imported(name: str) -> None:
    import_module(name)
