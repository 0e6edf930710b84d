"""Two shards, each a cluster of its own with one real process, and one map: any node answers for both."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hadelay.client import AsyncClient, Client, Put
from hadelay.errors import BadRequest, Conflict, HadelayError
from tests.repository.test_monitoring import alerts
from tests.system.cluster import Cluster, until

#: Topics of the first shard, and of the second.
HERE, THERE = "orders", "far.orders"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cluster]]:
    directory: Path = tmp_path_factory.mktemp("shards")
    with ExitStack() as stack:
        found = [
            stack.enter_context(Cluster(directory / f"s{n}", nodes=1, settings=(f"cluster.group={n}",)))
            for n in range(2)
        ]
        known = {
            "version": 1,
            "shards": {str(n): {"group": n, "nodes": {"n1": one.urls["n1"]}} for n, one in enumerate(found)},
            "rules": [{"pattern": "far.*", "shards": [1]}, {"pattern": "*", "shards": [0]}],
        }
        for step in ("prepare", "commit"):
            for one in found:
                answer = one.ask("n1", "PUT", "/v1/shards", {"step": step, "map": known})
                assert answer.status == 200, answer
        yield found


def test_a_released_client_works_through_one_node(shards: list[Cluster]) -> None:
    """It knows nothing of shards, and one address."""
    for front in shards:
        with Client(front.urls["n1"]) as client:
            receipts = [client.put(topic, topic.encode()) for topic in (HERE, THERE)]
            for topic, receipt in zip((HERE, THERE), receipts, strict=True):
                assert client.get(receipt.id).topic == topic
                (message,) = client.receive(topic, max=1, wait="10s")
                assert (message.id, message.body) == (receipt.id, topic.encode())
                message.ack()
                assert client.get(receipt.id).state == "acked"
            assert {topic.topic for topic in client.topics()} >= {HERE, THERE}


def test_each_message_is_stored_once_in_the_shard_of_its_topic(shards: list[Cluster]) -> None:
    items = [{"topic": topic, "body": "x", "delay": "1h"} for topic in (HERE, THERE, HERE)]
    front = shards[0]
    ids = set()
    for _ in range(2):
        answer = front.ask("n1", "POST", "/v1/messages:batch", items, headers={"Idempotency-Key": "batch"})
        assert answer.status == 200, answer
        ids |= {result["id"] for result in answer.json["results"]}
    assert len(ids) == 3
    for shard, topic in enumerate((HERE, THERE)):
        for one in shards:
            assert one.ask("n1", "GET", f"/v1/topics/{topic}").headers["hadelay-shard"] == str(shard)


def overview(cluster: Cluster) -> str:
    """The table of the shards on the console's overview."""
    with urllib.request.urlopen(f"{cluster.urls['n1']}/console/", timeout=20) as answer:
        page: str = answer.read().decode()
    return page.partition('id="shards"')[2].partition("</table>")[0]


def test_the_console_shows_the_shards_and_links_to_them(shards: list[Cluster]) -> None:
    for one in shards:
        page = overview(one)
        assert all(f'href="{other.urls["n1"]}/console/"' in page for other in shards)
        assert "does not answer" not in page


def test_a_shard_that_is_down_takes_only_its_topics_along(shards: list[Cluster]) -> None:
    front, owner = shards
    owner.kill("n1")
    refused = front.ask("n1", "POST", f"/v1/topics/{THERE}/messages", b"x")
    assert (refused.status, refused.json["outcome_known"]) == (503, True), refused
    assert "shard 1" in refused.json["detail"]
    front.publish("n1", HERE)
    missing = front.ask("n1", "GET", "/v1/topics?partial=true").json
    assert missing["missing"] == [1]
    page = overview(front)
    assert (page.count("does not answer"), "this shard" in page) == (1, True)
    owner.restart("n1")

    def again() -> bool:
        return front.ask("n1", "POST", f"/v1/topics/{THERE}/messages", b"x").status == 201

    until(again, "the shard answers again")


def test_names_of_another_shard_are_not_created_by_a_direct_request(shards: list[Cluster]) -> None:
    """A request that is marked as forwarded, as one of a node with an older map."""
    front = shards[0]
    answer = front.ask("n1", "POST", "/v1/topics/far.new/messages", b"x", headers={"Hadelay-Shard": "0; map=1"})
    assert (answer.status, answer.json["shard"]) == (421, 1)


def shown(cluster: Cluster) -> dict[str, float]:
    """Values of the metrics without labels; the sum of a metric with labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(cluster.ask("n1", "GET", "/metrics").body.decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def fires(node: Any, values: dict[str, float]) -> bool:
    """Whether an alert's expression has a result for a node with these values: metrics, ==, and `or`."""
    if str(node.op) == "or":
        return fires(node.lhs, values) or fires(node.rhs, values)
    assert str(node.op) == "=="
    return values[node.lhs.name] == node.rhs.val


