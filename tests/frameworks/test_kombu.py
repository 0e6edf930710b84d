"""The transport with kombu alone. Behaviours that kombu's integration suite covers, and the tests for them here:

connect, fail over to another host · test_connect; refused connections · test_no_node_answers; publish and consume, an
empty queue, SimpleQueue, SimpleBuffer · test_simple; direct, with routing keys, topic and fan-out exchanges ·
test_exchanges; ack, reject, requeue, and what is unsettled when a channel closes · test_settlements; prefetch ·
test_prefetch; purge, size, delete, passive declare · test_queues; time to live · test_times. Priorities of messages do
not exist here. Control commands and events need workers: test_celery.py.
"""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import ChannelError, OperationalError

from chaos.freeports import free_ports
from hadelay import AsyncClient, Client
from hadelay.celery import transport
from hadelay.celery.address import address_of, masked
from hadelay.errors import Forbidden
from tests.system.cluster import Cluster, environment, until


def url_of(cluster: Cluster, prefix: str) -> str:
    return "hadelay://" + ",".join(url.removeprefix("http://") for url in cluster.urls.values()) + f"/{prefix}"


@pytest.fixture(scope="module")
def url(cluster: Cluster) -> str:
    return url_of(cluster, "kombu")


@pytest.fixture
def connection(url: str) -> Iterator[Connection]:
    with Connection(url) as made:
        yield made


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> Queue:
    """A queue of this test's own."""
    name = f"{request.node.name}-{uuid.uuid4().hex[:8]}"
    return Queue(name, Exchange(name), name)


def drained(connection: Connection, bodies: list[Any], count: int) -> list[Any]:
    while len(bodies) < count:
        connection.drain_events(timeout=10)
    return bodies


def test_address() -> None:
    plain = address_of("hadelay://:s%2Fecret@a:1,b/shop")
    assert plain == ("http://a:1,http://b:8400", "s/ecret", "shop.", None)
    assert address_of("hadelays://[::1]:9/?ca=/ca.pem") == ("https://[::1]:9", None, "", "/ca.pem")
    assert address_of("hadelay://a", {"ca_certs": "/x"}) == ("https://a:8400", None, "", "/x")
    assert address_of("hadelay://").urls == "http://127.0.0.1:8400"
    assert masked("hadelay://:secret@a:1,b:2/shop") == "hadelay://:**@a:1,b:2/shop"
    for wrong in ("redis://a", "hadelay://a?lease=5"):
        with pytest.raises(ValueError, match="expected a URL such as hadelay://"):
            address_of(wrong)


def test_the_import_without_celery_says_what_to_install() -> None:
    program = "import sys; sys.modules['celery'] = None; import hadelay.celery"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment())
    assert found.stderr.endswith("ImportError: hadelay.celery needs Celery: pip install 'hadelay[celery]'\n")


def test_connect(url: str) -> None:
    dead = f"127.0.0.1:{free_ports(1)}"
    with Connection(url.replace("hadelay://", f"hadelay://:secret@{dead},")) as connection:
        for _ in range(4):  # the client begins with an address at random
            connection.ensure_connection(max_retries=1)
            connection.SimpleQueue("connect").put("hello")
            connection.collect()
        assert "secret" not in connection.as_uri()
        assert connection.as_uri(include_password=True) == connection.hostname


def test_no_node_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_VERIFY_S", 0.2)
    with Connection(f"hadelay://127.0.0.1:{free_ports(1)}") as connection, pytest.raises(OperationalError):
        connection.ensure_connection(max_retries=1, interval_start=0)


def test_simple(connection: Connection) -> None:
    simple = connection.SimpleQueue(f"simple/{uuid.uuid4().hex}")  # a name that no topic can have
    with pytest.raises(simple.Empty):
        simple.get(timeout=0.1)
    for number in range(3):
        simple.put({"number": number}, headers={"k": "v"})
    for number in range(3):
        message = simple.get(timeout=10)
        assert message.payload == {"number": number}
        assert message.headers["k"] == "v"
        message.ack()
    simple.close()
    buffer = connection.SimpleBuffer(f"buffer-{uuid.uuid4().hex}")
    buffer.put(b"\xff", serializer="raw")
    assert buffer.get(timeout=10).payload == b"\xff"
    buffer.close()


