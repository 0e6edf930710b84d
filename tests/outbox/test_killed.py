"""Relays as processes, killed in a loop, with a cluster whose leader is killed: nothing is lost, nothing doubled."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from hadelay import Client
from hadelay.outbox import connect
from hadelay.outbox.rows import put_columns
from tests.outbox.conftest import empty
from tests.outbox.test_relay import insert
from tests.system.cluster import Cluster, environment, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
ROWS = 400


def test_killed_relays_and_a_killed_leader(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = empty("postgresql", request, tmp_path)
    with Cluster(tmp_path / "cluster") as cluster, ExitStack() as stack:
        client = stack.enter_context(Client(list(cluster.urls.values())))
        database = connect(url)
        stack.callback(database.close)
        database.create()
        servers = ",".join(cluster.urls.values())
        words = [sys.executable, "-m", "hadelay", "outbox", "run", url, "--servers", servers]
        log = stack.enter_context((tmp_path / "log").open("w"))

        def start() -> subprocess.Popen[bytes]:
            relay = subprocess.Popen(words, env=environment(), stdout=log, stderr=log)
            stack.callback(relay.kill)
            return relay

        relays, chance, committed = [start(), start()], random.Random(7), set[str]()
        for number in range(ROWS):
            database._run("begin")
            insert(database, put_columns("orders", f"{number}", delay="2h"))
            if chance.random() < 0.8:
                committed.add(f"{number}")
            database._run("commit" if f"{number}" in committed else "rollback")
            if number % 80 == 40:
                relay = relays.pop(0)
                relay.kill()
                relay.wait(10)
                relays.append(start())
            if number == ROWS // 2:
                cluster.kill(cluster.leader())
        until(lambda: database.status(0).waiting == 0, "the outbox is empty", seconds=60)
        cluster.revive()
        found = Counter(
            client.get(message.id, body=True).body.decode() for message in client.messages("orders", state="all")
        )
        assert found == Counter(committed)
        for relay in relays:
            relay.terminate()
            assert relay.wait(20) == 0
