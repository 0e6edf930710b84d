"""Dead letters and purges over HTTP: a request, and what comes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from tests.http.conftest import Node, kill, receive, state_of


async def letters(node: Node, count: int, topic: str = "orders") -> list[str]:
    ids = []
    for _ in range(count):
        answer = await node.ask("POST", f"/v1/topics/{topic}/messages", b"hello", Hadelay_Meta_a="1")
        assert answer.status == 201
        ids.append(await kill(node, topic))
    return ids


async def test_dead_letters_come_in_pages_with_what_went_wrong(node: Node) -> None:
    ids = await letters(node, 5)
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        answer = await node.ask("GET", f"/v1/topics/orders/dead?limit=2&body=true{cursor}")
        assert answer.status == 200
        found += answer.json["messages"]
        if answer.json["cursor"] is None:
            break
        cursor = f"&cursor={answer.json['cursor']}"
    assert [letter["id"] for letter in found] == ids
    assert found[0]["state"] == "dead"
    assert found[0]["meta"] == {"a": "1"}
    assert found[0]["body_base64"] == "aGVsbG8="
    (error,) = found[0]["errors"]
    assert error == {"event": "nacked", "at": error["at"], "attempt": 1, "reason": "no"}
    answer = await node.ask("GET", "/v1/topics/orders/dead?stale=true")
    assert "body_base64" not in answer.json["messages"][0]
    assert answer.headers["Hadelay-Applied"] == str(node.service.applied_index)


async def test_redriving_some_says_what_became_of_each(node: Node) -> None:
    dead, other = await letters(node, 2)
    waiting = (await node.ask("POST", "/v1/topics/orders/messages?delay=1h", b"x")).json["id"]
    answer = await node.ask(
        "POST", "/v1/topics/orders/dead:redrive", {"ids": [dead, waiting, "0000000000000", dead.lower()]}
    )
    assert answer.status == 202
    assert [r["outcome"] for r in answer.json["results"]] == ["redriven", "scheduled", "not_found", "redriven"]
    assert [r["id"] for r in answer.json["results"]] == [dead, waiting, "0000000000000", dead]
    assert await state_of(node, other) == "dead"


async def test_a_key_that_is_taken_is_not_redriven(node: Node) -> None:
    path = "/v1/topics/orders/messages?key=k"
    await node.ask("POST", path, b"x")
    dead = await kill(node)
    await node.ask("POST", path, b"y")
    answer = await node.ask("POST", "/v1/topics/orders/dead:redrive", {"ids": [dead]})
    assert (answer.status, answer.json) == (202, {"results": [{"id": dead, "outcome": "key_taken"}]})


async def test_redriving_all_begins(node: Node) -> None:
    ids = await letters(node, 3)
    answer = await node.ask("POST", "/v1/topics/orders/dead:redrive", {"all": True, "rate": 2.5})
    assert (answer.status, answer.json) == (202, {"redriving": 3})
    node.service.runtime.move(2)
    while (await node.ask("GET", "/v1/topics/orders/dead")).json["messages"]:
        pass
    assert [await state_of(node, one) for one in ids] == ["ready"] * 3


async def test_purges(node: Node) -> None:
    ids = await letters(node, 2)
    waiting = (await node.ask("POST", "/v1/topics/orders/messages?delay=1h", b"x")).json["id"]
    answer = await node.ask("POST", "/v1/topics/orders:purge", {"states": ["ready", "scheduled", "ready"]})
    assert (answer.status, answer.json) == (202, {"topic": "orders", "states": ["ready", "scheduled"]})
    assert [await state_of(node, one) for one in (*ids, waiting)] == ["dead", "dead", "cancelled"]
    answer = await node.ask("DELETE", "/v1/topics/orders/dead")
    assert answer.status == 204
    assert (await node.ask("GET", "/v1/topics/orders/dead")).json["messages"] == []


async def test_a_nack_may_say_why(node: Node) -> None:
    made = (await node.ask("POST", "/v1/topics/orders/messages", b"x")).json["id"]
    (got,) = await receive(node)
    answer = await node.ask("POST", "/v1/leases:nack", {"leases": [got["lease"]], "reason": "HTTP 503"})
    assert answer.status == 200
    history = (await node.ask("GET", f"/v1/messages/{made}")).json["history"]
    assert [event["reason"] for event in history if event["event"] == "nacked"] == ["HTTP 503"]
    answer = await node.ask("POST", "/v1/leases:nack", {"leases": ["x"], "reason": "ä" * 65})
    assert answer.status == 400


async def test_a_nack_may_end_a_message_as_dead(node: Node) -> None:
    await node.ask("POST", "/v1/topics/orders/messages", b"x")
    dead = await kill(node, reason="no such customer")
    (letter,) = (await node.ask("GET", "/v1/topics/orders/dead")).json["messages"]
    assert (letter["id"], letter["errors"][0]["reason"]) == (dead, "no such customer")
    for more in ({"delay": "1s"}, {"count": False}):
        answer = await node.ask("POST", "/v1/leases:nack", {"leases": ["x"], "dead": True, **more})
        assert (answer.status, "leave out" in answer.json["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "dead?limit=0", None),
        ("GET", "dead?limit=1001", None),
        ("GET", "dead?cursor=xyz", None),
        ("GET", "dead?cursor=00", None),
        ("POST", "dead:redrive", {}),
        ("POST", "dead:redrive", {"all": True, "ids": []}),
        ("POST", "dead:redrive", {"all": True, "rate": 0}),
        ("POST", "dead:redrive", {"all": True, "rate": -1}),
        ("POST", "dead:redrive", {"ids": [], "rate": 1}),
        ("POST", "dead:redrive", {"ids": ["nonsense"]}),
        ("POST", "dead:redrive", {"ids": ["0000000000000"] * 1001}),
        ("POST", ":purge", {}),
        ("POST", ":purge", {"states": []}),
        ("POST", ":purge", {"states": ["leased"]}),
    ],
)
async def test_requests_that_are_not_understood_change_nothing(node: Node, method: str, path: str, body: Any) -> None:
    await letters(node, 1)
    where = path if path.startswith(":") else f"/{path}"
    answer = await node.ask(method, f"/v1/topics/orders{where}", body)
    assert answer.status == 400, answer.json
    assert answer.json["detail"]
    assert len((await node.ask("GET", "/v1/topics/orders/dead")).json["messages"]) == 1


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/dead", None),
        ("DELETE", "/dead", None),
        ("POST", "/dead:redrive", {"all": True}),
        ("POST", ":purge", {"states": ["ready"]}),
    ],
)
async def test_there_has_to_be_such_a_topic(node: Node, method: str, path: str, body: Any) -> None:
    assert (await node.ask(method, f"/v1/topics/nowhere{path}", body)).status == 404


async def test_an_ack_may_carry_a_result(node: Node) -> None:
    """A reader that waits for the message gets it with the message's end."""
    made = [await node.ask("POST", "/v1/topics/results/messages", b"x") for _ in range(3)]
    ids = [answer.json["id"] for answer in made]
    waiting = asyncio.create_task(node.ask("GET", f"/v1/messages/{ids[0]}?wait=20s"))
    leases = [m["lease"] for m in (await node.ask("POST", "/v1/topics/results/receive", {})).json["messages"]]
    assert (await node.ask("GET", f"/v1/messages/{ids[0]}?wait=10ms")).json["state"] == "leased"
    answer = await node.ask("POST", "/v1/leases:ack", {"leases": leases[:1], "result": {"paid": 7}})
    assert answer.json["results"] == [{"lease": leases[0], "outcome": "acked"}]
    reported = (await waiting).json
    assert (reported["state"], reported["result"]) == ("acked", {"paid": 7})
    await node.ask("POST", "/v1/leases:ack", {"leases": leases[1:], "results": [None, "x" * 65_000]})
    assert (await node.ask("GET", f"/v1/messages/{ids[1]}")).json["result"] is None
    assert len((await node.ask("GET", f"/v1/messages/{ids[2]}")).json["result"]) == 65_000


