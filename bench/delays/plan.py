"""The plan of a run, in a file that the environment of producers and workers names; and the work of a task."""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.delays.history import Writer

VARIABLE = "DELAYS_PLAN"


@dataclass
class Load:
    """What producers publish. kind: steady (`rate` per second for `seconds`, or until standard input ends, each message
    due 1 to `span_s` later),
    burst (`count` messages due within one second), pending (`count` messages, or as many as `seconds` allow, due over a
    week from tomorrow on), once (`count` messages due `span_s` after the start)."""

    kind: str
    count: int = 0
    rate: int = 0
    seconds: float = 0.0
    span_s: float = 0.0
    #: steady: each n-th message is cancelled right after its publish, if the contender can cancel; 0: none.
    cancel_every: int = 0
    #: pending: number of messages that are cancelled after the harness says so.
    cancel: int = 0


@dataclass
class Plan:
    contender: str
    directory: str
    port: int
    visibility_s: float
    history: str
    load: Load
    producers: int = 4
    #: Worker processes; threads and messages per receive of each.
    workers: int = 2
    threads: int = 2
    batch: int = 100
    #: Number of messages that a worker takes and never acks; 0: it acks.
    hold: int = 0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


@functools.cache
def plan() -> Plan:
    """The plan of this process."""
    said: dict[str, Any] = json.loads(Path(os.environ[VARIABLE]).read_text())
    return Plan(**{**said, "load": Load(**said["load"])})


@functools.cache
def writer(role: str) -> Writer:
    return Writer(Path(plan().history), role)


def task(id: str) -> None:
    """The work of a framework's task: note the message, or hold it for ever."""
    writer("work").got([id])
    while plan().hold:
        time.sleep(1)
    writer("work").done([id])
