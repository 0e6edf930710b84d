"""Bulk jobs over HTTP: a request, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest

from hadelay.api.jobs import JobCount
from hadelay.api.service import Actor
from hadelay.codec.jobcommands import JobCursor, JobSpec
from hadelay.rights import Rights
from hadelay.rules.access import RequestRights
from tests.http.conftest import Node


async def publish(node: Node, *options: str, topic: str = "orders") -> None:
    for option in options:
        answer = await node.ask("POST", f"/v1/topics/{topic}/messages?delay=1h&{option}", b"x")
        assert answer.status == 201, answer.json


def job(action: str = "cancel", /, topic: str = "orders", **change: Any) -> dict[str, Any]:
    return {"action": action, "filter": {"topic": topic}, **change}


async def test_a_job_is_begun_and_looked_at_and_stopped(node: Node) -> None:
    await publish(node, "key=7:1&tags=a", "key=7:2", "key=8:1")
    query = {
        "action": "reschedule", "shift": "-1d", "rate": 50.5,
        "filter": {
            "topic": "ord*", "tags": ["a"], "key_prefix": "7:", "group": "g", "schedule": "s",
            "from": "2026-11-20T18:00:00Z", "to": 1_900_000_000_000,
        },
    }  # fmt: skip
    answer = await node.ask("POST", "/v1/jobs", query)
    assert (answer.status, answer.headers["Location"]) == (202, "/v1/jobs/1")
    begun = answer.json
    of = query["filter"] | {"from": "2026-11-20T18:00:00.000Z", "to": "2030-03-17T17:46:40.000Z"}
    assert (begun["action"], begun["filter"], begun["shift"], begun["rate"]) == ("reschedule", of, "-1d", 50.5)
    assert (await node.ask("GET", "/v1/jobs/1")).json["filter"] == of
    (listed,) = (await node.ask("GET", "/v1/jobs?stale=true")).json["jobs"]
    assert (listed["id"], listed["filter"]) == (1, of)
    slow = await node.ask("POST", "/v1/jobs", job("deliver_now", rate=1))
    stopped = await node.ask("DELETE", slow.headers["Location"])
    assert (stopped.status, stopped.json["state"]) == (200, "stopped")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"shift": "1d"}, {"shift": "1d"}), ({"shift": "+1d2h"}, {"shift": "1d2h"}),
        ({"shift": " -90m "}, {"shift": "-1h30m"}), ({"shift": -1.5}, {"shift": "-1s500ms"}),
        ({"shift": 60}, {"shift": "1m"}), ({"deliver_at": 0}, {"deliver_at": "1970-01-01T00:00:00.000Z"}),
        ({"deliver_at": "2026-11-20T18:00:00Z"}, {"deliver_at": "2026-11-20T18:00:00.000Z"}),
        ({"delay": "15m"}, {"delay": "15m"}),
    ],
)  # fmt: skip
async def test_a_change_in_words(node: Node, change: dict[str, Any], expected: dict[str, str]) -> None:
    await publish(node, "key=a")
    answer = await node.ask("POST", "/v1/jobs", job("reschedule", **change))
    assert answer.status == 202, answer.json
    assert {name: answer.json[name] for name in ("shift", "delay", "deliver_at") if name in answer.json} == expected


async def test_dead_letters_are_named_by_id_and_by_error(node: Node) -> None:
    await publish(node, "key=a")
    of = {"topic": "orders", "ids": ["0000000000005", "0000000000005"], "error": "after 30 s"}
    begun = await node.ask("POST", "/v1/jobs", {"action": "delete_dead", "filter": of, "rate": 5})
    assert (begun.status, begun.json["filter"]) == (202, of | {"ids": ["0000000000005"]})
    assert (begun.json["action"], begun.json["rate"]) == ("delete_dead", 5.0)
    for ids in (["x"], ["0000000000005"] * 201):
        answer = await node.ask("POST", "/v1/jobs", {"action": "redrive", "filter": {"topic": "orders", "ids": ids}})
        assert answer.status == 400


async def test_a_repeated_request_begins_no_second_job(node: Node) -> None:
    await publish(node, "key=a")
    first, again = [await node.ask("POST", "/v1/jobs", job(request_id="r1")) for _ in range(2)]
    assert first.json["id"] == again.json["id"]
    assert len((await node.ask("GET", "/v1/jobs")).json["jobs"]) == 1


async def test_counts_come_in_parts(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    async def count(spec: JobSpec, after: JobCursor) -> tuple[JobCount[str], JobCursor | None]:
        """A part of a count that takes longer than a second, and its last part."""
        assert (spec.key_prefix, after in ((0, 0), (7, 1))) == ("a:", True)
        return JobCount(1, 0, None, None, 0.5 if after == (0, 0) else 1.0, None), (7, 1) if after == (0, 0) else None

    monkeypatch.setattr(node.service.jobs, "count", count)
    query = {"action": "cancel", "filter": {"topic": "orders", "key_prefix": "a:"}}
    first = await node.ask("POST", "/v1/jobs:count", query)
    assert (first.status, first.json["matched"], first.json["leased"]) == (200, 1, 0)
    second = await node.ask("POST", "/v1/jobs:count", query | {"cursor": first.json["cursor"]})
    assert (second.json["matched"], second.json["cursor"], second.json["progress"]) == (1, None, 1.0)
    other = await node.ask("POST", "/v1/jobs:count", job(cursor=first.json["cursor"]))
    assert (other.status, "a count with other options" in other.json["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("query", "status", "hint"),
    [
        (job("pause"), 400, "action"), (job(topic="no topic"), 400, "topic"), (job(topic="no topic*"), 400, "pattern"),
        (job("reschedule", shift="later"), 400, "shift"), (job("reschedule", shift=True), 400, "shift"),
        (job(request_id=""), 400, "request_id"), (job(request_id="é" * 33), 400, "request_id"),
        ({"action": "cancel", "filter": {}}, 400, "topic"), (job(topic="nobody"), 404, "nobody"),
        ({"action": "cancel", "filter": {"topic": "orders", "tag": "a"}}, 400, "tag"),
        ({"action": "cancel", "filter": {"topic": "orders", "tags": ["a,b"]}}, 400, "tag"),
        ({"action": "cancel", "filter": {"topic": "orders", "to": 10**15 - 1}}, 400, "filter.to"),
        ({"action": "cancel", "filter": {"topic": "orders", "to": "9999-12-31T23:59:59-01:00"}}, 400, "filter.to"),
        ({"action": "cancel", "filter": {"topic": "orders", "from": "1969-12-31T23:59:59Z"}}, 400, "filter.from"),
    ],
)  # fmt: skip
async def test_jobs_that_cannot_be_meant(node: Node, query: dict[str, Any], status: int, hint: str) -> None:
    await publish(node, "key=a")
    answer = await node.ask("POST", "/v1/jobs", query)
    assert (answer.status, hint in answer.json["detail"]) == (status, True), answer.json


@pytest.mark.parametrize("path", ["/v1/jobs/7", "/v1/jobs/seven", "/v1/jobs/99999999999"])
async def test_there_is_no_such_job(node: Node, path: str) -> None:
    assert (await node.ask("GET", path)).status == 404
    assert (await node.ask("DELETE", path)).status == 404


@pytest.mark.parametrize("cursor", ["xyz", "", "00", "00" * 13])
async def test_cursors_that_no_count_answered(node: Node, cursor: str) -> None:
    await publish(node, "key=a")
    assert (await node.ask("POST", "/v1/jobs:count", job(cursor=cursor))).status == 400


@pytest.mark.parametrize(
    ("scopes", "topic", "action", "allowed"),
    [
        (("publish:orders-*",), "orders-eu", "cancel", True), (("publish:orders-*",), "orders-*", "reschedule", True),
        (("publish:orders-*",), "orders*", "cancel", False), (("publish:orders-*",), "*", "cancel", False),
        (("publish:orders-*",), "orders-eu", "redrive", False), (("admin:orders-*",), "orders-e*", "redrive", True),
        (("publish:orders-*",), "orders-eu", "delete_dead", False),
        (("publish",), "**", "deliver_now", True), (("read",), "orders-eu", "cancel", False),
        (("publish:*-eu",), "*-eu", "cancel", True), (("publish:*-eu",), "a*-eu", "cancel", True),
        (("publish:a*c",), "a*b*c", "cancel", True), (("publish:a*b*c",), "a*c", "cancel", False),
    ],
)  # fmt: skip
async def test_a_token_has_to_cover_all_that_a_pattern_means(
    node: Node, monkeypatch: pytest.MonkeyPatch, scopes: tuple[str, ...], topic: str, action: str, allowed: bool
) -> None:
    for name in ("orders-eu", "a-eu", "abc"):
        await publish(node, "key=a", topic=name)
    rights = RequestRights(Actor("0" * 12, "shop"), Rights((*scopes, "read")))
    monkeypatch.setattr(node.server, "admit", lambda route, path, headers: rights)
    answer = await node.ask("POST", "/v1/jobs", job(action, topic, **({"delay": 5} if action == "reschedule" else {})))
    assert answer.status == (202 if allowed else 403), answer.json
