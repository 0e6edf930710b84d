"""Write the types of topic settings and of publish options in hadelay/api and hadelay/client, from the rows of
settings/topic.py and api/publishoptions.py: `make docs`; a test compares. Written rather than made at import, so that
readers and type checkers find them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import fill

from hadelay.api.publishoptions import OPTIONS
from hadelay.settings.kinds import Kind, shown_name
from hadelay.settings.topic import SETTINGS

SOURCE = Path(__file__).resolve().parent.parent / "src" / "hadelay"
_WIDTH = 120


def setting_documents() -> str:
    """The documents of PUT and GET of a topic."""
    lines = [
        '"""Settings of topics in requests and answers. Made by `make docs` from the rows of settings/topic.py: change',
        'those instead."""',
        "",
        "from typing import Annotated, Generic, Literal",
        "",
        "from msgspec import UNSET, UnsetType",
        "",
        "from hadelay.api.base import At, Document, Duration, Request, words",
        "from hadelay.api.topicstatus import TopicStatus",
    ]
    for kind in _maps():
        lines += _struct(f"class {_name(kind)}(Request):", kind.about, _given_parts(kind))
        lines += _struct(f"class {_name(kind)}Out(Document, frozen=True):", "", _shown_parts(kind))
    put = [(name, row) for name, row in SETTINGS.items() if row.put]
    about = "Settings to change; null resets a setting."
    fields = [
        line for name, row in put for line in _field(name, f"{row.kind.given} | UnsetType | None = UNSET", row.help)
    ]
    lines += _struct("class PutTopic(Request):", about, fields)
    about = "A topic: its messages, and the settings that were set."
    fields = [line for name, row in SETTINGS.items() for line in _field(name, f"{_shown(row.kind)} | None = None")]
    lines += _struct("class Topic(TopicStatus[At], Generic[At], frozen=True):", about, fields)
    return "\n".join([*lines, ""])


def setting_arguments() -> str:
    """The arguments of the client's `put_topic`."""
    lines = [
        '"""Settings of topics as arguments of `put_topic`. Made by `make docs` from the rows of settings/topic.py:',
        'change those instead."""',
        "",
        "from collections.abc import Mapping, Sequence",
        "from typing import Literal, TypedDict",
        "",
        "from hadelay.client.types import Delay",
        "",
        f"__all__ = [{', '.join(map(_quoted, sorted([*map(_name, _maps()), 'TopicSettings'])))}]",
    ]
    for kind in _maps():
        fields = [line for name, part in kind.parts.items() for line in _field(name, part.kind.typed, part.help)]
        lines += _struct(f"class {_name(kind)}(TypedDict, total=False):", kind.about, fields)
    about = "Settings of `put_topic`. Omitted settings are unchanged; None resets a setting."
    put = [(name, row) for name, row in SETTINGS.items() if row.put]
    fields = [line for name, row in put for line in _field(name, f"{row.kind.typed} | None", row.help)]
    return "\n".join([*lines, *_struct("class TopicSettings(TypedDict, total=False):", about, fields), ""])


def publish_documents() -> str:
    """The query of a single publish, and the item of a batch."""
    lines = [
        '"""Requests that publish messages. Made by `make docs` from the rows of api/publishoptions.py: change those',
        'instead."""',
        "",
        "from typing import Any, Literal",
        "",
        "from msgspec import UNSET, UnsetType",
        "",
        "from hadelay.api.base import Duration, Instant, Request",
    ]
    rows = [(name, row) for name, row in OPTIONS.items() if row.query]
    fields = [line for name, row in rows for line in _field(name, f"{row.kind.query} | None = None", row.help)]
    lines += _struct("class PublishQuery(Request):", "Options of a single publish; headers may have them, too.", fields)
    about = "One message of a batch, with `body` (text: text/plain, other JSON: application/json) or `body_base64`."
    fields = ["    topic: str", "    body: Any = UNSET", "    body_base64: str | UnsetType = UNSET"]
    rows = [("content_type", OPTIONS["content_type"]), *((n, row) for n, row in OPTIONS.items() if n != "content_type")]
    fields += [line for name, row in rows for line in _field(name, f"{row.kind.item} | None = None", row.help)]
    lines += _struct("class BatchItem(Request, gc=False):", about, fields)
    usual = [(name, row) for name, row in OPTIONS.items() if row.usual]
    fields = ["    topic: str", "    body: bytes"]
    fields += [line for name, row in usual for line in _field(name, f"{row.kind.item} | None = None")]
    about = "A batch item without options that few messages have: decoding and publishing it is faster."
    return "\n".join([*lines, *_struct("class UsualItem(Request, gc=False):", about, fields), ""])


