"""openapi-python-client generates a client of every operation from /openapi.json, and the client works."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hadelay.testing import LocalNode


@pytest.fixture(scope="module")
def node() -> Iterator[LocalNode]:
    with LocalNode() as running:
        yield running


@pytest.fixture
def generated(node: LocalNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with urllib.request.urlopen(node.url + "/openapi.json") as answer:
        (tmp_path / "openapi.json").write_bytes(answer.read())
    tools = Path(sys.executable).parent
    done = subprocess.run(
        [tools / "openapi-python-client", "generate", "--meta", "none", "--fail-on-warning",
         "--path", tmp_path / "openapi.json", "--output-path", tmp_path / "delays"],
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "arning" not in done.stdout + done.stderr
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_generated_client_publishes_receives_and_acks(generated: Path, node: LocalNode) -> None:
    document: dict[str, Any] = msgspec.json.decode((generated / "openapi.json").read_bytes())
    named = {(one["tags"][0], one["operationId"]) for path in document["paths"].values() for one in path.values()}
    assert {(file.parent.name, file.stem) for file in generated.glob("delays/api/*/[a-z]*.py")} == named

    def operation(name: str) -> Any:
        return importlib.import_module(f"delays.api.{name}")

    models, types = importlib.import_module("delays.models"), importlib.import_module("delays.types")
    with importlib.import_module("delays").Client(node.url, follow_redirects=True) as client:
        payload = types.File(payload=BytesIO(b"pay 4711"))
        published = operation("publish.publish").sync("orders", body=payload, delay="1h", key="k", client=client)
        assert (published.topic, published.key) == ("orders", "k")
        item = models.BatchItem.from_dict({"topic": "orders", "body": {"order": 4712}, "delay": 0})
        (second,) = operation("publish.publish_batch").sync(body=[item], client=client).results
        node.clock.advance("1h")

        asked = models.Receive(max_=10, wait="5s")
        text = models.ReceiveAcceptBody.TEXT
        messages: list[Any] = []
        while len(messages) < 2:
            answer = operation("consume.receive").sync("orders", body=asked, accept_body=text, client=client)
            assert answer.messages
            messages += answer.messages
        assert {message.id: message.to_dict().get("body") for message in messages} == {
            published.id: None, second.id: '{"order":4712}'
        }  # fmt: skip

        leases = models.Ack(leases=[message.lease for message in messages])
        acked = operation("consume.ack").sync(body=leases, client=client)
        assert [str(one.outcome) for one in acked.results] == ["acked", "acked"]
        assert operation("messages.get_message").sync(published.id, client=client).state == "acked"

        refused = operation("messages.cancel_message").sync(published.id, client=client)
        assert isinstance(refused, models.Problem)
        assert refused.type_ == "conflict"
