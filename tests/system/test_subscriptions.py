"""Subscriptions with real processes: two services get each message, over a failover, a restart and the snapshot of a
node that lost its disk; and commands for the published id."""

from __future__ import annotations

from tests.system.cluster import Cluster, until
from tests.system.conftest import Make
from tests.system.test_flow import put


def subscribe(cluster: Cluster, topic: str, name: str, **settings: object) -> dict[str, object]:
    answer = cluster.ask(cluster.leader(), "PUT", f"/v1/topics/{topic}/subscriptions/{name}", settings)
    assert answer.status == 200, answer.json
    return answer.json


def receive(cluster: Cluster, topic: str) -> dict[str, object]:
    (message,) = cluster.receive(cluster.leader(), topic, wait="5s", lease="10m", max=1)
    return message


def test_two_services_get_each_message(make_cluster: Make) -> None:
    cluster = make_cluster()
    put(cluster, "orders")
    assert subscribe(cluster, "orders", "billing", max_attempts=3)["topic"] == "orders~billing"
    subscribe(cluster, "orders", "vip", tags=["vip"])
    follower = next(name for name in cluster.names if name != cluster.leader())
    published = cluster.publish(follower, "orders", b"one", Hadelay_Tags="vip,eu")
    plain = cluster.publish(follower, "orders", b"two")

    own, billing = receive(cluster, "orders"), receive(cluster, "orders~billing")
    assert (own["id"], billing["published_id"], billing["body_base64"]) == (published, published, "b25l")
    found = cluster.ask(follower, "GET", f"/v1/messages/{published}").json
    assert {copy["topic"]: copy["state"] for copy in found["copies"]} == {
        "orders~billing": "leased", "orders~vip": "ready",
    }  # fmt: skip
    copy = cluster.ask(follower, "GET", f"/v1/messages/{billing['id']}").json
    assert (copy["topic"], copy["published_id"]) == ("orders~billing", published)
    late = cluster.ask(follower, "DELETE", f"/v1/messages/{published}")
    assert (late.status, late.json["outcome"]) == (409, "partial")
    assert late.json["outcomes"] == {"orders": "leased", "orders~billing": "leased", "orders~vip": "cancelled"}
    whole = cluster.ask(follower, "DELETE", f"/v1/messages/{plain}")
    assert whole.json == {"outcome": "cancelled", "outcomes": {"orders": "cancelled", "orders~billing": "cancelled"}}

    old = cluster.leader()
    cluster.kill(old)
    until(lambda: cluster.leader() != old, "another node leads")
    settled = cluster.ask(cluster.leader(), "POST", "/v1/leases:ack", {"leases": [own["lease"], billing["lease"]]})
    assert {one["outcome"] for one in settled.json["results"]} == {"acked"}
    later = cluster.publish(cluster.leader(), "orders", b"three", Hadelay_Delay="1h")
    cluster.restart(old)
    moved = cluster.ask(cluster.leader(), "POST", f"/v1/messages/{later}:deliver-now", {}).json
    assert moved["outcomes"] == {"orders": "rescheduled", "orders~billing": "rescheduled"}
    assert [receive(cluster, name)["body_base64"] for name in ("orders", "orders~billing")] == ["dGhyZWU="] * 2
    listed = cluster.ask(old, "GET", "/v1/topics/orders/subscriptions").json["topics"]
    assert [(one["topic"], one.get("tags")) for one in listed] == [("orders~billing", None), ("orders~vip", ["vip"])]


def test_a_subscription_begins_with_what_is_pending_over_a_failover(make_cluster: Make) -> None:
    cluster = make_cluster(settings=["dispatch.job_step=20"])
    put(cluster, "orders")
    old = cluster.leader()
    ids = cluster.publish_many(old, "orders", [f"{n}" for n in range(400)], delay="1h")
    subscribe(cluster, "orders", "late", **{"from": "pending"})
    cluster.kill(old)
    until(lambda: cluster.leader() != old, "another node leads")
    cluster.restart(old)

    def done() -> dict[str, object]:
        (job,) = cluster.ask(cluster.leader(), "GET", "/v1/jobs").json["jobs"]
        return job if job["state"] == "done" else {}

    job = until(done, "all messages are copied")
    assert (job["action"], job["subscription"], job["done"]) == ("fill", "orders~late", 400)
    assert cluster.ask(old, "GET", "/v1/topics/orders~late").json["scheduled"] == 400
    moved = cluster.ask(old, "POST", f"/v1/messages/{ids[7]}:deliver-now", {}).json
    assert moved["outcomes"] == {"orders": "rescheduled", "orders~late": "rescheduled"}
    copy = receive(cluster, "orders~late")
    assert (copy["published_id"], copy["body_base64"]) == (ids[7], "Nw==")
    found = cluster.ask(old, "GET", f"/v1/messages/{ids[7]}").json
    assert [(one["id"], one["topic"], one["state"]) for one in found["copies"]] == [
        (copy["id"], "orders~late", "leased")
    ]
    other = {"from": "pending"}
    assert cluster.ask(old, "PUT", "/v1/topics/orders", {"own_queue": False}).status == 200
    assert cluster.ask(old, "PUT", "/v1/topics/orders/subscriptions/other", other).status == 422
    assert cluster.ask(old, "PUT", "/v1/topics/orders/subscriptions/late", other).status == 200


def test_names_quotas_and_deletion(cluster: Cluster) -> None:
    leader = cluster.leader()
    put(cluster, "sales")
    assert cluster.ask(leader, "PUT", "/v1/topics/nothing/subscriptions/billing", {}).status == 404
    assert cluster.ask(leader, "PUT", "/v1/topics/sales/subscriptions/a~b", {}).status == 400
    assert cluster.ask(leader, "PUT", "/v1/topics/sales/subscriptions/a", {"from": "ever"}).status == 400
    assert cluster.ask(leader, "PUT", "/v1/topics/sales", {"tags": ["eu"]}).status == 400
    subscribe(cluster, "sales", "billing", max_messages=1)
    direct = cluster.ask(leader, "POST", "/v1/topics/sales~billing/messages", b"x")
    assert (direct.status, "subscription" in direct.json["detail"]) == (400, True)
    cluster.publish(leader, "sales", b"x", Hadelay_Delay="1h")
    full = cluster.ask(leader, "POST", "/v1/topics/sales/messages", b"x")
    assert (full.status, "subscription" in full.json["detail"]) == (429, True)
    assert subscribe(cluster, "sales", "billing", on_full="drop")["on_full"] == "drop"
    cluster.publish(leader, "sales", b"x", Hadelay_Delay="1h")
    found = cluster.ask(leader, "GET", "/v1/topics/sales/subscriptions/billing").json
    assert (found["scheduled"], found["dropped"]) == (1, 1)
    assert cluster.ask(leader, "DELETE", "/v1/topics/sales").status == 409
    assert cluster.ask(leader, "DELETE", "/v1/topics/sales/subscriptions/billing").status == 409
    assert cluster.ask(leader, "DELETE", "/v1/topics/sales/subscriptions/billing?force=true").status == 204
    assert cluster.ask(leader, "GET", "/v1/topics/sales/subscriptions").json["topics"] == []
    cluster.publish(leader, "sales", b"x")
    assert receive(cluster, "sales")["topic"] == "sales"
