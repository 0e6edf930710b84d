"""A RabbitMQ server of the tests' own, where it is installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.freeports import free_ports
from hadelay.testing import LocalNode
from tests.system.cluster import until

#: Debian's wrapper in PATH changes the user; this one does not.
SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class Rabbit:
    """A server with ports and a directory of its own, which outlive a kill."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="hadelay-rabbit-"))
        self._somebody: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if os.getuid() == 0:
            os.chown(self.directory, 65534, 65534)
            self._somebody |= {"user": 65534, "group": 65534, "extra_groups": []}
        self.port = free_ports(3)
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}/"
        epmd, home = str(self.port + 2), str(self.directory)
        (self.directory / "plugins").write_text("[].\n")
        (self.directory / "rabbit.conf").write_text("vm_memory_high_watermark.relative = 0.9\n")
        self._variables = {
            "PATH": os.environ["PATH"], "HOME": home, "LANG": "C.UTF-8", "ERL_EPMD_PORT": epmd,
            "ERL_EPMD_ADDRESS": "127.0.0.1", "RABBITMQ_NODENAME": f"hadelay{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1", "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.port + 1), "RABBITMQ_MNESIA_BASE": f"{home}/mnesia",
            "RABBITMQ_LOG_BASE": f"{home}/log", "RABBITMQ_ENABLED_PLUGINS_FILE": f"{home}/plugins",
            "RABBITMQ_CONFIG_FILE": f"{home}/rabbit.conf", "RABBITMQ_PID_FILE": f"{home}/pid",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none",
        }  # fmt: skip
        epmd_program = shutil.which("epmd") or "epmd"
        self._epmd = subprocess.Popen(
            [epmd_program, "-port", epmd, "-address", "127.0.0.1"], env=self._variables, **self._somebody
        )
        self._server: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._server = subprocess.Popen(
            [str(SERVER)], env=self._variables, start_new_session=True, cwd=self.directory, **self._somebody
        )
        until(self._answers, "RabbitMQ serves", seconds=180, every=0.2)

    def eval(self, expression: str) -> str:
        """What `rabbitmqctl eval` prints."""
        words = [str(SERVER.with_name("rabbitmqctl")), "-n", self._variables["RABBITMQ_NODENAME"], "eval", expression]
        somebody = {**self._somebody, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(words, env=self._variables, cwd=self.directory, timeout=120, check=False, **somebody)
        assert done.returncode == 0, done.stdout
        return bytes(done.stdout).decode()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 2) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return bool(connection.recv(1))
        return False

    def kill(self) -> None:
        if self._server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait(20)
            self._server = None

    def close(self) -> None:
        self.kill()
        self._epmd.kill()
        self._epmd.wait(10)
        shutil.rmtree(self.directory, ignore_errors=True)


@pytest.fixture(scope="session")
def rabbit() -> Iterator[Rabbit]:
    if not SERVER.exists():
        pytest.skip("rabbitmq-server of Debian is not installed")
    pytest.importorskip("aiormq", reason="the extra rabbitmq is not installed")
    server = Rabbit()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as found:
        yield found
