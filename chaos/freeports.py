"""Free ports for clusters on this machine; two clusters never get the same port, however many start side by side.

Another process may take a port between the test for a free port and the bind, or while a killed node restarts. The
kernel takes ports for outgoing connections, so these ports lie below its range. Other clusters take turns: a counter in
a locked file says where the next search starts.
"""

import contextlib
import fcntl
import os
import socket
import tempfile
from pathlib import Path

#: Port range below the kernel's range for outgoing connections.
FIRST, LAST = 20_000, 32_000
_TURN = Path(tempfile.gettempdir()) / f"hadelay-ports-{os.getuid()}"


def free_ports(count: int) -> int:
    """Find `count` consecutive free ports, and return the first."""
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
    with contextlib.ExitStack() as bound:
        try:
            for port in range(base, base + count):
                bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
