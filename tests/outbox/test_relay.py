"""The relay on each database, with a node: what transactions wrote is published once, in order per key."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hadelay import Client
from hadelay.api.problems import Unreachable
from hadelay.errors import ConfigError, NotFound
from hadelay.outbox import Database, Relay, Step, connect
from hadelay.outbox.rows import cancel_columns, put_columns, reschedule_columns
from hadelay.testing import LocalNode
from tests.system.cluster import until


def insert(database: Database, columns: dict[str, Any]) -> None:
    names, marks = ", ".join(columns), ", ".join("?" if database.dialect == "sqlite" else "%s" for _ in columns)
    database._run(f"insert into hadelay_outbox ({names}) values ({marks})", list(columns.values()))


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of each test's own."""
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


@pytest.fixture
def relay(url: str, database: Database, node: LocalNode) -> Iterator[Relay]:
    found = Relay(lambda: connect(url, relay=True), node.client)
    yield found
    found.close()


def bodies(node: LocalNode, topic: str) -> list[bytes]:
    return sorted(node.client.get(found.id, body=True).body for found in node.client.messages(topic))


def test_only_what_was_committed_is_published(database: Database, relay: Relay, node: LocalNode, topic: str) -> None:
    database._run("begin")
    insert(database, put_columns(topic, "kept", delay="1h", key="k", tags=["vip"], ttl="1d"))
    database._run("commit")
    database._run("begin")
    insert(database, put_columns(topic, b"\x00lost", delay="1h"))
    database._run("rollback")
    insert(database, put_columns(topic, b"\x00\xff", delay="1h"))
    assert relay.drain() == Step(2, 0, 0, 0)
    assert bodies(node, topic) == [b"\x00\xff", b"kept"]
    found = node.client.get(topic=topic, key="k")
    assert (found.content_type, found.tags) == ("text/plain; charset=utf-8", ["vip"])
    assert relay.status().waiting == 0


def test_a_row_by_hand(database: Database, relay: Relay, node: LocalNode, topic: str) -> None:
    """Any language that can INSERT: only the topic and a payload are needed."""
    database._run(f"insert into hadelay_outbox (topic, body) values ('{topic}', 'plain')")
    assert relay.drain().done == 1
    (message,) = node.client.receive(topic, wait=5)
    assert (message.body, message.content_type) == (b"plain", "text/plain; charset=utf-8")
    message.ack()


def test_rows_of_a_key_take_effect_in_their_order(
    database: Database, relay: Relay, node: LocalNode, topic: str
) -> None:
    insert(database, put_columns(topic, "first", delay="1h", key="k"))
    insert(database, cancel_columns(topic, "k"))
    insert(database, put_columns(topic, "second", delay="1h", key="k"))
    at = node.client.put(topic, delay="3d").deliver_at
    insert(database, reschedule_columns(topic, "k", at=at))
    insert(database, cancel_columns(topic, "nobody"))
    step = relay.drain()
    assert (step.done, step.missed, step.refused) == (5, 1, 0)
    found = node.client.get(topic=topic, key="k", body=True)
    assert (found.body, found.deliver_at, found.state) == (b"second", at, "scheduled")


def test_a_repetition_stores_nothing(url: str, database: Database, node: LocalNode, topic: str) -> None:
    """A relay that is killed between the answer and the deletion."""
    for number in range(3):
        insert(database, put_columns(topic, f"{number}", delay="1h"))
    killed = Relay(lambda: connect(url), node.client)
    outcome, _ = killed._relay(killed._opened().take(2**50, 10))
    killed.close()
    assert len(outcome.done) == 3
    relay = Relay(lambda: connect(url), node.client)
    assert relay.drain().done == 3
    relay.close()
    assert bodies(node, topic) == [b"0", b"1", b"2"]


