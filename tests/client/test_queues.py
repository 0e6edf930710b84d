"""Topics of queues."""

from __future__ import annotations

from hadelay.client.queues import topic_of
from hadelay.settings.kinds import TOPIC_NAME


def test_a_topic_has_the_name_of_its_queue_if_topics_allow_it() -> None:
    assert topic_of("django.", "default") == "django.default"
    assert topic_of("", "Mail_2.low") == "Mail_2.low"


def test_other_queues_have_topics_of_their_own() -> None:
    names = ["a b", "a-b", "a/b", "ä", "日本", "", "x" * 500, "x" * 501, "a b.low", "celery@host.pidbox"]
    topics = [topic_of("celery.", name) for name in names]
    assert len(set(topics)) == len(names)
    assert all(TOPIC_NAME.fullmatch(topic + "." + "s" * 15) for topic in topics)
    assert topics[0].startswith("celery.a-b.")
