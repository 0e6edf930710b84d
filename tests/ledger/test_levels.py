"""Feature levels: what a mixed cluster does not use, and how it comes to use it (ADR 142)."""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, urlsplit

import pytest
from msgspec.structs import replace

from hadelay import version
from hadelay.codec import commands
from hadelay.codec.commandtypes import LEVEL_OF, Command
from hadelay.codec.entries import encode_entry
from hadelay.codec.results import Done, LeaseOutcome, RedriveOutcome, Refused, TargetOutcome
from hadelay.errors import FatalError
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.hours.retries import MAX_EXCUSED
from hadelay.ledger.hours.transitions import failures_of
from hadelay.ledger.leases import dead
from hadelay.ledger.messages import changes
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics import topicchanges
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from hadelay.ledger.views.describe import describe
from hadelay.model import Event
from hadelay.settings import topic, urls
from hadelay.version import FEATURE_LEVEL, FIRST_LEVEL
from tests.ledger.world import START_MS, World, draft

NEXT = FEATURE_LEVEL + 1


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch) -> None:
    """This program brings PURGE and two settings of topics, with a level of their own."""
    monkeypatch.setitem(LEVEL_OF, Command.PURGE, NEXT)
    newer = {name: topic.SETTINGS[name]._replace(level=NEXT) for name in ("on_success", "tags")}
    monkeypatch.setattr(topic, "SETTINGS", topic.SETTINGS | newer)
    monkeypatch.setattr(version, "FEATURE_LEVEL", NEXT)


def purge(world: World) -> object:
    return world.one(commands.encode_purge("t", SCHEDULED))


@pytest.mark.usefixtures("newer")
def test_a_new_command_waits_for_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(level=FIRST_LEVEL)
    (message_id,) = world.ids(draft(in_ms=60_000))
    before = checkpoint.dump(world.ledger)
    refused = purge(world)
    assert isinstance(refused, Refused)
    assert (refused.code, world.states(message_id)) == ("needs_upgrade", ["scheduled"])
    # Just what a program does that has never heard of it.
    old = World(level=FIRST_LEVEL)
    old.ids(draft(in_ms=60_000))
    assert checkpoint.dump(old.ledger) == before
    with monkeypatch.context() as patch:
        patch.delitem(commands._DECODERS, Command.PURGE)
        assert isinstance(purge(old), Refused)
    assert checkpoint.dump(old.ledger) == checkpoint.dump(world.ledger)
    assert world.one(commands.encode_feature(NEXT)) == Done(True)
    assert world.one(commands.encode_feature(NEXT)) == Done(False)
    assert not isinstance(purge(world), Refused)
    assert world.states(message_id) == ["cancelled"]


@pytest.mark.usefixtures("newer")
def test_a_new_setting_waits_for_the_switch() -> None:
    world = World(level=FIRST_LEVEL)
    put = commands.encode_topic_put("t", {"on_success": "told"})
    refused = world.one(put)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.detail.split(":")[0], world.ledger.topics.all) == ("needs_upgrade", "on_success", [])
    world.one(commands.encode_feature(NEXT))
    assert world.one(put) == Done(True)


@pytest.mark.usefixtures("newer")
def test_the_audit_trail_says_of_newer_commands_what_older_programs_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both write down why they refused a command; an older program knows neither its number nor its setting."""
    new = [
        commands.encode_topic_put("t", {"on_success": "told"}),
        commands.encode_subscription_put("t", "s", {"tags": ["eu"]}),
        commands.encode_purge("t", SCHEDULED),
    ]
    trails = []
    for knows in (True, False):
        world = World(level=FIRST_LEVEL)
        world.ids(draft())
        if not knows:
            monkeypatch.delitem(commands._DECODERS, Command.PURGE)
            monkeypatch.delitem(LEVEL_OF, Command.PURGE)
            known = {name: setting for name, setting in topic.SETTINGS.items() if setting.level != NEXT}
            monkeypatch.setattr(topic, "SETTINGS", known)
        for command in new:
            assert isinstance(world.one(commands.encode_audited("n1", "id", "me", "act", "it", command)), Refused)
        trails.append([entry.outcome for entry in world.ledger.audit.entries])
    assert trails[0] == trails[1] == ["bad_config", "bad_config", "malformed"]


@pytest.mark.usefixtures("newer")
def test_a_program_that_lacks_a_level_stops_at_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.one(commands.encode_feature(NEXT))
    apply_entry(world.ledger, 2, 1, encode_entry(START_MS, [commands.encode_noop()], level=NEXT))
    blobs = checkpoint.dump(world.ledger)
    monkeypatch.setattr(version, "FEATURE_LEVEL", FEATURE_LEVEL)
    with pytest.raises(FatalError, match="upgrade this node"):
        World().one(commands.encode_feature(NEXT))
    with pytest.raises(FatalError, match=f"feature level {NEXT}"):
        apply_entry(World().ledger, 1, 1, encode_entry(START_MS, [], level=NEXT))
    with pytest.raises(FatalError, match=f"level {NEXT}"):
        checkpoint.load(Ledger(0, world.store, world.tables, world.names), *blobs)


def test_a_new_cluster_begins_with_the_first() -> None:
    world = World()
    assert Ledger(0, world.store, world.tables, world.names).level == FIRST_LEVEL


def test_a_redrive_brings_one_message_of_a_key_back() -> None:
    world, ids = World(), []
    world.one(commands.encode_topic_put("t", {"max_attempts": 1}))
    for _ in range(2):
        ids += world.ids(replace(draft(), key=b"k"))
        world.nack(world.lease(ids[-1]))
    outcomes = world.one(commands.encode_redrive("n1", "t", ids)).outcomes
    assert outcomes.tolist() == [RedriveOutcome.REDRIVEN, RedriveOutcome.KEY_TAKEN]


def test_an_ack_from_before_a_death_is_lost() -> None:
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 2}))
    (message_id,) = world.ids(draft())
    first = world.lease(message_id)
    for rows in (first, None):
        world.now += 10
        world.nack(world.lease(message_id) if rows is None else rows)
    world.one(commands.encode_redrive("n1", "t", [message_id]))
    world.term += 1
    assert world.ack(first) == [LeaseOutcome.LEASE_LOST]


def test_a_command_that_names_messages_works_off_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MAX_TARGETS", 3)
    monkeypatch.setattr(dead, "MAX_SLICE", 3)
    monkeypatch.setattr(changes, "MAX_MOVED_BYTES", 1)
    world = World()
    ids = world.ids(*[draft(in_ms=60_000)] * 5)
    moved = world.one(commands.encode_reschedule("n1", 90_000, True, ids)).outcomes.tolist()
    assert moved == [TargetOutcome.DONE] + [TargetOutcome.AGAIN] * 4
    looked = world.one(commands.encode_reschedule("n1", 0, True, [77] * 5)).outcomes.tolist()
    assert looked == [TargetOutcome.NOT_FOUND] * 3 + [TargetOutcome.AGAIN] * 2
    looked = world.one(commands.encode_redrive("n1", "t", ids)).outcomes.tolist()
    assert looked == [RedriveOutcome.SCHEDULED] * 3 + [RedriveOutcome.AGAIN] * 2


def test_purges_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topicchanges, "MAX_MARKS", 1)
    world = World()
    world.one(commands.encode_topic_put("t", {}))
    purge(world)
    world.ids(draft(in_ms=60_000))
    results = [purge(world), purge(world), world.one(commands.encode_purge("t", READY))]
    assert [isinstance(result, Refused) for result in results] == [False, True, False]
    assert (len(world.topic().marks), world.topic().generation) == (2, 2)


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
        worlds.append(World())
        worlds[-1].one(commands.encode_topic_put("t", {part: {"url": url}}))
    assert len({repr(checkpoint.dump(world.ledger)) for world in worlds}) == 1
    assert bool(worlds[0].topic()) is plain


def test_attempts_given_back_untried_do_not_count() -> None:
    """Given back without counting the attempt: neither max_attempts nor the backoff know of it. Every hand-out has a
    number of its own all the same."""
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 2, "backoff": [1_000, 50_000]}))
    (message_id,) = world.ids(draft())
    for attempt in range(1, 6):
        leases = world.lease(message_id)
        assert world.ledger.grants[world.term, world.seq].rows["attempt"].tolist() == [attempt]
        assert world.nack(leases, commands.uncounted(0)) == [LeaseOutcome.DONE]
        assert world.states(message_id) == ["ready"]
        assert world.ack(leases) == [LeaseOutcome.LEASE_LOST]
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


def test_a_consumer_ends_a_message_as_dead() -> None:
    """At the first attempt, with its reason."""
    world = World()
    world.one(commands.encode_topic_put("t", {"max_attempts": 5}))
    (message_id,) = world.ids(draft())
    result = world.nack(world.lease(message_id), commands.DEAD_NOW, "no such customer")
    assert (result, world.states(message_id)) == ([LeaseOutcome.DONE], ["dead"])
    found = describe(world.ledger, message_id)
    assert found is not None
    assert [event.reason for event in found.history if event.event is Event.NACKED] == ["no such customer"]
    world.one(commands.encode_redrive("n1", "t", [message_id]))
    assert world.states(message_id) == ["ready"]
    world.restart()


def test_messages_ended_as_dead_go_where_the_topic_sends_its_dead_letters() -> None:
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
    world = World()
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


def test_masked_headers_stay_with_their_origin() -> None:
    world = World()
    hook = {"url": "https://a.example/", "headers": {"X": "secret"}}
    world.one(commands.encode_topic_put("t", {"webhook": hook}))
    moved = {"url": "https://b.example/", "headers": {"X": "****", "Y": "1"}}
    world.one(commands.encode_topic_put("t", {"webhook": moved}))
    assert world.topic().config["webhook"] == {**moved, "headers": {"Y": "1"}}


def test_webhook_headers_that_receivers_read_as_the_clusters_own_are_refused() -> None:
    def put(world: World, name: str) -> Any:
        webhook = {"url": "http://h", "headers": {name: "x"}}
        return world.one(commands.encode_topic_put("t", {"webhook": webhook}))

    world = World()
    own = ("webhook_id", "Webhook_Signature", "webhook_timestamp", "ce_id", "CE_Type", "content_type", "Content_Length",
           "transfer_encoding", "webhook-id", "ce-id")  # fmt: skip
    for name in own:
        refused = put(world, name)
        assert refused.code == "bad_config", name
        assert name in refused.detail
    for name in ("x_token", "webhooks", "webhook", "X-Webhook_id", "_te", "t_e"):
        assert put(world, name) in (Done(True), Done(False)), name
    subscription = {"webhook": {"url": "http://h", "headers": {"webhook_id": "x"}}}
    assert world.one(commands.encode_subscription_put("t", "s", subscription)).code == "bad_config"
