"""Feature levels: what a mixed cluster does not use, and how it comes to use it (ADR 142)."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import pytest
from msgspec.structs import replace

from hadelay.codec import commands, schedules
from hadelay.codec.commandtypes import LEVEL_OF, Command
from hadelay.codec.entries import encode_entry
from hadelay.codec.results import Done, LeaseOutcome, RedriveOutcome, Refused, TargetOutcome
from hadelay.errors import FatalError
from hadelay.ledger import apply, changes, checkpoint, dead, topicchanges
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.describe import describe
from hadelay.ledger.state import Ledger
from hadelay.ledger.topicchanges import READY, SCHEDULED
from hadelay.ledger.transitions import MAX_EXCUSED, failures_of
from hadelay.model import Event
from hadelay.settings import urls
from hadelay.settings.topic import SETTINGS
from hadelay.version import (
    ACK_OF_THIS_LIFE,
    BOUNDED,
    CALLBACKS_LEVEL,
    FEATURE_LEVEL,
    FIRST_LEVEL,
    MASKED_OF_ORIGIN,
    ONE_PER_KEY,
    OUTCOMES_LEVEL,
    PLAIN_URLS,
    SCHEDULER_LEVEL,
    UNCOUNTED,
)
from tests.ledger.world import START_MS, World, draft

NEXT = FEATURE_LEVEL + 1


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """This program brings PURGE, with a level of its own."""
    monkeypatch.setitem(LEVEL_OF, Command.PURGE, NEXT)
    monkeypatch.setattr(apply, "FEATURE_LEVEL", NEXT)


def purge(world: World) -> object:
    return world.one(commands.encode_purge("t", SCHEDULED))


@pytest.mark.usefixtures("newer")
def test_a_new_command_waits_for_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(level=FIRST_LEVEL)
    (message_id,) = world.ids(draft(in_ms=60_000))
    before = checkpoint.dump(world.ledger, everything=True)
    refused = purge(world)
    assert isinstance(refused, Refused)
    assert (refused.code, world.states(message_id)) == ("needs_upgrade", ["scheduled"])
    # Just what a program does that has never heard of it.
    old = World(level=FIRST_LEVEL)
    old.ids(draft(in_ms=60_000))
    assert checkpoint.dump(old.ledger, everything=True) == before
    with monkeypatch.context() as patch:
        patch.delitem(commands._DECODERS, Command.PURGE)
        assert isinstance(purge(old), Refused)
    assert checkpoint.dump(old.ledger, everything=True) == checkpoint.dump(world.ledger, everything=True)
    assert world.one(commands.encode_feature(NEXT)) == Done(True)
    assert world.one(commands.encode_feature(NEXT)) == Done(False)
    assert not isinstance(purge(world), Refused)
    assert world.states(message_id) == ["cancelled"]


def test_the_audit_trail_says_of_newer_commands_what_older_programs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write down why they refused a command; an older program knows neither its number nor its setting."""
    put = commands.encode_topic_put("t", {"on_success": "told"})
    schedule = schedules.encode_delete("s")
    trails = []
    for knows in (True, False):
        world = World(level=FIRST_LEVEL)
        if not knows:
            monkeypatch.delitem(commands._DECODERS, Command.SCHEDULE_DELETE)
            monkeypatch.delitem(LEVEL_OF, Command.SCHEDULE_DELETE)
            monkeypatch.delitem(SETTINGS, "on_success")
        for command in (put, schedule):
            assert isinstance(world.one(commands.encode_audited("n1", "id", "me", "act", "it", command)), Refused)
        trails.append([entry.outcome for entry in world.ledger.audit.entries])
    assert trails[0] == trails[1] == ["bad_config", "malformed"]


@pytest.mark.usefixtures("newer")
def test_after_the_switch_a_program_that_lacks_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.one(commands.encode_feature(NEXT))
    apply_entry(world.ledger, 2, 1, encode_entry(START_MS, [commands.encode_noop()], level=NEXT))
    blobs = checkpoint.dump(world.ledger, everything=True)
    monkeypatch.setattr(apply, "FEATURE_LEVEL", FEATURE_LEVEL)
    with pytest.raises(FatalError, match="upgrade this node"):
        World().one(commands.encode_feature(NEXT))
    with pytest.raises(FatalError, match=f"feature level {NEXT}"):
        apply_entry(World().ledger, 1, 1, encode_entry(START_MS, [], level=NEXT))
    monkeypatch.setattr(checkpoint, "FEATURE_LEVEL", FEATURE_LEVEL)
    with pytest.raises(FatalError, match=f"level {NEXT}"):
        checkpoint.load(Ledger(0, world.store, world.tables, world.names), *blobs)


