"""The settings of a topic: shown with their defaults, and changed by forms that are made from the rows of
settings/topic.py; also creates and deletes topics."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from hadelay.api.text import check_topic, format_duration
from hadelay.api.topicsettings import PutTopic, Topic
from hadelay.console.problems import Wrong
from hadelay.console.visit import Pages, Visit, pairs
from hadelay.errors import NotFound
from hadelay.http.answers import Answer
from hadelay.model import SEPARATOR
from hadelay.rules.documents import converted
from hadelay.rules.topics import check_topic_to_set, settings_to_put
from hadelay.settings.kinds import Kind, shown_name
from hadelay.settings.node import HttpConfig
from hadelay.settings.topic import DEFAULTS, SETTINGS, Setting
from hadelay.words import span

pages = Pages()

#: Settings that the form of the page Topic changes; and settings with several fields, which have a form of their own.
IN_FORM = [name for name, row in SETTINGS.items() if row.form]
_MAPS = [name for name, row in SETTINGS.items() if row.kind.name == "parts"]
#: Kind of a setting → text for a default that is None.
_NONE = {
    "number": "no limit", "integer": "no limit", "duration": "never", "topic": "none", "parts": "none",
    "choice": "as the nodes",
}  # fmt: skip


class Row(NamedTuple):
    """A setting, or one field of a setting, as the page shows it."""

    name: str
    help: str
    kind: Kind
    #: Value as text; "" for the default.
    value: str
    default: str = ""
    required: bool = False

    @property
    def choices(self) -> list[tuple[str, str]]:
        """(value, text) of the choices that a form offers; empty for a text field."""
        if self.kind.name == "flag":
            return [
                ("", f"{self.default}, the default" if self.default else "default"),
                ("true", "on"),
                ("false", "off"),
            ]
        if self.kind.name == "choice":
            return [
                ("", f"{self.default}, the default" if self.default else "default"),
                *((one, one) for one in self.kind.choices),
            ]
        return []


def rows(topic: Topic[str], limits: HttpConfig) -> tuple[list[Row], dict[str, list[Row]]]:
    """Rows for a topic's page: (settings that the form changes, fields of each setting that has several)."""
    shown, of = msgspec.to_builtins(topic), "subscriptions" if SEPARATOR in topic.topic else "topics"
    mine = [(name, SETTINGS[name]) for name in IN_FORM if SETTINGS[name].of in ("", of)]
    plain = [
        Row(shown_name(name), row.help, row.kind, written(shown.get(shown_name(name))), default_of(name, row, limits))
        for name, row in mine
    ]
    return plain, {name: list(_fields(SETTINGS[name], shown.get(name) or {})) for name in _MAPS}


def _fields(row: Setting, value: dict[str, Any]) -> Iterator[Row]:
    """Fields of a setting that has several. Secrets get no value: a form that is sent would store their mask."""
    blank = None if row.kind.read is None else row.kind.read({"url": ""})
    for name, part in row.kind.parts.items():
        if part.stored:
            now, default = (
                value.get(shown_name(name)),
                "" if part.required else in_words(part.kind, getattr(blank, name)),
            )
            text = "\n".join(f"{one}={now[one]}" for one in now) if isinstance(now, dict) else written(now)
            masked = f"now {text}" if text and part.kind.name in ("secret", "secrets") else ""
            help = part.help or row.help
            yield Row(shown_name(name), help, part.kind, "" if masked else text, masked or default, part.required)


def default_of(name: str, row: Setting, limits: HttpConfig) -> str:
    """Value of a setting that is not set, in words."""
    value = getattr(DEFAULTS, name)
    if name == "lease_ms":
        value = limits.default_lease_ms
    return in_words(row.kind, value)


def in_words(kind: Kind, value: Any) -> str:
    """Write the default of a setting in words."""
    if value is None:
        return _NONE.get(kind.name, "none")
    if kind.name == "duration":
        return span(value)
    if kind.name == "flag":
        return "on" if value else "off"
    if kind.name == "backoff":
        return ",".join(f"{shown_name(part)}={_plain(part, getattr(value, part))}" for part in kind.parts)
    return str(value) if value and not isinstance(value, tuple) else ",".join(value) or "none"


def _plain(name: str, value: Any) -> str:
    return format_duration(value) if name.endswith("_ms") else f"{value:g}"


