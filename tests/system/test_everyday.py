"""Three nodes that nobody hurts: every node answers everything, in order, and an idle cluster is idle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hadelay import Client
from tests.system.cluster import Cluster, body_of, environment, hadelay, until


@pytest.mark.parametrize("node", ["n1", "n2", "n3"])
def test_publish_receive_ack_through_every_node(cluster: Cluster, node: str) -> None:
    topic = f"every-{node}"
    sent = cluster.publish(node, topic, b"hello", Hadelay_Delay="100ms")
    [message] = cluster.receive(node, topic, wait="10s", consumer="c")
    assert (message["id"], body_of(message)) == (sent, b"hello")
    assert 0 <= message["late_ms"] < 5_000
    assert (message["attempt"], message["redelivered"]) == (1, False)
    assert cluster.settle(node, "ack", [message]) == ["acked"]
    assert cluster.settle(node, "ack", [message]) == ["already_acked"]
    seen = cluster.describe(node, sent)
    assert seen["state"] == "acked"
    assert [event["event"] for event in seen["history"]] == ["leased", "acked"]
    assert {event["consumer"] for event in seen["history"]} >= {"c"}


def test_a_batch_through_a_follower(cluster: Cluster) -> None:
    node = cluster.followers()[0]
    bodies = [f"m{i}" for i in range(1_000)]
    ids = cluster.publish_many(node, "bulk", bodies)
    assert len(set(ids)) == len(bodies)
    got = cluster.drain("bulk", len(bodies))
    assert sorted(message["id"] for message in got) == sorted(ids)
    assert {body_of(message).decode() for message in got} == set(bodies)
    assert set(cluster.settle(node, "ack", got)) == {"acked"}


def test_a_follower_redirects_or_relays(cluster: Cluster) -> None:
    leader, (node, _) = cluster.leader(), cluster.followers()
    answer = cluster.ask(node, "POST", "/v1/topics/relay/receive", {})
    assert answer.status == 307
    assert answer.headers["location"] == f"{cluster.urls[leader]}/v1/topics/relay/receive"
    assert (answer.headers["hadelay-node"], answer.headers["hadelay-leader"]) == (node, leader)

    poll = cluster.later(cluster.ask, node, "POST", "/v1/topics/relay/receive?redirect=false", {"wait": "20s"})
    sent = cluster.publish(node, "relay")
    answer = poll.result(20)
    assert answer.status == 200, answer
    assert [message["id"] for message in answer.json["messages"]] == [sent]
    assert answer.headers["hadelay-node"] == node


def test_reads_see_what_was_answered_before(cluster: Cluster) -> None:
    """Publish at one node, read at once at the others: never a 404, never an older state."""
    for turn in range(30):
        writer, reader, other = (cluster.names[(turn + k) % 3] for k in range(3))
        sent = cluster.publish(writer, "linear", query="?delay=1h")
        assert cluster.describe(reader, sent)["state"] == "scheduled"
        assert cluster.ask(other, "DELETE", f"/v1/messages/{sent}").json == {"outcome": "cancelled"}
        assert cluster.describe(reader, sent)["state"] == "cancelled"
        assert cluster.describe(writer, sent)["state"] == "cancelled"


def test_a_stale_read_says_how_stale(cluster: Cluster) -> None:
    node = cluster.followers()[0]
    sent = cluster.publish(node, "stale", query="?delay=1h")
    answer = until(
        lambda: (a := cluster.ask(node, "GET", f"/v1/messages/{sent}?stale=true")).status == 200 and a, "it is applied"
    )
    assert int(answer.headers["hadelay-applied"]) > 0


def test_cancel_racing_receive(cluster: Cluster) -> None:
    """Each message is either cancelled or handed out, never both, whatever the order at the leader."""
    count = 60
    ids = [cluster.publish(cluster.names[i % 3], "race", query="?delay=700ms") for i in range(count)]
    # Polls on the leader, cancels through every node, at the very time they fall due.
    polls = [
        cluster.later(cluster.receive, cluster.leader(), "race", max=10, wait="4s", lease="10m") for _ in range(20)
    ]
    cancels = [
        cluster.later(cluster.ask, cluster.names[i % 3], "DELETE", f"/v1/messages/{sent}") for i, sent in enumerate(ids)
    ]
    outcomes = {sent: answer.result(20) for sent, answer in zip(ids, cancels, strict=True)}
    handed = {message["id"] for poll in polls for message in poll.result(20)}
    cancelled = {sent for sent, answer in outcomes.items() if answer.status == 200}
    assert {answer.json["outcome"] for answer in outcomes.values()} <= {"cancelled", "leased"}
    assert cancelled | handed == set(ids)
    assert not cancelled & handed
    for sent in ids:
        assert cluster.describe("n2", sent)["state"] == ("cancelled" if sent in cancelled else "leased")


def test_a_repeated_receive_gets_the_same_grant(cluster: Cluster) -> None:
    for _ in range(5):
        cluster.publish("n1", "again")
    queries = {"max": 5, "wait": "5s", "lease": "5m", "consumer": "c", "request_id": "r1"}
    first = cluster.receive("n1", "again", **queries)
    second = cluster.receive("n3", "again", **queries)
    assert [m["lease"] for m in second] == [m["lease"] for m in first]
    assert len(first) >= 1
    assert cluster.settle("n2", "nack", first, delay="0s") == ["nacked"] * len(first)
    back = cluster.drain("again", 5)
    assert {m["attempt"] for m in back if m["id"] in {f["id"] for f in first}} == {2}


def test_only_near_hours_are_mapped_and_the_kernel_agrees(cluster: Cluster) -> None:
    for delay in ("1s", "1h", "2h", "3h", "30h", "400d"):
        cluster.publish("n2", "hours", query=f"?delay={delay}")
    cluster.drain("hours", 1)
    cluster.assert_identical()
    for name in cluster.names:
        hours = cluster.hours(name)["hours"]
        said = {hour["hour"] for hour in hours if hour["mapped"]}
        maps = Path(f"/proc/{cluster.pids[name]}/maps").read_text()
        kernel = set(re.findall(rf"{re.escape(str(cluster.data(name)))}/hours/(\d+)\.(?:log|idx|dsp)", maps))
        assert said == kernel
        assert 3 <= len(said) <= 4
        assert len(hours) >= 6
        assert not any(" rw" in line or "w" in line.split()[1] for line in maps.splitlines() if "/hours/" in line)


def test_topics_due_and_names_are_the_same_everywhere(cluster: Cluster) -> None:
    cluster.publish("n3", "same", query="?delay=90m")
    now = time.time_ns() // 1_000_000
    for path in ("/v1/names", f"/v1/due?from={now}&to={now + 7_200_000}&step=1h", "/v1/topics/same"):
        answers = [cluster.ask(name, "GET", path) for name in cluster.names]
        assert {answer.status for answer in answers} == {200}, answers
        assert len({answer.body for answer in answers}) == 1, answers


def test_replicas_are_identical(cluster: Cluster) -> None:
    cluster.assert_identical()
    done = hadelay("check", "replicas", "--servers", ",".join(cluster.urls.values()), "-o", "json")
    assert done.returncode == 0, done.stderr


def test_an_idle_cluster_is_idle(cluster: Cluster) -> None:
    """Nothing grows, no entry is proposed, and a node needs next to nothing."""
    cluster.receive(cluster.leader(), "nobody", wait="100ms")

    def sizes() -> dict[Path, tuple[int, int]]:
        files = [p for name in cluster.names for d in (cluster.data(name), cluster.journal(name)) for p in d.rglob("*")]
        return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in files if p.is_file()}

    def applied() -> list[Any]:
        return [cluster.hours(name)["applied_index"] for name in cluster.names]

    def quiet() -> bool:
        """Nothing written for a while: what the tests before have left is done with."""
        before = sizes()
        time.sleep(0.5)
        return sizes() == before

    until(lambda: time.time() % 3600 < 3580, "no hour begins meanwhile", every=0.5)
    until(quiet, "the cluster comes to rest", every=0)
    files, index = sizes(), applied()
    cpu = {name: _cpu_s(cluster.pids[name]) for name in cluster.names}
    start = time.monotonic()
    time.sleep(5)  # the one thing that can only be seen by waiting
    spent = time.monotonic() - start
    shares = {name: (_cpu_s(cluster.pids[name]) - cpu[name]) / spent for name in cluster.names}
    assert max(shares.values()) < 0.05, shares
    assert applied() == index
    assert sizes() == files


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_drained_node_is_out_of_traffic_until_that_is_undone(cluster: Cluster) -> None:
    first = cluster.leader()
    assert cluster.ask(first, "POST", "/v1/cluster:drain", {"node": first}).json == {"node": first, "drained": True}
    until(lambda: cluster.leader() != first, "another one leads")
    for path, body in (("messages", b"x"), ("receive?redirect=false", {"wait": "0s"})):
        answer = cluster.ask(first, "POST", f"/v1/topics/drained/{path}", body)
        assert (answer.status, answer.json["detail"]) == (503, f"{first} is drained: ask another node")
    assert cluster.ask(first, "GET", "/readyz").status == 503
    other = cluster.leader()
    assert cluster.ask(other, "POST", "/v1/topics/drained/messages", b"x").status == 201
    # Asked of another node, it reaches the one that is meant.
    assert cluster.ask(other, "POST", "/v1/cluster:drain", {"node": first, "undo": True}).status == 200
    assert cluster.ask(first, "POST", "/v1/topics/drained/messages", b"x").status == 201
    until(lambda: cluster.ask(first, "GET", "/readyz").status == 200, "it is ready again")


WORKER = """
import asyncio, signal, sys
from hadelay import AsyncClient, Client

