"""Refusals are told as what they are, and /openapi.json names them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hadelay.client import AsyncClient
from hadelay.codec.meta import Meta, pack
from hadelay.codec.results import CancelOutcome, Refused, TargetOutcome
from hadelay.errors import HadelayError, OutcomeUnknown
from hadelay.http.access import Hosts
from hadelay.http.app import ROUTES
from hadelay.http.openapi import document
from hadelay.model import Draft
from hadelay.server.refusals import _OUTCOMES, _REFUSALS, refusal
from hadelay.server.service.messages import too_late
from hadelay.server.service.topics import TopicService
from hadelay.settings.node import HttpConfig
from tests.http.conftest import Make, Node, read_answer, until


def test_commands_name_what_may_become_of_them() -> None:
    spec = msgspec.json.decode(document(ROUTES.all))
    for path, item in spec["paths"].items():
        for method, operation in item.items():
            wanted = {"503", "504", "507"} if method != "get" else set()
            assert wanted <= operation["responses"].keys(), (method, path)
    assert "503" in spec["paths"]["/v1/names"]["get"]["responses"]
    for verb in ("trigger", "backfill"):
        parameters = spec["paths"][f"/v1/schedules/{{schedule}}:{verb}"]["post"]["parameters"]
        assert "Idempotency-Key" in [parameter["name"] for parameter in parameters]


def test_every_outcome_that_a_refusal_names_is_described() -> None:
    problem = msgspec.json.decode(document(ROUTES.all))["components"]["schemas"]["Problem"]["properties"]
    named = {refusal(Refused(code, "words")).outcome for code in _REFUSALS} | set(_OUTCOMES.values())
    named |= {one.name.lower() for one in (*CancelOutcome, *TargetOutcome)}
    assert set(problem["outcome"]["enum"]) == named - {None, "done", "not_found", "too_far", "again"}
    partial = too_late("cancelled", CancelOutcome.PARTIAL, {"t": "leased"}).document()
    assert partial["outcome"] in problem["outcome"]["enum"]
    assert problem["outcomes"] == {"type": "object", "additionalProperties": {"type": "string"}}
    assert partial.keys() <= problem.keys()


@pytest.mark.parametrize(
    ("code", "status", "retryable"),
    [
        ("too_many_topics", 429, True),
        ("too_many_generations", 429, True),
        ("too_many_marks", 429, True),
        ("too_far", 422, False),
        ("no_topic", 404, False),
    ],
)
def test_refusals_of_apply_are_no_bugs(code: str, status: int, retryable: bool) -> None:
    error = refusal(Refused(code, "words"))
    assert (error.http_status, error.retryable, error.detail) == (status, retryable, "words")


async def test_a_read_whose_leader_falls_silent_may_be_asked_again() -> None:
    """A follower asks the leader how many are ready; that has no outcome to be unsure of."""

    def silent(name: str, payload: Any, timeout_s: float, done: Any) -> None:
        done(None, OutcomeUnknown("the leader did not answer in time"))

    node: Any = SimpleNamespace(
        name="n1", leading=False, raft=SimpleNamespace(leader="n2"), leadership=SimpleNamespace(ask_leader=silent),
        config=SimpleNamespace(http=HttpConfig()), replica=None,
    )  # fmt: skip
    with pytest.raises(HadelayError) as caught:
        await TopicService(node).ready(stale=False)
    assert (caught.value.http_status, caught.value.retryable, caught.value.outcome_known) == (503, True, True)


SITES = [
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Origin": "http://127.0.0.1:1"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"}, 403),
    ({"Sec-Fetch-Site": "cross-site", "Origin": "{own}"}, 403),
    # Behind a proxy that changes Host a browser says what is so.
    ({"Sec-Fetch-Site": "same-origin", "Origin": "https://hadelay.example"}, 201),
    ({"Sec-Fetch-Site": "none"}, 201),
    ({"Origin": "{own}"}, 201),
    ({}, 201),
    # A proxy that drops the port from Host: the names are compared.
    ({"Host": "localhost", "Origin": "http://localhost:18612"}, 201),
    ({"Host": "x", "Origin": "https://X"}, 201),
    ({"Host": "[::1]", "Origin": "http://[::1]:18612"}, 201),
    ({"Host": "localhost", "Origin": "http://evil.example:18612"}, 403),
    ({"Host": "localhost", "Origin": "http://localhost.evil.example"}, 403),
    ({"Host": "localhost", "Origin": "null"}, 403),
    ({"Host": "localhost:18612", "Origin": "http://localhost:3000"}, 403),
    # A proxy that puts its own name into Host, and the browser's elsewhere.
    ({"Host": "localhost:1", "Origin": "https://Q.example", "X-Forwarded-Host": "q.example, localhost"}, 201),
    ({"Host": "localhost:1", "Origin": "https://evil.example", "X-Forwarded-Host": "q.example"}, 403),
    ({"Host": "localhost:1", "Origin": "null", "X-Forwarded-Host": ""}, 403),
]


@pytest.mark.parametrize(("headers", "status"), SITES, ids=[str(n) for n in range(len(SITES))])
async def test_a_page_of_another_site_changes_nothing(node: Node, headers: dict[str, str], status: int) -> None:
    """Which a browser would send to a node that only its user can reach."""
    own = {name.replace("-", "_"): value.format(own=node.url) for name, value in headers.items()}
    for _ in range(2):
        answer = await node.ask("POST", "/v1/topics/orders/messages", b"x", **own)
        assert answer.status == status
    put = await node.ask("PUT", "/v1/topics/orders", {}, **own)
    batch = await node.ask("POST", "/v1/messages:batch", [{"topic": "orders", "body": "x"}], **own)
    assert {put.status, batch.status} == ({200} if status == 201 else {403})
    if status == 403:
        assert (answer.json["type"], "another site" in answer.json["detail"]) == ("forbidden", True)
        assert node.server.denials.counts == {"cross_site": 4}
        assert (await node.ask("GET", "/v1/topics")).json == {"topics": []}
    # Who only looks is told nothing that a page could read: there is no CORS header.
    look = await node.ask("GET", "/v1/topics", **own)
    assert look.status == 200
    assert not [name for name in look.headers if name.lower().startswith("access-control")]


def rebound(method: str, path: str, host: str, body: bytes = b"") -> bytes:
    """As a browser sends it that was told that the attacker's name has this node's address."""
    head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


FOREIGN = (
    "evil.example:8400", "evil.example", "EVIL.example.", "localhost.evil.example", "n1", "0x7f000001", "[x]:1",
    "evil.example#.localhost", "evil.example?.localhost:8400", "evil.example/.a.internal", "a..internal", "@localhost",
)  # fmt: skip
OURS = (
    "127.0.0.1:8400", "10.0.0.7", "[::1]:8400", "localhost:1", "LOCALHOST.", "app.localhost", "queue.example.com:8400",
    "a.internal", "b.a.internal:80", "Advertised.example:8400", "",
)  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN + OURS)
async def test_a_name_that_is_not_this_nodes(make_node: Make, host: str) -> None:
    node = await make_node(
        hosts=["queue.example.com", "*.internal"], advertise="http://advertised.example:8400"
    )  # not "x", as of other tests
    refused = host in FOREIGN
    reader, writer = await node.raw()
    publish = rebound("POST", "/v1/topics/t/messages", host, b"x")
    put = rebound("PUT", "/v1/topics/t", host, b"{}")
    read = rebound("GET", "/v1/topics", host)
    plain = publish.replace(b"Origin", b"X-Page")  # what goes the short way
    for request in (publish, plain, plain, put, read):
        writer.write(request)
        status, _, body = await read_answer(reader)
        assert status in ((403,) if refused else (200, 201))
        assert (b"http.hosts" in body) == refused
    writer.write(rebound("GET", "/livez", host) + rebound("GET", "/readyz", host))
    assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 200]
    if refused:
        assert not node.service.published
        assert node.server.denials.counts == {"foreign_host": 5}


async def test_names_are_checked_with_tokens_only_when_there_are_some() -> None:
    def allows(tokens: bool, *hosts: str) -> bool:
        return Hosts(HttpConfig(hosts=list(hosts)), tokens=tokens).allows("proxy.example")

    assert [allows(False), allows(True), allows(True, "a.example"), allows(True, "proxy.example")] == [
        False, True, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("version", ["2.0", "0.9", "3.0", "9.9"])
async def test_another_version_of_http_is_refused(node: Node, version: str) -> None:
    reader, writer = await node.raw()
    writer.write(b"POST /v1/topics/t/messages HTTP/%b\r\nHost: x\r\nContent-Length: 1\r\n\r\nx" % version.encode())
    status, _, body = await read_answer(reader)
    assert (status, b"HTTP" in body) == (400, True)
    assert not node.service.published


@pytest.mark.parametrize("name", [".", ".."])
async def test_a_name_that_leads_elsewhere_as_a_path_is_not_given(node: Node, name: str) -> None:
    """DELETE /v1/topics/t/keys/.. would be, after a client or a proxy: DELETE /v1/topics/t/."""
    path = name.replace(".", "%2E")
    for _ in range(2):
        refused = [
            await node.ask("POST", f"/v1/topics/{path}/messages", b"x"),
            await node.ask("PUT", f"/v1/topics/{path}", {}),
            await node.ask("PUT", "/v1/topics/t", {"dead_letter": name}),
            await node.ask("POST", "/v1/topics/t/messages", b"x", Hadelay_Key=name),
            await node.ask("POST", f"/v1/topics/t/messages?key={path}", b"x"),
        ]
        assert [(answer.status, "path" in answer.json["detail"]) for answer in refused] == [(400, True)] * 5
    items = [{"topic": name, "body": "x"}, {"topic": "t", "body": "x"}, {"topic": "t", "body": "x", "key": name}]
    found = (await node.ask("POST", "/v1/messages:batch", items)).json["results"]
    assert ["error" in result for result in found] == [True, False, True]
    assert [draft.topic for draft in node.service.published] == ["t"]


@pytest.mark.parametrize("name", [".", ".."])
async def test_a_topic_of_such_a_name_that_is_stored_is_read_and_deleted(node: Node, name: str) -> None:
    """By a client, which encodes its dots."""
    done: list[Any] = []
    node.service.publish(
        [Draft(name, 0, True, 0, 0, pack(Meta(key="..")), b"x", None, b"..")], None, lambda *answer: done.append(answer)
    )
    await until(lambda: bool(done))
    async with AsyncClient([node.url]) as client:
        assert (await client.topic(name)).topic == name
        (message,) = await client.receive(name, max=1)
        assert (message.topic, message.body) == (name, b"x")
        assert await client.ack([message.lease]) == ["acked"]
        assert (await client.get(topic=name, key="..")).topic == name
        await client.delete_topic(name, force=True)
    assert (await node.ask("GET", "/v1/topics")).json == {"topics": []}
