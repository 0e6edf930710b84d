"""Bearer tokens at the authenticator: who gets in, to what, by every way a request can take, and until when."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import validate

from hadelay import AsyncClient
from hadelay.api.service import Actor, Leader
from hadelay.errors import BadRequest, Forbidden, Unauthorized
from hadelay.http import openapi
from hadelay.http.access import Denials
from hadelay.http.app import ROUTES, HttpServer
from hadelay.http.routes import OPEN
from hadelay.rights import SCOPES, TOKEN_PREFIX, Rights, aws_key, aws_secret, hash_token
from hadelay.rules.access import RequestRights, need_begin, need_job
from hadelay.settings.node import HttpConfig, SecurityConfig
from tests.http.conftest import read_answer
from tests.http.served import Served, serve


def secret(name: str) -> str:
    return TOKEN_PREFIX + name.ljust(43, "_")


BOOTSTRAP = secret("bootstrap")


@dataclass
class Guarded:
    service: Served
    server: HttpServer
    #: One for requests in the plainest form, and one for those that only aiohttp reads: it keeps a connection for good.
    short: tuple[asyncio.StreamReader, asyncio.StreamWriter]
    long: tuple[asyncio.StreamReader, asyncio.StreamWriter]

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"

    async def ask(
        self, token: str | None, method: str, path: str, body: bytes = b"", *, short: bool = True, head: bytes = b""
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, document, headers)."""
        reader, writer = self.short if short else self.long
        if token is not None:
            head += b"Authorization: Bearer %s\r\n" % token.encode()
        if short:
            data = b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        else:
            data = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n" % (len(body), body) if body else b"TE: x\r\n\r\n"
            data += b"0\r\n\r\n" if body else b""
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\n".encode() + head + data)
        status, headers, answer = await asyncio.wait_for(read_answer(reader), 10)
        document = msgspec.json.decode(answer) if "json" in headers.get("content-type", "") and answer else None
        return status, document, headers

    async def add(self, name: str, *scopes: str, lifetime_ms: int | None = None) -> str:
        """Make a token; returns its secret."""
        await self.service.access.create_token(name, hash_token(secret(name)), list(scopes), lifetime_ms, Actor())
        return secret(name)

    async def add_topics(self, *names: str) -> None:
        for name in names:
            await self.service.topics.put_topic(name, {}, Actor())

    @property
    def audited(self) -> Actor:
        """The actor of the last audited request."""
        entry = self.service.raft_node.ledger.audit.entries[-1]
        return Actor(entry.token_id, entry.token)

    async def statuses(self, token: str | None, method: str, path: str, body: bytes = b"") -> set[int]:
        """By both ways, and twice: the second time from memory."""
        return {(await self.ask(token, method, path, body, short=short))[0] for short in (True, True, False, False)}


@asynccontextmanager
async def guarded(**security: Any) -> AsyncIterator[Guarded]:
    config = HttpConfig(listen="127.0.0.1:0")
    service = await serve(config)
    server = HttpServer(service, config, 1 << 40, SecurityConfig(tokens=True, **security))
    host, port = (await server.start()).split(":")
    short, long = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
    try:
        yield Guarded(service, server, short, long)
    finally:
        for _, writer in (short, long):
            writer.close()
        await server.stop(1)
        service.close()


PUBLISH = ("POST", "/v1/topics/orders/messages", b"hello")
RECEIVE = ("POST", "/v1/topics/orders/receive", b'{"wait": 0}')


async def test_only_known_tokens_get_in() -> None:
    async with guarded() as node:
        shop = await node.add("shop", "publish:orders")
        assert await node.statuses(shop, *PUBLISH) == {201}
        for token in (None, "", "x", shop[:-1], shop + "x", secret("other"), shop.upper()):
            assert await node.statuses(token, *PUBLISH) == {401}, token
            assert await node.statuses(token, *RECEIVE) == {401}, token
        _, problem, headers = await node.ask(shop[:-3], *PUBLISH)
        assert headers["www-authenticate"] == "bearer"
        assert (problem["type"], problem["retryable"], problem["outcome_known"]) == ("unauthorized", False, True)
        assert "43 characters" in problem["detail"]
        assert shop not in str(problem)
        header = b"Authorization: Bearer %s\r\n" % shop.encode()
        assert (await node.ask(shop, *PUBLISH, head=header))[0] == 401, "two headers are none"
        basic = b"Authorization: Basic aGVsbG86d29ybGQ=\r\n"
        assert (await node.ask(None, *PUBLISH, head=basic))[0] == 401
        spelt = b"authorization:  bearer   %s\r\n" % shop.encode()
        assert (await node.ask(None, *PUBLISH, head=spelt))[0] == 201
        assert len(node.service.published) == 5


