"""Message groups with real processes: one at a time over a failover and over a restart, and what they refuse."""

from __future__ import annotations

from tests.system.cluster import Cluster, until
from tests.system.conftest import Make
from tests.system.test_flow import put


def test_one_at_a_time_over_a_failover(make_cluster: Make) -> None:
    cluster = make_cluster(settings=("dispatch.sweep_ms=1000",))
    put(cluster, "lines", group_concurrency=1)
    ids = [cluster.publish(name, "lines", b"%d" % n, Hadelay_Group="a/b") for n, name in enumerate(cluster.names)]
    other = cluster.publish(cluster.leader(), "lines", b"x", Hadelay_Group="c")
    first = cluster.receive(cluster.leader(), "lines", max=10, lease="10m", consumer="billing-7")
    assert [m["id"] for m in first] == [ids[0], other]
    assert first[0]["group"] == "a/b"

    old = cluster.leader()
    cluster.kill(old)
    until(lambda: cluster.leader() != old, "another node leads")
    leader = cluster.leader()
    assert cluster.receive(leader, "lines", max=10, wait="200ms") == []
    topic = cluster.ask(leader, "GET", "/v1/topics/lines").json
    assert (topic["leased"], topic["blocked"], topic["scheduled"] + topic["ready"]) == (2, 2, 0)
    for name in cluster.living:  # the leader knows the age, and another node asks it

        def waits(name: str = name) -> bool:
            age_ms = cluster.ask(name, "GET", "/v1/topics/lines").json.get("oldest_blocked_age_ms")
            return age_ms is not None and 0 < age_ms < 120_000

        until(waits, f"{name} shows how long a message has waited behind its group")
    found = cluster.ask(leader, "GET", "/v1/topics/lines/groups/a%2Fb").json
    (head,) = found["heads"]
    assert (found["blocked"], head["id"], head["state"], head["consumer"]) == (2, ids[0], "leased", "billing-7")
    (leased,) = cluster.ask(leader, "GET", f"/v1/messages/{ids[0]}").json["history"]
    assert (leased["event"], head["since"]) == ("leased", leased["at"])
    moved = cluster.ask(leader, "POST", f"/v1/messages/{ids[2]}:deliver-now", {})
    assert moved.json["blocked"] is True
    assert cluster.ask(leader, "GET", f"/v1/messages/{ids[2]}").json["state"] == "blocked"
    listed = cluster.ask(leader, "GET", "/v1/topics/lines/messages?state=blocked").json["messages"]
    assert [m["id"] for m in listed] == ids[1:]

    cluster.ask(leader, "POST", "/v1/leases:ack", {"leases": [m["lease"] for m in first]})
    (head,) = cluster.ask(leader, "GET", "/v1/topics/lines/groups/a%2Fb").json["heads"]
    assert (head["id"], head["state"], head["since"], "consumer" in head) == (
        ids[1],
        "ready",
        head["deliver_at"],
        False,
    )
    cluster.restart(old)
    for expected in ids[1:]:
        (message,) = cluster.receive(leader, "lines", max=10, wait="5s")
        assert message["id"] == expected
        cluster.ask(leader, "POST", "/v1/leases:ack", {"leases": [message["lease"]]})
    assert cluster.ask(leader, "GET", "/v1/topics/lines/groups/a%2Fb").status == 404


def test_refusals(cluster: Cluster) -> None:
    leader = cluster.leader()

    def change(topic: str, **config: object) -> tuple[int, str]:
        answer = cluster.ask(leader, "PUT", f"/v1/topics/{topic}", config)
        return answer.status, answer.json.get("detail", "")

    status, detail = change("steps", group_concurrency=1, max_attempts=0)
    assert (status, "max_attempts" in detail) == (422, True)
    assert change("steps", group_concurrency=33)[0] == 400
    cluster.publish(leader, "steps", b"1", Hadelay_Group="g")
    status, detail = change("steps", group_concurrency=1)
    assert (status, "pending" in detail) == (409, True)
    (message,) = cluster.receive(leader, "steps", wait="5s")
    cluster.ask(leader, "POST", "/v1/leases:ack", {"leases": [message["lease"]]})
    assert change("steps", group_concurrency=1)[0] == 200
    tagged = cluster.ask(leader, "POST", "/v1/topics/steps/receive", {"tags": ["red"]})
    assert (tagged.status, "tags" in tagged.json["detail"]) == (409, True)
    assert cluster.ask(leader, "POST", "/v1/topics/steps/messages?group=", b"x").status == 400
