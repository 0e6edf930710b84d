"""Tags and limits with real processes: what one node is told holds at all of them, and after a failover."""

from __future__ import annotations

import time

from tests.system.cluster import Cluster, until
from tests.system.conftest import Make


def put(cluster: Cluster, topic: str, **config: object) -> None:
    answer = cluster.ask(cluster.followers()[0], "PUT", f"/v1/topics/{topic}", config)
    assert answer.status == 200, answer


def test_selective_consumers(cluster: Cluster) -> None:
    topic, leader = "tags", cluster.leader()
    waiting = cluster.later(cluster.receive, leader, topic, wait="30s", tags=["eu", "paid"], max=10)
    other = cluster.later(cluster.receive, leader, topic, wait="30s", any_tags=["us", "jp"], max=10)
    until(lambda: cluster.metric(leader, "http_waiting_receives") >= 2, "both wait")
    plain = cluster.publish(cluster.followers()[0], topic, b"1")
    cluster.publish(leader, topic, b"2", Hadelay_Tags="eu")
    wanted = cluster.publish(cluster.followers()[1], topic, b"3", Hadelay_Tags="paid,eu,x")
    assert [m["id"] for m in waiting.result(30)] == [wanted]
    far = cluster.publish(leader, topic, b"4", Hadelay_Tags="jp")
    assert [m["id"] for m in other.result(30)] == [far]
    rest = cluster.drain(topic, 2)
    assert plain in {m["id"] for m in rest}
    assert sorted(tag for m in rest for tag in m["tags"]) == ["eu"]


def test_limits_hold_over_a_failover(make_cluster: Make) -> None:
    cluster = make_cluster()
    put(cluster, "few", concurrency=2, max_messages=4)
    ids = cluster.publish_many(cluster.followers()[0], "few", ["a", "b", "c", "d"])
    refused = cluster.ask(cluster.leader(), "POST", "/v1/topics/few/messages", b"e")
    assert (refused.status, refused.json["retryable"]) == (429, True)
    assert int(refused.headers["retry-after"]) >= 1
    leased = cluster.receive(cluster.leader(), "few", max=10, lease="10m")
    assert [m["id"] for m in leased] == ids[:2]

    put(cluster, "slow", publish_rate=0.01, paused=True)
    path = "/v1/topics/slow/messages"
    stored = cluster.ask(cluster.leader(), "POST", f"{path}?key=k", b"x", headers={"Idempotency-Key": "once"})
    assert stored.status == 201

    def retry_after_ms(name: str) -> int:
        answer = cluster.ask(name, "POST", path, b"x")
        assert answer.status == 429
        return int(answer.json["retry_after_ms"])

    for name in cluster.names:  # one that is behind is refused by the leader, and does not know the time
        until(lambda name=name: retry_after_ms(name) > 1_000, f"{name} knows when to come again")  # type: ignore[misc]
    # Every node refuses what is new by itself now; what was stored before is told again.
    for query, headers in (("?key=k", {"Idempotency-Key": "once"}), ("?key=k", {}), ("?key=k&on_conflict=reject", {})):
        for name in cluster.names:
            again = cluster.ask(name, "POST", path + query, b"x", headers=headers)
            assert (again.status, again.json["id"]) == (409 if "reject" in query else 200, stored.json["id"])
    other = cluster.ask(cluster.leader(), "POST", path, b"x", headers={"Idempotency-Key": "another"})
    assert other.status == 429

    cluster.kill(cluster.leader())
    leader = cluster.leader()
    assert cluster.receive(leader, "few", max=10, wait="1s") == []
    assert cluster.receive(leader, "slow", wait="1s") == []
    assert cluster.ask(leader, "POST", "/v1/topics/slow/messages", b"x").status == 429
    waiting = cluster.later(cluster.receive, leader, "few", max=10, wait="20s", lease="10m")
    assert cluster.settle(leader, "ack", leased[:1]) == ["acked"]
    assert [m["id"] for m in waiting.result(30)] == ids[2:3]
    assert cluster.publish(leader, "few")

    assert cluster.ask(leader, "POST", "/v1/topics/slow:resume").status == 200
    assert len(cluster.receive(leader, "slow", wait="20s")) == 1


def test_a_rate_is_kept_by_waiting(cluster: Cluster) -> None:
    put(cluster, "paced", rate=10)
    cluster.publish_many(cluster.leader(), "paced", [str(n) for n in range(12)])
    began, came = time.monotonic(), 0
    while came < 12:
        came += len(cluster.receive(cluster.leader(), "paced", max=10, wait="5s"))
    # Eleven more after the first: 1.1 s at least, by the clock of the cluster.
    assert time.monotonic() - began > 1.0


def test_a_way_to_replicate_hand_outs_that_is_not_the_clusters_is_refused(cluster: Cluster) -> None:
    mine = cluster.ask(cluster.leader(), "PUT", "/v1/topics/modes", {"dispatch_sync": "commit"})
    other = cluster.ask(cluster.leader(), "PUT", "/v1/topics/modes", {"dispatch_sync": "interval"})
    assert (mine.status, other.status) == (200, 422)
    assert "dispatch.sync" in other.json["detail"]
