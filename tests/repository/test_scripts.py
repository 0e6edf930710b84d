"""What the Makefile and the pages start by path or by name can be imported, from any directory."""

from __future__ import annotations

import os
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


@pytest.mark.parametrize("name", MODULES)
def test_a_module_beside_the_package_can_be_imported(name: str) -> None:
    import_module(name)
