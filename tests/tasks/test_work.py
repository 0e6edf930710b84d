"""`hadelay work` with real workers on three nodes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.freeports import free_ports
from hadelay import Client, Put
from hadelay.tasks import TaskFailed
from tests.system.cluster import PATIENCE_S, Cluster, alive, environment, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
HERE = Path(__file__).parent
#: Default of `--lease`, in seconds.
LEASE_S = 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


class Shop:
    """The app of shop.py with publishes to the cluster, and its workers."""

    def __init__(self, cluster: Cluster, out: Path) -> None:
        self.servers, self.out = ",".join(cluster.urls.values()), out
        self.log = out.with_suffix(".log")
        self.client = Client(self.servers)
        self.workers: list[subprocess.Popen[bytes]] = []
        out.touch()

    def put(self, task: str, *args: Any, **options: Any) -> str:
        """The id of the message."""
        names = {"hello": ("number", "due"), "long": ("seconds",)}.get(task, ("number",))
        call = {"task": f"shop.{task}", "args": dict(zip(names, args, strict=False))}
        return self.client.put("tasks", call, **options).id

    def start(self, *words: object, app: str = "shop", cwd: Path = HERE) -> subprocess.Popen[bytes]:
        env = environment() | {"OUT": str(self.out), "HADELAY_SERVERS": self.servers}
        with self.log.open("ab") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "hadelay", "work", app, *map(str, words)], env=env, cwd=cwd, stderr=log
            )
        self.workers.append(worker)
        return worker

    def lines(self, word: str) -> list[list[str]]:
        """What the tasks wrote, without the first word."""
        return [line.split()[1:] for line in self.out.read_text().splitlines() if line.split()[0] == word]

    def close(self) -> None:
        for worker in self.workers:
            for pid in [*children(worker.pid), worker.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            worker.wait(20)
        self.client.close()


@pytest.fixture
def shop(cluster: Cluster, tmp_path: Path) -> Iterator[Shop]:
    running = Shop(cluster, tmp_path / "out")
    yield running
    running.close()
    with contextlib.suppress(Exception), Client(running.servers) as client:
        client.purge("tasks", ("scheduled", "ready", "dead"))


def children(pid: int) -> list[int]:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


@contextlib.contextmanager
def relay(port: int, url: str) -> Iterator[None]:
    """Pass connections to 127.0.0.1:port on to the node at `url`."""
    loop = asyncio.new_event_loop()
    host, _, node_port = url.removeprefix("http://").partition(":")

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection(host, int(node_port))
        await asyncio.gather(carry(reader, their_writer), carry(their_reader, writer))

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", port))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield
    finally:
        server.close()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_a_worker_says_that_it_waits_for_a_node_and_when_it_works(cluster: Cluster, tmp_path: Path) -> None:
    shop = Shop(cluster, tmp_path / "out")
    port = int(free_ports(1))
    shop.servers = f"http://127.0.0.1:{port}"
    worker = shop.start()
    try:
        until(lambda: f"waiting for a node at http://127.0.0.1:{port}" in shop.log.read_text(), "the worker says so")
        assert "working: topics" not in shop.log.read_text()
        with relay(port, next(iter(cluster.urls.values()))):
            until(lambda: "working: topics" in shop.log.read_text(), "the worker works")
            worker.terminate()
            assert worker.wait(30) == 0
    finally:
        shop.close()


def test_every_kind_of_task(shop: Shop) -> None:
    port = free_ports(1)
    for task in ("slow", "flaky", "hopeless", "snoozes", "dies"):
        shop.put(task)
    for number in range(2):
        shop.put("blocking", number)
        shop.put("crunch", number)
    reading = [shop.put(task) for task in ("read_async", "read_in_thread", "read_in_process")]
    unknown = shop.put("renamed")
    worker = shop.start("--health", f"127.0.0.1:{port}")
    dead = until(lambda: found if len(found := list(shop.client.dead("tasks"))) == 5 else None, "five dead letters")
    assert Counter(letter.errors[-1].reason for letter in dead) == Counter(
        [
            "TimeoutError: the task ran longer than 0.1 s",
            "ConnectionResetError: gone",
            "bad input",
            "KeyError: 4",
            "ConnectionError: the task's process ended with code 9",
        ]
    )
    for one in reading:
        until(lambda one=one: (shop.client.get(one).progress or "").startswith("page 7 of 20 é"), "the progress")
    shop.out.with_suffix(".seen").touch()
    until(lambda: len(shop.lines("read")) == 3, "all are read")
    until(lambda: len(shop.lines("crunch")) == 2 and len(shop.lines("tick")) >= 2, "the others ran")
    assert shop.lines("slow") == [["1"], ["2"]]
    first, second, third = (float(at) for (at,) in shop.lines("flaky"))
    assert second - first >= 0.1
    assert third - second >= 0.2
    assert sorted(shop.lines("blocking")) == [[str(number), "1", "shop.blocking"] for number in range(2)]
    assert {attempt for _, _, attempt in shop.lines("crunch")} == {"1"}
    (_, at), (_, later), *_ = shop.lines("snoozes")
    assert float(later) - float(at) >= 0.3
    assert shop.client.schedule("task.shop.tick").timezone == "Europe/Vienna"
    # A message of another version stays until its worker comes.
    said = {event.reason for event in shop.client.get(unknown).history}
    assert "LookupError: this worker has no task 'shop.renamed'" in said
    assert page(f"http://127.0.0.1:{port}/healthz") == "ok\n"
    metrics = page(f"http://127.0.0.1:{port}/metrics")
    assert 'hadelay_task_attempts_total{task="shop.flaky",outcome="failed"} 2' in metrics
    assert "hadelay_worker_processes 1" in metrics
    worker.terminate()
    assert worker.wait(20) == 0
    shop.client.delete_schedule("task.shop.tick")


async def test_results(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("HADELAY_SERVERS", shop.servers)
    module = importlib.import_module("shop")
    sums = [await module.add.put(1, n) for n in range(3)]
    with pytest.raises(TimeoutError):
        await module.add.result(sums[0], timeout=0.1)
    worker = shop.start()
    assert [await module.add.result(one, timeout=30) for one in sums] == [module.Sum(1), module.Sum(2), module.Sum(3)]
    assert module.square.result_sync(module.square.put_sync(7), timeout=30) == 49
    with pytest.raises(TaskFailed, match=r"the message is dead: ValueError: the result has 65538 bytes of JSON"):
        await module.too_large.result(await module.too_large.put(), timeout=30)
    worker.terminate()
    assert worker.wait(20) == 0
    module.app.client.close()
    del sys.modules["shop"]


def test_a_stop_drains_and_a_second_one_gives_back(shop: Shop) -> None:
    worker = shop.start("--drain", "20s")
    shop.put("long", 1.0)
    until(lambda: shop.lines("begins"), "the task begins")
    worker.terminate()
    assert worker.wait(20) == 0
    assert len(shop.lines("ends")) == 1

    worker = shop.start("--drain", "60s")
    long = [shop.put("long", 60.0), shop.put("long_in_thread")]
    until(lambda: len(shop.lines("begins")) == 3, "both tasks begin")
    stops = shop.log.read_text().count("stopping: ")
    worker.terminate()
    until(lambda: shop.log.read_text().count("stopping: ") > stops, "the first signal has arrived")
    worker.terminate()
    assert worker.wait(10) == 0
    given_back = shop.client.receive("tasks", max=10)
    assert [one.id in long for one in given_back] == [True] * 2
    for one in long:
        assert "the consumer stopped" in [event.reason for event in shop.client.get(one).history]  # it did not count
    shop.client.ack(given_back)
    assert len(shop.lines("ends")) == 1


def test_a_killed_process_s_messages_go_back_at_once(shop: Shop) -> None:
    worker = shop.start("--lease", "10m", "--processes", "2")
    lost = [shop.put("long", 60.0) for _ in range(4)]
    until(lambda: len(shop.lines("begins")) == 4, "all begin")
    pids = [int(pid) for (pid,) in shop.lines("begins")]
    os.kill(pids[0], signal.SIGKILL)
    had = pids.count(pids[0])
    until(lambda: len(shop.lines("begins")) == 4 + had, "another process takes them")
    again = [shop.client.get(one) for one in lost]
    assert sum(one.attempt == 2 for one in again) == had  # a crash counts: its cause may be the message
    # Its supervisor killed, a worker drains and ends.
    rest = children(worker.pid)
    worker.kill()
    worker.wait()
    for pid in rest:
        os.kill(pid, signal.SIGTERM)
    until(lambda: not any(map(alive, rest)), "the workers end")


def test_reload_and_errors_at_the_start(shop: Shop, tmp_path: Path) -> None:
    assert shop.start(app="no_such_app").wait(20) == 2
    assert "no_such_app: there is no module 'no_such_app'" in shop.log.read_text()
    module = (tmp_path / "code" / "changing").with_suffix(".py")
    module.parent.mkdir()
    text = (
        "import os\nfrom hadelay.tasks import App\napp = App(topic='changing')\n"
        "@app.task(name='say')\ndef say() -> None: open(os.environ['OUT'], 'a').write('version 1\\n')\n"
    )
    module.write_text(
        "import os, time\nopen(os.environ['OUT'], 'a').write(f'ends {time.time()}\\n')\nraise SystemExit(0)"
    )
    worker = shop.start(app="changing", cwd=module.parent)
    first, second, *_ = until(lambda: ends if len(ends := shop.lines("ends")) > 1 else None, "a second start")
    assert float(second[0]) - float(first[0]) > 0.9, "a worker that ends by itself starts again after a pause"
    worker.terminate()
    assert worker.wait(20) == 0
    shop.log.write_text("")
    module.write_text(text)
    worker = shop.start("--reload", app="changing", cwd=module.parent)
    shop.client.put("changing", {"task": "say", "args": {}})
    until(lambda: shop.lines("version"), "the first version runs")
    written = module.stat()
    module.write_text(text.replace("version 1", "version 2"))
    os.utime(module, ns=(written.st_atime_ns, written.st_mtime_ns // 10**9 * 10**9 + 1))  # in the same second
    until(lambda: "a file changed" in shop.log.read_text(), "the change is seen")

    def second_version_runs() -> bool:
        # The old process may still take a message while the change is noticed.
        shop.client.put("changing", {"task": "say", "args": {}})
        return ["2"] in shop.lines("version")

    until(second_version_runs, "the second version runs")
    assert "ended with code" not in shop.log.read_text()
    worker.terminate()
    assert worker.wait(20) == 0


@pytest.mark.timeout(240)
def test_none_lost_none_early_none_twice_but_in_killed_hands(cluster: Cluster, shop: Shop) -> None:
    """200 delayed tasks over a killed worker, a killed leader and a rolling restart of the workers."""
    begun = time.time()
    workers = [shop.start("--concurrency", "5") for _ in range(2)]
    due = [begun + 2 + number / 40 for number in range(200)]
    sent = shop.client.put_many(
        Put(topic="tasks", body={"task": "shop.hello", "args": {"number": n, "due": at}}, at=int(at * 1000) + 1)
        for n, at in enumerate(due)
    )
    assert not [one for one in sent if isinstance(one, Exception)]

    def ran(number: int) -> bool:
        return len(shop.lines("hello")) >= number

    until(lambda: ran(30), "the first tasks run")
    os.kill(children(workers[0].pid)[0], signal.SIGKILL)
    until(lambda: ran(60), "more tasks run")
    leader = cluster.leader()
    cluster.kill(leader)
    until(lambda: ran(100), "tasks run without the old leader")
    for old in list(workers):
        shop.start("--concurrency", "5")
        old.terminate()
        assert old.wait(20) == 0
    until(lambda: ran(150), "tasks run on new workers")
    cluster.restart(leader)
    # A message whose hand-out reached no worker, as its poll was cut off by a kill or a stop, waits for its lease.
    patience_s = LEASE_S + PATIENCE_S
    until(lambda: len({number for number, _ in shop.lines("hello")}) == 200, "all tasks ran", patience_s)
    found = shop.lines("hello")
    assert min(float(late) for _, late in found) >= 0
    twice = [number for number, many in Counter(number for number, _ in found).items() if many > 1]
    assert len(twice) <= 5, "more than the killed worker had in its hands"
    until(lambda: shop.client.topic("tasks").leased == 0, "all are settled", patience_s)
