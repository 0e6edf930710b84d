"""The pages of schedules at a real node, without a browser."""

from __future__ import annotations

import re

from tests.console.conftest import Browser, make_token, signed_in
from tests.system.cluster import Cluster, ask, until


def put(node: Cluster, name: str, **query: object) -> None:
    answer = node.ask("n1", "PUT", f"/v1/schedules/{name}", {"topic": "ticks", "body": "tick", **query})
    assert answer.status == 200, answer


def test_schedules_are_listed_with_their_health(node: Cluster, browser: Browser) -> None:
    put(node, "report-daily", cron="0 9 * * mon-fri", timezone="Europe/Vienna")
    put(node, "report-often", every="1h")
    put(node, "paused-one", every="1h", paused=True)
    browser.go("/console/schedules")
    assert re.search(
        r"report-daily \w{3} \d+ \w{3}( \d{4})?, 0[78]:00 = .{9,20}, 09:00 Europe/Vienna in \d", browser.text
    )
    assert re.search(r"paused-one – .* paused", browser.text)
    browser.go("/console/schedules?q=report-d")
    assert "report-often" not in browser.text


def test_the_list_tells_of_messages_that_died(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/dying-ticks", {"max_attempts": 1})
    put(node, "fails", topic="dying-ticks", every="1h")
    browser.go("/console/schedules?q=fails")
    assert re.search(r"fails \w{3} \d+ \w{3}( \d{4})?, \d\d:\d\d(:\d\d)? in .+ – Every .+ fine", browser.text)
    browser.go("/console/schedules/fails")
    browser.send("/console/schedules/fails/trigger")
    node.settle("n1", "nack", node.receive("n1", "dying-ticks", wait="5s"), reason="no route")

    def reported() -> bool:
        browser.go("/console/schedules?q=fails")
        return re.search(r" ago dead Every .+ 1 of the last messages died", browser.text) is not None

    until(reported, "the list has the health of the schedule's page", every=0.2)
    assert "1 of the last messages died" in (browser.go("/console/schedules/fails"), browser.text)[1]
    assert "last" not in node.ask("n1", "GET", "/v1/schedules?prefix=fails").json["schedules"][0]


def test_a_pattern_is_previewed(browser: Browser) -> None:
    browser.go("/console/schedules?cron=30+2+*+*+*&timezone=Europe/Vienna")
    assert len(re.findall(r"<li><time", browser.page)) == 10
    browser.go("/console/schedules?cron=15m")
    assert len(re.findall(r"<li><time", browser.page)) == 10
    for wrong in ("cron=99+*+*+*+*", "cron=%3Cscript%3E", "cron=0+9+*+*+*&timezone=Mars/Olympus", "cron=0s"):
        page = browser.go(f"/console/schedules?{wrong}")
        assert browser.answer.status == 200
        assert 'role="alert"' in page
        assert "<script>" not in page


def test_a_schedule_is_triggered_paused_and_resumed(node: Cluster, browser: Browser) -> None:
    put(node, "by-hand", every="1h")
    browser.go("/console/schedules/by-hand")
    assert len(re.findall(r"<li><time", browser.page)) == 10
    browser.send("/console/schedules/by-hand/trigger")
    assert "Triggered: this is the message of by-hand." in browser.text
    until(lambda: "by hand" in (browser.go("/console/schedules/by-hand"), browser.text)[1], "it is among the last ones")
    browser.send("/console/schedules/by-hand/pause")
    assert "Nothing is planned." in browser.text
    assert node.ask("n1", "GET", "/v1/schedules/by-hand").json["state"] == "paused"
    browser.send("/console/schedules/by-hand/resume")
    assert node.ask("n1", "GET", "/v1/schedules/by-hand").json["state"] == "active"
    assert browser.ask("GET", "/console/schedules/none-such").status == 404
    assert browser.ask("GET", "/console/schedules/%2E%2E").status == 400
    actions = [one["action"] for one in node.ask("n1", "GET", "/v1/audit?limit=1000").json["entries"]]
    assert {"schedule.trigger", "schedule.pause", "schedule.resume"} <= set(actions)


def test_pages_are_full_and_name_no_schedule_of_other_topics(guarded: Cluster, admin_token: str) -> None:
    head = {"Authorization": f"Bearer {admin_token}"}
    for n in range(130):
        topic = "paged-mine" if n % 2 else "paged-other"
        query = {"topic": topic, "body": "x", "every": "1h"}
        assert ask(guarded.urls["n1"], "PUT", f"/v1/schedules/page-{n:03}", query, head).status == 200
    some = make_token(guarded, admin_token, "read:paged-mine", name="some-pages")
    head = {"Authorization": f"Bearer {some}"}
    first = ask(guarded.urls["n1"], "GET", "/v1/schedules?prefix=page-&limit=40", headers=head).json
    assert [one["schedule"] for one in first["schedules"]] == [f"page-{n:03}" for n in range(1, 81, 2)]
    assert first["cursor"] == "page-079"
    path = f"/v1/schedules?prefix=page-&limit=25&cursor={first['cursor']}"
    rest = ask(guarded.urls["n1"], "GET", path, headers=head).json
    assert (len(rest["schedules"]), rest["cursor"]) == (25, None), "a last page that is full has no cursor"
    browser = signed_in(guarded, some)
    page = browser.go("/console/schedules?q=page-")
    assert page.count('href="/console/schedules/page-') == 65
    assert "Next page" not in page


def test_rights_are_those_of_the_schedules_topic(guarded: Cluster, admin_token: str) -> None:
    head = {"Authorization": f"Bearer {admin_token}"}
    for name, topic in (("mine", "mine-ticks"), ("theirs", "other-ticks")):
        query = {"topic": topic, "body": "x", "every": "1h"}
        assert ask(guarded.urls["n1"], "PUT", f"/v1/schedules/{name}", query, head).status == 200
    browser = signed_in(guarded, make_token(guarded, admin_token, "read:mine-*", name="some"))
    page = browser.go("/console/schedules")
    assert "mine-ticks" in page
    assert "other-ticks" not in page
    assert browser.ask("GET", "/console/schedules/theirs").status == 403
    page = browser.go("/console/schedules/mine")
    assert "Trigger" not in page
    for action in ("pause", "resume", "trigger"):
        assert browser.post(f"/console/schedules/mine/{action}").status == 403
