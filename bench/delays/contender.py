"""The interface of a contender: a system that keeps delayed messages, and a client of that system.

The harness starts and kills the servers. Producers and workers are processes of their own (bench.delays.roles), which
make the same contender from its name, directory and port, and call `connect`. So a module of a contender imports its
library inside its client's functions: the harness itself needs none of these libraries.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from bench.delays.field import has_module
from bench.peers import program
from bench.wrk_run import Missing

#: Bytes of each body.
BODY_BYTES = 200
#: Pause of a contender's own poller after it found nothing due, in seconds.
POLL_S = 0.01


@dataclass(frozen=True)
class Message:
    id: str
    due_ms: int

    def body(self) -> bytes:
        return self.id.encode().ljust(BODY_BYTES, b" ")


@dataclass(frozen=True)
class Received:
    """A message in a worker's hands. token: value that `ack` needs."""

    id: str
    token: Any = None


class Client(ABC):
    """A connection of one thread. Methods raise whatever the library raises if the server fails: the caller opens
    another connection then."""

    @abstractmethod
    def publish(self, messages: Sequence[Message]) -> None:
        """Publish all messages, and return after the server has acknowledged each of them."""

    def receive(self, most: int, wait_s: float) -> list[Received]:
        """Receive up to `most` messages that are due, and wait for the first one for about `wait_s`."""
        raise NotImplementedError("a framework's own worker receives")

    def ack(self, received: Sequence[Received]) -> None:
        """Settle messages; returns after the server has confirmed each of them."""
        raise NotImplementedError("a framework's own worker acks")

    def cancel(self, ids: Sequence[str]) -> int:
        """Cancel messages that are not due yet; returns how many the server confirmed as cancelled."""
        raise NotImplementedError("this contender cannot cancel")

    def close(self) -> None:  # noqa: B027
        """Close the connection; it may be broken."""


class Contender(ABC):
    """Servers of one system in `directory`, on ports from `port` on."""

    #: Name on the command line and in the table.
    name: ClassVar[str]
    #: Set-up that was measured, for the page.
    setup: ClassVar[str]
    #: What an acknowledged publish survives.
    durability: ClassVar[str]
    #: How a message is cancelled; "" if it cannot be.
    cancels: ClassVar[str] = ""
    #: Behaviour that a reader has to know before comparing.
    notes: ClassVar[str] = ""
    #: Programs and Python modules without which the contender is left out.
    programs: ClassVar[tuple[str, ...]] = ()
    modules: ClassVar[tuple[str, ...]] = ()
    #: Workers take messages before they are due, so the visibility timeout has to be longer than the longest delay.
    prefetches: ClassVar[bool] = False
    #: Longest delay that the system takes, in seconds; None for a week or more.
    longest_delay_s: ClassVar[float | None] = None
    #: Whether a message waits for all that were published before it. Then the messages that only measure the rate of
    #: publishes, which are due in a day, would hold up all others.
    waits_in_order: ClassVar[bool] = False

    @classmethod
    def missing(cls) -> str:
        """Why the contender cannot run on this machine; "" if it can."""
        for name in cls.programs:
            try:
                program(name)
            except Missing as missing:
                return str(missing)
        absent = [name for name in cls.modules if not has_module(name)]
        return f"{', '.join(absent)} not installed (python -m bench delays --install)" if absent else ""

    @classmethod
    def described(cls) -> dict[str, str]:
        return {"setup": cls.setup, "durability": cls.durability, "cancels": cls.cancels, "notes": cls.notes}

    def __init__(self, directory: Path, port: int, visibility_s: float) -> None:
        """visibility_s: lease or visibility timeout of a received message, where the system has such a timeout."""
        self.directory, self.port, self.visibility_s = directory, port, visibility_s

    @abstractmethod
    def start(self) -> None:
        """Start the servers with empty data; returns when they serve."""

    @abstractmethod
    def stop(self) -> None:
        """End the servers."""

    @abstractmethod
    def kill(self) -> list[int]:
        """End the server (of a cluster: its leader) with SIGKILL; returns the pids that were killed."""

    @abstractmethod
    def restart(self) -> None:
        """Start the killed server again with its data; returns when it serves."""

    @abstractmethod
    def servers(self) -> list[int]:
        """Pids of all server processes, their children included."""

    def prepare(self) -> None:  # noqa: B027
        """Create tables, queues and streams. Called in a process of its own, after `start`."""

    @abstractmethod
    def connect(self) -> Client:
        """Open a connection; called in processes of producers and workers."""

    def worker(self) -> list[str]:
        """Command of one worker process, which finds its plan in the environment (bench.delays.roles)."""
        return [sys.executable, "-m", "bench.delays.roles", "work"]
