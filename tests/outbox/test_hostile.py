"""Rows, clocks, databases and commands that an outbox must survive."""

from __future__ import annotations

import sqlite3
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hadelay import Client
from hadelay.errors import ConfigError
from hadelay.healthpage import served
from hadelay.outbox import Database, Relay, connect
from hadelay.outbox.rows import put_columns
from hadelay.testing import LocalNode
from tests.outbox.conftest import empty
from tests.outbox.test_relay import bodies, insert
from tests.system.cluster import hadelay, until


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "".join(c if c.isalnum() else "-" for c in request.node.name)


def relayed(url: str, node: LocalNode) -> Relay:
    return Relay(lambda: connect(url, relay=True), node.client)


@pytest.mark.parametrize("request_key", ["", " x", "a\nb"])
def test_a_bad_idempotency_key_holds_up_no_other(
    url: str, database: Database, node: LocalNode, topic: str, request_key: str
) -> None:
    insert(database, put_columns(topic, "bad") | {"request": request_key})
    insert(database, put_columns(topic, "good", delay="1h"))
    relay = relayed(url, node)
    step = relay.drain()
    assert (step.done, step.refused) == (1, 1)
    assert "idempotency_key" in database.refused(1)[0].refusal
    assert database.retry() == 1
    assert relay.drain().done == 1
    relay.close()


def test_deep_options_hold_up_no_other(url: str, database: Database, node: LocalNode, topic: str) -> None:
    deep = '{"meta":' + '{"a":' * 2_000 + "1" + "}" * 2_001
    insert(database, put_columns(topic, "bad") | {"options": deep})
    insert(database, put_columns(topic, "good", delay="1h"))
    relay = relayed(url, node)
    step = relay.drain()
    relay.close()
    assert (step.done, step.refused) == (1, 1)


def test_a_text_that_is_no_utf8_holds_up_no_other(node: LocalNode, tmp_path: Path, topic: str) -> None:
    """SQLite keeps what a program in another language calls a text."""
    path = tmp_path / "shop.db"
    path.touch()
    database = connect(f"sqlite:///{path}")
    database.create()
    for column in ("body", "message_key", "topic", "options"):
        values = {"topic": f"'{topic}'", column: "cast(x'ffdc' as text)"}
        database._run(f"insert into hadelay_outbox ({', '.join(values)}) values ({', '.join(values.values())})")
    values = "'cancel', cast(x'ff' as text)"
    database._run(f"insert into hadelay_outbox (topic, action, message_key) values ('{topic}', {values})")
    insert(database, put_columns(topic, "good ü", delay="1h"))
    relay = relayed(f"sqlite:///{path}", node)
    step = relay.drain()
    assert (step.done, step.refused) == (1, 5)
    assert bodies(node, topic) == ["good ü".encode()]
    refusals = [row.refusal for row in database.refused(5)]
    assert refusals[0] == "ValueError: body is no UTF-8: write it into body_bytes"
    assert all("is no UTF-8" in text for text in refusals)
    assert hadelay("outbox", "status", f"sqlite:///{path}", "-o", "json").returncode == 1
    database.close()
    relay.close()


def test_a_step_has_a_limit_of_bytes(url: str, database: Database, node: LocalNode, topic: str) -> None:
    for number in range(12):
        insert(database, put_columns(topic, f"{number}" + "x" * 1_000_000, delay="1h"))
    insert(database, put_columns(topic, "x" * 9_000_000))
    reader = connect(url)
    first = reader.take(2**50, 100)
    assert len(first) == 8
    reader.leave()
    reader.close()
    relay = relayed(url, node)
    step = relay.drain()
    assert (step.done, step.refused) == (12, 1)
    assert "body and options have 90000" in database.refused(1)[0].refusal
    relay.close()


def test_a_clock_that_was_ahead_holds_up_no_row(url: str, database: Database, node: LocalNode, topic: str) -> None:
    """The relay's clock was a day ahead when a try failed, and was set right."""
    insert(database, put_columns(topic, "x", delay="1h"))
    database._run("update hadelay_outbox set tries = 1, retry_ms = created_ms + 86400000")
    relay = relayed(url, node)
    assert relay.drain().done == 1
    relay.close()


def test_the_metrics_go_on_without_a_node(url: str, database: Database, topic: str) -> None:
    insert(database, put_columns(topic, "waits"))
    stop = threading.Event()
    with Client("http://127.0.0.1:9", timeout=0.1) as client:
        relay = Relay(lambda: connect(url, relay=True), client)
        thread = threading.Thread(target=relay.run, args=(stop,))
        thread.start()
        with served(relay.health.page, "127.0.0.1:0") as port:

            def shown() -> bool:
                text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
                failed = "hadelay_outbox_failed_steps_total 0" not in text
                return failed and 'hadelay_outbox_rows{state="waiting"} 1' in text

            until(shown, "the metrics tell of the row and of the failed step")
        stop.set()
        thread.join()


def test_a_stricter_isolation_of_the_database(request: pytest.FixtureRequest, node: LocalNode, tmp_path: Path) -> None:
    url = empty("postgresql", request, tmp_path)
    owner = connect(url)
    owner.create()
    name = url.rpartition("/")[2]
    owner._run(f"alter database {name} set default_transaction_isolation = 'serializable'")
    owner._run(f"alter database {name} set default_transaction_read_only = on")
    found = connect(url)
    assert found._run("select current_setting('transaction_isolation'), current_setting('transaction_read_only')") == [
        ("read committed", "off")
    ]
    found.close()
    owner.close()


def test_one_look_answers_all_notifications(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = empty("postgresql", request, tmp_path)
    program, relay = connect(url), connect(url)
    program.create()
    for number in range(20):
        insert(program, put_columns("orders", f"{number}"))
    relay.take(2**50, 1)
    relay.leave()
    relay.wait(10)
    assert list(relay.connection.notifies(timeout=0)) == []
    program.close()
    relay.close()


def test_parameters_of_mysql_are_not_ignored() -> None:
    pytest.importorskip("pymysql")
    with pytest.raises(ConfigError, match="only one is ssl_ca=FILE"):
        connect("mysql://root@127.0.0.1:9/shop?ssl=true")


@pytest.mark.parametrize("words", [("status",), ("retry",), ("run", "--once")])
def test_a_database_without_the_table(words: tuple[str, ...], tmp_path: Path) -> None:
    sqlite3.connect(tmp_path / "shop.db").close()
    (tmp_path / "shop.db").touch()
    found: Any = hadelay("outbox", words[0], f"sqlite:///{tmp_path}/shop.db", *words[1:])
    assert (found.returncode, found.stdout) == (2, "")
    assert "hadelay outbox sql" in found.stderr
    assert "Traceback" not in found.stderr
