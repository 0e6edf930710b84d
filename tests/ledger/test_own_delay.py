"""A draft without a time takes the delay of its topic; a client key of the mode PERIOD is forgotten with its period."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.publishcommand import hash_client_key
from hadelay.codec.results import Done, Refused
from hadelay.ledger.messages.keys import find_key
from hadelay.model import OWN_DELAY, PERIOD, Draft
from hadelay.settings.kinds import MAX_LABELS
from tests.ledger.world import START_MS, World, draft


def at_the_topics_time(topic: str = "orders") -> Draft:
    return draft(topic, OWN_DELAY)


def put(world: World, **config: object) -> Done | Refused:
    result = world.one(commands.encode_topic_put("orders", config))
    assert isinstance(result, Done | Refused)
    return result


def test_delay_of_the_topic() -> None:
    world = World()
    put(world, delay_ms=5_000)
    drafts = at_the_topics_time(), at_the_topics_time("other"), draft("orders"), draft("orders", 7_000)
    due = world.publish(*drafts).deliver_at_ms - START_MS
    assert due.tolist() == [5_000, 0, 0, 7_000]
    put(world, delay_ms=None)
    assert (world.publish(at_the_topics_time()).deliver_at_ms - START_MS).tolist() == [0]


def test_key_of_a_period_is_no_key_of_the_message() -> None:
    """Within the period a repetition is dropped; after it, another message is stored though the first one waits."""
    world = World()
    once = replace(draft(in_ms=60_000), key=b"id", on_conflict=PERIOD, unique_ms=1_000)
    (first,) = world.ids(once)
    assert world.publish(once).duplicate.all()
    assert find_key(world.ledger, once.topic, hash_client_key(b"id")) is None
    world.now = 1_000
    (second,) = world.ids(once)
    assert second != first


def test_labels_are_merged_by_name() -> None:
    world = World()
    put(world, labels={"owner": "a", "team": "x"})
    put(world, labels={"owner": "b", "team": None, "gone": None, "empty": ""})
    topic = world.ledger.topic("orders")
    assert topic is not None
    assert topic.settings.labels == (("empty", ""), ("owner", "b"))
    assert isinstance(put(world, labels={f"l{n}": "x" for n in range(MAX_LABELS - 1)}), Refused)
    put(world, labels=None)
    assert topic.config == {}


@pytest.mark.parametrize("labels", [[], {"": "x"}, {"a": 1}, {"a" * 129: "x"}, {"a": "x" * 1_025}])
def test_wrong_labels_are_refused(labels: object) -> None:
    assert isinstance(put(World(), labels=labels), Refused)
