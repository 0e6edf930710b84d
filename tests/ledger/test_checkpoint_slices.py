"""A checkpoint of a ledger whose tables are full: what it does in each turn of the event loop, and what it writes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import pytest

from chaos.sim.savedcheck import same
from hadelay.codec import commands
from hadelay.codec.batches import On, Spec, encode_open
from hadelay.codec.jobcommands import JobBegin, JobSpec
from hadelay.ledger import changedrows, checkpoint
from hadelay.ledger.changedrows import (
    AUDIT,
    BATCHST,
    GRANTS,
    HOURS,
    JOBS,
    SLICE_BYTES,
    SLICE_ROWS,
    TABLES,
    TOKENS,
    TOPICS,
    Row,
)
from hadelay.ledger.jobs.bulk import MAX_JOBS
from hadelay.ledger.state import Ledger
from hadelay.model import HOUR_MS
from hadelay.rights import MAX_AUDIT, MAX_TOKENS
from hadelay.settings.cluster import Settings
from tests.ledger.world import World, draft

#: Topics of the test: a tenth of what a cluster may have by default.
TOPICS_MADE = 10_000
HOURS_TOUCHED, GRANTS_OPEN, BATCHES_OPEN = 2_000, 2_000, 2_000
AUDITED_NOOP = commands.encode_audited("n1", "i", "t", "a", "o", commands.encode_noop())


@pytest.fixture(scope="module")
def full() -> World:
    world = World(Settings(max_topics=TOPICS_MADE))
    world.checking = 0
    for first in range(0, TOPICS_MADE - 1, 5_000):
        world.publish(*(draft(f"t{n}", 1_000) for n in range(first, min(first + 5_000, TOPICS_MADE - 1))))
    far = world.ids(*(draft("far", HOUR_MS * (n + 2)) for n in range(HOURS_TOUCHED)))
    world.cancel(*far)
    due = world.ids(*(draft("far") for _ in range(GRANTS_OPEN)))
    world.now += 1
    for one in due:
        world.grant(one)
    for n in range(MAX_TOKENS):
        world.one(commands.encode_token_create("t" * 64, n.to_bytes(4, "big") * 8, ["publish:" + "a" * 128] * 64, None))
    for _ in range(MAX_AUDIT + 1):
        world.one(AUDITED_NOOP)
    for n in range(MAX_JOBS):
        spec = JobSpec("cancel", "far", ids=tuple(range(n, n + 100)))
        world.one(commands.encode_job_begin(JobBegin("n1", "", f"{n}".encode().ljust(16), ["far"], spec)))
    for n in range(BATCHES_OPEN):
        world.one(encode_open(f"b{n}", Spec("t0", On.COMPLETE, 0, 0, 0, b"", None, HOUR_MS)))
    return world


def test_each_slice_is_small_however_much_there_is(full: World) -> None:
    core, slices = checkpoint.begin(full.ledger)
    turns = list(slices)
    rows = list(chain.from_iterable(turns))
    assert {table: sum(row[0] == table for row in rows) for table in TABLES} == {
        TOPICS: TOPICS_MADE, GRANTS: GRANTS_OPEN, JOBS: MAX_JOBS, TOKENS: MAX_TOKENS, AUDIT: MAX_AUDIT + 1,
        HOURS: HOURS_TOUCHED + 1, BATCHST: BATCHES_OPEN,
    }  # fmt: skip
    assert len(core) < 2_000
    assert max(map(len, turns)) == SLICE_ROWS
    largest = max(len(value or b"") for _, _, value in rows)
    assert max(sum(len(value or b"") for _, _, value in some) for some in turns) < SLICE_BYTES + largest


def test_the_next_one_writes_what_changed(full: World) -> None:
    written(full.ledger)
    world = full
    (one,) = world.ids(draft("t7", 5_000))
    world.cancel(one)
    (key, *_) = world.ledger.grants
    world.ack(world.leased(*key)[:1])
    world.one(commands.encode_token_revoke(next(iter(world.ledger.tokens))))
    found = written(world.ledger)
    far = world.topic("far").number
    assert sorted((table, value is None) for table, _, value in found) == sorted(
        [(TOPICS, False), (TOPICS, False), (GRANTS, True), (TOKENS, True), (HOURS, False)]
    )
    assert {row[1] for row in found if row[0] == TOPICS} == {n.to_bytes(4, "big") for n in (7, far)}


def test_messages_that_came_and_went_between_two_checkpoints_are_not_written() -> None:
    world = World()
    written(world.ledger)
    rows = world.lease(*world.ids(draft(), draft()))
    world.ack(rows)
    assert [row for row in written(world.ledger) if row[0] == GRANTS] == []


def test_a_grant_that_ended_twice_since_a_checkpoint_is_deleted() -> None:
    world = World()
    world.checking = 0  # a check forgets the rows that are noted
    ids = world.ids(draft(), draft())
    rows = world.lease(ids[0], seq=7)
    assert [table for table, *_ in written(world.ledger)].count(GRANTS) == 1
    world.ack(rows)
    world.ack(world.lease(ids[1], seq=7))
    assert [value for table, _, value in written(world.ledger) if table == GRANTS] == [None]


def test_rows_are_written_as_they_were_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything changes between the slices, of one row each: in place, by assignment, and by deletion."""
    monkeypatch.setattr(changedrows, "SLICE_ROWS", 1)
    world = World()
    world.checking = 0
    ids = world.ids(*(draft(f"t{n}", body=b"b") for n in range(5)), draft("dies"))
    world.one(commands.encode_topic_put("dies", {"max_attempts": 1}))
    world.now += 1
    leased = [world.lease(one) for one in ids[:3]]
    world.nack(world.lease(ids[5]))
    world.one(commands.encode_redrive("n1", "dies", (), all=True, rate=0.5))
    world.one(commands.encode_token_create("t", b"h" * 32, ["read"], None))
    world.one(AUDITED_NOOP)
    world.one(commands.encode_job_begin(JobBegin("n1", "", b"r" * 16, ["t4"], JobSpec("cancel", "t4"))))
    _, before = checkpoint.dump(world.ledger)
    _, slices = checkpoint.begin(world.ledger)
    changes = iter(
        [
            lambda: world.ack(leased[0]),
            lambda: world.extend(leased[1], 60_000),
            lambda: world.nack(leased[2], reason="no"),
            lambda: world.one(commands.encode_purge("t3", 1)),
            lambda: world.one(commands.encode_topic_delete("t4", force=True)),
            lambda: world.one(commands.encode_token_revoke((b"h" * 32).hex()[:12])),
            lambda: world.one(AUDITED_NOOP),
            lambda: world.ids(draft("t0"), draft("new")),
        ]
    )
    found: list[Row] = []
    for some in slices:
        found.extend(some)
        next(changes, lambda: None)()  # type: ignore[no-untyped-call]
    assert next(changes, None) is None
    assert canonical(found) == {table: dict(rows) for table, rows in before.items()}
    after = Ledger(0, world.store, world.tables, world.names)
    rest = canonical([*found, *written(world.ledger)])
    checkpoint.load(
        after, checkpoint.dump_core(world.ledger), {table: sorted(rows.items()) for table, rows in rest.items()}
    )
    same(world.ledger, after, "ledger")


def written(ledger: Ledger) -> list[Row]:
    return list(chain.from_iterable(checkpoint.begin(ledger)[1]))


def canonical(rows: Iterable[Row]) -> dict[bytes, dict[bytes, Any]]:
    """Table → key → value of what is left after all these are written, states of hours in their one form."""
    found: dict[bytes, dict[bytes, Any]] = {table: {} for table in TABLES}
    for table, key, value in rows:
        found[table].pop(key, None)
        if value is not None:
            hour = table == HOURS
            found[table][key] = checkpoint.dump_hour(checkpoint.load_hour(value), canonical=True) if hour else value
    return found
