"""A Redis server of the tests' own, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.freeports import free_ports
from hadelay.testing import LocalNode
from tests.system.cluster import until


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the server."""
    client = pytest.importorskip("redis", reason="the extra redis is not installed")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    directory: Path = tmp_path_factory.mktemp("redis")
    port = free_ports(1)
    words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(directory)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"redis://127.0.0.1:{port}/0"

    def answers() -> bool:
        with client.Redis.from_url(url) as connection:
            try:
                return bool(connection.ping())
            except client.exceptions.ConnectionError:
                return False

    try:
        until(answers, "Redis serves")
        yield url
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def redis(server: str) -> Iterator[Any]:
    """A connection to an empty database."""
    import redis as client

    with client.Redis.from_url(server) as connection:
        connection.flushall()
        yield connection


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as found:
        yield found
