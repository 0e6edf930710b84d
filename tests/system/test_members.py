"""One process grows to three under traffic, one of them dies, another takes its place: nothing is lost or repeated."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from chaos.freeports import free_ports
from tests.system.cluster import Answer, ask, end, hadelay, ready_line, spawn, until


class Town:
    """Nodes that are started one by one, each with a file of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.base = free_ports(8)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.turn = itertools.count()

    def raft(self, name: str) -> str:
        return f"127.0.0.1:{self.base + 4 + int(name[1:]) - 1}"

    def http(self, name: str) -> str:
        return f"127.0.0.1:{self.base + int(name[1:]) - 1}"

    def start(self, name: str, *more: str) -> None:
        peers = "\n".join(f'{peer} = "{self.raft(peer)}"' for peer in sorted({name, *self.running}))
        file = self.directory / f"{name}.toml"
        file.write_text(
            f'[node]\nname = "{name}"\ndata_dir = "{self.directory / name}"\n[http]\nlisten = "{self.http(name)}"\n'
            f'[raft]\nlisten = "{self.raft(name)}"\n[raft.peers]\n{peers}\n'
        )
        self.running[name] = spawn("serve", str(file), "-o", "json", *more, errors=self.directory / f"{name}.err")

    def ready(self, name: str) -> None:
        ready_line(self.running[name], self.directory / f"{name}.err")

    def cli(self, *words: str, code: int = 0) -> str:
        servers = ",".join(f"http://{self.http(name)}" for name in self.running)
        done = hadelay(*words, "--servers", servers)
        assert done.returncode == code, done.stderr
        return done.stdout or done.stderr

    def members(self) -> dict[str, str]:
        return {m["name"]: m["role"] for m in json.loads(self.cli("cluster", "members", "list", "-o", "json"))}

    def insist(self, path: str, body: Any, key: str = "") -> Any:
        """The answer of whichever node gives one, asked again with the same key."""

        def once() -> Answer | None:
            names = list(self.running)
            with contextlib.suppress(OSError, http.client.HTTPException):
                url = f"http://{self.http(names[next(self.turn) % len(names)])}"
                answer = ask(url, "POST", path, body, {"Idempotency-Key": key} if key else {})
                return answer if answer.status in (200, 201) else None
            return None

        return until(once, f"an answer to {path}").json


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    town = Town(tmp_path)
    yield town
    for process in town.running.values():
        end(process)


def test_one_grows_to_three_and_a_dead_one_is_replaced_under_traffic(town: Town) -> None:
    town.start("n1", "--init")
    town.ready("n1")
    stop = Event()

    def publish() -> list[str]:
        ids = []
        while not stop.is_set():
            key = f"k{len(ids)}"
            ids.append(town.insist("/v1/topics/orders/messages?delay=200ms", b"x", key)["id"])
            time.sleep(0.01)  # a trickle: this is no benchmark
        return ids

    with ThreadPoolExecutor() as pool:
        writer = pool.submit(publish)
        try:
            for name in ("n2", "n3"):
                town.start(name)
                town.cli("cluster", "members", "add", name, town.raft(name), "--wait")
                town.ready(name)
            assert sorted(town.members()) == ["n1", "n2", "n3"]
            assert "n3 is a member already" in town.cli("cluster", "members", "add", "n3", town.raft("n3"), code=1)
            end(town.running.pop("n1"))
            town.start("n4")
            town.insist("/v1/topics/none/receive?redirect=false", {"max": 1})  # somebody leads
            town.cli("cluster", "members", "replace", "n1", "n4", town.raft("n4"))
            town.ready("n4")
            # Asked again, it has nothing left to do.
            town.cli("cluster", "members", "replace", "n1", "n4", town.raft("n4"))
        finally:
            stop.set()
        ids = writer.result(60)
    assert sorted(town.members()) == ["n2", "n3", "n4"]
    assert "there is no node 'n9'" in town.cli("cluster", "members", "remove", "n9", code=3)
    handed: Counter[str] = Counter()
    while len(handed) < len(ids):
        query = {"max": 100, "wait": "1s", "lease": "10m", "request_id": f"r{next(town.turn)}"}
        handed.update(m["id"] for m in town.insist("/v1/topics/orders/receive?redirect=false", query)["messages"])
    assert (sorted(handed), set(handed.values())) == (sorted(ids), {1})
    trail = json.loads(town.cli("cluster", "audit", "-o", "json"))
    assert [entry["action"] for entry in trail if entry["action"].startswith("members.")] == [
        "members.add", "members.add", "members.add", "members.add", "members.remove", "members.remove",
    ]  # fmt: skip
    # Two of three are gone for good, and the log of the last one names them.
    for process in town.running.values():
        end(process)
    shutil.copytree(town.directory / "n4", town.directory / "n5")
    town.running.clear()
    alone = (f"raft.peers=n4={town.raft('n4')}", f"node.data_dir={town.directory}/n5", "cluster.survivor=true")
    town.start("n4", *(word for setting in alone for word in ("--set", setting)))
    town.ready("n4")
    assert town.members() == {"n4": "leader"}
    assert "back it up" in town.cli("cluster", "members", "add", "n2", town.raft("n2"), code=1)
    left = json.loads(town.cli("topic", "get", "orders", "-o", "json"))
    assert left["leased"] == len(ids)
