"""The pages Overview, Cluster and Access, their charts and streams, at a real node without a browser."""

from __future__ import annotations

import asyncio
import http.client
import re
import signal
import time
import urllib.parse
from datetime import UTC, datetime
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hadelay.api.topicsettings import Topic, WebhookOut
from hadelay.console.cluster import kind, replace
from hadelay.console.owntime import OwnTime
from hadelay.console.render import size
from hadelay.console.samples import KEPT, Sampler, _rates, _Ring, last_point
from hadelay.console.topics import health, receiver
from hadelay.errors import NoLeader
from hadelay.model import hour_name
from hadelay.server.service.overview import HourRow, Recent, TopicCounts, Totals, summarize
from hadelay.server.webhooks.queues import Health
from tests.console.conftest import ARCHIVED, Browser, make_token, signed_in
from tests.system.cluster import Cluster, ask, until


def test_the_overview_shows_counts_and_alarms(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/over", {"paused": True})
    node.publish_many("n1", "over", ["x"] * 7, delay="30s")

    def seen() -> bool:
        browser.go("/console/")
        return "over is paused: 7 messages wait." in browser.text

    until(seen, "the page tells of the paused topic", every=0.2)
    assert "n1 this node leader" in browser.text
    assert re.search(r"in the next minute \d", browser.text)


def test_charts_have_points(node: Cluster, browser: Browser) -> None:
    def points() -> bool:
        return len(browser.ask("GET", "/console/charts/topics/charted").json["at"]) > 0

    until(points, "a topic that was looked at has a chart", seconds=60, every=0.5)
    series = browser.ask("GET", "/console/charts/overview").json
    lengths = {len(row) for name, rows in series.items() for row in ([rows] if name == "at" else rows)}
    assert lengths == {len(series["at"])}
    assert set(series) == {"at", "rates", "lateness", "pending", "deaths"}


def test_the_histogram_has_all_bars_of_its_range(node: Cluster, browser: Browser) -> None:
    node.publish_many("n1", "bars", ["x"] * 5, delay="90m")
    now = int(time.time() * 1000)
    for path in ("/console/due?", "/console/due?topic=bars&"):
        for hours in (1, 24, 24 * 365):
            found = browser.ask("GET", f"{path}from={now}&to={now + hours * 3_600_000}").json
            assert len(found["at"]) == len(found["count"]) <= 151
            assert found["total"] == sum(found["count"])
            assert {b - a for a, b in zip(found["at"], found["at"][1:], strict=False)} == {found["step"]}
    assert browser.ask("GET", f"/console/due?topic=bars&from={now}&to={now + 86_400_000}").json["total"] == 5
    for wrong in ("from=1&to=2", "from=x&to=2", "from=1", f"from={now}&to={now - 1}", "from=0&to=99999999999999"):
        assert browser.ask("GET", f"/console/due?{wrong}").status == 400
    assert browser.ask("GET", f"/console/due?topic=none-such&from={now}&to={now + 3_600_000}").status == 404


def test_the_cluster_page_shows_the_node_and_its_files(node: Cluster, browser: Browser) -> None:
    node.publish("n1", "files", b"x", "?delay=30h")
    browser.go("/console/cluster")
    for words in ("n1 leads term", "MiB are free", "Checkpoint", "this node votes"):
        assert words in browser.text
    assert re.search(r'title="\d{10}: [1-9]\d* entries', browser.page)


def test_the_cluster_page_tells_why_leadership_changed_and_of_backups(node: Cluster, browser: Browser) -> None:
    browser.go("/console/cluster")
    assert re.search(r"\S+ \S+ n1 1 n1 is the only voter", browser.text)
    assert "None that n1 knows of since it started." in browser.text
    for outcome, query in (("incomplete", ""), ("complete", "?complete=true")):
        snapshot = node.ask("n1", "POST", "/v1/snapshots").json
        assert re.search(r"\S+ n1 \S+ \S+ 0 B running", browser.go("/console/cluster") and browser.text)
        file = next(file["name"] for file in snapshot["files"] if file["bytes"] != "0").replace("/", "%2F")
        read = len(node.ask("n1", "GET", f"/v1/snapshots/{snapshot['id']}/{file}").body)
        assert node.ask("n1", "DELETE", f"/v1/snapshots/{snapshot['id']}{query}").status == 204
        browser.go("/console/cluster")
        # Backups of one checkpoint have the same time, so either may be the first row.
        assert re.search(rf" n1 \S+ \S+ {re.escape(size(read))} {outcome}", browser.text)
    assert "hadelay backup verify" in browser.text


def test_the_strip_of_hours_tells_which_are_archived(node: Cluster, browser: Browser) -> None:
    for hour in (ARCHIVED - 1, ARCHIVED):
        at = datetime.fromtimestamp(hour * 3600 + 1800, UTC)
        node.publish("n1", "strip", b"x", f"?deliver_at={at:%Y-%m-%dT%H:%M:%SZ}")
    page = browser.go("/console/cluster")
    strip = dict(re.findall(r'<i class="(\w+)[^"]*" title="[^"]*?(, archived)?"></i>', page))
    assert strip.pop("archived") == ", archived"
    assert set(strip.values()) == {""}
    assert f'title="{hour_name(ARCHIVED)}: 1 entries, 1 open, archived"' in page
    assert re.search(r"The archive lists 1 of these \d+ hours", browser.text)
    assert [kind(HourRow("", 1, 0, *flags)) for flags in product((True, False), repeat=3)] == [
        "mapped", "mapped", "mapped", "mapped", "archived", "sealed", "archived", "future",
    ]  # fmt: skip


def test_dangerous_changes_of_the_cluster_are_refused_in_words(node: Cluster, browser: Browser) -> None:
    browser.go("/console/cluster")
    browser.send("/console/cluster/drain", node="n1")
    assert browser.problem
    assert "n1 is the only voter" in browser.text
    browser.go("/console/cluster")
    browser.send("/console/cluster/remove", node="n1", typed="n2")
    assert browser.problem
    assert "Type the name of the node, n1" in browser.text
    browser.go("/console/cluster")
    browser.send("/console/cluster/remove", node="n1", typed="n1")
    assert browser.problem
    browser.go("/console/cluster")
    browser.send("/console/cluster/drain", node="n9")
    assert browser.problem


def test_a_member_is_replaced_in_two_steps(cluster: Cluster) -> None:
    leader = cluster.leader()
    old = next(name for name in members(cluster) if name != leader)
    browser = Browser(cluster.urls[leader])

    def send(typed: str, raft: str = "127.0.0.1:9", name: str = "n7", node: str = old) -> str:
        browser.go("/console/cluster")
        browser.send("/console/cluster/replace", node=node, name=name, raft=raft, typed=typed)
        return browser.text

    assert f"Type the name of the old node, {old}" in send("n7")
    assert "There is no node 'n8'" in send("n8", node="n8")
    assert "n7" not in members(cluster)
    assert f"n7 is added, and copies the data. When the table shows it as a follower, replace {old}" in send(old)
    assert "n7 does not vote yet" in send(old)
    assert "n7 is a member already, at 127.0.0.1:9" in send(old, raft="127.0.0.1:8")
    assert old in members(cluster), "nothing is removed before the new one votes"
    browser.go("/console/cluster")
    browser.send("/console/cluster/remove", node="n7", typed="n7")
    assert "n7 is no member any more" in browser.text
    assert "another name" in send(old, name=old)
    assert old in members(cluster)


async def test_the_second_step_removes_the_old_member_once_the_new_one_votes() -> None:
    removed: list[str] = []

    async def view(*, stale: bool) -> Any:
        return SimpleNamespace(
            members=[SimpleNamespace(name=name, role="follower", raft=f"h:{name}") for name in ("n1", "n4")]
        )

    async def remove_member(name: str, by: Any) -> None:
        removed.append(name)

    form = {"node": "n1", "name": "n4", "raft": "h:n4", "typed": "n1"}
    visit: Any = SimpleNamespace(
        need=lambda scope: None, text=form.__getitem__, actor=None, go=lambda where, notice: notice,
        service=SimpleNamespace(cluster=SimpleNamespace(view=view, remove_member=remove_member)),
    )  # fmt: skip
    assert str(await replace(visit)) == "n1 is replaced by n4. Stop the process of n1."
    assert removed == ["n1"]


def test_a_token_is_made_shown_once_used_and_revoked(guarded: Cluster, admin_token: str) -> None:
    browser = signed_in(guarded, admin_token)
    browser.go("/console/access")
    browser.send("/console/access/create", name="shop <b>", scopes="read, publish:shop-*", lifetime="1d")
    secret = re.search(r'value="(hadelay_[\w-]{43})"', browser.page)
    assert secret
    assert "shop <b>" in browser.text
    assert "<b>shop <b>" not in browser.page
    assert secret[1] not in browser.go("/console/access")
    assert ask(guarded.urls["n1"], "GET", "/v1/topics", headers={"Authorization": f"Bearer {secret[1]}"}).status == 200
    token_id = re.search(r'name="id" value="(\w{12})"><p>[^<]*</p><button class="danger">Revoke shop', browser.page)
    assert token_id
    browser.send("/console/access/revoke", id=token_id[1])
    assert "The token shop <b> is revoked." in browser.text
    assert ask(guarded.urls["n1"], "GET", "/v1/topics", headers={"Authorization": f"Bearer {secret[1]}"}).status == 401
    assert re.search(r"admin token\.revoke token\.revoke \w+ \d+ \w+, [\d:]+ , admin \w{12} shop", browser.text)
    browser.go("/console/access?q=shop")
    assert re.search(r"Tokens 0 .*No token matches.*token\.revoke", browser.text)
    assert "No change matches." in (browser.go("/console/access?q=none-such") and browser.text)
    browser.send("/console/access/revoke", id=token_id[1])
    assert browser.problem
    for fields in ({"scopes": "all"}, {"scopes": ""}, {"scopes": "read", "lifetime": "0s"}):
        browser.go("/console/access")
        browser.send("/console/access/create", **{"name": "x", **fields})
        assert browser.problem


def test_pages_of_the_whole_cluster_need_rights_for_it(guarded: Cluster, admin_token: str) -> None:
    some = signed_in(guarded, make_token(guarded, admin_token, "read:mine-*", "admin:mine-*"))
    some.go("/console/")
    assert some.answer.status == 200
    assert "Topics" in some.text, "the overview is of all topics, so this session begins with its topics"
    for path in ("/console/cluster", "/console/access", "/console/charts/overview", "/console/live/overview"):
        assert some.ask("GET", path).status == 403, path
    now = int(time.time() * 1000)
    assert some.ask("GET", f"/console/due?from={now}&to={now + 3_600_000}").status == 403
    reader = signed_in(guarded, make_token(guarded, admin_token, "read", name="reader-2"))
    page = reader.go("/console/cluster")
    assert reader.answer.status == 200
    assert "Remove a member" not in page
    assert reader.ask("GET", "/console/access").status == 403
    for path in ("transfer", "drain", "add", "remove", "replace"):
        assert reader.post(f"/console/cluster/{path}", re.findall(r'csrf" value="([^"]+)', page)[0]).status == 403
    for path in ("create", "revoke"):
        assert reader.post(f"/console/access/{path}", re.findall(r'csrf" value="([^"]+)', page)[0]).status == 403


def test_a_node_stops_at_once_with_streams_open(cluster: Cluster) -> None:
    name = next(name for name in members(cluster) if name != cluster.leader())
    address = urllib.parse.urlsplit(cluster.urls[name])
    connections = []
    for _ in range(5):
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
        connection.request("GET", "/console/live/overview")
        answer = connection.getresponse()
        assert answer.readline() == b"event: frame\n"
        connections.append((connection, answer))
    began = time.monotonic()
    cluster.kill(name, number=signal.SIGTERM)
    assert time.monotonic() - began < 8
    assert b"event: later" in connections[0][1].read()
    for connection, _ in connections:
        connection.close()
    cluster.restart(name)


def members(cluster: Cluster) -> list[str]:
    return [one["name"] for one in cluster.ask(cluster.leader(), "GET", "/v1/cluster").json["members"]]


def test_a_node_without_a_leader_shows_what_it_has(cluster: Cluster) -> None:
    leader = cluster.leader()
    message = cluster.publish(leader, "alone", b"x", "?delay=1h")
    here, *others = (name for name in members(cluster) if name != leader)
    until(lambda: cluster.ask(here, "GET", f"/v1/messages/{message}?stale=true").status == 200, "it has the message")
    browser = Browser(cluster.urls[here])
    cluster.kill(leader, *others)
    until(lambda: cluster.ask(here, "GET", "/v1/cluster?stale=true").json["leader"] is None, "no leader is known")
    for path, words in (
        ("/console/", "nothing is accepted"), ("/console/topics?q=alone", "alone 1 0"),
        ("/console/topics/alone", "Scheduled 1"), ("/console/topics/alone", "Nobody knows what is ready"),
        (f"/console/messages/{message}", "Due in"),
        ("/console/messages?topic=alone", message), ("/console/dead", "dead letters"),
        ("/console/schedules", "Schedules"), ("/console/cluster", "Members"),
        ("/console/access", "There are no tokens."), ("/console/jobs", "There are no jobs."),
        ("/console/batches", "There are no batches."),
    ):  # fmt: skip
        browser.go(path)
        assert browser.answer.status == 200, path
        assert "No leader is known. Pages show what" in browser.text
        assert words in browser.text
    browser.go(f"/console/messages/{message}")
    browser.send(f"/console/messages/{message}/cancel")
    assert "Nothing was changed: the same may work in a moment." in browser.problem
    assert browser.refused(f"/console/messages/{message}/cancel")[0] == 503
    cluster.restart(leader, *others)
    until(lambda: "No leader is known" not in browser.go("/console/topics"), "the page is as usual")


def _reports(*rows: tuple[int, ...]) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(-1, 6)


def test_samples_are_bounded_and_in_order() -> None:
    ring = _Ring(2)
    for n in range(KEPT + 17):
        ring.add(1_000 * n, (n, 2 * n))
    rows = ring.rows()
    assert len(rows) == KEPT
    assert rows[:, 0].tolist() == [1_000 * n for n in range(17, KEPT + 17)]
    assert _rates(rows[:, 0], rows[:, 2]) == [2.0] * (KEPT - 1)
    assert _rates(rows[:, 0], rows[:, 2][::-1]) == [0.0] * (KEPT - 1), "a counter that fell is no rate"
    assert last_point({"at": [1, 2], "rates": [[3, 4], [5, 6]]}) == {"at": 2, "rates": [4, 6]}
    assert last_point({"at": [], "rates": [[], []]}) is None


def test_the_last_minute_of_a_topic() -> None:
    sampler = Sampler(None)  # type: ignore[arg-type]
    sampler.looked_at("a")
    assert sampler.per_minute("a") is None
    for n in range(20):
        sampler._topics["a"].add(10_000 * n, (50 * n, 20 * n, n, 100 + n, 3))
    assert sampler.per_minute("a") == (300, 120, 6, 6, 0)
    assert sampler.per_minute("b") is None


def test_the_receiver_of_a_webhook_is_judged_in_words() -> None:
    def judged(
        minute: TopicCounts | None, ready: int = 0, age_ms: int | None = None, *, fails: bool = False, **more: Any
    ) -> tuple[str, str]:
        hook = {"webhook": WebhookOut("https://x.example/"), **more}
        return receiver(Topic("t", 0, ready, 0, 0, age_ms, 0, None, **hook), minute, fails=fails)

    fine, dying, silent = (TopicCounts(9, acked, died, 5, 0) for acked, died in ((1_200, 0), (30, 2), (0, 0)))
    assert judged(fine, webhook=None) == ("", "")
    assert judged(fine, paused=True)[0] == "off"
    assert judged(None)[0] == "off"
    assert judged(fine) == ("good", "In the last minute the receiver took 1,200 messages, and 0 became dead letters.")
    assert judged(dying)[0] == "bad"
    assert judged(fine, retrying=4)[0] == "warn"
    assert judged(fine, fails=True)[0] == "bad"
    assert judged(fine, 7, 60_000, fails=True)[0] == "bad"
    assert judged(fine, 7, 9_000)[0] == "good"
    assert judged(fine, 7, 60_000)[0] == "warn"
    assert judged(silent, 7, 60_000) == (
        "bad",
        "In the last minute the receiver took 0 messages, and 0 became dead letters. 7 wait, the oldest for 1 min.",
    )


def test_the_health_of_a_webhook_in_words() -> None:
    found = Health()
    assert health(found, 0) == [("off", "No call was answered since this node leads, or since the URL was set.")]
    found.add(204, "", 1_000, again=False)
    assert [words for _, words in health(found, 1_000)] == [
        "The last call succeeded: HTTP 204.",
        "Calls since this node leads, or since the URL was set: 1; retries among them: 0.",
    ]
    found.add(503, "HTTP 503", 60_000, again=False)
    found.add(0, "timeout", 120_000, again=True)
    assert health(found, 180_000) == [
        ("bad", "2 calls in a row have failed, for 2 min. The last one: no answer."),
        ("off", "Last error: timeout, 1 min ago."),
        ("off", "Calls since this node leads, or since the URL was set: 3; retries among them: 1."),
    ]
    found.add(200, "", 130_000, again=True)
    assert (found.failed, found.failing_since_ms) == (0, 0)
    assert health(found, 180_000)[:2] == [
        ("good", "The last call succeeded: HTTP 200."), ("off", "Last error: timeout, 1 min ago."),
    ]  # fmt: skip


def test_the_page_of_a_topic_shows_the_health_of_its_webhook(node: Cluster, browser: Browser) -> None:
    # Nodes may not call loopback addresses unless webhooks.allow names them, so each call fails.
    settings = {"webhook": {"url": "https://hooks.invalid/x"}, "backoff": ["1h"]}
    assert node.ask("n1", "PUT", "/v1/topics/hooked", settings).status == 200
    assert "No call was answered" in browser.go("/console/topics/hooked")
    node.publish("n1", "hooked", b"x")
    until(lambda: "call has failed" in browser.go("/console/topics/hooked"), "a call failed")
    assert re.search(r"1 call has failed, for .+ The last one: no answer\. Last error: .+ ago\.", browser.text)
    assert "Webhook’s health" not in browser.go("/console/topics/charted")


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def test_the_time_of_other_tasks_is_not_the_own_time() -> None:
    async def other() -> None:
        burn(0.08)

    async def read(cancelled: list[str]) -> str:
        burn(0.01)
        task = asyncio.create_task(other())
        await task
        try:
            await (asyncio.get_running_loop().create_future() if cancelled else asyncio.sleep(0))
        except asyncio.CancelledError:
            cancelled.append("seen")
            raise
        return "read"

    own, seen = OwnTime(), ["asked"]
    assert await own.of(read([])) == "read"
    assert 0.01 <= own.spent_s < 0.07
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(2):
            await own.of(read(seen))
    assert seen == ["asked", "seen"]


async def test_a_report_that_did_not_come_puts_off_no_other() -> None:
    """Else the pages name no leader for half a minute after a leader that died without a word."""
    leads = False

    async def totals() -> Totals:
        return Totals(1_000, *(0 for _ in Totals._fields[1:]))

    async def recent() -> Recent:
        if not leads:
            await asyncio.sleep(0.1)
            raise NoLeader("no answer")
        return Recent(1, 0, 0, 0, 0, 0)

    sampler = Sampler(SimpleNamespace(overview=SimpleNamespace(totals=totals, recent=recent)))  # type: ignore[arg-type]
    assert (await sampler.look()).recent is None
    leads = True
    sampler._looked -= 3.0  # the time has passed
    assert (await sampler.look()).recent is not None


def test_topics_that_were_looked_at_are_few() -> None:
    sampler = Sampler(None)  # type: ignore[arg-type]
    for n in range(1_000):
        sampler.looked_at(f"topic-{n}")
    assert len(sampler._topics) <= 250
    assert len(sampler._looked_at) <= 50
    assert sampler.topic_charts("topic-0")["at"] == []


def test_lateness_over_topics_is_never_too_low() -> None:
    one = summarize(_reports((3, 500, 1_000, 10, 90, 200)))
    assert (one.ready, one.oldest_ms, one.handed_out, one.p50_ms, one.p99_ms, one.max_ms) == (
        3,
        500,
        1_000,
        10,
        90,
        200,
    )
    assert summarize(_reports()) == (0, 0, 0, 0, 0, 0)
    assert summarize(_reports((2, 700, 0, 0, 0, 0), (1, 600, 0, 0, 0, 0)))[:2] == (3, 600)
    # 1,000 messages of up to 10 ms and 1,000 of up to 1,000 ms.
    both = summarize(_reports((0, 0, 1_000, 5, 10, 10), (0, 0, 1_000, 500, 900, 1_000)))
    assert both.p50_ms >= 10
    assert both.p99_ms >= 900
    assert both.max_ms == 1_000
