"""The page of a message: its copies, its result, its progress, its schedule."""

from __future__ import annotations

import re

from tests.console.conftest import Browser
from tests.system.cluster import Cluster, until

HOSTILE = "<script>alert(1)</script>"


def test_copies_are_linked_both_ways(node: Cluster, browser: Browser) -> None:
    for path in ("copied", "copied/subscriptions/billing", "copied/subscriptions/mail"):
        assert node.ask("n1", "PUT", f"/v1/topics/{path}", {}).status == 200
    message = node.publish("n1", "copied", b"x", "?delay=1h")
    page = browser.go(f"/console/messages/{message}")
    copies = re.findall(
        r'href="/console/topics/(copied~\w+)">\1</a></td><td><a class="mono" href="/console/messages/(\w+)"', page
    )
    assert sorted(topic for topic, _ in copies) == ["copied~billing", "copied~mail"]
    for topic, copy in copies:
        page = browser.go(f"/console/messages/{copy}")
        assert f"Topic {topic}" in browser.text
        assert f'<dt>Copy of</dt><dd><a class="mono" href="/console/messages/{message}">' in page
        assert 'id="copies"' not in page


def test_progress_and_result_are_shown(node: Cluster, browser: Browser) -> None:
    message = node.publish("n1", "resulting", b"x")
    leases = [one["lease"] for one in node.receive("n1", "resulting", wait="5s")]
    query = {"leases": leases, "lease": "1m", "progress": f"page 7 {HOSTILE}"}
    assert node.ask("n1", "POST", "/v1/leases:extend", query).status == 200
    page = browser.go(f"/console/messages/{message}")
    assert f"Progress: page 7 {HOSTILE}" in browser.text
    assert HOSTILE not in page
    assert 'id="result"' not in page
    result = {"receipt": {"total": 12.5, "by": HOSTILE}}
    assert node.ask("n1", "POST", "/v1/leases:ack", {"leases": leases, "result": result}).status == 200
    page = browser.go(f"/console/messages/{message}")
    assert "total : 12.5" in browser.text.partition("Result")[2]
    assert HOSTILE not in page


def test_a_message_of_a_schedule_leads_to_the_schedule(node: Cluster, browser: Browser) -> None:
    query = {"topic": "ticking", "body": "x", "every": "1h"}
    assert node.ask("n1", "PUT", "/v1/schedules/ticker", query).status == 200
    message = node.ask("n1", "POST", "/v1/schedules/ticker:trigger", {}).json["id"]
    page = browser.go(f"/console/messages/{message}")
    assert re.search(r'<dt>Schedule</dt><dd><a href="/console/schedules/ticker">ticker</a>, occurrence <time', page)
    until(lambda: message in browser.go("/console/schedules/ticker"), "the schedule leads to its message")
