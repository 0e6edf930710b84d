"""Bulk jobs on real nodes: every message once, also when the leader dies half-way."""

from __future__ import annotations

from typing import Any

from hadelay.api.text import parse_instant
from tests.system.cluster import Cluster, until
from tests.system.conftest import Make
from tests.system.test_leader_lost import insist

DAY_MS = 86_400_000


def publish(cluster: Cluster, topic: str, count: int, **item: Any) -> None:
    batch = [{"topic": topic, "body": "x", "key": f"tenant-{n % 2}:{n}", **item} for n in range(count)]
    answer = insist(cluster, "POST", "/v1/messages:batch", batch)
    assert answer.status == 200, answer


def due(cluster: Cluster, topic: str, state: str = "pending") -> dict[str, int]:
    """Due time of each message, by its key."""
    found, cursor = {}, ""
    while True:
        path = f"/v1/topics/{topic}/messages?limit=1000&state={state}{cursor}"
        page = insist(cluster, "GET", path, None).json
        found |= {message["key"]: parse_instant("", message["deliver_at"]) for message in page["messages"]}
        if page["cursor"] is None:
            return found
        cursor = f"&cursor={page['cursor']}"


def ended(cluster: Cluster, job: dict[str, Any]) -> dict[str, Any]:
    def look() -> Any:
        found = insist(cluster, "GET", f"/v1/jobs/{job['id']}", None).json
        return found if found.get("ended_at") else None

    found: dict[str, Any] = until(look, "the job ends")
    return found


def test_a_shift_goes_on_when_the_leader_dies(make_cluster: Make) -> None:
    cluster = make_cluster()
    publish(cluster, "invoices", 1_000, delay="2h")
    before = due(cluster, "invoices")
    query = {
        "action": "reschedule", "filter": {"topic": "inv*", "key_prefix": "tenant-1:"}, "shift": "1d", "rate": 200,
        "request_id": "shift",
    }  # fmt: skip
    job = insist(cluster, "POST", "/v1/jobs", query).json
    until(
        lambda: cluster.ask(cluster.names[0], "GET", f"/v1/jobs/{job['id']}").json.get("done", 0) > 100,
        "it is half-way",
    )
    cluster.kill(cluster.leader())
    assert insist(cluster, "POST", "/v1/jobs", query).json["id"] == job["id"]
    publish(cluster, "invoices", 3, delay="2h", on_conflict="replace")  # not meant: it is newer than the job
    done = ended(cluster, job)
    assert done["state"] == "done"
    after = due(cluster, "invoices")
    assert after.keys() == before.keys()
    shifted = {key: after[key] - before[key] for key in before if int(key.partition(":")[2]) >= 3}
    assert {key.partition(":")[0]: ms for key, ms in shifted.items()} == {"tenant-0": 0, "tenant-1": DAY_MS}
    assert sorted(set(shifted.values())) == [0, DAY_MS]
    assert done["done"] in (499, 500)


def test_jobs_of_every_kind_through_a_follower(cluster: Cluster) -> None:
    node = cluster.followers()[0]
    publish(cluster, "kinds", 40, delay="3h", tags=["a"])
    publish(cluster, "kinds", 2, delay="5h", key=None)
    of = {"topic": "kinds", "tags": ["a"]}
    counted = cluster.ask(node, "POST", "/v1/jobs:count", {"action": "cancel", "filter": of}).json
    assert (counted["matched"], counted["leased"], counted["cursor"]) == (40, 0, None)
    to = {"action": "reschedule", "filter": of | {"key_prefix": "tenant-0:"}, "delay": "4h"}
    assert ended(cluster, cluster.ask(node, "POST", "/v1/jobs", to).json)["done"] == 20
    now = {"action": "deliver_now", "filter": of | {"key_prefix": "tenant-1:"}}
    assert ended(cluster, cluster.ask(node, "POST", "/v1/jobs", now).json)["done"] == 20
    assert ended(cluster, cluster.ask(node, "POST", "/v1/jobs", now).json)["done"] == 0
    leased = cluster.drain("kinds", 20)
    assert {message["key"].partition(":")[0] for message in leased} == {"tenant-1"}
    rest = ended(
        cluster, cluster.ask(node, "POST", "/v1/jobs", {"action": "cancel", "filter": {"topic": "kinds"}}).json
    )
    assert (rest["done"], rest["leased"]) == (22, 20)
    assert cluster.topic(node, "kinds")["scheduled"] == 0
    listed = cluster.ask(node, "GET", "/v1/jobs").json["jobs"]
    assert [job["action"] for job in listed][-4:] == ["reschedule", "deliver_now", "deliver_now", "cancel"]


