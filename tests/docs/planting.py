"""Runs a program that adds a row to a table before anything reads it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from tools import rowtypes


class Written(MetaPathFinder, InspectLoader):
    """Imports the modules that `make docs` would write now, in place of those on disk."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in rowtypes.MODULES else None

    def get_source(self, name: str) -> str:
        return rowtypes.MODULES[name]()


def planted(program: str) -> Any:
    """Run a program in a process of its own, and return the JSON that it prints."""
    root = rowtypes.SOURCE.parents[1]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
