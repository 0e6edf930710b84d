"""Lines of our own, of `logging`, and of other libraries come out alike; systemd is told when it asked for it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hadelay.process import notify

PROGRAM = """
import logging, sys
import structlog
from hadelay.settings.node import LogConfig
from hadelay.process import set_up_logs

set_up_logs(LogConfig(format=sys.argv[1], level=sys.argv[2]), "n1")
structlog.get_logger("hadelay").info("ready", http="http://127.0.0.1:1")
logging.getLogger("hadelay.raft.node").info("leads", extra={"term": 3})
logging.getLogger("hadelay.raft.node").debug("traced")
logging.getLogger("aiohttp.server").info("nobody wants to know")
logging.getLogger("aiohttp.server").warning("but this: %s", "odd")
try:
    raise ValueError("what it was")
except ValueError as error:
    logging.getLogger("hadelay.http").error("request_failed", exc_info=error, extra={"path": "/v1"})
"""


def said(form: str, level: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, form, level], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_lines_have_the_same_shape_whoever_speaks() -> None:
    lines = [json.loads(line) for line in said("json", "info")]
    assert [line["event"] for line in lines] == ["ready", "leads", "but this: odd", "request_failed"]
    assert all(line["node"] == "n1" and line["timestamp"].endswith("Z") for line in lines)
    assert [line["level"] for line in lines] == ["info", "info", "warning", "error"]
    assert (lines[0]["http"], lines[1]["term"], lines[3]["path"]) == ("http://127.0.0.1:1", 3, "/v1")
    assert "ValueError: what it was" in lines[3]["exception"]


@pytest.mark.parametrize(("level", "count"), [("debug", 5), ("warning", 2), ("error", 1)])
def test_levels(level: str, count: int) -> None:
    assert len(said("json", level)) == count


def test_text_is_for_people() -> None:
    text = "\n".join(said("text", "info"))
    assert "leads" in text
    assert "term" in text
    assert "ValueError: what it was" in text


def test_systemd_gets_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(path)
        receiver.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        notify("READY=1")
        assert receiver.recv(100) == b"READY=1"
        monkeypatch.delenv("NOTIFY_SOCKET")
        notify("STOPPING=1")
        receiver.setblocking(False)
        with pytest.raises(BlockingIOError):
            receiver.recv(100)
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    notify("nobody listens")
