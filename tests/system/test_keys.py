"""Keys and rescheduling on three nodes: the same from every node, one winner among them, and whole over a failover."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.system.cluster import Cluster, until

MESSAGES = "/v1/topics/{}/messages?"


def put(cluster: Cluster, node: str, topic: str, query: str, **headers: str) -> Any:
    return cluster.ask(node, "POST", MESSAGES.format(topic) + query, b"x", headers=headers or None)


def test_one_of_many_wins(cluster: Cluster) -> None:
    """The same key published at once from three nodes, twenty times over."""
    with ThreadPoolExecutor(12) as pool:
        for turn in range(20):
            ask = f"key=k{turn}&delay=1h&on_conflict=reject"
            asked = [pool.submit(put, cluster, cluster.names[n % 3], "race", ask) for n in range(12)]
            answers = [future.result() for future in asked]
            assert Counter(a.status for a in answers) == {201: 1, 409: 11}
            (winner,) = (a.json["id"] for a in answers if a.status == 201)
            assert {a.json["id"] for a in answers if a.status == 409} == {winner}


def test_replaced_messages_are_never_handed_out(cluster: Cluster) -> None:
    """Debounce, from changing nodes: of thirty publishes under one key the last one comes, once, and not too late."""
    topic, last = "debounce", ""
    for turn in range(30):
        answer = put(cluster, cluster.names[turn % 3], topic, "key=cart&delay=600ms&on_conflict=replace&max_wait=30s")
        assert (answer.status, answer.json.get("replaced", "")) == (201, last)
        last = answer.json["id"]
    leader = cluster.leader()
    (message,) = cluster.receive(leader, topic, wait="20s", max=10)
    assert (message["id"], message["key"]) == (last, "cart")
    assert put(cluster, leader, topic, "key=cart&on_conflict=replace").status == 409
    assert cluster.settle(leader, "ack", [message]) == ["acked"]
    assert cluster.receive(leader, topic, wait="0s", max=10) == []


def test_look_ups_by_key_from_every_node(cluster: Cluster) -> None:
    """A change at one node is seen at once at the others, under both names."""
    for turn in range(12):
        writer, reader, other = (cluster.names[(turn + k) % 3] for k in range(3))
        sent = put(cluster, writer, "named", f"key=order%20{turn}&delay=1h").json["id"]
        path = f"/v1/topics/named/keys/order%20{turn}"
        moved = cluster.ask(other, "PATCH", path, {"delay": "2h"}).json
        seen = cluster.ask(reader, "GET", path).json
        assert (seen["id"], seen["deliver_at"], seen["state"]) == (sent, moved["deliver_at"], "scheduled")
        assert cluster.ask(reader, "DELETE", path).json == {"outcome": "cancelled"}
        assert cluster.describe(writer, sent)["state"] == "cancelled"
        assert cluster.ask(writer, "PATCH", path, {"delay": "1h"}).json["outcome"] == "cancelled"


def test_deliver_now_and_later(cluster: Cluster) -> None:
    node, topic = cluster.followers()[0], "now"
    sent = put(cluster, node, topic, "delay=5h").json["id"]
    poll = cluster.later(cluster.receive, node, topic, wait="20s")
    assert cluster.ask(node, "POST", f"/v1/messages/{sent}:deliver-now").status == 200
    (message,) = poll.result(30)
    assert message["id"] == sent
    for method, path, body in (("PATCH", "", {"delay": "1h"}), ("POST", ":deliver-now", {})):
        answer = cluster.ask(node, method, f"/v1/messages/{sent}{path}", body)
        assert (answer.status, answer.json["outcome"]) == (409, "leased")
    assert cluster.settle(node, "nack", [message]) == ["nacked"]
    assert cluster.ask(node, "PATCH", f"/v1/messages/{sent}", {"delay": "1h"}).status == 200
    assert cluster.receive(node, topic, wait="0s") == []


@pytest.mark.parametrize("sync", ["commit", "interval"])
def test_a_key_fires_once_over_a_failover(make_cluster: Any, sync: str) -> None:
    """Publishes with keys, retried until they are answered, while the leader is killed: one message per key."""
    cluster = make_cluster(sync=sync)
    leader, (left, right) = cluster.leader(), cluster.followers()
    count = 60

    def publish(n: int) -> str:
        node = (left, right)[n % 2]

        def tried() -> str | None:
            answer = put(cluster, node, "once", f"key=k{n % (count // 2)}&delay=3s")
            return answer.json["id"] if answer.status in (200, 201) else None

        return str(until(tried, "it is answered"))

    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(publish, n) for n in range(count)]
        sent[5].result()
        cluster.kill(leader)
        ids = [future.result() for future in sent]
    assert ids[: count // 2] == ids[count // 2 :]
    got = cluster.drain("once", count // 2)
    assert Counter(m["id"] for m in got) == Counter(set(ids))
    assert cluster.receive(cluster.leader(), "once", wait="1s") == []


def test_unique_publishes_from_every_node(cluster: Cluster) -> None:
    """Cron on three hosts: of twelve publishes at once one is stored, and those after its ack are dropped."""
    ask = "key=night&unique_for=1d"
    with ThreadPoolExecutor(12) as pool:
        asked = [pool.submit(put, cluster, cluster.names[n % 3], "nightly", ask) for n in range(12)]
        answers = [future.result() for future in asked]
    assert Counter(a.status for a in answers) == {201: 1, 200: 11}
    (stored,) = {a.json["id"] for a in answers}
    leader = cluster.leader()
    (message,) = cluster.receive(leader, "nightly", wait="20s", max=10)
    assert cluster.settle(leader, "ack", [message]) == ["acked"]
    for name in cluster.names:
        late = put(cluster, name, "nightly", ask)
        assert (late.status, late.json["id"], late.json["duplicate"]) == (200, stored, True)
    assert put(cluster, leader, "nightly", "key=night").status == 201
