"""The contenders' libraries: installed into a directory of the bench's own, never into the project's environment."""

from __future__ import annotations

import importlib.machinery
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
FIELD = ROOT / ".data" / "delays"
PYTHON, NODE = FIELD / "python", FIELD / "node"


def install() -> None:
    """Install the pinned libraries from PyPI and npm; a registry that cannot be reached costs its contenders."""
    shutil.rmtree(FIELD, ignore_errors=True)
    NODE.mkdir(parents=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(PYTHON), "--no-deps"]
    subprocess.run([*pip, "-r", str(HERE / "requirements.txt")], check=False)
    if shutil.which("npm") is None:
        print("npm is not installed: contenders that need Node.js are left out", file=sys.stderr)
        return
    for name in ("package.json", "package-lock.json"):
        shutil.copy(HERE / "node" / name, NODE)
    subprocess.run(["npm", "ci", "--silent", "--no-audit", "--no-fund"], cwd=NODE, check=False)


def environment() -> dict[str, str]:
    """Environment of producers and workers: libraries first, then the project."""
    paths = [str(PYTHON), str(ROOT), str(ROOT / "src")]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(paths), PYTHONWARNINGS="ignore")


def has_module(name: str) -> bool:
    return importlib.machinery.PathFinder.find_spec(name, [str(PYTHON)]) is not None


def has_node_module(name: str) -> bool:
    return (NODE / "node_modules" / name / "package.json").exists()
