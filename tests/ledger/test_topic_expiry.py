"""expires_after: a topic that nobody uses ends by itself (ADR 257)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hadelay.codec import commands, schedules
from hadelay.codec.commandtypes import Command, TopicUse
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import encode_publish
from hadelay.codec.results import JobResult, Refused
from hadelay.model import Draft
from tests.ledger.world import START_MS, World, draft

MINUTE = 60_000
#: The end of a topic's time: a quarter of `expires_after` behind it.
LATER = MINUTE + MINUTE // 4


def brief(**config: Any) -> World:
    world = World()
    assert world.one(commands.encode_topic_put("t", {"expires_after_ms": MINUTE, **config})).changed
    return world


def tell(world: World, *, ends: bool, used_ms: int | None = None, lives: int | None = None) -> int:
    """Apply a TOPIC_EXPIRY of the topic; returns how many topics ended."""
    topic = world.ledger.known_topic("t")
    assert topic is not None
    lives, used_ms = topic.lives if lives is None else lives, topic.used_ms if used_ms is None else used_ms
    result = world.one(commands.encode_topic_expiry([TopicUse(topic.number, lives, ends, used_ms)]))
    assert isinstance(result, JobResult)
    return result.count


def test_an_unused_topic_ends_and_not_earlier() -> None:
    world = brief()
    world.now = LATER - 1
    assert tell(world, ends=True) == 0
    world.now = LATER
    assert tell(world, ends=True) == 1
    assert world.topic() is None
    assert tell(world, ends=True) == 0
    assert world.ledger.topics_expired == 1
    world.restart()


def test_a_poll_begins_the_time_anew() -> None:
    world = brief()
    world.now = MINUTE
    assert tell(world, ends=False) == 0
    world.now = LATER
    # What the leader saw was before that.
    assert tell(world, ends=True, used_ms=START_MS) == tell(world, ends=True) == 0
    world.now = MINUTE + LATER
    assert tell(world, ends=True, lives=7) == 0
    assert tell(world, ends=True) == 1


@pytest.mark.parametrize("how", ["ack", "dead", "cancel", "purge"])
def test_the_time_begins_when_the_last_message_has_gone(how: str) -> None:
    world = brief(max_attempts=1)
    (message_id,) = world.ids(draft())
    leased = world.lease(message_id, lease_ms=10 * MINUTE) if how in ("ack", "dead") else None
    world.now = 5 * MINUTE
    assert tell(world, ends=True) == 0
    if leased is None:
        world.cancel(message_id) if how == "cancel" else world.one(commands.encode_purge("t", 7))
    elif how == "ack":
        world.ack(leased)
    else:
        world.nack(leased)
        world.now = 9 * MINUTE
        assert tell(world, ends=True) == 0  # it has a dead letter
        world.one(commands.encode_purge("t", 4))
    gone = world.now
    world.now = gone + LATER - 1
    assert tell(world, ends=True) == 0
    world.restart()
    world.now = gone + LATER
    assert tell(world, ends=True) == 1


def test_a_topic_that_another_names_is_kept() -> None:
    stored = schedules.Stored(
        "shop",
        schedules.Spec("t", every_ms=5_000),
        encode_publish("n1", [Draft("t", 0, True, 0, 0, schedules.template_meta(pack(Meta(sch="s"))), b"")]),
    )
    named: list[tuple[bytes, bytes | None]] = [
        *(
            (commands.encode_topic_put("u", {setting: "t"}), commands.encode_topic_delete("u"))
            for setting in ("dead_letter", "on_success", "on_failure")
        ),
        (commands.encode_subscription_put("t", "billing", {}), commands.encode_topic_delete("t~billing")),
        (schedules.encode_put("s", schedules.ANY_VERSION, 0, stored), schedules.encode_delete("s")),
        (
            commands.encode_topic_put("t", {"webhook": {"url": "http://h"}}),
            commands.encode_topic_put("t", {"webhook": None}),
        ),
    ]  # fmt: skip
    for made, ended in named:
        world = brief()
        world.one(made)
        world.now = 3 * LATER
        assert tell(world, ends=True) == 0
        assert ended is not None
        world.one(ended)
        world.now += LATER
        assert tell(world, ends=True) == 1


def test_a_unique_key_keeps_its_topic_for_its_period() -> None:
    world = brief()
    world.ack(world.lease(*world.ids(replace(draft(), key=b"k", unique_ms=10 * MINUTE))))
    world.now = 9 * MINUTE
    assert tell(world, ends=True) == 0
    world.now = 10 * MINUTE
    world.publish(replace(draft("u"), key=b"k", unique_ms=1))  # drops the period that is over
    assert tell(world, ends=True) == 1


def test_a_late_message_does_not_make_it_stay_for_ever() -> None:
    world = brief()
    world.now = LATER
    assert tell(world, ends=True) == 1
    (message_id,) = world.ids(draft())
    assert world.topic().settings.expires_after_ms == MINUTE
    world.cancel(message_id)
    world.restart()
    world.now += LATER
    assert tell(world, ends=True) == 1
    # A topic that a user deleted has no settings any more.
    world.one(commands.encode_topic_put("t", {}))
    world.one(commands.encode_topic_delete("t"))
    world.ids(draft())
    assert (world.topic().settings.expires_after_ms, world.ledger.topics.expiring) == (None, set())


def test_topics_without_the_setting_stay() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {}))
    world.now = 1000 * MINUTE
    assert (tell(world, ends=True), tell(world, ends=False), world.topic().used_ms) == (0, 0, 0)
    world.one(commands.encode_topic_put("t", {"expires_after_ms": MINUTE}))
    assert world.ledger.topics.expiring == {0}


@pytest.mark.parametrize("config", [{"expires_after_ms": 59_999}, {"expires_after_ms": True}])
def test_a_wrong_time_is_refused(config: dict[str, Any]) -> None:
    refused = World().one(commands.encode_topic_put("t", config))
    assert isinstance(refused, Refused)
    assert (refused.code, refused.detail.startswith("expires_after: ")) == ("bad_config", True)


def test_the_expiry_of_a_subscription_is_refused() -> None:
    world = brief()
    assert world.one(commands.encode_subscription_put("t", "b", {"expires_after_ms": MINUTE})).code == "bad_config"


@pytest.mark.parametrize(
    "rows", [[], [(0, 0, False)], [(0, 0, False, 0)] * 501, [(0, 0, 2, 0)], [(0, 1 << 16, True, 0)]]
)
def test_a_command_that_cannot_be_is_malformed(rows: list[tuple[Any, ...]]) -> None:
    refused = World().raw(Command.TOPIC_EXPIRY, rows)
    assert isinstance(refused, Refused)
    assert refused.code == "malformed"
