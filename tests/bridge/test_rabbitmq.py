"""The bridge between a real RabbitMQ and a node."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from hadelay import AsyncClient
from hadelay.errors import ConfigError
from hadelay.testing import LocalNode
from tests.bridge.conftest import Rabbit
from tests.system.cluster import end, environment, hadelay, spawn

pytestmark = pytest.mark.timeout(180)


async def soon(what: Callable[[], Awaitable[bool]], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not await what():  # noqa: ASYNC110 — what others do sets no event here
            await asyncio.sleep(0.02)


class Shop:
    """A program that publishes delayed messages, and the queue that gets them when they are due."""

    def __init__(self, channel: Any, name: str) -> None:
        self.channel, self.name = channel, name
        self.intake, self.queue = f"{name}.delay", f"{name}.q"
        self.got: asyncio.Queue[Any] = asyncio.Queue()

    async def declare(self) -> None:
        await self.channel.exchange_declare(self.name, exchange_type="topic", durable=True)
        await self.channel.queue_declare(self.queue, durable=True)
        await self.channel.queue_bind(self.queue, self.name, routing_key="shop.#")
        await self.channel.basic_consume(self.queue, self.got.put, no_ack=True)

    async def publish(self, body: bytes, key: str = "shop.mail", exchange: str | None = None, **given: Any) -> None:
        from pamqp.commands import Basic

        properties = Basic.Properties(delivery_mode=2, **given)
        await self.channel.basic_publish(
            body, exchange=self.intake if exchange is None else exchange, routing_key=key, properties=properties
        )

    async def next(self) -> Any:
        async with asyncio.timeout(60):
            return await self.got.get()

    async def parked(self) -> Any:
        found = await self.channel.basic_get(f"hadelay.{self.intake}.refused", no_ack=True)
        return found if found.delivery.name == "Basic.GetOk" else None


@asynccontextmanager
async def bridged(rabbit: Rabbit, node: LocalNode, name: str, **options: Any) -> AsyncIterator[tuple[Shop, Any]]:
    from aiormq import connect

    from hadelay.bridge.rabbitmq import Route
    from hadelay.bridge.run import Bridge

    connection = await connect(rabbit.url)
    shop = Shop(await connection.channel(), name)
    await shop.declare()
    queue = f"hadelay.{shop.intake}"
    route = Route(
        **{"url": rabbit.url, "exchange": shop.intake, "queue": queue, "to": name, "topic": queue, **options}
    )  # fmt: skip
    async with AsyncClient(node.url) as client:
        bridge = Bridge(route, client)
        task = asyncio.create_task(bridge.run())

        async def ready() -> bool:
            if task.done():
                await task
            return 'connected{half="outflow"} 1' in bridge.page("/metrics")[1] and bridge._intake.connected

        try:
            await soon(ready, 60)
            yield shop, bridge
        finally:
            bridge.stop()
            await task
    await connection.close()


async def test_a_delayed_message_keeps_all_it_has(rabbit: Rabbit, node: LocalNode) -> None:
    async with bridged(rabbit, node, "keep") as (shop, bridge):
        headers = {"x-delay": 700, "n": 1 << 40, "b": bytearray(b"\xff"), "t": {"l": [1, None]}, "d": Decimal("1.5")}
        when = datetime(2026, 11, 29, tzinfo=UTC)
        began = time.monotonic()
        await shop.publish(
            b"late\n\xff", headers=headers, message_id="m1", priority=4, correlation_id="c", reply_to="r",
            expiration="60000", timestamp=when, message_type="mail", app_id="shop", content_type="text/x",
            content_encoding="zip", user_id="guest",
        )  # fmt: skip
        await shop.publish(b"now", headers={"a": "b"})
        await shop.publish(b"undelayed", headers={"x-delay": -5}, message_id="m2")
        found = {}
        for _ in range(3):
            message = await shop.next()
            found[message.body] = message
        assert time.monotonic() - began >= 0.7
        late, properties = found[b"late\n\xff"], found[b"late\n\xff"].header.properties
        assert (late.delivery.exchange, late.delivery.routing_key) == ("keep", "shop.mail")
        assert properties.headers == {**headers, "x-delay": -700}
        assert (properties.message_id, properties.priority, properties.delivery_mode) == ("m1", 4, 2)
        assert (properties.correlation_id, properties.reply_to, properties.expiration) == ("c", "r", "60000")
        assert (properties.timestamp, properties.message_type, properties.app_id) == (when, "mail", "shop")
        assert (properties.content_type, properties.content_encoding) == ("text/x", "zip")
        assert properties.user_id == "guest"
        assert found[b"undelayed"].header.properties.headers == {"x-delay": -5}
        # Without the header, the message did not touch the bridge.
        assert bridge.counts == {"stored": 1, "published": 1, "passed": 1}
        # A message without an id gets one, by which consumers can recognize a second delivery.
        await shop.publish(b"anonymous", headers={"x-delay": "1"})
        assert (await shop.next()).header.properties.message_id


async def test_refused_and_unroutable_messages(rabbit: Rabbit, node: LocalNode) -> None:
    topic = "hadelay.refuse.delay"
    node.client.put_topic(topic, max_attempts=1)
    async with bridged(rabbit, node, "refuse") as (shop, bridge):
        await shop.publish(b"far", headers={"x-delay": 1 << 45})
        await shop.publish(b"nowhere", key="other", headers={"x-delay": 1}, message_id="lost?")
        await shop.publish(b"nowhere now", key="other", headers={"x-delay": -1})
        await shop.publish(b"good", headers={"x-delay": 1})
        assert (await shop.next()).body == b"good"
        found = {}

        async def both() -> bool:
            if (message := await shop.parked()) is not None:
                found[message.body] = message.header.properties.headers["x-hadelay-refusal"]
            return len(found) == 2

        await soon(both)
        assert "delay" in found[b"far"]
        assert "routing key 'other'" in found[b"nowhere now"]

        async def dead() -> bool:
            return bool(list(node.client.dead(topic)))

        await soon(dead)
        assert "no queue of exchange 'refuse' takes routing key 'other'" in str(list(node.client.dead(topic)))
        assert bridge.counts["unroutable"] == 1


async def test_messages_that_amqps_decoder_refuses_are_parked(rabbit: Rabbit, node: LocalNode) -> None:
    """RabbitMQ takes them; in the decoder, each of them would end every connection of the bridge."""
    pika = pytest.importorskip("pika", reason="pika, which sends such messages, is not installed")

    def send(to: str) -> None:
        with pika.BlockingConnection(pika.URLParameters(rabbit.url)) as connection:
            channel, delay = connection.channel(), {"x-delay": 100}
            for key, given in (
                ("shop.mail", {"message_id": b"\xff"}), (b"shop.\xff", {}), ("shop.mail", {"timestamp": 2**63 - 1}),
            ):  # fmt: skip
                properties = pika.BasicProperties(**{"headers": delay} | given)
                channel.basic_publish(to, key, b"odd", properties)
            channel.basic_publish(to, "shop.mail", b"good", pika.BasicProperties(headers=delay))

    async with bridged(rabbit, node, "odd") as (shop, _):
        await asyncio.to_thread(send, shop.intake)
        assert (await shop.next()).body == b"good"
        reasons = set()

        async def all_are_parked() -> bool:
            if (found := await shop.parked()) is not None:
                assert found.body == b"odd"
                reasons.add(found.header.properties.headers["x-hadelay-refusal"])
            return len(reasons) == 3

        await soon(all_are_parked)
        assert reasons == {f"cannot be read: {name}" for name in ("message_id", "routing key", "timestamp")}


async def test_messages_with_equal_ids(rabbit: Rabbit, node: LocalNode) -> None:
    """A program that publishes the same message again loses none; the key cancels a message."""
    async with bridged(rabbit, node, "equal") as (shop, bridge):
        for _ in range(3):
            await shop.publish(b"again", headers={"x-delay": 50}, message_id="one")
        assert [(await shop.next()).body for _ in range(3)] == [b"again"] * 3
        await shop.publish(b"never", headers={"x-delay": 3_600_000, "x-hadelay-key": "order-4711"})

        async def stored() -> bool:
            return bridge.counts["stored"] == 4

        await soon(stored)
        topic = "hadelay.equal.delay"
        found = node.client.get(topic=topic, key="order-4711", body=True)
        assert found.content_type == "application/vnd.hadelay.amqp"
        node.client.cancel(topic=topic, key="order-4711")


async def test_a_message_in_the_topic_that_is_none_of_rabbitmqs(rabbit: Rabbit, node: LocalNode) -> None:
    async with bridged(rabbit, node, "alien") as (_, bridge):
        alien = node.client.put("hadelay.alien.delay", b"hello")

        async def dead() -> bool:
            return node.client.get(alien.id).state == "dead"

        await soon(dead)
        assert bridge.counts["dead"] == 1


async def test_errors_at_the_start(rabbit: Rabbit, node: LocalNode) -> None:
    from hadelay.bridge.rabbitmq import Route, check

    for url, given, words in [
        (rabbit.url, {"to": "nobody"}, "no exchange 'nobody'"),
        (rabbit.url.replace("guest:guest", "guest:wrong"), {"to": ""}, "refuses the user 'guest'"),
        (f"{rabbit.url}none", {"to": ""}, "no vhost 'none'"),
        ("http://127.0.0.1/", {"to": ""}, "needs a URL such as amqp://"),
        (rabbit.url, {"to": "", "exchange": None, "queue": "nobody"}, "no queue 'nobody'"),
    ]:
        with pytest.raises(ConfigError, match=words):
            await check(Route(**{"url": url, "exchange": "x.delay", "queue": "errors", "topic": "x", **given}))


async def test_the_page(rabbit: Rabbit, node: LocalNode, tmp_path: Path) -> None:
    """Its program runs beside the bridge of its command."""
    pytest.importorskip("pika")
    page = (Path(__file__).parents[2] / "docs/howto/from-rabbitmq.md").read_text()
    (program,) = re.findall(r"^```py\n# shop.py\n(.*?)^```$", page, re.M | re.S)
    async with bridged(rabbit, node, "shop"):
        shop = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", program), env={**environment(), "HADELAY_RABBITMQ": rabbit.url},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, errors = await asyncio.wait_for(shop.communicate(), 60)
    assert (out, shop.returncode) == (b"welcome mail.welcome -1000\n", 0), errors


#: Makes the plugin's table, and writes a message into it as the plugin does, with the broker's own records.
PLUGIN = """
Table = list_to_atom("rabbit_delayed_message" ++ atom_to_list(node())),
mnesia:create_table(Table, [{{record_name, delay_entry}}, {{attributes, [delay_key, delivery, ref]}}, {{type, bag}}]),
mnesia:clear_table(Table),
Name = rabbit_misc:r(<<"/">>, exchange, <<"plugged">>),
{{ok, Exchange}} = rabbit_exchange:lookup(Name),
Props = {{'P_basic', <<"text/x">>, undefined, [{{<<"x-delay">>, signedint, 5000}}], 2, undefined, undefined, undefined,
  undefined, <<"m1">>, undefined, undefined, undefined, undefined, undefined}},