@pytest.mark.parametrize(
    ("kind", "sent", "expected"),
    [
        ("direct", ["a", "b", "c"], {"one": ["a"], "two": ["b"]}),
        ("topic", ["a.x", "b.x", "c"], {"one": ["a.x"], "two": ["a.x", "b.x", "c"]}),
        ("fanout", ["a", "b"], {"one": ["a", "b"], "two": ["a", "b"]}),
    ],
)
@pytest.mark.parametrize("temporary", [False, True])
def test_exchanges(url: str, kind: str, sent: list[str], expected: dict[str, list[str]], temporary: bool) -> None:
    """The publisher knows the exchange alone: it has declared none of the queues."""
    mark = uuid.uuid4().hex[:8]
    exchange = Exchange(f"{kind}-{mark}", kind)
    keys = {"one": "a.*" if kind == "topic" else "a", "two": "#" if kind == "topic" else "b"}
    queues = [Queue(f"{name}-{mark}", exchange, key, auto_delete=temporary) for name, key in keys.items()]
    got: dict[str, list[str]] = {"one": [], "two": []}

    with Connection(url) as there, Connection(url) as here:
        consumers = [
            Consumer(there.channel(), [queue], callbacks=[lambda b, m, name=name: (got[name].append(b), m.ack())])
            for name, queue in zip(keys, queues, strict=True)
        ]
        for consumer in consumers:
            consumer.consume()
        producer = Producer(here, exchange, auto_declare=True)
        for key in sent:
            producer.publish(key, routing_key=key)
        total = sum(map(len, expected.values()))
        while sum(map(len, got.values())) < total:
            there.drain_events(timeout=10)
        assert {name: sorted(bodies) for name, bodies in got.items()} == expected


def test_settlements(connection: Connection, queue: Queue, url: str, cluster: Cluster) -> None:
    producer = Producer(connection)
    for body in ("ack", "requeue", "reject", "keep"):
        producer.publish(body, routing_key=queue.name, declare=[queue])
    seen: list[tuple[str, bool]] = []

    def handle(body: str, message: Any) -> None:
        seen.append((body, bool(message.delivery_info["redelivered"])))
        again = message.delivery_info["redelivered"]
        {"ack": message.ack, "reject": message.reject, "keep": lambda: None}.get(
            body, message.ack if again else message.requeue
        )()

    with Consumer(connection.channel(), [queue], callbacks=[handle]) as consumer:
        while len(seen) < 5:
            connection.drain_events(timeout=10)
        consumer.channel.close()
    assert sorted(seen) == [("ack", False), ("keep", False), ("reject", False), ("requeue", False), ("requeue", True)]
    with Connection(url) as other:
        message = other.SimpleQueue(queue).get(timeout=10)
        assert message.payload == "keep"
        assert message.delivery_info["redelivered"]
        message.ack()
        other.default_channel.close()
    with Client(list(cluster.urls.values())) as client:
        (dead,) = client.dead(f"kombu.{queue.name}")
        assert dead.errors[-1].reason == "rejected"
        until(lambda: (info := client.topic(f"kombu.{queue.name}")).ready + info.leased == 0, "all are settled")


def test_a_closed_connection_gives_back_what_it_fetched(url: str, queue: Queue, cluster: Cluster) -> None:
    messages: list[Any] = []
    with Client(list(cluster.urls.values())) as client:
        with Connection(url) as connection, Consumer(connection, [queue], on_message=messages.append):
            for number in range(20):
                Producer(connection).publish(number, routing_key=queue.name)
            drained(connection, messages, 1)
            until(lambda: client.topic(f"kombu.{queue.name}").leased == 20, "all are fetched")
        # The leader itself gives back what it granted to a poll that has ended.
        until(lambda: client.topic(f"kombu.{queue.name}").ready == 20, "all are given back")
        (first, *_) = client.receive(f"kombu.{queue.name}", max=20)
        # A poll that ends meanwhile may be granted the message once more.
        assert next(event.reason for event in client.get(first.id).history if event.reason) == "the worker stopped"


def test_messages_that_celery_did_not_publish(connection: Connection, queue: Queue, cluster: Cluster) -> None:
    with Client(list(cluster.urls.values())) as client:
        for body in (b"garbage", b"[1]", b'{"properties": 1}'):
            client.put(f"kombu.{queue.name}", body)
        simple = connection.SimpleQueue(queue)
        simple.put("fine")
        assert simple.get(timeout=10).payload == "fine"
        until(lambda: len(list(client.dead(f"kombu.{queue.name}"))) == 3, "the others are dead letters")
        simple.close()


