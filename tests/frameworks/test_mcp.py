"""`hadelay mcp` with the SDK's own client over stdio, against a node that requires tokens."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from hadelay import Client
from tests.frameworks.support import DOCS
from tests.system.cluster import Cluster, environment, hadelay, until

mcp = pytest.importorskip("mcp", reason="the package mcp is not installed")
from hadelay.mcp import server  # noqa: E402

PAGE = (DOCS / "mcp.md").read_text()
pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@dataclass
class Node:
    url: str
    #: Tokens: of an admin, of the agent, and of somebody who may only read.
    admin: str
    agent: str
    reader: str

    @property
    def client(self) -> Client:
        return Client(self.url, self.admin)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    first = json.loads(hadelay("token", "bootstrap", "-o", "json").stdout)
    settings = ("security.tokens=true", f"security.bootstrap_token_hash={first['security.bootstrap_token_hash']}")
    with Cluster(tmp_path_factory.mktemp("mcp"), nodes=1, settings=settings) as cluster:
        (url,) = cluster.urls.values()

        def made(token: str, *scopes: str) -> str:
            words = ["--scope"] * (2 * len(scopes))
            words[1::2] = scopes
            done = hadelay("token", "create", "x", *words, "--servers", url, "--token", token, "-o", "json")
            return str(json.loads(done.stdout)["token"])

        admin = made(first["token"], "admin")
        agent = made(admin, "publish:wakeups", "consume:wakeups", "read:wakeups")
        yield Node(url, admin, agent, made(admin, "read:wakeups"))


class Agent:
    def __init__(self, session: Any) -> None:
        self.session = session

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """The structured answer of a tool, which is the text, too."""
        found = await self.session.call_tool(tool, arguments)
        assert not found.is_error, found.content
        assert json.loads(found.content[0].text) == found.structured_content
        return dict(found.structured_content)

    async def refusal(self, tool: str, **arguments: Any) -> str:
        found = await self.session.call_tool(tool, arguments)
        assert found.is_error, found.content
        return str(found.content[0].text).removeprefix(f"Error executing tool {tool}: ")


@asynccontextmanager
async def started(node: Node, token: str) -> AsyncIterator[Agent]:
    """A session with a server in this process: the SDK takes two seconds of processor time to start one of its own."""
    async with mcp.Client(server([node.url], token, "wakeups")) as session:
        yield Agent(session)


@asynccontextmanager
async def started_as_the_page_says(node: Node) -> AsyncIterator[Agent]:
    shown = json.loads(re.findall(r"^```json\n(.*?)^```$", PAGE, re.M | re.S)[0])["mcpServers"]["wakeups"]
    assert shown["command"] == "hadelay"
    env = {**environment(), **shown["env"], "HADELAY_SERVERS": node.url, "HADELAY_TOKEN": node.agent}
    program = mcp.StdioServerParameters(command=sys.executable, args=["-m", "hadelay", *shown["args"]], env=env)
    async with mcp.Client(program) as session:
        yield Agent(session)


async def tools_are_described(agent: Agent) -> None:
    tools = {tool.name: tool for tool in (await agent.session.list_tools()).tools}
    assert set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == set(tools)
    assert all(tool.description for tool in tools.values())
    described = [p for tool in tools.values() for name, p in tool.input_schema["properties"].items()]
    assert sum("description" in parameter for parameter in described) > 20


async def test_a_wakeup_from_schedule_to_done(node: Node) -> None:
    async with started_as_the_page_says(node) as agent:
        await tools_are_described(agent)
        assert (await agent.call("list_wakeups"))["wakeups"] == []
        assert (await agent.call("receive_wakeups"))["wakeups"] == []
        first = await agent.call(
            "schedule_wakeup", body={"look": "deploy 42"}, delay="1h", key="deploy-42", tags=["ci"]
        )
        assert first["due_in"].startswith("59 min")
        again = await agent.call("schedule_wakeup", body="other", delay="2h", key="deploy-42")
        assert (again["id"], again["due_at"]) == (first["id"], first["due_at"])
        assert "stays as it was" in again["unchanged"]
        (row,) = (await agent.call("list_wakeups", tags=["ci"]))["wakeups"]
        assert (row["id"], row["key"], row["state"]) == (first["id"], "deploy-42", "scheduled")
        assert row["body"] == '{"look":"deploy 42"}'
        assert (await agent.call("explain_wakeup", key="deploy-42"))["explanation"].startswith("due in 59 min")

    # Another process of the agent, that knows nothing.
    async with started(node, node.agent) as agent:
        await agent.call("reschedule_wakeup", key="deploy-42", delay="0s")
        (due,) = (await agent.call("receive_wakeups", wait="10s"))["wakeups"]
        assert (due["id"], due["attempt"], due["redelivered"]) == (first["id"], 1, False)
        assert json.loads(due["body"]) == {"look": "deploy 42"}
        assert "state: leased" in await agent.refusal("cancel_wakeup", id=first["id"])
        later = await agent.call(
            "settle_wakeups", leases=[due["lease"]], outcome="later", delay="0s", reason="still runs"
        )
        assert later["outcomes"] == ["nacked"]
        (due,) = (await agent.call("receive_wakeups", wait="10s"))["wakeups"]
        assert due["redelivered"]
        assert (await agent.call("settle_wakeups", leases=[due["lease"]], outcome="done"))["outcomes"] == ["acked"]
        found = await agent.call("explain_wakeup", id=first["id"])
        assert found["explanation"].startswith("done: acked")
        assert "still runs" in [event.get("reason") for event in found["history"]]
        gone = await agent.call(
            "schedule_wakeup",
            body="x",
            at=f"{datetime.now(UTC) + timedelta(days=3):%Y-%m-%dT%H:%M:%S+01:00}",
            expires_after="1d",
        )
        assert (await agent.call("cancel_wakeup", id=gone["id"]))["outcome"] == "cancelled"
        assert (await agent.call("explain_wakeup", id=gone["id"]))["state"] == "cancelled"


async def test_a_dead_wakeup_is_explained(node: Node) -> None:
    async with started(node, node.agent) as agent:
        made = await agent.call("schedule_wakeup", body="x", delay="0s")
        (due,) = (await agent.call("receive_wakeups", wait="10s"))["wakeups"]
        await agent.call("settle_wakeups", leases=[due["lease"]], outcome="give_up", reason="no such deploy")
        found = await agent.call("explain_wakeup", id=made["id"])
        assert found["explanation"] == "dead after 1 attempt: no such deploy"


async def test_answers_are_bounded(node: Node) -> None:
    with node.client as client:
        for number in range(60):
            client.put("wakeups", "n" * 500, delay=f"{number + 1}h", tags=["many"])
        large = client.put("wakeups", "a" * 16_000 + "b" * 8_000, delay="1h").id
        async with started(node, node.agent) as agent:
            page = await agent.call("list_wakeups", tags=["many"], limit=50)
            assert (len(page["wakeups"]), {len(row["body"]) for row in page["wakeups"]}) == (50, {201})
            rest = await agent.call("list_wakeups", tags=["many"], cursor=page["cursor"], limit=50)
            assert ("cursor" in rest, len(rest["wakeups"])) == (False, 10)
            assert {row["id"] for row in page["wakeups"]}.isdisjoint(row["id"] for row in rest["wakeups"])
            # Many within one second, and pages of a few: none is missing.
            at = (datetime.now(UTC) + timedelta(days=2)).replace(microsecond=0)
            want = {client.put("wakeups", "s", at=at + timedelta(milliseconds=n), tags=["same"]).id for n in range(7)}
            got, cursor = [], None
            while cursor is not None or not got:
                some = await agent.call("list_wakeups", tags=["same"], limit=2, cursor=cursor)
                got += [row["id"] for row in some["wakeups"]]
                cursor = some.get("cursor")
            assert (len(got), set(got)) == (7, want)
            shown = await agent.call("explain_wakeup", id=large)
            assert (len(shown["body"]), "body_from 16000" in shown["body_more"]) == (16_000, True)
            rest = await agent.call("explain_wakeup", id=large, body_from=16_000)
            assert (rest["body"], "body_more" in rest) == ("b" * 8_000, False)
            assert "store it elsewhere" in await agent.refusal("schedule_wakeup", body="x" * 20_000, delay="1h")
        client.purge("wakeups")


#: Wrong calls: tool, arguments, and words of the answer.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("schedule_wakeup", {"body": "x"}, "give either delay or at"),
    ("schedule_wakeup", {"body": "x", "delay": "soon"}, "delay"),
    ("schedule_wakeup", {"body": "x", "at": "2026-11-20"}, "deliver_at"),
    ("schedule_wakeup", {"body": "x", "at": "yesterday"}, "deliver_at"),
    ("reschedule_wakeup", {"id": "0123456789abc", "delay": "1h"}, "no such message"),
    ("explain_wakeup", {"key": "unknown"}, "no message with that key"),
    ("explain_wakeup", {}, "give either id or key"),
    ("receive_wakeups", {"wait": "2h"}, "at most 60s"),
    ("settle_wakeups", {"leases": ["x"], "outcome": "later"}, "later needs a delay"),
    ("settle_wakeups", {"leases": [], "outcome": "done"}, "leases"),
    ("settle_wakeups", {"leases": ["x"], "outcome": "done"}, "handed out no wake-up with this lease"),
    ("list_wakeups", {"limit": 500}, "limit"),
]


async def test_errors_are_in_words(node: Node) -> None:
    async with started(node, node.agent) as agent:
        for tool, arguments, words in WRONG:
            said = await agent.refusal(tool, **arguments)
            assert words in said, (tool, arguments)
            assert "Traceback" not in said


async def test_other_topics_are_out_of_reach(node: Node) -> None:
    with node.client as client:
        other = client.put("payments", "x", delay="1h").id
        async with started(node, node.admin) as agent:
            for tool in ("explain_wakeup", "cancel_wakeup"):
                assert await agent.refusal(tool, id=other) == f"there is no wake-up {other}"
        assert client.get(other).state == "scheduled"


async def test_a_token_limits_the_tools(node: Node) -> None:
    async with started(node, node.reader) as agent:
        assert "no scope publish" in await agent.refusal("schedule_wakeup", body="x", delay="1h")
        assert "no scope consume" in await agent.refusal("receive_wakeups")
        assert "wakeups" in await agent.call("list_wakeups")
    async with started(node, "nonsense") as agent:
        assert "token" in await agent.refusal("list_wakeups")


async def test_a_cancelled_receive_keeps_no_wakeup(node: Node) -> None:
    async with started(node, node.agent) as agent:
        waiting = asyncio.create_task(agent.call("receive_wakeups", wait="60s", lease="10m"))
        with node.client as client:
            await asyncio.to_thread(
                until, lambda: any(one.waiting for one in client.topic("wakeups").consumers or ()), "the poll waits"
            )
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
            await agent.call("schedule_wakeup", body="for the next one", delay="0s")
            (due,) = (await agent.call("receive_wakeups", wait="20s"))["wakeups"]
            assert due["body"] == "for the next one"
            await agent.call("settle_wakeups", leases=[due["lease"]], outcome="done")
