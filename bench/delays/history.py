"""The history of a run: what producers, workers and the harness saw, in files of JSON lines, a file per process.

A line is written at once and by one system call, so a process that is killed leaves what it saw. Times are Unix
milliseconds by this machine's clock, which all processes and servers share.

| event | fields |
|---|---|
| pub | ids, due, at, ok: the server's acknowledgement; null if the outcome is unknown |
| got | ids, at, pid of the worker: the worker has the messages in hand |
| done | ids, at, pid: the server confirmed the acks; with a framework's worker, the task has ended |
| cancel | ids, at, ok |
| fault | what: server or worker; at, pids that were killed |
| loaded, cancelled | figures of the producer |
| end | at: nobody waits for messages any longer |
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def now_ms() -> float:
    return time.time() * 1000


class Writer:
    """Appends events to the file of this process. A child that is forked writes to a file of its own."""

    def __init__(self, directory: Path, role: str) -> None:
        self._directory, self._role = directory, role
        self._pid = self._file = -1

    def write(self, event: str, **fields: Any) -> None:
        if self._pid != (pid := os.getpid()):
            path = self._directory / f"{self._role}-{pid}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._pid = pid  # last: from then on, other threads of this process write to the file
        os.write(self._file, json.dumps({"e": event, "at": now_ms(), **fields}).encode() + b"\n")

    def got(self, ids: Sequence[str]) -> None:
        self.write("got", ids=list(ids), pid=os.getpid())

    def done(self, ids: Sequence[str]) -> None:
        self.write("done", ids=list(ids), pid=os.getpid())


class Reader:
    """Reads the events that were appended since the last call."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offsets: dict[Path, int] = {}

    def new(self) -> Iterator[Event]:
        for path in sorted(self._directory.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                text = file.read()
            whole = text.rfind(b"\n") + 1
            self._offsets[path] = self._offsets.get(path, 0) + whole
            yield from map(json.loads, text[:whole].splitlines())


def read(directory: Path) -> list[Event]:
    return sorted(Reader(directory).new(), key=lambda event: float(event["at"]))
