"""An ack may carry a result, which is kept as long as the settled message (ADR 242)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from chaos.sim.ledgercheck import check
from hadelay.codec import commands, settlement
from hadelay.codec.ackparts import encode_results
from hadelay.codec.commandtypes import Job
from hadelay.codec.results import LeaseOutcome, Refused
from hadelay.errors import DamagedFile
from hadelay.ledger import checkpoint
from hadelay.ledger.changedrows import GRANTS
from hadelay.ledger.leases.ackresults import RESULTS
from hadelay.ledger.views.describe import describe
from hadelay.ledger.views.listing import ListQuery
from hadelay.model import DEAD_HOURS, FIRST, MAX_RESULT, State
from tests.ledger.test_listing import listed
from tests.ledger.world import START_HOUR, START_MS, World, draft

H = 3_600_000


def acked(world: World, rows: np.ndarray, *results: bytes | None, delays: list[int] | None = None) -> Any:
    ack = commands.encode_ack("n1", rows, encode_results(results))
    return world.one(ack if delays is None else settlement.with_delays(ack, np.array(delays, np.uint32)))


def result_of(world: World, message_id: int) -> bytes | None:
    found = describe(world.ledger, message_id)
    assert found is not None
    return found.result


def test_the_result_is_kept_with_the_message() -> None:
    world = World()
    first, second, third = world.ids(draft(), draft("u"), draft())
    assert world.topic().bytes > 0
    rows = world.lease(first, second, third)
    assert acked(world, rows, b'{"paid":7}', None, b"null", delays=[5, 6, 7]).outcomes.tolist() == [0, 0, 0]
    assert [result_of(world, i) for i in (first, second, third)] == [b'{"paid":7}', None, b"null"]
    check(world.ledger)
    assert world.topic().bytes == 48 + 10 + 48 + 4
    world.restart()
    assert [result_of(world, i) for i in (first, second, third)] == [b'{"paid":7}', None, b"null"]
    query = ListQuery(world.topic().number, frozenset(State), 0, 1 << 50, 0, FIRST, 100)
    assert [found for found, _ in listed(world, query)] == [first, third]
    assert world.topic().dead == 0


def test_only_an_ack_that_counts_leaves_its_result() -> None:
    """A repetition, a lost lease and a lease that never was leave none; a late ack does."""
    world = World()
    one, late, lost = world.ids(draft(), draft(), draft())
    rows = world.lease(one, late, lost, lease_ms=1_000)
    assert acked(world, rows[:1], b"1").outcomes.tolist() == [LeaseOutcome.DONE]
    assert acked(world, rows[:1], b"2").outcomes.tolist() == [LeaseOutcome.ALREADY_ACKED]
    world.now += 2_000
    world.expire(*world.ledger.grants)
    again = world.lease(lost)
    outcomes = acked(world, rows[1:], b"3", b"4").outcomes.tolist()
    assert outcomes == [LeaseOutcome.DONE, LeaseOutcome.LEASE_LOST]
    assert acked(world, rows[1:2], b"5").outcomes.tolist() == [LeaseOutcome.ALREADY_ACKED]
    assert acked(world, again, b"6").outcomes.tolist() == [LeaseOutcome.DONE]
    assert [result_of(world, i) for i in (one, late, lost)] == [b"1", b"3", b"6"]
    check(world.ledger)


@pytest.mark.parametrize("retention_ms", [None, 5 * H])
def test_results_go_with_their_hour(retention_ms: int | None) -> None:
    """In slices, together with dead letters of that hour; their bytes count in max_bytes until then."""
    world = World()
    config = {"max_attempts": 1, "dead_retention_ms": retention_ms or 24 * H, "retention_ms": retention_ms}
    world.one(commands.encode_topic_put("t", config))
    ids = world.ids(*[draft()] * 5)
    rows = world.lease(*ids)
    acked(world, rows[:3], b"1", b"22", b"333")
    world.nack(rows[3:4])
    acked(world, rows[4:], b"4444")
    hour = DEAD_HOURS + (START_MS + (retention_ms or 24 * H)) // H
    assert world.store.count(hour) == 5
    refused = world.maintain(Job.DROP_DEAD, hour)
    assert (isinstance(refused, Refused), refused.code) == (True, "hour_running")
    world.now += (retention_ms or 24 * H) + H
    world.one(commands.encode_noop())
    check(world.ledger)
    for n in range(3):
        assert world.maintain(Job.DROP_DEAD, hour, 2).done == (n == 2)
        check(world.ledger)
    assert (world.topic().bytes, world.topic().dead) == (0, 0)
    assert not world.ledger.tables.range(RESULTS)
    assert world.store.count(hour) == 0
    world.restart()


def test_results_count_as_bytes_of_the_topic() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {"max_bytes": 2_000}))
    (message_id,) = world.ids(draft())
    acked(world, world.lease(message_id), b'"' + b"x" * 1_900 + b'"')
    assert world.publish(replace(draft(), body=b"y" * 100)).codes.tolist() != [0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda section: section[:-1],
        lambda section: section + b"x",
        lambda section: b"\x80",
        lambda section: section[:1] + b"\x01" + section[2:],
        lambda section: encode_results([b"x" * (MAX_RESULT + 1)]),
    ],
    ids=["cut", "more", "none", "of no lease", "too large"],
)
def test_malformed_results_are_refused(spoil: Any) -> None:
    world = World()
    (message_id,) = world.ids(draft())
    rows = world.lease(message_id)
    refused = world.one(commands.encode_ack("n1", rows, spoil(encode_results([b"1"]))))
    assert (isinstance(refused, Refused), refused.code) == (True, "malformed")
    nack = settlement.encode_settle("n1", rows, nack=True, results=encode_results([b"1"]))
    assert world.one(nack).code == "malformed"
    assert world.states(message_id) == ["leased"]


def test_a_damaged_result_is_seen() -> None:
    world = World()
    (message_id,) = world.ids(draft())
    acked(world, world.lease(message_id), b'"result"')
    world.store.files[DEAD_HOURS + START_HOUR + 24].log[-3] ^= 1
    with pytest.raises(DamagedFile):
        result_of(world, message_id)


def test_progress_lasts_as_long_as_its_lease() -> None:
    world = World()
    first, second = world.ids(draft(), draft())
    rows = world.lease(first, second)
    plain = checkpoint.dump(world.ledger)[1][GRANTS][0][1]
    assert world.one(commands.encode_extend("n1", rows[:1], 60_000, "page 7")).outcomes.tolist() == [0]
    world.extend(rows, 90_000)
    world.restart()
    assert [progress_of(world, i) for i in (first, second)] == ["page 7", None]
    world.one(commands.encode_extend("n1", rows, 60_000, "ü" * 100))
    assert [progress_of(world, i) for i in (first, second)] == ["ü" * 64] * 2
    check(world.ledger)
    world.ack(rows[:1])
    check(world.ledger)
    world.nack(rows[1:], 0)
    assert [progress_of(world, i) for i in (first, second)] == [None, None]
    world.lease(second)
    assert progress_of(world, second) is None
    assert len(checkpoint.dump(world.ledger)[1][GRANTS][0][1]) <= len(plain)
    check(world.ledger)


def progress_of(world: World, message_id: int) -> str | None:
    found = describe(world.ledger, message_id)
    assert found is not None
    return found.progress