async def test_health_and_the_description_are_open_and_nothing_else() -> None:
    async with guarded() as node:
        paths = {"{topic}": "t", "{key}": "k", "{id}": "0" * 13, "{hour}": "2026112018", "{file}": "log"}
        paths |= {
            "{token_id}": "0" * 12,
            "{snapshot}": "1",
            "{name}": "names",
            "{node}": "n2",
            "{job}": "1",
            "{group}": "g",
            "{schedule}": "s",
            "{subscription}": "b",
            "{batch}": "x",
        }
        found = {}
        for route in ROUTES.all:
            path = re.sub(r"\{\w+\}", lambda m: paths[m[0]], route.path)
            found[route.name] = (await node.ask(None, route.method, path))[0]
        assert {name for name, status in found.items() if status != 401} == {"livez", "readyz", "openapi"}
        assert (await node.ask(None, "GET", "/v1/nothing"))[0] == 404
        assert not node.service.published


async def test_every_route_says_what_it_takes() -> None:
    assert {route.scope for route in ROUTES.all} == {OPEN, *SCOPES}
    powers = {route.name for route in ROUTES.all if route.scope == "admin"}
    assert powers == {
        "put_topic", "put_subscription", "delete_subscription", "pause_topic", "resume_topic", "delete_topic",
        "purge", "purge_dead", "redrive",
        "transfer_leader", "hours", "hour_file", "create_token", "list_tokens", "revoke_token", "audit",
        "open_snapshot", "snapshot_file", "release_snapshot", "add_member", "remove_member", "drain",
        "patrol", "patrol_now", "put_shards", "shard_names",
    }  # fmt: skip
    document = msgspec.json.decode(openapi.document(ROUTES.all, tokens=True))
    validate(document)
    assert document["paths"]["/livez"]["get"]["security"] == []
    operation = document["paths"]["/v1/topics"]["get"]
    assert operation["security"] == [{"token": []}]
    assert {"401", "403"} <= set(operation["responses"])


@pytest.mark.parametrize("scope", SCOPES)
async def test_a_scope_opens_its_routes_for_its_topics(scope: str) -> None:
    """Over all routes with a topic in their path: 403 unless both fit."""
    async with guarded() as node:
        token = await node.add(scope, f"{scope}:orders-*")
        rights = Rights([f"{scope}:orders-*"])
        for route in ROUTES.all:
            if "{topic}" not in route.path:
                continue
            for topic in ("orders-eu", "refunds"):
                path = route.path.replace("{topic}", topic).replace("{key}", "k")
                status, problem, _ = await node.ask(token, route.method, path, b"{}")
                allowed = rights.may(route.scope, topic)
                assert (status not in (401, 403)) == allowed, (route.name, topic, problem)
                if not allowed:
                    assert f"no scope {route.scope} for topic {topic!r}" in problem["detail"]


async def test_requests_about_the_cluster_take_a_scope_without_topics() -> None:
    async with guarded() as node:
        narrow = await node.add("narrow", *(f"{scope}:orders" for scope in SCOPES))
        reader, admin = await node.add("reader", "read"), await node.add("admin", "admin")
        for path in ("/v1/cluster", "/v1/names", "/metrics", "/v1/due?from=1795197600000&to=1795197700000&step=1"):
            found = [(await node.ask(token, "GET", path))[0] for token in (narrow, reader, admin)]
            assert found == [403, 200, 200], path
        for path in ("/v1/hours", "/v1/hours/2026050816/log", "/v1/tokens", "/v1/audit"):
            found = [(await node.ask(token, "GET", path))[0] for token in (narrow, reader, admin)]
            assert found[:2] == [403, 403], path
            assert found[2] in (200, 404), path


async def test_a_batch_is_refused_item_by_item() -> None:
    async with guarded() as node:
        shop = await node.add("shop", "publish:orders")
        body = b'[{"topic":"orders","body":"a"},{"topic":"refunds","body":"b"},{"topic":"orders","body":"c"}]'
        for short in (True, False):
            status, answer, _ = await node.ask(
                shop, "POST", "/v1/messages:batch", body, short=short, head=b"Content-Type: application/json\r\n"
            )
            assert status == 200
            assert [("error" in result) for result in answer["results"]] == [False, True, False]
            assert answer["results"][1]["error"]["status"] == 403
        assert {draft.topic for draft in node.service.published} == {"orders"}


