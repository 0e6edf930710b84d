"""Functions have at most 50 lines and six positional parameters, and files at most 450 lines (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.test_layers import parsed

ROOT = Path(__file__).resolve().parents[2]
#: Folders whose functions are measured; and those whose files and parameters are measured too. A file of tests may be
#: longer, because a reader needs one test at a time.
FOLDERS, FILES = ("src", "chaos", "bench", "tools", "cluster", "tests"), ("src", "chaos", "bench", "tools", "cluster")
#: Limits: lines of a function without its docstring and its comments, positional parameters without `self`, and lines
#: of a file.
MOST_LINES, MOST_PARAMETERS, MOST_LINES_OF_FILE = 50, 6, 450
#: Files that are one noun each, and may have more lines: a table of metrics, the requests of a client, the checks of a
#: history, a list of mutations. This list may only get shorter.
LONG_FILES = {
    "src/hadelay/client/requests.py": 490,
    "src/hadelay/server/metrics.py": 480, "chaos/checkers.py": 640,
    "chaos/cluster.py": 490, "chaos/run.py": 460, "chaos/sim/cluster.py": 490, "chaos/sim/mutations/server.py": 530,
}  # fmt: skip
#: Longer functions, by file and name, each with its number of lines. This list may only get shorter.
LONG_FUNCTIONS = {
    ("tests/chaos/test_checkers.py", "kept"): 76,
    ("tests/frameworks/test_taskiq.py", "test_calls"): 66,
    ("tests/fuzz/targets.py", "entries"): 60,
    ("tests/ledger/test_commands.py", "test_the_examples_of_the_specification"): 67,
    ("tests/ledger/test_failures_model.py", "play"): 55,
    ("tests/overload/scenarios.py", "storm"): 64,
    ("tests/overload/scenarios.py", "_wait"): 58,
    ("tests/pipeline/support.py", "one_of_each"): 60,
    ("tests/pipeline/test_real.py", "test_an_hour_from_its_first_message_to_its_deletion"): 72,
    ("tests/system/test_members.py", "test_one_grows_to_three_and_a_dead_one_is_replaced_under_traffic"): 53,
}
#: Functions with more parameters: each overrides or replaces a function with these parameters.
MANY_PARAMETERS = {
    ("src/hadelay/celery/results.py", "wait_for_pending"),
    ("chaos/sim/mutations/jobs.py", "ignored_retry_after"),
    ("chaos/sim/mutations/jobs.py", "any_answer_is_yes"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def lines_of(function: Function, source: list[str]) -> int:
    """Number of lines of a function, without decorators, docstring and lines that are only a comment."""
    first = function.body[0]
    texts = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    docstring = range(first.lineno, (first.end_lineno or 0) + 1) if texts else range(0)
    lines = range(function.lineno, (function.end_lineno or 0) + 1)
    return sum(n not in docstring and not source[n - 1].lstrip().startswith("#") for n in lines)


def parameters_of(function: Function) -> int:
    named = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def sources(folders: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT).as_posix(), path


def test_functions_are_short() -> None:
    found = {}
    for name, path in sources(FOLDERS):
        source = path.read_text().splitlines()
        for function in functions(parsed(path)):
            if (count := lines_of(function, source)) > MOST_LINES:
                found[name, function.name] = count
    assert {which: count for which, count in found.items() if count > LONG_FUNCTIONS.get(which, 0)} == {}
    assert LONG_FUNCTIONS.keys() <= found.keys(), "some functions are short by now: make LONG_FUNCTIONS shorter"


def test_functions_have_few_positional_parameters() -> None:
    found = {
        (name, function.name)
        for name, path in sources(FILES)
        for function in functions(parsed(path))
        if parameters_of(function) > MOST_PARAMETERS
    }
    assert found == MANY_PARAMETERS


def test_files_are_short() -> None:
    counts = {name: len(path.read_text().splitlines()) for name, path in sources(FILES)}
    long = {name: count for name, count in counts.items() if count > MOST_LINES_OF_FILE}
    beyond = {name: count for name, count in long.items() if count > LONG_FILES.get(name, 0)}
    assert not beyond, f"look for a second noun in {beyond}; do not cut fragments out"
    assert LONG_FILES.keys() <= long.keys(), "some files are short by now: make LONG_FILES shorter"


@pytest.mark.parametrize(
    ("planted", "lines", "parameters"),
    [
        ("def f():\n" + "    x = 1\n" * 50, 51, 0),
        ('def f():\n    """What it does.\n\n    More."""\n    # Why.\n' + "    x = 1\n" * 49, 50, 0),
        ("class A:\n    async def f(self, a, b, /, c, d, e, f, g, *, h):\n        return a\n", 2, 7),
    ],
)
def test_sizes_of_a_planted_function(planted: str, lines: int, parameters: int) -> None:
    (function,) = functions(ast.parse(planted))
    assert (lines_of(function, planted.splitlines()), parameters_of(function)) == (lines, parameters)


#: Files in which a function or the file would be too long without the mark. This list may only get shorter.
MARKED = {
    "cli/schedule.py", "ledger/hours/transitions.py",
    "process.py", "rules/publishing.py", "server/node.py", "server/service/consuming.py", "settings/topic.py",
}  # fmt: skip


def _is_table(statement: ast.stmt) -> bool:
    """Whether the statement has a list, tuple, set or dictionary of four or more values on three or more lines."""
    return any(
        isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict)
        and len(node.keys if isinstance(node, ast.Dict) else node.elts) >= 4
        and (node.end_lineno or 0) - node.lineno >= 2
        for node in ast.walk(statement)
    )


def test_only_tables_are_laid_out_by_hand() -> None:
    wrong = set()
    for path in sorted((ROOT / "src/hadelay").rglob("*.py")):
        marks = {n for n, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# fmt: skip")}
        if not marks:
            continue
        tables = {
            n
            for statement in ast.walk(parsed(path))
            if isinstance(statement, ast.stmt) and not isinstance(statement, Function) and _is_table(statement)
            for n in range(statement.lineno, (statement.end_lineno or 0) + 1)
        }
        if marks - tables:
            wrong.add(str(path.relative_to(ROOT / "src/hadelay")))
    assert wrong == MARKED
