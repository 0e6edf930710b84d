"""Schedules on three nodes, from HTTP to handed-out messages."""

from __future__ import annotations

import itertools
import time
from typing import Any

from tests.system.cluster import Cluster, hadelay, until


def put(cluster: Cluster, node: str, name: str, **query: Any) -> Any:
    return cluster.ask(node, "PUT", f"/v1/schedules/{name}", {"topic": name, **query})


def take(cluster: Cluster, topic: str, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    end = time.monotonic() + 20
    while len(found) < count and time.monotonic() < end:
        some = cluster.receive(cluster.leader(), topic, wait="5s", max=10)
        cluster.settle(cluster.leader(), "ack", some)
        found += some
    return found


def test_every_second_on_time_from_every_node(cluster: Cluster) -> None:
    answer = put(cluster, cluster.names[0], "tick", every="1s", body={"job": 1}, tags=["a"])
    assert (answer.status, answer.json["state"], answer.json["version"]) == (200, "active", 1), answer.body
    messages = take(cluster, "tick", 4)
    at = [message["occurrence"] for message in messages]
    assert at == sorted(set(at))
    assert all(text.endswith(":" + text[17:19] + ".000Z") for text in at)
    assert {message["schedule"] for message in messages} == {"tick"}
    assert [message["deliver_at"] for message in messages] == at
    assert all(message["late_ms"] < 1_000 for message in messages)
    seen = cluster.ask(cluster.names[1], "GET", "/v1/schedules/tick").json
    assert seen["last"][-1]["state"] in ("acked", "ready", "leased")
    assert len(seen["next"]) == 10
    (listed,) = cluster.ask(cluster.names[2], "GET", "/v1/schedules?prefix=ti").json["schedules"]
    assert listed["schedule"] == "tick"
    assert put(cluster, cluster.names[2], "tick", every="1s", body={"job": 1}, tags=["a"]).json["version"] == 1
    assert cluster.ask(cluster.names[1], "POST", "/v1/schedules/tick:pause", {}).json["state"] == "paused"
    for node in cluster.names:  # a repetition of a request whose answer was lost goes to any node
        assert cluster.ask(node, "DELETE", "/v1/schedules/tick").status == 204
    assert cluster.ask(cluster.names[1], "GET", "/v1/schedules/tick").status == 404


def test_a_failover_repeats_and_skips_nothing(cluster: Cluster) -> None:
    assert put(cluster, cluster.names[0], "steady", every="1s").status == 200
    first = take(cluster, "steady", 2)
    old = cluster.leader()
    cluster.kill(old)
    until(lambda: any(name != old for name in [cluster.leader()]), "another node leads")
    more = take(cluster, "steady", 6)
    cluster.restart(old)
    times = [message["occurrence"] for message in first + more]
    seconds = [int(text[17:19]) for text in dict.fromkeys(times)]
    assert all((b - a) % 60 == 1 for a, b in itertools.pairwise(seconds)), times
    state = cluster.ask(cluster.leader(), "GET", "/v1/schedules/steady").json
    assert state["missed"] == 0
    cluster.ask(cluster.leader(), "DELETE", "/v1/schedules/steady")


def test_trigger_and_backfill_by_command_line(cluster: Cluster) -> None:
    servers = ",".join(cluster.urls.values())

    def said(*words: str) -> Any:
        return hadelay("schedule", *words, "--servers", servers)

    assert put(cluster, cluster.names[0], "yearly", cron="@yearly", overlap="skip").status == 200
    made = said("trigger", "yearly", "-o", "json")
    assert made.returncode == 0, made.stderr
    again = said("trigger", "yearly")
    assert again.returncode != 0
    assert "pending" in again.stderr
    made = said("backfill", "yearly", "--from", "2020-01-01T00:00:00Z", "--to", "2023-01-01T00:00:00Z")
    assert made.returncode == 0, made.stderr
    found = take(cluster, "yearly", 4)
    assert [message["occurrence"][:10] for message in found[1:]] == ["2020-01-01", "2021-01-01", "2022-01-01"]
    assert "acked" in said("get", "yearly").stdout
    assert "yearly" in said("list").stdout
    pattern = ("--cron", "30 2 * * *", "--timezone", "Europe/Vienna", "--after", "2027-03-27T12:00:00Z")
    shown = said("preview", *pattern)
    assert "2027-03-28T03:00:00+02:00" in shown.stdout
    assert "the clock skips" in shown.stderr
    assert said("delete", "yearly", "--yes").returncode == 0
    again = said("delete", "yearly", "--yes")
    assert (again.returncode == 0, "there is no schedule 'yearly'" in again.stderr) == (False, True)


def test_a_backfill_that_a_quota_stops_says_where_to_go_on(cluster: Cluster) -> None:
    node = cluster.names[1]
    assert put(cluster, node, "bounded", every="1h", start="2020-01-01T00:00:00Z").status == 200
    assert cluster.ask(node, "PUT", "/v1/topics/bounded", {"max_messages": 4}).status == 200

    def backfill(start: str, key: str) -> Any:
        query = {"from": start, "to": "2020-01-01T10:00:00Z"}
        return cluster.ask(node, "POST", "/v1/schedules/bounded:backfill", query, headers={"Idempotency-Key": key})

    stopped = backfill("2020-01-01T00:00:00Z", "k1")
    assert stopped.status == 429, stopped
    said = stopped.json
    assert (said["retryable"], said["outcome_known"], said["made"]) == (False, True, 4)
    assert said["go_on"] == "2020-01-01T04:00:00.000Z"
    assert "4 of 10 occurrences are made" in said["detail"]
    assert "max_messages" in said["detail"]
    assert backfill("2020-01-01T00:00:00Z", "k1").json == said, "a repetition makes nothing"
    full = backfill(said["go_on"], "k2")
    assert (full.status, full.json["retryable"]) == (429, True), "nothing is made"
    first = take(cluster, "bounded", 4)
    second = backfill(said["go_on"], "k2").json
    assert (second["made"], second["go_on"]) == (4, "2020-01-01T08:00:00.000Z")
    more = take(cluster, "bounded", 4)
    assert len(backfill(second["go_on"], "k3").json["results"]) == 2
    found = [message["occurrence"][11:13] for message in first + more + take(cluster, "bounded", 2)]
    assert found == [f"{hour:02}" for hour in range(10)]
