"""Looking at what there is, through every node: lists, counts, lateness; under another leader, too."""

from __future__ import annotations

import time
from typing import Any

from tests.system.cluster import Cluster, until


def listed(cluster: Cluster, node: str, query: str = "", topic: str = "look") -> list[Any]:
    found: list[Any] = []
    cursor = ""
    while True:
        answer = cluster.ask(node, "GET", f"/v1/topics/{topic}/messages?limit=7{query}{cursor}")
        assert answer.status == 200, answer
        found += answer.json["messages"]
        if answer.json["cursor"] is None:
            return found
        cursor = f"&cursor={answer.json['cursor']}"


def test_lists_counts_and_lateness_through_every_node(cluster: Cluster) -> None:
    base = time.time_ns() // 1_000_000 + 3_600_000
    later = [cluster.publish("n1", "look", query=f"?deliver_at={base + n * 977}") for n in range(20)]
    ready = cluster.publish_many("n2", "look", [f"m{n}" for n in range(10)])
    until(lambda: cluster.topic("n3", "look")["ready"] == 10, "all are ready")
    taken = cluster.receive("n1", "look", max=4, wait="5s")
    cluster.settle("n3", "ack", taken[:2])
    cluster.ask("n2", "DELETE", f"/v1/messages/{later[3]}")
    acked, leased = [m["id"] for m in taken[:2]], [m["id"] for m in taken[2:]]
    for node in cluster.names:
        assert [m["id"] for m in listed(cluster, node, "&state=scheduled")] == later[:3] + later[4:]
        assert {m["id"] for m in listed(cluster, node, "&state=ready")} == set(ready) - set(acked) - set(leased)
        assert {m["id"] for m in listed(cluster, node, "&state=leased")} == set(leased)
        assert {m["id"] for m in listed(cluster, node, "&state=acked")} == set(acked)
        assert [m["id"] for m in listed(cluster, node, "&state=cancelled")] == [later[3]]
        everything = listed(cluster, node, "&state=all")
        assert len(everything) == 30
        assert [m["deliver_at"] for m in everything] == sorted(m["deliver_at"] for m in everything)
        topic = cluster.topic(node, "look")
        assert (topic["scheduled"], topic["ready"], topic["leased"]) == (19, 6, 2)
        assert topic["oldest_ready_age_ms"] >= 0
        assert topic["bytes"] > 27 * 48
        assert topic["lateness"]["count"] == 4
        assert 0 <= topic["lateness"]["p50_ms"] <= topic["lateness"]["p99_ms"]


def test_a_list_sees_what_was_answered_before(cluster: Cluster) -> None:
    for turn in range(10):
        writer, reader = cluster.names[turn % 3], cluster.names[(turn + 1) % 3]
        sent = cluster.publish(writer, "linear-list", query="?delay=1h")
        assert sent in {m["id"] for m in listed(cluster, reader, topic="linear-list")}
        cluster.ask(reader, "DELETE", f"/v1/messages/{sent}")
        assert sent not in {m["id"] for m in listed(cluster, writer, topic="linear-list")}


def test_a_cursor_goes_on_under_another_leader(cluster: Cluster) -> None:
    sent = cluster.publish_many("n1", "onwards", [f"m{n}" for n in range(9)], delay="2h")
    node = cluster.followers()[0]
    page = cluster.ask(node, "GET", "/v1/topics/onwards/messages?limit=4").json
    cluster.ask(node, "POST", "/v1/cluster:transfer-leader", {})
    rest = listed_from(cluster, node, page["cursor"])
    assert [m["id"] for m in page["messages"]] + rest == sent
    assert cluster.metric(cluster.leader(), "sweeper_found_messages_total") == 0


def listed_from(cluster: Cluster, node: str, cursor: str) -> list[str]:
    path = f"/v1/topics/onwards/messages?limit=5&cursor={cursor}"
    answer = until(lambda: (a := cluster.ask(node, "GET", path)).status == 200 and a, "a leader is there")
    return [m["id"] for m in answer.json["messages"]]
