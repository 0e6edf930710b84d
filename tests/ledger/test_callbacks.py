"""Acks and deaths file callbacks in the same apply, one each (ADR 255)."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hadelay.codec import commands, settlement
from hadelay.codec.ackparts import CallReply, encode_replies, encode_results
from hadelay.codec.meta import Meta, pack, unpack
from hadelay.codec.records import decode_record
from hadelay.codec.results import Done, LeaseOutcome, Refused
from hadelay.codec.wire import COMMAND
from hadelay.model import MAX_REPLY, MAX_RESULT, Draft, encode_id
from hadelay.settings.cluster import Settings
from tests.ledger.world import World, draft

HOOK = {"url": "https://a.example/", "allow_per_message": True}


def asking(**settings: Any) -> World:
    """A topic `t` whose acks and deaths are told to `done` and `failed`."""
    world = World()
    config = {"on_success": "done", "on_failure": "failed", "max_attempts": 1, **settings}
    assert world.one(commands.encode_topic_put("t", config)) == Done(True)
    return world


def reported(world: World, topic: str = "done") -> list[dict[str, Any]]:
    """Documents of the callbacks in a topic, in the order of their ids."""
    return [json.loads(decode_record(record).body) for record in records(world, topic)]


def records(world: World, topic: str) -> list[bytes]:
    state = world.topic(topic)
    found = []
    for hour in sorted(world.store.hours()):
        rows = world.store.entries(hour, slice(0, world.store.count(hour)))
        rows = rows[rows["topic"] == state.number] if state is not None else rows[:0]
        found += [world.store.record(hour, int(row["offset"]), int(row["size"]), verify=True) for row in rows]
    return found


def settled(world: World, rows: np.ndarray, *replies: CallReply | None, results: bytes = b"") -> list[int]:
    return world.one(commands.encode_ack("n1", rows, results, encode_replies(replies))).outcomes.tolist()


def test_an_ack_tells_what_the_receiver_answered() -> None:
    world = asking()
    meta = pack(Meta(key="o-1", tp="00-" + "1" * 32 + "-" + "2" * 16 + "-01", sch="daily", oc=1_795_197_600_000))
    first, second = world.ids(replace(draft(), meta=meta), draft())
    rows = world.lease(first, second)
    png = CallReply(201, "image/png", b"\x89PNG", False)
    assert settled(world, rows, CallReply(200, "text/plain", b"paid", False), png) == [0, 0]
    assert reported(world) == [
        {
            "id": encode_id(first), "topic": "t", "key": "o-1", "attempt": 1, "status": 200,
            "content_type": "text/plain", "body": "paid",
            "truncated": False, "schedule": "daily", "occurrence": "2026-11-20T18:00:00.000Z",
        },
        {
            "id": encode_id(second), "topic": "t", "key": None, "attempt": 1, "status": 201,
            "content_type": "image/png", "body": None,
            "body_base64": base64.b64encode(b"\x89PNG").decode(), "truncated": False, "schedule": None,
            "occurrence": None,
        },
    ]  # fmt: skip
    found = unpack(decode_record(records(world, "done")[0]).meta)
    assert (found.ct, found.meta, found.re) == ("application/json", {"callback": "success"}, "success")
    assert found.tp == "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    assert (world.topic("done").published, world.ledger.callbacks["filed"]) == (2, 2)


def test_records_that_callbacks_read_are_bounded_per_command() -> None:
    """Leases beyond the bound are settled by the next command, and each message has one callback."""
    world = asking()
    large = [draft(body=b"x" * (1 << 20)) for _ in range(6)]
    first, second = world.lease(*world.ids(*large[:4], draft())), world.lease(*world.ids(*large))
    assert settled(world, np.concatenate([first, second])) == [0, 0, 0, 3, 3, *[3] * 6]
    assert settled(world, np.concatenate([first[3:], second])) == [0, 0, 0, 0, *[3] * 4]
    assert settled(world, second[2:]) == [0, 0, 0, 3]
    assert len(reported(world)) == 10
    rows = world.lease(*world.ids(*large))
    assert world.nack(np.concatenate([second[5:], rows])) == [0, 0, 0, 3, 3, 3, 3]
    assert len(reported(world, "failed")) == 3
    small = world.lease(*world.ids(draft(topic="quiet"), draft(topic="quiet")))
    assert world.ack(small) == [0, 0]


def test_an_ack_of_a_consumer_tells_its_result() -> None:
    world = asking()
    rows = world.lease(*world.ids(draft(), draft(), draft()))
    results = encode_results([b'{"paid":7}', None, b'"' + b"x" * (MAX_RESULT - 2) + b'"'])
    assert settled(world, rows, results=results) == [0, 0, 0]
    found = reported(world)
    assert [(one["status"], one["content_type"], one["truncated"]) for one in found] == [
        (None, "application/json", False), (None, None, False), (None, "application/json", True),
    ]  # fmt: skip
    assert [one["body"][:10] for one in found] == ['{"paid":7}', "", '"xxxxxxxxx']
    assert len(found[2]["body"]) == MAX_REPLY


def test_a_result_that_is_cut_short_leaves_the_callbacks_behind_it_alone() -> None:
    """Each callback tells the result of its own message, whatever results stand before it in the ack."""
    world = asking()
    rows = world.lease(*world.ids(*[draft()] * 5))
    large = b'"' + b"x" * (MAX_REPLY + 7) + b'"'
    assert settled(world, rows, results=encode_results([large, b"1", None, large, b"4"])) == [0] * 5
    assert [one["body"] for one in reported(world)] == [
        large[:MAX_REPLY].decode(),
        "1",
        "",
        large[:MAX_REPLY].decode(),
        "4",
    ]


def test_a_lost_lease_leaves_the_callbacks_behind_it_alone() -> None:
    world = asking()
    rows = world.lease(*world.ids(*[draft()] * 4))
    settled(world, rows[[1]])
    assert settled(world, rows, results=encode_results([b"0", b"1", b"2", b"3"])) == [0, 1, 0, 0]
    assert [one["body"] for one in reported(world)] == ["", "0", "2", "3"]


@pytest.mark.parametrize(
    ("body", "truncated", "shown"),
    [
        ("grün".encode(), False, {"body": "grün"}),
        ("grü".encode()[:-1], True, {"body": "gr"}),
        ("grü".encode()[:-1], False, {"body": None, "body_base64": "Z3LD"}),
        (b"\xff", True, {"body": None, "body_base64": "/w=="}),
        (b"", False, {"body": ""}),
    ],
)
def test_bodies_that_are_no_text_are_base64(body: bytes, truncated: bool, shown: dict[str, Any]) -> None:
    world = asking()
    settled(world, world.lease(*world.ids()), CallReply(200, "", body, truncated))
    (found,) = reported(world)
    assert {name: found[name] for name in ("body", "body_base64") if name in found} == shown


def test_only_acks_that_count_have_a_callback_and_each_has_one() -> None:
    world = asking(max_attempts=5)
    one, late, lost = world.ids(draft(), draft(), draft())
    rows = world.lease(one, late, lost, lease_ms=10)
    settled(world, rows[:1])
    settled(world, rows[[0, 0]])
    world.now += 20
    world.expire((1, 1))
    again = world.lease(lost)
    assert settled(world, rows[1:]) == [0, 2], "the late ack counts, the other one does not"
    assert settled(world, rows[1:2]) == [1]
    assert [found["id"] for found in reported(world)] == [encode_id(one), encode_id(late)]
    assert [found["attempt"] for found in reported(world)] == [1, 1]
    settled(world, again)
    assert (reported(world)[-1]["id"], reported(world)[-1]["attempt"]) == (encode_id(lost), 2)


def test_late_acks_of_more_than_one_apply_may_read_are_answered_in_parts() -> None:
    """A callback reads the record of its message, which may have a mebibyte."""
    world = asking(max_attempts=5)
    world.checking = False
    large = world.ids(*[draft(body=bytes(1 << 20)) for _ in range(10)])
    rows, parts = world.lease(*large, lease_ms=10), []
    world.now += 20
    world.expire((1, 1))
    while len(rows):
        outcomes = np.array(settled(world, rows))
        parts.append(int(np.count_nonzero(outcomes == LeaseOutcome.DONE)))
        rows = rows[outcomes == LeaseOutcome.AGAIN]
    assert parts == [4, 4, 2]
    assert sorted(found["id"] for found in reported(world)) == [encode_id(one) for one in sorted(large)]


@pytest.mark.parametrize("route", ["keep", "graves"])
def test_a_death_tells_its_errors(route: str) -> None:
    world = asking(max_attempts=2, dead_letter=route)
    (one,) = world.ids(replace(draft(), meta=pack(Meta(key="o-1"))))
    world.nack(world.lease(one), 0, "no such customer")
    assert not records(world, "failed")
    world.lease(one, lease_ms=10)
    world.now += 20
    world.expire((1, 2))
    (found,) = reported(world, "failed")
    errors = [(one["event"], one["attempt"], one["reason"]) for one in found.pop("errors")]
    assert errors == [("nacked", 1, "no such customer"), ("lease_expired", 2, None)]
    assert found == {"id": encode_id(one), "topic": "t", "key": "o-1"}
    assert unpack(decode_record(records(world, "failed")[0]).meta).meta == {"callback": "failure"}
    assert not records(world, "done")


def test_a_redriven_dead_letter_has_another_callback() -> None:
    world = asking(max_attempts=1)
    (one,) = world.ids()
    world.nack(world.lease(one))
    world.one(commands.encode_redrive("n1", "t", [one]))
    world.nack(world.lease(one))
    world.one(commands.encode_redrive("n1", "t", [one]))
    world.ack(world.lease(one))
    assert (len(reported(world, "failed")), len(reported(world))) == (2, 1)


def test_callbacks_have_no_callbacks() -> None:
    world = asking(on_success="t", on_failure="t")
    for ends in (world.ack, world.nack):
        (one,) = world.ids()
        ends(world.lease(one))
        (callback,) = [row for row in records(world, "t") if unpack(decode_record(row).meta).re][-1:]
        ends(world.lease(decode_record(callback).first_id))
    assert world.topic().published == 4


def test_cancelled_expired_and_purged_messages_have_none() -> None:
    world = asking()
    one, two, three = world.ids(draft(), replace(draft(), ttl_ms=5), draft())
    world.cancel(one)
    rows = world.lease(two, lease_ms=10)
    world.now += 20
    world.expire((1, 1))
    world.one(commands.encode_purge("t", 3))
    assert settled(world, rows) == [2]
    assert world.states(one, two, three) == ["cancelled", "expired", "cancelled"]
    assert not records(world, "done") + records(world, "failed")


def test_a_message_leased_before_its_topic_was_deleted_has_none_in_the_topics_new_life() -> None:
    """Such a message has no callback to a topic that it names itself, either. A message that was leased before a purge
    still has its callback."""
    world = asking(webhook=HOOK)
    old = world.lease(*world.ids(draft(), draft(), own(os="mine")))
    world.one(commands.encode_topic_delete("t", True))
    world.one(commands.encode_topic_put("t", {"on_success": "done", "on_failure": "failed", "webhook": HOOK}))
    (young,) = world.ids()
    purged = world.lease(young)
    world.restart()
    assert settled(world, old[[0, 2]]) == [0, 0]
    assert world.nack(old[1:2], commands.DEAD_NOW) == [0]
    assert not records(world, "done") + records(world, "failed") + records(world, "mine")
    world.one(commands.encode_purge("t", 3))
    assert settled(world, purged) == [0]
    assert [one["id"] for one in reported(world)] == [encode_id(young)]


def own(**topics: str) -> Draft:
    return replace(draft(), meta=pack(Meta(**topics)), callback=True)  # type: ignore[arg-type]


def test_messages_name_topics_of_their_own_where_the_topic_allows_that() -> None:
    world = asking(webhook=HOOK)
    world.ack(world.lease(*world.ids(own(os="mine"), own(of="mine"), draft())))
    assert (len(reported(world, "mine")), len(reported(world))) == (1, 2)
    world.nack(world.lease(*world.ids(own(os="mine"), own(of="mine"))))
    assert (len(reported(world, "mine")), len(reported(world, "failed"))) == (2, 1)
    rows = world.lease(*world.ids(own(os="mine"), own(os="not/a/name")))
    world.one(commands.encode_topic_put("t", {"webhook": {"url": HOOK["url"]}}))
    world.ack(rows)
    assert (len(reported(world, "mine")), len(reported(world))) == (2, 4), "the topic allows that no longer"
    assert world.publish(own(os="mine")).codes.tolist() == [12]


def test_a_callback_needs_no_room_and_makes_its_topic() -> None:
    """The ack is never refused: the callback is filed beyond the quotas, as a routed dead letter is."""
    world = asking()
    world.one(commands.encode_topic_put("done", {"max_messages": 1, "publish_rate": 0.001}))
    settled(world, world.lease(*world.ids(draft(), draft(), draft())))
    assert (len(reported(world)), world.ledger.callbacks["over_quota"]) == (3, 2)
    world.one(commands.encode_topic_delete("done", True))
    world.ack(world.lease(*world.ids()))
    assert world.topic("done").pending == 1
    closed = World(Settings(auto_create_topics=False, max_topics=2))
    closed.one(commands.encode_topic_put("t", {"on_success": "done", "on_failure": "failed", "max_attempts": 1}))
    first, second = closed.ids(draft(), draft())
    assert closed.ack(closed.lease(first)) == [0]
    assert closed.nack(closed.lease(second)) == [0]
    assert (len(reported(closed)), dict(+closed.ledger.callbacks)) == (1, {"filed": 1, "lost": 1})


def test_callbacks_reach_the_subscriptions_of_their_topic_and_each_copy_has_its_own() -> None:
    world = asking()
    world.one(commands.encode_topic_put("done", {}))
    world.one(commands.encode_subscription_put("done", "audit", {}))
    world.one(commands.encode_subscription_put("t", "billing", {"on_success": "billed"}))
    (one,) = world.ids()
    copy = one + 1
    world.ack(world.lease(one, copy))
    assert [found["topic"] for found in reported(world)] == ["t"]
    assert [(found["topic"], found["id"]) for found in reported(world, "billed")] == [("t~billing", encode_id(copy))]
    assert world.topic("done~audit").pending == 1


def test_groups_go_on_after_an_ack_with_a_callback() -> None:
    world = asking(group_concurrency=1, max_attempts=3)
    first, second = world.ids(*[replace(draft(), group=7)] * 2)
    settled(world, world.lease(first), CallReply(200, "", b"", False))
    assert (world.states(first, second), len(reported(world))) == (["acked", "ready"], 1)


def test_answers_there_and_back_and_malformed_ones() -> None:
    world = asking()
    rows = world.lease(*world.ids(draft(), draft()))
    replies = [None, CallReply(599, "a/b", b"x" * MAX_REPLY, True)]
    section = encode_replies(replies)
    whole = commands.encode_ack("n1", rows, encode_results([b"1", None]), section)
    command = commands.decode(whole[0], memoryview(whole)[COMMAND.size :])
    assert list(command.results) == [0]
    assert command.replies == {1: replies[1]}
    assert encode_replies([None]) == b""
    wrong_lease, no_text = section[:1] + b"\2" + section[2:], section.replace(b"a/b", b"a\xffb")
    for spoilt in (section[:-1], section + b"x", b"\x80", wrong_lease, no_text):
        refused = world.one(commands.encode_ack("n1", rows, replies=spoilt))
        assert (isinstance(refused, Refused), refused.code) == (True, "malformed"), spoilt[:20]
    nack = settlement.encode_settle("n1", rows, nack=True, replies=section)
    assert world.one(nack).code == "malformed"
