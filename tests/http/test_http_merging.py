"""Requests that all shards answer: lists become one, names are found in whatever shard has them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hadelay.http import merging
from hadelay.http.access import Authenticator
from hadelay.http.app import ROUTES
from hadelay.settings.node import SecurityConfig
from tests.http.conftest import HERE, THERE, Make, Node, give, map_of, publish, receive, until

#: Due time of messages that wait, and query of a publish with it.
AT = "2030-01-01T00:30:00.000Z"
WAITS = f"?deliver_at={AT}"


async def everything(
    node: Node, path: str, member: str, limit: int, visit: Callable[[], Any] = lambda: None
) -> list[dict[str, Any]]:
    """Rows of all pages of a list."""
    rows, cursor = list[dict[str, Any]](), None
    for _ in range(200):
        sign = "&" if "?" in path else "?"
        page = await node.ask("GET", f"{path}{sign}limit={limit}" + (f"&cursor={cursor}" if cursor else ""))
        assert page.status == 200, page.json
        assert len(page.json[member]) <= limit
        rows += page.json[member]
        if (cursor := page.json["cursor"]) is None:
            return rows
        visit()
    raise AssertionError("the pages do not end")


async def test_lists_are_merged_over_the_shards(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    for topic in ("z", THERE, HERE, "far.b"):
        await publish(front, topic, query="?deliver_at=2030-01-01T00:30:00Z")
    for node in shards:
        for names in ({}, {"Accept": "application/msgpack"}):
            answer = await node.ask("GET", "/v1/topics", **names)
            document = answer.json or msgspec.msgpack.decode(answer.body)
            assert [topic["topic"] for topic in document["topics"]] == ["far.b", THERE, HERE, "z"]
            assert "missing" not in document
        due = await node.ask("GET", "/v1/due?from=2030-01-01T00:00:00Z&to=2030-01-01T02:00:00Z&step=1h")
        assert [bucket["count"] for bucket in due.json["buckets"]] == [4]
    one = await front.ask("GET", "/v1/topics?shard=1&prefix=far")
    assert {topic["topic"] for topic in one.json["topics"]} == {"far.b", THERE}
    assert one.headers["Hadelay-Shard"] == "1"
    assert {topic["topic"] for topic in (await front.ask("GET", "/v1/topics?shard=0")).json["topics"]} == {HERE, "z"}
    give(front, map_of(front, "http://127.0.0.1:1"))
    refused = await front.ask("GET", "/v1/topics")
    assert refused.status == 503
    assert "shard 1" in refused.json["detail"]
    part = (await front.ask("GET", "/v1/topics?partial=true")).json
    assert ([topic["topic"] for topic in part["topics"]], part["missing"]) == ([HERE, "z"], [1])
    assert owner.server.forwarder.counts["answered"] > 0
    give(front, map_of(front, owner))
    assert {(topic["topic"], topic["shard"]) for topic in (await owner.ask("GET", "/v1/topics")).json["topics"]} == {
        (HERE, 0), ("z", 0), (THERE, 1), ("far.b", 1)
    }  # fmt: skip


async def test_a_shard_without_an_answer_is_named_whichever_shard_is_asked(shards: tuple[Node, Node]) -> None:
    """Also if it is the asked one, whose own part has no leader."""
    front, _ = shards
    await publish(front, THERE, query=WAITS)
    for path, member in (
        ("topics", "topics"), ("messages", "messages"), ("schedules", "schedules"), ("jobs", "jobs"),
        ("groups", "groups"), ("tokens", "tokens"),
    ):  # fmt: skip
        give(front, map_of(front, "http://127.0.0.1:1"))
        refused = await front.ask("GET", f"/v1/{path}")
        assert (refused.status, refused.json["type"]) == (503, "no-leader"), path
        assert "shard 1" in refused.json["detail"]
        part = await front.ask("GET", f"/v1/{path}?partial=true")
        assert (part.status, part.json["missing"], part.json[member]) == (200, [1], []), path


async def test_the_asked_shard_may_be_the_missing_one(make_node: Make) -> None:
    front, owner = await make_node(lost=True, no_leader_wait_ms=20), await make_node(group=1)
    for node in (front, owner):
        give(node, map_of(front, owner))
    await publish(owner, THERE, query=WAITS)
    refused = await front.ask("GET", "/v1/topics")
    assert (refused.status, refused.json["detail"].startswith("shard 0: ")) == (503, True)
    part = (await front.ask("GET", "/v1/topics?partial=true")).json
    assert ([topic["topic"] for topic in part["topics"]], part["missing"]) == ([THERE], [0])


async def test_a_wrong_request_is_refused_as_by_one_shard(shards: tuple[Node, Node]) -> None:
    for query in ("limit=0", "cursor=?", "state=nonsense", "from=2&to=1", "nonsense=1", "partial=true&limit=-1"):
        refused = await shards[0].ask("GET", f"/v1/messages?{query}")
        assert refused.status in (400, 422), refused.json
        assert "shard" not in refused.json["detail"]


async def test_a_value_that_looks_like_a_choice_of_a_shard_chooses_none(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    for topic in (HERE, THERE):
        await publish(front, topic, query=f"{WAITS}&tags=shard=1")
    for node in shards:
        found = (await node.ask("GET", "/v1/messages?tag=shard=1")).json["messages"]
        assert [row["topic"] for row in found] == [HERE, THERE]
    # The same for what belongs to the shard of its topic.
    document = {"action": "cancel", "filter": {"topic": HERE, "tags": ["shard=1"]}}
    assert (await owner.ask("POST", "/v1/jobs:count?shard=0", document)).json["matched"] == 1
    assert (await owner.ask("POST", "/v1/jobs:count", document)).json["matched"] == 1


# --- pages


async def check_pages_of_messages(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    numbers, expected = count(), list[str]()
    for n in range(14):
        topic = (HERE, THERE, "far.more", THERE)[n % 4]
        at = f"2030-01-01T00:{n // 3:02}:00Z"
        expected.append((await publish(front, topic, b"%d" % next(numbers), f"?deliver_at={at}")).json["id"])
    for node in shards:
        whole = (await node.ask("GET", "/v1/messages")).json
        assert whole["cursor"] is None
        assert "cursors" not in whole
        order = [(row["deliver_at"], row["id"]) for row in whole["messages"]]
        assert order == sorted(order)
        assert {row["id"] for row in whole["messages"]} == set(expected)
        assert {(row["topic"].startswith("far"), row["shard"]) for row in whole["messages"]} == {(False, 0), (True, 1)}
        for limit in (1, 2, 3, 7, 14):
            assert await everything(node, "/v1/messages", "messages", limit) == whole["messages"]
        far = await everything(node, "/v1/messages?prefix=far.&state=scheduled", "messages", 4)
        assert far == [row for row in whole["messages"] if row["topic"].startswith("far.")]


async def test_pages_of_messages_are_in_due_order_over_all_shards(shards: tuple[Node, Node]) -> None:
    await check_pages_of_messages(shards)


def check_short_pages() -> None:
    """A shard's page may end before its limit, even without rows, if its search costs too much."""
    draw = random.Random(1)
    for _ in range(200):
        shards = [sorted(draw.sample(range(100), draw.randrange(20))) for _ in range(3)]
        rows = sorted(3 * one + n for n, shard in enumerate(shards) for one in shard)
        found, cursor, limit = list[int](), -1, draw.randrange(1, 6)
        while True:
            lists, given = merging.Lists(), list[tuple[str, msgspec.Raw]]()
            for n, shard in enumerate(shards):
                behind = [number for one in shard if (number := 3 * one + n) > cursor]
                some = behind[: draw.randrange(limit + 1)]
                end = some[-1] if some else min(cursor + 10, 300)
                more = len(some) < len(behind)
                end = min(end, behind[len(some)] - 1) if more else end
                lists[n] = {"cursor": msgspec.Raw(b'"%06d"' % end if more else b"null")}
                given += [(f"{number:06}", msgspec.Raw(b"%d" % number)) for number in some]
            call: Any = SimpleNamespace(query=SimpleNamespace(limit=limit), decode=decode)
            page = merging.page(given, lists, call, str.encode)
            found += [int(bytes(row)) for row in page.rows]
            if page.cursor is None:
                break
            assert int(page.cursor) >= cursor
            cursor = int(page.cursor)
        assert found == rows


