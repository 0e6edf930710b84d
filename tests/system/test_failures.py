"""Messages that fail, are too late, or are not wanted any more: over real processes, and over the death of a leader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.system.cluster import Cluster, until


def fail(cluster: Cluster, topic: str, count: int, reason: str) -> list[Any]:
    messages = cluster.drain(topic, count)
    assert cluster.settle(cluster.leader(), "nack", messages, reason=reason) == ["nacked"] * len(messages)
    return messages


def dead(cluster: Cluster, topic: str) -> list[Any]:
    """All pages."""
    found: list[Any] = []
    cursor = ""
    while True:
        answer = cluster.ask(cluster.names[0], "GET", f"/v1/topics/{topic}/dead?limit=7{cursor}")
        assert answer.status == 200, answer
        found += answer.json["messages"]
        if answer.json["cursor"] is None:
            return found
        cursor = f"&cursor={answer.json['cursor']}"


def put(cluster: Cluster, topic: str, **settings: Any) -> None:
    answer = cluster.ask(cluster.names[0], "PUT", f"/v1/topics/{topic}", settings)
    assert answer.status == 200, answer


def test_failed_messages_are_tried_again_die_and_are_redriven_whoever_leads(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        put(cluster, "orders", max_attempts=2, backoff=["200ms"])
        ids = cluster.publish_many(cluster.names[0], "orders", [f"order {n}" for n in range(20)])
        fail(cluster, "orders", 20, "HTTP 503")
        assert {m["attempt"] for m in fail(cluster, "orders", 20, "timeout")} == {2}
        letters = until(lambda: len(dead(cluster, "orders")) == 20 and dead(cluster, "orders"), "20 dead letters")
        assert sorted(letter["id"] for letter in letters) == sorted(ids)
        for letter in letters:
            assert [(e["attempt"], e["event"], e["reason"]) for e in letter["errors"]] == [
                (1, "nacked", "HTTP 503"),
                (2, "nacked", "timeout"),
            ]
        assert cluster.topic(cluster.names[0], "orders")["dead"] == 20

        # The next leader goes on with a redrive that the first one began.
        answer = cluster.ask(cluster.names[1], "POST", "/v1/topics/orders/dead:redrive", {"all": True, "rate": 5})
        assert (answer.status, answer.json) == (202, {"redriving": 20})
        first = cluster.leader()
        until(lambda: cluster.topic(first, "orders")["dead"] < 20, "the redrive begins")
        cluster.kill(first)
        found = cluster.drain("orders", 20)
        assert {m["attempt"] for m in found} == {1}
        assert cluster.settle(cluster.leader(), "ack", found) == ["acked"] * 20
        cluster.restart(first)
        assert dead(cluster, "orders") == []
        answer = cluster.ask(cluster.names[0], "POST", "/v1/topics/orders/dead:redrive", {"ids": ids[:1]})
        assert answer.json == {"results": [{"id": ids[0], "outcome": "acked"}]}
        assert all(cluster.metric(name, "sweeper_found_messages_total") == 0 for name in cluster.living)
        cluster.assert_identical()


def test_messages_that_nobody_took_in_time_expire_under_the_next_leader_too(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        put(cluster, "offers", ttl="1500ms")
        brief = cluster.publish(cluster.names[0], "offers")
        long = cluster.publish(cluster.names[0], "offers", query="?ttl=1h")
        cluster.kill(cluster.leader())
        name = cluster.leader()
        until(lambda: cluster.describe(name, brief)["state"] == "expired", "it expires")
        assert [m["id"] for m in cluster.drain("offers", 1)] == [long]
        until(lambda: cluster.topic(name, "offers")["ready"] == 0, "it is counted as expired")
        assert [e["event"] for e in cluster.describe(name, brief)["history"]] == ["ttl_expired"]
        cluster.assert_identical()


def test_a_purge_and_a_route_survive_their_leader(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        put(cluster, "mail", max_attempts=1, dead_letter="mail.failed")
        cluster.publish_many(cluster.names[0], "mail", ["a", "b"])
        cluster.publish(cluster.names[0], "mail", query="?delay=1h")
        answer = cluster.ask(cluster.names[1], "POST", "/v1/topics/mail:purge", {"states": ["ready", "scheduled"]})
        assert answer.status == 202
        kept = cluster.publish(cluster.names[2], "mail", b"kept")
        cluster.kill(cluster.leader())
        assert [m["id"] for m in fail(cluster, "mail", 1, "no such address")] == [kept]
        routed = cluster.drain("mail.failed", 1)
        assert [(m["id"], m["topic"], m["attempt"]) for m in routed] == [(kept, "mail.failed", 1)]
        assert cluster.topic(cluster.leader(), "mail")["scheduled"] == 0
        cluster.assert_identical()
