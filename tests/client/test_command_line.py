"""What the command line sends, as its own small client."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hadelay.cli.output import Remote
from hadelay.cli.remote import call, read_answer
from hadelay.errors import BadRequest, HadelayError, OutcomeUnknown
from tests.client.test_client import url

__all__ = ["url"]


@pytest.mark.parametrize("value", ["plain", "grün", "日本 €", "Ã¼"])
def test_the_command_line_sends_text_as_it_is(url: str, value: str) -> None:
    remote = Remote(servers=url)
    made = call(remote, "POST", "/v1/topics/t/messages", b"x", headers={"Hadelay-Meta-Who": value})
    assert call(remote, "GET", f"/v1/messages/{made['id']}")["meta"] == {"who": value}


def test_the_command_line_does_not_follow_redirects_for_ever() -> None:
    asked: list[str] = []

    class Lost(BaseHTTPRequestHandler):
        """It takes itself for somebody else."""

        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(307)
            self.send_header("Location", f"http://127.0.0.1:{server.server_port}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Lost) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(HadelayError, match="307"):
            call(Remote(servers=f"http://127.0.0.1:{server.server_port}"), "POST", "/v1/receive", {"topics": ["t"]})
        server.shutdown()
    assert 1 < len(asked) < 10


@pytest.mark.parametrize(
    ("wish", "headers", "servers"),
    [
        ({"rate": float("nan")}, {}, ""),
        ({}, {"Hadelay-Meta-a": "x\nHadelay-Key: k"}, ""),
        ({}, {"Hadelay-Meta-a\n": "x"}, ""),
        ({}, {}, "http://127.0.0.1:99999"),
    ],
)
def test_the_command_line_refuses_in_words(url: str, wish: Any, headers: dict[str, str], servers: str) -> None:
    with pytest.raises(BadRequest, match="sent"):
        call(Remote(servers=servers or url), "PUT", "/v1/topics/t", wish, headers=headers)


@pytest.mark.parametrize("answer", [b"<html>", b'"\xff"', b"[" * 2_000])
def test_who_is_no_node_is_said_to_be_none(answer: bytes) -> None:
    for method, known in (("GET", True), ("POST", False)):
        with pytest.raises(HadelayError, match="http://a does not answer like a node") as caught:
            read_answer("http://a", method, answer)
        assert isinstance(caught.value, OutcomeUnknown) != known