def decode(data: Any, kind: Any) -> Any:
    return msgspec.json.decode(data, type=kind)


def test_short_pages_skip_and_repeat_nothing() -> None:
    check_short_pages()


def test_a_page_that_goes_on_behind_another_shard_s_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deliberate bug."""

    def last(ends: Any, key: Any, default: Any) -> Any:
        return max(ends, key=key, default=default)

    monkeypatch.setattr(merging, "min", last, raising=False)
    with pytest.raises(AssertionError):
        check_short_pages()


async def test_messages_that_end_meanwhile_hide_no_other(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    made = [
        (await publish(front, topic, query=f"?deliver_at=2030-01-01T00:00:{n:02}Z")).json["id"]
        for n, topic in enumerate([HERE, THERE] * 5)
    ]
    first = (await front.ask("GET", "/v1/messages?limit=3&cursors=true")).json
    assert first["cursors"][-1] == first["cursor"]
    for one in made[:5]:
        assert (await front.ask("DELETE", f"/v1/messages/{one}")).status == 200
    rest = (await front.ask("GET", f"/v1/messages?cursor={first['cursor']}")).json["messages"]
    assert [row["id"] for row in rest] == made[5:]
    again = (await front.ask("GET", f"/v1/messages?cursor={first['cursors'][0]}&limit=2")).json["messages"]
    assert [row["id"] for row in again] == made[5:7]


@pytest.mark.parametrize("cursors", ["true", "false", None])
async def test_cursors_of_a_list_are_shown_to_those_who_ask_for_them(
    shards: tuple[Node, Node], cursors: str | None
) -> None:
    front, _ = shards
    for topic in (HERE, THERE):
        await publish(front, topic, query=f"{WAITS}&tags=cursors=true")
    for query in ("tag=cursors=true", "tag=cursors%3Dtrue", "limit=2"):
        asked = query if cursors is None else f"{query}&cursors={cursors}"
        for given in (asked, asked.replace("&cursors", "&%63ursors")):
            answer = await front.ask("GET", f"/v1/messages?{given}")
            assert answer.status == 200, answer.json
            assert [row["topic"] for row in answer.json["messages"]] == [HERE, THERE]
            assert len(answer.json.get("cursors", ())) == (2 if cursors == "true" else 0)


async def test_due_and_dead_messages_are_listed_over_all_shards(shards: tuple[Node, Node]) -> None:
    """The order of a list is not that of deliver_at alone: dead letters come last."""
    front, _ = shards
    for topic in (HERE, THERE, HERE, THERE):
        await publish(front, topic)
    for node, topic in zip(shards, (HERE, THERE), strict=True):
        (got,) = await receive(node, topic, {"max": 1})
        await front.ask("POST", "/v1/leases:nack", {"leases": [got["lease"]], "dead": True})
    for limit in (1, 2, 3):
        rows = await everything(front, "/v1/messages?state=all", "messages", limit)
        assert sorted((row["topic"], row["state"]) for row in rows) == [
            (THERE, "dead"), (THERE, "ready"), (HERE, "dead"), (HERE, "ready")
        ]  # fmt: skip
        assert [row["state"] for row in rows] == ["ready", "ready", "dead", "dead"]


@pytest.mark.parametrize("form", ["json", "msgpack"])
async def test_messages_in_either_form(shards: tuple[Node, Node], form: str) -> None:
    front, _ = shards
    for topic in (THERE, HERE):
        await publish(front, topic, query=WAITS)
    answer = await front.ask("GET", "/v1/messages?limit=2", Accept=f"application/{form}")
    document = answer.json or msgspec.msgpack.decode(answer.body)
    assert ([row["topic"] for row in document["messages"]], document["cursor"]) == ([HERE, THERE], None)


# --- schedules


def schedule(topic: str, **more: Any) -> dict[str, Any]:
    return {"topic": topic, "cron": "0 0 1 1 *", "body": "x", **more}


async def test_schedules_are_set_in_the_shard_of_their_topic(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    for name, topic in (("near", HERE), ("a.far~one", THERE), ("z", THERE), ("b", HERE)):
        put = await front.ask("PUT", f"/v1/schedules/{name}", schedule(topic))
        assert (put.status, put.headers["Hadelay-Shard"]) == (200, "1" if topic == THERE else "0"), put.json
    for node in shards:
        listed = (await node.ask("GET", "/v1/schedules")).json
        assert ([row["schedule"] for row in listed["schedules"]], listed["cursor"]) == (
            ["a.far~one", "b", "near", "z"], None
        )  # fmt: skip
        for limit in (1, 2, 3):
            assert await everything(node, "/v1/schedules", "schedules", limit) == listed["schedules"]
        found = await node.ask("GET", "/v1/schedules/z")
        assert (found.status, found.json["topic"], found.headers["Hadelay-Shard"]) == (200, THERE, "1")
        assert (await node.ask("GET", "/v1/schedules/z/topic")).json == {"topic": THERE}
        paused = await node.ask("POST", "/v1/schedules/z:pause", {})
        assert (paused.status, paused.json["state"]) == (200, "paused")
        assert (await node.ask("POST", "/v1/schedules/z:resume", {})).json["state"] == "active"
        for path in ("", "/topic"):
            missing = await node.ask("GET", f"/v1/schedules/nobody{path}")
            assert (missing.status, missing.json["detail"]) == (404, "there is no schedule 'nobody'")
        assert (await node.ask("POST", "/v1/schedules/nobody:pause", {})).status == 404
    ran = [await front.ask("POST", "/v1/schedules/z:trigger", {}, Idempotency_Key="k") for _ in range(2)]
    assert [answer.status for answer in ran] == [201, 200]
    assert ran[0].json["id"] == ran[1].json["id"]
    past = {"from": "2020-01-01T00:00:00Z", "to": "2022-01-01T00:00:00Z"}
    assert len((await front.ask("POST", "/v1/schedules/z:backfill", past)).json["results"]) == 2
    for node in shards:
        assert (await node.ask("DELETE", "/v1/schedules/z")).status == 204
    assert (await owner.ask("GET", "/v1/schedules?shard=1")).json["schedules"][0]["schedule"] == "a.far~one"


async def test_a_name_of_a_schedule_is_taken_in_all_shards(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    assert (await front.ask("PUT", "/v1/schedules/nightly", schedule(THERE))).status == 200
    for node in shards:
        moved = await node.ask("PUT", "/v1/schedules/nightly", schedule(HERE))
        assert (moved.status, moved.json["type"]) == (409, "conflict")
        assert "is in shard 1, and topic 'orders' belongs to shard 0" in moved.json["detail"]
    assert (await owner.ask("PUT", "/v1/schedules/nightly", schedule("far.other"))).status == 200
    await twin(front)
    both = await front.ask("GET", "/v1/schedules/nightly")
    assert (both.status, "shards 0, 1" in both.json["detail"]) == (409, True)
    assert (await front.ask("GET", "/v1/schedules/nightly?shard=1")).json["topic"] == "far.other"
    assert (await front.ask("DELETE", "/v1/schedules/nightly")).status == 204
    assert (await front.ask("GET", "/v1/schedules/nightly")).status == 404


async def twin(front: Node) -> None:
    """Set a schedule in the first shard whose name another shard has, as two requests at the same time may leave it."""
    assert (await front.ask("PUT", "/v1/schedules/nightly?shard=0", schedule(HERE))).status == 200


async def test_a_name_in_two_shards_is_changed_in_neither(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    assert (await front.ask("PUT", "/v1/schedules/nightly", schedule(THERE))).status == 200
    await twin(front)
    past = {"from": "2020-01-01T00:00:00Z", "to": "2022-01-01T00:00:00Z"}
    for node in shards:
        for change, body in (("trigger", {}), ("pause", {}), ("resume", {}), ("backfill", past)):
            refused = await node.ask("POST", f"/v1/schedules/nightly:{change}", body, Idempotency_Key=change)
            assert (refused.status, refused.json["type"]) == (409, "conflict"), change
            assert "shards 0, 1" in refused.json["detail"]
            assert "?shard=" in refused.json["detail"]
    for shard in (0, 1):
        found = (await front.ask("GET", f"/v1/schedules/nightly?shard={shard}")).json
        assert (found["state"], found["last"]) == ("active", [])
    made = await front.ask("POST", "/v1/schedules/nightly:trigger?shard=1", {})
    assert (made.status, made.headers["Hadelay-Shard"]) == (201, "1")


async def test_a_name_in_two_shards_is_listed_twice(shards: tuple[Node, Node]) -> None:
    """Schedules of one name have one cursor: a page never ends between them, even beyond its limit."""
    front, _ = shards
    for name, topic in (("a", HERE), ("nightly", THERE), ("z", THERE)):
        assert (await front.ask("PUT", f"/v1/schedules/{name}", schedule(topic))).status == 200
    await twin(front)
    for limit, pages in ((1, [1, 2, 1]), (2, [3, 1]), (3, [3, 1]), (4, [4])):
        rows, cursor, sizes = list[Any](), "", list[int]()
        while cursor is not None:
            page = (await front.ask("GET", f"/v1/schedules?limit={limit}&cursor={cursor}")).json
            rows += page["schedules"]
            sizes.append(len(page["schedules"]))
            cursor = page["cursor"]
        assert [(row["schedule"], row["topic"]) for row in rows] == [
            ("a", HERE), ("nightly", HERE), ("nightly", THERE), ("z", THERE)
        ]  # fmt: skip
        assert sizes == pages, limit


async def test_a_deletion_without_the_right_is_refused_and_deletes_nothing(shards: tuple[Node, Node]) -> None:
    """Also not the schedule of another shard that the token may delete."""
    front, _ = shards
    assert (await front.ask("PUT", "/v1/schedules/far", schedule(THERE))).status == 200
    assert (await front.ask("PUT", "/v1/schedules/nightly", schedule(THERE))).status == 200
    await twin(front)
    made = await front.ask("POST", "/v1/tokens", {"name": "clerk", "scopes": [f"publish:{HERE}", f"read:{HERE}"]})
    only = {"Authorization": f"Bearer {made.json['token']}"}
    config = SecurityConfig(tokens=True)
    for node in shards:
        server = node.server
        server.authenticator = Authenticator(node.service.access, config, time.monotonic, server.forget_heads)
    for node in shards:
        for name in ("far", "nightly"):
            refused = await node.ask("DELETE", f"/v1/schedules/{name}", **only)
            assert (refused.status, refused.json["type"], refused.json["outcome_known"]) == (403, "forbidden", True)
        assert (await node.ask("DELETE", "/v1/schedules/nobody", **only)).status == 204
        for change in ("pause", "trigger"):
            assert (await node.ask("POST", f"/v1/schedules/far:{change}", {}, **only)).status == 403
    assert (await front.ask("GET", "/v1/schedules/nightly?shard=0", **only)).status == 200
    assert (await front.ask("DELETE", "/v1/schedules/nightly?shard=0", **only)).status == 204


async def test_a_change_after_the_schedule_is_deleted_is_answered_as_before(shards: tuple[Node, Node]) -> None:
    """The shard remembers the answer under the Idempotency-Key, and no shard has the name any more."""
    front, owner = shards
    assert (await front.ask("PUT", "/v1/schedules/z", schedule(THERE))).status == 200
    made = await front.ask("POST", "/v1/schedules/z:trigger", {}, Idempotency_Key="k")
    assert (await front.ask("DELETE", "/v1/schedules/z")).status == 204
    for node in (front, owner):
        again = await node.ask("POST", "/v1/schedules/z:trigger", {}, Idempotency_Key="k")
        assert (again.status, again.json["id"], again.json["duplicate"]) == (200, made.json["id"], True)


async def test_a_schedule_of_a_shard_without_an_answer(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    assert (await front.ask("PUT", "/v1/schedules/near", schedule(HERE))).status == 200
    give(front, map_of(front, "http://127.0.0.1:1"))
    assert (await front.ask("GET", "/v1/schedules/near")).status == 200
    assert (await front.ask("POST", "/v1/schedules/near:pause", {})).status == 200
    for method, path, body in (
        ("GET", "far", None), ("POST", "far:pause", {}), ("POST", "far:trigger", {}),
        ("PUT", "new", schedule(HERE)), ("PUT", "new", schedule(THERE)),
    ):  # fmt: skip
        refused = await front.ask(method, f"/v1/schedules/{path}", body)
        assert (refused.status, refused.json["outcome_known"]) == (503, True), path
        assert "shard 1" in refused.json["detail"]
    gone = await front.ask("DELETE", "/v1/schedules/near")
    assert (gone.status, gone.json["outcome_known"]) == (504, False)
    part = (await front.ask("GET", "/v1/schedules?partial=true")).json
    assert part == {"schedules": [], "cursor": None, "missing": [1]}


# --- jobs


async def test_jobs_go_to_the_shard_of_their_topics(shards: tuple[Node, Node]) -> None:
    front, owner = shards
    for topic in (HERE, THERE, "far.more"):
        await publish(front, topic, query="?delay=1h")
    document = {"action": "cancel", "filter": {"topic": "far.*"}}
    counted = await front.ask("POST", "/v1/jobs:count", document)
    assert (counted.status, counted.json["matched"], counted.headers["Hadelay-Shard"]) == (200, 2, "1")
    begun = await front.ask("POST", "/v1/jobs", document)
    assert (begun.status, begun.json["id"]) == (202, 10**12 + 1), begun.json
    assert begun.headers["Location"] == f"/v1/jobs/{10**12 + 1}"
    near = await owner.ask("POST", "/v1/jobs", {"action": "cancel", "filter": {"topic": HERE}})
    assert (near.status, near.json["id"]) == (202, 1)
    ledgers = [node.service.raft_node.ledger for node in shards]
    await until(lambda: all(job.ended_ms for ledger in ledgers for job in ledger.jobs.values()))
    for node in shards:
        for number, done in ((1, 1), (10**12 + 1, 2)):
            assert (await node.ask("GET", f"/v1/jobs/{number}")).json["done"] == done
            assert (await node.ask("DELETE", f"/v1/jobs/{number}")).json["id"] == number
        for number in (2, 10**12, 10**12 + 2, 2 * 10**12 + 1, "x", 10**20, "-1"):
            assert (await node.ask("GET", f"/v1/jobs/{number}")).status == 404, number
        listed = (await node.ask("GET", "/v1/jobs")).json["jobs"]
        assert [job["id"] for job in listed] == [10**12 + 1, 1]
        alone = (await node.ask("GET", "/v1/jobs?shard=1")).json["jobs"]
        assert [job["id"] for job in alone] == [10**12 + 1]
    audited = [entry.target for entry in await owner.service.access.audit(0, 100)]
    assert str(10**12 + 1) in audited


async def test_a_job_over_several_shards_must_name_one(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    await publish(front, THERE, query="?delay=1h")
    for path in ("/v1/jobs", "/v1/jobs:count"):
        document = {"action": "cancel", "filter": {"topic": "*"}}
        refused = await front.ask("POST", path, document)
        assert (refused.status, refused.json["type"]) == (422, "impossible")
        assert "the shards 0, 1" in refused.json["detail"]
        assert "?shard=" in refused.json["detail"]
        assert (await front.ask("POST", f"{path}?shard=1", document)).status in (200, 202)


# --- tokens and groups


async def test_tokens_are_listed_once_with_the_shards_that_lack_them(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    for name, query in (("both", ""), ("near", "?shard=0"), ("far", "?shard=1")):
        assert (await front.ask("POST", f"/v1/tokens{query}", {"name": name, "scopes": ["read:*"]})).status == 201
    for node in shards:
        rows = (await node.ask("GET", "/v1/tokens")).json["tokens"]
        assert {row["name"]: row.get("missing") for row in rows} == {"both": None, "near": [1], "far": [0]}


async def test_groups_are_merged_or_go_to_the_owner_of_the_topic(shards: tuple[Node, Node]) -> None:
    front, _ = shards
    for topic in (HERE, THERE):
        assert (await front.ask("PUT", f"/v1/topics/{topic}", {"group_concurrency": 1})).status == 200
        for _ in range(2):
            await publish(front, topic, query="?group=g")
    for node in shards:
        both = (await node.ask("GET", "/v1/groups")).json
        assert ({row["topic"] for row in both["groups"]}, both["complete"]) == ({HERE, THERE}, True)
        one = await node.ask("GET", f"/v1/groups?topic={THERE}")
        assert ([row["topic"] for row in one.json["groups"]], one.headers["Hadelay-Shard"]) == ([THERE], "1")


def test_each_route_over_many_topics_says_what_it_does_with_several_shards() -> None:
    """A new route that lists or changes what no path names must not answer for one shard alone."""
    named = ("{topic}", "{id}", "{job}")
    silent = {
        route.name
        for route in ROUTES.all
        if route.own_topics and route.shards is None and not any(name in route.path for name in named)
    }
    divided, sent = {"publish_batch", "ack", "nack", "extend"}, {"receive_topics"}
    assert silent == divided | sent | {"preview_schedule", "attention", "consumers"}, "the last ones are of the node"