Message = rabbit_basic:message(Name, <<"shop.mail">>, Props, <<"planned\\n">>),
[mnesia:dirty_write(Table, {{delay_entry, {{delay_key, {due} , Exchange}},
  rabbit_basic:delivery(false, false, Message, undefined), make_ref()}}) || _ <- [1, 2]],
ok.
"""


@pytest.mark.skipif(not os.environ.get("HADELAY_BRIDGE"), reason="takes most of a minute: make bridge")
async def test_messages_that_wait_in_the_plugin(rabbit: Rabbit, node: LocalNode, tmp_path: Path) -> None:
    """Equal messages are two, a second import adds none, and the bridge publishes them back when they are due."""
    expression = hadelay("import", "rabbitmq-delayed", "--expression").stdout
    async with bridged(rabbit, node, "plugged") as (shop, _):
        due_ms = time.time_ns() // 1_000_000 + 40_000
        await asyncio.to_thread(rabbit.eval, PLUGIN.format(due=due_ms))
        (tmp_path / "lines").write_text(await asyncio.to_thread(rabbit.eval, expression))
        topic = "hadelay.plugged.delay"
        words = [
            "import",
            "rabbitmq-delayed",
            tmp_path / "lines",
            "--topic",
            topic,
            "--servers",
            node.url,
            "-o",
            "json",
        ]
        first = await asyncio.to_thread(hadelay, *words)
        assert first.returncode == 0, first.stderr
        assert (json.loads(first.stdout)["imported"], json.loads(first.stdout)["skipped"]) == (2, {})
        again = await asyncio.to_thread(hadelay, *words)
        assert json.loads(again.stdout)["imported"] == 0
        other = json.loads((await asyncio.to_thread(hadelay, *words, "--exchange", "other")).stdout)
        assert other["skipped"] == {"it is of exchange 'plugged' in vhost '/'": 2}
        for message in [await shop.next(), await shop.next()]:
            assert (message.body, message.delivery.routing_key) == (b"planned\n", "shop.mail")
            assert message.header.properties.headers == {"x-delay": -5000}
            assert (message.header.properties.message_id, message.header.properties.content_type) == ("m1", "text/x")
        assert time.time_ns() // 1_000_000 >= due_ms


def test_the_command(rabbit: Rabbit, node: LocalNode, tmp_path: Path) -> None:
    assert "--exchange" in hadelay("bridge", "rabbitmq", rabbit.url, "--to", "x").stderr
    assert "own messages" in hadelay("bridge", "rabbitmq", rabbit.url, "--to", "x", "--exchange", "x").stderr
    errors = tmp_path / "errors"
    process = spawn(
        *("bridge", "rabbitmq", rabbit.url, "--exchange", "cli.delay", "--to", "amq.topic"),
        *("--servers", node.url),
        errors=errors,
    )
    try:
        deadline = time.monotonic() + 30
        while "bridging queue 'hadelay.cli.delay'" not in errors.read_text():
            assert time.monotonic() < deadline, errors.read_text()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0, errors.read_text()
    finally:
        end(process)