def test_letters_are_redriven_by_tag(cluster: Cluster) -> None:
    node = cluster.names[0]
    cluster.ask(node, "PUT", "/v1/topics/letters", {"max_attempts": 1})
    for tag in ("a", "b"):
        publish(cluster, "letters", 3, tags=[tag], key=None)
    cluster.settle(node, "nack", cluster.drain("letters", 6))
    assert cluster.topic(node, "letters")["dead"] == 6
    query = {"action": "redrive", "filter": {"topic": "letters", "tags": ["b"]}}
    assert ended(cluster, cluster.ask(node, "POST", "/v1/jobs", query).json)["done"] == 3
    assert [message["tags"] for message in cluster.drain("letters", 3)] == [["b"]] * 3
    assert cluster.topic(node, "letters")["dead"] == 3
    letters = cluster.ask(node, "GET", "/v1/topics/letters/dead").json["messages"]
    ids = [letter["id"] for letter in letters]
    for of in ({"ids": ids[:1]}, {"error": "nacked"}):
        query = {"action": "delete_dead", "filter": {"topic": "letters", **of}}
        job = ended(cluster, cluster.ask(node, "POST", "/v1/jobs", query).json)
        assert job["done"] == (1 if "ids" in of else 2)
    assert cluster.topic(node, "letters")["dead"] == 0
    assert [cluster.ask(node, "GET", f"/v1/messages/{one}").status for one in ids] == [404] * 3


def test_jobs_by_group_and_schedule_go_on_when_the_leader_dies(make_cluster: Make) -> None:
    """The blocked messages of a group are meant, too; and each message of a schedule, also of a backfill."""
    cluster = make_cluster()
    assert insist(cluster, "PUT", "/v1/topics/lots", {"group_concurrency": 1}).status == 200
    for group in ("a", "b"):
        publish(cluster, "lots", 300, delay="2h", group=group, key=None, tags=[group])
    query = {"topic": "lots", "every": "1h", "body": "x", "tags": ["made"]}
    assert insist(cluster, "PUT", "/v1/schedules/hourly", query).status == 200
    past = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-11T00:00:00Z"}
    assert len(insist(cluster, "POST", "/v1/schedules/hourly:backfill", past).json["results"]) == 240
    node = cluster.names[0]

    def left() -> dict[str, int]:
        filters: dict[str, Any] = {"a": {"group": "a"}, "b": {"group": "b"}, "made": {"schedule": "hourly"}}
        asked = {name: {"action": "cancel", "filter": {"topic": "lots", **of}} for name, of in filters.items()}
        return {name: insist(cluster, "POST", "/v1/jobs:count", body).json["matched"] for name, body in asked.items()}

    assert left() == {"a": 300, "b": 300, "made": 240}
    by_group = {"action": "cancel", "filter": {"topic": "lots", "group": "a"}, "rate": 200, "request_id": "a"}
    job = insist(cluster, "POST", "/v1/jobs", by_group).json
    until(lambda: cluster.ask(node, "GET", f"/v1/jobs/{job['id']}").json.get("done", 0) > 50, "it is half-way")
    cluster.kill(cluster.leader())
    assert insist(cluster, "POST", "/v1/jobs", by_group).json["id"] == job["id"]
    assert ended(cluster, job)["done"] == 300
    assert left() == {"a": 0, "b": 300, "made": 240}
    by_schedule = {"action": "cancel", "filter": {"topic": "lots", "schedule": "hourly"}}
    assert ended(cluster, insist(cluster, "POST", "/v1/jobs", by_schedule).json)["done"] == 240
    assert left() == {"a": 0, "b": 300, "made": 0}
    topic = insist(cluster, "GET", "/v1/topics/lots", None).json
    assert (topic["scheduled"], topic["blocked"], topic["ready"]) == (1, 299, 0)
