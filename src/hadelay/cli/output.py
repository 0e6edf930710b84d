"""What commands print: results on stdout as a table or as JSON, everything else on stderr."""

from __future__ import annotations

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
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
from cyclopts import Parameter

from hadelay.errors import BadRequest, HadelayError

R = TypeVar("R")
Format = Literal["table", "json"]
#: Where the nodes of `hadelay dev`, and of the files in cluster/, serve on this machine.
LOCAL_SERVERS = "http://127.0.0.1:8400,http://127.0.0.1:8401,http://127.0.0.1:8402"
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

    servers: Annotated[str, Parameter(name=("--servers", "-s"), env_var="HADELAY_SERVERS")] = LOCAL_SERVERS
    "URLs of one or more nodes, separated by commas; any node answers everything."
    token: Annotated[str, Parameter(env_var="HADELAY_TOKEN", show_default=False)] = ""
    "Where the cluster asks for one. Other users of this machine see what is typed here, but not the variable."

    def addresses(self) -> list[str]:
        return [url.strip().rstrip("/") for url in self.servers.split(",") if url.strip()]


class Option(NamedTuple):
    """An option of a command that is declared elsewhere. default: dataclasses.MISSING if there has to be a value."""

    name: str
    kind: Any
    default: Any
    help: str


def takes(options: Iterable[Option], help: str = "") -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorate a command that has **given: it takes these options in it. help: for a command without a docstring."""

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        own = [one for one in signature(command, eval_str=True).parameters.values() if one.kind is not one.VAR_KEYWORD]
        made = [
            Argument(
                option.name, Argument.KEYWORD_ONLY,
                default=Argument.empty if option.default is MISSING else option.default,
                annotation=Annotated[option.kind, Parameter(help=option.help)],
            )
            for option in options
        ]  # fmt: skip
        first = sum(one.kind is one.POSITIONAL_ONLY for one in own)
        found = [*own[:first], *made, *own[first:]]
        command.__signature__ = Signature(found)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in found}
        command.__doc__ = command.__doc__ or help
        return command

    return decorate


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
    """Columns by name; a cell that is missing is empty. Lines break between words and nowhere else.

    Where a terminal is too narrow for that, columns without a value go; where that is not enough, each row becomes a
    block with a line per field. A file or a pipe has no width of its own, so there every row is one line.
    """
    cells = [{column: cell(row.get(column)) for column in columns} for row in rows]
    width = _columns()
    widths = _widths(cells, columns, width)
    if widths is None:
        widths = _widths(cells, [column for column in columns if any(row[column] for row in cells)], width)
    if widths is not None:
        _print_grid(cells, widths)
        return
    for n, row in enumerate(cells):
        if n:
            print()
        fields({column.replace("_", " "): text for column, text in row.items() if text})


_PIPE_COLUMNS = 400
_GAP = 2


def _columns() -> int:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS


def _lines(text: str, width: int) -> list[str]:
    """As wide as that, unless a single word is wider."""
    return wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _widths(rows: Sequence[Mapping[str, str]], columns: Sequence[str], width: int) -> dict[str, int] | None:
    """Of each column, so that all of them fit and no word is broken; None: that cannot be."""
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


def _print_grid(rows: Sequence[Mapping[str, str]], widths: Mapping[str, int]) -> None:
    head = {column: column.replace("_", " ") for column in widths}
    rule = {column: "─" * width for column, width in widths.items()}
    for row in (head, rule, *rows):
        lines = [_lines(row[name], width) for name, width in widths.items()]
        for parts in zip_longest(*lines, fillvalue=""):
            padded = (part.ljust(width) for part, width in zip(parts, widths.values(), strict=True))
            print((" " * _GAP).join(padded).rstrip())


@contextmanager
def progress(
    total: int | None, done: int = 0, *, hidden: bool = False, sizes: bool = False
) -> Iterator[Callable[..., None]]:  # fmt: skip
    """update(completed=…) or update(advance=…) of a bar on stderr, while somebody watches. sizes: of bytes."""
    from rich import progress as rich
    from rich.console import Console

    shown = (
        (rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()) if sizes else (rich.MofNCompleteColumn(),)
    )
    columns = (rich.BarColumn(), *shown, rich.TimeRemainingColumn())
    with rich.Progress(*columns, console=Console(stderr=True), disable=hidden or not sys.stderr.isatty()) as bars:
        yield partial(bars.update, bars.add_task("", total=total, completed=done))


def fields(value: Mapping[str, Any]) -> None:
    """One thing, a line per field."""
    width = max(map(len, value), default=0)
    room = max(_columns() - width - _GAP, 1)
    for name, item in value.items():
        for n, line in enumerate(_lines(cell(item), room) or [""]):
            print(f"{'' if n else name:<{width}}{' ' * _GAP}{line}")


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
    # A key or a reason may have been chosen to steer the terminal.
    return "".join(c if c.isprintable() else "�" for c in str(value))


def span(ms: float) -> str:
    """A duration for people, in its two largest units: 850 ms, 12 s, 2 h 3 min, 3 d 4 h."""
    if ms < 1_000:
        return f"{ms:.0f} ms"
    left, parts = int(ms // 1_000), []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        parts.append(f"{count} {unit}" if count else "")
    first = next(n for n, part in enumerate(parts) if part)
    return " ".join(filter(None, parts[first : first + 2]))


def show(value: Any, printing: Printing, columns: Sequence[str] = ()) -> None:
    """A list of mappings, or one mapping, as asked for."""
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
