"""Free ports for clusters on this machine, and never the same to two of them, however many start side by side.

A port that was free when somebody looked may be taken when a node binds it, or binds it again after a kill: by the
kernel for a connection (so these lie below its range), or by another cluster of ours (so all take turns: a counter in
a locked file says where the next looks).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

#: Below the range from which the kernel takes the ports of outgoing connections.
FIRST, LAST = 20_000, 32_000
_TURN = Path(tempfile.gettempdir()) / f"hadelay-ports-{os.getuid()}"


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row."""
    with open(_TURN, "a+") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        turn.seek(0)
        base = int(turn.read() or FIRST)
        for _ in range(LAST - FIRST):
            if base + count > LAST:
                base = FIRST
            if _free(base, count):
                turn.truncate(0)
                turn.write(str(base + count))
                return base
            base += count
    raise RuntimeError(f"no {count} free ports in a row between {FIRST} and {LAST}")


def _free(base: int, count: int) -> bool:
    with contextlib.ExitStack() as held:
        try:
            for port in range(base, base + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
