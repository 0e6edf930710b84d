"""The report of what needs attention has the same rows in the API, the command line and the console, at real nodes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.support import hadelay
from tests.console.conftest import Browser, make_token, signed_in
from tests.system.cluster import Cluster as Processes
from tests.system.cluster import ask, until


def test_all_is_well_only_if_nothing_needs_attention(tmp_path: Path) -> None:
    with Processes(tmp_path, nodes=1) as fresh:
        browser = Browser(fresh.urls["n1"])
        assert "All is well: nothing needs attention." in (browser.go("/console/"), browser.text)[1]
        name = fresh.ask("n1", "GET", "/v1/cluster").json["cluster_id"]
        assert f"<title>Overview · {name} · hadelay</title>" in browser.page
        done = hadelay("attention", "--servers", fresh.urls["n1"])
        assert (done.returncode, done.stdout) == (0, f"All is well in {name}: nothing needs attention.\n")
        fresh.ask("n1", "PUT", "/v1/topics/halted", {"paused": True})
        fresh.publish("n1", "halted", b"x", "?delay=1h")
        until(lambda: fresh.ask("n1", "GET", "/v1/attention").json["rows"], "the leader has looked again", every=0.2)
        (row,) = fresh.ask("n1", "GET", "/v1/attention").json["rows"]
        assert row["sentence"] == "halted is paused: 1 message waits."
        done = hadelay("attention", "--servers", fresh.urls["n1"], "-o", "json")
        assert (done.returncode, json.loads(done.stdout)["rows"]) == (1, [row])
        done = hadelay("attention", "--servers", fresh.urls["n1"])
        assert done.returncode == 1
        assert "hadelay topic resume halted" in " ".join(done.stdout.split())
        until(lambda: "1 message waits" in (browser.go("/console/"), browser.text)[1], "the Overview tells", every=0.2)
        assert f"<title>(1) Overview · {name} · hadelay</title>" in browser.page
        assert 'class="count problems" title="problems that need attention">1</b>' in browser.page
        assert 'href="/console/topics/halted#actions"' in browser.page
        assert "All is well" not in browser.text
        browser.go("/console/topics")
        assert f"<title>(1) Topics · {name} · hadelay</title>" in browser.page
        assert 'hadelay_attention{kind="paused"} 1\n' in fresh.ask("n1", "GET", "/metrics").body.decode()


def test_a_token_sees_rows_of_its_topics(guarded: Processes, admin_token: str) -> None:
    by = {"Authorization": f"Bearer {admin_token}"}
    for topic in ("mine-halted", "other-halted"):
        ask(guarded.urls["n1"], "PUT", f"/v1/topics/{topic}", {"paused": True}, by)
        ask(guarded.urls["n1"], "POST", f"/v1/topics/{topic}/messages?delay=1h", b"x", by)

    def names(token: str) -> list[str]:
        answer = ask(guarded.urls["n1"], "GET", "/v1/attention", None, {"Authorization": f"Bearer {token}"})
        assert answer.status == 200, answer
        return sorted(row["name"] for row in answer.json["rows"] if row["name"].endswith("-halted"))

    until(lambda: names(admin_token) == ["mine-halted", "other-halted"], "the leader has looked again", every=0.2)
    mine = make_token(guarded, admin_token, "read:mine-*")
    assert names(mine) == ["mine-halted"]
    assert "<title>(1) Topics" in signed_in(guarded, mine).go("/console/topics")
    publisher = make_token(guarded, admin_token, "publish")
    assert ask(guarded.urls["n1"], "GET", "/v1/attention", None, {"Authorization": f"Bearer {publisher}"}).status == 403


def test_pages_of_other_nodes_tell_of_a_full_disk(cluster: Processes) -> None:
    """Nothing is really full: one node says that less than storage.min_free_bytes is free."""
    full, other = cluster.followers()
    cluster.kill(full)
    cluster.restart(full, settings=("storage.min_free_bytes=900TiB",))
    browser = Browser(cluster.urls[other])
    alarm = f"Too little disk space on {full}: every node refuses publishes until space is freed there."
    until(lambda: alarm in (browser.go("/console/"), browser.text)[1], "the Overview tells", every=0.2)
    until(lambda: "too full" in (browser.go("/console/cluster"), browser.text)[1], "so do the members", every=0.2)
    assert alarm in browser.text
    members = cluster.ask(other, "GET", "/v1/cluster").json["members"]
    assert {one["name"]: one["has_space"] for one in members} == {
        name: name != full for name in cluster.names
    }  # fmt: skip
    cluster.kill(full)
    cluster.restart(full)
    until(lambda: alarm not in (browser.go("/console/"), browser.text)[1], "there is space again", every=0.2)
