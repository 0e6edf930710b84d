"""Checks the names and rights that a change of a topic's settings needs."""

from typing import Any

from hadelay.api.settings import settings_in
from hadelay.api.text import DOTS, check_new_topic, check_topic
from hadelay.api.topicsettings import PutTopic
from hadelay.model import SEPARATOR
from hadelay.rules.access import RequestRights
from hadelay.settings.topic import topics_named


def check_topic_to_set(name: str, max_topic_bytes: int) -> str:
    """Check the name of a topic or subscription whose settings change, and which may be new; returns the name. Raises
    BadRequest."""
    return (check_topic if SEPARATOR in name else check_new_topic)(name, max_topic_bytes)


def settings_to_put(access: RequestRights, document: PutTopic, max_topic_bytes: int) -> dict[str, Any]:
    """The settings of a document, as stored. Raises BadRequest; Forbidden unless the token may publish to the topics
    that get dead letters and callbacks: otherwise the settings would give access to these topics."""
    settings = settings_in(document)
    for topic in topics_named(settings):
        access.need("publish", topic)
        if topic in DOTS:
            check_new_topic(topic, max_topic_bytes)
    return settings
