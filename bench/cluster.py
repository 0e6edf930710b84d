"""Our cluster as the harness drives it: started by `hadelay dev`, asked over HTTP, counted after every run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec


class Void(Exception):
    """The run does not count: something was lost, repeated, or not on every node."""


@dataclass
class Node:
    name: str
    pid: int
    http: str
    process: subprocess.Popen[bytes] | None = None  # its own, when it was started again by name


@dataclass
class Cluster:
    directory: Path
    port_base: int
    nodes: list[Node] = field(default_factory=list)
    supervisor: subprocess.Popen[bytes] | None = None
    #: Where TLS is on: the authority of the nodes' certificates. Where tokens are: one with the scope admin.
    ca: Path | None = None
    token: str = ""
    #: Of one shard of several: its index. A node then lists the topics of this shard alone.
    shard: int | None = None

    @classmethod
    def start(
        cls, directory: Path, port_base: int, *, sync: str = "commit", settings: tuple[str, ...] = (),
        preload: str = "", ca: Path | None = None, first_token: str = "", source: Path | None = None,
        shards: int = 1, environment: Mapping[str, str] | None = None,
    ) -> Cluster:  # fmt: skip
        """A cluster of three in a new directory; `preload` is a shared object put before libc in every node. ca and
        first_token: of clusters with TLS and with tokens. source: a checkout of another version, whose nodes run.
        shards: number of shards, all started by one `hadelay dev` (bench.sharded). environment: more variables of the
        nodes."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        cluster = cls(directory, port_base, ca=ca)
        command = [sys.executable, "-m", "hadelay", "dev", "--nodes", "3", "--data-dir", str(directory)]
        command += ["--port-base", str(port_base), "--dispatch-sync", sync, "-o", "json"]
        command += ["--shards", str(shards)] if shards > 1 else []
        for setting in settings:
            command += ["--set", setting]
        variables = {**os.environ, **(environment or {}), **({"LD_PRELOAD": preload} if preload else {})}
        if source is not None:
            variables["PYTHONPATH"] = str(source / "src")
        cluster.supervisor = subprocess.Popen(command, stdout=subprocess.PIPE, env=variables)
        ready = _ready_line(cluster.supervisor)
        scheme = "https" if ca else "http"
        cluster.nodes = [Node(n["name"], n["pid"], n["http"].replace("http", scheme, 1)) for n in ready["nodes"]]
        if first_token:
            cluster.token = cluster.make_token(first_token)
        cluster.leader()
        return cluster

    def make_token(self, first: str, timeout_s: float = 30) -> str:
        """One that may do everything, as soon as there is a leader."""
        body, end = msgspec.json.encode({"name": "bench", "scopes": ["admin"]}), time.monotonic() + timeout_s
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                made: str = get(f"{self.nodes[0].http}/v1/tokens", self.ca, first, body)["token"]
                return made
            time.sleep(0.05)
        raise Void("no leader")

    def stop(self) -> None:
        for process in [*(n.process for n in self.nodes), self.supervisor]:
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in [*(n.process for n in self.nodes), self.supervisor]:
            if process is not None:
                process.wait(60)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def restart(self, node: Node) -> float:
        """Start a node that is dead; seconds until it said that it is ready."""
        name = f"{node.name}-s{self.shard}" if self.shard else node.name
        command = [sys.executable, "-m", "hadelay", "dev", "--data-dir", str(self.directory), "--start", name]
        began = time.monotonic()
        node.process = subprocess.Popen([*command, "-o", "json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        node.pid = _ready_line(node.process)["nodes"][0]["pid"]
        return time.monotonic() - began

    def end(self, node: Node, number: signal.Signals) -> None:
        """Signal one node, and wait until it is gone."""
        os.kill(node.pid, number)
        if node.process is not None:
            node.process.wait()
            return
        while Path(f"/proc/{node.pid}").exists():
            time.sleep(0.01)

    @property
    def addresses(self) -> list[str]:
        return [node.http for node in self.nodes]

    # --- asking -----------------------------------------------------------------------------------------------------

    def get(self, node: Node, path: str) -> Any:
        return get(f"{node.http}{path}", self.ca, self.token)

    def put_topic(self, topic: str, **settings: Any) -> None:
        url = f"{self.leader().http}/v1/topics/{topic}"
        get(url, self.ca, self.token, msgspec.json.encode(settings), "PUT")

    def leader(self, timeout_s: float = 30) -> Node:
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            for node in self.nodes:
                try:
                    name = self.get(node, "/v1/cluster?stale=true")["leader"]
                except OSError:
                    continue
                found = [n for n in self.nodes if n.name == name and Path(f"/proc/{n.pid}").exists()]
                if found:
                    return found[0]
            time.sleep(0.05)
        raise Void("no leader")

    def follower(self) -> Node:
        leader = self.leader()
        return next(node for node in self.nodes if node.name != leader.name)

    def pending(self, node: Node, topics: list[str]) -> int:
        answer = self.get(node, f"/v1/topics?stale=true{'' if self.shard is None else f'&shard={self.shard}'}")
        counts = {t.get("name", t.get("topic")): t.get("counts", t) for t in answer["topics"]}
        states = ("scheduled", "ready", "blocked", "leased", "dead")
        return sum(counts[t].get(state, 0) for t in topics if t in counts for state in states)

    def account(self, topics: list[str], published: int, settled: int, *, unsure: int = 0) -> None:
        """published = settled + pending on every node, or the run is void.

        `unsure`: requests still under way when the load ended; each may or may not have been stored, but no node may
        differ from another.
        """
        self.settle()
        seen = {node.name: self.pending(node, topics) for node in self.nodes}
        counts = set(seen.values())
        low = published - settled
        if len(counts) != 1 or not low <= counts.pop() <= low + unsure:
            raise Void(f"published {published}, settled {settled}, but pending is {seen} (unsure: {unsure})")

    def settle(self, timeout_s: float = 60) -> None:
        """Wait until every node has applied the same, and nothing more comes: what a load left behind is stored."""
        end = time.monotonic() + timeout_s
        before: set[str] = set()
        while time.monotonic() < end:
            applied = {self.get(node, "/v1/cluster?stale=true")["applied_index"] for node in self.nodes}
            if len(applied) == 1 and applied == before:
                return
            before = applied
            time.sleep(0.3)
        raise Void("the followers do not catch up")


def get(url: str, ca: Path | None = None, token: str = "", body: bytes | None = None, method: str | None = None) -> Any:
    """body: JSON, to be posted if nothing else is said."""
    context = ssl.create_default_context(cafile=ca) if ca else None
    headers = {"Content-Type": "application/json"} if body else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, body, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as error:
        raise Void(f"{url}: {error.read().decode()[:500]}") from error


def _ready_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise Void(f"the cluster did not start (exit code {process.wait()})")
    ready: dict[str, Any] = json.loads(line)
    return ready


# --- what the kernel says about a process ---


def rss_anon_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise Void(f"process {pid} is gone")


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def written_bytes(pid: int) -> int:
    """Bytes this process caused to be written to storage."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    raise Void(f"process {pid} is gone")
