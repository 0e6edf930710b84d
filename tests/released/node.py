"""A node of its own over a kept data directory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from chaos.freeports import free_ports
from tests.system.cluster import environment

TOPICS = ("orders", "refunds")


@contextmanager
def running(directory: Path, *, init: bool = False, kill: bool = False) -> Iterator[tuple[str, int]]:
    """(URL, pid) of a node over `directory`; ended by SIGTERM, or by SIGKILL with `kill`."""
    port = free_ports(2)
    settings = {
        "node.data_dir": directory,
        "node.name": "kept",
        "cluster.id": "released",
        "cluster.init": str(init).lower(),
        "http.listen": f"127.0.0.1:{port}",
        "raft.listen": f"127.0.0.1:{port + 1}",
        "raft.segment_bytes": "8MiB",
        "retention.settled_ms": "3650d",
        "retention.carry_ms": "3650d",
    }
    command = [sys.executable, "-m", "hadelay", "serve", "-o", "json"]
    # A file, and not nothing at all: that would found a cluster.
    empty = directory.parent / "node.toml"
    empty.write_text("")
    command.insert(4, str(empty))
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, f"the node ended with {process.wait(10)}"
            ready = json.loads(line)["nodes"][0]
            yield ready["http"], ready["pid"]
        finally:
            process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
