"""A first try lies unread in the socket of a node that stands still; its repetition gets its answer elsewhere."""

from __future__ import annotations

import time
from contextlib import suppress
from http.client import HTTPException

import pytest

from tests.system.cluster import Answer, Cluster, paused, until
from tests.system.conftest import Make

#: The cluster remembers Idempotency-Keys for at most two windows, in seconds.
WINDOW_S = 0.5
#: Length of the pause, in seconds: longer than two windows, and than requests may wait unread.
PAUSE_S = 5.5


@pytest.fixture
def cluster(make_cluster: Make) -> Cluster:
    return make_cluster(settings=(f"limits.idempotency_window_ms={int(WINDOW_S * 1000)}",))


@pytest.fixture
def lasting(make_cluster: Make) -> Cluster:
    return make_cluster()


def pending(cluster: Cluster, topic: str) -> list[str]:
    found = cluster.ask(cluster.leader(), "GET", f"/v1/topics/{topic}/messages").json
    return [message["id"] for message in found["messages"]]


def first_try(cluster: Cluster, name: str, path: str, key: str) -> Answer | None:
    with suppress(ConnectionError, HTTPException):
        return cluster.ask(name, "POST", path, b"x", headers={"Idempotency-Key": key})
    return None


def test_publishes_refused_for_good_are_not_stored_later(lasting: Cluster) -> None:
    """The refusal is remembered under the key, so however soon the first try arrives, it gets the same answer."""
    cluster, path = lasting, "/v1/topics/orders/messages?delay=1h&key=k&on_conflict=reject"
    there = cluster.publish(cluster.leader(), "orders", query="?delay=1h&key=k")
    refused = cluster.ask(cluster.leader(), "POST", path, b"x", headers={"Idempotency-Key": "i"})
    assert (refused.status, refused.json["id"]) == (409, there)
    assert cluster.ask(cluster.leader(), "DELETE", f"/v1/messages/{there}").status == 200
    late = cluster.ask(cluster.followers()[0], "POST", path, b"x", headers={"Idempotency-Key": "i"})
    assert (late.status, late.json["id"], pending(cluster, "orders")) == (409, there, [])


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "follower"])
def test_publishes_that_a_paused_node_did_not_read_are_not_stored_when_it_wakes(cluster: Cluster, leads: bool) -> None:
    leader = cluster.leader()
    sleeper, awake = (leader, cluster.followers()[0]) if leads else (cluster.followers()[0], leader)
    assert cluster.ask(awake, "PUT", "/v1/topics/full", {"max_messages": 1}).status == 200
    taken = cluster.publish(awake, "full", query="?delay=1h")
    full, twice = "/v1/topics/full/messages?delay=1h", "/v1/topics/twice/messages?delay=1h"
    with paused(cluster.pids[sleeper]):
        tries = [cluster.later(first_try, cluster, sleeper, path, "i") for path in (full, twice)]
        sent = time.monotonic()
        again = until(lambda: _definite(first_try(cluster, awake, full, "i")), "a definite answer")
        assert again.status == 429
        stored = until(lambda: _definite(first_try(cluster, awake, twice, "i")), "a definite answer")
        assert stored.status in (200, 201)
        assert cluster.ask(awake, "DELETE", f"/v1/messages/{taken}").status == 200
        until(lambda: time.monotonic() > sent + PAUSE_S, "the key is forgotten, and a request that waited is late")
    for answer in [attempt.result(20) for attempt in tries]:
        assert answer is None or (answer.status, answer.json["retryable"]) == (503, True)
    # A publish of the sleeper's own users is applied after whatever the sleeper read before it.
    cluster.publish(sleeper, "after")
    assert (pending(cluster, "full"), pending(cluster, "twice")) == ([], [stored.json["id"]])


def _definite(answer: Answer | None) -> Answer | None:
    return None if answer is None or answer.status >= 500 else answer
