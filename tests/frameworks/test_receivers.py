"""The receivers of docs/howto/webhooks.md, each under its framework's server, get real calls of a real node."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hadelay.testing import LocalNode

ROOT = Path(__file__).resolve().parents[2]
SECRET, NEW, OTHER = ("whsec_" + letter * 32 for letter in "abc")
#: The project around the page's view, in the same file.
DJANGO = """
from django.conf import settings
from django.core.management import execute_from_command_line
from django.urls import path
settings.configure(DEBUG=True, ROOT_URLCONF=__name__, SECRET_KEY="x", ALLOWED_HOSTS=["127.0.0.1"], MIDDLEWARE=[
    "django.middleware.common.CommonMiddleware", "django.middleware.csrf.CsrfViewMiddleware"])
urlpatterns = [path("invoices", invoices)]
if __name__ == "__main__":
    execute_from_command_line()
"""
#: How each framework is started, in a directory with receiver.py.
SERVERS = {
    "Flask": "-m flask --app receiver run --port {port}",
    "FastAPI": "-m uvicorn receiver:app --port {port}",
    "Django": "receiver.py runserver --noreload 127.0.0.1:{port}",
}


@dataclass
class Receiver:
    port: int
    process: subprocess.Popen[str]
    #: What it prints.
    log: Path

    def until(self, text: str) -> None:
        deadline = time.monotonic() + 30
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)


def example(framework: str) -> str:
    page = (ROOT / "docs/howto/webhooks.md").read_text()
    found = re.search(rf"^### {framework}\n\n```py\n(.*?)^```", page, re.M | re.S)
    assert found is not None
    return found[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def receivers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Receiver]]:
    """All of them, started side by side."""
    found = {}
    for framework, words in SERVERS.items():
        directory, port = tmp_path_factory.mktemp(framework), free_port()
        (directory / "receiver.py").write_text(example(framework) + (DJANGO if framework == "Django" else ""))
        log = directory / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, *words.format(port=port).split()],
                cwd=directory, stdout=output, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, "WEBHOOK_SECRET": SECRET, "PYTHONPATH": str(ROOT / "src")},
            )  # fmt: skip
        found[framework] = Receiver(port, process, log)
    try:
        for receiver in found.values():
            wait_for_server(receiver)
        yield found
    finally:
        for receiver in found.values():
            receiver.process.terminate()
        for receiver in found.values():
            receiver.process.wait(20)


def wait_for_server(receiver: Receiver) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection(("127.0.0.1", receiver.port)):
                return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, receiver.log.read_text()
            assert receiver.process.poll() is None, receiver.log.read_text()
            time.sleep(0.02)


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as running:
        yield running


@pytest.mark.processes
@pytest.mark.parametrize("framework", SERVERS)
def test_genuine_calls_are_taken_and_others_refused(
    framework: str, receivers: dict[str, Receiver], node: LocalNode
) -> None:
    receiver, topic = receivers[framework], framework.lower()
    url = f"http://127.0.0.1:{receiver.port}/invoices"
    node.client.put_topic(topic, webhook={"url": url, "secret": SECRET})
    put = node.client.put(topic, {"invoice": 4711})
    receiver.until("invoice 4711\n")
    assert node.client.wait_for(put.id, timeout=10).state == "acked"

    # Both signatures come while the secret changes; the receiver still knows the old one.
    node.client.put_topic(topic, webhook={"url": url, "secrets": [NEW, SECRET]})
    node.client.put(topic, {"invoice": 4712})
    receiver.until("invoice 4712\n")

    node.client.put_topic(topic, webhook={"url": url, "secret": OTHER}, max_attempts=1)
    refused = node.client.wait_for(node.client.put(topic, {"invoice": 4713}).id, timeout=10)
    assert refused.state == "dead"
    assert [event.reason for event in refused.history if event.reason] == ["HTTP 401"]
    assert "invoice 4713" not in receiver.log.read_text()
