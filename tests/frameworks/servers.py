"""Servers of web frameworks, each a process that runs an example of a page."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from chaos.freeports import free_ports

ROOT = Path(__file__).resolve().parents[2]
#: Limit of each wait, in seconds.
PATIENCE_S = 60.0


def examples(page: str) -> list[tuple[str, str]]:
    """(heading above, text) of each `py` block of a page of docs/howto."""
    text, found = (ROOT / "docs/howto" / page).read_text(), []
    for match in re.finditer(r"^```py\n(.*?)^```$", text, re.M | re.S):
        found.append((re.findall(r"^#+ (.*)$", text[: match.start()], re.M)[-1], match[1]))
    return found


class Server:
    """`python WORDS` in a directory; {port} in the words is a free port."""

    def __init__(self, directory: Path, words: str, **environ: str) -> None:
        self.port = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = directory / "log"
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *words.format(port=self.port).split()],
                cwd=directory, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1", **environ},
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not there():
            assert time.monotonic() < deadline, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.02)

    def until(self, text: str) -> None:
        """Wait until the server has printed the text."""
        self.wait_for(lambda: text in self.log)

    def serves(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except ConnectionRefusedError:
            return False
        return True

    def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE_S)


@contextlib.contextmanager
def serving(servers: dict[str, Server]) -> Iterator[dict[str, Server]]:
    """All of them, once they serve; stopped at the end."""
    try:
        for server in servers.values():
            server.wait_for(server.serves)
        yield servers
    finally:
        for server in servers.values():
            server.stop()
