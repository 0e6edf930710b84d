"""A real cluster, backed up into an S3 server and restored from it; the server refuses, and goes away, meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chaos.freeports import free_ports
from hadelay import Client, Put
from hadelay.cli.app import run
from hadelay.cli.dev import Layout
from tests.cli.support import cluster
from tests.s3 import ENVIRONMENT, Store, serve
from tests.system.cluster import Cluster

COUNT = 300


class Shell:
    """The command line, in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def run(self, *words: object) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)"""
        code = run([*map(str, words), "-o", "json"])
        out, err = self._capture.readouterr()
        assert ENVIRONMENT["AWS_SECRET_ACCESS_KEY"] not in out + err
        return code, out, err

    def said(self, *words: object) -> dict[str, Any]:
        code, out, err = self.run(*words)
        assert code == 0, err
        found: dict[str, Any] = json.loads(out)
        return found

    def refused(self, *words: object) -> str:
        """What it said."""
        code, _, err = self.run(*words)
        assert code == 1, err
        return err


@pytest.mark.processes
def test_backups_in_an_object_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve(tmp_path / "s3") as store:
        _make(Shell(capsys), tmp_path / "lost", store)
        _restore(Shell(capsys), tmp_path / "new", store)


def _make(shell: Shell, directory: Path, store: Store) -> None:
    where = store.uri("backups/orders")
    with cluster(directory) as dev, Client(dev.servers) as client:
        create = ("backup", "create", where, "-s", dev.servers)
        client.put_many([Put(topic="orders", body=b"%d" % n * 100, delay="1h") for n in range(COUNT)])
        # The key has expired when all but the manifest is there: nothing counts.
        store.fault = lambda method, path: 403 if "manifest-" in path and method == "POST" else 0
        reported = shell.refused(*create)
        assert "No backup was added" in reported
        assert "run the command again" in reported
        half = store.objects("backups/orders")
        assert half
        assert not [name for name in half if "manifest" in name]
        store.fault = lambda method, path: 0
        # It goes on where it ended.
        first = shell.said(*create)
        assert first["copied_bytes"] < first["bytes"] / 2
        assert first["directory"] == "s3://bucket/backups/orders"
        client.put_many([Put(topic="orders", body=b"more", delay="2h")])
        second = shell.said(*create)
        assert second["copied_files"] < second["files"]
        # The store goes away: nothing is deleted.
        before = store.objects("backups/orders")
        store.fault = lambda method, path: None if method == "POST" else 0
        client.put_many([Put(topic="orders", body=b"not backed up", delay="3h")])
        assert "earlier backups are unchanged" in shell.refused(*create)
        store.fault = lambda method, path: 0
        assert store.objects("backups/orders") == before
        assert shell.said("backup", "verify", where)["damaged"] == []
        assert shell.said("backup", "verify", where, "--index", first["index"])["index"] == first["index"]


def _restore(shell: Shell, directory: Path, store: Store) -> None:
    where = store.uri("backups/orders")
    damaged = max((store.bucket / "backups/orders/hours").rglob("*.log/*"), key=lambda path: path.stat().st_size)
    data = damaged.read_bytes()
    damaged.write_bytes(data[:1000] + bytes([data[1000] ^ 1]) + data[1001:])
    code, out, err = shell.run("backup", "verify", where)
    assert (code, json.loads(out)["damaged"][0]["offset"]) == (1, 0), err
    layout = Layout(id="restored", nodes=1, port_base=free_ports(2), founded=1)
    directory.mkdir()
    layout.save(directory)
    toml = directory / "n1.toml"
    toml.write_text(layout.toml(0, directory))
    words = ("restore", where, toml, "--set", "cluster.group=1")
    assert damaged.parent.name in shell.refused(*words)
    damaged.write_bytes(data)
    shell.said(*words)
    with Cluster(directory, nodes=1, settings=("cluster.group=1",)) as new:
        assert new.topic("n1", "orders")["scheduled"] == COUNT + 1