async def test_several_topics_at_once() -> None:
    async with guarded() as node:
        worker = await node.add("worker", "consume:a", "consume:b")
        body = b'{"topics": ["a", "b"], "wait": 0}'
        assert await node.statuses(worker, "POST", "/v1/receive", body) == {200}
        assert await node.statuses(worker, "POST", "/v1/receive", body.replace(b'"b"', b'"c"')) == {403}
        await node.add_topics("a", "b", "c")
        lister = await node.add("lister", "read:a", "read:c")
        _, answer, _ = await node.ask(lister, "GET", "/v1/topics")
        assert [topic["topic"] for topic in answer["topics"]] == ["a", "c"]


async def test_messages_and_leases_belong_to_their_topic() -> None:
    async with guarded() as node:
        owner = await node.add("owner", "publish:orders", "consume:orders", "read:orders")
        other = await node.add("other", "publish:refunds", "consume:refunds", "read:refunds")
        _, receipt, _ = await node.ask(owner, "POST", "/v1/topics/orders/messages?delay=1h", b"x")
        path = f"/v1/messages/{receipt['id']}"
        for method, at, body in (
            ("GET", path, b""),
            ("PATCH", path, b'{"delay": "2h"}'),
            ("POST", path + ":deliver-now", b""),
        ):
            status, problem, _ = await node.ask(other, method, at, body)
            assert (status, "orders" in problem["detail"]) == (403, False), method
            assert (await node.ask(owner, method, at, body))[0] == 200, method
        node.service.runtime.move(1_000 / 1000)
        _, got, _ = await node.ask(owner, *RECEIVE)
        leases = msgspec.json.encode({"leases": [m["lease"] for m in got["messages"]]})
        assert len(got["messages"]) == 1
        for way in ("ack", "nack"):
            assert await node.statuses(other, "POST", f"/v1/leases:{way}", leases) == {403}
            _, problem, _ = await node.ask(other, "POST", f"/v1/leases:{way}", leases)
            assert "orders" not in problem["detail"]
        status, answer, _ = await node.ask(owner, "POST", "/v1/leases:ack", leases)
        assert (status, answer["results"][0]["outcome"]) == (200, "acked")
        status, problem, _ = await node.ask(other, "DELETE", path)
        assert (status, "orders" in problem["detail"]) == (403, False)


async def test_revoked_and_expired_ones_are_out_at_once_on_every_way() -> None:
    async with guarded() as node:
        shop = await node.add("shop", "publish", "consume", lifetime_ms=60_000)
        again = await node.add("again", "publish")
        assert await node.statuses(shop, *PUBLISH) == await node.statuses(again, *PUBLISH) == {201}
        assert await node.statuses(shop, *RECEIVE) == {200}
        node.service.runtime.move(40)
        assert await node.statuses(shop, *PUBLISH) == {201}
        node.service.runtime.move(20)
        assert node.server.authenticator is not None
        node.server.authenticator._until = 0.0  # a second is over
        assert await node.statuses(shop, *PUBLISH) == await node.statuses(shop, *RECEIVE) == {401}
        _, problem, _ = await node.ask(shop, *PUBLISH)
        assert "'shop'" in problem["detail"]
        assert "has expired" in problem["detail"]
        await node.service.access.revoke_token(hash_token(again).hex()[:12], Actor())
        assert await node.statuses(again, *PUBLISH) == {401}


async def test_keys_of_their_own_do_not_get_around_it() -> None:
    """Heads that differ by a key alone share what is remembered."""
    async with guarded() as node:
        shop = await node.add("shop", "publish:orders")
        for n in range(3):
            assert (await node.ask(shop, *PUBLISH, head=b"Hadelay-Key: k%d\r\n" % n))[0] == 201
            assert (await node.ask(shop, *PUBLISH, head=b"Idempotency-Key: k%d\r\n" % n))[0] == 201
        await node.service.access.revoke_token(hash_token(shop).hex()[:12], Actor())
        assert (await node.ask(shop, *PUBLISH, head=b"Hadelay-Key: k9\r\n"))[0] == 401
        assert (await node.ask(shop, *PUBLISH, head=b"Idempotency-Key: k9\r\n"))[0] == 401


