"""Work of a PUBLISH with many rows and topics: it grows with the rows, and not with rows times rows or topics."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.meta import Meta, pack
from hadelay.codec.results import Done, RowCode
from hadelay.ledger.hours.hourstate import rows_by_value
from hadelay.ledger.limits import quotas
from hadelay.ledger.messages import ttl
from hadelay.ledger.messages.keys import Batch, Decision
from hadelay.model import NEVER_MS, Draft
from hadelay.settings.cluster import Settings
from tests.ledger.test_shards import one_of_two
from tests.ledger.world import START_MS, World, draft

ROWS = 300
#: Limit of masks over all rows in one PUBLISH.
MASKS = 8


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of refusals of a command, each of which makes masks over all of its rows."""
    found: Counter[str] = Counter()
    refuse = Batch.refuse

    def counted(batch: Batch, wrong: Any, code: RowCode) -> None:
        found["refusals"] += 1
        refuse(batch, wrong, code)

    monkeypatch.setattr(Batch, "refuse", counted)
    return found


def calling(topic: str, on: str) -> Draft:
    return replace(draft(topic), meta=pack(Meta(os=on)), callback=True)


HOOK = {"webhook": {"url": "http://x.example/", "allow_per_message": True}}


def test_foreign_callbacks_are_refused_together(masks: Counter[str]) -> None:
    world = one_of_two()
    world.one(commands.encode_topic_put("a", HOOK))
    some = [calling("a", f"{'ab'[n % 2]}-{n}") for n in range(ROWS)]
    codes = world.publish(*some).codes.tolist()
    assert codes == [RowCode.OK, RowCode.FOREIGN_TARGET] * (ROWS // 2)
    assert masks["refusals"] <= MASKS


def test_topics_without_callbacks_are_refused_together(masks: Counter[str]) -> None:
    codes = World().publish(*(calling(f"t{n}", "done") for n in range(ROWS))).codes.tolist()
    assert codes == [RowCode.NO_CALLBACK] * ROWS
    assert masks["refusals"] <= MASKS


def test_callbacks_beyond_a_share_are_refused_together(masks: Counter[str]) -> None:
    world = World(Settings(max_topics=20))
    for n, (name, scope) in enumerate((("root", "admin"), ("low", "publish"))):
        assert world.one(commands.encode_token_create(name, bytes([n]) * 32, [scope], None)) == Done()
    world.one(commands.encode_topic_put("t", HOOK))
    some = [calling("t", f"done-{n}") for n in range(ROWS)]
    codes = world.one(commands.encode_publish("n1", some, None, "low")).codes.tolist()
    assert set(codes) == {RowCode.OK, RowCode.SHARE_OF_TOPICS}
    assert masks["refusals"] <= MASKS


def test_missing_topics_are_refused_together(masks: Counter[str]) -> None:
    world = World(Settings(auto_create_topics=False))
    world.one(commands.encode_topic_put("t7", {}))
    codes = world.publish(*(draft(f"t{n}") for n in range(ROWS))).codes.tolist()
    assert codes == [RowCode.OK if n == 7 else RowCode.NO_TOPIC for n in range(ROWS)]
    assert masks["refusals"] <= MASKS


def test_quotas_of_many_topics_look_up_replaced_messages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world, looks = World(), Counter[str]()
    for n in range(0, 60, 2):
        world.one(commands.encode_topic_put(f"t{n:02}", {"max_messages": 1}))
    replaced, room = Decision.replaced, quotas.Room

    def counted(keys: Decision) -> Any:
        looks["replaced"] += 1
        return replaced(keys)

    def made(topic: Any) -> Any:
        looks["rooms"] += 1
        return room(topic)

    monkeypatch.setattr(Decision, "replaced", counted)
    monkeypatch.setattr(quotas, "Room", made)
    some = [replace(draft(f"t{n:02}"), key=b"k%d" % m) for m in range(2) for n in range(60)]
    codes = world.publish(*some).codes.tolist()
    assert codes == [RowCode.OK] * 60 + [RowCode.TOO_MANY_MESSAGES, RowCode.OK] * 30
    assert looks == {"replaced": 1, "rooms": 30}


def test_delays_and_ttls_of_several_topics() -> None:
    world = World()
    for n in range(3):
        world.one(commands.encode_topic_put(f"t{n}", {"delay_ms": 1_000 * n, "ttl_ms": 60_000 * n} if n else {}))
    own = [replace(draft(f"t{n % 3}", -1), ttl_ms=5_000 * (n // 3)) for n in range(6)]
    result = world.publish(*own)
    assert [at - START_MS for at in result.deliver_at_ms.tolist()] == [0, 1_000, 2_000] * 2
    ends = [ttl.expire_ms(world.ledger, one) - START_MS for one in result.ids.tolist()]
    assert ends == [NEVER_MS - START_MS, 61_000, 122_000, 5_000, 6_000, 7_000]


def test_rows_by_value_are_those_of_each_value() -> None:
    rng = random.Random(1)
    for distinct in (1, 2, 8, 9, 200):
        column = np.array([rng.randrange(distinct) * 7 for _ in range(500)], rng.choice((np.uint32, np.int64)))
        every = np.arange(500)
        found = {value: every[where].tolist() for value, where in rows_by_value(column)}
        assert list(found) == sorted(set(column.tolist()))
        assert all(found[value] == np.flatnonzero(column == value).tolist() for value in found)
