"""What a person who was woken sees of a cluster of real processes: metrics, log lines, readiness, the story of a
message, a trace, and whether a node may stop."""

from __future__ import annotations

import json
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hadelay.http.metrics import FAMILIES as HTTP_FAMILIES
from hadelay.server.families import FAMILIES
from tests.system.cluster import Cluster, until


def families(cluster: Cluster, name: str) -> dict[str, Any]:
    text = cluster.ask(name, "GET", "/metrics").body.decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_scrape_shows_every_family_with_its_labels(cluster: Cluster) -> None:
    cluster.publish_many("n1", "seen", ["a", "b"])
    until(lambda: cluster.receive(cluster.leader(), "seen", max=1, wait="1s"), "one is handed out")
    shown = families(cluster, cluster.leader())
    # Nobody called a webhook.
    unseen = {"hadelay_webhook_calls_total"}
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
    held = cluster.drain("quiet", 200)
    cluster.settle(leader, "ack", held)
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
