"""Node after node is restarted under traffic, each as a program that knows more than the one before."""

from __future__ import annotations

import signal
from collections import Counter
from threading import Event
from typing import Any

from hadelay.version import FEATURE_LEVEL
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


#: Requests for schedules, jobs and message groups.
_SCHEDULER = (
    ("PUT", "/v1/schedules/s", {"topic": "t", "every": "1s"}),
    ("POST", "/v1/jobs", {"action": "cancel", "filter": {"topic": "t"}}),
    ("PUT", "/v1/topics/lines", {"group_concurrency": 1}),
    ("POST", "/v1/messages:batch", [{"topic": "t", "body": "x", "group": "g"}]),
)


def with_scheduler(level: int) -> str:
    """A program for which the scheduler's commands come with level NEW, and which knows them from that level on."""
    unknown = f"[commands._DECODERS.pop(kind) for kind, level in LEVEL_OF.items() if level == {NEW}]"
    levels = f"{level}\nversion.SCHEDULER_LEVEL = {NEW}"
    return _PROGRAM.format(level=levels, change=unknown if level == OLD else "")


def test_schedules_groups_and_jobs_wait_for_the_last_node(make_cluster: Make) -> None:
    """Refused in words by every program while one node is of before, and used as soon as none is."""
    cluster = make_cluster()
    cluster.kill(*cluster.names)
    cluster.restart(*cluster.names, program=with_scheduler(OLD))
    kept = cluster.publish_many("n1", "t", ["x"] * 5, delay="1h")
    for name in cluster.names[:2]:
        cluster.kill(name, number=signal.SIGTERM)
        cluster.restart(name, program=with_scheduler(NEW))
        until(lambda name=name: levels(cluster, name)[1][name] == NEW, "its level is known")  # type: ignore[misc]
    for name in cluster.names:
        for method, path, body in _SCHEDULER:
            answer = cluster.ask(name, method, path, body)
            refusal = answer.json["results"][0]["error"] if "results" in answer.json else answer.json
            assert (refusal["status"], refusal["outcome_known"]) == (409, True), (name, path, answer)
            assert "feature_level" in refusal["detail"], (name, path, answer)
        assert cluster.ask(name, "GET", "/v1/schedules").json["schedules"] == []
        assert cluster.topic(name, "t")["scheduled"] == len(kept)
    last = cluster.names[2]
    cluster.kill(last, number=signal.SIGTERM)
    cluster.restart(last, program=with_scheduler(NEW))
    until(lambda: levels(cluster, cluster.leader())[0] == NEW, "all know it, so all use it")
    for name in cluster.names:
        for method, path, body in reversed(_SCHEDULER):
            answer = cluster.ask(name, method, path, body)
            assert answer.status < 300, (name, path, answer)
            assert all("error" not in result for result in answer.json.get("results", ())), (name, path, answer)
    assert cluster.drain("t", 2)