@pytest.mark.parametrize(
    ("query", "status"),
    [
        ({"leases": ["x", "y"], "result": 1}, 400),
        ({"leases": ["x"], "result": 1, "results": [1]}, 400),
        ({"leases": ["x", "y"], "results": [1]}, 400),
        ({"leases": ["x"], "result": "x" * 65_535}, 413),
        ({"leases": ["x"] * 20, "results": ["x" * 65_000] * 20}, 413),
        ({"leases": ["x"], "result": "x" * 65_534}, 200),
    ],
)
async def test_results_are_bounded(node: Node, query: dict[str, Any], status: int) -> None:
    assert (await node.ask("POST", "/v1/leases:ack", query)).status == status


async def test_a_read_waits_no_longer_than_allowed(node: Node) -> None:
    made = (await node.ask("POST", "/v1/topics/results/messages?delay=1h", b"x")).json["id"]
    assert (await node.ask("GET", f"/v1/messages/{made}?wait=2h")).status == 400
    assert (await node.ask("GET", f"/v1/messages/{made}?wait=0")).json["state"] == "scheduled"
    assert "result" not in (await node.ask("GET", f"/v1/messages/{made}")).json


async def test_a_receive_may_keep_to_the_order_of_its_topics(node: Node) -> None:
    for order, listed in (("turns", False), ("listed", True)):
        answer = await node.ask("POST", "/v1/receive", {"topics": ["a", "b"], "order": order})
        assert (answer.status, node.service.polls[-1].listed) == (200, listed)
    assert (await node.ask("POST", "/v1/receive", {"topics": ["a"], "order": "random"})).status == 400
    assert (await node.ask("POST", "/v1/topics/a/receive", {"order": "listed"})).status == 400


