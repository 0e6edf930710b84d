"""Workers of other frameworks as processes, and the test that all frameworks have to pass."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hadelay import Client
from hadelay.errors import Conflict
from tests.system.cluster import SOURCE, Cluster, environment, until

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "howto"
#: Our sources, and the tests for what workers of the tests import.
PATH = f"{SOURCE}:{HERE.parents[1]}"
#: `make frameworks` sets it: 200 delayed tasks instead of 40.
FULL = os.environ.get("HADELAY_FRAMEWORKS") == "1"


def write_page(page: str, directory: Path, cluster: Cluster) -> None:
    """Write the files of a how-to page: its `py` blocks begin with a file name. Blocks of one file are joined."""
    for block in re.findall(r"^```py\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S):
        head, _, text = block.partition("\n")
        for number, url in enumerate(cluster.urls.values()):
            text = text.replace(f"127.0.0.1:{8400 + number}", url.removeprefix("http://"))
        path = directory / head.removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)


@contextlib.contextmanager
def broker_of(module: str, cluster: Cluster, topic: str) -> Iterator[Any]:
    """The module, imported with the cluster's addresses; its `broker` repeats what failed in `topic` at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HADELAY_SERVERS", ",".join(cluster.urls.values()))
        found = importlib.import_module(f"tests.frameworks.{module}")
        found.broker.client.put_topic(topic, backoff=["0.2s"])
        yield found


class Running:
    """Workers, and the file into which their tasks write lines."""

    def __init__(self, cluster: Cluster, directory: Path) -> None:
        self.cluster, self.out, self.log = cluster, directory / "out", directory / "log"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.out.touch()

    @property
    def servers(self) -> str:
        return ",".join(self.cluster.urls.values())

    def start(self, words: Sequence[object], cwd: Path = HERE, **variables: str) -> subprocess.Popen[bytes]:
        """Start `python WORDS`."""
        env = {**environment(), "PYTHONPATH": PATH, "OUT": str(self.out), "HADELAY_SERVERS": self.servers, **variables}
        with self.log.open("ab") as log:
            # A group of its own: what is killed is the whole worker, not this test.
            worker = subprocess.Popen(
                [sys.executable, *map(str, words)], env=env, cwd=cwd, stdout=log, stderr=log, start_new_session=True
            )
        self.workers.append(worker)
        return worker

    def lines(self, word: str) -> list[list[str]]:
        """What the tasks wrote, without the first word."""
        return [line.split()[1:] for line in self.out.read_text().splitlines() if line.split()[0] == word]

    def close(self) -> None:
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait(20)
        print(self.log.read_text()[-8000:])  # shown if the test failed


def cancel(client: Client, message_id: str) -> None:
    """Cancel a message that is leased now and again, because no worker can run it."""

    def cancelled() -> bool:
        with contextlib.suppress(Conflict):
            return client.cancel(message_id) == "cancelled"
        return False

    until(cancelled, "the message is cancelled")


def survives(
    running: Running, start: Callable[[], subprocess.Popen[bytes]], publish: Callable[[int, float], object], hands: int
) -> None:
    """Delayed tasks over a killed worker, a killed leader and a rolling restart of the workers: none is lost, none
    early, none runs twice but those in the killed worker's hands, `hands` at most.

    publish: publishes task n, due at a time; the task writes `hello N SECONDS_LATE`. start: starts a worker.
    """
    count, spread_s = (200, 8.0) if FULL else (40, 3.0)
    workers = [start() for _ in range(2)]
    begun = time.time() + 2
    for number in range(count):
        publish(number, begun + number * spread_s / count)

    def ran(share: float) -> bool:
        return len(running.lines("hello")) >= count * share

    until(lambda: ran(0.15), "the first tasks run")
    os.killpg(workers[0].pid, signal.SIGKILL)
    until(lambda: ran(0.3), "tasks run on the other worker")
    leader = running.cluster.leader()
    running.cluster.kill(leader)
    until(lambda: ran(0.45), "tasks run without the old leader")
    start()
    workers[1].terminate()
    assert workers[1].wait(20) == 0
    running.cluster.restart(leader)
    until(lambda: len({number for number, _ in running.lines("hello")}) == count, "all tasks ran", seconds=60)
    found = running.lines("hello")
    assert min(float(late) for _, late in found) >= 0
    twice = [number for number, many in Counter(number for number, _ in found).items() if many > 1]
    assert len(twice) <= hands, "more than the killed worker had in its hands"