def test_a_bad_row_holds_up_no_other(database: Database, relay: Relay, node: LocalNode, topic: str) -> None:
    insert(database, put_columns(topic, "x" * 9_000_000, delay="1h"))
    insert(database, put_columns("no/topic", "x"))
    for options in ('{"delay": 5}', "[]", '{"tags": 7}', '{"callback": "https://nobody.invalid/"}'):
        insert(database, {"topic": topic, "body": "x", "options": options})
    insert(database, {"topic": topic, "action": "cancel"})
    insert(database, put_columns(topic, "good", delay="1h"))
    step = relay.drain()
    assert (step.done, step.refused, step.later) == (1, 7, 0)
    assert bodies(node, topic) == [b"good"]
    texts = [row.refusal for row in database.refused(10)]
    assert "have 90000" in texts[0]
    assert "options: unknown field 'delay'" in texts[2]
    assert all(": " in text for text in texts)
    assert database.status(0).refused == 7
    # Refused rows can be mended; `retry` takes them up under new keys.
    database._run("delete from hadelay_outbox where id in (1, 2, 7)")
    database._run("update hadelay_outbox set options = null, due_ms = 99999999999999")
    assert database.retry() == 4
    assert relay.drain().refused == 4  # beyond max_delay
    database._run("update hadelay_outbox set due_ms = null")
    assert database.retry() == 4
    assert relay.drain().done == 4


def test_a_retry_publishes_nothing_that_was_cancelled(
    database: Database, relay: Relay, node: LocalNode, topic: str
) -> None:
    far = 99_999_999_999_999
    for key in ("gone", "kept"):
        insert(database, put_columns(topic, key, delay="1h", key=key) | {"due_ms": far})
    assert relay.drain().refused == 2
    insert(database, cancel_columns(topic, "gone"))
    insert(database, put_columns(topic, "later", delay="1h", key="gone"))
    step = relay.drain()
    assert (step.done, step.missed) == (2, 1)
    database._run("update hadelay_outbox set due_ms = null")
    assert database.retry() == 1
    assert relay.drain().done == 1
    assert {node.client.get(found.id, body=True).body for found in node.client.messages(topic)} == {b"kept", b"later"}


def test_a_topic_that_is_full_holds_up_no_other(database: Database, relay: Relay, node: LocalNode, topic: str) -> None:
    node.client.put_topic(f"{topic}-full", max_messages=1)
    node.client.put(f"{topic}-full", delay="1h")
    insert(database, put_columns(f"{topic}-full", "waits", delay="1h"))
    insert(database, put_columns(topic, "goes", delay="1h"))
    step = relay.step()
    assert step.done == 1
    assert bodies(node, topic) == [b"goes"]


def test_no_node_answers(url: str, database: Database, topic: str) -> None:
    insert(database, put_columns(topic, "waits"))
    with Client("http://127.0.0.1:9", timeout=0.2) as client:
        relay = Relay(lambda: connect(url, relay=True), client)
        with pytest.raises(Unreachable):
            relay.step()
        assert (relay.status().waiting, relay.status().retrying) == (1, 0)
        relay.close()


def test_relays_share_the_rows(url: str, database: Database, node: LocalNode, topic: str) -> None:
    if database.dialect == "sqlite":
        with contextlib.closing(connect(url, relay=True)), pytest.raises(ConfigError, match="another relay"):
            connect(url, relay=True)
        return
    for number in range(60):
        insert(database, put_columns(topic, f"{number}", delay="1h"))
    first, second = (Relay(lambda: connect(url, relay=True), node.client, batch=20) for _ in range(2))
    taken = first._opened().take(2**50, 20)
    assert second.drain().done == 40
    first.close()  # as the end of its process does
    assert len(taken) == 20
    until(lambda: second.drain().done == 20, "PostgreSQL gives the rows back")
    second.close()
    assert len(bodies(node, topic)) == 60


def test_a_thread_of_the_program(database: Database, relay: Relay, node: LocalNode, topic: str) -> None:
    with relay.running():
        for number in range(3):
            insert(database, put_columns(topic, f"{number}"))
            message = node.client.receive(topic, wait=10)[0]
            assert message.body == f"{number}".encode()
            message.ack()
        until(lambda: relay.counts["done"] == 3, "the last row is gone")
    assert threading.active_count() < 50
    with pytest.raises(NotFound):
        node.client.get(topic=topic, key="none")
