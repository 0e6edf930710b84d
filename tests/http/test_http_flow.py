"""Tags asked for, pause and resume, as HTTP has them. What they do is in tests/handout/scenarios."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.conftest import Node

RECEIVE = "/v1/topics/orders/receive"


async def test_tags_reach_the_poll_trimmed_and_once(node: Node) -> None:
    query = {"tags": ["paid", " eu ", "paid"], "any_tags": ["a", "b"]}
    assert (await node.ask("POST", RECEIVE, query)).status == 200
    assert (await node.ask("POST", "/v1/receive", {"topics": ["x", "y"], "tags": ["z"]})).status == 200
    assert (await node.ask("POST", RECEIVE, {})).status == 200
    first, second, third = node.service.polls
    assert (first.tags, first.any_tags) == (("paid", "eu"), ("a", "b"))
    assert (second.topics, second.tags, second.any_tags) == (["x", "y"], ("z",), ())
    assert (third.tags, third.any_tags) == ((), ())


@pytest.mark.parametrize(
    ("query", "word"),
    [
        ({"tags": [f"t{n}" for n in range(17)]}, "tags: 17 given"),
        ({"any_tags": [f"t{n}" for n in range(17)]}, "tags: 17 given"),
        ({"tags": ["x" * 65]}, "64 bytes"),
        ({"any_tags": [""]}, "1 to"),
        ({"tags": ["a,b"]}, "commas"),
        ({"tags": "a"}, "expected a list"),
        ({"all_tags": ["a"]}, "all_tags"),
    ],
)
async def test_tags_that_are_none(node: Node, query: dict[str, Any], word: str) -> None:
    answer = await node.ask("POST", RECEIVE, query)
    assert answer.status == 400
    assert word in answer.json["detail"]
    assert not node.service.polls


async def test_pause_and_resume(node: Node) -> None:
    assert (await node.ask("POST", "/v1/topics/orders:pause")).status == 404
    await node.ask("PUT", "/v1/topics/orders", {"rate": 5})
    paused = await node.ask("POST", "/v1/topics/orders:pause", {"reason": "the receiver is down"})
    assert (paused.status, paused.json["paused"], paused.json["paused_reason"]) == (200, True, "the receiver is down")
    seen = (await node.ask("GET", "/v1/topics/orders")).json
    assert (seen["paused"], seen["rate"]) == (True, 5)
    resumed = await node.ask("POST", "/v1/topics/orders:resume")
    assert resumed.status == 200
    assert "paused" not in resumed.json
    assert "paused_reason" not in resumed.json


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"rate": 0}, "rate"),
        ({"rate": -1}, "rate"),
        ({"catch_up_rate": 1e9}, "catch_up_rate"),
        ({"publish_rate": "fast"}, "publish_rate"),
        ({"concurrency": 0}, "concurrency"),
        ({"max_messages": 0}, "max_messages"),
        ({"max_bytes": -1}, "max_bytes"),
    ],
)
async def test_limits_that_are_none(node: Node, config: dict[str, Any], word: str) -> None:
    answer = await node.ask("PUT", "/v1/topics/orders", config)
    assert answer.status == 400
    assert word in answer.json["detail"]
