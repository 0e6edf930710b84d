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
OptionalTopic = Annotated[str | None, Parameter(help="Name of the topic. Default: all topics.")]
MessageId = Annotated[str | None, Parameter(help="Id of the message: 13 characters, returned by the publish.")]
OfTopic = Annotated[str | None, Parameter(help="Topic of the message, with --key instead of an id.")]
OfKey = Annotated[str | None, Parameter(help="Key of the message, with --topic instead of an id.")]
Stale = Annotated[bool, Parameter(help="Show the asked node's own view; works without a leader.")]
Limit = Annotated[int, Parameter(name=("--limit", "-n"), help="Limit of results; 0: all.")]
Partial = Annotated[bool, Parameter(help="Leave out what shards have that do not answer, instead of an error.")]
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

    shard: Annotated[int | None, Parameter(env_var="HADELAY_SHARD", show_default=False)] = None
    "Shard to ask, of several; it has to have the topic or message of the command. Default: all shards, as one."

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


def json_line(value: Any) -> bytes:
    """`value` as one line of JSON. Control characters, which a terminal would obey, are JSON escapes of equal value."""
    text = msgspec.json.encode(value).decode()
    if not text.isascii() or "\x7f" in text:
        text = "".join(c if c.isprintable() else _escaped(c) for c in text)
    return text.encode() + b"\n"


def _escaped(character: str) -> str:
    """A character as JSON escapes. Does not use the standard library, which leaves the character DEL unescaped."""
    units = character.encode("utf-16-be")
    return "".join(f"\\u{units[n]:02x}{units[n + 1]:02x}" for n in range(0, len(units), 2))


def emit_json(value: Any) -> None:
    """Print a value as one line of JSON, and flush: a reader may wait for the line."""
    emit_bytes(json_line(value))


def emit_bytes(data: bytes) -> None:
    """Write a payload to stdout unchanged, and flush. A terminal gets cleaned text instead, which it cannot obey."""
    if sys.stdout.isatty():
        data = clean(data.decode(errors="replace")).encode()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def clean(text: str) -> str:
    """`text` without control characters, and without characters that change the writing direction: names, bodies and
    reasons come from others, and a terminal would obey these characters. Line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


def say(text: str = "") -> None:
    """Print a line for people, cleaned. All that the command line prints for people goes through say() and note()."""
    print(clean(text), flush=True)


def note(text: str, end: str = "\n") -> None:
    """Print a remark on stderr, cleaned."""
    print(clean(text), end=end, file=sys.stderr, flush=True)


def confirm(effect: str) -> None:
    """Ask for confirmation at the terminal. effect: a clause, such as "deletes 3 messages".

    BadRequest without a terminal; Declined when the answer is not yes.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise BadRequest(f"this {effect}, and there is no terminal to confirm; nothing was done. Use --yes")
    note(f"This {effect}. This cannot be undone. Continue? [y/N] ", end="")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Declined("not confirmed: nothing was done")


class Declined(HadelayError):
    """The user did not confirm."""

    type, title = "declined", "Not confirmed"


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    for line in table_lines(rows, columns):
        say(line)


def table_lines(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    """Lines of a table; missing cells are empty, and lines break only between words.

    A narrow terminal drops columns without values; if the table still does not fit, each row becomes a block with a
    line per field. In a file or a pipe, every row is one line.
    """
    cells = [{column: cell(row.get(column), column) for column in columns} for row in rows]
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
#: Fields whose numbers name a thing rather than count things: users copy and compare these numbers.
_NAMING = ("index", "term", "applied", "pid", "port", "seq", "position", "offset", "feature_level", "generation")
_NAMING_ENDS = ("_index", "_term", "_offset", "_seq")


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
) -> Iterator[Callable[..., None]]:
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
        say(line)


def _field_lines(value: Mapping[str, Any]) -> Iterator[str]:
    width = max(map(len, value), default=0)
    room = max(_columns() - width - _GAP, 1)
    for name, item in value.items():
        for n, line in enumerate(_lines(cell(item, name), room) or [""]):
            yield f"{'' if n else name:<{width}}{' ' * _GAP}{line}"


def cell(value: Any, name: str = "") -> str:
    """`value` as people read it. name: name of the value's field; numbers that name a thing, such as an index, get no
    thousands separators."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if name in _NAMING or name.endswith(_NAMING_ENDS) else f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, Mapping):
        return " ".join(f"{k}={cell(v, str(k))}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(cell(item) for item in value)
    # Replace line breaks and other unprintable characters, so that a value stays in its cell.
    return "".join(c if c.isprintable() else "�" for c in str(value))


def show(value: Any, printing: Printing, columns: Sequence[str] = ()) -> None:
    """Print a list of mappings, or one mapping, in the chosen format."""
    if printing.output == "json":
        emit_json(value)
    elif isinstance(value, Mapping):
        fields(value)
    else:
        table(value, columns)


def with_shard(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> Sequence[str]:
    """Columns of a table, with the shard as the second column if rows have one."""
    return (columns[0], "shard", *columns[1:]) if any("shard" in row for row in rows) else columns


def note_missing(answer: Mapping[str, Any]) -> None:
    """Report the shards that did not answer a request to all shards."""
    for shard in answer.get("missing", ()):
        note(f"shard {shard} does not answer: what it has is left out")


def show_pages(
    page: Callable[[int, str | None], Any],
    limit: int,
    printing: Printing,
    columns: Sequence[str],
    row: Callable[[Any], Mapping[str, Any]] = lambda message: message,
) -> None:
    """Print the messages of all pages, up to `limit` (0: all); JSON is printed page by page. page(size, cursor):
    fetches one page. row: makes a message's row of the table."""
    if limit < 0:
        raise BadRequest(f"--limit {limit}: expected 0 or more")
    rows: list[Mapping[str, Any]] = []
    found, cursor, missing = 0, None, set[int]()
    while True:
        answer = page(min(limit - found, PAGE) if limit else PAGE, cursor)
        missing |= set(answer.get("missing", ()))
        found, cursor = found + len(answer["messages"]), answer["cursor"]
        if printing.output == "json":
            for message in answer["messages"]:
                emit_json(message)
        else:
            rows += map(row, answer["messages"])
        if cursor is None or (limit and found >= limit):
            break
    if printing.output != "json":
        table(rows, with_shard(columns, rows))
    note_missing({"missing": sorted(missing)})
    if cursor is not None:
        note(f"the first {found:,} results; raise --limit for more")
