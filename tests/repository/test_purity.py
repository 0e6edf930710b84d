"""Codec, ledger and hand-out do no I/O and read no clock; nothing that they import does (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.repository.test_layers import SOURCE, files, graph, parsed, part_of, reachable

#: Parts that must be pure.
PARTS = ("codec", "ledger", "handout")
#: Further modules that promise to be pure.
MODULES = ("server.clustertime", "settings.topic", "settings.urls")
#: Packages that pure code may import: none of them does I/O, reads a clock, or draws random numbers on its own.
PACKAGES = {
    "__future__", "array", "base64", "bisect", "collections", "dataclasses", "datetime", "enum", "errno", "functools",
    "google_crc32c", "hadelay", "hashlib", "heapq", "ipaddress", "itertools", "json", "math", "msgpack", "msgspec",
    "numpy", "operator", "pyroaring", "re", "struct", "typing", "urllib.parse",
}  # fmt: skip
#: Builtin functions that pure code must not call. `hash` and `id` differ between the processes of two replicas.
BUILTINS = {"open", "input", "print", "exec", "eval", "compile", "breakpoint", "__import__", "hash", "id"}
#: Members of the packages above that pure code must not use, by the names under which they are imported.
MEMBERS = {
    "datetime": {"now", "utcnow", "today"}, "date": {"today"},
    "np": {"random", "load", "save", "savez", "savez_compressed", "loadtxt", "savetxt", "genfromtxt", "fromfile",
           "memmap", "fromregex", "lib", "ctypeslib"},
}  # fmt: skip
#: What single modules use all the same: the filter computes its hash once, for `__hash__`. This list may only get
#: shorter.
EXCEPTIONS = {"codec/meta.py": ["hash()"]}
#: Methods of any object that pure code must not call: `ndarray.tofile`, `ndarray.dump`.
METHODS = {"tofile", "dump"}


def impurities(tree: ast.Module) -> Iterator[str]:
    """Imports, calls and members in a module that pure code must not have; imports only for types included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            named = [(alias.name, alias.asname or "") for alias in node.names]
            yield from (f"import {name}" for name, _ in named if not _is_allowed(name))
            # Another name for numpy or datetime would hide their members from the check below.
            yield from (f"{name} as {other}" for name, other in named if other and (name, other) != ("numpy", "np"))
        elif isinstance(node, ast.ImportFrom):
            if not _is_allowed(str(node.module)):
                yield f"from {node.module} import …"
            elif node.module in ("numpy", "datetime"):
                wrong = {a.name for a in node.names if a.asname or a.name in MEMBERS["np"] | {"*"}}
                yield from (f"from {node.module} import {name}" for name in sorted(wrong))
        elif isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Attribute) and node.attr in MEMBERS.get(ast.unparse(node.value), ()):
            yield ast.unparse(node)


def _is_allowed(module: str) -> bool:
    names = module.split(".")
    return any(".".join(names[:n]) in PACKAGES for n in range(1, len(names) + 1))


def _of_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    constants = {argument.value for argument in call.args if isinstance(argument, ast.Constant)}
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in BUILTINS:
        yield f"{name}()"
    elif name == "np.datetime64" and not {"now", "today"}.isdisjoint(constants):
        yield f"{name}(now)"
    # Without a time zone, these methods read the time zone of the machine.
    elif len(call.args) + len(call.keywords) < {"fromtimestamp": 2, "astimezone": 1}.get(method, 0):
        yield f"{name}() without a time zone"
    elif method in METHODS:
        yield f"{name}()"


def pure_modules() -> set[str]:
    own = {module for module in graph() if part_of(module) in PARTS or module in MODULES}
    return own.union(*map(reachable, own))


def test_pure_modules_do_no_io_and_read_no_clock() -> None:
    modules = pure_modules()
    assert {part_of(module) for module in modules} >= {*PARTS, "model", "settings"}
    trees = {path: parsed(path) for path in files("") if _module(path.relative_to(SOURCE).as_posix()) in modules}
    assert len(trees) == len(modules)
    wrong = {path.relative_to(SOURCE).as_posix(): [*impurities(tree)] for path, tree in trees.items()}
    assert {name: found for name, found in wrong.items() if found} == EXCEPTIONS


def _module(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


@pytest.mark.parametrize(
    "planted",
    [
        "import time", "import random", "import os", "import os.path", "import socket", "import asyncio",
        "import threading", "import logging", "import secrets", "import uuid", "import subprocess", "import importlib",
        "import sys", "import multiprocessing", "import tempfile", "import io", "import locale", "import aiohttp",
        "import zoneinfo", "import urllib.request", "import numpy as numbers", "import datetime as dt",
        "from pathlib import Path", "from time import monotonic", "from concurrent.futures import ThreadPoolExecutor",
        "from numpy import random", "from numpy import fromfile as columns", "from datetime import datetime as moment",
        "def late():\n    from time import time\n    return time()",
        "if TYPE_CHECKING:\n    from asyncio import Task",
        'open("hour.log")', "def read(path):\n    with open(path) as file:\n        return file.read()",
        "print(1)", '__import__("time")', 'eval("1")', "hash(name)", "id(row)",
        "datetime.now()", "datetime.now(UTC)", "datetime.utcnow()", "datetime.today()", "clock = datetime.now",
        "datetime.fromtimestamp(0)", "at.astimezone()", 'np.datetime64("now")',
        "np.random.default_rng()", "np.fromfile(path)", "np.load(path)", "np.memmap(path)", "rows.tofile(path)",
    ],
)  # fmt: skip
def test_planted_impurity_is_found(planted: str) -> None:
    """Planted at the end of a real file of the ledger."""
    source = (SOURCE / "ledger/messages/publish.py").read_text()
    assert [*impurities(ast.parse(source))] == []
    assert [*impurities(ast.parse(f"{source}\n{planted}\n"))] != []


def test_imports_of_pure_modules_are_followed() -> None:
    """A leaf that the ledger imports is checked as the ledger is."""
    assert {"errors", "model", "words"} <= pure_modules()
    assert "process" not in pure_modules()
