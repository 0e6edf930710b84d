"""The core does no input or output, and knows nobody above it."""

from __future__ import annotations

import ast
from pathlib import Path

import hadelay.core

CORE = Path(hadelay.core.__file__).parent
BANNED = {"asyncio", "logging", "os", "random", "socket", "threading", "time", "datetime", "secrets", "uuid"}
OURS = {"hadelay.core", "hadelay.model", "hadelay.errors"}


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def test_core_does_no_io() -> None:
    offenders = {p.name: bad for p in CORE.glob("*.py") if (bad := {m.split(".")[0] for m in imports(p)} & BANNED)}
    assert offenders == {}


def test_core_imports_nothing_above_it() -> None:
    ours = {p.name: {m for m in imports(p) if m.startswith("hadelay")} for p in CORE.glob("*.py")}
    offenders = {n: bad for n, ms in ours.items() if (bad := {m for m in ms if not any(m.startswith(o) for o in OURS)})}
    assert offenders == {}
