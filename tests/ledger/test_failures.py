"""Runs tests/ledger/failures/*.txt: what becomes of messages that fail, are too late, or are not wanted any more.

As tests/ledger/test_scenarios.py, with more words: `put t max_attempts=3 backoff=10s,1m dead_letter=… ttl=…` ·
`publish A ttl=5m` · `nack G reason=…` · `dead t` (the dead letters, with what went wrong) · `redrive t A B` ·
`redrive_all t rate=10` · `redrive_some t limit=…` · `purge t scheduled ready dead` · `ttl_expire limit=…` ·
`drop_dead +720` · `alerted t 1`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from hadelay.codec import commands
from hadelay.codec.commandtypes import Job
from hadelay.codec.formats import REASON
from hadelay.codec.results import LeaseOutcome, RedriveOutcome, RedriveResult
from hadelay.ledger.hours.transitions import failures_of
from hadelay.ledger.leases import dead
from hadelay.ledger.topics import topicchanges
from hadelay.ledger.views.describe import describe
from hadelay.model import DEAD_HOURS, NONE32, Event
from tests.ledger.test_listing import drain
from tests.ledger.test_scenarios import START_HOUR, Player, clock, ms_of
from tests.ledger.world import World, draft
from tests.scenarios import check

FILES = sorted((Path(__file__).parent / "failures").glob("*.txt"))
_STATES = {"scheduled": topicchanges.SCHEDULED, "ready": topicchanges.READY, "dead": topicchanges.DEAD}


class FailuresPlayer(Player):
    def do_put(self, names: list[str], options: dict[str, str]) -> str:
        return self._said(self.world.one(commands.encode_topic_put(names[0], dict(map(_setting, options.items())))))

    def do_publish(self, names: list[str], options: dict[str, str]) -> list[str]:
        if "ttl" not in options:
            return super().do_publish(names, options)
        in_ms, ttl_ms = ms_of(options.get("in", "0s")), ms_of(options["ttl"])
        for name in names:
            one = replace(draft(options.get("topic", "t"), in_ms), ttl_ms=ttl_ms)
            (self.names[name],) = self.world.ids(one)
        return [f"{name}: due in {options.get('in', '0s')}, for {options['ttl']}" for name in names]

    def do_nack(self, names: list[str], options: dict[str, str]) -> list[str] | str:
        delay, reason = ms_of(options["in"]) if "in" in options else -1, options.get("reason", "").replace("_", " ")
        return self._settle(names, "nacked", lambda rows: self.world.nack(rows, delay, reason))

    def do_dead(self, names: list[str], options: dict[str, str]) -> list[str]:
        ledger = self.world.ledger
        topic = ledger.topic(names[0])
        assert topic is not None
        said = [f"{topic.dead} kept, {topic.settled[Event.DEAD]} died"]
        for at, first_id in drain(dead.listing(ledger, topic, b"", 100)):
            died_ms = int.from_bytes(at[:8], "big")
            said.append(f"{self.called(first_id)}: died {clock(died_ms)}")
            for at_ms, event, attempt, number in failures_of(ledger, first_id):
                reason = "" if number == NONE32 else f": {ledger.names.name(REASON, number)}"
                said.append(f"  {attempt}. {clock(at_ms)} {event.name.lower()}{reason}")
        return said

    def do_redrive(self, names: list[str], options: dict[str, str]) -> list[str] | str:
        topic, *messages = names
        result = self.world.one(commands.encode_redrive("n1", topic, [self.names[name] for name in messages]))
        if not isinstance(result, RedriveResult):
            return self._said(result)
        outcomes = map(RedriveOutcome, result.outcomes)
        return [f"{name}: {outcome.name.lower()}" for name, outcome in zip(messages, outcomes, strict=True)]

    def do_redrive_all(self, names: list[str], options: dict[str, str]) -> str:
        rate = float(options["rate"]) if "rate" in options else None
        return self._said(self.world.one(commands.encode_redrive("n1", names[0], [], all=True, rate=rate)))

    def do_redrive_some(self, names: list[str], options: dict[str, str]) -> str:
        limit = int(options.get("limit", 1000))
        return self._said(self.world.maintain(Job.REDRIVE, topic=names[0], limit=limit))

    def do_purge(self, names: list[str], options: dict[str, str]) -> str:
        topic, *states = names
        return self._said(self.world.one(commands.encode_purge(topic, sum(_STATES[state] for state in states))))

    def do_ttl_expire(self, names: list[str], options: dict[str, str]) -> str:
        return self._said(self.world.maintain(Job.TTL_EXPIRE, limit=int(options.get("limit", 1000))))

    def do_drop_dead(self, names: list[str], options: dict[str, str]) -> str:
        hour = DEAD_HOURS + START_HOUR + int(names[0])
        return self._said(self.world.maintain(Job.DROP_DEAD, hour, int(options.get("limit", 1000))))

    def do_alerted(self, names: list[str], options: dict[str, str]) -> str:
        self.world.one(commands.encode_alerted(names[0], int(names[1])))
        topic = self.world.topic(names[0])
        return f"told of {topic.alerted} of {topic.settled[Event.DEAD]}"


def _setting(option: tuple[str, str]) -> tuple[str, Any]:
    name, value = option
    if name == "backoff":
        return name, [ms_of(part) for part in value.split(",")]
    if name in ("ttl", "dead_retention", "retention", "lease"):
        return f"{name}_ms", ms_of(value)
    return name, int(value) if value.isdigit() else value


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    check(path, FailuresPlayer(), request)


def test_a_nack_of_more_than_one_apply_may_copy_is_answered_in_parts() -> None:
    """Each part is bounded in bytes and in messages; what is left stays leased, and is told so."""
    world = World()
    world.checking = False
    large = world.ids(*[draft(body=bytes(1 << 20)) for _ in range(40)])
    leases = world.lease(*large)
    parts = []
    while len(leases):
        outcomes = np.array(world.nack(leases, 2 * 3_600_000))
        assert set(outcomes.tolist()) <= {LeaseOutcome.DONE, LeaseOutcome.AGAIN}
        parts.append(int(np.count_nonzero(outcomes == LeaseOutcome.DONE)))
        leases = leases[outcomes == LeaseOutcome.AGAIN]
    assert parts == [3] * 13 + [1]
    assert {describe(world.ledger, i).attempt for i in large} == {1}  # type: ignore[union-attr]


def test_a_redrive_of_more_than_one_apply_may_copy_leaves_no_letter_behind() -> None:
    world = World()
    world.checking = 0
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    large = world.ids(*[draft(body=bytes(1 << 20)) for _ in range(10)])
    leases = world.lease(*large)
    while len(leases):
        leases = leases[np.array(world.nack(leases)) == LeaseOutcome.AGAIN]
    assert (world.topic().dead, world.states(*large)) == (10, ["dead"] * 10)
    world.one(commands.encode_redrive("n1", "t", [], all=True))
    world.now += 1
    counts = []
    while not (result := world.maintain(Job.REDRIVE, topic="t")).done:
        counts.append(result.count)
    assert counts == [3, 3, 3]
    assert (result.count, world.topic().dead, world.states(*large)) == (1, 0, ["ready"] * 10)


def test_many_small_messages_are_nacked_in_parts_too() -> None:
    world = World()
    world.checking = False
    ids = world.ids(*[draft() for _ in range(10_000)])
    outcomes = np.array(world.nack(world.lease(*ids)))
    assert np.count_nonzero(outcomes == LeaseOutcome.DONE) == 2_048
    assert (outcomes[2_048:] == LeaseOutcome.AGAIN).all()
