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


async def put(node: Node, name: str = "s", query: str = "", **options: Any) -> Any:
    return await node.ask("PUT", f"/v1/schedules/{name}{query}", {"topic": "t", "body": 1, **options})


@pytest.mark.parametrize(
    ("status", "named", "options"),
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
        (400, "exactly one of", {"every": 9, "cron": "* * * * *"}), (400, "exactly one of", {}),
    ],
)  # fmt: skip
async def test_a_schedule_that_cannot_be_is_refused_by_name(node: Node, status: int, named: str, options: Any) -> None:
    answer = await put(node, **options)
    assert (answer.status, named in answer.json["detail"]) == (status, True), answer.json
    assert (await node.ask("GET", "/v1/schedules")).json["schedules"] == []


@pytest.mark.parametrize("options", [
    {"every": "2900000d"}, {"cron": "0 0 29 2 *", "start": "9890-01-01T00:00:00Z", "timezone": "Europe/Vienna"},
    {"every": "100000d"}, {"at": ["9899-01-01T00:00:00Z"]}, {"cron": "0 0 1 1 *", "start": "1970-01-01T00:00:00Z"},
])  # fmt: skip
async def test_the_far_end_of_time_can_be_shown(node: Node, options: Any) -> None:
    answer = await put(node, **options)
    assert answer.status in (200, 422), answer.json
    assert (await node.ask("GET", "/v1/schedules/s")).status == (404 if answer.status == 422 else 200)
    assert (await node.ask("GET", "/v1/schedules")).status == 200
    assert (await node.ask("POST", "/v1/schedules:preview", {**options, "count": 100})).status == 200


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
    node.service.schedules._node.publishing.propose(encode_topic_put("t", {"group_concurrency": 1}), lambda *_: None)
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


async def test_an_uneven_step_is_warned_of_and_a_refusal_names_its_field(node: Node) -> None:
    answers = [
        await put(node, cron="*/90 * * * *"),
        await node.ask("POST", "/v1/schedules:preview", {"cron": "*/90 * * * *"}),
    ]
    for answer in answers:
        assert answer.status == 200, answer.json
        assert [text[:12] for text in answer.json["warnings"]] == ["minute */90:"]
        assert answer.json["times"] == "At the start of every hour, UTC"
    refused = await put(node, cron="0 0 15W * *")
    assert (refused.status, "day of the month '15W'" in refused.json["detail"]) == (400, True), refused.json


PAST = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T03:00:00Z"}
LONG = {"from": "2026-01-01T00:00:00Z", "to": "2026-11-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("verb", "body", "status", "spec"),
    [
        ("trigger", {}, 404, None), ("backfill", PAST, 404, None), ("backfill", LONG, 422, {"every": "1h"}),
    ],
)  # fmt: skip
async def test_a_refusal_for_good_is_remembered_under_the_key(
    node: Node, verb: str, body: Any, status: int, spec: Any
) -> None:
    """The first try may lie in the socket of a paused node, and arrive when the reason of the refusal is gone."""
    path = f"/v1/schedules/s:{verb}"
    assert spec is None or (await put(node, **spec)).status == 200
    refused = await node.ask("POST", path, body, Idempotency_Key="k")
    assert (refused.status, refused.json["retryable"]) == (status, False)
    # The reason of the refusal is gone: there is a schedule, with few occurrences in the range.
    assert (await put(node, every="30d" if body is LONG else "30m")).status == 200
    late = await node.ask("POST", path, body, Idempotency_Key="k")
    assert 400 <= late.status < 500, late.json
    assert (await node.ask("GET", "/v1/schedules/s")).json["manual"] == 0
    assert (await node.ask("POST", path, body, Idempotency_Key="new")).status in (200, 201)


@pytest.mark.parametrize(("verb", "body"), [("trigger", {}), ("backfill", PAST)])
async def test_the_answer_under_a_key_outlives_its_schedule(node: Node, verb: str, body: Any) -> None:
    path = f"/v1/schedules/s:{verb}"
    assert (await put(node, every="1h")).status == 200
    first = await node.ask("POST", path, body, Idempotency_Key="k")
    assert first.status in (200, 201)
    assert (await put(node, every="30m")).status == 200
    assert _ids(await node.ask("POST", path, body, Idempotency_Key="k")) == _ids(first)
    assert (await node.ask("DELETE", "/v1/schedules/s")).status == 204
    assert _ids(await node.ask("POST", path, body, Idempotency_Key="k")) == _ids(first)
    assert (await node.ask("POST", path, body, Idempotency_Key="new")).status == 404


async def test_a_repeated_backfill_gets_its_first_answer_whatever_times_the_schedule_has_now(node: Node) -> None:
    """Also if a quota stopped the first one, and if the range has fewer occurrences now, or none."""
    path = "/v1/schedules/s:backfill"
    assert (await put(node, every="30m")).status == 200
    first = await node.ask("POST", path, PAST, Idempotency_Key="whole")
    assert len(_ids(first)) == 6
    assert (await node.ask("PUT", "/v1/topics/t", {"max_messages": 11})).status == 200
    stopped = await node.ask("POST", path, PAST, Idempotency_Key="stopped")
    assert (stopped.status, stopped.json["made"], stopped.json["go_on"][11:16]) == (429, 5, "02:30")
    for change in ({"every": "30d", "start": "2020-01-01T00:00:00Z"}, {"every": "1h"}, {"every": "20m"}, None):
        if change is None:
            assert (await node.ask("DELETE", "/v1/schedules/s")).status == 204
        else:
            assert (await put(node, **change)).status == 200
        assert _ids(await node.ask("POST", path, PAST, Idempotency_Key="whole")) == _ids(first)
        again = (await node.ask("POST", path, PAST, Idempotency_Key="stopped")).json
        assert (again["status"], again["retryable"], again["made"]) == (429, False, 5), (change, again)
        assert "5 of 6 occurrences are made" in again["detail"]
        assert "go_on" not in again


async def test_a_backfill_that_makes_nothing_is_not_remembered(node: Node) -> None:
    assert (await put(node, every="30d", start="2020-01-01T00:00:00Z")).status == 200
    assert _ids(await node.ask("POST", "/v1/schedules/s:backfill", PAST, Idempotency_Key="k")) == []
    assert (await put(node, every="1h")).status == 200
    assert len(_ids(await node.ask("POST", "/v1/schedules/s:backfill", PAST, Idempotency_Key="k"))) == 3


def _ids(answer: Any) -> list[str]:
    assert answer.status in (200, 201), answer.json
    return [one["id"] for one in answer.json.get("results", [answer.json])]
