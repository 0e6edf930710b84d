"""What commands print: results on stdout as a table or as JSON, everything else on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from hadelay.errors import BadRequest, HadelayError

Format = Literal["table", "json"]
#: What is listed is asked for so many at a time.
PAGE = 1_000

# Arguments of many commands, with their words: docstrings leave them out.
Topic = Annotated[str, Parameter(help="Its name.")]
MessageId = Annotated[str | None, Parameter(help="The 13 characters that publishing gave.")]
OfTopic = Annotated[str | None, Parameter(help="Or its topic,")]
OfKey = Annotated[str | None, Parameter(help="and the key that it was published under.")]
Stale = Annotated[bool, Parameter(help="What the asked node knows, without confirming it with the leader.")]
Limit = Annotated[int, Parameter(name=("--limit", "-n"), help="At most so many; 0 for all there are.")]
Yes = Annotated[bool, Parameter(name=("--yes", "-y"), help="Do not ask first; a script has to say so.")]
#: Without a default that is shown: none are what nothing is.
Several = Annotated[tuple[str, ...], Parameter(show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Printing:
    """Options of every command that prints a result."""

    output: Annotated[Format, Parameter(name=("--output", "-o"), env_var="HADELAY_OUTPUT")] = "table"
    "A table to read, or JSON to pipe."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Remote(Printing):
    """Options of every command that talks to a cluster."""

    servers: Annotated[str, Parameter(name=("--servers", "-s"), env_var="HADELAY_SERVERS")] = "http://127.0.0.1:8400"
    "URLs of one or more nodes, separated by commas; any node answers everything."
    token: Annotated[str, Parameter(env_var="HADELAY_TOKEN", show_default=False)] = ""
    "Where the cluster asks for one. Other users of this machine see what is typed here, but not the variable."

    def addresses(self) -> list[str]:
        return [url.strip().rstrip("/") for url in self.servers.split(",") if url.strip()]


def emit_json(value: Any) -> None:
    """One line, so that a reader can take the output line by line. Flushed: it may be waiting for it."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def note(text: str) -> None:
    """To the person, not to the pipe."""
    print(text, file=sys.stderr, flush=True)


def confirm(effect: str) -> None:
    """Ask the person at the terminal before something is lost for good. effect: a clause, such as "deletes 3 messages".

    Raises BadRequest where nobody can be asked, and Declined when the answer is not yes: then nothing has happened.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadRequest(f"this {effect}, and there is no terminal to ask on; nothing was done. --yes does it unasked")
    print(f"This {effect}. It cannot be undone. Go on? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Declined("not confirmed: nothing was done")


class Declined(HadelayError):
    """The person at the terminal did not say yes."""

    type, title = "declined", "Not confirmed"


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Columns by name; a cell that is missing is empty. Plain text when stdout is not a terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        grid.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        grid.add_row(*(cell(row.get(column)) for column in columns))
    # A file or a pipe has no width of its own: never fold an id because of a guess of 80 columns.
    width = None if sys.stdout.isatty() else 400
    Console(highlight=False, markup=False, width=width).print(grid)


@contextmanager
def progress(total: int | None, done: int = 0, *, hidden: bool = False) -> Iterator[Callable[..., None]]:
    """update(completed=…) of a bar on stderr, while somebody watches."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=hidden or not sys.stderr.isatty()) as bars:
        yield partial(bars.update, bars.add_task("", total=total, completed=done))


def fields(value: Mapping[str, Any]) -> None:
    """One thing, a line per field."""
    width = max(map(len, value), default=0)
    for name, item in value.items():
        print(f"{name:<{width}}  {cell(item)}")


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, Mapping):
        return " ".join(f"{k}={cell(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value)
    return str(value)


def show(value: Any, printing: Printing, columns: Sequence[str] = ()) -> None:
    """A list of mappings, or one mapping, as asked for."""
    if printing.output == "json":
        emit_json(value)
    elif isinstance(value, Mapping):
        fields(value)
    else:
        table(value, columns)


def show_pages(
    page: Callable[[int, str | None], Any],
    limit: int,
    printing: Printing,
    columns: Sequence[str],
    row: Callable[[Any], Mapping[str, Any]] = lambda message: message,
) -> None:
    """The messages of page after page, at most `limit` of them (0: all), as they come when it is JSON. page: of a size,
    from a cursor on. row: what a table has of one."""
    if limit < 0:
        raise BadRequest(f"--limit {limit}: expected 0 or more")
    rows: list[Mapping[str, Any]] = []
    found, cursor = 0, None
    while True:
        answer = page(min(limit - found, PAGE) if limit else PAGE, cursor)
        found, cursor = found + len(answer["messages"]), answer["cursor"]
        if printing.output == "json":
            for message in answer["messages"]:
                emit_json(message)
        else:
            rows += map(row, answer["messages"])
        if cursor is None or (limit and found >= limit):
            break
    if printing.output != "json":
        table(rows, columns)
    if cursor is not None:
        note(f"the first {found:,}: there are more, --limit says how many to show")
