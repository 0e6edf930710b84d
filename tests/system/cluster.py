"""Clusters of real processes for tests: started by `hadelay dev`, asked over HTTP, killed by pid, and always ended.

Everything here is a black box: what a test knows of a node is what it answers, what lies in its directory, and what
the kernel says about its process.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from chaos.freeports import free_ports
from tests.commands import Hadelay, command

T = TypeVar("T")
SOURCE = Path(__file__).resolve().parents[2] / "src"
#: The longest any single condition may take: slow machines, not slow code.
PATIENCE_S = 30.0


def until(condition: Callable[[], T], what: str, seconds: float = PATIENCE_S, every: float = 0.02) -> T:
    """The first true answer of `condition`; AssertionError when there is none in time. Refused connections are a no."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ConnectionError, TimeoutError, http.client.HTTPException):
            if answer := condition():
                return answer
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(every)


# --- commands and processes ------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Ours, without any HADELAY_ of the developer."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HADELAY_")}
    return {**clean, "PYTHONPATH": str(SOURCE), "COLUMNS": "200"}


def hadelay(*words: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return command(words, environment(), timeout=timeout)


def alive(pid: int) -> bool:
    """Runs, or could: not gone, and not waiting to be buried. A thread that still ends keeps its files, and so the lock
    of the data directory."""
    try:
        ended = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return not ended or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def spawn(*words: object, errors: Path, program: str | None = None) -> subprocess.Popen[bytes]:
    """A hadelay command in the background, in a session of its own; whoever starts it ends it. program: Python, run
    instead of hadelay's own command line."""
    start = Hadelay if program is None else subprocess.Popen
    what = ("-m", "hadelay") if program is None else ("-c", program)
    with open(errors, "ab") as log:
        return start(
            [sys.executable, *what, *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )


def ready_line(process: subprocess.Popen[bytes], errors: Path) -> dict[str, Any]:
    """What it says when it is ready; AssertionError with its last words if it ends, or says nothing in time."""
    assert process.stdout is not None
    end = time.monotonic() + PATIENCE_S
    while select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
        line = process.stdout.readline()
        if not line:
            break
        said: dict[str, Any] = json.loads(line)
        if said.get("ready"):
            return said
    raise AssertionError(f"not ready: {errors.read_text()[-2000:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(PATIENCE_S)
    if process.stdout is not None:
        process.stdout.close()


# --- HTTP ------------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None

    def __repr__(self) -> str:
        return f"<{self.status} {self.body[:300].decode(errors='replace')}>"


def ask(
    url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 15.0
) -> Answer:
    """One request on a connection of its own. `body`: bytes as they are, anything else as JSON."""
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)
    head = dict(headers or {})
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
        head.setdefault("Content-Type", "application/json")
    try:
        connection.request(method, path, body, head)
        answer = connection.getresponse()
        return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


# --- clusters --------------------------------------------------------------------------------------------------------


@dataclass
class Cluster:
    """`nodes` of them, n1…; use it in a `with`, which ends every process it started. shards: as many clusters, which
    share all topics; n1-s1 is a node of the second."""

    directory: Path
    nodes: int = 3
    sync: str = "commit"
    settings: tuple[str, ...] = ()
    shards: int = 1
    urls: dict[str, str] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(64))

    # life

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        options = [word for setting in self.settings for word in ("--set", setting)]
        errors = self.directory / "dev.err"
        base = free_ports(2 * self.nodes * self.shards)
        process = spawn(
            *("dev", "--nodes", self.nodes, "--shards", self.shards, "--data-dir", self.directory, "--port-base", base),
            *("--dispatch-sync", self.sync, "-o", "json", *options),
            errors=errors,
        )
        self.children.append(process)
        self._take(ready_line(process, errors))

    def _take(self, said: dict[str, Any]) -> None:
        for node in said["nodes"]:
            self.urls[node["name"]], self.pids[node["name"]] = node["http"], node["pid"]

    def close(self) -> None:
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.children:
            end(process)
        until(lambda: not any(map(alive, self.pids.values())), "every node ended")
        self.pool.shutdown(cancel_futures=True)

    def hit(self, name: str, number: signal.Signals) -> None:
        os.kill(self.pids[name], number)

    def kill(self, *names: str, number: signal.Signals = signal.SIGKILL) -> None:
        """And wait until they are gone."""
        for name in names:
            self.hit(name, number)
        until(lambda: not any(alive(self.pids[name]) for name in names), f"{names} ended")

    def restart(self, *names: str, settings: tuple[str, ...] = (), program: str | None = None) -> None:
        """Killed ones, all at once; returns when each said that it is ready."""
        options = [word for setting in settings for word in ("--set", setting)]
        starting = []
        for name in names:
            errors = self.directory / f"{name}.log"
            words = ("dev", "--data-dir", self.directory, "--start", name, "-o", "json", *options)
            starting.append((spawn(*words, errors=errors, program=program), errors))
            self.children.append(starting[-1][0])
            self.pids[name] = starting[-1][0].pid
        for process, errors in starting:
            self._take(ready_line(process, errors))

    def revive(self) -> None:
        """Restart all nodes that do not run."""
        if dead := [name for name, pid in self.pids.items() if not alive(pid)]:
            self.restart(*dead)

    def refused(self, name: str) -> str:
        """Start a killed node that must not start: its words."""
        done = hadelay("dev", "--data-dir", self.directory, "--start", name, "-o", "json")
        assert done.returncode != 0, "it started and ended again"
        return done.stderr

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def data(self, name: str) -> Path:
        return self.directory / name / "g0"

    def journal(self, name: str) -> Path:
        return self.directory / name / "raft" / "g0"

    # asking

    @property
    def names(self) -> list[str]:
        return sorted(self.urls)

    @property
    def living(self) -> list[str]:
        return [name for name in self.names if alive(self.pids[name])]

    def ask(self, name: str, method: str, path: str, body: Any = None, **options: Any) -> Answer:
        return ask(self.urls[name], method, path, body, **options)

    def later(self, fn: Callable[..., T], *args: Any, **options: Any) -> Future[T]:
        return self.pool.submit(fn, *args, **options)

    def leader(self) -> str:
        """The living node that says of itself that it leads, as soon as there is one that answers linearizably."""

        def find() -> str | None:
            for name in self.living:
                answer = self.ask(name, "GET", "/v1/cluster", timeout=3)
                if answer.status == 200 and answer.json["leader"] == name:
                    return name
            return None

        return until(find, "a leader")

    def followers(self) -> list[str]:
        leader = self.leader()
        return [name for name in self.names if name != leader]

    def publish(self, name: str, topic: str, body: bytes = b"x", query: str = "", **headers: str) -> str:
        """Its id. Through this one node, and at the first try."""
        head = {key.replace("_", "-"): value for key, value in headers.items()}
        answer = self.ask(name, "POST", f"/v1/topics/{topic}/messages{query}", body, headers=head)
        assert answer.status in (200, 201), answer
        return str(answer.json["id"])

    def publish_many(self, name: str, topic: str, bodies: list[str], **item: Any) -> list[str]:
        items = [{"topic": topic, "body": body, **item} for body in bodies]
        answer = self.ask(name, "POST", "/v1/messages:batch", items)
        assert answer.status == 200, answer
        return [result["id"] for result in answer.json["results"]]

    def receive(self, name: str, topic: str, redirects: int = 3, timeout: float = 75, **queries: Any) -> Any:
        """Messages, following redirects as clients do; the Answer itself when it is not a 200."""
        url, path = self.urls[name], f"/v1/topics/{topic}/receive"
        for _ in range(redirects + 1):
            answer = ask(url, "POST", path, queries, timeout=timeout)
            if answer.status != 307:
                break
            where = urllib.parse.urlsplit(answer.headers["location"])
            url, path = f"{where.scheme}://{where.netloc}", where.path
        return answer.json["messages"] if answer.status == 200 else answer

    def drain(self, topic: str, count: int, seconds: float = PATIENCE_S) -> list[Any]:
        """Receive, through whichever node leads, until `count` messages came; more are returned too."""
        found: list[Any] = []

        def more() -> bool:
            answer = self.receive(self.leader(), topic, max=1000, wait="250ms", lease="10m", timeout=5)
            found.extend(answer if isinstance(answer, list) else [])
            return len(found) >= count

        until(more, f"{count} messages of {topic}; {len(found)} came", seconds)
        return found

    def settle(self, name: str, kind: str, messages: list[Any], **more: Any) -> list[str]:
        leases = [message["lease"] for message in messages]
        answer = self.ask(name, "POST", f"/v1/leases:{kind}", {"leases": leases, **more})
        assert answer.status == 200, answer
        return [result["outcome"] for result in answer.json["results"]]

    def describe(self, name: str, message_id: str) -> Any:
        answer = self.ask(name, "GET", f"/v1/messages/{message_id}?body=true")
        assert answer.status == 200, answer
        return answer.json

    def topic(self, name: str, topic: str) -> Any:
        answer = self.ask(name, "GET", f"/v1/topics/{topic}")
        assert answer.status == 200, answer
        return answer.json

    def metric(self, name: str, metric: str) -> float:
        for line in self.ask(name, "GET", "/metrics").body.decode().splitlines():
            if line.startswith((f"hadelay_{metric} ", f"hadelay_{metric}{{")):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no metric {metric}")

    # comparing

    def hours(self, name: str) -> Any:
        answer = self.ask(name, "GET", "/v1/hours", timeout=30)
        assert answer.status == 200, answer
        return answer.json

    def assert_identical(self, *names: str) -> None:
        """Lengths and checksums at one applied index, then every byte that the nodes serve of every hour file."""
        names = names or tuple(self.living)

        def at_one_index() -> list[Any] | None:
            found = [self.hours(name) for name in names]
            return found if len({answer["applied_index"] for answer in found}) == 1 else None

        first, *others = until(at_one_index, f"{names} at one applied index")
        for other in others:
            assert [_same(h) for h in other["hours"]] == [_same(h) for h in first["hours"]]
        for hour in first["hours"]:
            for kind in ("log", "idx", "dsp"):
                path = f"/v1/hours/{hour['hour']}/{kind}"
                contents = {self.ask(name, "GET", path, timeout=30).body for name in names}
                assert len(contents) == 1, f"{path} differs"
                assert len(contents.pop()) == int(hour[kind]["bytes"])


def _same(hour: dict[str, Any]) -> Any:
    """What has to be equal everywhere: everything but what is mapped where."""
    return {key: value for key, value in hour.items() if key != "mapped"}


def body_of(message: dict[str, Any]) -> bytes:
    return base64.b64decode(message["body_base64"])


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT whatever happens."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
