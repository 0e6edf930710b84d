"""Refusals are told as what they are, and /openapi.json names them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hadelay.config import HttpConfig
from hadelay.core.results import Refused
from hadelay.errors import HadelayError, OutcomeUnknown
from hadelay.http.app import ROUTES
from hadelay.http.openapi import document
from hadelay.server.service import NodeService, _refused
from tests.http.conftest import Node


def test_commands_name_what_may_become_of_them() -> None:
    spec = msgspec.json.decode(document(ROUTES.all))
    for path, item in spec["paths"].items():
        for method, operation in item.items():
            wanted = {"503", "504", "507"} if method != "get" else set()
            assert wanted <= operation["responses"].keys(), (method, path)
    assert "503" in spec["paths"]["/v1/names"]["get"]["responses"]
    outcomes = spec["components"]["schemas"]["Problem"]["properties"]["outcome"]["enum"]
    assert set(outcomes) == {"pending", "leased", "acked", "cancelled", "expired", "dead"}


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
def test_what_apply_refuses_is_no_bug(code: str, status: int, retryable: bool) -> None:
    error = _refused(Refused(code, "words"))
    assert (error.http_status, error.retryable, error.detail) == (status, retryable, "words")


async def test_a_read_whose_leader_falls_silent_may_be_asked_again() -> None:
    """A follower asks the leader how many are ready; that has no outcome to be unsure of."""

    def silent(peer: str, name: str, payload: Any, timeout_s: float, done: Any) -> None:
        done(None, OutcomeUnknown("the leader did not answer in time"))

    node: Any = SimpleNamespace(
        name="n1", leading=False, raft=SimpleNamespace(leader="n2"), link=SimpleNamespace(call=silent),
        config=SimpleNamespace(http=HttpConfig()),
    )  # fmt: skip
    with pytest.raises(HadelayError) as caught:
        await NodeService(node)._ready(stale=False)
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
        assert not node.service.messages
    # Who only looks is told nothing that a page could read: there is no CORS header.
    look = await node.ask("GET", "/v1/topics", **own)
    assert look.status == 200
    assert not [name for name in look.headers if name.lower().startswith("access-control")]
