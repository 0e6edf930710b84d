"""What a person who was woken sees of a cluster of real processes: metrics, log lines, readiness, the story of a
message, a trace, and whether a node may stop."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hadelay.http.metrics import FAMILIES as HTTP_FAMILIES
from hadelay.server.metrics import FAMILIES
from tests.system.cluster import Cluster, hadelay, until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def on(cluster: Cluster, *words: object) -> Any:
    """A command, asked of the nodes that live."""
    return hadelay(*words, "--servers", ",".join(cluster.urls[name] for name in cluster.living))


def families(cluster: Cluster, name: str) -> dict[str, Any]:
    text = cluster.ask(name, "GET", "/metrics").body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_scrape_shows_every_family_with_its_labels(cluster: Cluster) -> None:
    cluster.publish_many("n1", "seen", ["a", "b"])
    until(lambda: cluster.receive(cluster.leader(), "seen", max=1, wait="1s"), "one is handed out")
    shown = families(cluster, cluster.leader())
    # Nobody called a webhook, or was refused, no group blocks a message, there are no certificates, shards or backup.
    unseen = {
        "hadelay_forwarded_requests_total",
        "hadelay_webhook_calls_total",
        "hadelay_http_denied_total",
        "hadelay_certificate_expiry_timestamp_seconds",
        "hadelay_raft_links_refused_total",
        "hadelay_topic_oldest_blocked_age_seconds",
        "hadelay_backup_age_seconds",
    }
    assert {name for name in shown if name.startswith("hadelay_")} == {
        family.name.removesuffix("_total")
        for family in (*FAMILIES.values(), *HTTP_FAMILIES)
        if family.name.startswith("hadelay_") and family.name not in unseen
    }
    for family in (*FAMILIES.values(), *HTTP_FAMILIES):
        found = shown.get(family.name.removesuffix("_total"))
        if family.name in unseen:
            continue
        assert found is not None, family.name
        assert (found.type, found.documentation) == (family.kind, family.help)
        assert {frozenset(sample.labels) - {"le"} for sample in found.samples} == {frozenset(family.labels)}


def lines(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in cluster.log(name).splitlines()]


def test_log_lines_are_of_changes_and_not_of_messages(cluster: Cluster) -> None:
    leader = cluster.leader()
    found = lines(cluster, leader)
    assert all({"event", "level", "timestamp", "node"} <= line.keys() for line in found)
    assert {line["node"] for line in found} == {leader}
    said = {line["event"]: line for line in found}
    assert {"starting", "ready", "link_up", "leads"} <= said.keys()
    assert isinstance(said["leads"]["term"], int)
    follower = next(name for name in cluster.names if name != leader)
    assert any(line["event"] == "follows" and line["leader"] == leader for line in lines(cluster, follower))
    cluster.publish_many(leader, "quiet", [f"m{n}" for n in range(200)])
    taken = cluster.drain("quiet", 200)
    cluster.settle(leader, "ack", taken)
    # A busy machine may change its leader meanwhile; that is a few lines.
    new = lines(cluster, leader)[len(found) :]
    assert len(new) < 20, new
    assert not any("quiet" in str(line) for line in new)


def test_readiness_says_how_it_stands(cluster: Cluster) -> None:
    leader = cluster.leader()
    for name in cluster.names:
        answer = cluster.ask(name, "GET", "/readyz?verbose")
        assert answer.status == 200
        checks = {check["name"]: check for check in answer.json["checks"]}
        assert checks.keys() == {"leader", "clock", "applied", "admitted", "space"}
        assert checks["leader"]["detail"].startswith(f"{leader} leads term ")
        assert checks["space"]["detail"].endswith("MiB are free")
        assert all(check["ok"] for check in checks.values())


def test_the_trace_of_a_message(cluster: Cluster) -> None:
    cluster.ask("n1", "PUT", "/v1/topics/told", {"backoff": ["100ms"], "max_attempts": 5})
    message = cluster.publish("n2", "told", b"pay 4711", "?delay=200ms&key=order-4711")
    first = cluster.receive("n1", "told", max=1, wait="10s", consumer="clumsy")
    cluster.settle("n3", "nack", first, reason="no connection")
    again = cluster.receive("n1", "told", max=1, wait="10s", consumer="careful")
    cluster.settle("n2", "ack", again)

    def same() -> Any:
        done = on(cluster, "trace", message, "-o", "json")
        return done if done.returncode == 0 else None

    reported = json.loads(until(same, "all nodes have heard of it").stdout)
    assert [entry["event"] for entry in reported["timeline"]] == [
        "published", "due", "leased", "nacked", "moved", "due", "leased", "acked",
    ]  # fmt: skip
    assert [entry.get("consumer") for entry in reported["timeline"] if entry["event"] == "leased"] == [
        "clumsy",
        "careful",
    ]
    assert reported["timeline"][3]["reason"] == "no connection"
    assert reported["message"]["state"] == "acked"
    assert reported["message"]["key"] == "order-4711"
    assert reported["topic"] == {"backoff": ["100ms"], "max_attempts": 5}
    assert [(node["node"], node["state"]) for node in reported["nodes"]] == [(name, "acked") for name in cluster.names]
    assert len(reported["places"]) == 2
    text = on(cluster, "trace", message).stdout
    for words in ("leased, attempt 1, by clumsy", "because: no connection", "acked", "filed first", "max_attempts"):
        assert words in text, text


def test_trace_of_an_unknown_message(cluster: Cluster) -> None:
    assert on(cluster, "trace", "07D7EG00000G0").returncode == 3


def test_top_once(cluster: Cluster) -> None:
    cluster.publish_many("n1", "crowded", [f"m{n}" for n in range(50)])
    done = on(cluster, "top", "--once", "--interval", "0.3", "-o", "json")
    assert done.returncode == 0, done.stderr
    look = json.loads(done.stdout)
    assert look["leader"] == cluster.leader()
    assert {node["node"]: node["role"] for node in look["nodes"]} == {
        name: "leader" if name == look["leader"] else "follower" for name in cluster.names
    }
    assert all(node["memory_mb"] > 10 and node["detail"] == "" for node in look["nodes"])
    assert look["topics"][0]["topic"] == "crowded"
    assert look["topics"][0]["ready"] == 50
    assert look["rates"]["published"] == 0
    text = on(cluster, "top", "--once", "--interval", "0.1").stdout
    assert "crowded" in text
    assert f"leader {look['leader']}" in text


def test_a_trace_goes_from_publish_to_delivery(cluster: Cluster) -> None:
    single = cluster.publish("n2", "traced", traceparent=TRACE)
    untraced = cluster.publish("n2", "traced")
    # A retry is a span of its own, and the same publish.
    again = cluster.publish("n2", "traced", traceparent=TRACE, Idempotency_Key="once")
    other = TRACE.replace("b7ad", "b7ae")
    assert cluster.publish("n3", "traced", traceparent=other, Idempotency_Key="once") == again
    items = [{"topic": "traced", "body": "a", "traceparent": other}, {"topic": "traced", "body": "b"}]
    answer = cluster.ask("n1", "POST", "/v1/messages:batch", items, headers={"traceparent": TRACE})
    batch = [result["id"] for result in answer.json["results"]]
    taken = {m["id"]: m for m in cluster.drain("traced", 5)}
    expected = {single: TRACE, untraced: None, again: TRACE, batch[0]: other, batch[1]: TRACE}
    assert {id: taken[id].get("traceparent") for id in expected} == expected
    assert cluster.describe("n3", single)["traceparent"] == TRACE


def test_the_files_of_all_nodes_are_checked_at_once(cluster: Cluster) -> None:
    cluster.publish("n1", "checked")
    done = on(cluster, "check", "files", "--now", "-o", "json")
    rows = json.loads(done.stdout)
    assert (done.returncode, [row["node"] for row in rows]) == (0, cluster.names)
    assert all(row["sound"] and row["rounds"] >= 1 and row["checked_at"] for row in rows)


# ---- at last: nodes end here


def may_stop(cluster: Cluster, *names: str) -> tuple[int, dict[str, bool]]:
    done = on(cluster, "check", "quorum", *names, "-o", "json")
    rows = json.loads(done.stdout)
    return done.returncode, {row["node"]: row["may_stop"] for row in rows}


def test_the_answer_whether_a_node_may_stop(cluster: Cluster) -> None:
    cluster.leader()
    until(lambda: may_stop(cluster) == (0, dict.fromkeys(cluster.names, True)), "any one may stop")
    gone = cluster.followers()[0]
    left = [name for name in cluster.names if name != gone]
    cluster.kill(gone)
    until(lambda: may_stop(cluster) == (0, {**dict.fromkeys(left, False), gone: True}), "none of those left may")
    assert may_stop(cluster, left[0])[0] == 1
    refused = cluster.ask(left[0], "GET", "/v1/health/quorum")
    assert refused.status == 409
    assert refused.json["left"] == [left[1]]
    assert on(cluster, "check", "quorum", "n9").returncode == 3
    cluster.restart(gone)
    until(lambda: may_stop(cluster) == (0, dict.fromkeys(cluster.names, True)), "any one may stop again")
    assert any(line["event"] == "link_down" and line["peer"] == gone for line in lines(cluster, left[0]))