def test_prefetch(connection: Connection, queue: Queue) -> None:
    producer = Producer(connection)
    for number in range(5):
        producer.publish(number, routing_key=queue.name, declare=[queue])
    messages: list[Any] = []
    with Consumer(connection.channel(), [queue], prefetch_count=2, on_message=messages.append) as consumer:
        drained(connection, messages, 2)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.3)
        messages[0].ack()
        drained(connection, messages, 3)
        consumer.qos(prefetch_count=4)
        drained(connection, messages, 5)
        assert [message.payload for message in messages] == list(range(5))


def test_queues(connection: Connection, queue: Queue) -> None:
    bound = queue(connection.default_channel)
    bound.declare()
    with pytest.raises(ChannelError):
        bound.queue_declare(passive=True)
    producer = Producer(connection)
    for number in range(3):
        producer.publish(number, routing_key=queue.name)
    assert bound.queue_declare(passive=True).message_count == 3
    first = bound.get(no_ack=True)
    assert first.payload == 0
    assert bound.get().payload == 1
    assert bound.purge() == 1
    assert bound.get() is None
    bound.delete()
    with pytest.raises(ChannelError):
        bound.queue_declare(passive=True)


def test_times(connection: Connection, queue: Queue) -> None:
    """Headers of a task: when the task is due, and when it expires."""
    producer, now = Producer(connection), datetime.now(UTC)
    due, soon = now + timedelta(seconds=1), now + timedelta(seconds=0.5)
    producer.publish("later", routing_key=queue.name, declare=[queue], headers={"task": "t", "eta": due.isoformat()})
    producer.publish("gone", routing_key=queue.name, headers={"task": "t", "expires": soon.isoformat()})
    time.sleep(max(0.0, (soon - datetime.now(UTC)).total_seconds()) + 0.05)
    simple = connection.SimpleQueue(queue)
    message = simple.get(timeout=10)
    assert message.payload == "later"
    assert datetime.now(UTC) >= due
    assert message.headers["eta"] is None, "the worker would hold it once more"
    message.ack()
    with pytest.raises(simple.Empty):
        simple.get(timeout=0.1)
    simple.close()


def test_a_revoke_that_the_token_forbids_reaches_the_workers(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def forbidden(*_: object, **__: object) -> None:
        raise Forbidden("the scope read is missing")

    monkeypatch.setattr(AsyncClient, "topics", forbidden)
    app = Celery("revoke", broker=url, set_as_current=False)
    got: list[Any] = []
    mailbox = Queue(f"worker-{uuid.uuid4().hex}", Exchange("celery.pidbox", "fanout"), auto_delete=True)
    with (
        Connection(url) as worker,
        Consumer(worker, [mailbox], callbacks=[lambda body, _: got.append(body)], no_ack=True),
    ):
        app.control.revoke("a-task")
        drained(worker, got, 1)
    assert got[0]["method"] == "revoke"
    assert "a-task" in got[0]["arguments"]["task_id"]
    assert "the scope read is missing" in caplog.text
    app.close()


def test_the_second_url_of_a_failover(cluster: Cluster, queue: Queue) -> None:
    """As of a `broker_url` that is a list: kombu takes apart all URLs but the first one."""
    (host, *_) = (url.removeprefix("http://") for url in cluster.urls.values())
    dead = f"hadelay://127.0.0.1:{free_ports(1)}/kombu"
    with Connection(f"{dead};hadelay://:a%2Fb@{host}/kombu/x", connect_timeout=10) as made:
        with pytest.raises(ConnectionError, match="is a node running there"):
            made.transport.establish_connection()
        made.ensure_connection(max_retries=3)
        assert made.transport.address == (f"http://{host}", "a/b", "kombu/x.", None)


def test_the_expiration_of_a_message(connection: Connection, queue: Queue, cluster: Cluster) -> None:
    """kombu's own time to live, of a message that is no task."""
    Producer(connection).publish(
        "gone", routing_key=queue.name, exchange=queue.exchange, declare=[queue], expiration=90
    )
    with Client(list(cluster.urls.values())) as client:
        until(lambda: client.topic(f"kombu.{queue.name}").ready == 1, "the first message expires")


def test_a_requeued_message_is_fetched_at_once(connection: Connection, queue: Queue) -> None:
    with connection.SimpleQueue(queue) as simple:
        simple.put("once more")
        for _ in range(20):
            simple.get_nowait().requeue()
        simple.get_nowait().ack()
