"""A real cluster from the first message to the deleted hour: its leader is killed under traffic, and nothing is lost;
the files of every node say so, and the archive when they are gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from hadelay import Client, Put
from hadelay.pipeline import archive, forecast, replay
from hadelay.pipeline.jobs import ArchiveOptions, ForecastOptions, JobSummary, ReconcileOptions, ReplayOptions
from hadelay.pipeline.reconcile import run
from hadelay.pipeline.schema import hour_int, parse_options
from hadelay.pipeline.stores import open_store
from hadelay.testing import LocalNode
from tests.cli.support import Dev, cluster, environment
from tests.pipeline import exact_oracle
from tests.pipeline.test_batches import read
from tests.system.cluster import until

COUNT = 300
HOUR_S = 3600


def judge(spark: Any = None, engine: str = "fast", out: str = "", archive: str = "", **where: str) -> JobSummary:
    chosen = exact_oracle.run if engine == "exact" else run
    return chosen(spark, ReconcileOptions(parse_options(where), out=out, archive=archive))


@contextlib.contextmanager
def later(dev: Dev, directory: Path, seconds: int) -> Iterator[Client]:
    """The nodes of a cluster that has ended, with wall clocks that are ahead."""
    settings = ("storage.checkpoint_interval_ms=200", f"retention.archive={directory / 'archive'}")
    words = [sys.executable, "-m", "chaos.sim.faulty", "--clock", str(seconds), "serve", "--output", "json"]
    words += [word for setting in settings for word in ("--set", setting)]
    nodes = []
    try:
        for node in dev.nodes:
            with open(directory / f"{node['name']}.log", "ab") as log:
                toml = str(directory / f"{node['name']}.toml")
                nodes.append(subprocess.Popen([*words, toml], stdout=log, stderr=log, env=environment()))
        with Client(dev.servers) as client:
            yield client
    finally:
        for process in nodes:
            process.terminate()
        for process in nodes:
            process.wait(40)


@pytest.mark.processes
def test_an_hour_from_its_first_message_to_its_deletion(spark: Any, tmp_path: Path) -> None:
    out, where = str(tmp_path / "archive"), tmp_path / "out"
    handed: Counter[str] = Counter()
    words = ("--dispatch-sync", "interval", "--set", "storage.checkpoint_interval_ms=200")
    with cluster(tmp_path, *words) as dev, Client(dev.servers) as client:
        client.put_topic("dying", max_attempts=1)
        client.put_many([Put(topic="dying", body=b"d%d" % n) for n in range(3)])
        later_on = client.put("later", b"x", delay=2 * HOUR_S)
        put = client.put_many([Put(topic="orders", body=b"%d" % n, delay=0.5 + n / 500) for n in range(COUNT)])
        left = {receipt.id for receipt in put}
        leader, in_hand = "", set[str]()
        while left:
            received = client.receive("orders", max=20, wait=10, lease=5)
            handed.update(message.id for message in received)
            if not leader and received and len(left) < COUNT * 2 / 3:
                leader, in_hand = client.cluster().leader or "", {message.id for message in received}
                os.kill(next(node["pid"] for node in dev.nodes if node["name"] == leader), signal.SIGKILL)
            said = client.ack(received)
            left -= {message.id for message, outcome in zip(received, said, strict=True) if outcome != "lease_lost"}
        # Dead letters that are replayed arrive.
        died: list[bytes] = []
        while len(died) < 3:
            for message in client.receive("dying", max=3, wait=10):
                died.append(message.body)
                client.nack(message, reason="HTTP 503")
        replayed = replay.run(None, ReplayOptions(dev.servers, "dying", reason="^HTTP 503$"))
        assert replayed.outcomes == {"redriven": 3}
        again: set[bytes] = set()
        while len(again) < 3:
            received = client.receive("dying", max=3, wait=10)
            again |= {message.body for message in received}
            client.ack(received)

        summary = judge(endpoint=dev.servers, out=str(where))
        found = summary.verdicts
        assert (found["undelivered"], found["orphan"], found["early"], found["gone"]) == (0, 0, 0, 0)
        assert found["ok"] + found["late"] + found["duplicate"] == COUNT + 3
        assert found["pending"] == 1
        # Each that came twice is named, unless its first hand-out was not replicated when the leader fell, which the
        # mode allows; others that are had been leased by it, and never came.
        offending = pq.read_table(where / "offending.parquet").to_pylist()
        named = {row["id"]: row["hand_outs"] for row in offending if row["verdict"] == "duplicate"}
        twice = {message for message, times in handed.items() if times > 1}
        assert twice - named.keys() <= in_hand
        assert named.keys() <= handed.keys()
        assert all(times == 2 for times in named.values())
        bodies = {
            row["body"] for row in read(parse_options({"endpoint": dev.servers, "body": "true", "verify": "true"}))
        }
        assert bodies == {b"x", *died} | {b"%d" % n for n in range(COUNT)}
        # What lies in a directory is as new as its last checkpoint, also while the node runs.
        for node in dev.nodes:
            if node["name"] != leader:
                files = tmp_path / node["name"]
                until(lambda f=files: judge(path=str(f)).verdicts == found, "its checkpoint", every=0.3)  # type: ignore[misc]
                assert judge(path=f"file://{files}").verdicts == found

    with later(dev, tmp_path, 3 * HOUR_S) as client:
        (message,) = until(lambda: client.receive("later", wait=1), "what was to come two hours later")
        client.ack(message)
        before = judge(endpoint=dev.servers)
        archived = until(lambda: _archived(dev, out), "an archive", every=0.3)
        assert before.verdicts | {"pending": 0} == before.verdicts

    with later(dev, tmp_path, 30 * HOUR_S) as client:
        gone = {hour["hour"] for hour in archived if hour["messages"]}
        store = open_store(parse_options({"endpoint": dev.servers}))
        until(lambda: not gone & {hour_int(files.hour) for files in store.list().hours}, "deleted hours", every=0.1)
        for node in dev.nodes:
            files = tmp_path / node["name"]
            until(lambda f=files: not [h for h in gone for _ in f.rglob(f"{h}.*")], "files that are deleted")  # type: ignore[misc]
        assert judge(endpoint=dev.servers, archive=out).table == before.table
        assert judge(spark, "exact", endpoint=dev.servers, archive=out).table == before.table
    rows = pyarrow.dataset.dataset(f"{out}/messages", partitioning="hive").to_table().to_pylist()
    assert {row["body"] for row in rows} == bodies
    assert later_on.id in {row["id"] for row in rows}


def _archived(dev: Dev, out: str) -> list[dict[str, Any]]:
    found = archive.run(None, ArchiveOptions(parse_options({"endpoint": dev.servers}), out)).hours
    return found if found and all(hour["status"] != "open" for hour in found) else []


def test_the_forecast_counts_occurrences_of_schedules(hadelay: LocalNode) -> None:
    """Of a node whose clock stands."""
    client, start = hadelay.client, datetime.fromtimestamp(int(hadelay.clock.now()), UTC) + timedelta(hours=1)
    client.put("orders", b"", at=start)
    client.put_schedule("burst", topic="orders", body=b"", every="1s", start=start, end=start + timedelta(seconds=9))
    client.put_schedule("twice", topic="later", body=b"", every="1h", start=start, max_occurrences=2)
    client.put_schedule("spread", topic="later", body=b"", at=[start + timedelta(hours=3)], jitter="30m")
    client.put_schedule("paused", topic="later", body=b"", every="1s")
    client.pause_schedule("paused")
    found = forecast.run(None, ForecastOptions(parse_options({"endpoint": hadelay.url}), threshold=1, hours=5))
    assert (found.coming, found.of_schedules, found.hot_seconds) == (14, 13, 1)
    assert found.hot[0]["topics"] == {"orders": 2, "later": 1}
    some = parse_options({"endpoint": hadelay.url, "topics": "orders"})
    assert forecast.run(None, ForecastOptions(some, threshold=1, hours=5)).of_schedules == 10
