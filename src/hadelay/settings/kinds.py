"""Kinds of values that topic settings have: one check each, and the types of the value in a request, in an answer and
in a call of the client.

The table of settings (settings/topic.py) names a kind in each row. `make docs` writes the API's documents and the
client's types from the rows, and http/shapes.py makes the JSON Schema.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hadelay.settings.cluster import Settings
from hadelay.settings.urls import url_problem
from hadelay.version import FIRST_LEVEL

MAX_BACKOFF_STEPS = 32
#: Limit of signing secrets: the newest, and older ones that receivers may still use.
MAX_SECRETS = 4
MAX_HEADERS = 16
#: Limits of a topic's labels: their number, and bytes of a name and of a value.
MAX_LABELS, _MAX_LABEL_NAME, _MAX_LABEL = 64, 128, 1_024
#: Limit of the header fields that a message has for its own webhook calls, in bytes of names and values.
MAX_FORWARD = 2 << 10
#: Limits of the tag filter of a subscription: number of tags in each of its lists, and bytes of a tag.
MAX_FILTER_TAGS, MAX_TAG_BYTES = 16, 256
TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
#: Text that replaces the masked characters of a secret.
MASK = "****"
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
#: Headers that the webhook sender, or HTTP itself, sets: users must not set them for webhook calls.
_OWN_HEADERS = re.compile(r"(webhook-|ce-)|(host|content-length|content-type|transfer-encoding|connection|te|upgrade)$")

#: Function that checks a value: returns "" for a valid value, else the error text, a description of valid values.
Check = Callable[[Any, Settings], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of settings, such as durations: the properties that all settings of this kind have."""

    name: Literal[
        "duration",
        "integer",
        "number",
        "flag",
        "choice",
        "text",
        "topic",
        "tags",
        "backoff",
        "url",
        "secret",
        "secrets",
        "headers",
        "labels",
        "parts",
    ]
    #: Types of the value in a request, in an answer (hadelay/api), and in a call of the client, as Python text.
    given: str
    shown: str
    typed: str
    check: Check
    #: Range of a number, or of a duration in ms; of a duration, `most` may name a limit in Settings. A number whose
    #: `least` is 0 is more than 0.
    least: float = 0
    most: float | str = 0
    choices: tuple[str, ...] = ()
    #: Makes the attribute of TopicSettings from a stored value; None: the attribute is the stored value.
    read: Callable[[Any], Any] | None = None
    #: Fields of a value that is a map, and the description of the map.
    parts: "Mapping[str, Part]" = field(default_factory=dict)
    about: str = ""


class Part(NamedTuple):
    """A field of a setting whose value is a map."""

    kind: Kind
    #: Description of the field, for the command line and the API; "" if the description of the map is enough.
    help: str = ""
    required: bool = False
    #: Option of `hadelay topic set` that sets the field; "": the names of the setting and the field, joined by a dash.
    option: str = ""
    #: Whether a field of this name is stored; False: only requests have it, and api/settings.py stores its value in
    #: another field.
    stored: bool = True
    #: Feature level from which the field exists.
    level: int = FIRST_LEVEL


def shown_name(name: str) -> str:
    """Name in the API of a setting, or of a field of a setting."""
    return name.removesuffix("_ms")


def _must(fine: Callable[[Any], bool], expected: str) -> Check:
    """Make a Check from a predicate. expected: error text; {!r} in the text stands for the invalid value."""
    return lambda value, _: "" if fine(value) else expected.format(value)


def duration(least_ms: int, most_ms: int | str) -> Kind:
    """Kind of a setting that is a duration, stored in ms. most_ms: the maximum, or the name of a limit in Settings."""

    def check(value: Any, settings: Settings) -> str:
        most = most_ms if isinstance(most_ms, int) else getattr(settings, most_ms)
        fine = type(value) is int and least_ms <= value <= most
        return "" if fine else f"{value!r} ms; at least {least_ms} ms and at most {most} ms"

    return Kind(
        name="duration", given="Duration", shown="str", typed="Delay", check=check, least=least_ms, most=most_ms
    )


def integer(least: int, most: int, what: str) -> Kind:
    check = _must(lambda value: type(value) is int and least <= value <= most, f"{what}, {least} to {most}, not {{!r}}")
    return Kind(name="integer", given="int", shown="int", typed="int", check=check, least=least, most=most)


