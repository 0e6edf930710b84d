"""Databases for outboxes: SQLite everywhere, PostgreSQL and MariaDB as servers of the tests' own where installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from chaos.freeports import free_ports
from hadelay.outbox import Database, connect
from hadelay.testing import LocalNode
from tests.system.cluster import until

_NUMBER = count()


@contextmanager
def _as_somebody(program: str) -> Iterator[tuple[Path, dict[str, object]]]:
    """A directory, and arguments of Popen: servers of databases refuse to run as root."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    directory = Path(tempfile.mkdtemp(prefix="hadelay-"))
    other: dict[str, object] = {}
    if os.getuid() == 0:
        os.chown(directory, 65534, 65534)
        other = {"user": 65534, "group": 65534, "extra_groups": []}
    try:
        yield directory, {**other, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    finally:
        shutil.rmtree(directory)


def _serves(url: str) -> bool:
    try:
        connect(url).close()
    except Exception:  # of any driver, while the server starts
        return False
    return True


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """URL of a server, without the name of a database."""
    pytest.importorskip("psycopg")
    with _as_somebody("initdb") as (directory, somebody):
        data, port = directory / "data", free_ports(1)
        make = ["initdb", "-D", str(data), "-U", "shop", "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"]
        subprocess.run(make, check=True, cwd=directory, **somebody)  # type: ignore[call-overload]
        options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        server = subprocess.Popen(["postgres", "-D", str(data), *options.split()], cwd=directory, **somebody)  # type: ignore[call-overload]
        try:
            url = f"postgresql://shop@127.0.0.1:{port}"
            until(lambda: _serves(f"{url}/postgres"), "PostgreSQL serves")
            yield url
        finally:
            server.send_signal(signal.SIGINT)  # does not wait for clients
            server.wait(20)


@pytest.fixture(scope="session")
def mysql() -> Iterator[str]:
    """URL of a server, without the name of a database."""
    pytest.importorskip("pymysql")
    with _as_somebody("mariadbd") as (directory, somebody):
        data, port = directory / "data", free_ports(1)
        make = ["mariadb-install-db", f"--datadir={data}", "--auth-root-authentication-method=normal", "--no-defaults"]
        subprocess.run(make, check=True, cwd=directory, **somebody)  # type: ignore[call-overload]
        words = ["mariadbd", "--no-defaults", f"--datadir={data}", f"--port={port}", "--bind-address=127.0.0.1"]
        words += [f"--socket={directory}/socket", "--skip-grant-tables", "--skip-name-resolve"]
        server = subprocess.Popen(words, cwd=directory, **somebody)  # type: ignore[call-overload]
        try:
            url = f"mysql://root@127.0.0.1:{port}"
            until(lambda: _serves(f"{url}/mysql"), "MariaDB serves")
            yield url
        finally:
            server.terminate()
            server.wait(20)


@pytest.fixture(params=["sqlite", "postgresql", "mysql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database."""
    return empty(request.param, request, tmp_path)


def empty(kind: str, request: pytest.FixtureRequest, directory: Path) -> str:
    """Make an empty database, and give its URL."""
    if kind == "sqlite":
        path = directory / "shop.db"
        path.touch()
        return f"sqlite:///{path}"
    server, name = request.getfixturevalue(kind), f"shop{next(_NUMBER)}"
    if kind == "postgresql":
        import psycopg

        with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
            connection.execute(f"create database {name}".encode())
    else:
        maker = connect(f"{server}/mysql")
        maker.connection.cursor().execute(f"create database {name}")
        maker.close()
    return f"{server}/{name}"


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """A connection of the program, to a database with an outbox."""
    found = connect(url)
    found.create()
    yield found
    found.close()


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as found:
        yield found