async def test_nothing_is_read_of_a_body_that_nobody_may_send() -> None:
    async with guarded() as node:
        reader, writer = node.short
        writer.write(b"POST /v1/messages:batch HTTP/1.1\r\nHost: x\r\nContent-Length: 16000000\r\n\r\nabc")
        status, _, _ = await asyncio.wait_for(read_answer(reader), 10)
        assert status == 401


async def test_the_first_token() -> None:
    async with guarded(bootstrap_token_hash=hash_token(BOOTSTRAP).hex()) as node:
        query = b'{"name": "ops", "scopes": ["admin"], "lifetime": "1h"}'
        assert await node.statuses(secret("guess"), "POST", "/v1/tokens", query) == {401}
        for method, path, body in (PUBLISH, RECEIVE, ("GET", "/v1/tokens", b""), ("GET", "/v1/audit", b"")):
            assert await node.statuses(BOOTSTRAP, method, path, body) == {403}, path
        status, made, headers = await node.ask(BOOTSTRAP, "POST", "/v1/tokens", query)
        assert status == 201
        assert headers["cache-control"] == "no-store"
        assert node.audited == Actor("", "bootstrap")
        assert await node.statuses(BOOTSTRAP, "POST", "/v1/tokens", query) == {401}
        _, problem, _ = await node.ask(BOOTSTRAP, "POST", "/v1/tokens", query)
        assert "no longer valid" in problem["detail"]
        assert (await node.ask(made["token"], "GET", "/v1/tokens"))[0] == 200
        node.service.runtime.move(3_600_000 / 1000)
        assert node.server.authenticator is not None
        node.server.authenticator._until = 0.0
        assert (await node.ask(made["token"], "GET", "/v1/tokens"))[0] == 401
        assert (await node.ask(BOOTSTRAP, "POST", "/v1/tokens", query))[0] == 201, "the last one is lost"


async def test_tokens_are_made_shown_once_and_listed_without_themselves() -> None:
    async with guarded() as node:
        admin = await node.add("admin", "admin")
        status, made, headers = await node.ask(
            admin, "POST", "/v1/tokens", b'{"name": "shop", "scopes": ["publish:orders-*", "read"], "lifetime": "90d"}'
        )
        assert status == 201
        assert headers["location"] == f"/v1/tokens/{made['id']}"
        assert re.fullmatch(rf"{TOKEN_PREFIX}[\w-]{{43}}", made["token"])
        assert node.audited.token == "admin"
        assert (await node.ask(made["token"], "POST", "/v1/topics/orders-eu/messages", b"x"))[0] == 201
        _, listed, _ = await node.ask(admin, "GET", "/v1/tokens")
        assert [token["name"] for token in listed["tokens"]] == ["admin", "shop"]
        assert made["token"] not in str(listed)
        assert "token" not in listed["tokens"][1]
        assert "aws_secret" not in made
        _, sdk, _ = await node.ask(admin, "POST", "/v1/tokens", b'{"name": "sdk", "scopes": ["read"], "aws": true}')
        assert sdk["aws_secret"] == aws_secret(aws_key(sdk["token"]))
        _, listed, _ = await node.ask(admin, "GET", "/v1/tokens")
        assert [token["aws"] for token in listed["tokens"]] == [False, False, True]
        assert "aws_secret" not in listed["tokens"][2]
        assert (await node.ask(sdk["aws_secret"], "GET", "/v1/topics"))[0] == 401, "no secret key is a token"
        for body, words in (
            (b'{"name": "x", "scopes": ["root"]}', "'root' is no scope"),
            (b'{"name": "x", "scopes": ["publish:a b"]}', "is no scope"),
            (b'{"name": "x", "scopes": ["read"], "lifetime": 0}', "lifetime"),
            (b'{"name": "x"}', "scopes"),
        ):
            status, problem, _ = await node.ask(admin, "POST", "/v1/tokens", body)
            assert (status, words in problem["detail"]) == (400, True), problem
        assert (await node.ask(admin, "DELETE", headers["location"]))[0] == 204
        assert (await node.ask(admin, "DELETE", headers["location"]))[0] == 404
        assert (await node.ask(admin, "DELETE", "/v1/tokens/..%2f"))[0] == 404


