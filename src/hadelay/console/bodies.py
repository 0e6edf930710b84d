"""Message bodies for people: as text, as folded JSON, or in hex, each up to a limit."""

from typing import Any, NamedTuple

import msgspec

#: Limits of what a page shows of a body: bytes as text or JSON, bytes in hex, and values of a JSON document.
MOST_TEXT, MOST_HEX, MOST_VALUES = 64 << 10, 4 << 10, 2_000
#: Deepest nesting of a JSON document that is shown folded.
_DEEPEST = 24
_ROW = 16
#: Number of bytes of a body that a list shows.
_PREVIEW = 160


class _Number(str):
    """A JSON number as the body writes it: as a float, it might lose digits."""


_JSON = msgspec.json.Decoder(float_hook=_Number)


class Body(NamedTuple):
    #: How the body is shown: text, json or hex; "" for an empty body.
    kind: str
    #: All values of `kind` in which this body can be shown.
    kinds: list[str]
    text: str
    #: JSON body as a tree of (label, type of value, text of the value, children); None unless `kind` is json.
    tree: Any
    size: int
    #: Number of bytes of the body that the page shows, from its beginning.
    shown: int


def shown_body(body: bytes, content_type: str, wanted: str) -> Body:
    """Prepare a body to be shown on a page. wanted: json, text or hex; if the body cannot be shown so, the best
    possible kind is used."""
    text = _text(body[:MOST_TEXT], cut=len(body) > MOST_TEXT)
    tree = _tree(body) if text is not None and "json" in content_type else None
    kinds = [*(["json"] if tree is not None else []), *(["text"] if text is not None else []), "hex"]
    kind = wanted if wanted in kinds else kinds[0]
    if not body:
        return Body("", [], "", None, 0, 0)
    if kind == "hex":
        return Body(kind, kinds, _hex(body[:MOST_HEX]), None, len(body), min(len(body), MOST_HEX))
    return Body(kind, kinds, text or "", tree if kind == "json" else None, len(body), min(len(body), MOST_TEXT))


def preview(body: bytes | None) -> str:
    """The beginning of a body in one line, in hex if it is not text."""
    if not body:
        return ""
    text = _text(body[:_PREVIEW], cut=len(body) > _PREVIEW)
    return body[:_ROW].hex(" ") if text is None else " ".join(text.split())


def _text(body: bytes, *, cut: bool) -> str | None:
    """Decode the body as UTF-8; None if it is not text. cut: the body was cut off, maybe within a character."""
    try:
        text = body.decode("utf-8", "ignore" if cut else "strict")
    except UnicodeDecodeError:
        return None
    controls = sum(1 for c in text[:4096] if c < " " and c not in "\t\r\n")
    return None if controls else text


def _hex(body: bytes) -> str:
    lines = []
    for at in range(0, len(body), _ROW):
        row = body[at : at + _ROW]
        plain = "".join(chr(b) if 32 <= b < 127 else "·" for b in row)
        lines.append(f"{at:06x}  {row[:8].hex(' '):<23}  {row[8:].hex(' '):<23}  {plain}")
    return "\n".join(lines)


def _tree(body: bytes) -> Any:
    """Make the tree (see `Body.tree`) of a JSON body; None if the body is not JSON, or too large to be shown folded."""
    if len(body) > MOST_TEXT:
        return None
    try:
        value = _JSON.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    left = [MOST_VALUES]

    def node(label: str, value: Any, depth: int) -> tuple[str, str, str, list[Any]] | None:
        left[0] -= 1
        if left[0] < 0 or depth > _DEEPEST:
            return None
        if not isinstance(value, dict | list):
            if isinstance(value, _Number):
                return label, "plain", value, []
            kind = "text" if isinstance(value, str) else "plain"
            return label, kind, msgspec.json.encode(value).decode(), []
        items = value.items() if isinstance(value, dict) else enumerate(value)
        children = []
        for name, one in items:
            child = node(str(name), one, depth + 1)
            if child is None:
                return None
            children.append(child)
        what = f"{{{len(value)}}}" if isinstance(value, dict) else f"[{len(value)}]"
        return label, "object" if isinstance(value, dict) else "list", what, children

    return node("", value, 0)
