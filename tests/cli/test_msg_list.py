"""`hadelay msg list`: due order, one JSON object per line, and a word when there is more."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.support import Dev, cluster

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dev]:
    with cluster(tmp_path_factory.mktemp("dev")) as running:
        yield running


@pytest.fixture(scope="module")
def ids(dev: Dev) -> list[str]:
    """Three messages due in 3 h, 1 h and 2 h; the last of them is cancelled."""
    found = []
    for delay in ("3h", "1h", "2h"):
        done = dev.run("msg", "put", "listed", "x", "--delay", delay, "-o", "json")
        found.append(json.loads(done.stdout)["id"])
    assert dev.run("msg", "cancel", found[2]).returncode == 0
    return found


def listed(dev: Dev, *words: str) -> list[dict[str, Any]]:
    done = dev.run("msg", "list", "listed", *words, "-o", "json")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_pending_in_due_order(dev: Dev, ids: list[str]) -> None:
    assert [(m["id"], m["state"]) for m in listed(dev)] == [(ids[1], "scheduled"), (ids[0], "scheduled")]


def test_lists_by_state_and_time(dev: Dev, ids: list[str]) -> None:
    assert [m["id"] for m in listed(dev, "--state", "cancelled")] == [ids[2]]
    assert [m["id"] for m in listed(dev, "--state", "all", "--limit", "0")] == [ids[1], ids[2], ids[0]]
    due = listed(dev)[0]["deliver_at"]
    assert [m["id"] for m in listed(dev, "--to", due)] == []
    assert [m["id"] for m in listed(dev, "--from", due, "-n", "1")] == [ids[1]]


def test_a_table_and_a_word_when_there_is_more(dev: Dev, ids: list[str]) -> None:
    done = dev.run("msg", "list", "listed", "--limit", "1")
    assert ids[1] in done.stdout
    assert ids[0] not in done.stdout
    assert "raise --limit for more" in done.stderr
    assert dev.run("msg", "list", "listed").stderr == ""


def test_a_topic_says_what_it_has(dev: Dev, ids: list[str]) -> None:
    topic = json.loads(dev.run("topic", "get", "listed", "-o", "json").stdout)
    assert (topic["scheduled"], topic["bytes"] > 0) == (2, True)
    assert "listed" in dev.run("topic", "list").stdout


@pytest.mark.parametrize(
    ("words", "code"), [(["nothing"], 3), (["listed", "--state", "lost"], 2), (["listed", "--limit", "-1"], 2)]
)
def test_refusals(dev: Dev, ids: list[str], words: list[str], code: int) -> None:
    done = dev.run("msg", "list", *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr
