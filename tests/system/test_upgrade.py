"""Node after node is restarted under traffic, each as a program that knows more than the one before."""

from __future__ import annotations

import signal
from collections import Counter
from threading import Event
from typing import Any

import pytest
from msgspec.structs import replace as changed

from hadelay import version
from hadelay.codec import commands, schedules
from hadelay.codec.entries import encode_entry
from hadelay.ledger import checkpoint
from hadelay.ledger.apply import apply_entry
from hadelay.version import FEATURE_LEVEL
from tests.ledger import test_bulk
from tests.ledger.test_golden import history
from tests.ledger.test_schedules import Owner, every
from tests.ledger.world import World, draft
from tests.system.cluster import Cluster, until
from tests.system.conftest import Make
from tests.system.test_leader_lost import consume_all, publish_all

#: A program before PURGE was thought of, and the one that brought it, with a feature level of its own.
OLD, NEW = FEATURE_LEVEL, FEATURE_LEVEL + 1
_OLD = "commands._DECODERS.pop(Command.PURGE)"
_NEW = "LEVEL_OF[Command.PURGE] = version.FEATURE_LEVEL"
_PROGRAM = """
import sys
import hadelay.version as version
version.FEATURE_LEVEL = {level}
from hadelay.codec import commands
from hadelay.codec.commandtypes import LEVEL_OF, Command
{change}
from hadelay.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


def program(level: int) -> str:
    return _PROGRAM.format(level=level, change=_NEW if level == NEW else _OLD)


def start_as(cluster: Cluster, level: int, *names: str) -> None:
    """Nodes that have ended, again, as programs that know so much."""
    cluster.restart(*names, program=program(level))


def replace(cluster: Cluster, level: int, name: str) -> None:
    cluster.kill(name, number=signal.SIGTERM)
    start_as(cluster, level, name)


def levels(cluster: Cluster, name: str) -> tuple[int, dict[str, int]]:
    """(the cluster's, each member's)"""
    answer = cluster.ask(name, "GET", "/v1/cluster").json
    return answer["feature_level"], {member["name"]: member["feature_level"] for member in answer["members"]}


def purge(cluster: Cluster, name: str) -> Any:
    return cluster.ask(name, "POST", "/v1/topics/unwanted:purge", {"states": ["scheduled"]})


def test_a_rolling_upgrade_loses_nothing_and_repeats_nothing(make_cluster: Make) -> None:
    cluster = make_cluster()
    cluster.kill(*cluster.names)
    start_as(cluster, OLD, *cluster.names)
    kept = cluster.publish_many("n1", "unwanted", ["x"] * 50, delay="1h")
    stop, enough = Event(), Event()
    writers = [cluster.later(publish_all, cluster, "rolling", 1_000_000, stop, "?delay=700ms") for _ in range(1)]
    consumers = [cluster.later(consume_all, cluster, "rolling", enough)]
    for n, name in enumerate(cluster.names):
        replace(cluster, NEW, name)
        until(lambda n=n, name=name: levels(cluster, name)[1][name] == NEW, "its level is known")  # type: ignore[misc]
        if n < 2:
            # Two programs now. What one of them does not know is refused, by whichever is asked and whichever leads.
            assert levels(cluster, cluster.leader())[0] == OLD
            for asked in cluster.names:
                assert purge(cluster, asked).status >= 400
            assert cluster.topic(cluster.leader(), "unwanted")["scheduled"] == len(kept)
    until(lambda: levels(cluster, cluster.leader())[0] == NEW, "all know it, so all use it")
    stop.set()
    ids = [i for writer in writers for i in writer.result(60)]
    until(lambda: cluster.topic(cluster.leader(), "rolling")["leased"] == len(ids), "all are handed out")
    enough.set()
    handed = Counter(message["id"] for consumer in consumers for message in consumer.result(30))
    assert sorted(handed) == sorted(ids)
    assert set(handed.values()) == {1}
    assert purge(cluster, "n1").status == 202
    until(lambda: cluster.topic(cluster.leader(), "unwanted")["scheduled"] == 0, "purged")
    cluster.assert_identical()
    # There is no way back for a single node: it says so, and touches nothing.
    cluster.kill("n1", number=signal.SIGTERM)
    said = cluster.refused("n1")
    assert f"feature level {NEW}; this hadelay reads up to {OLD}" in said
    start_as(cluster, NEW, "n1")
    cluster.assert_identical()


#: Commands, settings of topics and options of a publish that come with level NEW.
_NEWER = """
from hadelay.server import publishing
from hadelay.settings.topic import SETTINGS
newer = [kind for kind in Command if kind.name.startswith(("SCHEDULE_", "SUBSCRIPTION_", "JOB_", "TOPIC_EXPIRY"))]
LEVEL_OF.update(dict.fromkeys(newer, {new}))
for name in ("group_concurrency", "group_rate", "own_queue", "expires_after_ms", "on_success", "on_failure"):
    SETTINGS[name] = SETTINGS[name]._replace(level={new})
publishing.LEVEL_OF_OPTION.update(group={new}, unique_ms={new})
"""


#: A request for each of these.
_REQUESTS: list[tuple[str, str, Any]] = [
    ("PUT", "/v1/topics/lines", {"group_concurrency": 1}),
    ("PUT", "/v1/topics/lines", {"group_concurrency": 1, "group_rate": 5}),
    ("PUT", "/v1/topics/own", {"own_queue": True}),
    ("PUT", "/v1/topics/own", {"expires_after": "1d"}),
    ("PUT", "/v1/topics/own", {"on_success": "told"}),
    ("PUT", "/v1/topics/own", {"on_failure": "told"}),
    ("PUT", "/v1/topics/t/subscriptions/now", {"tags": ["eu"]}),
    ("PUT", "/v1/topics/t/subscriptions/pending", {"from": "pending"}),
    ("POST", "/v1/messages:batch", [{"topic": "t", "body": "x", "group": "g"}]),
    ("POST", "/v1/messages:batch", [{"topic": "t", "body": "x", "key": "k", "unique_for": "1m"}]),
    ("POST", "/v1/jobs", {"action": "cancel", "filter": {"topic": "own"}}),
    ("POST", "/v1/jobs", {"action": "delete_dead", "filter": {"topic": "own"}}),
    ("PUT", "/v1/schedules/s", {"topic": "own", "every": "1s"}),
]


def with_newer(level: int) -> str:
    """A program for which all of that comes with level NEW, and which knows it from that level on."""
    unknown = "[commands._DECODERS.pop(kind) for kind in newer]" if level == OLD else ""
    return _PROGRAM.format(level=level, change=_NEWER.format(new=NEW) + unknown)


def test_a_newer_setting_waits_for_the_last_node(make_cluster: Make) -> None:
    """Refused in words by every program while one node is of before, and used as soon as none is."""
    cluster = make_cluster()
    cluster.kill(*cluster.names)
    cluster.restart(*cluster.names, program=with_newer(OLD))
    kept = cluster.publish_many("n1", "t", ["x"] * 5, delay="1h")
    assert cluster.ask("n1", "PUT", "/v1/topics/own", {}).status < 300
    for name in cluster.names[:2]:
        cluster.kill(name, number=signal.SIGTERM)
        cluster.restart(name, program=with_newer(NEW))
        until(lambda name=name: levels(cluster, name)[1][name] == NEW, "its level is known")  # type: ignore[misc]
    for name in cluster.names:
        for method, path, body in _REQUESTS:
            answer = cluster.ask(name, method, path, body)
            refusal = answer.json["results"][0]["error"] if "results" in answer.json else answer.json
            assert (refusal["status"], refusal["outcome_known"]) == (409, True), (name, path, body, answer)
            assert "feature_level" in refusal["detail"], (name, path, body, answer)
        assert cluster.ask(name, "GET", "/v1/schedules").json["schedules"] == []
        assert cluster.ask(name, "GET", "/v1/topics/t/subscriptions").json["topics"] == []
        assert cluster.topic(name, "t")["scheduled"] == len(kept)
    last = cluster.names[2]
    cluster.kill(last, number=signal.SIGTERM)
    cluster.restart(last, program=with_newer(NEW))
    until(lambda: levels(cluster, cluster.leader())[0] == NEW, "all know it, so all use it")
    for name in cluster.names:
        for method, path, body in _REQUESTS:
            answer = cluster.ask(name, method, path, body)
            assert answer.status < 300, (name, path, body, answer)
            assert all("error" not in result for result in answer.json.get("results", ())), (name, path, answer)
    assert cluster.drain("t", 2)
    until(lambda: cluster.topic("n1", "t~pending")["scheduled"] == len(kept), "the subscription is filled")
    assert cluster.ask("n1", "DELETE", "/v1/schedules/s").status < 300  # files that grow cannot be compared
    cluster.assert_identical()


def with_schedules() -> World:
    """Messages of schedules and of groups, and what a bulk job changes."""
    world = Owner()
    world.one(commands.encode_topic_put("lines", {"group_concurrency": 1, "max_attempts": 2}))
    world.put(every(jitter_ms=500))
    world.lead()
    world.put(every(jitter_ms=500), body=b"changed")
    world.now = 4_500
    world.one(schedules.encode_state("s", True))
    world.one(schedules.encode_run("s", schedules.ANY_VERSION, [(0, 0)], b"once"))
    first, second, *_ = world.ids(*[changed(draft("lines"), group=7)] * 3)
    world.ack(world.lease(first))
    world.nack(world.lease(second), reason="no stock")
    waiting = world.ids(*[draft("t", 60_000)] * 3)
    test_bulk.begin(world, "reschedule", shift_ms=test_bulk.DAY_MS)
    test_bulk.run(world, 1)
    world.one(schedules.encode_state("s", False))
    world.lead()
    world.cancel(waiting[0])
    return world


def opened_at(level: int, entries: list[bytes]) -> list[Any]:
    """All bytes of a node that opened at this level and applied these entries; in the end the cluster is at NEW."""
    world = World(level=level)
    for number, entry in enumerate([*entries, encode_entry(0, [commands.encode_feature(NEW)])], 1):
        apply_entry(world.ledger, number, 1, entry)
    files = {
        hour: (bytes(file.log), file.idx.all.tobytes(), file.dsp.all.tobytes())
        for hour, file in world.store.files.items()
    }
    return [*checkpoint.dump(world.ledger), files, world.tables.rows, vars(world.names)]


@pytest.mark.parametrize("make", [history, with_schedules])
def test_bytes_without_newer_settings_are_those_of_either_level(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that use no feature of the next level leave the same state, files and tables, whether the cluster was at
    the next level from the beginning or switched afterwards."""
    monkeypatch.setattr(version, "FEATURE_LEVEL", NEW)
    entries = make().entries
    assert opened_at(OLD, entries) == opened_at(NEW, entries)
