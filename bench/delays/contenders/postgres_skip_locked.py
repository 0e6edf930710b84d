"""PostgreSQL by hand: a table with an index by due time, and workers that delete what they worked on in the transaction
that locked it (FOR UPDATE SKIP LOCKED)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from bench.delays.contender import POLL_S, Client, Message, Received
from bench.delays.server import OneServer, Server
from bench.peers import program
from bench.wrk_run import Missing

_NOBODY = 65534
_TABLE = """
CREATE TABLE IF NOT EXISTS delayed (id text PRIMARY KEY, due timestamptz NOT NULL, body bytea NOT NULL);
CREATE INDEX IF NOT EXISTS delayed_due ON delayed (due)
"""
_PUBLISH = """
INSERT INTO delayed SELECT id, to_timestamp(due / 1000.0), body
FROM unnest(%s::text[], %s::bigint[], %s::bytea[]) AS new (id, due, body) ON CONFLICT DO NOTHING
"""
_RECEIVE = "SELECT body FROM delayed WHERE due <= clock_timestamp() ORDER BY due LIMIT %s FOR UPDATE SKIP LOCKED"


class Postgres(OneServer):
    """One server with its default durability (fsync and synchronous_commit on)."""

    modules: ClassVar[tuple[str, ...]] = ("psycopg",)
    durability = "write-ahead log, synced before each commit, on one machine"

    @classmethod
    def missing(cls) -> str:
        try:
            _binary("initdb")
        except Missing as missing:
            return str(missing)
        return super().missing()

    def start(self) -> None:
        data = self.directory / "data"
        user = _NOBODY if os.getuid() == 0 else None  # the server refuses to run as root
        make = [_binary("initdb"), "-D", str(data), "-U", "bench", "-A", "trust", "-E", "UTF8", "--no-locale"]
        if user is not None:
            shutil.chown(self.directory, user, user)
        subprocess.run(make, check=True, capture_output=True, cwd=self.directory, user=user, group=user,
                       extra_groups=[] if user is not None else None)  # fmt: skip
        command = [_binary("postgres"), "-D", str(data), "-p", str(self.port), "-c", "listen_addresses=127.0.0.1"]
        command += ["-c", "unix_socket_directories="]
        self._server = Server(command, self.directory, self.port, user=user)
        self._server.start()

    def stop(self) -> None:
        self._server.stop(signal.SIGINT)  # does not wait for clients

    def url(self) -> str:
        return f"postgresql://bench@127.0.0.1:{self.port}/postgres"


def _binary(name: str) -> str:
    """Debian's servers are not in PATH, one directory per version."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    try:
        return program(name)
    except Missing:
        if not found:
            raise
        return str(found[-1])


class SkipLocked(Postgres):
    name = "postgres"
    setup = (
        "PostgreSQL, SELECT … FOR UPDATE SKIP LOCKED, work, DELETE in one transaction; workers poll every "
        f"{POLL_S * 1000:.0f} ms"
    )
    cancels = "DELETE by primary key"
    notes = "a worker's messages are free as soon as its connection ends; a worker holds a transaction while it works"

    def prepare(self) -> None:
        import psycopg

        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(_TABLE)

    def connect(self) -> Client:
        return _Client(self)


class _Client(Client):
    def __init__(self, contender: Postgres) -> None:
        import psycopg

        self._connection: Any = psycopg.connect(contender.url(), connect_timeout=5)

    def publish(self, messages: Sequence[Message]) -> None:
        ids, due = [m.id for m in messages], [m.due_ms for m in messages]
        with self._connection.transaction():
            self._connection.execute(_PUBLISH, (ids, due, [m.body() for m in messages]))

    def receive(self, most: int, wait_s: float) -> list[Received]:
        until = time.monotonic() + wait_s
        while not (rows := self._connection.execute(_RECEIVE, (most,)).fetchall()):
            self._connection.rollback()
            if time.monotonic() > until:
                return []
            time.sleep(POLL_S)
        return [Received(bytes(body).decode().rstrip()) for (body,) in rows]

    def ack(self, received: Sequence[Received]) -> None:
        self._connection.execute("DELETE FROM delayed WHERE id = ANY(%s)", ([one.id for one in received],))
        self._connection.commit()

    def cancel(self, ids: Sequence[str]) -> int:
        with self._connection.transaction():
            deleted = self._connection.execute("DELETE FROM delayed WHERE id = ANY(%s)", (list(ids),))
        return int(deleted.rowcount)

    def close(self) -> None:
        self._connection.close()
