"""docs/explanation/reading.md: its files exist, are few enough for a day, and import no feature beside the walk."""

from __future__ import annotations

import re
from pathlib import Path

from tests.repository.test_layers import SOURCE, graph

PAGE = Path(__file__).resolve().parents[2] / "docs/explanation/reading.md"
MOST_LINES = 6_150
#: Features beside the walk: packages and modules that no stop may import.
FEATURES = (
    "cli", "client", "console", "http.access", "http.metrics", "http.tokens", "ledger.access", "pipeline", "process",
    "server.memberchanges", "server.metrics", "server.restore", "server.webhooks", "storage.backup", "storage.inspect",
)  # fmt: skip
#: Stop → features that it imports all the same: the table of commands names those of access, and a receive from a topic
#: with a webhook is refused. This list may only get shorter.
EXCEPTIONS = {
    "ledger.apply": {"ledger.access"},
    "server.service.consuming": {"server.webhooks.pool"},
}


def stops() -> list[str]:
    walk = PAGE.read_text().partition("## The walk\n")[2].partition("\n## ")[0]
    return re.findall(r"`([\w/]+\.py)`", walk)


def test_files_of_the_walk_exist_once() -> None:
    found = stops()
    assert len(found) > 20
    assert [file for file in found if not (SOURCE / file).is_file()] == []
    assert len(found) == len(set(found))


def test_the_walk_has_the_request_s_way_in_and_the_delivery_s_way_out() -> None:
    assert {"http/connection.py", "http/publish.py", "server/service/consuming.py", "http/consume.py"} <= set(stops())


def test_the_walk_is_short_enough() -> None:
    assert sum(len((SOURCE / file).read_text().splitlines()) for file in stops()) <= MOST_LINES


def test_no_stop_imports_a_feature_beside_the_walk() -> None:
    wrong: dict[str, set[str]] = {}
    for file in stops():
        module = file.removesuffix(".py").replace("/", ".")
        for other in graph()[module]:
            if any(other == feature or other.startswith(f"{feature}.") for feature in FEATURES):
                wrong.setdefault(module, set()).add(other)
    assert wrong == EXCEPTIONS