def test_a_new_cluster_begins_with_the_first() -> None:
    world = World()
    assert Ledger(0, world.store, world.tables, world.names).level == FIRST_LEVEL


def dead_pair(level: int) -> tuple[World, list[int]]:
    """Two dead letters of one key."""
    world, ids = World(level=level), []
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    for _ in range(2):
        ids += world.ids(replace(draft(), key=b"k"))
        world.nack(world.lease(ids[-1]))
    return world, ids


def test_what_a_redrive_may_not_do_is_done_until_every_node_knows_better() -> None:
    world, ids = dead_pair(ONE_PER_KEY - 1)
    outcomes = world.one(commands.encode_redrive("n1", "t", ids)).outcomes
    assert outcomes.tolist() == [RedriveOutcome.REDRIVEN, RedriveOutcome.REDRIVEN]
    world, ids = dead_pair(ONE_PER_KEY)
    outcomes = world.one(commands.encode_redrive("n1", "t", ids)).outcomes
    assert outcomes.tolist() == [RedriveOutcome.REDRIVEN, RedriveOutcome.KEY_TAKEN]


@pytest.mark.parametrize(
    ("level", "outcome"), [(ACK_OF_THIS_LIFE - 1, LeaseOutcome.DONE), (ACK_OF_THIS_LIFE, LeaseOutcome.LEASE_LOST)]
)
def test_an_ack_from_before_a_death_is_judged_alike_by_all_nodes(level: int, outcome: LeaseOutcome) -> None:
    world = World(level=level)
    world.one(commands.encode_topic_put("t", {"max_attempts": 2}))
    (message_id,) = world.ids(draft())
    first = world.lease(message_id)
    for rows in (first, None):
        world.now += 10
        world.nack(world.lease(message_id) if rows is None else rows)
    world.one(commands.encode_redrive("n1", "t", [message_id]))
    world.term += 1
    assert world.ack(first) == [outcome]


