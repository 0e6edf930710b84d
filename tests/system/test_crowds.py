"""More connections than a node may have descriptors for."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from chaos.freeports import free_ports
from hadelay.http import listener
from hadelay.platform import strangers
from hadelay.process import LEAST, divide
from hadelay.settings.node import Config
from tests.system.cluster import ask, end, ready_line, spawn, until

#: serve, with a limit of open files that it cannot raise.
LIMITED = """
import resource, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from hadelay.__main__ import main
main()
"""


def settings(directory: Path, port: int) -> tuple[str, ...]:
    return (
        "serve", "--output", "json", "--set", "cluster.init=true", "--set", f"node.data_dir={directory}/data",
        "--set", f"http.listen=127.0.0.1:{port}", "--set", f"raft.listen=127.0.0.1:{port + 1}",
        "--set", "log.format=json",
    )  # fmt: skip


def lines(errors: Path, event: str) -> list[dict[str, object]]:
    found = [json.loads(line) for line in errors.read_text().splitlines() if line.startswith("{")]
    return [line for line in found if line.get("event") == event]


def test_idle_connections_leave_descriptors_for_the_node(tmp_path: Path) -> None:
    port, errors = free_ports(2), tmp_path / "errors"
    process = spawn(1_024, *settings(tmp_path, port), errors=errors, program=LIMITED)
    crowd = []
    try:
        url = ready_line(process, errors)["nodes"][0]["http"]
        (said,) = lines(errors, "few_descriptors")
        assert said["max_connections"] == "384 instead of 16000"
        assert said["max_calls"] == "128 instead of 1024"
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(384)]
        until(lambda: ask(url, "GET", "/v1/names").status == 503, "the node is full")
        for path in ("/livez", "/readyz") * 5:
            crowd += [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
            assert ask(url, "GET", path).status == 200
        for connection in crowd[:20]:
            connection.close()
        # Every one of them opens files of an hour of its own.
        items = [{"topic": "t", "body": "x", "delay": f"{hour}h"} for hour in range(2_000)]
        until(lambda: ask(url, "GET", "/v1/names").status == 200, "it has room again")
        assert ask(url, "POST", "/v1/messages:batch", items).status == 200
        assert ask(url, "POST", "/v1/topics/t/messages", b"x").status == 201
        assert process.poll() is None
        assert not lines(errors, "accept_failed")
        assert 1 <= len(lines(errors, "connections_refused")) <= 3, "not a line for each"
    finally:
        for connection in crowd:
            connection.close()
        end(process)


def test_a_limit_below_which_no_node_lives_is_refused_in_words(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    process = spawn(256, *settings(tmp_path, free_ports(2)), errors=errors, program=LIMITED)
    try:
        assert process.wait(30) == 2
        assert "may open 256 files; a node needs 768" in errors.read_text()
    finally:
        end(process)


@pytest.mark.parametrize("limit", [LEAST, 1_024, 2_048, 1 << 20])
def test_strangers_and_spares_leave_descriptors_for_the_node(limit: int) -> None:
    """Idle connections of all three kinds at once: of clients, on the node link, and for health routes."""
    config, sockets = divide(Config(), limit)
    others = strangers.MAX_SILENT + strangers.MAX_READY + strangers.MAX_BEGUN + listener._SPARES
    open_hours, rest = 128, 64
    assert limit - sockets - config.webhooks.max_calls - others >= open_hours + rest
    assert config.http.max_connections >= 128