async def handle(message):
    print("begun", flush=True)
    await asyncio.sleep(100)

async def work():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asyncio.current_task().cancel)
    async with AsyncClient(sys.argv[1]) as client:
        await client.work("deploys", handle, drain=0.1)

def plain():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with Client(sys.argv[1]) as client:
        for message in client.consume("deploys"):
            with message:
                print("begun", flush=True)
                signal.pause()

asyncio.run(work()) if sys.argv[2] == "async" else plain()
"""


def test_deploys_are_no_failed_attempts(cluster: Cluster) -> None:
    """A worker that is stopped in the middle of its work gives the message back, as often as that may be."""
    cluster.ask("n1", "PUT", "/v1/topics/deploys", {"max_attempts": 2, "backoff": ["1h"]})
    message = cluster.publish("n2", "deploys", b"a long job")
    servers = ",".join(cluster.urls.values())
    for kind in ("async", "plain", "async", "plain"):
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, servers, kind], env=environment(), stdout=subprocess.PIPE, text=True
        )
        with worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "begun\n"
            worker.terminate()
            worker.wait(20)
        assert cluster.describe("n3", message)["state"] == "ready"
    reported = cluster.describe("n3", message)
    given_back = [event for event in reported["history"] if event["event"] == "nacked"]
    assert [event["reason"] for event in given_back] == ["the consumer stopped"] * 4
    (last,) = cluster.receive("n1", "deploys", max=1, wait="10s")
    assert (last["attempt"], last["uncounted"]) == (5, 4)
    assert cluster.settle("n2", "ack", [last]) == ["acked"]


def test_a_handler_gives_a_message_up(cluster: Cluster) -> None:
    """It is dead at its first attempt, with the reason, and can be redriven; a snooze counts no attempt."""
    message = cluster.publish("n2", "hopeless", b"for nobody")
    with Client(list(cluster.urls.values())) as client:
        (given,) = client.receive("hopeless", wait="10s")
        assert given.snooze("100ms") == "nacked"
        (given,) = client.receive("hopeless", wait="10s")
        assert (given.attempt, given.uncounted) == (2, 1)
        assert given.nack(dead=True, reason="no such customer") == "nacked"
        assert given.ack() == "lease_lost"
        (letter,) = client.dead("hopeless")
        assert (letter.id, letter.errors[-1].reason) == (message, "no such customer")
        assert [one.outcome for one in client.redrive("hopeless", [message])] == ["redriven"]
        (given,) = client.receive("hopeless", wait="10s")
        assert (given.attempt, given.uncounted, given.ack()) == (1, 0, "acked")


def test_a_result_is_read_on_every_node(cluster: Cluster) -> None:
    """Waited for at a follower, and kept over a restart of the leader that took it."""
    message = cluster.publish("n2", "asked", b"how much?")
    waiting = cluster.later(cluster.ask, cluster.followers()[0], "GET", f"/v1/messages/{message}?wait=30s")
    with Client(list(cluster.urls.values())) as client:
        (given,) = client.receive("asked", wait="10s")
        assert given.ack({"euro": 7}) == "acked"
        assert waiting.result(60).json["result"] == {"euro": 7}
        for node in cluster.names:
            assert cluster.describe(node, message)["result"] == {"euro": 7}
        leader = cluster.leader()
        cluster.kill(leader)
        cluster.restart(leader)
        for node in cluster.names:
            until(lambda node=node: cluster.describe(node, message).get("result") == {"euro": 7}, "it is kept")  # type: ignore[misc]