@pytest.mark.parametrize("option", ["on_success", "on_failure"])
async def test_nobody_publishes_by_way_of_callbacks(option: str) -> None:
    async with guarded() as node:
        clerk, path = await node.add("clerk", "publish:orders", "admin:orders"), "/v1/topics/orders/messages"
        hook = {"url": "https://example.com/hook", "allow_per_message": True}
        await node.service.topics.put_topic("orders", {"webhook": hook}, Actor())
        for topic in (b"refunds", b"keep"):  # only of dead_letter, `keep` is no topic
            setting = b'{"%s": "%s"}' % (option.encode(), topic)
            assert (await node.ask(clerk, "PUT", "/v1/topics/orders", setting))[0] == 403
        for topic, status in (("refunds", 403), ("orders", 201)):
            assert (await node.ask(clerk, "POST", f"{path}?{option}={topic}", b"x"))[0] == status
            item = b'[{"topic": "orders", "body": "x", "%s": "%s"}]' % (option.encode(), topic.encode())
            head = b"Content-Type: application/json\r\n"
            (result,) = (await node.ask(clerk, "POST", "/v1/messages:batch", item, head=head))[1]["results"]
            assert ("error" in result) == (status == 403)


async def test_nobody_publishes_by_way_of_dead_letters() -> None:
    async with guarded() as node:
        owner = await node.add("owner", "admin:orders")
        assert (await node.ask(owner, "PUT", "/v1/topics/orders", b'{"dead_letter": "refunds"}'))[0] == 403
        assert (await node.ask(owner, "PUT", "/v1/topics/orders", b'{"dead_letter": "keep"}'))[0] == 200


async def test_a_node_that_may_be_behind_lets_nobody_in() -> None:
    async with guarded() as node:
        shop = await node.add("shop", "publish")
        node.service.access.knows_tokens = False
        assert await node.statuses(shop, *PUBLISH) == {503}
        node.service.access.knows_tokens = True
        assert await node.statuses(shop, *PUBLISH) == {201}


async def test_the_memory_for_headers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hadelay.http.access._MOST", 10)
    async with guarded() as node:
        await node.add("shop", "publish")
        authenticator = node.server.authenticator
        assert authenticator is not None
        for n in range(100):
            with pytest.raises(Unauthorized):
                authenticator.admit((f"Bearer {secret(str(n))}",))
            assert authenticator.admit((f"Bearer {' ' * n}{secret('shop')}",)).actor.token == "shop"
        assert len(authenticator._known) <= 10


async def test_a_relayed_poll_takes_its_token_along() -> None:
    async with guarded() as leads, guarded() as follows:
        for node in (leads, follows):
            await node.add("worker", "consume")
        follows.service.leader = Leader("n1", leads.url, False)
        body = b'{"wait": 0}'
        status, _, _ = await follows.ask(secret("worker"), "POST", "/v1/topics/t/receive?redirect=false", body)
        assert status == 200
        assert len(leads.service.polls) == 1


async def test_a_relayed_poll_keeps_its_token_when_leadership_moves() -> None:
    """The node that is asked follows the redirect of a leader that was deposed."""
    async with guarded() as leads, guarded() as deposed, guarded() as follows:
        for node in (leads, deposed, follows):
            await node.add("worker", "consume")
        follows.service.leader = Leader("n2", deposed.url, False)
        deposed.service.leader = Leader("n1", leads.url, False)
        follows.server.relay.known = lambda: {leads.url}
        path = "/v1/topics/t/receive?redirect=false"
        status, answer, _ = await follows.ask(secret("worker"), "POST", path, b'{"wait": 0}')
        assert (status, len(leads.service.polls)) == (200, 1), answer


async def test_the_client_says_who_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded() as node:
        shop = await node.add("shop", "publish", "consume")
        async with AsyncClient(node.url, token=shop) as client:
            await client.put("orders", b"x")
        monkeypatch.setenv("HADELAY_TOKEN", shop)
        async with AsyncClient(node.url) as client:
            (message,) = await client.receive("orders", wait=5)
            assert message.body == b"x"
        async with AsyncClient(node.url, token=secret("nobody")) as client:
            with pytest.raises(Unauthorized, match="unknown token"):
                await client.put("orders", b"x")


async def test_a_node_without_tokens_serves_everybody() -> None:
    http = HttpConfig(listen="127.0.0.1:0")
    service = await serve(http)
    server = HttpServer(service, http, 1 << 40, SecurityConfig())
    await server.start()
    async with AsyncClient(f"http://{server.address}") as client:
        assert await client.put("orders", b"x")
        assert await client.put_topic("orders", lease="30s")
    entry = service.raft_node.ledger.audit.entries[-1]
    assert (entry.token_id, entry.token) == ("", "")
    await server.stop(1)
    service.close()


