"""The leader dies, stops or steps down in the middle: nothing is lost, nothing comes twice, nobody is left waiting."""

from __future__ import annotations

import contextlib
import http.client
import signal
import time
from collections import Counter
from concurrent.futures import Future
from itertools import pairwise
from threading import Event
from typing import Any

import pytest

from tests.system.cluster import Answer, Cluster, paused, until
from tests.system.conftest import Make

#: Answers after which a client asks again: nothing happened, or nobody knows.
_AGAIN = (503, 504)


def insist(cluster: Cluster, method: str, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
    """The same request, from node to node, until one knows: as every client does."""
    turn = 0

    def once() -> Answer | None:
        nonlocal turn
        turn += 1
        name = cluster.names[turn % len(cluster.names)]
        with contextlib.suppress(OSError, http.client.HTTPException):
            answer = cluster.ask(name, method, path, body, headers=headers, timeout=12)
            return None if answer.status in _AGAIN else answer
        return None

    return until(once, f"an answer to {method} {path}")


def publish_all(cluster: Cluster, topic: str, count: int, stop: Event, query: str = "") -> list[str]:
    """Publish one by one, each with its key, until `count` or `stop`: their ids, each known to be stored."""
    found = []
    for i in range(count):
        if stop.is_set():
            break
        key = {"Idempotency-Key": f"{topic}-{i}"}
        answer = insist(cluster, "POST", f"/v1/topics/{topic}/messages{query}", f"{topic}-{i}".encode(), key)
        assert answer.status in (200, 201), answer
        found.append(answer.json["id"])
    return found


def consume_all(cluster: Cluster, topic: str, stop: Event, sync: str = "commit") -> list[dict[str, Any]]:
    """Receive with a request id per poll, ask again with it when unanswered, never ack: every hand-out, once each."""
    found: list[dict[str, Any]] = []
    turn = 0
    while not stop.is_set():
        turn += 1
        queries = {"max": 50, "wait": "300ms", "lease": "10m", "consumer": "c", "request_id": f"{topic}-{turn}"}
        answer = insist(cluster, "POST", f"/v1/topics/{topic}/receive?redirect=false", queries)
        assert answer.status == 200, answer
        found += answer.json["messages"]
    return found


def test_publishing_through_a_killed_leader_makes_each_message_once(make_cluster: Make) -> None:
    cluster = make_cluster()
    stop = Event()
    writers = [cluster.later(publish_all, cluster, f"w{n}", 400, stop) for n in range(4)]
    leader = cluster.leader()
    until(lambda: cluster.metric(leader, "published_messages_total") > 100, "publishing is under way")
    cluster.kill(leader)
    survivor = cluster.leader()
    at = cluster.metric(survivor, "published_messages_total")
    until(lambda: cluster.metric(survivor, "published_messages_total") > at + 50, "publishing goes on")
    stop.set()
    for n, writer in enumerate(writers):
        ids = writer.result(60)
        assert len(set(ids)) == len(ids)
        got = cluster.drain(f"w{n}", len(ids))
        # One more per writer cannot be: each was insisted on until its answer came.
        assert sorted(message["id"] for message in got) == sorted(ids)
        assert not any(message["redelivered"] for message in got)
        # The key still answers with the first id, at every node.
        again = cluster.ask(
            survivor, "POST", f"/v1/topics/w{n}/messages", f"w{n}-0".encode(), headers={"Idempotency-Key": f"w{n}-0"}
        )
        assert (again.status, again.json["id"], again.json["duplicate"]) == (200, ids[0], True)
    cluster.restart(leader)
    cluster.assert_identical(*cluster.names)


def test_a_killed_leader_hands_out_nothing_twice_in_commit_mode(make_cluster: Make) -> None:
    cluster = make_cluster()
    count = 3_000
    ids = cluster.publish_many("n1", "once", ["x"] * (count // 2), delay="1s")
    ids += cluster.publish_many("n2", "once", ["x"] * (count // 2), delay="2500ms")
    stop = Event()
    consumers = [cluster.later(consume_all, cluster, "once", stop) for _ in range(1)]
    consumers += [cluster.later(_consume_as, cluster, "once", f"other{n}", stop) for n in range(3)]
    leader = cluster.leader()
    until(lambda: cluster.metric(leader, "handed_out_messages_total") > 200, "handing out is under way", every=0.005)
    cluster.kill(leader)
    until(lambda: cluster.topic(cluster.leader(), "once")["leased"] == count, "all are handed out")
    stop.set()
    handed = Counter(message["id"] for consumer in consumers for message in consumer.result(30))
    assert sorted(handed) == sorted(ids)
    assert set(handed.values()) == {1}
    cluster.restart(leader)
    cluster.assert_identical(*cluster.names)


def _consume_as(cluster: Cluster, topic: str, consumer: str, stop: Event) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    turn = 0
    while not stop.is_set():
        turn += 1
        queries = {"max": 20, "wait": "300ms", "lease": "10m", "consumer": consumer, "request_id": str(turn)}
        found += insist(cluster, "POST", f"/v1/topics/{topic}/receive?redirect=false", queries).json["messages"]
    return found


def test_messages_that_may_come_twice_in_interval_mode_say_so(make_cluster: Make) -> None:
    """A crash repeats at most what the last interval handed out, and only with the mark."""
    cluster = make_cluster(sync="interval")
    count = 2_000
    ids = cluster.publish_many("n1", "twice", ["x"] * count, delay="1s")
    leader = cluster.leader()
    stop = Event()
    consumers = [cluster.later(_consume_as, cluster, "twice", f"c{n}", stop) for n in range(4)]
    until(lambda: cluster.metric(leader, "handed_out_messages_total") > 200, "handing out is under way", every=0.005)
    cluster.kill(leader)
    until(lambda: cluster.topic(cluster.leader(), "twice")["leased"] == count, "all are handed out")
    stop.set()
    handed = [message for consumer in consumers for message in consumer.result(30)]
    times = Counter(message["id"] for message in handed)
    assert sorted(times) == sorted(ids)
    marked = {message["id"] for message in handed if message["redelivered"]}
    assert {sent for sent, n in times.items() if n > 1} <= marked
    assert max(times.values()) <= 2


@pytest.mark.parametrize("sync", ["commit", "interval"])
def test_a_lost_answer_to_a_receive_is_not_a_lost_message(make_cluster: Make, sync: str) -> None:
    """The grant was committed, its answer died with the leader: the same request gets the same grant from the next."""
    cluster = make_cluster(sync=sync)
    for n in range(10):
        cluster.publish(cluster.names[n % 3], "grant")
    leader = cluster.leader()
    queries = {"max": 10, "wait": "5s", "lease": "10m", "consumer": "c", "request_id": "lost"}
    first = cluster.receive(leader, "grant", **queries)
    if sync == "interval":
        until(lambda: cluster.topic(leader, "grant")["leased"] == len(first), "the grant is replicated")
    cluster.kill(leader)
    second = cluster.receive(cluster.leader(), "grant", **queries)
    assert [m["lease"] for m in second] == [m["lease"] for m in first]
    # An ack of either is one of the same lease.
    assert set(cluster.settle(cluster.leader(), "ack", first)) == {"acked"}
    assert set(cluster.settle(cluster.living[0], "ack", second)) == {"already_acked"}


@pytest.mark.parametrize("sync", ["commit", "interval"])
def test_a_terminated_leader_hands_over_first(make_cluster: Make, sync: str) -> None:
    """SIGTERM under load: no duplicate in either mode, and deliveries go on within about a second."""
    cluster = make_cluster(sync=sync)
    stop = Event()
    count = 3_000
    ids = [
        sent
        for n in range(30)
        for sent in cluster.publish_many("n1", "over", ["x"] * (count // 30), delay=f"{1_500 + 100 * n}ms")
    ]
    leader = cluster.leader()
    consumers = [cluster.later(_timed, cluster, "over", f"c{n}", stop) for n in range(3)]
    until(lambda: cluster.metric(leader, "handed_out_messages_total") > 500, "handing out is under way", every=0.005)
    cluster.hit(leader, signal.SIGTERM)
    until(lambda: cluster.pids[leader] not in _living(cluster), "the old leader has ended")
    until(lambda: cluster.topic(cluster.leader(), "over")["leased"] == count, "all are handed out")
    stop.set()
    handed = [pair for consumer in consumers for pair in consumer.result(30)]
    times = Counter(message["id"] for _, message in handed)
    assert sorted(times) == sorted(ids)
    assert set(times.values()) == {1}
    # Something falls due every 100 ms: the longest silence is the gap. Half a second of it is this machine's.
    moments = sorted(at for at, _ in handed)
    gap = max(b - a for a, b in pairwise(moments))
    assert gap < 1.5, f"{gap:.2f} s without a delivery"
    assert "hand_over_failed" not in cluster.log(leader)


def _timed(cluster: Cluster, topic: str, consumer: str, stop: Event) -> list[tuple[float, dict[str, Any]]]:
    found: list[tuple[float, dict[str, Any]]] = []
    turn = 0
    while not stop.is_set():
        turn += 1
        queries = {"max": 50, "wait": "300ms", "lease": "10m", "consumer": consumer, "request_id": str(turn)}
        messages = insist(cluster, "POST", f"/v1/topics/{topic}/receive?redirect=false", queries).json["messages"]
        found += [(time.monotonic(), message) for message in messages]
    return found


def _living(cluster: Cluster) -> set[int]:
    return {cluster.pids[name] for name in cluster.living}


def test_a_stopped_leader_wakes_up_deposed(make_cluster: Make) -> None:
    """SIGSTOP: the others go on; what the sleeper wakes up with must not be handed out, and its state heals."""
    cluster = make_cluster()
    ids = cluster.publish_many("n1", "sleep", ["x"] * 200)
    old = cluster.leader()
    with paused(cluster.pids[old]):
        others = [name for name in cluster.names if name != old]
        new = until(lambda: next((n for n in others if _leads(cluster, n)), None), "another leader")
        first = cluster.receive(new, "sleep", max=100, wait="5s", lease="10m")
        ids.append(cluster.publish(new, "sleep"))
        # Sent to the sleeper meanwhile: it lies in its socket, and is read first thing when it wakes up.
        polls: list[Future[Answer]] = [
            cluster.later(
                cluster.ask, old, "POST", "/v1/topics/sleep/receive?redirect=false", {"max": 100, "lease": "10m"}
            )
            for _ in range(3)
        ]
        publish = cluster.later(cluster.ask, old, "POST", "/v1/topics/sleep/messages", b"x")
        until(lambda: cluster.ask(new, "GET", "/v1/cluster").json["leader"] == new, "the new leader stays")
    late = [poll.result(20) for poll in polls]
    assert {answer.status for answer in late} <= {200, 503, 504}, late
    answer = publish.result(20)
    assert answer.status in (201, 503, 504), answer
    handed = [m["id"] for m in first]
    handed += [m["id"] for poll in late if poll.status == 200 for m in poll.json["messages"]]
    handed += [m["id"] for m in cluster.drain("sleep", len(ids) - len(handed))]
    assert not [sent for sent, n in Counter(handed).items() if n > 1]
    assert set(ids) <= set(handed)
    cluster.assert_identical(*cluster.names)


def _leads(cluster: Cluster, name: str) -> bool:
    answer = cluster.ask(name, "GET", "/v1/cluster", timeout=3)
    return answer.status == 200 and answer.json["leader"] == name


def test_a_minority_refuses_definitely_and_goes_on_when_others_return(make_cluster: Make) -> None:
    cluster = make_cluster()
    ids = [cluster.publish("n2", "minor", query="?delay=1s") for _ in range(10)]
    left, *dead = cluster.names
    poll = cluster.later(cluster.ask, left, "POST", "/v1/topics/minor2/receive?redirect=false", {"wait": "30s"})
    cluster.kill(*dead)
    # A poll that waits when the quorum goes gets its answer, too: nothing was handed out or, when it waited at a leader
    # that is dead now, nobody can know.
    answer = poll.result(20)
    assert (answer.status, answer.json["outcome_known"]) in ((503, True), (504, False))

    def refuses() -> bool:
        answer = cluster.ask(left, "POST", "/v1/topics/minor/messages", b"x")
        if answer.status == 504:  # the very first one may have been on its way
            return False
        assert answer.status == 503, answer
        assert answer.json["type"].endswith("no-leader"), answer
        assert answer.json["outcome_known"] is True
        assert answer.json["retryable"] is True
        return True

    until(refuses, "a definite 503")
    started = time.monotonic()
    for method, path, body in (
        ("GET", f"/v1/messages/{ids[0]}", None),
        ("DELETE", f"/v1/messages/{ids[0]}", None),
        ("POST", "/v1/topics/minor/receive", {"wait": "20s"}),
        ("POST", "/v1/topics/minor/messages", b"x"),
    ):
        answer = cluster.ask(left, method, path, body)
        assert answer.status == 503, (method, path, answer)
        assert answer.json["outcome_known"] is True
    assert time.monotonic() - started < 12, "each waits for a leader for 2 s at most"
    # What needs no quorum goes on answering.
    assert cluster.ask(left, "GET", f"/v1/messages/{ids[0]}?stale=true").status == 200
    assert cluster.ask(left, "GET", "/livez").status == 200
    assert cluster.ask(left, "GET", "/readyz").status == 503

    cluster.restart(*dead)
    got = cluster.drain("minor", len(ids))
    # Those refused for sure were not published after all.
    assert {m["id"] for m in got} >= set(ids)
    assert len(got) <= len(ids) + 1
    cluster.assert_identical(*cluster.names)


def test_kill_9_of_everybody_loses_nothing(make_cluster: Make) -> None:
    cluster = make_cluster()
    stop = Event()
    kept = cluster.publish_many("n1", "later", ["x"] * 500, delay="6s")
    far = cluster.publish_many("n2", "years", ["x"] * 200, delay="400d")
    done = cluster.publish_many("n3", "done", ["x"] * 20)
    got = cluster.drain("done", 20)
    assert set(cluster.settle("n1", "ack", got[:10])) == {"acked"}
    writer = cluster.later(publish_all, cluster, "load", 5_000, stop)
    until(lambda: cluster.metric("n1", "published_messages_total") > 900, "publishing is under way")
    cluster.kill(*cluster.names)
    stop.set()
    cluster.restart(*cluster.names)
    written = writer.result(60)
    assert {m["id"] for m in cluster.drain("load", len(written))} == set(written)
    assert {m["id"] for m in cluster.drain("later", len(kept))} == set(kept)
    assert cluster.topic("n1", "years")["scheduled"] == len(far)
    assert cluster.describe("n2", far[-1])["state"] == "scheduled"
    # Leases and acks are as they were: ten acked, ten still held by whoever has the tokens.
    assert cluster.settle("n2", "ack", got) == ["already_acked"] * 10 + ["acked"] * 10
    cluster.assert_identical(*cluster.names)
    assert {m["id"] for m in got} == set(done)


def test_a_silent_leader_keeps_nobody_waiting_once_another_leads(make_cluster: Make) -> None:
    """Paused, it breaks no connection: what followers sent to it is neither answered nor refused."""
    cluster = make_cluster(settings=("limits.commit_timeout_ms=5m",))
    leader, path = cluster.leader(), "/v1/topics/silent/messages"
    others = [name for name in cluster.names if name != leader]
    cluster.publish(leader, "silent")

    def knows_another(name: str) -> bool:
        answer = cluster.ask(name, "GET", "/v1/cluster?stale=true", timeout=3)
        return answer.json["leader"] not in (None, leader)

    with paused(cluster.pids[leader]):
        unanswered = [cluster.later(cluster.ask, name, "POST", path, b"x") for name in others for _ in range(4)]
        for name in others:
            until(lambda name=name: knows_another(name), f"{name} follows another leader, or leads")
            until(lambda name=name: cluster.ask(name, "POST", path, b"y").status == 201, f"{name} stores")
        assert {answer.result(30).status for answer in unanswered} <= {201, 503, 504}
