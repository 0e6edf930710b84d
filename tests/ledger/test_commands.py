"""Commands there and back, and decoders that meet any bytes at all."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from chaos.sim import ledgercheck
from hadelay.codec import batches, commands, schedules, settlement
from hadelay.codec.ackparts import CallReply, encode_replies, encode_results
from hadelay.codec.commands import Malformed, decode
from hadelay.codec.commandtypes import Command, Grant, Job, TopicUse
from hadelay.codec.entries import decode_entry, encode_entry
from hadelay.codec.jobcommands import FillBegin, JobBegin, JobSpec
from hadelay.codec.leasetokens import encode_leases
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import encode_publish, hash_group, hash_key
from hadelay.codec.results import Done, Refused
from hadelay.codec.shardcommands import ShardStep
from hadelay.errors import FatalError
from hadelay.ledger.apply import apply_entry
from hadelay.members import Member
from hadelay.model import DEAD_HOURS, REPLACE, Draft, pack_id
from hadelay.settings.shardmap import Rule, Shard, ShardMap
from tests.ledger.world import START_HOUR, START_MS, World, draft, leases

LEASES = leases((1, 2, 3, START_HOUR, 5), (6, 7, 8, START_HOUR, 10))
NINE_MS = 1_795_420_800_000
SCHEDULE = schedules.Stored(
    "shop",
    schedules.Spec("orders", cron="0 9 * * MON-FRI", timezone="Europe/Vienna"),
    encode_publish("n1", [Draft("orders", 0, True, 0, 0, schedules.template_meta(pack(Meta(sch="daily"))), b"hello")]),
)
BATCH = batches.Spec("done", batches.On.SUCCESS, 0, 0, 0, b"", None, 86_400_000)
FIRING = schedules.Firing("daily", 1, NINE_MS, NINE_MS + 86_400_000, NINE_MS, 0, 0, [(NINE_MS, NINE_MS)])
SHARDS = ShardMap(1, {0: Shard(0), 1: Shard(1)}, (Rule("*", (0, 1)),), {"orders": 0})
EXAMPLES = [
    commands.encode_noop(),
    commands.encode_publish(
        "n1", [draft("a", 5, b"body"), Draft("b", 7, False, 3, 9, b"\x80", b"", b"key")], b"request"
    ),
    commands.encode_grant(Grant(1, 2, 30_000, "c", b"r", "n1", [START_HOUR, START_HOUR + 1], [0, 9])),  # type: ignore[arg-type]
    settlement.with_delays(commands.encode_nack("n1", LEASES, 500), np.arange(len(LEASES), dtype=np.uint32)),
    commands.encode_extend("n1", LEASES, 500),
    commands.encode_expire([(1, 2), (3, 4)]),
    commands.encode_cancel("n1", [1, 2**64 - 1], [("t", b"key")]),
    commands.encode_cursor(START_HOUR, 3599, 2**32 - 1),
    commands.encode_topic_put("t", {"lease_ms": 1}),
    commands.encode_topic_delete("t", True),
    commands.encode_maintain(Job.SWEEP),
    commands.encode_maintain(Job.ROLL_FORWARD, START_HOUR - 1),
    commands.encode_maintain(Job.RETIRE, START_HOUR - 5),
    commands.encode_feature(1),
    commands.encode_incarnation("n2", 7),
    commands.encode_settings({"max_topics": 5}),
    commands.encode_reschedule("n1", -5, True, [1], [("t", b"key"), ("u", b"key")], expected_ms=START_MS),
    commands.encode_redrive("n1", "t", [1, 2**64 - 1]),
    commands.encode_maintain(Job.TTL_EXPIRE),
    commands.encode_purge("t", 7),
    commands.encode_maintain(Job.DROP_DEAD, DEAD_HOURS + START_HOUR),
    commands.encode_maintain(Job.REDRIVE, topic="t"),
    commands.encode_alerted("t", 3),
    commands.encode_token_create("shop", bytes(32), ["publish:t", "admin"], 5_000),
    commands.encode_token_revoke("0" * 12),
    commands.encode_audited("n1", "0" * 12, "shop", "topic.delete", "t", commands.encode_topic_delete("t")),
    commands.encode_members((Member("n1", "a:1"), Member("n2", "b:1", voter=False, joined=True))),
    *(
        shown_examples := [
            schedules.encode_put("daily", schedules.ANY_VERSION, 0, SCHEDULE),
            schedules.encode_delete("daily"),
            commands.encode_job_stop(1),
            commands.encode_shard_map(ShardStep.PREPARE, msgspec.msgpack.encode(SHARDS)),
            schedules.encode_fire([FIRING]),
            schedules.encode_state("daily", True),
            schedules.encode_run("daily", 1, [(0, 0)], b"k1"),
        ]
    ),
    commands.encode_subscription_put("t", "billing", {"lease_ms": 1}),
    commands.encode_topic_expiry([TopicUse(0, 1, True, START_MS), TopicUse(7, 0, False, 0)]),
    commands.encode_subscription_fill(FillBegin("n1", "shop", "t", "billing", {"tags": ["eu"]})),
    commands.encode_job_begin(JobBegin("n1", "shop", b"", ["t"], JobSpec("reschedule", "t", shift_ms=5_000))),
    commands.encode_job_step(1, (0, 0), (START_HOUR, 7), [1, 2**64 - 1]),
    batches.encode_open("import", BATCH),
    batches.encode_seal("import"),
    batches.encode_cancel("import"),
    batches.encode_step(1, [3, 2**64 - 1]),
    commands.encode_maintain(Job.BATCHES),
]


def decoded(encoded: bytes) -> Any:
    ((kind, body),) = decode_entry(encode_entry(0, [encoded]))[2]
    return decode(kind, body)


def test_every_command_has_an_example() -> None:
    kinds = [decode_entry(encode_entry(0, [e]))[2][0][0] for e in EXAMPLES]
    assert sorted(kinds) == sorted(Command)


def test_an_entry_keeps_its_commands_apart_and_in_order() -> None:
    level, now_ms, found = decode_entry(encode_entry(START_MS, EXAMPLES, level=1))
    assert (level, now_ms, [kind for kind, _ in found]) == (1, START_MS, [example[0] for example in EXAMPLES])


def test_publish_there_and_back() -> None:
    drafts = [
        Draft("a", -5, True, 2**64 - 1, 9, b"\x81", b"body", None),
        Draft("b", 2**62, False, 0, 0, b"", b"", b"k"),
    ]
    found = decoded(commands.encode_publish("n1", drafts, b"r"))
    assert (found.node, found.topics) == ("n1", ["a", "b"])
    assert found.rows["when_ms"].tolist() == [-5, 2**62]
    assert found.rows["flags"].tolist() == [1, 0]
    assert found.rows["topic"].tolist() == [0, 1]
    assert found.rows["tag_mask"].tolist() == [2**64 - 1, 0]
    bodies = [
        bytes(found.blob[s + 48 : s + n]) for s, n in zip(found.starts.tolist(), found.sizes.tolist(), strict=True)
    ]
    assert bodies == [b"\x81body", b""]
    assert [(k["first"], k["count"]) for k in found.keys] == [(1, 1), (0, 2)]


def test_the_fingerprint_covers_payload_options_and_topic() -> None:
    variants = [
        draft(body=b"a"), draft(body=b"b"), draft("u", body=b"a"), draft(in_ms=1, body=b"a"), draft(at=0, body=b"a"),
        Draft("t", 0, True, 1, 0, b"", b"a"), Draft("t", 0, True, 0, 1, b"", b"a"),
        *(Draft("t", 0, True, 0, 0, b"", b"a", None, b"k", unique_ms=ms) for ms in (1, 2)),
    ]  # fmt: skip
    prints = [decoded(commands.encode_publish("n", [replace(d, idem=b"k")])).keys["fingerprint"][0] for d in variants]
    assert len(set(prints)) == len(variants)
    assert hash_key(b"row", b"k") != hash_key(b"request", b"k")


def test_grant_and_leases_there_and_back() -> None:
    grant = Grant(2**32 - 1, 7, 30_000, "consumer-é", b"r" * 64, "n1", np.array([1, 2]), np.array([3, 2**32 - 2]))
    found = decoded(commands.encode_grant(grant))
    assert found[:6] == grant[:6]
    assert (found.hours.tolist(), found.indexes.tolist()) == ([1, 2], [3, 2**32 - 2])
    nack = decoded(commands.encode_nack("n1", LEASES, -1))
    assert (nack.node, nack.value_ms, nack.rows.tolist()) == ("n1", -1, LEASES.tolist())


@pytest.mark.parametrize("cut", [1, 4, 9])
@pytest.mark.parametrize("encoded", EXAMPLES[1:], ids=lambda e: Command(e[0]).name)
def test_a_body_that_is_too_short_or_too_long_is_malformed(encoded: bytes, cut: int) -> None:
    kind, body = encoded[0], memoryview(encoded)[5:]
    with pytest.raises(Malformed):
        decode(kind, body[:-cut])
    with pytest.raises(Malformed):
        decode(kind, memoryview(bytes(body) + b"\xc1" * cut))


@settings(max_examples=300, deadline=None)
@given(kind=st.integers(0, 255), body=st.binary(max_size=200))
def test_decoders_raise_malformed_and_nothing_else(kind: int, body: bytes) -> None:
    with suppress(Malformed):
        decode(kind, memoryview(body))
    with suppress(Malformed):
        decode_entry(body)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_apply_survives_any_entry(data: st.DataObject) -> None:
    """Valid commands with bytes changed here and there: whatever still decodes is refused or done, and all adds up."""
    world = World()
    ids = world.ids(draft(), draft(), draft(in_ms=5_000))
    world.lease(ids[0])
    entry = bytearray(encode_entry(START_MS + 1_000, data.draw(st.lists(st.sampled_from(EXAMPLES), max_size=4))))
    for _ in range(data.draw(st.integers(0, 3))):
        entry[data.draw(st.integers(2, len(entry) - 1))] = data.draw(st.integers(0, 255))
    with suppress(FatalError):  # a byte that made it a command of a newer version
        apply_entry(world.ledger, 9, 1, bytes(entry))
    ledgercheck.check(world.ledger)


def test_unknown_commands_and_broken_entries_are_refused() -> None:
    world = World()
    (result,) = world.apply(b"\xfe\x00\x00\x00\x00")
    assert result == Refused("malformed", "no command has the number 254")
    (result,) = apply_entry(world.ledger, 2, 1, b"\x01\x01\xff")
    assert result.code == "malformed"
    assert world.ledger.applied == 2


def test_a_command_of_a_newer_version_stops_the_node() -> None:
    world = World()
    with pytest.raises(FatalError, match="version 2"):
        apply_entry(world.ledger, 1, 1, b"\x02" + encode_entry(0, [])[1:])
    with pytest.raises(FatalError, match="feature level 9"):
        apply_entry(world.ledger, 1, 1, encode_entry(0, [], level=9))
    with pytest.raises(FatalError, match="feature level 9"):
        world.one(commands.encode_feature(9))


def test_small_commands() -> None:
    world = World()
    assert world.one(commands.encode_cursor(5, 1, 0)) == Done(True)
    assert world.one(commands.encode_cursor(5, 0, 9)) == Done(False)
    assert world.ledger.cursor == (5, 1, 0)
    assert world.one(commands.encode_incarnation("n1", 3)) == Done(True)
    assert world.one(commands.encode_incarnation("n1", 2)) == Done(False)
    assert world.ledger.incarnations == {"n1": 3}
    assert world.one(commands.encode_feature(1)) == Done(False)
    assert world.one(commands.encode_settings({"max_topics": 1})) == Done(True)
    assert world.publish(draft("a"), draft("b")).codes.tolist() == [0, 5]
    world.restart()
    assert world.ledger.settings.max_topics == 1


def spec_examples() -> dict[str, str]:
    """The fenced blocks of docs/spec/commands.md that carry a name, without spaces."""
    text = (Path(__file__).parents[2] / "docs/spec/commands.md").read_text()
    return {name: "".join(body.split()) for name, body in re.findall(r"```([A-Z0-9_]+)\n(.*?)```", text, re.S)}


def test_the_examples_of_the_specification() -> None:
    lease = leases((7, 21, 0, 498665, 42))
    place = np.array([498665]), np.array([42])
    digest = hashlib.sha256(b"hadelay_example").digest()
    encoded = {
        "PUBLISH": commands.encode_publish(
            "n1", [Draft("orders", 900_000, True, 0, 0, b"\x80", b"hello", b"k1", b"o-1", REPLACE, 3_600_000)]
        ),
        "PUBLISH_GROUP": commands.encode_publish(
            "n1", [Draft("orders", 0, True, 0, 0, pack(Meta(group="c7")), b"hello", group=hash_group("c7"))]
        ),
        "PUBLISH_UNIQUE": commands.encode_publish(
            "n1", [Draft("orders", 0, True, 0, 0, b"\x80", b"hello", key=b"o-1", unique_ms=86_400_000)]
        ),
        "GRANT": commands.encode_grant(Grant(7, 21, 30_000, "w1", b"r1", "n1", *place)),
        "SETTLE_NACK": commands.encode_nack("n1", lease, 5_000),
        "EXTEND": commands.encode_extend("n1", lease, 60_000),
        "EXPIRE": commands.encode_expire([(7, 21)]),
        "CANCEL": commands.encode_cancel("n1", [pack_id(0, 498665, 42)], [("orders", b"o-1")]),
        "RESCHEDULE": commands.encode_reschedule("n1", 900_000, True, [pack_id(0, 498665, 42)]),
        "CURSOR": commands.encode_cursor(498665, 1801, 3),
        "TOPIC_PUT": commands.encode_topic_put("orders", {"lease_ms": 30_000}),
        "TOPIC_DELETE": commands.encode_topic_delete("orders", True),
        "SUBSCRIPTION_PUT": commands.encode_subscription_put("orders", "billing", {"tags": ["eu"]}),
        "TOPIC_EXPIRY": commands.encode_topic_expiry([TopicUse(3, 0, True, START_MS)]),
        "SUBSCRIPTION_FILL": commands.encode_subscription_fill(FillBegin("n1", "", "orders", "billing", {})),
        "SWEEP": commands.encode_maintain(Job.SWEEP),
        "CARRY": commands.encode_maintain(Job.ROLL_FORWARD, 498640),
        "RETIRE": commands.encode_maintain(Job.RETIRE, 498640),
        "FEATURE": commands.encode_feature(1),
        "INCARNATION": commands.encode_incarnation("n2", 3),
        "SETTINGS": commands.encode_settings({"max_topics": 1_000}),
        "REDRIVE": commands.encode_redrive("n1", "orders", [pack_id(0, 498665, 42)]),
        "TTL_EXPIRE": commands.encode_maintain(Job.TTL_EXPIRE),
        "PURGE": commands.encode_purge("orders", 3),
        "DROP_DEAD": commands.encode_maintain(Job.DROP_DEAD, DEAD_HOURS + 498665),
        "REDRIVE_SOME": commands.encode_maintain(Job.REDRIVE, topic="orders"),
        "ALERTED": commands.encode_alerted("orders", 3),
        "TOKEN_CREATE": commands.encode_token_create("shop", digest, ["publish:orders-*", "read"], 86_400_000),
        "TOKEN_REVOKE": commands.encode_token_revoke(digest.hex()[:12]),
        "AUDITED": commands.encode_audited(
            "n1", digest.hex()[:12], "shop", "topic.delete", "orders", commands.encode_topic_delete("orders", True)
        ),
        "SETTLE": settlement.with_delays(commands.encode_ack("n1", lease), np.array([42], np.uint32)),
        "SETTLE_REPLY": commands.encode_ack(
            "n1", lease, replies=encode_replies([CallReply(200, "text/plain", b"ok", False)])
        ),
        "SETTLE_RESULT": commands.encode_ack("n1", lease, encode_results([b'{"paid":7}'])),
        "MEMBERS": commands.encode_members(
            (Member("n1", "10.0.0.1"), Member("n2", "10.0.0.2", voter=False, joined=True))
        ),
        "JOB_BEGIN": commands.encode_job_begin(
            JobBegin(
                "n1", "shop", b"", ["orders"], JobSpec("reschedule", "orders", key_prefix="7:", shift_ms=86_400_000)
            )
        ),
        "JOB_STEP": commands.encode_job_step(1, (0, 0), (498665, 43), [pack_id(0, 498665, 42)]),
        "BATCH_OPEN": batches.encode_open("import", BATCH),
        "BATCH_SEAL": batches.encode_seal("import"),
        "BATCH_CANCEL": batches.encode_cancel("import"),
        "BATCH_STEP": batches.encode_step(1, [0x0006D8B100000001, 0x0006D8B100000002]),
        "BATCHES": commands.encode_maintain(Job.BATCHES),
    }
    encoded |= {Command(example[0]).name: example for example in shown_examples}
    expected = spec_examples()
    assert expected.pop("TOKEN") == encode_leases(0, 7, 21, [0], [498665], [42])[0]
    assert {name: body.hex() for name, body in encoded.items()} == expected
