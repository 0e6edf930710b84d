"""Write the pages of docs/reference that come from the code, and the list of decisions: `make docs`; tests compare."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from cyclopts import App
from rich.console import Console

import hadelay.cli.app
import hadelay.settings.node
from hadelay.cli.app import COMMANDS, build
from hadelay.http.metrics import FAMILIES as HTTP_FAMILIES
from hadelay.pipeline import schema
from hadelay.server.metrics import FAMILIES, OTHER
from hadelay.settings.kinds import shown_name
from hadelay.settings.node import RETIRED, Config
from hadelay.settings.topic import DEFAULTS, SETTINGS

try:
    import rowtypes
except ImportError:
    from tools import rowtypes

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"
DECISIONS = ROOT / "docs" / "adr"
DECISIONS_FORM = """\
Each page has the decisions about one part of hadelay, of 2026-11. A section says what was decided and why, what was
rejected, whether the decision is accepted or only proposed, and what would reopen it. The section of a superseded
decision is deleted; numbers are not used again."""
HEAD = "<!-- Made by `make docs`; change the code instead. -->\n"


def field_docs(kind: type) -> dict[str, str]:
    """What the `#:` lines before each field say."""
    lines = inspect.getsource(kind).splitlines()
    node = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(node, ast.ClassDef)
    found = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            said: list[str] = []
            for line in reversed(lines[: item.lineno - 1]):
                if not line.strip().startswith("#:"):
                    break
                said.insert(0, line.strip().removeprefix("#:").strip())
            found[item.target.id] = " ".join(said)
    # A wrapped comment starts with `#:` once and goes on with `#`.
    return {name: text or _wrapped(lines, name) for name, text in found.items()}


def _wrapped(lines: list[str], name: str) -> str:
    at = next(i for i, line in enumerate(lines) if line.strip().startswith(f"{name}:"))
    said: list[str] = []
    for line in reversed(lines[:at]):
        text = line.strip()
        if not text.startswith("#"):
            break
        said.insert(0, text.lstrip("#:").strip())
        if text.startswith("#:"):
            break
    return " ".join(said)


def _default(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "empty"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "_") + _readable(name, value)
    return f'"{value}"'


def _readable(name: str, value: int) -> str:
    units: tuple[tuple[int, str], ...] = ()
    if name.endswith("_ms"):
        units = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"))
    elif name.endswith("_bytes"):
        units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
    return next((f" ({value // size}{unit})" for size, unit in units if value and value % size == 0), "")


def config_page() -> str:
    text = [HEAD, "# Configuration", ""]
    text += [(inspect.getdoc(hadelay.settings.node) or "").partition("\n\n")[0].replace("\n", " "), ""]
    text += [
        "A `_ms` key also takes a duration (`15m`, `2h30m`, `7d`), a `_bytes` key a size (`64MiB`). A key that does "
        "not exist is refused, with its line and the one that was probably meant; `hadelay config check FILE` says "
        "everything that is wrong at once. Flags go over the environment, the environment over the file.",
        "",
    ]
    default = Config()
    for section in msgspec.structs.fields(Config):
        text += [f"## [{section.name}]", "", inspect.getdoc(section.type) or "", ""]
        text += ["| Key | Default | |", "|---|---|---|"]
        docs = field_docs(section.type)
        for leaf in msgspec.structs.fields(section.type):
            if f"{section.name}.{leaf.name}" in RETIRED:
                continue
            value = getattr(getattr(default, section.name), leaf.name)
            text.append(f"| `{leaf.name}` | `{_default(leaf.name, value)}` | {docs[leaf.name]} |")
        text.append("")
    return "\n".join(text)


def topics_page() -> str:
    text = [HEAD, "# Settings of a topic", ""]
    text += ["Set by [`PUT /v1/topics/{topic}`](http.md#topics), `put_topic` of a client, `hadelay topic set`.", ""]
    text += ["| Setting | When it is not set | |", "|---|---|---|"]
    for name, setting in SETTINGS.items():
        value = getattr(DEFAULTS, name)
        default = "" if value in (None, "", ()) or name == "backoff" else f"`{_default(name, value)}`"
        text.append(f"| `{shown_name(name)}` | {default} | {setting.help} |")
    return "\n".join([*text, ""])


def cli_page() -> str:
    codes, errors = (inspect.getdoc(hadelay.cli.app) or "").split("\n\n")[-2:]
    text = [HEAD, "# Command line", ""]
    text += ["Results go to stdout, everything else to stderr; `-o json` (or `HADELAY_OUTPUT`) prints JSON.", ""]
    text += ["Exit codes:", ""]
    text += ["```text", *(line.strip() for line in codes.splitlines()), "```", "", errors, ""]
    for command in COMMANDS:
        words = command.path.split()
        text += [f"## hadelay {command.path}", "", "```text", *_help(build(words), words), "```", ""]
    return "\n".join(text)


def _help(app: App, words: list[str]) -> Iterator[str]:
    output = io.StringIO()
    app.help_print(words, console=Console(file=output, width=100, color_system=None))
    for line in output.getvalue().splitlines():
        yield line.rstrip()


def pipeline_page() -> str:
    text = [
        HEAD,
        "# Spark data source",
        "",
        '`spark.read.format("hadelay")`; [how to use it](../howto/pipeline.md).',
        "",
    ]
    text += ["## Options", "", "| Option | Default | |", "|---|---|---|"]
    text += _options(schema.Options)
    text += ["", "## Options of the writer", "", '`df.write.format("hadelay").mode("append")`', ""]
    text += ["| Option | Default | |", "|---|---|---|"]
    text += _options(schema.WriteOptions)
    text += ["", "| Column | Type | |", "|---|---|---|"]
    text += [
        f"| `{name}` | {' or '.join(f'`{one}`' for one in column.type.split('|'))} | {column.doc} |"
        for name, column in schema.PUBLISHED.items()
    ]
    for title, columns in (("messages", schema.MESSAGES), ("dispatches, settlements, events", schema.EVENTS)):
        text += ["", f"## Columns of {title}", "", "| Column | Type | |", "|---|---|---|"]
        text += [f"| `{name}` | `{column.type}` | {column.doc} |" for name, column in columns.items()]
    return "\n".join(text) + "\n"


def _options(kind: type[schema.Options] | type[schema.WriteOptions]) -> Iterator[str]:
    for option in dataclasses.fields(kind):
        value = option.default
        shown = "" if value in ("", 0) and value is not False else f"`{_default(option.name, value)}`"
        yield f"| `{schema.camel(option.name)}` | {shown} | {option.metadata['help']} |"


def metrics_page() -> str:
    shown = f"{Config().limits.metrics_topics:,}"
    text = [HEAD, "# Metrics", ""]
    text += [
        "`GET /metrics` of each node, in Prometheus' text format. Times are in seconds, sizes in bytes; a counter ends "
        "in `_total`. What is the same on every node is the cluster's: take the `max` of it. What only the leader "
        "shows moves to the next one with the lead: `sum` it. [What wakes somebody, and what to "
        "do](../howto/runbook.md).",
        "",
        f"{shown} topics have series of their own: those with the most messages when the "
        "node was first asked as the leader, then others as they come, each until it is deleted. What the others hold "
        f"is one topic in the gauges, `{OTHER}`, which no topic can be called; in the counters it is the total less "
        "the sum. So a million topic names cost a scrape no more than these.",
        "",
    ]
    for title, families in (("The node", FAMILIES.values()), ("HTTP, the event loop and the process", HTTP_FAMILIES)):
        text += [f"## {title}", "", "| Name | Type | Labels | |", "|---|---|---|---|"]
        for family in families:
            labels = ", ".join(f"`{label}`" for label in family.labels)
            text.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |")
        text.append("")
    return "\n".join(text)


def decisions() -> Iterator[tuple[int, str, str]]:
    """Number, title and page of each decision."""
    for page in sorted(DECISIONS.glob("*.md")):
        for number, title in re.findall(r"^## ADR (\d+): (.*)$", page.read_text(), re.M):
            yield int(number), title, page.name


def decisions_page() -> str:
    text = [HEAD, "# Decisions", "", DECISIONS_FORM, ""]
    found = sorted(decisions())
    for page in sorted({page for _, _, page in found}):
        title = (DECISIONS / page).read_text().partition("\n")[0].removeprefix("# Decisions: ")
        text += [f"## [{title[0].upper()}{title[1:]}]({page})", ""]
        text += [f"- [ADR {number}]({page}#adr-{number}): {words}" for number, words, at in found if at == page]
        text.append("")
    return "\n".join(text)


def main() -> None:
    rowtypes.main()
    PAGES.mkdir(parents=True, exist_ok=True)
    (PAGES / "config.md").write_text(config_page())
    (PAGES / "topics.md").write_text(topics_page())
    (PAGES / "cli.md").write_text(cli_page())
    (PAGES / "pipeline.md").write_text(pipeline_page())
    (PAGES / "metrics.md").write_text(metrics_page())
    (DECISIONS / "index.md").write_text(decisions_page())


if __name__ == "__main__":
    main()
