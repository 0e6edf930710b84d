"""Output of commands: results on stdout as a table or as JSON, everything else on stderr."""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from functools import partial
from inspect import Parameter as Argument
from inspect import Signature, signature
from itertools import zip_longest
from textwrap import wrap
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from cyclopts import Parameter

from hadelay.errors import BadRequest, HadelayError

R = TypeVar("R")
Format = Literal["table", "json"]
#: Default node addresses, used by `hadelay dev` and by the configuration files in the directory cluster/.
LOCAL_SERVERS = "http://127.0.0.1:8400,http://127.0.0.1:8401,http://127.0.0.1:8402"
#: Number of messages per page of a listing.
PAGE = 1_000

# Types of arguments that many commands share, with their help texts.
Topic = Annotated[str, Parameter(help="Name of the topic.")]
MessageId = Annotated[str | None, Parameter(help="Id of the message: 13 characters, returned by the publish.")]
OfTopic = Annotated[str | None, Parameter(help="Topic of the message, with --key instead of an id.")]
OfKey = Annotated[str | None, Parameter(help="Key of the message, with --topic instead of an id.")]
Stale = Annotated[bool, Parameter(help="Show the asked node's own view; works without a leader.")]
Limit = Annotated[int, Parameter(name=("--limit", "-n"), help="Limit of results; 0: all.")]
Yes = Annotated[bool, Parameter(name=("--yes", "-y"), help="Do not ask for confirmation; required in scripts.")]
#: Type of a repeatable option; the help does not show its empty default.
Several = Annotated[tuple[str, ...], Parameter(show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Printing:
    """Options of every command that prints a result."""

    output: Annotated[Format, Parameter(name=("--output", "-o"), env_var="HADELAY_OUTPUT")] = "table"
    "table for people, json for scripts."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Remote(Printing):
    """Options of every command that talks to a cluster."""

    servers: Annotated[str, Parameter(name=("--servers", "-s"), env_var="HADELAY_SERVERS")] = LOCAL_SERVERS
    "URLs of one or more nodes, separated by commas; any node serves every request."
    token: Annotated[str, Parameter(env_var="HADELAY_TOKEN", show_default=False)] = ""
    "Token, if the cluster requires one. Other users of this machine can see the option, but not the variable."

    def addresses(self) -> list[str]:
        return [url.strip().rstrip("/") for url in self.servers.split(",") if url.strip()]


def option(name: str, kind: Any, default: Any, help: str) -> Argument:
    """Make a command's option, for the decorator `takes`. default: dataclasses.MISSING for a required option."""
    default = Argument.empty if default is MISSING else default
    return Argument(name, Argument.KEYWORD_ONLY, default=default, annotation=Annotated[kind, Parameter(help=help)])


def takes(options: Iterable[Argument], help: str = "") -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorator that adds `options` to a command, which gets their values as keyword arguments (**given). help:
    docstring for a command without a docstring."""

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = [one for one in signature(command, eval_str=True).parameters.values() if one.kind is not one.VAR_KEYWORD]
        first = sum(one.kind is one.POSITIONAL_ONLY for one in own)
        found = [*own[:first], *options, *own[first:]]
        command.__signature__ = Signature(found)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in found}
        command.__doc__ = command.__doc__ or help
        return command

    return decorate


def emit_json(value: Any) -> None:
    """Print a value as one line of JSON, and flush: a reader may wait for the line."""
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.buffer.flush()


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def confirm(effect: str) -> None:
    """Ask for confirmation at the terminal. effect: a clause, such as "deletes 3 messages".

    BadRequest without a terminal; Declined when the answer is not yes.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadRequest(f"this {effect}, and there is no terminal to confirm; nothing was done. Use --yes")
    print(f"This {effect}. This cannot be undone. Continue? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Declined("not confirmed: nothing was done")


class Declined(HadelayError):
    """The user did not confirm."""

    type, title = "declined", "Not confirmed"


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    for line in table_lines(rows, columns):
        print(line)


def table_lines(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Lines of a table; missing cells are empty, and lines break only between words.

    A narrow terminal drops columns without values; if the table still does not fit, each row becomes a block with a
    line per field. In a file or a pipe, every row is one line.
    """
    cells = [{column: cell(row.get(column)) for column in columns} for row in rows]
    width = _columns()
    widths = _widths(cells, columns, width)
    if widths is None:
        widths = _widths(cells, [column for column in columns if any(row[column] for row in cells)], width)
    if widths is not None:
        yield from _grid_lines(cells, widths)
        return
    for n, row in enumerate(cells):
        if n:
            yield ""
        yield from _field_lines({column.replace("_", " "): text for column, text in row.items() if text})


_PIPE_COLUMNS = 400
_GAP = 2


def _columns() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS


def _lines(text: str, width: int) -> list[str]:
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _widths(rows: Sequence[Mapping[str, str]], columns: Sequence[str], width: int) -> dict[str, int] | None:
    """Width of each column, so that the table fits into `width` without breaking a word; None if impossible."""
    texts = {column: [column.replace("_", " "), *(row[column] for row in rows)] for column in columns}
    least = {name: max(len(word) for text in some for word in text.split() or [""]) for name, some in texts.items()}
    most = {name: max(map(len, some)) for name, some in texts.items()}
    left = width - sum(least.values()) - _GAP * (len(columns) - 1)
    if left < 0:
        return None
    found = {}
    for n, (name, low) in enumerate(sorted(least.items(), key=lambda item: most[item[0]] - item[1])):
        more = min(most[name] - low, left // (len(columns) - n))
        found[name], left = low + more, left - more
    return {name: found[name] for name in columns}


def _grid_lines(rows: Sequence[Mapping[str, str]], widths: Mapping[str, int]) -> Iterator[str]:
    head = {column: column.replace("_", " ") for column in widths}
    rule = {column: "─" * width for column, width in widths.items()}
    for row in (head, rule, *rows):
        lines = [_lines(row[name], width) for name, width in widths.items()]
        for parts in zip_longest(*lines, fillvalue=""):
            padded = (part.ljust(width) for part, width in zip(parts, widths.values(), strict=True))
            yield (" " * _GAP).join(padded).rstrip()


@contextmanager
def progress(
    total: int | None, done: int = 0, *, hidden: bool = False, sizes: bool = False
) -> Iterator[Callable[..., None]]:  # fmt: skip
    """Progress bar on stderr if it is a terminal; yields a function that is called with completed=… or advance=….
    sizes: the counts are bytes."""
    from rich import progress as rich
    from rich.console import Console

    shown = (
        (rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()) if sizes else (rich.MofNCompleteColumn(),)
    )
    columns = (rich.BarColumn(), *shown, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), disable=hidden or not sys.stderr.isatty()) as bars:
        yield partial(bars.update, bars.add_task("", total=total, completed=done))


def fields(value: Mapping[str, Any]) -> None:
    """Print a mapping, one line per field."""
    for line in _field_lines(value):
        print(line)


def _field_lines(value: Mapping[str, Any]) -> Iterator[str]:
    width = max(map(len, value), default=0)
    room = max(_columns() - width - _GAP, 1)
    for name, item in value.items():
        for n, line in enumerate(_lines(cell(item), room) or [""]):
            yield f"{'' if n else name:<{width}}{' ' * _GAP}{line}"


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
    # Replace control sequences of terminals, which a key or a reason may contain.
    return "".join(c if c.isprintable() else "�" for c in str(value))


def show(value: Any, printing: Printing, columns: Sequence[str] = ()) -> None:
    """Print a list of mappings, or one mapping, in the chosen format."""
    if printing.output == "json":
        emit_json(value)
    elif isinstance(value, Mapping):
        fields(value)
    else:
        table(value, columns)


def show_pages(
    page: Callable[[int, str | None], Any], limit: int, printing: Printing, columns: Sequence[str],
    row: Callable[[Any], Mapping[str, Any]] = lambda message: message,
) -> None:  # fmt: skip
    """Print the messages of all pages, up to `limit` (0: all); JSON is printed page by page. page(size, cursor):
    fetches one page. row: makes a message's row of the table."""
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
        note(f"the first {found:,} results; raise --limit for more")
