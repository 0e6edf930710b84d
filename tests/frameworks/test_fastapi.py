"""docs/howto/fastapi.md under a real uvicorn, with a real node whose clock the test moves."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

import hadelay.fastapi
from chaos.freeports import free_ports
from hadelay import AsyncMessage
from hadelay.fastapi import Hadelay, HadelayClient
from hadelay.tasks import App
from hadelay.testing import LocalNode
from tests.frameworks.servers import Server, examples, serving

SECRET = "whsec_" + "a" * 32
SHOP, BESIDE, TEST = (text for _, text in examples("fastapi.md"))
#: Shows what is in the shop's memory.
LOOK = """
@app.get("/orders")
def look():
    return orders
"""
#: A handler that takes as long as its message says.
SLOW = """
import asyncio

@hadelay.consumer("slow")
async def slow(message):
    print("begin", message.text())
    await asyncio.sleep(message.json())
    print("end", message.text())
"""


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as running:
        yield running


@pytest.fixture(scope="module")
def servers(node: LocalNode, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """Both programs, started side by side."""
    found = {}
    for name, text in {
        "shop": SHOP + LOOK,
        "beside": BESIDE.replace("Hadelay()", "Hadelay(drain='1s')") + SLOW,
    }.items():
        directory: Path = tmp_path_factory.mktemp(name)
        (directory / "shop.py").write_text(text)
        found[name] = Server(
            directory, "-m uvicorn shop:app --port {port}", HADELAY_SERVERS=node.url, WEBHOOK_SECRET=SECRET
        )
    with serving(found):
        yield found


@pytest.mark.filterwarnings("ignore:Using `httpx` with")  # Starlette prefers httpx2
def test_the_shop_s_test_uses_the_node_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBHOOK_SECRET", SECRET)
    shop = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", shop)
    exec(SHOP, shop.__dict__)
    page: dict[str, Any] = {}
    exec(TEST, page)
    with LocalNode() as node:
        page["test_an_unpaid_order_is_cancelled_after_15_minutes"](node, monkeypatch)


def test_the_shop_is_small() -> None:
    assert len(SHOP.splitlines()) <= 40


@pytest.mark.processes
def test_a_shop_reminds_cancels_and_tells_the_warehouse(servers: dict[str, Server], node: LocalNode) -> None:
    shop = servers["shop"]
    node.client.put_topic("shop.paid", webhook={"url": shop.url + "/warehouse", "secret": SECRET})
    with httpx.Client(base_url=shop.url) as customer:

        def orders() -> dict[str, str]:
            return customer.get("/orders").raise_for_status().json()  # type: ignore[no-any-return]

        for order in (4711, 4712):
            customer.post(f"/orders/{order}").raise_for_status()
        customer.post("/orders/4711/paid").raise_for_status()
        shop.wait_for(lambda: orders()["4711"] == "sent")
        assert customer.post("/warehouse", json={"order": 4712}).status_code == 401

        node.clock.advance("10m")
        shop.until("mail: please pay order 4712\n")
        node.clock.advance("5m")
        shop.wait_for(lambda: orders()["4712"] == "cancelled")
        assert orders() == {"4711": "sent", "4712": "cancelled"}
    assert "order 4711" not in shop.log


@pytest.mark.processes
def test_sigterm_drains(servers: dict[str, Server], node: LocalNode) -> None:
    server = servers["beside"]
    node.client.put("shop.events", "hello")
    server.until("begin hello\n")
    short, long = (node.client.put("slow", seconds) for seconds in (0.5, 600))
    server.until("begin 0.5\n")
    server.until("begin 600\n")
    server.stop()
    printed = server.log.splitlines()
    assert printed.index("open the database") < printed.index("begin hello")
    assert printed.index("end 0.5") < printed.index("close the database")
    assert "end 600" not in printed
    assert node.client.get(short.id).state == "acked"
    (again,) = node.client.receive("slow", wait="5s")  # long before its lease would have ended
    assert (again.id, again.attempt) == (long.id, 2)
    again.ack()


async def test_a_consumer_that_ended_with_an_error_starts_again(
    node: LocalNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hadelay.fastapi, "_AGAIN_S", 0.05)
    node.client.put_topic("pushed", webhook={"url": "http://127.0.0.1:9/"})  # a receive of such a topic is refused
    lifespan, got = Hadelay(node.url), asyncio.Event()

    @lifespan.consumer("pushed")
    async def handle(message: AsyncMessage) -> None:
        got.set()

    async with lifespan(None):
        async with asyncio.timeout(30):
            while "a consumer ended, and starts again" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.to_thread(node.client.put_topic, "pushed", webhook=None)
        await asyncio.to_thread(node.client.put, "pushed", "x")
        await asyncio.wait_for(got.wait(), 30)


async def test_periodic_tasks_are_stored_and_cpu_tasks_refused(node: LocalNode) -> None:
    app, ran = App(node.url, topic="lifespan"), asyncio.Event()

    @app.periodic(every="1s", name="tick")
    async def tick() -> None:
        ran.set()

    async with Hadelay(tasks=app)(None):
        await asyncio.wait_for(ran.wait(), 30)
    node.client.delete_schedule("task.tick")

    @app.task(cpu=True, name="heavy")
    def heavy() -> None: ...

    with pytest.raises(TypeError, match="heavy has cpu=True: run its app with `hadelay work`"):
        async with Hadelay(tasks=app)(None):
            pass


def test_the_import_without_fastapi_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "hadelay.fastapi")
    with pytest.raises(ImportError, match=r"pip install 'hadelay\[fastapi\]'"):
        importlib.import_module("hadelay.fastapi")


async def test_a_route_answers_503_when_no_node_answers() -> None:
    hadelay = Hadelay(f"http://127.0.0.1:{free_ports(1)}", timeout="0.2s")
    app = FastAPI()

    @app.post("/orders")
    async def place(client: HadelayClient) -> None:
        await client.put("orders", "4711")

    async with hadelay(app) as state:

        async def served(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "state": dict(state)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://shop") as web:
            answer = await web.post("/orders")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == "1"
    assert "127.0.0.1" not in answer.text
