"""A real cluster whose leader is killed under traffic: nothing is lost, and the files say so, on every node."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hadelay import Client, Put
from hadelay.pipeline.reconcile import ReconcileOptions, Summary, run
from hadelay.pipeline.schema import parse_options
from tests.cli.support import cluster
from tests.pipeline.test_batches import read
from tests.system.cluster import until

COUNT = 300


def judge(**where: str) -> Summary:
    return run(None, ReconcileOptions(parse_options(where)))


@pytest.mark.processes
def test_nothing_is_lost_when_the_leader_is_killed_and_the_files_say_so(tmp_path: Path) -> None:
    with cluster(tmp_path, "--set", "storage.checkpoint_interval_ms=200") as dev, Client(dev.servers) as client:
        client.put("later", b"x", delay=7200)
        put = client.put_many([Put(topic="orders", body=b"%d" % n, delay=0.5 + n / 500) for n in range(COUNT)])
        left = {receipt.id for receipt in put}
        killed = False
        while left:
            received = client.receive("orders", max=20, wait=10, lease=5)
            client.ack(received)
            left -= {message.id for message in received}
            if not killed and len(left) < COUNT * 2 / 3:
                leader = client.cluster().leader
                os.kill(next(node["pid"] for node in dev.nodes if node["name"] == leader), signal.SIGKILL)
                killed = True
        summary = judge(endpoint=dev.servers)
        found = summary.verdicts
        assert (found["undelivered"], found["orphan"], found["early"], found["gone"]) == (0, 0, 0, 0)
        # Leased by the leader that fell, and not received: handed out again when the lease ran out.
        assert found["ok"] + found["late"] + found["duplicate"] == COUNT
        assert found["pending"] == 1
        bodies = {
            row["body"] for row in read(parse_options({"endpoint": dev.servers, "body": "true", "verify": "true"}))
        }
        assert bodies == {b"x"} | {b"%d" % n for n in range(COUNT)}
        # What lies in a directory is as new as its last checkpoint, also while the node runs.
        for node in dev.nodes:
            if node["name"] != leader:
                until(lambda n=node: judge(path=str(tmp_path / n["name"])).verdicts == found, "its checkpoint")  # type: ignore[misc]
                assert judge(path=f"file://{tmp_path / node['name']}").verdicts == found
