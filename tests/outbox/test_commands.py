"""`hadelay outbox`, and the health of a relay."""

from __future__ import annotations

import json
import sqlite3
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from hadelay.healthpage import served
from hadelay.outbox import Status, create
from hadelay.outbox.health import Health
from hadelay.testing import LocalNode
from tests.system.cluster import hadelay


def test_the_commands(tmp_path: Path, node: LocalNode) -> None:
    path = tmp_path / "shop.db"
    statements = hadelay("outbox", "sql", "sqlite").stdout
    with sqlite3.connect(path) as shop:
        shop.executescript(statements)
        shop.execute("insert into hadelay_outbox (topic, body) values ('cli', 'a'), ('no/topic', 'b')")
    shop.close()
    url = f"sqlite:///{path}"
    waiting = hadelay("outbox", "status", url)
    assert (waiting.returncode, waiting.stdout[:7]) == (0, "2 wait,")
    once = hadelay("outbox", "run", url, "--once", "--servers", node.url)
    assert (once.returncode, once.stdout) == (1, "1 relayed, 0 to try again, 1 refused\n")
    status = hadelay("outbox", "status", url, "-o", "json")
    found = json.loads(status.stdout)
    assert (status.returncode, found["waiting"], found["refused"]) == (1, 0, 1)
    assert found["rows"][0]["topic"] == "no/topic"
    assert hadelay("outbox", "retry", url).stdout == "1 rows wait again\n"
    node.client.receive("cli", wait=5)[0].ack()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("oracle://shop", "the outbox needs a URL such as"),
        ("sqlite:///nowhere.db", "no SQLite database at nowhere.db"),
        ("sqlite://", "the outbox needs a URL such as"),
        ("sqlite:///", "no SQLite database at the empty path"),
        ("postgresql://shop@127.0.0.1:9/shop", "no connection to the database"),
    ],
)
def test_no_database(url: str, words: str) -> None:
    found = hadelay("outbox", "status", url)
    assert (found.returncode, found.stdout) == (2, "")
    assert words in found.stderr


def test_health() -> None:
    health = Health()
    health.say(Status(3, 1, 1500, 2), {"done": 5})
    with served(health.page, "127.0.0.1:0") as port:
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        assert 'hadelay_outbox_rows_total{outcome="done"} 5\n' in metrics
        assert 'hadelay_outbox_rows{state="refused"} 2\n' in metrics
        assert "hadelay_outbox_oldest_seconds 1.500\n" in metrics
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5).read() == b"ok\n"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5)


@pytest.mark.parametrize("dialect", ["postgresql", "mysql", "sqlite"])
def test_the_statements_name_every_column(dialect: str) -> None:
    from hadelay.outbox.rows import COLUMNS

    table = create(dialect)[0]  # type: ignore[arg-type]
    assert all(f"\n  {column} " in table for column in COLUMNS)
