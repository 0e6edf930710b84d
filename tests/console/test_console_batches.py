"""The pages of batches at a real node, without a browser."""

from __future__ import annotations

import re

import pytest

from hadelay.api.batches import Batch
from hadelay.console.batches import about_callback, shares, tone
from tests.console.conftest import Browser, make_token, signed_in
from tests.system.cluster import Cluster, ask, until

AT = "2026-11-29T12:00:00.000Z"


def opened(node: Cluster, key: str, topic: str = "all-done", **query: object) -> None:
    answer = node.ask("n1", "POST", "/v1/batches", {"key": key, "callback": {"topic": topic}, **query})
    assert answer.status == 201, answer


def joined(node: Cluster, key: str, topic: str, count: int, **item: object) -> list[str]:
    return node.publish_many("n1", topic, ["x"] * count, batch=key, **item)


def test_a_batch_is_followed_from_its_opening_to_its_callback(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/rows", {"max_attempts": 1})
    opened(node, "import-1", "imported")
    browser.go("/console/batches")
    assert re.search(r"import-1 open no members yet imported \w{3} \d+ \w{3}", browser.text)
    browser.go("/console/batches/import-1")
    assert "open no members yet." in browser.text
    assert "Callback once all members are settled" in browser.text
    browser.go("/console/search?q=import-1")
    assert browser.at == "/console/batches/import-1"
    ids = joined(node, "import-1", "rows", 4)
    first, *rest = sorted(node.drain("rows", 4), key=lambda message: str(message["id"]))
    assert {first["id"], *(one["id"] for one in rest)} == set(ids)
    node.settle("n1", "ack", rest)
    node.settle("n1", "nack", [first], reason="bad row")
    browser.go("/console/batches/import-1")
    assert "open 4 of 4 settled: 3 acked, 1 failed." in browser.text
    assert '<rect class="acked" width="75.0" height="6"/><rect class="failed" x="75.0" width="25.0"' in browser.page
    assert re.search(rf'href="/console/messages/{first["id"]}">.*<span class="badge dead">dead', browser.page)
    browser.go("/console/batches")
    assert "import-1 open 4 of 4 settled: 3 acked, 1 failed imported" in browser.text

    browser.go("/console/batches/import-1")
    browser.send("/console/batches/import-1/seal")
    assert "Sealed: no further message can join." in browser.text
    assert "done 4 of 4 settled" in browser.text
    assert "Seal the batch" not in browser.page
    assert "Cancel the members" not in browser.page, "an ended batch has no actions"
    (callback,) = node.drain("imported", 1)
    assert f'<a class="mono" href="/console/messages/{callback["id"]}">' in browser.page


def test_the_members_of_a_batch_are_cancelled(node: Cluster, browser: Browser) -> None:
    opened(node, "import-2")
    joined(node, "import-2", "waiting-rows", 130, delay="1h")
    browser.go("/console/batches/import-2")
    assert browser.refused("/console/batches/import-2/cancel", typed="import-1")[1:] == (
        "typed", "Type the key of the batch, import-2, to confirm.",
    )  # fmt: skip
    assert node.ask("n1", "GET", "/v1/batches/import-2").json["state"] == "open"
    browser.send("/console/batches/import-2/cancel", typed="import-2")
    assert "The members that wait are being cancelled; leased ones go on." in browser.text
    until(lambda: node.ask("n1", "GET", "/v1/batches/import-2").json["state"] == "done", "all are cancelled")
    page = browser.go("/console/batches/import-2")
    assert "130 of 130 settled: 0 acked, 130 failed." in browser.text
    shown = re.findall(r'href="/console/messages/(\w{13})">\1</a></td><td><span class="badge cancelled', page)
    following = re.search(r'href="(\?cursor=\d+)">Next page', page)
    assert following is not None
    page = browser.go(f"/console/batches/import-2{following[1]}")
    shown += re.findall(r'href="/console/messages/(\w{13})">\1</a></td><td><span class="badge cancelled', page)
    assert len(set(shown)) == 130
    assert "Next page" not in page
    entries = node.ask("n1", "GET", "/v1/audit?limit=1000").json["entries"]
    assert ("batch.cancel", "import-2", "done") in [(one["action"], one["target"], one["outcome"]) for one in entries]


def test_a_late_action_changes_nothing_and_says_so(node: Cluster, browser: Browser) -> None:
    opened(node, "import-3")
    browser.go("/console/batches/import-3")
    browser.send("/console/batches/import-3/cancel", typed="import-3")
    assert "The batch is done: no member is left to cancel." in browser.text
    assert browser.refused("/console/batches/none-such/seal")[0] == 404
    assert browser.post("/console/batches/import-3/seal", "x").status in (303, 403)
    for path, status in (("none-such", 404), (".hidden", 400), ("import-3?cursor=x", 400), ("import-3/seal", 405)):
        browser.go(f"/console/batches/{path}")
        assert browser.answer.status == status, path


def test_a_form_of_another_session_seals_nothing(node: Cluster, browser: Browser) -> None:
    opened(node, "import-4")
    browser.go("/console/batches/import-4")
    browser.send("/console/batches/import-4/seal", "x")
    assert browser.problem
    assert node.ask("n1", "GET", "/v1/batches/import-4").json["state"] == "open"


def test_a_batch_is_opened_by_its_key(node: Cluster, browser: Browser) -> None:
    opened(node, "by-key")
    browser.go("/console/batches?q=+by-key+")
    assert browser.at == "/console/batches/by-key"
    browser.go("/console/batches?q=by-ke")
    assert (browser.answer.status, "there is no batch" in browser.text.lower()) == (404, True)


def test_the_newest_batches_are_first_and_pages_follow(node: Cluster, browser: Browser) -> None:
    for n in range(101):
        opened(node, f"many-{n:03}")
    page = browser.go("/console/batches")
    keys = re.findall(r'href="/console/batches/(many-\d{3})"', page)
    assert keys == [f"many-{n:03}" for n in range(100, 0, -1)]
    following = re.search(r'href="(\?cursor=\d+)">Next page', page)
    assert following is not None
    page = browser.go(f"/console/batches{following[1]}")
    assert re.findall(r'href="/console/batches/(many-\d{3})"', page) == ["many-000"]
    browser.go("/console/batches?cursor=1")
    assert "There are no older batches." in browser.text


def test_rights_are_those_of_the_callbacks_topic(guarded: Cluster, admin_token: str) -> None:
    head, url = {"Authorization": f"Bearer {admin_token}"}, guarded.urls["n1"]
    browser = signed_in(guarded, make_token(guarded, admin_token, "read:mine-*", name="batch-reader"))
    browser.go("/console/batches")
    assert "There are no batches." in browser.text
    assert "hadelay batch open KEY TOPIC" in browser.text
    assert "docs/howto/batches.md" in browser.text
    query = {"key": "mine-1", "callback": {"topic": "mine-done"}}
    assert ask(url, "POST", "/v1/batches", query, head).status == 201
    for n in range(100):
        query = {"key": f"theirs-{n}", "callback": {"topic": "their-done"}}
        assert ask(url, "POST", "/v1/batches", query, head).status == 201
    page = browser.go("/console/batches")
    assert "mine-1 open" in browser.text, "pages without a batch of the visitor's are skipped"
    assert "theirs-" not in page
    assert browser.ask("GET", "/console/batches/theirs-1").status == 403
    page = browser.go("/console/batches/mine-1")
    assert "/seal" not in page
    for action in ("seal", "cancel"):
        assert browser.post(f"/console/batches/mine-1/{action}", typed="mine-1").status == 403
    assert ask(url, "GET", "/v1/batches/mine-1", headers=head).json["state"] == "open"
    writer = signed_in(
        guarded, make_token(guarded, admin_token, "read:mine-*", "publish:mine-*", name="batch-publisher")
    )
    writer.go("/console/batches/mine-1")
    writer.send("/console/batches/mine-1/seal")
    assert "Sealed: no further message can join." in writer.text
    entries = ask(url, "GET", "/v1/audit?limit=1000", headers=head).json["entries"]
    assert ("batch.seal", "mine-1", "batch-publisher") in [(e["action"], e["target"], e["token"]) for e in entries]


def batch(**counts: object) -> Batch[str]:
    zeros = dict.fromkeys(("joined", "pending", "acked", "dead", "expired", "cancelled"), 0)
    fixed = {"batch": "b", "state": "done", "on": "complete", "topic": "t", "progress": 1.0}
    return Batch(**{**zeros, **fixed, "opened_at": AT, "until": AT, **counts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, (0.0, 0.0)),
        ({"joined": 4, "acked": 1, "dead": 1}, (25.0, 25.0)),
        ({"joined": 1_000_000, "acked": 999_999, "cancelled": 1}, (99.0, 1.0)),
        ({"joined": 3, "acked": 2, "expired": 1}, (66.67, 33.33)),
    ],
)
def test_one_failure_of_a_million_is_seen_in_the_bar(counts: dict[str, object], expected: tuple[float, float]) -> None:
    assert shares(batch(**counts)) == expected


def test_the_page_says_why_there_is_no_callback() -> None:
    for words, of in (
        ("published", {"callback_id": "07D7EG00000G0"}),
        ("once all members are acked", {"on": "success", "state": "sealed"}),
        ("none: no member became a dead letter", {"on": "death", "joined": 2, "acked": 2}),
        ("none: of 3 members, 2 were not acked", {"on": "success", "joined": 3, "acked": 1, "dead": 1, "expired": 1}),
        ("none: the batch expired before all members were settled", {"state": "expired"}),
    ):
        assert about_callback(batch(**of)) == words
    several: tuple[dict[str, object], ...] = (
        {},
        {"dead": 1},
        {"state": "open"},
        {"cancelled": 1},
        {"state": "expired"},
    )
    assert [tone(batch(**of)) for of in several] == ["good", "bad", "calm", "warn", "warn"]
