"""The programs of docs/howto/nodejs.md, run by the machine's Node.js against a real node."""

from __future__ import annotations

import base64
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from chaos.freeports import free_ports
from hadelay.testing import LocalNode
from tests.frameworks.support import DOCS, FULL

NODE = shutil.which("node")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not FULL, reason="make frameworks"),
    pytest.mark.skipif(NODE is None, reason="Node.js is not installed"),
]
SECRET = "whsec_" + base64.b64encode(bytes(range(32))).decode()


def write(name: str, directory: Path) -> None:
    (text,) = re.findall(rf"^```js\n// {name}\n(.*?)^```$", (DOCS / "nodejs.md").read_text(), re.M | re.S)
    (directory / name).write_text(text)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_program_publishes_receives_and_acks(tmp_path: Path) -> None:
    write("orders.mjs", tmp_path)
    with LocalNode() as node:
        environ = {**os.environ, "HADELAY_SERVER": node.url}
        done = subprocess.run(
            [str(NODE), "orders.mjs"],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        published, order = done.stdout.splitlines()
        assert order == "order 4711 attempt 1"
        assert node.client.get(published.split()[1]).state == "acked"


def test_a_receiver_takes_genuine_calls_and_refuses_others(tmp_path: Path) -> None:
    write("receiver.mjs", tmp_path)
    install = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "standardwebhooks"]
    if (
        shutil.which("npm") is None
        or subprocess.run(install, cwd=tmp_path, capture_output=True, check=False).returncode
    ):
        pytest.skip("npm cannot install standardwebhooks")
    port = free_ports(1)
    environ = {**os.environ, "WEBHOOK_SECRET": SECRET, "PORT": str(port)}
    log = tmp_path / "log"
    with log.open("w") as output, LocalNode() as node:
        receiver = subprocess.Popen(
            [str(NODE), "receiver.mjs"], cwd=tmp_path, env=environ, stdout=output, stderr=output
        )
        try:
            deadline = time.monotonic() + 30
            while not listens(port):
                assert receiver.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            url = f"http://127.0.0.1:{port}/"
            node.client.put_topic("genuine", webhook={"url": url, "secret": SECRET})
            taken = node.client.wait_for(node.client.put("genuine", {"invoice": 4711}).id, timeout=20)
            assert taken.state == "acked"
            node.client.put_topic("forged", webhook={"url": url, "secret": "whsec_" + "b" * 32}, max_attempts=1)
            refused = node.client.wait_for(node.client.put("forged", {"invoice": 4713}).id, timeout=20)
            assert refused.state == "dead"
        finally:
            receiver.terminate()
            receiver.wait(20)
    assert log.read_text() == "invoice 4711\n"
