"""Lines of JSON between the supervisor, its workers and their CPU processes, over a socket pair.

The end of the stream means that the process at the other end has ended, also after kill -9.
"""

import contextlib
import socket
from typing import TypeVar

import msgspec
from msgspec import Struct

T = TypeVar("T")

#: Limit of a line, in bytes: a line to a CPU process has the whole payload of a message, as JSON.
LINE_BYTES = 8 << 20


class Start(Struct, frozen=True):
    """First line from the supervisor to a new worker: what to run."""

    app: str
    concurrency: int
    drain_s: float
    lease_s: float
    #: Topics to receive from; empty: the topics of the app's tasks.
    topics: list[str] = []
    #: Leases of a worker that crashed, to give back.
    orphans: list[str] = []
    #: Whether to end after giving back `orphans`, without receiving messages.
    only_orphans: bool = False


class Report(Struct, frozen=True, omit_defaults=True):
    """Line from a worker to the supervisor: the worker took the lease `take`, or ended the lease `end` after an attempt
    at `task`; a line with neither shows that the worker is alive."""

    take: str = ""
    end: str = ""
    task: str = ""
    outcome: str = ""
    seconds: float = 0.0


def send(to: socket.socket, line: Struct) -> None:
    """Send a line; nothing happens if the other process has ended."""
    with contextlib.suppress(OSError):
        to.sendall(msgspec.json.encode(line) + b"\n")