def test_the_alert_of_shards_fires_where_a_change_has_not_ended(shards: list[Cluster]) -> None:
    (rule,) = [one for one in alerts() if one["alert"] == "HadelayShards"]
    alert = promql.parse(rule["expr"])

    def firing() -> list[bool]:
        return [fires(alert, shown(one)) for one in shards]

    def take(step: str, one: Cluster) -> None:
        assert one.ask("n1", "PUT", "/v1/shards", {"step": step, "map": known}).status == 200

    assert firing() == [False, False]
    known = shards[0].ask("n1", "GET", "/v1/shards").json["current"]
    known["version"] += 1
    for number, one in enumerate(shards):
        take("prepare", one)
        assert firing() == [True, bool(number)]
    for number, one in enumerate(shards):
        take("commit", one)
        assert firing() == [False, not number]


def test_nodes_of_shards_show_each_metric_that_an_alert_asks_for(shards: list[Cluster]) -> None:
    """Nobody calls a webhook or has a certificate here, and a shard of one node has no peers."""
    unseen = {
        "up", "hadelay_webhook_calls_total", "hadelay_certificate_expiry_timestamp_seconds", "hadelay_raft_peer_up",
        "hadelay_raft_peer_lag_entries",
    }  # fmt: skip
    asked = {name for rule in alerts() for name in re.findall(r"\b(?:hadelay|process)_\w+|\bup\b", rule["expr"])}
    assert len(asked) > 40
    for front, topic in zip(shards, (THERE, HERE), strict=True):
        front.publish("n1", topic, query="?delay=1h")
        assert front.ask("n1", "POST", "/v1/topics/due/messages", b"x").status == 201
        values = shown(front)
        assert asked - values.keys() == unseen
        assert values["hadelay_forwarded_requests_total"] >= 1


def test_a_consumer_has_a_poll_for_each_shard(shards: list[Cluster]) -> None:
    """It may hold one message more than its concurrency, for the second shard."""
    topics = ["both", "far.both"]

    async def consume() -> None:
        async with AsyncClient(shards[0].urls["n1"]) as client:
            consumer = client.consume(topics, concurrency=3, wait="1s")
            found: dict[str, int] = dict.fromkeys(topics, 0)
            for topic in topics:
                await client.put_many([Put(topic=topic, body=b"x") for _ in range(20)])
            while sum(found.values()) < 40:
                message = await consumer.next(30)
                assert message is not None
                assert len(consumer.unsettled) <= 4
                found[message.topic] += 1
                await message.ack()
            assert found == dict.fromkeys(topics, 20)
            # One shard has nothing due, and its poll waits: messages of the other come at once all the same.
            for topic in ("far.both", "both"):
                sent = await client.put(topic, b"y")
                got = await consumer.next(30)
                assert got is not None
                assert got.id == sent.id
                await got.ack()
            consumer.topics = ["far.both", "far.more"]
            sent = await client.put("far.more", b"z")
            got = await consumer.next(30)
            assert got is not None
            assert got.id == sent.id
            await got.ack()
            await consumer.close()
            listed = client.consume(topics, order="listed")
            with pytest.raises(Conflict, match="several shards"):
                await listed.next(30)
            await listed.close()

    asyncio.run(asyncio.wait_for(consume(), 120))


def test_a_client_of_one_shard(shards: list[Cluster]) -> None:
    with Client(shards[0].urls["n1"], shard=1) as client:
        receipt = client.put("far.one", b"x", key="?")
        assert client.get(receipt.id).topic == "far.one"
        (again,) = client.put_many([Put(topic="far.one", body=b"y", delay="1h")])
        assert not isinstance(again, HadelayError)
        assert {topic.shard for topic in client.topics()} == {1}
        (message,) = client.receive("far.one", wait="10s")
        message.ack()
        assert list(client.batches()) == []
        with Client(shards[0].urls["n1"]) as both:
            other = both.put(HERE, b"x", delay="1h").id
        refused: list[Callable[[], object]] = [
            lambda: client.put(HERE, b"x"),
            lambda: client.put(f"{HERE}.never", b"x"),
            lambda: client.put_many([Put(topic=THERE, body=b"x"), Put(topic=HERE, body=b"x")]),
            lambda: client.receive(HERE),
            lambda: client.receive([HERE, "users"]),
            lambda: client.get(other),
            lambda: client.cancel(other),
            lambda: client.topic(HERE),
        ]
        for ask in refused:
            with pytest.raises(BadRequest, match="belongs to shard 0, and the request names shard 1: leave the shard"):
                ask()
        assert HERE not in {topic.topic for topic in client.topics()}


def test_lists_and_schedules_are_those_of_all_shards(shards: list[Cluster]) -> None:
    with Client(shards[0].urls["n1"]) as client:
        # Each shard has a clock of its own, so the due times are apart.
        made = [client.put(topic, b"x", delay=f"{n}h").id for n, topic in enumerate((THERE, HERE, THERE), 1)]
        assert [found.id for found in client.messages(page=2) if found.id in made] == made
        client.put_schedule("yearly", THERE, cron="@yearly")
        assert client.schedule("yearly").shard == 1
        assert [found.schedule for found in client.schedules()] == ["yearly"]
        job = client.begin_job("cancel", "far.*")
        assert job.id > 10**12
        assert [found.id for found in client.jobs()] == [job.id]
        client.delete_schedule("yearly")
