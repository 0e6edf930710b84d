"""Server processes of contenders: start, kill -9, start again, and what the kernel says about them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from bench.delays.contender import Contender
from bench.peers import wait_port

#: Timeouts of a server's end and start, in seconds.
_END_S, _START_S = 20, 180.0


class Server:
    """One server process with its children. `start` may be called again after `kill`."""

    def __init__(
        self, command: Sequence[str], directory: Path, port: int, *, environment: dict[str, str] | None = None,
        user: int | None = None,
    ) -> None:  # fmt: skip
        """port: the server is ready when it listens there. user: uid that runs the server."""
        self.command, self.directory, self.port = list(command), directory, port
        self._environment, self._user = dict(os.environ, **(environment or {})), user
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self.directory / "output", "ab") as log:
            self._process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory,
                env=self._environment, start_new_session=True, user=self._user, group=self._user,
                extra_groups=[] if self._user is not None else None,
            )  # fmt: skip
        wait_port(self.port, _START_S)

    def kill(self) -> list[int]:
        assert self._process is not None
        killed = tree(self._process.pid)
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        wait_gone(killed)
        return killed

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            end(self._process, how)

    def tree(self) -> list[int]:
        return [] if self._process is None or self._process.poll() is not None else tree(self._process.pid)


def end(process: subprocess.Popen[bytes], how: signal.Signals = signal.SIGTERM) -> None:
    """Signal a process, and kill it with its children if it has not ended after some seconds."""
    pids = tree(process.pid)
    if process.poll() is None:
        process.send_signal(how)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in pids[1:]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_gone(pids[1:])


def wait_gone(pids: Sequence[int], timeout_s: float = 10) -> None:
    until = time.monotonic() + timeout_s
    while any(_alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def tree(pid: int) -> list[int]:
    """The pids of a process and of all its descendants, the process first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def memory_mb(pids: Sequence[int]) -> float:
    """Memory that only these processes use: anonymous and shared memory, shared pages counted once; no page cache."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1])
    return total / 1024


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time of these processes and of their children that have ended, in seconds."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(field) for field in fields[11:15])
    return total / os.sysconf("SC_CLK_TCK")


def disk_mb(directory: Path) -> float:
    """Blocks on the disk of all files below `directory`."""
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_blocks * 512
    return total / (1 << 20)


class OneServer(Contender):
    """A contender with one server, which `start` makes and starts."""

    _server: Server

    def stop(self) -> None:
        self._server.stop()

    def kill(self) -> list[int]:
        return self._server.kill()

    def restart(self) -> None:
        self._server.start()

    def servers(self) -> list[int]:
        return self._server.tree()
