"""unique_for: one message per key and period, pending or settled (ADR 254)."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Command, Job
from hadelay.codec.publishcommand import encode_publish, hash_client_key
from hadelay.codec.results import JobResult, Refused, RowCode
from hadelay.codec.wire import frame
from hadelay.ledger.messages import idempotency, unique
from hadelay.model import KEEP, MAX_UNIQUE_MS, REJECT, REPLACE, Draft
from hadelay.settings.cluster import Settings
from tests.ledger.world import START_MS, World, draft


def once(for_ms: int = 1_000, key: bytes = b"night", **how: Any) -> Draft:
    return replace(draft(), key=key, unique_ms=for_ms, **how)


def reported(result: Any) -> list[tuple[int, int, bool]]:
    return list(zip(result.ids.tolist(), result.codes.tolist(), result.duplicate.tolist(), strict=True))


def settled(world: World, *drafts: Draft) -> int:
    """Publish one message, and ack it; returns its id."""
    (message_id,) = world.ids(*drafts)
    assert world.ack(world.lease(message_id)) == [0]
    return message_id


def test_a_key_is_dropped_within_its_period_and_stored_at_its_end() -> None:
    world = World()
    first = settled(world, once())
    for world.now in (0, 1, 999):
        assert reported(world.publish(once(body=b"another", when_ms=5_000))) == [(first, RowCode.OK, True)]
    world.now = 1_000
    ((second, _, duplicate),) = reported(world.publish(once()))
    assert (second != first, duplicate) == (True, False)


def test_a_dropped_publish_does_not_prolong_the_period() -> None:
    world = World()
    first = settled(world, once(1_000))
    world.now = 900
    assert reported(world.publish(once(MAX_UNIQUE_MS))) == [(first, RowCode.OK, True)]
    world.now = 1_000
    assert not world.publish(once()).duplicate.any()


def test_a_publish_without_unique_for_neither_asks_nor_begins() -> None:
    world = World()
    plain = settled(world, once(0))
    first = settled(world, once())
    assert plain != first
    again = settled(world, once(0))
    assert again not in (plain, first)
    # The answer names the message that began the period, though another one was published last under the key.
    assert reported(world.publish(once())) == [(first, RowCode.OK, True)]


def test_a_pending_message_still_has_the_key_after_its_period() -> None:
    world = World()
    (first,) = world.ids(once(when_ms=60_000))
    world.now = 1_000
    assert reported(world.publish(once())) == [(first, RowCode.OK, True)]
    world.cancel(first)
    # That answer began no period: the pending message was kept.
    assert not world.publish(once()).duplicate.any()


def test_a_cancelled_replaced_or_purged_message_keeps_its_period() -> None:
    world = World()
    (first,) = world.ids(once(when_ms=60_000))
    world.cancel(first)
    assert reported(world.publish(once())) == [(first, RowCode.OK, True)]
    (other,) = world.ids(once(key=b"b", when_ms=60_000))
    world.ids(replace(draft(), key=b"b", on_conflict=REPLACE))
    assert reported(world.publish(once(key=b"b"))) == [(other, RowCode.OK, True)]
    (third,) = world.ids(once(key=b"c", when_ms=60_000))
    world.one(commands.encode_purge("t", 7))
    assert reported(world.publish(once(key=b"c"))) == [(third, RowCode.OK, True)]


def test_a_deleted_topic_takes_its_periods_along() -> None:
    world = World()
    first = settled(world, once())
    world.one(commands.encode_topic_delete("t", True))
    assert not unique.is_unique(world.ledger, "t", hash_client_key(b"night"))
    assert settled(world, once()) != first
    assert world.ledger.unique_count == 2
    world.now = 1_000
    assert world.maintain(Job.TTL_EXPIRE) == JobResult(True, 0)
    assert world.ledger.unique_count == 0


def test_topics_have_keys_of_their_own() -> None:
    world = World()
    result = world.publish(once(), once(topic="u"), once(key=b"day"))
    assert len(set(result.ids.tolist())) == 3
    assert not result.duplicate.any()


def test_a_key_twice_in_one_batch_is_one_message() -> None:
    world = World()
    result = world.publish(once(), once(), once(key=b"b"), once())
    first, _, other, _ = result.ids.tolist()
    assert reported(result) == [(first, 0, False), (first, 0, True), (other, 0, False), (first, 0, True)]
    assert world.ledger.unique_count == 2


def test_rows_of_a_batch_are_judged_as_if_they_came_one_by_one() -> None:
    rows = [once(when_ms=60_000), replace(draft(in_ms=60_000), key=b"night", on_conflict=REPLACE), once()]
    one, other = World(), World()
    batch = other.publish(*rows)
    assert reported(batch) == [reported(one.publish(row))[0] for row in rows]
    assert batch.ids[2] == batch.ids[0] != batch.ids[1]


def test_a_refused_publish_begins_no_period() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {"max_messages": 1}))
    world.ids(draft())
    result = world.publish(once(), once())
    assert result.codes.tolist() == [RowCode.TOO_MANY_MESSAGES] * 2
    assert (world.ledger.unique_count, world.ids(once(topic="u"))[0] > 0) == (0, True)
    too_far = once(when_ms=world.ledger.settings.max_delay_ms + 1)
    assert world.publish(too_far).codes.tolist() == [RowCode.TOO_FAR]
    assert world.ledger.unique_count == 1


def test_the_limit_refuses_new_keys_and_only_those() -> None:
    world = World(Settings(idempotency_max_keys=6))
    ids = [settled(world, once(key=b"%d" % n)) for n in range(3)]
    refused = world.publish(once(key=b"x"), once(key=b"x"), once(key=b"1"), once(0, key=b"y"))
    assert refused.codes.tolist() == [RowCode.TOO_MANY_KEYS, RowCode.TOO_MANY_KEYS, RowCode.OK, RowCode.OK]
    assert refused.ids.tolist()[2] == ids[1]
    # A period that ends makes room at once, without any maintenance.
    world.now = 1_000
    assert not world.publish(*(once(key=b"z%d" % n) for n in range(3))).codes.any()
    assert world.ledger.unique_count == 3
    world.now = 2_000
    beyond = world.publish(*(once(key=b"w%d" % n) for n in range(5))).codes.tolist()
    assert beyond == [RowCode.OK] * 3 + [RowCode.TOO_MANY_KEYS] * 2, "keys of one batch take room from each other"


def test_unique_keys_take_room_from_idempotency_keys() -> None:
    world = World(Settings(idempotency_max_keys=8))
    for n in range(4):
        world.ids(once(key=b"%d" % n))
    for n in range(3):
        world.publish(draft(), key=b"i%d" % n)
    # (8 - 4) / 2 idempotency keys fill a table: the third began another one.
    assert (world.ledger.key_count_before, world.ledger.key_count) == (2, 1)
    assert idempotency.is_known(world.ledger, [once(key=b"1")], None)


def test_a_lower_limit_leaves_half_of_it_to_idempotency_keys() -> None:
    world = World()
    for n in range(8):
        world.ids(once(key=b"%d" % n))
    world.one(commands.encode_settings(Settings(idempotency_max_keys=8).to_map()))
    first = world.publish(draft(), key=b"again").ids.tolist()
    world.publish(draft())
    world.publish(draft())
    assert world.publish(draft(), key=b"again").ids.tolist() == first


def test_an_idempotency_key_is_judged_first() -> None:
    world = World()
    first = settled(world, once(idem=b"request"))
    world.now = 5_000
    assert reported(world.publish(once(idem=b"request"))) == [(first, RowCode.OK, True)]
    assert world.publish(once(2_000, idem=b"request")).codes.tolist() == [RowCode.KEY_CONFLICT]
    second = settled(world, once(idem=b"next"))
    # A dropped publish is answered alike when it is repeated, also after the period.
    assert reported(world.publish(once(idem=b"dropped"))) == [(second, RowCode.OK, True)]
    world.now = 7_000
    assert reported(world.publish(once(idem=b"dropped"))) == [(second, RowCode.OK, True)]


def test_subscriptions_get_their_copies_once() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {}))
    world.one(commands.encode_subscription_put("t", "billing", {}))
    (first,) = world.ids(once())
    assert reported(world.publish(once())) == [(first, RowCode.OK, True)]
    assert [world.topic(name).published for name in ("t", "t~billing")] == [1, 1]


def test_periods_survive_a_restart_and_end_in_slices() -> None:
    world = World()
    (first, *_) = world.ids(*(once(1_000 + n, key=b"%d" % n) for n in range(30)))
    world.restart()
    assert reported(world.publish(once(key=b"0"))) == [(first, RowCode.OK, True)]
    world.now = 1_010
    assert world.maintain(Job.TTL_EXPIRE, limit=4) == JobResult(False, 0)
    world.restart()
    assert world.ledger.unique_count == 26
    assert world.maintain(Job.TTL_EXPIRE, limit=100) == JobResult(True, 0)
    assert (world.ledger.unique_count, unique.first_end_ms(world.ledger)) == (19, START_MS + 1_011)
    world.now = 60_000
    world.ids(once(key=b"other"))
    assert world.ledger.unique_count == 2  # a publish drops two ended periods per key, and 16 more
    world.ids(once(key=b"another"))
    assert world.ledger.unique_count == 2


def test_a_new_period_of_a_key_whose_ended_one_is_still_stored_lasts_to_its_own_end() -> None:
    """A publish drops a limited number of ended periods, the oldest first, so the ended period of its key may stay."""
    world = World()
    first = world.ids(*(once(1_000 + n, key=b"%d" % n) for n in range(30)))
    assert world.ack(world.lease(*first)) == [0] * 30
    world.now = 2_000
    second = settled(world, once(5_000, key=b"29"))
    assert world.ledger.unique_count == 12, "the publish dropped 18 of 30; 11 of the other 12 have ended"
    assert world.maintain(Job.TTL_EXPIRE) == JobResult(True, 0)
    assert world.ledger.unique_count == 1
    world.now = 6_999
    assert reported(world.publish(once(key=b"29"))) == [(second, RowCode.OK, True)]
    world.now = 7_000
    assert not world.publish(once(key=b"29")).duplicate.any()


@pytest.mark.parametrize(
    ("rows", "mode"),
    [
        ([(0, 5)], REPLACE), ([(0, 5)], REJECT), ([(1, 5)], KEEP), ([(2, 5)], KEEP), ([(0, 0)], KEEP),
        ([(0, MAX_UNIQUE_MS + 1)], KEEP), ([(0, 5), (0, 5)], KEEP),
    ],
)  # fmt: skip
def test_a_unique_for_that_cannot_be_is_malformed(rows: list[tuple[int, int]], mode: int) -> None:
    body = bytearray(encode_publish("n1", [replace(draft(), key=b"k", on_conflict=mode), draft()]))
    counts = struct.Struct("<II")  # the last two numbers of the head: uniques, blob
    _, blob = counts.unpack_from(body, 20)
    counts.pack_into(body, 20, len(rows), blob)
    body[len(body) - blob : len(body) - blob] = b"".join(counts.pack(*row) for row in rows)
    refused = World().one(frame(Command.PUBLISH, bytes(body)))
    assert isinstance(refused, Refused)
    assert refused.code == "malformed"
