"""Which lines of four packages the simulator's seeds run: `python -m tools.coverage [FIRST [COUNT]]`.

Counted are the statements in functions, so nothing that an import runs. Modules are loaded with a note before each of
those statements: a seed takes a tenth longer than without. Prints what was never run, by file, and the share of what
was, by package.
"""

from __future__ import annotations

import ast
import builtins
import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import CodeType
from typing import Any

SOURCE = Path(__file__).resolve().parent.parent / "src" / "hadelay"
PACKAGES = ("ledger", "handout", "storage", "raft")


class Notes(ast.NodeTransformer):
    """Puts `NAME[line] = 1` before the statements of functions; `lines` are those of them."""

    def __init__(self, name: str) -> None:
        self.name, self.lines, self._depth = name, set[int](), 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        within = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        self._depth += within
        super().generic_visit(node)
        self._depth -= within
        if within or (self._depth and isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case)):
            for block in ("body", "orelse", "finalbody"):
                statements = getattr(node, block, [])
                if statements:
                    setattr(node, block, [new for statement in statements for new in self._noted(statement)])
        return node

    def _noted(self, statement: ast.stmt) -> list[ast.stmt]:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return [statement]  # a docstring, or the body of a protocol's method
        self.lines.add(statement.lineno)
        note = ast.parse(f"{self.name}[{statement.lineno}] = 1").body[0]
        for node in ast.walk(note):
            ast.copy_location(node, statement)
        return [note, statement]


class Watch:
    """Modules of these packages that are imported from now on note which of their lines are run."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.files = [path for package in packages for path in sorted((SOURCE / package).resolve().glob("*.py"))]
        sizes = [len(path.read_text().splitlines()) + 1 for path in self.files]
        #: 1 at each line that was run, of all files; and per file.
        self.flat = bytearray(sum(sizes))
        view = memoryview(self.flat)
        self.hits = [view[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]

    def noted(self, number: int) -> tuple[CodeType, set[int]]:
        path = self.files[number]
        notes = Notes(f"__noted_{number}__")
        tree = notes.visit(ast.parse(path.read_text()))
        return compile(ast.fix_missing_locations(tree), str(path), "exec"), notes.lines

    def start(self) -> None:
        numbers = {str(path): number for number, path in enumerate(self.files)}
        for number, lines in enumerate(self.hits):
            setattr(builtins, f"__noted_{number}__", lines)
        loaded = SourceFileLoader.get_code

        def get_code(loader: SourceFileLoader, fullname: str) -> Any:
            number = numbers.get(loader.get_filename(fullname))
            return loaded(loader, fullname) if number is None else self.noted(number)[0]

        SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


def run(seeds: range) -> list[bytes]:
    watch = Watch(PACKAGES)
    watch.start()
    from chaos.sim import cli

    cli._quiet()
    for seed in seeds:
        report = cli.Options().run(seed)
        assert not report.failure, cli.explain(report)
    return [bytes(lines) for lines in watch.hits]


def main(first: int = 1, count: int = 300, jobs: int = os.cpu_count() or 1) -> None:
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        parts = pool.map(run, [range(first + n, first + count, jobs) for n in range(jobs)])
    shares, watch = [], Watch(PACKAGES)
    for package in PACKAGES:
        total = missed = 0
        for number, path in enumerate(watch.files):
            if path.parent.name != package:
                continue
            wanted = watch.noted(number)[1]
            never = sorted(line for line in wanted if not any(part[number][line] for part in parts))
            total, missed = total + len(wanted), missed + len(never)
            if never:
                print(f"{package}/{path.name}: {len(never)} of {len(wanted)}: {', '.join(map(str, never))}")
        shares.append(f"{package}: {100 - 100 * missed / total:.1f} % of {total} lines")
    print("\n".join(shares))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
