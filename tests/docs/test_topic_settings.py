"""The settings of topics are one table (settings/topic.py): every other place that names settings is made from it."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

import hadelay
from hadelay.ledger.topics.topics import TopicState
from hadelay.settings.cluster import Settings
from hadelay.settings.kinds import shown_name
from hadelay.settings.topic import DEFAULTS, SETTINGS, Exponential, TopicSettings, foreign_setting, problem, settings_of
from tests.docs.planting import planted
from tools import rowtypes

SOURCE = Path(hadelay.__file__).parent
#: Adds a row to the table before anything reads it, and prints what each place then says of the setting.
PLANT = """
import inspect, json, sys
from hadelay.settings import kinds, topic
from hadelay.settings.cluster import Settings
from tests.docs.planting import Written

topic.SETTINGS["planted_ms"] = topic.Setting(
    kinds.duration(1_000, 60_000), "Planted help.", "server/node.py", of="topics", delivery=True, form=True,
    option=True, put=True, level=2,
)

sys.meta_path.insert(0, Written())
import msgspec
from hadelay import client
from hadelay.api import settings, topics, topicsettings
from hadelay.api.base import decode_hook
from hadelay.cli import topic as command, trace
from hadelay.console import topicsettings as console
from hadelay.http import openapi
from hadelay.http.app import ROUTES
from tools import reference

put = msgspec.convert({"planted": "5s"}, topicsettings.PutTopic, dec_hook=decode_hook)
answer = topicsettings.Topic("t", 0, 0, 0, 0, None, 0, None, **settings.settings_out({"planted_ms": 5_000}))
schema = json.loads(openapi.document(ROUTES.all))["components"]["schemas"]["PutTopic"]["properties"]["planted"]
print(json.dumps({
    "request": settings.settings_in(put),
    "answer": msgspec.to_builtins(answer)["planted"],
    "subscription": "planted" in topics.PutSubscription.__struct_fields__,
    "schema": [schema["description"][:13], schema["anyOf"][1]],
    "client": str(client.TopicSettings.__annotations__["planted"]),
    "command": inspect.signature(command.set_).parameters["planted"].annotation.__metadata__[0].help,
    "form": "planted_ms" in console.IN_FORM,
    "trace": "planted" in trace._SETTINGS,
    "reference": "| `planted` |" in reference.topics_page(),
    "check": topic.problem({"planted_ms": 1}, Settings()),
    "level": [topic.newer_setting({"planted_ms": 5_000}, level) for level in (1, 2)],
    "of": topic.foreign_setting({"planted_ms": 5_000}, "subscriptions"),
}))
"""


def test_planted_setting_is_in_every_place() -> None:
    # reference.py reads defaults from TopicSettings: the subprocess gives the class a default of the planted setting.
    plant = PLANT.replace("import msgspec\n", "import msgspec\ntopic.TopicSettings.planted_ms = 5_000\n")
    found = planted(plant)
    assert found.pop("client").startswith("str | float | datetime.timedelta | None")
    assert found == {
        "request": {"planted_ms": 5_000}, "answer": "5s", "subscription": True,
        "schema": ["Planted help.", {"type": "number", "minimum": 1.0, "maximum": 60.0}],
        "command": "Planted help.", "form": True, "trace": True, "reference": True,
        "check": "planted: 1 ms; at least 1000 ms and at most 60000 ms", "level": ["planted", ""],
        "of": "planted: a setting of topics, not of subscriptions",
    }  # fmt: skip


def test_written_types_are_up_to_date() -> None:
    for module, text in rowtypes.MODULES.items():
        assert rowtypes.path_of(module).read_text() == text(), "run make docs"


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_help_default_check_and_owner(name: str) -> None:
    row = SETTINGS[name]
    assert row.help.endswith(".")
    assert hasattr(TopicSettings(), name)
    assert problem({name: None}, Settings()) == ""
    assert problem({name: object()}, Settings()).startswith(shown_name(name) + ": ")
    assert re.search(rf"\b{name}\b", (SOURCE / row.owner).read_text()), f"{row.owner} does not act on {name}"


def test_fields_of_exponential_backoff_are_those_of_its_class() -> None:
    assert list(SETTINGS["backoff"].kind.parts) == [field.name for field in fields(Exponential)]


def test_fields_of_webhook_and_alert_are_those_of_their_classes() -> None:
    for name in ("webhook", "alert"):
        kind = SETTINGS[name].kind
        read = settings_of({name: {"url": "https://x.example/"}})
        stored = [part for part, known in kind.parts.items() if known.stored]
        assert stored == [field.name for field in fields(getattr(read, name))]


def test_settings_of_subscriptions_and_topics_are_distinguished() -> None:
    assert foreign_setting({"tags": ["a"]}, "topics") == "tags: a setting of subscriptions, not of topics"
    assert (
        foreign_setting({"own_queue": False}, "subscriptions") == "own_queue: a setting of topics, not of subscriptions"
    )
    assert foreign_setting({"tags": None, "rate": 1.0}, "topics") == ""


def test_new_topic_has_the_defaults() -> None:
    assert TopicState(0, "t").settings == DEFAULTS