def publish_arguments() -> str:
    """The arguments of the client's `put`, and the class of messages for `put_many`."""
    choices = {row.kind.put: row.kind.choices for row in OPTIONS.values() if row.kind.choices}
    lines = [
        '"""Options of a publish as arguments of `put`, and as fields of `Put`. Made by `make docs` from the rows of',
        'api/publishoptions.py: change those instead."""',
        "",
        "from collections.abc import Mapping, Sequence",
        "from typing import Literal, TypedDict",
        "",
        "from msgspec import Struct",
        "",
        "from hadelay.client.types import Body, Delay, When",
        "",
        f"__all__ = [{', '.join(map(_quoted, sorted([*choices, 'Put', 'PutOptions'])))}]",
        "",
        *(f"{name} = Literal[{', '.join(map(_quoted, words))}]" for name, words in choices.items()),
    ]
    rows = [(row.put or name, row) for name, row in OPTIONS.items()]
    fields = [line for name, row in rows for line in _field(name, f"{row.kind.put} | None", row.help)]
    lines += _struct("class PutOptions(TypedDict, total=False):", "Options of `put`.", fields)
    fields = ["    topic: str", '    body: Body = b""']
    fields += [line for name, row in rows for line in _field(name, f"{row.kind.put} | None = None")]
    about = "One message of `put_many`; the fields mean what the arguments of `put` mean."
    return "\n".join([*lines, *_struct("class Put(Struct, kw_only=True):", about, fields), ""])


#: Module → its text.
MODULES = {
    "hadelay.api.topicsettings": setting_documents,
    "hadelay.client.topicsettings": setting_arguments,
    "hadelay.api.publishrequest": publish_documents,
    "hadelay.client.putoptions": publish_arguments,
}


def path_of(module: str) -> Path:
    return SOURCE.parent / f"{module.replace('.', '/')}.py"


def _maps() -> list[Kind]:
    """Kinds whose values are maps, or may be."""
    return [row.kind for row in SETTINGS.values() if row.kind.parts]


def _name(kind: Kind) -> str:
    return kind.given.rpartition(" ")[2]


def _given_parts(kind: Kind) -> list[str]:
    lines = list[str]()
    for name, part in kind.parts.items():
        lines += _field(name, part.kind.given + ("" if part.required else " | UnsetType = UNSET"), part.help)
    return lines


def _shown_parts(kind: Kind) -> list[str]:
    lines = list[str]()
    for name, part in kind.parts.items():
        if part.stored:
            lines += _field(name, _shown(part.kind) + ("" if part.required else " | None = None"))
    return lines


def _shown(kind: Kind) -> str:
    """Type in an answer: a choice is plain text with a hint, so that clients take the values of newer nodes."""
    return f"Annotated[str, words({', '.join(map(_quoted, kind.choices))})]" if kind.name == "choice" else kind.shown


def _quoted(word: str) -> str:
    return f'"{word}"'


def _field(name: str, rest: str, help: str = "") -> list[str]:
    return [*_comment(help), f"    {shown_name(name)}: {rest}"]


def _comment(help: str) -> Iterator[str]:
    if help:
        yield fill(help, _WIDTH, initial_indent="    #: ", subsequent_indent="    #: ", break_long_words=False)


def _struct(head: str, about: str, fields: list[str]) -> list[str]:
    text = fill(f'"""{about}"""', _WIDTH, initial_indent="    ", subsequent_indent="    ") if about else ""
    return ["", "", head, *([text, ""] if about else []), *fields]


def main() -> None:
    for module, text in MODULES.items():
        path_of(module).write_text(text())


if __name__ == "__main__":
    main()
