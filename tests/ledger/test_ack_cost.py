"""Work of an ack of a batch's member, beside an ack of another message: a few calls per command, however many members
it has, and no row of a table for any of them."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import hadelay
from hadelay.codec import batches as codec
from hadelay.codec import commands
from hadelay.codec.batches import On, Spec
from hadelay.codec.meta import Meta, pack
from hadelay.model import HOUR_MS, Draft
from tests.ledger.world import World, draft
from tests.memory import MemoryTables

SOURCE = str(Path(hadelay.__file__).parent)
#: Limit of the calls of hadelay's functions and of functions in C that a command needs more for members of one batch.
MORE = 20


class Calls:
    """A profile function that counts calls of functions of hadelay, and calls of functions in C that they make."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return
        if event == "call":
            self.found[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            self.found[f"C {argument.__qualname__}"] += 1


def member(topic: str) -> Draft:
    return Draft(topic, 0, True, 0, 0, pack(Meta(batch="b")), b"x", batched=True)


def calls_of_an_ack(count: int, *, of_batch: bool) -> Counter[str]:
    """Calls in apply of one ack of so many messages."""
    world = World()
    world.checking = 0
    world.one(codec.encode_open("b", Spec("done", On.COMPLETE, 0, 0, 0, b"", None, HOUR_MS)))
    world.ids(member("members"), draft("others"))
    ids = world.ids(*[member("members") if of_batch else draft("others") for _ in range(count)])
    leases = world.lease(*ids)
    calls, command = Calls(), commands.encode_ack("n1", leases)
    sys.setprofile(calls)
    try:
        result = world.one(command)
    finally:
        sys.setprofile(None)
    assert result.outcomes.tolist() == [0] * count
    return calls.found


@pytest.mark.parametrize("count", [1, 100, 1_000])
def test_an_ack_of_members_makes_few_calls_more(count: int) -> None:
    others, members = (calls_of_an_ack(count, of_batch=of_batch) for of_batch in (False, True))
    assert members.total() <= others.total() + MORE, (members - others).most_common()
    assert members.total() <= 1.15 * others.total(), (members - others).most_common()


def test_an_ack_of_members_reads_and_writes_no_row_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.checking = 0
    world.one(codec.encode_open("b", Spec("done", On.COMPLETE, 0, 0, 0, b"", None, HOUR_MS)))
    leases = world.lease(*world.ids(*[member("members") for _ in range(300)]))
    used: Counter[str] = Counter()

    def counting(real: Any) -> Any:
        def call(tables: MemoryTables, table: bytes, *rest: Any) -> Any:
            used[table.decode()] += 1
            return real(tables, table, *rest)

        return call

    for name in ("get", "get_many", "put", "put_many", "put_new", "delete", "delete_many"):
        monkeypatch.setattr(MemoryTables, name, counting(getattr(MemoryTables, name)))
    world.ack(leases)
    assert not used
