"""Dead letters that fit are due again, and no others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hadelay import Client
from hadelay.errors import BadRequest
from hadelay.pipeline.jobs import ReplayOptions
from hadelay.pipeline.replay import run
from tests.cli.support import cluster


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"reason": "("}, "not a regular expression"),
        ({"died_from": "yesterday"}, "died_from: 'yesterday' is not a time with a zone"),
        ({"died_to": "2026-11-20T18:00:00"}, "not a time with a zone"),
        ({"limit": -1}, "0 or more"),
    ],
)
def test_wrong_filters_are_refused(given: dict[str, object], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        ReplayOptions("http://x", "t", **given)  # type: ignore[arg-type]


@pytest.mark.processes
def test_letters_that_fit_are_handed_out_again_and_others_stay(tmp_path: Path) -> None:
    with cluster(tmp_path) as dev, Client(dev.servers) as client:
        client.put_topic("orders", max_attempts=1)
        reasons = ["HTTP 503", "HTTP 503", "no such order", "HTTP 500"]
        for n, reason in enumerate(reasons):
            client.put("orders", b"%d" % n, tags=["eu" if n else "us"])
            (message,) = client.receive("orders", wait=10)
            assert client.nack(message, reason=reason) == ["nacked"]
        died = [letter.died_at for letter in client.dead("orders")]
        words = ("pipeline", "replay", "orders", "-o", "json")
        done = dev.run(*words, "--reason", "^HTTP 5", "--dry-run")
        assert json.loads(done.stdout) == {"looked_at": 4, "fit": 3, "outcomes": {}}, done.stderr
        where = {"endpoint": dev.servers, "topic": "orders"}
        assert run(None, ReplayOptions(**where, tags="eu", died_to=died[0].isoformat())).fit == 0  # type: ignore[arg-type]
        assert run(None, ReplayOptions(**where, died_from=died[3].isoformat(), dry_run=True)).fit == 1  # type: ignore[arg-type]
        done = dev.run(*words, "--reason", "^HTTP 5", "--tags", "eu", "--rate", 100)
        assert json.loads(done.stdout) == {"looked_at": 4, "fit": 2, "outcomes": {"redriven": 2}}, done.stderr
        again = client.receive("orders", max=10, wait=10)
        again += client.receive("orders", max=10, wait=10) if len(again) < 2 else []
        assert {message.body for message in again} == {b"1", b"3"}
        assert [letter.errors[-1].reason for letter in client.dead("orders")] == ["HTTP 503", "no such order"]
        assert run(None, ReplayOptions(**where, limit=1)).outcomes == {"redriven": 1}  # type: ignore[arg-type]
