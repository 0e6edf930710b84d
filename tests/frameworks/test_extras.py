"""Without a framework's package, its part of hadelay says which extra to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("framework", ["django", "taskiq", "dramatiq", "mcp", "apscheduler"])
def test_the_import_names_the_extra(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("hadelay")
    for name in list(sys.modules):
        if name == f"hadelay.{framework}" or name.startswith(f"hadelay.{framework}."):
            monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.startswith(f"{framework}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(ImportError, match=rf"needs {framework}: install hadelay\[{framework}\]"):
        importlib.import_module(f"hadelay.{framework}")
