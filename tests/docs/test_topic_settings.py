"""The settings of topics are one table (settings/topic.py): what is written beside it names the same settings."""

from __future__ import annotations

from dataclasses import fields
from inspect import signature

import pytest

from hadelay.api import topics as types
from hadelay.cli.topic import set_
from hadelay.client import types as client
from hadelay.ledger.topics import TopicState
from hadelay.settings.cluster import Settings
from hadelay.settings.topic import (
    ALERT,
    DEFAULTS_OF,
    SETTINGS,
    WEBHOOK,
    Exponential,
    TopicSettings,
    newest_defaults,
    problem,
    shown_name,
)

SHOWN = {shown_name(name): name for name in SETTINGS}
#: Set by `pause` alone.
SET = [name for name in SHOWN if name != "paused_reason"]


def test_the_typed_dict_of_the_client_has_these_settings() -> None:
    assert list(client.TopicSettings.__annotations__) == SET
    assert client.Webhook.__annotations__.keys() - {"secret"} == {shown_name(name) for name in WEBHOOK}
    assert client.Alert.__annotations__.keys() == ALERT.keys()
    assert list(client.Backoff.__annotations__) == [shown_name(field.name) for field in fields(Exponential)][:4]


def test_http_takes_and_shows_these_settings() -> None:
    assert list(types.PutTopic.__struct_fields__) == SET
    shown = [name for name in types.Topic.__struct_fields__ if name in SHOWN]
    assert sorted(shown) == sorted(SHOWN)


def test_the_command_line_takes_these_settings() -> None:
    assert signature(set_).parameters.keys() >= set(SET) - {"paused"}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_has_a_help_text_a_default_and_a_check(name: str) -> None:
    assert SETTINGS[name].help.endswith(".")
    assert hasattr(TopicSettings(), name)
    assert problem({name: None}, Settings()) == ""
    assert problem({name: object()}, Settings()).startswith(shown_name(name) + ": ")


def test_a_new_topic_has_the_newest_defaults_that_the_cluster_knows() -> None:
    assert [newest_defaults(level) for level in range(1, max(DEFAULTS_OF) + 2)] == [1, 1, 3, 3]
    assert TopicState(0, "t").settings == DEFAULTS_OF[1]
