"""`hadelay.testing`: a node in the process of the tests, with a clock that they move."""

from __future__ import annotations

import asyncio
import base64
import re
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hadelay import AsyncClient
from hadelay.client import Put
from hadelay.errors import BadRequest, ConfigError, Conflict
from hadelay.settings.load import load
from hadelay.testing import LocalNode
from hadelay.webhooks import key_of

ROOT = Path(__file__).resolve().parents[2]


def test_due_messages_are_handed_out(hadelay: LocalNode) -> None:
    client = hadelay.client
    receipt = client.put("orders", {"id": 7}, delay="3d")
    hadelay.clock.advance(timedelta(days=3) - timedelta(seconds=30))
    assert client.receive("orders", wait=0) == []
    hadelay.clock.advance("30s")
    (message,) = client.receive("orders", wait=0)
    assert (message.id, message.json(), message.attempt) == (receipt.id, {"id": 7}, 1)
    assert message.deliver_at == receipt.deliver_at
    assert abs(hadelay.clock.now() - receipt.deliver_at.timestamp()) < 20
    # The lease runs out, and the message comes again after the topic's backoff.
    hadelay.clock.advance("1m")
    hadelay.clock.advance("1m")
    (message,) = client.receive("orders", wait="5s")
    assert (message.id, message.attempt, message.ack()) == (receipt.id, 2, "acked")


def test_retries_and_dead_letters(hadelay: LocalNode) -> None:
    client = hadelay.client
    client.put_topic("orders", max_attempts=2, backoff=["1h"])
    client.put("orders", "x")
    for attempt in (1, 2):
        (message,) = client.receive("orders", wait="5s")
        assert (message.attempt, message.nack(reason="no stock")) == (attempt, "nacked")
        hadelay.clock.advance("61m")
    assert [letter.errors[-1].reason for letter in client.dead("orders")] == ["no stock"]


def test_a_topic_for_replies_ends_when_nobody_uses_it(hadelay: LocalNode) -> None:
    client = hadelay.client
    client.put_topic("replies", expires_after="10m")
    client.put("replies", "x", unique_for="20m", key="once")
    client.receive("replies", wait="5s")[0].ack()
    hadelay.clock.advance("19m")
    assert client.topic("replies").expires_after == "10m"
    hadelay.clock.advance("2m")
    deadline = time.monotonic() + 10
    while any(topic.topic == "replies" for topic in client.topics()):
        assert time.monotonic() < deadline
        hadelay.clock.advance("30s")
    # A late reply does not make it stay for ever.
    assert not client.put("replies", "late", unique_for="20m", key="once").duplicate
    assert client.topic("replies").expires_after == "10m"


def test_schedules_by_steps(hadelay: LocalNode) -> None:
    client = hadelay.client
    client.put_schedule("daily", "reports", cron="0 9 * * *", timezone="UTC")
    times = []
    for _ in range(3):
        hadelay.clock.advance("1d")
        (message,) = client.receive("reports", wait="5s")
        times.append(message.occurrence)
        message.ack()
    first = times[0]
    assert first is not None
    assert times == [first + timedelta(days=n) for n in range(3)]


async def test_a_waiting_poll_is_woken(hadelay: LocalNode) -> None:
    """By the time that is moved: by itself the message would be due long after this test has given up."""
    async with AsyncClient(hadelay.url) as client:
        await client.put("orders", "x", delay="50s")
        receiving = asyncio.ensure_future(client.receive("orders", wait="60s"))
        while not hadelay._node.delivery.waiting_polls():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        hadelay.clock.advance("50s")
        (message,) = await asyncio.wait_for(receiving, 10)
        await message.ack()


def test_years(hadelay: LocalNode) -> None:
    due = datetime.now(UTC) + timedelta(days=700)
    hadelay.client.put("orders", "x", at=due)
    hadelay.clock.advance(timedelta(days=701))
    assert len(hadelay.client.receive("orders", wait="5s")) == 1


def test_a_start_is_quick() -> None:
    taken = []
    for _ in range(5):
        begun = time.perf_counter()
        with LocalNode():
            taken.append(time.perf_counter() - begun)
    assert min(taken) < 0.3


def test_nothing_remains() -> None:
    threads = set(threading.enumerate())
    with LocalNode() as node:
        directory = node._directory
    assert not directory.exists()
    assert {thread for thread in threading.enumerate() if thread.name == "hadelay-node"} <= threads


def test_the_plugin_costs_projects_nothing() -> None:
    code = (
        "import sys, hadelay.testing.plugin\n"
        "print([m for m in ('numpy', 'aiohttp', 'hadelay.client') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.stdout == "[]\n"


@pytest.mark.processes
def test_the_documented_tests_pass(tmp_path: Path) -> None:
    """The blocks of the page for pytest and unittest, as a project of its own has them."""
    blocks = re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/howto/testing.md").read_text(), re.M | re.S)
    assert len(blocks) >= 3
    for number, block in enumerate(blocks):
        (tmp_path / f"test_{number}").with_suffix(".py").write_text(block)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "hadelay.testing.plugin", tmp_path],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(blocks)} passed" in done.stdout


def test_the_key_of_a_purged_message_is_refused_and_no_duplicate(hadelay: LocalNode) -> None:
    client = hadelay.client
    for topic, drop in (("purged", client.purge), ("gone", lambda topic: client.delete_topic(topic, force=True))):
        first = client.put(topic, "x", delay="1h", idempotency_key=topic)
        assert client.put(topic, "x", delay="1h", idempotency_key=topic).duplicate
        drop(topic)
        with pytest.raises(Conflict, match="take a new key") as caught:
            client.put(topic, "x", delay="1h", idempotency_key=topic)
        assert (caught.value.outcome, caught.value.extra["id"]) == ("cancelled", first.id)
        (again,) = client.put_many([Put(topic=topic, body="x", delay="1h")], idempotency_key=f"{topic}-2")
        assert not isinstance(again, Exception)
        assert client.get(again.id).state == "scheduled"


PLAIN = "a secret of 24 bytes, or more"


@pytest.mark.parametrize(
    "secret", [PLAIN, "0123456789abcdef" * 4, base64.b64encode(b"x" * 32).decode(), "WHSEC_" + "a" * 32]
)
@pytest.mark.parametrize("part", ["webhook", "alert"])
def test_a_secret_that_no_library_can_verify_is_refused(hadelay: LocalNode, secret: str, part: str) -> None:
    """Libraries of Standard Webhooks take what stands behind whsec_, or all of a secret, for base64 of the key."""
    hook = {"url": "https://hooks.invalid/"}
    with pytest.raises(BadRequest, match="whsec_ and base64 of 24 to 64 bytes"):
        hadelay.client.put_topic("t", **{part: {**hook, "secret": secret}})
    with pytest.raises(ConfigError, match=r"webhooks.alert_secret: a secret is whsec_"):
        load(overrides=[f"webhooks.alert_secret={secret}"])
    # The way that the error names leads to the same key.
    good = "whsec_" + base64.b64encode(secret.encode()).decode()
    assert key_of(good) == key_of(secret)
    hadelay.client.put_topic("t", **{part: {**hook, "secret": good}})


def test_messages_are_as_large_as_those_of_other_nodes(hadelay: LocalNode) -> None:
    body = bytes(1 << 20)
    hadelay.client.put("large", body)
    (message,) = hadelay.client.receive("large", wait=0)
    assert message.body == body
