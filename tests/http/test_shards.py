"""Routes of the shard map, and what a publish to another shard's topic gets."""

from __future__ import annotations

from typing import Any

from tests.http.conftest import Node

MAP: dict[str, Any] = {
    "version": 1,
    "shards": {"0": {"group": 0}, "1": {"group": 1}},
    "rules": [{"pattern": "b*", "shards": [1]}, {"pattern": "*", "shards": [0]}],
}


async def test_a_map_is_put_in_two_steps_and_publishes_obey_it(node: Node) -> None:
    alone = {"group": 0, "cluster_id": "default", "current": None, "prepared": None, "shard": None, "suspended": False}
    assert (await node.ask("GET", "/v1/shards")).json | {"cluster_id": "default"} == alone
    await node.ask("POST", "/v1/topics/a/messages", b"x")
    wrong = await node.ask("PUT", "/v1/shards", {"step": "commit", "map": MAP})
    assert (wrong.status, "not prepared" in wrong.json["detail"]) == (409, True)
    prepared = await node.ask("PUT", "/v1/shards", {"step": "prepare", "map": MAP})
    assert (prepared.json["current"], prepared.json["prepared"]["version"]) == (None, 1)
    names = (await node.ask("GET", "/v1/shards/names")).json
    assert names == {"prepared": 1, "topics": ["a"], "targets": [], "next": None}
    committed = await node.ask("PUT", "/v1/shards", {"step": "commit", "map": MAP | {"pinned": {"b-1": 0}}})
    assert (committed.json["shard"], committed.json["current"]["pinned"]) == (0, {"b-1": 0})
    answers = [await node.ask("POST", f"/v1/topics/{name}/messages", b"x") for name in ("a", "b", "b-1")]
    assert [answer.status for answer in answers] == [201, 503, 201]
    # The node would forward it, and the map names no node of shard 1.
    assert (answers[1].json["type"], answers[1].json["retryable"]) == ("no-leader", True)
    assert "shard 1" in answers[1].json["detail"]
    refused = await node.ask("PUT", "/v1/topics/a", {"dead_letter": "b-dead"})
    assert (refused.status, "belongs to shard 1" in refused.json["detail"]) == (422, True)


async def test_a_cluster_without_a_map_has_no_shard_to_name(node: Node) -> None:
    for method, path in (("GET", "/v1/topics?shard=0"), ("POST", "/v1/topics/a/messages?delay=1h&shard=0")):
        refused = await node.ask(method, path, b"x" if method == "POST" else None)
        assert (refused.status, "has no shard map: leave the shard out" in refused.json["detail"]) == (400, True)


async def test_wrong_maps_are_refused_in_words(node: Node) -> None:
    wrong = await node.ask("PUT", "/v1/shards", {"step": "prepare", "map": MAP | {"rules": MAP["rules"][:1]}})
    assert (wrong.status, "last rule must have the pattern *" in wrong.json["detail"]) == (400, True)
    wrong = await node.ask("GET", "/v1/shards/names?after=x")
    assert (wrong.status, "is not the `next` of a page" in wrong.json["detail"]) == (400, True)