async def test_refused_requests_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with guarded(bootstrap_token_hash=hash_token(secret("first")).hex()) as node:
        shop, old = await node.add("shop", "publish:orders"), await node.add("old", "admin", lifetime_ms=1)
        node.service.runtime.move(2 / 1000)
        other = ("POST", "/v1/topics/others/messages", b"x")
        for token in (None, "x", secret("nobody"), old):
            assert await node.statuses(token, *PUBLISH) == {401}
        assert await node.statuses(shop, *other) == {403}
        assert await node.statuses(secret("first"), *PUBLISH) == {403}
        batch = b'[{"topic": "orders", "body": "x"}, {"topic": "others", "body": "x"}]'
        assert await node.statuses(shop, "POST", "/v1/messages:batch", batch) <= {200, 415}
        assert node.server.denials.counts == {
            "no_token": 4, "malformed": 4, "unknown": 4, "expired": 4, "bootstrap": 4, "scope": 4,
        }  # fmt: skip
        lines = [record for record in caplog.records if record.message == "access_denied"]
        assert [(line.reason, line.count) for line in lines] == [(reason, 1) for reason in node.server.denials.counts]  # type: ignore[attr-defined]
        assert not any(word in str(vars(line)) for line in lines for word in (shop, old, secret("nobody")))
        metrics = await node.ask(await node.add("ops", "read"), "GET", "/metrics", short=False)
        assert metrics[0] == 200


def test_the_log_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    times = iter((0.0, 1.0, 9.9, 10.0, 10.5, 30.0))
    denials = Denials(lambda: next(times))
    for _ in range(6):
        denials.note("publish", Forbidden("no"))
    denials.note("publish", BadRequest("no"))
    assert [record.count for record in caplog.records] == [1, 3, 2]  # type: ignore[attr-defined]
    assert denials.counts == {"scope": 6}


async def test_rights_to_a_subscription_do_not_create_it() -> None:
    """A token for all topics that end in `billing` would get the messages of any topic."""
    async with guarded() as node:
        await node.add_topics("orders")
        billing = await node.add("billing", "admin:*billing")
        owner = await node.add("owner", "admin:orders")
        both = await node.add("both", "admin:orders*")
        path = "/v1/topics/orders~billing"
        assert await node.statuses(billing, "PUT", path, b"{}") == {404}
        assert await node.statuses(billing, "PUT", "/v1/topics/orders/subscriptions/billing", b"{}") == {403}
        assert await node.statuses(owner, "PUT", "/v1/topics/orders/subscriptions/billing", b"{}") == {200}
        assert await node.statuses(billing, "PUT", path, b'{"paused": true}') == {200}
        assert await node.statuses(both, "PUT", "/v1/topics/orders~mail", b"{}") == {200}


def test_rights_to_move_messages() -> None:
    """Like a redrive, and to publish where the messages go."""
    access = RequestRights(Actor(), Rights(("admin:failed", "publish:orders")))
    need_begin(access, "transfer", "failed", "orders")
    need_begin(access, "redrive", "failed", None)
    need_job(access, "transfer", "failed")
    for topic, into in (("failed", "mails"), ("orders", "failed"), ("*", "orders")):
        with pytest.raises(Forbidden):
            need_begin(access, "transfer", topic, into)


async def test_messages_go_back_by_a_right_to_publish_anywhere() -> None:
    """Each message goes back to the topic in which it died, which may be any."""
    transfer = b'{"action": "transfer", "filter": {"topic": "dlq"}%s}'
    async with guarded() as node:
        await node.add_topics("dlq", "orders")
        clerk = await node.add("clerk", "admin:dlq")
        status, problem, _ = await node.ask(clerk, "POST", "/v1/jobs", transfer % b"")
        assert (status, problem["type"]) == (403, "forbidden")
        assert "publish for all topics" in problem["detail"]
        assert "name one with `into`" in problem["detail"]
        assert await node.statuses(clerk, "POST", "/v1/jobs", transfer % b', "into": "orders"') == {403}
        one = await node.add("one", "admin:dlq", "publish:orders")
        assert await node.statuses(one, "POST", "/v1/jobs", transfer % b"") == {403}
        assert await node.statuses(one, "POST", "/v1/jobs", transfer % b', "into": "orders"') == {202}
        every = await node.add("every", "admin:dlq", "publish")
        status, job, _ = await node.ask(every, "POST", "/v1/jobs", transfer % b"")
        assert status == 202
        assert await node.statuses(clerk, "DELETE", f"/v1/jobs/{job['id']}") == {200}