async def test_topics_by_the_beginning_of_their_names(node: Node) -> None:
    for name in ("shop-orders", "shop-mail", "other"):
        await node.ask("PUT", f"/v1/topics/{name}", {})
    answer = await node.ask("GET", "/v1/topics?prefix=shop-")
    assert sorted(topic["topic"] for topic in answer.json["topics"]) == ["shop-mail", "shop-orders"]
    assert len((await node.ask("GET", "/v1/topics")).json["topics"]) == 3


async def test_progress_comes_with_an_extend(node: Node) -> None:
    made = (await node.ask("POST", "/v1/topics/long/messages", b"x")).json["id"]
    lease = (await node.ask("POST", "/v1/topics/long/receive", {})).json["messages"][0]["lease"]
    answer = await node.ask("POST", "/v1/leases:extend", {"leases": [lease], "lease": "1m", "progress": "page 7"})
    assert answer.json["results"][0]["outcome"] == "extended"
    assert (await node.ask("GET", f"/v1/messages/{made}")).json["progress"] == "page 7"
    answer = await node.ask("POST", "/v1/leases:extend", {"leases": [lease], "lease": "1m", "progress": "x" * 129})
    assert answer.status == 400


async def test_a_result_with_numbers_beyond_64_bits_is_read_in_both_formats(node: Node) -> None:
    published = (await node.ask("POST", "/v1/topics/orders/messages", b"x")).json["id"]
    (got,) = (await node.ask("POST", "/v1/topics/orders/receive", {})).json["messages"]
    result = {"large": 2**70, "small": -(2**70), "fits": [2**64 - 1, -(2**63)], "text": "1e9"}
    answer = await node.ask("POST", "/v1/leases:ack", {"leases": [got["lease"]], "result": result})
    assert answer.json["results"][0]["outcome"] == "acked"
    path = f"/v1/messages/{published}"
    assert (await node.ask("GET", path)).json["result"] == result
    answer = await node.ask("GET", path, Accept="application/msgpack")
    assert answer.status == 200, answer
    found = msgspec.msgpack.decode(answer.body)["result"]
    assert found == result | {"large": float(2**70), "small": -float(2**70)}
    assert [type(number) for number in (found["large"], *found["fits"])] == [float, int, int]
