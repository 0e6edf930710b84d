"""Disks that are wiped, put back from a copy, left behind, or full."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.system.cluster import Answer, Cluster, hadelay, until
from tests.system.conftest import Make

#: Journals are cut soon: a checkpoint each second, small segments.
SMALL = ("storage.checkpoint_bytes=1MiB", "storage.checkpoint_interval_ms=1s", "raft.segment_bytes=8MiB")
#: And little of them is kept: to write the 256 MiB that it is otherwise, and to compare them, takes half a minute.
FORGETFUL = """
import sys
from dataclasses import replace
from hadelay.server import node
made = node.raft_config
node.raft_config = lambda config: replace(made(config), journal_keep_bytes=8 << 20)
from hadelay.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


def fill(cluster: Cluster, topic: str, through: str, count: int = 300) -> list[str]:
    """Messages now, in an hour and in a year, some of them settled."""
    ids = cluster.publish_many(through, topic, ["now"] * count)
    ids += cluster.publish_many(through, topic, ["soon"] * count, delay="1h")
    ids += cluster.publish_many(through, topic, ["far"] * 20, delay="365d")
    got = cluster.drain(topic, count)
    cluster.settle(through, "ack", got[: count // 2])
    cluster.settle(through, "nack", got[count // 2 : count // 2 + 20], delay="2h")
    return ids


def identity(cluster: Cluster, name: str) -> Any:
    return json.loads(hadelay("inspect", cluster.data(name) / "identity", "-o", "json").stdout)


def assert_equal_and_alive(cluster: Cluster, back: str, topic: str) -> None:
    """`back` has what the others have, and counts: with it and one other there is a majority."""
    cluster.assert_identical(*cluster.names)
    servers = ",".join(cluster.urls.values())
    done = hadelay("check", "replicas", "--servers", servers)
    assert done.returncode == 0, done.stderr
    until(lambda: cluster.ask(back, "GET", "/readyz").status == 200, "it votes and counts")
    other = next(name for name in cluster.names if name not in (back, cluster.leader()))
    if other != back:
        cluster.kill(other)
    path = f"/v1/topics/{topic}/messages"
    until(lambda: cluster.ask(back, "POST", path, b"x").status == 201, "it counts for a majority", 10)
    assert cluster.topic(back, topic)["leased"] > 0


@pytest.mark.parametrize("lost", ["all", "data", "journal"])
def test_a_wiped_node_is_admitted_again(make_cluster: Make, lost: str) -> None:
    cluster = make_cluster(settings=SMALL if lost == "all" else ())
    fill(cluster, "wiped", "n1")
    back = cluster.followers()[0] if lost == "data" else cluster.leader()
    cluster.kill(back)
    gone = {"all": cluster.directory / back, "data": cluster.data(back), "journal": cluster.journal(back)}[lost]
    shutil.rmtree(gone)
    cluster.publish(cluster.leader(), "wiped")
    cluster.restart(back)
    cluster.publish(back, "wiped")
    assert_equal_and_alive(cluster, back, "wiped")


def test_a_wiped_node_has_no_vote_before_it_is_admitted(make_cluster: Make) -> None:
    """Two of three lost: the one that remembers is no majority with an amnesiac. Its word must not be overruled."""
    cluster = make_cluster()
    sent = cluster.publish("n1", "memory", query="?delay=1h")
    leader, (wiped, other) = cluster.leader(), cluster.followers()
    cluster.kill(wiped, other, leader)
    shutil.rmtree(cluster.directory / wiped)
    # The wiped one and one that has the log: together two of three, and yet no quorum that may elect.
    with pytest.raises(AssertionError, match="not ready"):
        _restart_within(cluster, 5, wiped, other)
    for name in (wiped, other):
        answer = cluster.ask(name, "POST", "/v1/topics/memory/messages", b"x")
        assert answer.status == 503, answer
    cluster.kill(wiped, other)
    cluster.restart(*cluster.names)
    assert cluster.describe(wiped, sent)["state"] == "scheduled"
    cluster.assert_identical(*cluster.names)


def _restart_within(cluster: Cluster, seconds: float, *names: str) -> None:
    import tests.system.cluster as harness

    patience, harness.PATIENCE_S = harness.PATIENCE_S, seconds
    try:
        cluster.restart(*names)
    finally:
        harness.PATIENCE_S = patience


@pytest.mark.parametrize("what", ["all", "data"])
def test_a_node_put_back_from_an_old_copy_is_admitted_again(make_cluster: Make, what: str, tmp_path: Path) -> None:
    cluster = make_cluster(settings=("storage.checkpoint_interval_ms=1s",))
    fill(cluster, "copy", "n1", 50)
    back = cluster.leader()
    until(lambda: cluster.metric(back, "checkpoints_total") >= 1, "a checkpoint")
    cluster.kill(back)
    origin = cluster.directory / back if what == "all" else cluster.data(back)
    shutil.copytree(origin, tmp_path / "copy")
    cluster.restart(back)
    fill(cluster, "newer", "n2", 200)
    until(lambda: cluster.metric(back, "checkpoints_total") >= 1, "another checkpoint")
    cluster.kill(back)
    shutil.rmtree(origin)
    shutil.copytree(tmp_path / "copy", origin)
    cluster.restart(back)
    if what == "all":  # an old checkpoint with the whole journal behind it has forgotten nothing
        until(lambda: identity(cluster, back)["incarnation"] > 1, "it is somebody new")
        now = identity(cluster, back)
        cluster.kill(back)
        cluster.restart(back)
        assert identity(cluster, back) == now  # once is enough
    assert_equal_and_alive(cluster, back, "newer")


def _left_behind(make_cluster: Make) -> tuple[Cluster, str, str]:
    """(cluster, its leader, a node that was killed and lacks what the leader's journal no longer has)"""
    cluster = make_cluster(settings=SMALL)
    fill(cluster, "behind", "n1", 50)
    cluster.kill(*cluster.names)
    cluster.restart(*cluster.names, program=FORGETFUL)
    leader, (back, _) = cluster.leader(), cluster.followers()
    cluster.kill(back)
    body = "x" * 20_000

    def segments() -> set[str]:
        return {path.name for path in cluster.journal(leader).glob("*.seg")}

    before = segments()

    def cut() -> bool:
        """More than any segment holds, until all are gone that the other node has something of."""
        cluster.publish_many(leader, "behind", [body] * 200, delay="1h")
        return not before & segments()

    until(cut, "the leader's journal is cut")
    return cluster, leader, back


def test_a_node_that_missed_compacted_entries_catches_up_by_files(make_cluster: Make) -> None:
    cluster, leader, back = _left_behind(make_cluster)
    cluster.restart(back)
    until(lambda: cluster.hours(back)["applied_index"] == cluster.hours(leader)["applied_index"], "it caught up")
    assert "snapshot_installed" in cluster.log(back)
    cluster.publish(back, "behind", query="?delay=2h")
    assert_equal_and_alive(cluster, back, "behind")
    cluster.restart(*(name for name in cluster.names if name not in cluster.living))
    # And what came by files survives like anything else.
    cluster.kill(*cluster.names)
    cluster.restart(*cluster.names)
    cluster.assert_identical(*cluster.names)


def test_files_that_a_disk_has_no_room_for_are_waited_with(make_cluster: Make, tiny_disk: Path) -> None:
    """The node stays, and keeps nobody from publishing; when there is room it goes on, and nobody has to start it."""
    cluster, leader, back = _left_behind(make_cluster)
    shutil.move(cluster.data(back), tiny_disk / "g0")
    cluster.data(back).symlink_to(tiny_disk / "g0")
    ballast = tiny_disk / "ballast"
    with open(ballast, "wb") as file:
        free = os.statvfs(tiny_disk).f_bavail * os.statvfs(tiny_disk).f_frsize
        os.posix_fallocate(file.fileno(), 0, free - (4 << 20))
    with pytest.raises(AssertionError, match="not ready"):
        _restart_within(cluster, 5, back)
    assert "snapshot_failed" in cluster.log(back)
    assert list((tiny_disk / "g0" / "incoming" / "hours").iterdir()) == []
    cluster.publish(leader, "behind", query="?delay=2h")
    ballast.unlink()
    until(lambda: cluster.hours(back)["applied_index"] == cluster.hours(leader)["applied_index"], "it caught up")
    cluster.assert_identical(leader, back)


def test_publishing_stops_at_the_mark_and_consuming_goes_on(make_cluster: Make) -> None:
    """Nothing is really full: one node says that less than storage.min_free_bytes is free."""
    cluster = make_cluster()
    kept = cluster.publish_many("n1", "full", ["x"] * 20)
    full = cluster.followers()[0]
    cluster.kill(full)
    cluster.restart(full, settings=("storage.min_free_bytes=900TiB",))
    _refuses_publishes(cluster, full)
    got = cluster.drain("full", len(kept))
    answer = cluster.ask("n1", "POST", "/v1/leases:ack", {"leases": [got[0]["lease"]], "result": "paid"})
    assert (answer.status, answer.json["detail"].split(":")[0]) == (507, f"too little disk space for results on {full}")
    assert set(cluster.settle(full, "ack", got[:10])) == {"acked"}
    assert set(cluster.settle("n1", "nack", got[10:], delay="0s")) == {"nacked"}
    assert {m["attempt"] for m in cluster.drain("full", 10)} == {2}
    cluster.kill(full)
    cluster.restart(full)
    until(lambda: cluster.ask("n1", "POST", "/v1/topics/full/messages", b"x").status == 201, "space again")


def _refuses_publishes(cluster: Cluster, full: str) -> None:
    def refused(name: str) -> Answer | None:
        answer = cluster.ask(name, "POST", "/v1/topics/full/messages", b"x")
        return None if answer.status == 201 else answer

    for name in cluster.names:
        answer = until(partial(refused, name), f"a refusal by {name}")
        assert answer.status == 507, answer
        assert (answer.json["retryable"], answer.json["outcome_known"]) == (True, True)
        assert f"on {full}: free space there" in answer.json["detail"]
        items = cluster.ask(name, "POST", "/v1/messages:batch", [{"topic": "full", "body": "x"}])
        assert items.status == 507 or items.json["results"][0]["error"]["status"] == 507, items


def test_a_disk_that_really_fills_up(make_cluster: Make, tiny_disk: Path) -> None:
    """Published to until it is refused, then emptied by consuming; nothing that was acknowledged is missing."""
    marks = ("storage.min_free_bytes=32MiB", *SMALL)
    cluster = make_cluster(settings=marks)
    tight = cluster.followers()[0]
    cluster.kill(tight)
    shutil.copytree(cluster.directory / tight, tiny_disk / tight)
    shutil.rmtree(cluster.directory / tight)
    (cluster.directory / tight).symlink_to(tiny_disk / tight)
    cluster.restart(tight)
    ids: list[str] = []
    body = "x" * 10_000

    def filled() -> bool:
        answer = cluster.ask("n1", "POST", "/v1/messages:batch", [{"topic": "full", "body": body}] * 100)
        if answer.status == 507:
            return True
        assert answer.status == 200, answer
        results = answer.json["results"]
        ids.extend(result["id"] for result in results if "id" in result)
        return any(result.get("error", {}).get("status") == 507 for result in results)

    until(filled, "507", every=0.005)
    assert len(ids) > 500
    look = json.loads(hadelay("top", "--once", "-o", "json", "--servers", ",".join(cluster.urls.values())).stdout)
    assert {node["node"] for node in look["nodes"] if "disk nearly full" in node.get("detail", "")} == {tight}
    got = cluster.drain("full", len(ids))
    assert {m["id"] for m in got} == set(ids)
    for n in range(0, len(got), 1000):
        assert set(cluster.settle(cluster.names[n % 3], "ack", got[n : n + 1000])) == {"acked"}
    # Space comes back, and so does publishing; whatever the node did meanwhile, it is as the others are.
    subprocess.run(["mount", "-o", "remount,size=400m", tiny_disk], check=True)
    if tight not in cluster.living:
        cluster.restart(tight)
    until(lambda: cluster.ask("n1", "POST", "/v1/topics/full/messages", b"x").status == 201, "space again")
    cluster.assert_identical(*cluster.names)


def test_a_disk_that_somebody_else_fills_ends_one_node_and_no_promise(make_cluster: Make, tiny_disk: Path) -> None:
    """Not a byte is left, whatever the marks say: the node ends itself rather than forget; the others go on."""
    cluster = make_cluster(settings=("storage.min_free_bytes=1MiB", *SMALL))
    tight = cluster.leader()
    cluster.kill(tight)
    shutil.move(cluster.directory / tight, tiny_disk / tight)
    (cluster.directory / tight).symlink_to(tiny_disk / tight)
    cluster.restart(tight)
    ballast = tiny_disk / "ballast"
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, os.statvfs(tiny_disk).f_bavail * os.statvfs(tiny_disk).f_frsize)
    ids = []
    body = b"x" * 100_000
    end = time.monotonic() + 20
    other = next(name for name in cluster.names if name != tight)
    while len(ids) < 400 and time.monotonic() < end:
        answer = cluster.ask(other, "POST", "/v1/topics/full/messages", body)
        if answer.status == 507:
            break
        ids += [answer.json["id"]] if answer.status == 201 else []
    assert "SIGBUS" not in (cluster.directory / "dev.err").read_text()
    ballast.unlink()
    if tight not in cluster.living:
        cluster.restart(tight)
    until(lambda: cluster.ask(other, "POST", "/v1/topics/full/messages", b"x").status == 201, "space again")
    assert {m["id"] for m in cluster.drain("full", len(ids))} >= set(ids)
    cluster.assert_identical(*cluster.names)
