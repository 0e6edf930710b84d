"""Scopes, tokens and the audit trail, in the state machine."""

from __future__ import annotations

import fnmatch
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hadelay.codec import commands
from hadelay.codec.commandtypes import Command
from hadelay.codec.results import Done, Refused
from hadelay.codec.wire import frame
from hadelay.ledger import access, checkpoint
from hadelay.ledger.changedrows import AUDIT, TOKENS
from hadelay.rights import MAX_AUDIT, SCOPES, AuditEntry, Rights, covers
from tests.ledger.world import START_MS, World, draft

TEXT = st.text("ab.-", max_size=8)


@given(topic=TEXT, glob=st.text("ab.-*", max_size=8))
def test_globs_mean_what_the_shell_means(topic: str, glob: str) -> None:
    assert covers(glob, topic) == fnmatch.fnmatchcase(topic, glob)


def test_permissions_of_scopes() -> None:
    rights = Rights(["publish:orders-*", "consume:a", "consume:b", "read"])
    assert rights.may("publish", "orders-eu")
    assert not rights.may("publish", "orders")
    assert not rights.may("publish", None)
    assert rights.may("consume", "b")
    assert not rights.may("consume", "c")
    assert rights.may("read", None)
    assert not rights.may("admin", "orders-eu")
    assert [scope for scope in SCOPES if rights.may_somewhere(scope)] == ["publish", "consume", "read"]
    admin = Rights(["admin:orders-*"])
    assert all(admin.may(scope, "orders-eu") for scope in SCOPES), "admin includes the others, on its topics"
    assert not admin.may("admin", None)
    assert Rights(["admin:**"]).may("admin", None)


def test_answers_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rights, "_MOST", 10)
    rights = Rights(["publish:a*"])
    assert [rights.may("publish", f"{'ab'[n % 2]}{n}") for n in range(100)] == [True, False] * 50
    assert len(rights._known) <= 10


def create(world: World, number: int = 1, name: str = "shop", lifetime_ms: int | None = None) -> Any:
    return world.one(commands.encode_token_create(name, number.to_bytes(32, "big"), ["publish"], lifetime_ms))


def test_tokens_come_hold_and_go() -> None:
    world = World()
    before = world.ledger.tokens
    assert create(world, 1 << 250, lifetime_ms=5_000) == Done()
    assert before == {}, "whoever looks at the old ones goes on looking at the old ones"
    assert create(world, 1 << 250).code == "token_exists"
    assert create(world, 1 << 251, "shop") == Done(), "a name is not unique: that is how a token is rotated"
    (first, second) = world.ledger.tokens.values()
    third = commands.encode_token_create("sdk", b"\xff" * 32, ["publish"], None, b"k" * 32)
    assert world.one(third) == Done()
    assert world.ledger.tokens["ffffffffffff"].aws_key == b"k" * 32
    kept = list(world.ledger.tokens.values())
    assert (first.id, first.expires_at_ms) == ("040000000000", START_MS + 5_000)
    assert (first.holds(START_MS + 4_999), first.holds(START_MS + 5_000)) == (True, False)
    assert second.holds(1 << 60)
    world.restart()
    assert list(world.ledger.tokens.values()) == kept
    assert world.one(commands.encode_token_revoke(first.id)) == Done()
    assert world.one(commands.encode_token_revoke(first.id)).code == "no_token"
    assert list(world.ledger.tokens) == [second.id, "ffffffffffff"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({0: ""}, "name"), ({0: "x" * 65}, "name"), ({0: "a\nb"}, "name"), ({0: 5}, "$[0]"),
        ({1: b"short"}, "hash"), ({1: "x" * 32}, "$[1]"),
        ({2: []}, "scopes: 1 to 64"), ({2: ["publish"] * 65}, "scopes: 1 to 64"), ({2: ["root"]}, "'root' is no scope"),
        ({2: ["publish:a b"]}, "is no scope"), ({2: [7]}, "$[2]"),
        ({3: 0}, "lifetime"), ({3: -1}, "lifetime"), ({3: 1 << 62}, "lifetime"), ({3: True}, "$[3]"),
        ({4: b"short"}, "aws_key"), ({4: "x" * 32}, "$[4]"),
    ],
)  # fmt: skip
def test_invalid_tokens(changes: dict[int, Any], words: str) -> None:
    world = World()
    fields: list[Any] = ["shop", bytes(32), ["publish"], None, None]
    for place, value in changes.items():
        fields[place] = value
    refused = world.one(commands.encode_token_create(*fields))
    assert isinstance(refused, Refused)
    assert words in refused.detail
    assert not world.ledger.tokens
    assert world.one(frame(Command.TOKEN_CREATE, msgspec.msgpack.encode(fields[:4]))).code == "malformed"


def test_tokens_are_bounded_and_expired_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MAX_TOKENS", 3)
    world = World()
    for number in (1, 2, 3):
        create(world, number << 240, lifetime_ms=1_000 if number == 2 else None)
    assert create(world, 4 << 240).code == "too_many_tokens"
    world.now = 1_000
    assert create(world, 4 << 240) == Done()
    assert len(world.ledger.tokens) == 3


def audited(world: World, command: bytes, action: str = "topic.delete", target: str = "t") -> Any:
    return world.one(commands.encode_audited("n1", "0f", "ops", action, target, command))


def test_the_trail_says_what_was_done_and_what_was_refused() -> None:
    world = World()
    world.publish(draft("t", in_ms=5_000))
    world.now = 7
    assert audited(world, commands.encode_topic_delete("t")).code == "topic_not_empty"
    assert audited(world, commands.encode_topic_delete("t", True)) == Done()
    assert audited(world, commands.encode_noop(), "cluster.transfer", "n2") == Done(False)
    nested = commands.encode_audited("n1", "", "", "x", "y", commands.encode_noop())
    assert audited(world, nested).code == "malformed"
    expected = [
        AuditEntry(1, START_MS + 7, "n1", "0f", "ops", "topic.delete", "t", "topic_not_empty"),
        AuditEntry(2, START_MS + 7, "n1", "0f", "ops", "topic.delete", "t", "done"),
        AuditEntry(3, START_MS + 7, "n1", "0f", "ops", "cluster.transfer", "n2", "done"),
    ]
    assert list(world.ledger.audit.entries) == expected
    world.restart()
    assert list(world.ledger.audit.entries) == expected


def test_the_trail_is_bounded_and_its_numbers_go_on() -> None:
    world = World()
    for _ in range(MAX_AUDIT + 5):
        audited(world, commands.encode_noop())
    world.restart()
    numbers = [entry.number for entry in world.ledger.audit.entries]
    assert numbers == list(range(6, MAX_AUDIT + 6))


def test_texts_that_are_too_long_are_cut() -> None:
    world = World()
    assert audited(world, commands.encode_noop(), target="é" * 300) == Done(False)
    (entry,) = world.ledger.audit.entries
    assert entry.target == "é" * 127


def test_a_checkpoint_without_tokens_has_no_section_for_them() -> None:
    world = World()
    world.publish(draft("t"))
    _, rows = checkpoint.dump(world.ledger)
    assert (rows[TOKENS], rows[AUDIT]) == ([], [])