@pytest.mark.parametrize("level", [BOUNDED - 1, BOUNDED])
def test_a_command_that_names_messages_works_off_so_many(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_TARGETS", 3)
    monkeypatch.setattr(dead, "MAX_SLICE", 3)
    monkeypatch.setattr(changes, "MAX_MOVED_BYTES", 1)
    world = World(level=level)
    ids = world.ids(*[draft(in_ms=60_000)] * 5)
    left = 5 if level < BOUNDED else 1
    moved = world.one(commands.encode_reschedule("n1", 90_000, True, ids)).outcomes.tolist()
    assert moved == [TargetOutcome.DONE] * left + [TargetOutcome.AGAIN] * (5 - left)
    left = 5 if level < BOUNDED else 3
    looked = world.one(commands.encode_reschedule("n1", 0, True, [77] * 5)).outcomes.tolist()
    assert looked == [TargetOutcome.NOT_FOUND] * left + [TargetOutcome.AGAIN] * (5 - left)
    looked = world.one(commands.encode_redrive("n1", "t", ids)).outcomes.tolist()
    assert looked == [RedriveOutcome.SCHEDULED] * left + [RedriveOutcome.AGAIN] * (5 - left)


@pytest.mark.parametrize("level", [BOUNDED - 1, BOUNDED])
def test_purges_are_bounded_by_all_nodes_alike(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topicchanges, "MAX_MARKS", 1)
    world = World(level=level)
    world.one(commands.encode_topic_put("t", {}))
    purge(world)
    world.ids(draft(in_ms=60_000))
    results = [purge(world), purge(world), world.one(commands.encode_purge("t", READY))]
    assert [isinstance(result, Refused) for result in results] == [False, level == BOUNDED, False]
    assert (len(world.topic().marks), world.topic().generation) == ((2, 2) if level == BOUNDED else (4, 4))


@pytest.mark.parametrize(
    ("url", "plain"),
    [
        ("http://[::1]x/", False), ("http://x[::1]/", False), ("https://a]b[/", False), ("HTTP://[v1.a]/", False),
        ("http://[abc]/", False), ("http://[fe80::1%25eth0]/", False), ("http://[1.2.3.4]/", False),
        ("http://[]/", False),
        ("http://[::1]", True), ("https://[2001:db8::1]:8443/in?a=[1]", True), ("http://host/[x]", True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("part", ["webhook", "alert"])
def test_versions_of_python_agree_about_a_url(
    url: str, plain: bool, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def takes(text: str) -> SplitResult:
        return urlsplit("http://host/")

    def refuses(text: str) -> SplitResult:
        raise ValueError("Invalid IPv6 URL")

    worlds = []
    for split in (urlsplit, takes, *([] if plain else [refuses])):
        monkeypatch.setattr(urls, "urlsplit", split)
        worlds.append(World(level=PLAIN_URLS))
        worlds[-1].one(commands.encode_topic_put("t", {part: {"url": url}}))
    assert len({checkpoint.dump(world.ledger, everything=True)[0] for world in worlds}) == 1
    assert bool(worlds[0].topic()) is plain


@pytest.mark.parametrize("level", [UNCOUNTED - 1, UNCOUNTED])
def test_what_nobody_tried_does_not_count(level: int) -> None:
    """Given back without counting the attempt: neither max_attempts nor the backoff know of it. Every hand-out has a
    number of its own all the same. Before the level of that it is a nack like any other."""
    world = World(level=level)
    world.one(commands.encode_topic_put("t", {"max_attempts": 2, "backoff": [1_000, 50_000]}))
    (message_id,) = world.ids(draft())
    for attempt in range(1, 6):
        leases = world.lease(message_id)
        assert world.ledger.grants[world.term, world.seq].rows["attempt"].tolist() == [attempt]
        assert world.nack(leases, commands.uncounted(0)) == [LeaseOutcome.DONE]
        if level < UNCOUNTED:
            world.now += 1_000
            world.nack(world.lease(message_id))
            break
        assert world.states(message_id) == ["ready"]
        assert world.ack(leases) == [LeaseOutcome.LEASE_LOST]
    if level < UNCOUNTED:
        assert world.states(message_id) == ["dead"]
        return
    assert failures_of(world.ledger, message_id) == []
    world.nack(world.lease(message_id))
    assert due_ms(world, message_id) == world.ledger.now_ms + 1_000
    world.now += 1_000
    world.nack(world.lease(message_id), commands.uncounted(7_000))
    assert due_ms(world, message_id) == world.ledger.now_ms + 7_000
    world.now += 7_000
    world.nack(world.lease(message_id))
    assert world.states(message_id) == ["dead"]
    assert len(failures_of(world.ledger, message_id)) == 2
    world.one(commands.encode_redrive("n1", "t", [message_id]))
    for _ in range(2):
        assert world.states(message_id) == ["ready"]
        world.nack(world.lease(message_id), 0)
    assert world.states(message_id) == ["dead"]


@pytest.mark.parametrize("level", [UNCOUNTED - 1, OUTCOMES_LEVEL - 1, OUTCOMES_LEVEL])
def test_a_consumer_ends_a_message_as_dead(level: int) -> None:
    """At the first attempt, with its reason. Before the level of that, all programs judge alike: as of a delay that is
    too long, or as of the topic's backoff."""
    world = World(level=level)
    world.one(commands.encode_topic_put("t", {"max_attempts": 5}))
    (message_id,) = world.ids(draft())
    result = world.nack(world.lease(message_id), commands.DEAD_NOW, "no such customer")
    if level < OUTCOMES_LEVEL:
        assert isinstance(result, Refused) == (level >= UNCOUNTED)
        assert world.states(message_id) == ["leased" if level >= UNCOUNTED else "ready"]
        return
    assert (result, world.states(message_id)) == ([LeaseOutcome.DONE], ["dead"])
    found = describe(world.ledger, message_id)
    assert found is not None
    assert [event.reason for event in found.history if event.event is Event.NACKED] == ["no such customer"]
    world.one(commands.encode_redrive("n1", "t", [message_id]))
    assert world.states(message_id) == ["ready"]
    world.restart()


def test_what_is_ended_as_dead_goes_where_the_topic_sends_its_dead() -> None:
    """To the dead-letter topic; but expired is expired, and cancelled is cancelled."""
    world = World()
    world.one(commands.encode_topic_put("t", {"dead_letter": "graves"}))
    world.one(commands.encode_topic_put("gone", {}))
    routed, late, purged = world.ids(draft("t"), replace(draft("t"), ttl_ms=1_000), draft("gone"))
    first, second, third = (world.lease(message_id) for message_id in (routed, late, purged))
    world.now += 2_000
    world.one(commands.encode_topic_delete("gone", True))
    for leases in (first, second, third):
        assert world.nack(leases, commands.DEAD_NOW) == [LeaseOutcome.DONE]
    found = describe(world.ledger, routed)
    assert found is not None
    assert (found.topic, found.state.value, found.attempt) == ("graves", "ready", 0)
    assert world.states(late) == ["expired"]
    assert world.states(purged) == ["cancelled"]


def test_uncounted_attempts_are_bounded() -> None:
    """Beyond what an entry can count every attempt counts, so that no message goes to and fro for ever."""
    world = World(level=UNCOUNTED)
    world.one(commands.encode_topic_put("t", {"max_attempts": 3}))
    (message_id,) = world.ids(draft())
    for _ in range(MAX_EXCUSED + 2):
        world.nack(world.lease(message_id), commands.uncounted(0))
    assert world.states(message_id) == ["ready"]
    world.nack(world.lease(message_id), commands.uncounted(0))
    assert world.states(message_id) == ["dead"]
    assert len(failures_of(world.ledger, message_id)) == 3
    assert isinstance(world.nack(world.lease(*world.ids(draft())), commands.uncounted(1 << 60)), Refused)


def due_ms(world: World, message_id: int) -> int:
    found = describe(world.ledger, message_id, world.ledger.now_ms)
    assert found is not None
    return found.deliver_at_ms


@pytest.mark.parametrize("level", [MASKED_OF_ORIGIN - 1, MASKED_OF_ORIGIN])
def test_masked_headers_stay_with_their_origin_by_all_nodes_alike(level: int) -> None:
    """Entries from before keep their meaning, so that every replay gives the same."""
    world = World(level=level)
    hook = {"url": "https://a.example/", "headers": {"X": "secret"}}
    world.one(commands.encode_topic_put("t", {"webhook": hook}))
    moved = {"url": "https://b.example/", "headers": {"X": "****", "Y": "1"}}
    world.one(commands.encode_topic_put("t", {"webhook": moved}))
    kept = {"X": "secret"} if level < MASKED_OF_ORIGIN else {}
    assert world.topic().config["webhook"] == {**moved, "headers": {**kept, "Y": "1"}}


def test_the_method_of_a_webhook_waits_for_the_switch() -> None:
    world = World(level=CALLBACKS_LEVEL - 1)
    hook = {"webhook": {"url": "https://a.example/", "method": "PUT"}}
    refused = world.one(commands.encode_topic_put("t", hook))
    assert (isinstance(refused, Refused), refused.code) == (True, "needs_upgrade")
    world.one(commands.encode_feature(CALLBACKS_LEVEL))
    assert world.one(commands.encode_topic_put("t", hook)) == Done(True)


def test_message_groups_wait_for_the_switch() -> None:
    """Below their level, the command and the setting are refused, and the ledger has the bytes of one without them."""
    world, plain = World(level=SCHEDULER_LEVEL - 1), World(level=SCHEDULER_LEVEL - 1)
    for one in (world, plain):
        one.ids(draft("t"))
    before = checkpoint.dump(world.ledger, everything=True)
    refused = world.one(commands.encode_publish("n1", [replace(draft("t"), group=7)]))
    assert (isinstance(refused, Refused), refused.code) == (True, "needs_upgrade")
    refused = world.one(commands.encode_topic_put("t", {"group_concurrency": 2}))
    assert (isinstance(refused, Refused), refused.code) == (True, "needs_upgrade")
    for _ in range(2):
        plain.one(commands.encode_noop())
    refused, without = (checkpoint.dump(each.ledger, everything=True)[1] for each in (world, plain))
    assert refused == before[1] == without
    world.one(commands.encode_feature(SCHEDULER_LEVEL))
    (pending,) = world.ledger.topics.all
    assert world.one(commands.encode_topic_put("t", {"group_concurrency": 2})) == Done(True)
    first, second, third = world.ids(*[replace(draft("t"), group=7)] * 3)
    assert world.states(first, second, third) == ["ready", "ready", "blocked"]
    assert (pending.grouped, pending.blocked, pending.waiting) == (3, 1, 3)
    world.restart()
