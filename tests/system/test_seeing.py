"""What a person who was woken sees of a cluster of real processes: metrics, log lines, readiness, the story of a
message, a trace, and whether a node may stop."""

from __future__ import annotations

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
