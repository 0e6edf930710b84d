"""GET /v1/topics/{topic}/messages: what is asked, what is answered, and what is refused in words."""

from __future__ import annotations

import pytest

from tests.http.conftest import Node

T0 = "2030-01-01T00:00:00Z"
LIST = "/v1/topics/orders/messages"


async def publish(node: Node, *, at: str = T0, query: str = "", **headers: str) -> str:
    answer = await node.ask("POST", f"{LIST}{query}", b"x", Hadelay_Deliver_At=at, **headers)
    assert answer.status == 201, answer
    return answer.json["id"]


async def listed(node: Node, query: str = "") -> list[str]:
    answer = await node.ask("GET", LIST + query)
    assert answer.status == 200, answer
    return [message["id"] for message in answer.json["messages"]]


async def test_a_message_in_a_list_is_a_message_without_its_history(node: Node) -> None:
    sent = await publish(node, Hadelay_Tags="eu,paid", Hadelay_Meta_Shop="7", Content_Type="text/plain")
    [message] = (await node.ask("GET", LIST)).json["messages"]
    alone = (await node.ask("GET", f"/v1/messages/{sent}")).json
    assert "history" not in message
    assert message == {name: value for name, value in alone.items() if name != "history"}
    assert (message["tags"], message["state"], message["deliver_at"]) == (
        ["eu", "paid"],
        "scheduled",
        "2030-01-01T00:00:00.000Z",
    )


async def test_pages_follow_each_other_in_due_order(node: Node) -> None:
    ids = [await publish(node, at=f"2030-01-01T00:00:0{second}Z") for second in (3, 1, 4, 0, 2)]
    first = (await node.ask("GET", f"{LIST}?limit=2")).json
    second = (await node.ask("GET", f"{LIST}?limit=2&cursor={first['cursor']}")).json
    third = (await node.ask("GET", f"{LIST}?limit=2&cursor={second['cursor']}")).json
    found = [m["id"] for page in (first, second, third) for m in page["messages"]]
    assert found == [ids[3], ids[1], ids[4], ids[0], ids[2]]
    assert third["cursor"] is None


async def test_messages_of_all_topics_follow_each_other_in_due_order(node: Node) -> None:
    first = await publish(node, at="2030-01-01T00:00:01Z")
    other = await node.ask("POST", "/v1/topics/refunds/messages", b"x", Hadelay_Deliver_At=T0)
    last = await publish(node, at="2030-01-01T00:00:02Z")
    page = (await node.ask("GET", "/v1/messages?limit=2")).json
    assert [(m["id"], m["topic"]) for m in page["messages"]] == [(other.json["id"], "refunds"), (first, "orders")]
    rest = (await node.ask("GET", f"/v1/messages?limit=2&cursor={page['cursor']}")).json
    assert [m["id"] for m in rest["messages"]] == [last]
    ordered = (await node.ask("GET", "/v1/messages?prefix=ord")).json
    assert [m["id"] for m in ordered["messages"]] == [first, last]
    foreign = await node.ask("GET", f"/v1/messages?prefix=ord&cursor={page['cursor']}")
    assert (foreign.status, "other options" in foreign.json["detail"]) == (400, True)


async def test_states_range_and_tags(node: Node) -> None:
    early = await publish(node, at="2030-01-01T00:00:00Z", Hadelay_Tags="a,b")
    late = await publish(node, at="2030-01-01T01:00:00Z", Hadelay_Tags="a")
    gone = await publish(node)
    await node.ask("DELETE", f"/v1/messages/{gone}")
    assert await listed(node) == [early, late]
    assert await listed(node, "?state=cancelled") == [gone]
    assert await listed(node, "?state=scheduled,cancelled&to=2030-01-01T00:30:00Z") == [early, gone]
    assert await listed(node, "?state=all") == [early, gone, late]
    assert await listed(node, "?from=2030-01-01T00:00:00.001Z") == [late]
    assert await listed(node, "?tag=a") == [early, late]
    assert await listed(node, "?tag=a,b") == [early]


async def test_a_stale_list_says_how_stale(node: Node) -> None:
    await publish(node)
    answer = await node.ask("GET", f"{LIST}?stale=true")
    assert answer.headers["Hadelay-Applied"] == str(node.service.applied_index)


async def test_a_cursor_is_good_for_the_question_it_came_from_only(node: Node) -> None:
    for _ in range(3):
        await publish(node)
    cursor = (await node.ask("GET", f"{LIST}?limit=1")).json["cursor"]
    assert (await node.ask("GET", f"{LIST}?limit=2&cursor={cursor}")).status == 200
    answer = await node.ask("GET", f"{LIST}?state=acked&cursor={cursor}")
    assert answer.status == 400
    assert "other options" in answer.json["detail"]


REFUSED: list[tuple[str, str]] = [
    ("state=sheduled", "did you mean 'scheduled'?"),
    ("state=", "state: ''"),
    ("limit=0", "1 to 1000"),
    ("limit=1001", "1 to 1000"),
    ("limit=ten", "limit"),
    ("from=2030-01-02T00:00:00Z&to=2030-01-01T00:00:00Z", "to: must be after from"),
    ("from=1700000000", "seconds? use milliseconds"),
    ("tag=" + "x" * 65, "1 to 64 bytes"),
    ("tag=", "1 to 64 bytes"),
    ("cursor=nonsense", "cursor"),
    ("cursor=%C3%A9", "cursor"),
    ("stats=ready", "did you mean 'state'?"),
    ("state=ready&state=leased", "given twice"),
]


@pytest.mark.parametrize(("query", "words"), REFUSED, ids=[query[:20] for query, _ in REFUSED])
async def test_refused_in_words(node: Node, query: str, words: str) -> None:
    await publish(node)
    answer = await node.ask("GET", f"{LIST}?{query}")
    assert answer.status == 400
    assert words in answer.json["detail"]


async def test_a_topic_that_is_not_there(node: Node) -> None:
    assert (await node.ask("GET", "/v1/topics/nothing/messages")).status == 404


async def test_messages_that_wait_after_a_failed_attempt_are_listed_and_counted(node: Node) -> None:
    await publish(node)
    failed = (await node.ask("POST", LIST, b"y")).json["id"]
    taken = await node.ask("POST", "/v1/topics/orders/receive?redirect=false", {"wait": "5s"})
    lease = taken.json["messages"][0]["lease"]
    await node.ask("POST", "/v1/leases:nack", {"leases": [lease], "reason": "HTTP 503", "delay": "1h"})
    answer = await node.ask("GET", f"{LIST}?state=retrying")
    [message] = answer.json["messages"]
    last = message["retry"]["last"]
    assert (message["id"], message["state"], message["retry"]["attempt"]) == (failed, "scheduled", 2)
    assert (last["event"], last["attempt"], last["reason"]) == ("nacked", 1, "HTTP 503")
    assert (await node.ask("GET", f"/v1/messages/{failed}")).json["retry"] == message["retry"]
    assert (await node.ask("GET", "/v1/topics/orders")).json["retrying"] == 1
    job = {"action": "cancel", "filter": {"topic": "orders", "retrying": True, "error": "HTTP 500"}}
    assert (await node.ask("POST", "/v1/jobs:count", job)).json["matched"] == 1
    both = await node.ask("GET", f"{LIST}?state=retrying,scheduled&limit=1")
    assert (len(both.json["messages"]), both.json["cursor"] is None) == (1, False)
    other = await node.ask("GET", f"{LIST}?state=scheduled&cursor={both.json['cursor']}")
    assert other.status == 400, "the cursor is of another list"