def number(least: float, most: float, what: str, instead: str = "") -> Kind:
    """Kind of a setting that is a number from `least` to `most`; more than 0 if `least` is 0. instead: advice at the
    end of the error text."""

    def fine(value: Any) -> bool:
        return type(value) in (int, float) and math.isfinite(value) and value > 0 and least <= value <= most

    span = f"{least} to {most}" if least else f"more than 0 and at most {most}"
    check = _must(fine, f"{what}, {span}, not {{!r}}{instead}")
    return Kind(name="number", given="float", shown="float", typed="float", check=check, least=least, most=most)


def choice(*choices: str) -> Kind:
    """Kind of a setting whose value is one of these words."""
    literal = "Literal[" + ", ".join(f'"{word}"' for word in choices) + "]"
    expected = f"{' or '.join(choices) if len(choices) == 2 else ', '.join(choices)}, not {{!r}}"
    check = _must(lambda value: value in choices, expected)
    return Kind(name="choice", given=literal, shown=literal, typed=literal, check=check, choices=choices)


def text(most: int) -> Kind:
    check = _must(lambda value: isinstance(value, str) and len(value.encode()) <= most, f"text of at most {most} bytes")
    return Kind(name="text", given="str", shown="str", typed="str", check=check, most=most)


def topic(expected: str = "the name of a topic", *words: str) -> Kind:
    """Kind of a setting that names a topic, which gets messages of the topic with the setting: whoever sets it needs
    the right to publish there. words: other valid values, which match the pattern of names but are no names."""

    def fine(value: Any) -> bool:
        return isinstance(value, str) and TOPIC_NAME.fullmatch(value) is not None

    check = _must(fine, f"{expected} (A-Z a-z 0-9 . _ -), not {{!r}}")
    return Kind(name="topic", given="str", shown="str", typed="str", check=check, choices=words)


def _tags(value: Any, settings: Settings) -> str:
    if not isinstance(value, list) or len(value) > MAX_FILTER_TAGS:
        return f"a list of at most {MAX_FILTER_TAGS} tags"
    fine = all(isinstance(tag, str) and 0 < len(tag.encode(errors="surrogatepass")) <= MAX_TAG_BYTES for tag in value)
    return "" if fine else f"each tag is text of 1 to {MAX_TAG_BYTES} bytes"


def _backoff(value: Any, settings: Settings) -> str:
    longest = settings.max_delay_ms
    if isinstance(value, list):
        if not 0 < len(value) <= MAX_BACKOFF_STEPS:
            return f"1 to {MAX_BACKOFF_STEPS} durations; the last one repeats"
        fine = all(type(ms) is int and 0 <= ms <= longest for ms in value)
        return "" if fine else f"each wait is at least 0 and at most {longest} ms"
    if not isinstance(value, dict):
        return "a list of durations, or {min, max, factor, jitter}"
    if not {"min_ms", "max_ms"} <= value.keys() <= {"min_ms", "max_ms", "factor", "jitter"}:
        return "min and max, optionally factor and jitter"
    least, most = value["min_ms"], value["max_ms"]
    if not (type(least) is type(most) is int and 0 < least <= most <= longest):
        return f"0 < min ≤ max ≤ {longest} ms, not {least!r} and {most!r}"
    factor, jitter = value.get("factor", 2.0), value.get("jitter", 0.1)
    if type(factor) not in (int, float) or not 1 <= factor <= 100:
        return f"factor: 1 to 100, not {factor!r}"
    if type(jitter) not in (int, float) or not 0 <= jitter <= 1:
        return f"jitter: the random part of a wait, 0 to 1, not {jitter!r}"
    return ""


def parts(title: str, about: str, fields: dict[str, Part], read: Callable[[Any], Any]) -> Kind:
    """Kind of a setting that is a map with these fields, of which `url` is required. title, about: name and description
    of the map's type."""
    stored = {name: part.kind.check for name, part in fields.items() if part.stored}

    def check(value: Any, settings: Settings) -> str:
        if not isinstance(value, dict):
            return f"a map of {', '.join(map(shown_name, stored))}"
        if "url" not in value:
            return "url is missing"
        for name, one in value.items():
            if name not in stored:
                return f"unknown field {name!r}"
            if wrong := stored[name](one, settings):
                return f"{shown_name(name)}: {wrong}"
        return ""

    return Kind(
        name="parts", given=title, shown=f"{title}Out", typed=title, check=check, read=read, parts=fields, about=about
    )


