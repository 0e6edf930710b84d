"""Subscriptions: what is published to a topic is copied, once each, and each copy goes its own way."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.meta import Meta, mask_of, pack
from hadelay.codec.publishcommand import hash_group
from hadelay.codec.records import decode_record
from hadelay.codec.results import CancelOutcome, Done, Refused, RowCode, TargetOutcome
from hadelay.ledger.hours.lookup import find_entry
from hadelay.ledger.messages.copies import copies_of, published_id
from hadelay.model import HOUR_MS, KEEP, MAX_SUBSCRIPTIONS, REJECT, REPLACE, Draft
from tests.ledger.world import START_HOUR, START_MS, World

#: Beyond the retention of every topic here.
LATER = 30 * 24 * HOUR_MS


def subscribed(world: World, *names: str, of: str = "orders", **config: Any) -> None:
    if world.ledger.topic(of) is None:
        assert isinstance(world.one(commands.encode_topic_put(of, {})), Done)
    for name in names:
        assert isinstance(world.one(commands.encode_subscription_put(of, name, config)), Done)


def message(
    in_ms: int = 0, tags: tuple[str, ...] = (), *, topic: str = "orders", key: str | None = None, mode: int = KEEP,
    group: int | None = None, ttl_ms: int = 0, body: bytes = b"x",
) -> Draft:  # fmt: skip
    name = None if group is None else str(group)
    meta = pack(Meta(tags=list(tags), key=key, ttl=ttl_ms, group=name))
    return Draft(
        topic, in_ms, True, mask_of(tags), ttl_ms, meta, body, key=None if key is None else key.encode(),
        on_conflict=mode, group=None if name is None else hash_group(name),
    )  # fmt: skip


def topics_of(world: World, published: int) -> dict[str, int]:
    """Topic or subscription → id, of a published message and its copies."""
    found = {}
    for one in (published, *copies_of(world.ledger, published)):
        place = find_entry(world.ledger, one)
        assert place is not None
        found[world.ledger.topics[int(place.rows["topic"][0])].name] = one
    return found


def record_of(world: World, message_id: int) -> Any:
    place = find_entry(world.ledger, message_id)
    assert place is not None
    row = place.rows[0]
    return decode_record(world.store.record(place.hour, int(row["offset"]), int(row["size"]), verify=True))


def test_a_key_is_a_duplicate_while_a_copy_is_not_cancelled() -> None:
    world = World()
    subscribed(world, "billing", "shipping")
    draft = replace(message(60_000), idem=b"k")
    (published,) = world.publish(draft).ids.tolist()

    def again() -> RowCode:
        return RowCode(int(world.publish(draft).codes[0]))

    for topic in ("orders", "orders~billing"):
        world.one(commands.encode_purge(topic, 1))
        assert again() is RowCode.OK, topic
    world.one(commands.encode_purge("orders~shipping", 1))
    assert again() is RowCode.KEY_CANCELLED
    result = world.publish(draft)
    assert result.others is not None
    assert result.others.tolist() == [published]


def test_a_purged_dead_letter_is_no_duplicate() -> None:
    world = World()
    draft = replace(message(), idem=b"k")
    world.one(commands.encode_topic_put("orders", {"max_attempts": 1}))
    (published,) = world.publish(draft).ids.tolist()
    world.nack(world.lease(published), 0)
    assert world.states(published) == ["dead"]
    assert world.publish(draft).duplicate.tolist() == [True]
    world.one(commands.encode_purge("orders", 4))
    assert world.publish(draft).duplicate.tolist() == [False]


def test_a_message_is_filed_for_each_subscription_with_one_record() -> None:
    world = World()
    subscribed(world, "billing", "mail")
    first, second = world.ids(message(body=b"one"), message(body=b"two"))
    family = topics_of(world, first)
    assert family == {"orders": first, "orders~billing": first + 1, "orders~mail": first + 2}
    assert second == first + 3
    assert len(world.store.files[START_HOUR].log) == 2 * (48 + 3)
    for one in family.values():
        assert (record_of(world, one).first_id, record_of(world, one).body) == (first, b"one")
        assert published_id(world.ledger, one) == first
    assert world.ledger.topics[record_of(world, first + 2).topic].name == "orders"
    for name in family:
        assert (world.topic(name).open, world.topic(name).bytes) == (2, 2 * 51)


def test_each_copy_is_leased_retried_and_settled_by_itself() -> None:
    world = World()
    subscribed(world, "billing", max_attempts=2)
    published = world.ids(message())[0]
    own, copy = published, published + 1
    assert world.ack(world.lease(own)) == [0]
    world.nack(world.lease(copy))
    assert world.states(own, copy) == ["acked", "ready"]
    world.nack(world.lease(copy))
    assert world.states(own, copy) == ["acked", "dead"]
    assert (world.topic("orders").dead, world.topic("orders~billing").dead) == (0, 1)
    redriven = world.one(commands.encode_redrive("n1", "orders~billing", [copy]))
    assert redriven.outcomes.tolist() == [0]
    assert world.states(copy) == ["ready"]
    world.restart()
    assert world.ack(world.lease(copy)) == [0]


def test_the_highest_number_is_no_message() -> None:
    world = World()
    subscribed(world, "billing")
    assert world.cancel((1 << 64) - 1) == [CancelOutcome.NOT_FOUND]


@pytest.mark.parametrize(
    ("config", "passing"),
    [
        ({}, [0, 1, 2, 3]),
        ({"tags": ["eu"]}, [1, 3]),
        ({"tags": ["eu", "vip"]}, [3]),
        ({"any_tags": ["eu", "us"]}, [1, 2, 3]),
        ({"tags": ["vip"], "any_tags": ["us"]}, []),
    ],
)
def test_the_tag_filter_is_exact(config: dict[str, Any], passing: list[int]) -> None:
    world = World()
    subscribed(world, "some", **config)
    ids = world.ids(message(), message(tags=("eu",)), message(tags=("us",)), message(tags=("eu", "vip")))
    assert [n for n, one in enumerate(ids) if "orders~some" in topics_of(world, one)] == passing


def test_tags_that_only_share_bits_of_the_mask_do_not_pass() -> None:
    world = World()
    subscribed(world, "some", tags=["eu"])
    drafts = [message(tags=(f"t{n}",)) for n in range(20)]
    # Every bit is set, as if the hashes of other tags had set them.
    ids = world.ids(*(Draft("orders", 0, True, (1 << 64) - 1, 0, d.meta, d.body) for d in drafts))
    assert all(topics_of(world, one).keys() == {"orders"} for one in ids)
    assert world.ids(Draft("orders", 0, True, (1 << 64) - 1, 0, b"\xc1", b"x")), "malformed meta passes nothing"
    assert world.topic("orders~some").open == 0


def test_messages_from_before_the_subscription_are_not_copied_and_after_its_deletion_neither() -> None:
    world = World()
    subscribed(world)
    before = world.ids(message(10_000))[0]
    subscribed(world, "billing")
    during = world.ids(message(10_000))[0]
    assert isinstance(world.one(commands.encode_topic_delete("orders~billing", False)), Refused), "one is pending"
    assert world.one(commands.encode_topic_delete("orders~billing", True)) == Done()
    after = world.ids(message(10_000))[0]
    assert [len(copies_of(world.ledger, one)) for one in (before, during, after)] == [0, 1, 0]
    assert world.states(during, during + 1) == ["scheduled", "cancelled"]
    subscribed(world, "billing")
    again = world.ids(message(10_000))[0]
    assert world.states(during + 1, again + 1) == ["cancelled", "scheduled"]


def test_the_own_queue_can_be_left_to_what_no_subscription_gets() -> None:
    world = World()
    subscribed(world, "eu", tags=["eu"])
    world.one(commands.encode_topic_put("orders", {"own_queue": False}))
    eu, other = world.ids(message(tags=("eu",)), message())
    assert topics_of(world, eu) == {"orders~eu": eu}
    assert topics_of(world, other) == {"orders": other}
    assert record_of(world, eu).topic == world.topic("orders").number
    world.one(commands.encode_topic_delete("orders~eu", True))
    assert topics_of(world, world.ids(message(tags=("eu",)))[0]).keys() == {"orders"}


def test_the_own_queue_gets_the_messages_of_one_batch_that_no_subscription_gets() -> None:
    world = World()
    subscribed(world, "eu", tags=["eu"])
    subscribed(world, "us", tags=["us"])
    world.one(commands.encode_topic_put("orders", {"own_queue": False}))
    found = [topics_of(world, one).keys() for one in world.ids(message(tags=("eu",)), message(tags=("us",)), message())]
    assert found == [{"orders~eu"}, {"orders~us"}, {"orders"}]


def cancelled(world: World, *ids: int) -> Any:
    return world.one(commands.encode_cancel("n1", ids))


def test_cancel_by_the_published_id_means_all_copies_and_by_a_copys_id_that_one() -> None:
    world = World()
    subscribed(world, "billing", "mail")
    one, two = world.ids(message(10_000), message(10_000))
    result = cancelled(world, one + 1, one + 1, one, one)
    assert result.outcomes.tolist() == [CancelOutcome.CANCELLED] * 4
    assert result.copies[:2] == [[], []]
    assert result.copies[2] == [
        ("orders", one, 0), ("orders~billing", one + 1, 0), ("orders~mail", one + 2, 0),
    ]  # fmt: skip
    assert world.states(*range(one, one + 3), two, two + 1, two + 2) == ["cancelled"] * 3 + ["scheduled"] * 3
    world.now += 10_000
    world.lease(two + 1)
    result = cancelled(world, two)
    assert result.outcomes.tolist() == [CancelOutcome.PARTIAL]
    assert [outcome for _, _, outcome in result.copies[0]] == [0, CancelOutcome.LEASED, 0]
    assert world.states(two, two + 1, two + 2) == ["cancelled", "leased", "cancelled"]


def test_reschedule_and_deliver_now_by_the_published_id() -> None:
    world = World()
    subscribed(world, "billing")
    published = world.ids(message(10_000))[0]
    result = world.one(commands.encode_reschedule("n1", 5 * HOUR_MS, True, [published]))
    assert result.outcomes.tolist() == [TargetOutcome.DONE]
    assert result.deliver_at_ms.tolist() == [START_MS + 5 * HOUR_MS]
    assert topics_of(world, published) == {"orders": published, "orders~billing": published + 1}
    for one in (published, published + 1):
        assert world.place(one)[0] == START_HOUR + 5
    result = world.one(commands.encode_reschedule("n1", 0, True, [published + 1]))
    assert world.states(published, published + 1) == ["scheduled", "ready"]
    world.ack(world.lease(published + 1))
    result = world.one(commands.encode_reschedule("n1", 0, True, [published]))
    assert result.outcomes.tolist() == [TargetOutcome.PARTIAL]
    assert world.states(published, published + 1) == ["ready", "acked"]


def test_a_deleted_or_purged_subscription_does_not_make_a_reschedule_partial() -> None:
    world = World()
    subscribed(world, "billing", "mail", "audit")
    published = world.ids(message(10_000))[0]
    world.one(commands.encode_topic_delete("orders~billing", True))
    world.one(commands.encode_purge("orders~mail", 3))
    result = world.one(commands.encode_reschedule("n1", 1_000, True, [published]))
    assert result.outcomes.tolist() == [TargetOutcome.DONE]
    assert [name for name, _, _ in result.copies[0]] == ["orders", "orders~audit"]


@pytest.mark.parametrize("ends", ["delete", "purge"])
def test_a_deleted_subscription_of_a_topic_without_an_own_queue_does_not_make_a_reschedule_partial(ends: str) -> None:
    """The published id is that of the first copy."""
    world = World()
    subscribed(world, "billing", "mail")
    world.one(commands.encode_topic_put("orders", {"own_queue": False}))
    published = world.ids(message(10_000))[0]
    name = "orders~billing"
    world.one(commands.encode_topic_delete(name, True) if ends == "delete" else commands.encode_purge(name, 3))
    result = world.one(commands.encode_reschedule("n1", 1_000, True, [published]))
    assert result.outcomes.tolist() == [TargetOutcome.DONE]
    assert result.copies[0] == [("orders~mail", published + 1, 0)]
    assert cancelled(world, published).outcomes.tolist() == [CancelOutcome.CANCELLED]
    assert world.states(published, published + 1) == ["cancelled", "cancelled"]
    result = world.one(commands.encode_reschedule("n1", 1_000, True, [published]))
    assert result.outcomes.tolist() == [TargetOutcome.CANCELLED]


def test_copies_are_found_after_the_hour_of_the_publish_has_gone() -> None:
    world = World()
    subscribed(world, "billing", "mail", "audit")
    published, other = world.ids(message(), message())
    world.ack(world.lease(published, published + 3, other, *copies_of(world.ledger, other)))
    world.nack(world.lease(published + 1, published + 2), delay_ms=3 * HOUR_MS)
    world.now += 3 * HOUR_MS
    world.apply(commands.encode_noop())
    assert world.maintain(Job.RETIRE, START_HOUR).done
    assert world.store.count(START_HOUR) == 0
    assert copies_of(world.ledger, published) == [published + 1, published + 2]
    assert copies_of(world.ledger, published + 1) == copies_of(world.ledger, other) == []
    result = cancelled(world, published)
    assert result.outcomes.tolist() == [CancelOutcome.CANCELLED]
    assert world.states(published + 1, published + 2) == ["cancelled", "cancelled"]


def test_a_client_key_is_taken_while_any_copy_is_pending() -> None:
    world = World()
    subscribed(world, "billing")
    first = world.ids(message(key="k"))[0]
    world.ack(world.lease(first))
    kept = world.publish(message(key="k"))
    assert (kept.ids.tolist(), kept.duplicate.tolist()) == ([first], [True])
    assert world.publish(message(key="k", mode=REJECT)).codes.tolist() == [RowCode.KEY_PENDING]
    replaced = world.publish(message(5_000, key="k", mode=REPLACE))
    assert replaced.others.tolist() == [first]
    second = replaced.ids.tolist()[0]
    assert world.states(first, first + 1, second, second + 1) == ["acked", "cancelled", "scheduled", "scheduled"]
    world.now += 5_000
    world.lease(second + 1)
    refused = world.publish(message(key="k", mode=REPLACE))
    assert (refused.codes.tolist(), refused.others.tolist()) == ([RowCode.KEY_LEASED], [second])
    assert cancelled(world, second).outcomes.tolist() == [CancelOutcome.PARTIAL]


def test_a_client_key_goes_with_the_last_copy() -> None:
    world = World()
    subscribed(world, "billing")
    first = world.ids(message(key="k"))[0]
    world.ack(world.lease(first))
    world.nack(world.lease(first + 1), delay_ms=3 * HOUR_MS)
    world.now += 3 * HOUR_MS
    world.apply(commands.encode_noop())
    assert world.maintain(Job.RETIRE, START_HOUR).done
    assert world.publish(message(key="k")).ids.tolist() == [first]
    world.ack(world.lease(first + 1))
    world.now += 3 * HOUR_MS
    world.apply(commands.encode_noop())
    assert world.maintain(Job.RETIRE, START_HOUR + 3).done
    assert not world.tables.range(b"key")
    assert not world.tables.range(b"keyof")


def test_a_full_subscription_refuses_the_publish_and_counts_only_what_it_gets() -> None:
    world = World()
    subscribed(world, "eu", tags=["eu"], max_messages=2)
    drafts = [message(tags=("eu",)), message(), message(tags=("eu",)), message(tags=("eu",)), message()]
    full = RowCode.SUBSCRIPTION_FULL
    assert world.publish(*drafts).codes.tolist() == [0, 0, 0, full, 0]
    assert (world.topic("orders").open, world.topic("orders~eu").open) == (4, 2)
    subscribed(world, "eu", max_messages=None, max_bytes=2 * 60)
    assert world.publish(message(tags=("eu",))).codes.tolist() == [full]
    world.one(commands.encode_topic_put("orders", {"own_queue": False, "max_messages": 4}))
    subscribed(world, "eu", max_bytes=None)
    assert world.publish(message(tags=("eu",)), message()).codes.tolist() == [0, RowCode.TOO_MANY_MESSAGES]


def test_a_full_subscription_that_drops_loses_its_copies_and_counts_them() -> None:
    world = World()
    subscribed(world, "eu", tags=["eu"], max_messages=2, on_full="drop")
    subscribed(world, "all")
    ids = world.ids(*(message(tags=("eu",)) for _ in range(4)), message())
    assert ["orders~eu" in topics_of(world, one) for one in ids] == [True, True, False, False, False]
    assert all({"orders", "orders~all"} <= topics_of(world, one).keys() for one in ids)
    assert (world.topic("orders~eu").open, world.topic("orders~eu").dropped) == (2, 2)
    subscribed(world, "eu", max_messages=None, max_bytes=2 * world.topic("orders~eu").bytes)
    larger = world.ids(message(tags=("eu",), body=b"x" * 200))[0]
    assert topics_of(world, larger).keys() == {"orders", "orders~all"}
    assert "orders~eu" in topics_of(world, world.ids(message(tags=("eu",)))[0])
    world.restart()
    assert world.topic("orders~eu").dropped == 3
    assert world.topic("orders~all").dropped == 0


def test_a_refused_publish_drops_nothing() -> None:
    world = World()
    subscribed(world, "stats", max_messages=1, on_full="drop")
    subscribed(world, "billing", max_messages=2)
    full = RowCode.SUBSCRIPTION_FULL
    assert world.publish(message(), message(), message()).codes.tolist() == [0, 0, full]
    assert (world.topic("orders~stats").dropped, world.topic("orders~billing").open) == (1, 2)
    world.one(commands.encode_topic_put("orders", {"publish_rate": 1}))
    subscribed(world, "billing", max_messages=None)
    world.now += 60_000
    codes = world.publish(*(message() for _ in range(10))).codes.tolist()
    assert RowCode.TOO_FAST in codes
    assert world.topic("orders~stats").dropped == 1 + codes.count(RowCode.OK)


def test_a_message_of_dropped_copies_is_filed_in_the_topic_although_it_has_no_own_queue() -> None:
    world = World()
    subscribed(world, "eu", "eu2", tags=["eu"], max_messages=1, on_full="drop")
    world.one(commands.encode_topic_put("orders", {"own_queue": False, "max_messages": 1}))
    first, second = world.ids(message(tags=("eu",)), message(tags=("eu",)))
    assert topics_of(world, first).keys() == {"orders~eu", "orders~eu2"}
    assert topics_of(world, second) == {"orders": second}
    assert world.publish(message(tags=("eu",))).codes.tolist() == [RowCode.TOO_MANY_MESSAGES]
    assert [world.topic(f"orders~{name}").dropped for name in ("eu", "eu2")] == [1, 1]
    subscribed(world, "eu2", max_messages=2)
    assert topics_of(world, world.ids(message(tags=("eu",)))[0]).keys() == {"orders~eu2"}


def test_a_replacing_message_needs_room_where_the_replaced_copy_was_dropped() -> None:
    world = World()
    subscribed(world, "stats", max_messages=1, on_full="drop")
    first, second = world.ids(message(10_000, key="k"), message(10_000, key="k", mode=REPLACE))
    assert topics_of(world, second).keys() == {"orders", "orders~stats"}, "the replaced copy makes room"
    other, again = world.ids(message(10_000, key="l"), message(10_000, key="l", mode=REPLACE))
    assert topics_of(world, other).keys() == topics_of(world, again).keys() == {"orders"}
    assert world.states(first + 1, second + 1, other, again) == ["cancelled", "scheduled", "cancelled", "scheduled"]
    assert world.topic("orders~stats").dropped == 2
    third = world.ids(message(10_000, key="k", mode=REPLACE))[0]
    assert topics_of(world, third).keys() == {"orders", "orders~stats"}
    assert (world.topic("orders~stats").pending, world.topic("orders~stats").dropped) == (1, 2)


def test_a_subscription_made_again_goes_on_counting() -> None:
    world = World()
    subscribed(world, "stats", max_messages=1, on_full="drop")
    world.ids(message(), message())
    assert world.one(commands.encode_topic_delete("orders~stats", True)) == Done()
    subscribed(world, "stats")
    assert (world.topic("orders~stats").dropped, world.topic("orders~stats").settings.on_full) == (1, "refuse")


def test_messages_of_one_batch_take_bytes_from_each_other() -> None:
    world = World()
    subscribed(world, "eu")
    world.publish(message())
    size = world.topic("orders~eu").bytes
    subscribed(world, "eu", max_bytes=3 * size)
    full = RowCode.SUBSCRIPTION_FULL
    assert world.publish(message(), message(), message(), message()).codes.tolist() == [0, 0, full, full]


def test_ttl_and_groups_are_each_subscriptions_own() -> None:
    world = World()
    subscribed(world, "fast", ttl_ms=1_000)
    subscribed(world, "slow")
    subscribed(world, "single", group_concurrency=1)
    first, second = world.ids(message(group=7), message(group=7))
    assert world.states(first + 3, second + 3) == ["ready", "blocked"]
    assert world.states(second, second + 1, second + 2) == ["ready"] * 3
    world.now += 1_000
    world.maintain(Job.TTL_EXPIRE)
    assert world.states(first, first + 1, first + 2, first + 3) == ["ready", "expired", "ready", "ready"]
    world.ack(world.lease(first + 3))
    assert world.states(second + 3) == ["ready"]
    world.restart()


def test_names_limits_and_settings() -> None:
    world = World()
    assert world.one(commands.encode_subscription_put("orders", "billing", {})).code == "no_topic"
    subscribed(world, *(f"s{n}" for n in range(MAX_SUBSCRIPTIONS)))
    assert world.one(commands.encode_subscription_put("orders", "more", {})).code == "too_many_subscriptions"
    assert world.one(commands.encode_subscription_put("orders", "s3", {"lease_ms": 5})) == Done()
    assert len(copies_of(world.ledger, world.ids(message())[0])) == MAX_SUBSCRIPTIONS
    for name in ("a~b", "a b", "", "x" * 128):
        assert world.one(commands.encode_subscription_put("orders", name, {})).code in ("bad_config", "malformed")
    for config in (
        {"own_queue": False},
        {"publish_rate": 1},
        {"tags": "eu"},
        {"tags": [""]},
        {"any_tags": [1]},
        {"on_full": "x"},
    ):
        assert world.one(commands.encode_subscription_put("orders", "s3", config)).code == "bad_config"
    assert world.one(commands.encode_topic_put("orders", {"tags": ["eu"]})).code == "bad_config"
    assert world.one(commands.encode_topic_put("orders", {"on_full": "drop"})).code == "bad_config"
    assert world.one(commands.encode_topic_put("orders~new", {})).code == "no_topic"
    assert world.one(commands.encode_topic_put("orders~s3", {"paused": True})) == Done()
    assert world.publish(message(topic="orders~new")).codes.tolist() != [RowCode.OK]


def test_a_topic_is_deleted_with_its_subscriptions_only_if_forced() -> None:
    world = World()
    subscribed(world, "billing")
    refused = world.one(commands.encode_topic_delete("orders", False))
    assert refused.code == "topic_not_empty"
    published = world.ids(message(10_000))[0]
    assert world.one(commands.encode_topic_delete("orders", True)) == Done()
    assert world.topic("orders") is world.topic("orders~billing") is None
    assert world.states(published, published + 1) == ["cancelled", "cancelled"]
    while not world.maintain(Job.SWEEP).done:
        pass