def facts(topic: Topic[str]) -> list[tuple[str, str, str]]:
    """(name, help, value as text) of the settings that are set; each field of a setting with several has its own
    entry."""
    shown, found = msgspec.to_builtins(topic), list[tuple[str, str, str]]()
    for name, row in SETTINGS.items():
        value = shown.get(shown_name(name))
        fields = value.items() if isinstance(value, dict) and row.kind.name == "parts" else [("", value)]
        found += [
            (f"{shown_name(name)}.{field}" if field else shown_name(name), row.help, text)
            for field, one in fields
            if (text := written(one))
        ]
    return found


def written(value: Any) -> str:
    """Text of a setting's value, as shown and typed in the form."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ",".join(f"{name}={one}" for name, one in value.items() if one is not None)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _read(kind: Kind, text: str) -> Any:
    """Value of a field of a form, as the API takes it; None resets the setting."""
    if not text:
        return None
    if kind.name == "flag":
        return text == "true"
    if kind.name == "headers":
        return dict(pairs("headers", text))
    if kind.name == "secrets":
        return text.split()
    parts = [part.strip() for part in text.split(",")]
    if kind.name == "backoff":
        return dict(part.partition("=")[::2] for part in parts) if "=" in text else parts
    return [part for part in parts if part] if kind.name == "tags" else text


@pages.post("/console/topics/{topic}/settings")
async def change(visit: Visit) -> Answer:
    """Change the settings that the user changed in the form; the types of the API check the values."""
    wanted = {
        shown_name(field): _read(SETTINGS[field].kind, visit.text(shown_name(field)))
        for field in IN_FORM
        if visit.text(shown_name(field)) != visit.text(f"was_{shown_name(field)}")
    }
    return await _put(visit, wanted, f"Changed: {', '.join(wanted)}." if wanted else "No setting was changed.")


@pages.post("/console/topics/{topic}/settings/{setting}")
async def change_map(visit: Visit) -> Answer:
    """Set the webhook or the alert of a topic, or remove it."""
    name = visit.path["setting"]
    if name not in _MAPS:
        raise NotFound(f"there is no setting {name[:40]!r} with a form of its own")
    fields = SETTINGS[name].kind.parts.items()
    values = {
        shown_name(field): _read(part.kind, visit.text(shown_name(field))) for field, part in fields if part.stored
    }
    wanted = {field: value for field, value in values.items() if value is not None}
    if visit.text("remove"):
        return await _put(visit, {name: None}, f"The {name} is removed.")
    return await _put(visit, {name: wanted}, f"The {name} is set.")


async def _put(visit: Visit, wanted: dict[str, Any], notice: str) -> Answer:
    """Change settings of a topic; NotFound if the topic does not exist."""
    limit = visit.call.context.config.max_topic_bytes
    name = check_topic_to_set(visit.topic, limit)
    visit.need("admin", name)
    if wanted:
        settings = settings_to_put(visit.access, converted(wanted, PutTopic), limit)
        await visit.service.topics.get_topic(name, stale=visit.stale)
        await visit.service.topics.put_topic(name, settings, visit.actor, subscribes=False)
    return visit.go(f"/console/topics/{name}", notice)


@pages.post("/console/new/topic")
async def create(visit: Visit) -> Answer:
    """Create a topic, or a subscription of a topic, with the default settings."""
    name = check_topic_to_set(visit.text("name"), visit.call.context.config.max_topic_bytes)
    visit.need("admin", name)
    try:
        await visit.service.topics.get_topic(name, stale=visit.stale)
        return visit.go(f"/console/topics/{name}", f"There is a topic {name} already: this is it.")
    except NotFound:
        pass
    subscribes, pending = visit.may("admin", name.partition(SEPARATOR)[0]), visit.text("pending") == "yes"
    await visit.service.topics.put_topic(
        name, {}, visit.actor, subscribes=subscribes, pending=pending and SEPARATOR in name
    )
    return visit.go(f"/console/topics/{name}?open=settings#settings", f"{name} is created.")


@pages.post("/console/topics/{topic}/delete")
async def delete(visit: Visit) -> Answer:
    """Delete the topic, after the person typed its name."""
    name = check_topic(visit.topic)
    visit.need("admin", name)
    if visit.text("typed") != name:
        raise Wrong("typed", f"Type the name of the topic, {name}, to confirm.")
    await visit.service.topics.get_topic(name, stale=visit.stale)
    await visit.service.topics.delete_topic(name, force=visit.text("force") == "yes", by=visit.actor)
    return visit.go("/console/topics", f"{name} is deleted.")