def _one_secret(value: Any, settings: Settings) -> str:
    if isinstance(value, str) and MASK in value:
        return "the secret is masked, as GET shows it: leave secrets out to keep them"
    fine = isinstance(value, str) and 16 <= len(value) <= 256 and value.isascii() and value.isprintable()
    return "" if fine else "a secret is 16 to 256 printable characters"


def _secrets(value: Any, settings: Settings) -> str:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_SECRETS:
        return f"a list of 1 to {MAX_SECRETS} secrets, the newest first"
    return next((wrong for secret in value if (wrong := _one_secret(secret, settings))), "")


def _headers(value: Any, settings: Settings) -> str:
    if not isinstance(value, dict) or len(value) > MAX_HEADERS:
        return f"a map of at most {MAX_HEADERS} names and values"
    if wrong := fields_problem(value):
        return wrong
    for name in value:
        # Receivers often read an underscore as a dash: check the name in that form, too.
        dashed = name.replace("_", "-")
        if _OWN_HEADERS.match(dashed.lower()):
            return f"{name}: receivers may read it as {dashed}, which hadelay sets itself: leave it out"
    return ""


def fields_problem(fields: dict[Any, Any]) -> str:
    """Error text for header fields that webhook calls cannot carry; "" for valid fields."""
    for name, text in fields.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            return f"{name!r} is not a valid header name"
        if _OWN_HEADERS.match(name.lower()):
            return f"{name} is set by hadelay itself: leave it out"
        if not isinstance(text, str) or len(text) > 1_024 or not text.isascii() or not (text.isprintable() or not text):
            return f"{name}: at most 1024 printable ASCII characters"
    return ""


def _labels(value: Any, settings: Settings) -> str:
    if not isinstance(value, dict) or len(value) > MAX_LABELS:
        return f"a map of at most {MAX_LABELS} names and values"
    for name, text in value.items():
        if not isinstance(name, str) or not 0 < len(name.encode(errors="surrogatepass")) <= _MAX_LABEL_NAME:
            return f"a name has 1 to {_MAX_LABEL_NAME} bytes"
        if text is not None and not (isinstance(text, str) and len(text.encode(errors="surrogatepass")) <= _MAX_LABEL):
            return f"{name[:40]}: text of at most {_MAX_LABEL} bytes, or null to remove the name"
    return ""


FLAG = Kind(
    name="flag",
    given="bool",
    shown="bool",
    typed="bool",
    check=_must(lambda value: type(value) is bool, "true or false, not {!r}"),
)
TAGS = Kind(name="tags", given="list[str]", shown="list[str]", typed="Sequence[str]", check=_tags, read=tuple)
URL = Kind(name="url", given="str", shown="str", typed="str", check=url_problem)
SECRET = Kind(name="secret", given="str", shown="str", typed="str", check=_one_secret)
SECRETS = Kind(name="secrets", given="list[str]", shown="list[str]", typed="Sequence[str]", check=_secrets)
LABELS = Kind(
    name="labels",
    given="dict[str, str | None]",
    shown="dict[str, str]",
    typed="Mapping[str, str | None]",
    check=_labels,
    read=lambda stored: tuple(sorted(stored.items())),
)
HEADERS = Kind(
    name="headers", given="dict[str, str]", shown="dict[str, str]", typed="Mapping[str, str]", check=_headers
)


def backoff(read: Callable[[Any], Any]) -> Kind:
    """Kind of a setting for the delays before retries: a list of durations, or the fields of an exponential backoff."""
    fields = {
        "min_ms": Part(duration(1, "max_delay_ms"), required=True),
        "max_ms": Part(duration(1, "max_delay_ms"), required=True),
        "factor": Part(number(1, 100, "factor")),
        "jitter": Part(number(0, 1, "jitter")),
    }
    return Kind(
        name="backoff",
        given="list[str | int | float] | Backoff",
        shown="list[str] | BackoffOut",
        typed="Sequence[Delay] | Backoff",
        check=_backoff,
        read=read,
        parts=fields,
        about="Retry n waits min × factor^(n−1), at most max, plus a random part of up to `jitter` of this wait.",
    )
