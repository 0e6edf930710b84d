"""Limits of the schedule routes: a request that no schedule can have is refused in words, never by a fault."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hadelay.client.types import Occurrence
from hadelay.codec.commands import encode_topic_put
from hadelay.model import State
from tests.http.conftest import Make, Node

YEAR_10000 = 253_402_300_800_000


@pytest.fixture
async def node(make_node: Make) -> Node:
    return await make_node()


async def put(node: Node, name: str = "s", query: str = "", **wish: Any) -> Any:
    return await node.ask("PUT", f"/v1/schedules/{name}{query}", {"topic": "t", "body": 1, **wish})


@pytest.mark.parametrize(
    ("status", "named", "wish"),
    [
        (400, "start", {"every": "1h", "start": "1969-12-31T00:00:00Z"}),
        (400, "end", {"every": "1h", "end": YEAR_10000}), (400, "at", {"at": [YEAR_10000]}),
        (400, "at", {"at": ["1960-01-01T00:00:00Z", "2100-01-01T00:00:00Z"]}), (400, "every", {"every": 0.5}),
        (400, "every", {"every": 999_999_999_999}), (400, "at", {"at": []}),
        (400, "jitter", {"every": 9, "jitter": 3601}),
        (400, "catch_up_window", {"every": "1h", "catch_up_window": 999_999_999_999}),
        (400, "max_occurrences", {"every": "1h", "max_occurrences": 10**15}),
        (400, "max_occurrences", {"every": "1h", "max_occurrences": 10**30}), (400, "cron", {"cron": "1 " * 128}),
        (422, "no future", {"cron": "* * * * *", "start": "9999-12-31T23:00:00Z"}),
        (422, "no future", {"cron": "0 0 1 1 *", "start": "9998-06-01T00:00:00Z", "timezone": "Europe/Vienna"}),
        (400, "ttl: must be more than 0", {"every": "1h", "ttl": "0s"}),
        (422, "ttl: 731d is beyond max_delay", {"every": "1h", "ttl": "731d"}),
        (400, "by one of", {"every": 9, "cron": "* * * * *"}), (400, "by one of", {}),
    ],
)  # fmt: skip
async def test_a_schedule_that_cannot_be_is_refused_by_name(node: Node, status: int, named: str, wish: Any) -> None:
    answer = await put(node, **wish)
    assert (answer.status, named in answer.json["detail"]) == (status, True), answer.json
    assert (await node.ask("GET", "/v1/schedules")).json["schedules"] == []


@pytest.mark.parametrize("wish", [
    {"every": "2900000d"}, {"cron": "0 0 29 2 *", "start": "9890-01-01T00:00:00Z", "timezone": "Europe/Vienna"},
    {"every": "100000d"}, {"at": ["9899-01-01T00:00:00Z"]}, {"cron": "0 0 1 1 *", "start": "1970-01-01T00:00:00Z"},
])  # fmt: skip
async def test_the_far_end_of_time_can_be_shown(node: Node, wish: Any) -> None:
    answer = await put(node, **wish)
    assert answer.status in (200, 422), answer.json
    assert (await node.ask("GET", "/v1/schedules/s")).status == (404 if answer.status == 422 else 200)
    assert (await node.ask("GET", "/v1/schedules")).status == 200
    assert (await node.ask("POST", "/v1/schedules:preview", {**wish, "count": 100})).status == 200


@pytest.mark.parametrize("version", [-1, 2**32 - 1, 2**32, 10**30])
async def test_a_version_that_no_schedule_has(node: Node, version: int) -> None:
    answer = await put(node, "s", f"?version={version}", every="1h")
    assert (answer.status, "version" in answer.json["detail"]) == (400, True), answer.json


@pytest.mark.parametrize("after", ["0001-01-01T00:00:00Z", "9999-12-31T00:00:00Z", 10**15 - 1])
@pytest.mark.parametrize("times", [{"every": "1h"}, {"cron": "0 9 * * *", "timezone": "Europe/Vienna"}])
async def test_a_preview_outside_of_the_calendar(node: Node, times: Any, after: Any) -> None:
    answer = await node.ask("POST", "/v1/schedules:preview", {**times, "after": after})
    assert (answer.status, "after" in answer.json["detail"]) == (422, True), answer.json


async def test_a_backfill_from_the_first_moment_of_unix_time(node: Node) -> None:
    """Occurrence 0 would mean now, and is no occurrence of a backfill."""
    assert (await put(node, every="1h")).status == 200
    for start in ("1970-01-01T00:00:00Z", "0001-01-01T00:00:00Z"):
        answer = await node.ask("POST", "/v1/schedules/s:backfill", {"from": start, "to": "1970-01-01T02:00:01Z"})
        assert (answer.status, len(answer.json["results"])) == (200, 2), answer.json


@pytest.mark.parametrize("end", ["2026-01-01T00:00:00Z", "2025-12-31T00:00:00Z"])
async def test_a_backfill_of_an_empty_range_is_refused(node: Node, end: str) -> None:
    assert (await put(node, every="1h")).status == 200
    answer = await node.ask("POST", "/v1/schedules/s:backfill", {"from": "2026-01-01T00:00:00Z", "to": end})
    assert (answer.status, answer.json["detail"]) == (422, "to: must be after from")


async def test_schedules_whose_long_names_begin_alike_do_not_wait_for_each_other(node: Node) -> None:
    node.service.schedules._node.propose(encode_topic_put("t", {"group_concurrency": 1}), lambda *_: None)
    groups = []
    for name in ("short", "x" * 119, "x" * 119 + ".a", "x" * 119 + ".b"):
        answer = await put(node, name, every="1h", overlap="wait")
        assert answer.status == 200, answer.json
        groups.append(answer.json["group"])
    assert groups[:2] == ["schedule.short", "schedule." + "x" * 119]
    assert len(set(groups)) == 4
    assert {len(group) for group in groups[1:]} == {128}


async def test_a_backfill_of_large_messages_is_taken_in_parts(node: Node) -> None:
    assert (await put(node, every="1m", body="x" * 60_000)).status == 200
    day = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T10:00:00Z"}
    answer = await node.ask("POST", "/v1/schedules/s:backfill", day)
    assert answer.status == 422
    assert "more than 69 occurrences" in answer.json["detail"], answer.json
    hour = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T01:00:00Z"}
    answer = await node.ask("POST", "/v1/schedules/s:backfill", hour)
    assert (answer.status, len(answer.json["results"])) == (200, 60)


@pytest.mark.parametrize("state", [*State, "gone"])
def test_the_client_knows_every_state_of_an_occurrence(state: str) -> None:
    document = {"at": "2026-01-01T00:00:00Z", "id": "1", "state": state}
    assert msgspec.json.decode(msgspec.json.encode(document), type=Occurrence).state == state
