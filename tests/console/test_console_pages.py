"""Pages and actions of the console at a real node, without a browser."""

from __future__ import annotations

import base64
import html
import http.client
import json
import re
import urllib.parse
from datetime import UTC, datetime, timedelta

import pytest

from tests.console.conftest import Browser
from tests.system.cluster import Cluster, ask, until

HOSTILE = '<script>alert(1)</script>"><img src=x onerror=alert(2)>'


def dead_letter(node: Cluster, topic: str, body: bytes = b"x", reason: str = "no route", **headers: str) -> str:
    node.ask("n1", "PUT", f"/v1/topics/{topic}", {"max_attempts": 1})
    message = node.publish("n1", topic, body, **headers)
    node.settle("n1", "nack", node.receive("n1", topic, wait="5s"), reason=reason)
    until(lambda: node.describe("n1", message)["state"] == "dead", "it is dead")
    return message


def audit(node: Cluster) -> list[tuple[str, str, str]]:
    entries = node.ask("n1", "GET", "/v1/audit?limit=1000").json["entries"]
    return [(entry["action"], entry["target"], entry["outcome"]) for entry in entries]


def test_a_browser_at_the_root_is_sent_to_the_console(node: Cluster, browser: Browser) -> None:
    assert browser.ask("GET", "/").headers["location"] == "console/", "also under a path of a proxy"
    answer = ask(node.urls["n1"], "GET", "/", headers={"Accept": "*/*"})
    assert answer.status == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_the_console_is_no_part_of_the_api(node: Cluster) -> None:
    paths = json.loads(node.ask("n1", "GET", "/openapi.json").body)["paths"]
    assert [path for path in paths if "/console" in path] == []


def test_every_page_is_closed_to_foreign_content(node: Cluster, browser: Browser) -> None:
    message = node.publish("n1", "headers", b"x")
    for path in ("/console/topics", "/console/topics/headers", "/console/dead", f"/console/messages/{message}"):
        page = browser.go(path)
        policy = browser.answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert browser.answer.headers["cache-control"] == "no-store"
        assert not re.search(r"<script(?![^>]* src=)|style=|\son\w+=", page), "inline scripts and styles are refused"
        assert set(re.findall(r"""(?:src|href)=["'](https?:)?//""", page)) == set()


def test_files_of_the_console(browser: Browser) -> None:
    page = browser.go("/console/topics")
    for path in re.findall(r'(?:src|href)="(/console/static/[^"]+)"', page):
        plain, packed = browser.ask("GET", path), browser.ask("GET", path, Accept_Encoding="gzip")
        assert plain.status == packed.status == 200
        assert "immutable" in plain.headers["cache-control"]
        assert packed.headers["content-encoding"] == "gzip"
        assert len(packed.body) < len(plain.body)
    for other in ("none.js", "VENDORED.md", "..%2Fsite", "%2Fetc%2Fpasswd"):
        assert browser.ask("GET", f"/console/static/{other}").status == 404


def test_a_message_is_found_by_id_key_and_tag(node: Cluster, browser: Browser) -> None:
    message = node.publish("n1", "finding", b"x", "?delay=1h&key=order/4711&tags=vip,eu")
    other = node.publish("n1", "finding", b"x", "?delay=2h&tags=us")
    for query in (f"q={message}", f"q={message.lower()}", "q=order/4711&topic=finding", "q=finding/order/4711"):
        browser.go(f"/console/messages?{query}")
        assert "Due in 59 min" in browser.text, query
    page = browser.go("/console/messages?topic=finding&tag=eu,vip&state=scheduled")
    assert message in page
    assert other not in page
    assert other in browser.go("/console/messages?topic=finding")
    browser.go("/console/messages?q=nothing&topic=finding")
    assert "no message under the key" in browser.text
    browser.go("/console/messages?q=0000000000000")
    assert "No message has the id or the key '0000000000000'" in browser.text
    browser.go("/console/messages?q=order/4711")
    assert "Due in 59 min" in browser.text, "a key of any topic"
    twin = node.publish("n1", "finding-2", b"x", "?delay=3h&key=order/4711")
    page = browser.go("/console/messages?q=order/4711")
    assert message in page
    assert twin in page
    assert "The key order/4711 in several topics" in browser.text
    browser.go("/console/messages?topic=finding&from=2026-02-31T00:00")
    assert "is not a time" in browser.text


def test_lists_are_in_pages(node: Cluster, browser: Browser) -> None:
    ids = node.publish_many("n1", "paged", ["x"] * 120, delay="1h")
    seen: list[str] = []
    page = browser.go("/console/messages?topic=paged")
    while True:
        seen += re.findall(r'href="/console/messages/([0-9A-Z]{13})"', page)
        if (further := linked(page, "next")) is None:
            break
        page = browser.go(further)
    assert sorted(seen) == sorted(ids)
    assert "101 to 120 of 120 messages of paged" in browser.text
    for first in (51, 1):
        browser.go(linked(browser.page, "prev") or "")
        assert f"{first} to {first + 49} of 120 messages of paged" in browser.text
    assert linked(browser.page, "prev") is None


def linked(page: str, rel: str) -> str | None:
    """Address of the previous or next page of a list of messages."""
    found = re.search(rf'rel="{rel}" href="([^"]*)"', page)
    return None if found is None else "/console/messages" + html.unescape(found[1])


def test_messages_of_all_topics_are_one_list(node: Cluster, browser: Browser) -> None:
    at = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) + timedelta(days=300)
    due = [at + timedelta(seconds=n) for n in range(75)]
    items = [
        {"topic": f"merged-{n % 7}", "body": {"n": n}, "tags": ["odd"] * (n % 2), "deliver_at": f"{one.isoformat()}"}
        for n, one in enumerate(due)
    ]
    results = node.ask("n1", "POST", "/v1/messages:batch", items).json["results"]
    ids = [result["id"] for result in results]
    path = f"/console/messages?from={at:%Y-%m-%dT%H:%M}&to={at + timedelta(hours=1):%Y-%m-%dT%H:%M}"
    page = browser.go(path)
    assert "1 to 50 of 75 messages of all topics in due order" in browser.text
    assert "{&#34;n&#34;:49}" in page or "{&#34;n&#34;: 49}" in page, "the beginning of the body"
    found = re.findall(r'class="mono" href="/console/messages/([0-9A-Z]{13})"', page)
    page = browser.go(linked(page, "next") or "")
    assert "51 to 75 of 75" in browser.text
    assert found + re.findall(r'class="mono" href="/console/messages/([0-9A-Z]{13})"', page) == ids
    page = browser.go(f"{path}&tag=odd")
    assert re.findall(r'class="mono" href="/console/messages/([0-9A-Z]{13})"', page) == ids[1::2]
    assert browser.go("/console/messages?after=1-99999999999999999999-1"), "no cursor of ours"
    assert browser.answer.status == 200
    start = int(at.timestamp() * 1000)
    bars = json.loads(browser.ask("GET", f"/console/due?from={start}&to={start + 3_600_000}").body)
    assert [name for name, _ in bars["topics"]] == [f"merged-{n}" for n in range(4)]
    assert [sum(counts) for _, counts in bars["topics"]] == [11] * 4
    assert (bars["total"], sum(bars["count"])) == (75, 75)


def test_the_life_of_a_message(node: Cluster, browser: Browser) -> None:
    message = dead_letter(node, "life", b'{"order": {"id": 4711}}', "card declined", Content_Type="application/json")
    browser.go(f"/console/messages/{message}")
    assert "Dead after 1 attempt: card declined" in browser.text
    life = browser.text[browser.text.index("Published") :]
    order = [life.index(word) for word in ("Published", "Due", "Leased", "Given back", "Became a dead letter")]
    assert order == sorted(order)
    assert "after due" in browser.text
    assert "order : {1} id : 4711" in browser.text


@pytest.mark.parametrize("kind", ["text/html", "application/json", "text/plain"])
def test_hostile_bodies_are_escaped(node: Cluster, browser: Browser, kind: str) -> None:
    body = json.dumps({HOSTILE: HOSTILE}) if "json" in kind else HOSTILE
    message = node.publish("n1", "hostile", body.encode(), "?delay=1h", Content_Type=kind, Hadelay_Meta_X="<b>")
    for form in ("", "?as=text", "?as=hex", "?as=json"):
        page = browser.go(f"/console/messages/{message}{form}")
        assert "<script>alert" not in page
        assert "<img" not in page.partition("<main")[2]
        assert "<b>" not in page.partition('id="facts"')[2].partition("</dl>")[0]
    assert "script" in browser.go(f"/console/messages/{message}")


def test_bodies_are_shown_up_to_a_limit(node: Cluster, browser: Browser) -> None:
    message = node.publish("n1", "large", b"a" * 300_000, "?delay=1h", Content_Type="text/plain")
    page = browser.go(f"/console/messages/{message}")
    assert len(page) < 100_000
    assert "the first 64.0 KiB of 293.0 KiB" in browser.text
    binary = node.publish("n1", "large", bytes(range(256)), "?delay=1h")
    browser.go(f"/console/messages/{binary}")
    assert "000010 10 11 12" in browser.text
    deep = node.publish("n1", "large", b"[" * 5_000 + b"]" * 5_000, "?delay=1h", Content_Type="application/json")
    assert browser.go(f"/console/messages/{deep}").count("[[[[")


def test_a_message_is_rescheduled_delivered_and_cancelled(node: Cluster, browser: Browser) -> None:
    message, later = node.publish("n1", "acts", b"x", "?delay=1h"), datetime.now(UTC) + timedelta(days=400)
    browser.go(f"/console/messages/{message}")
    due, move = node.describe("n1", message)["deliver_at"], f"/console/messages/{message}/reschedule"
    browser.cookies["hadelay-zone"] = "Europe/Vienna"
    browser.send(move, how="later by", when="2h", expected=due)
    clock = r"\d\d:\d\d(:\d\d)?"  # a time on a full minute is shown without seconds
    assert re.search(rf"Rescheduled: (\w+ \d+ \w+ (\d{{4}} )?)?{clock} → .*{clock} Vienna", browser.text)
    assert "Due in 2 h 59 min" in browser.text
    browser.send(move, how="later by", when="1h", expected=due)
    assert "was rescheduled or retried meanwhile" in browser.problem
    browser.go(f"/console/messages/{message}")
    assert "Undo" in browser.text
    moved = node.describe("n1", message)["deliver_at"]
    browser.send(move, how="at", when=due, expected=moved)
    assert node.describe("n1", message)["deliver_at"] == due
    browser.send(move, how="in", when="2h", expected=due)
    assert "Due in 1 h 59 min" in browser.text
    browser.send(move, how="in", when="soon")
    assert browser.problem
    browser.go(f"/console/messages/{message}")
    browser.send(move, how="at", when=f"{later:%Y-%m-%dT%H:%M}")
    assert f"→ {later:%a %d %b %Y}" in browser.text
    browser.send(f"/console/messages/{message}/deliver-now")
    assert "The message is due now." in browser.text
    browser.send(f"/console/messages/{message}/cancel")
    assert "Cancelled" in browser.text
    assert node.describe("n1", message)["state"] == "cancelled"
    browser.go("/console/topics/acts")
    browser.send(move, how="in", when="2h")
    assert browser.problem
    assert "it is cancelled" in browser.text
    done = [(action, outcome) for action, target, outcome in audit(node) if target == message]
    assert [one for one in done if one[0] == "message.cancel"] == [("message.cancel", "done")]
    assert sum(one == ("message.reschedule", "done") for one in done) >= 5


@pytest.mark.parametrize(("when", "problem"), [
    (10**15 - 1, "limits.max_delay"), ("9999-12-31T23:59:59-01:00", "limits.max_delay"),
    ("0001-01-01T00:00:00+01:00", ""),
])  # fmt: skip
def test_a_message_is_rescheduled_beyond_the_calendar(
    node: Cluster, browser: Browser, when: object, problem: str
) -> None:
    message = node.publish("n1", "far", b"x", "?delay=1h")
    browser.go(f"/console/messages/{message}")
    browser.send(f"/console/messages/{message}/reschedule", how="at", when=when)
    assert problem in browser.problem if problem else not browser.problem


@pytest.mark.parametrize(("how", "when", "zone", "shown"), [
    ("later by", "3h", "Europe/Vienna", r"\d\d:\d\d(:\d\d)? → .*\d\d:\d\d(:\d\d)? Vienna"),
    ("in", "15m", "Nowhere/Atlantis", r"→ .* UTC"), ("at", "18:00", "America/New_York", r"18:00(:00)? New York"),
    ("at", "2020-01-01 10:00", "UTC", r"at once: that time is over"), ("at", "25:00", "UTC", "no time of day"),
    ("in", "-3h", "UTC", "negative"), ("later by", "0", "UTC", "moves nothing"), ("by", "3h", "UTC", "Choose later by"),
    ("in", "", "UTC", ""),
])  # fmt: skip
def test_a_new_due_time_is_shown_before_it_is_chosen(
    node: Cluster, browser: Browser, how: str, when: str, zone: str, shown: str
) -> None:
    message = node.publish("n1", "previews", b"x", "?delay=1h")
    browser.cookies["hadelay-zone"] = zone
    browser.go(f"/console/messages/{message}/preview?{urllib.parse.urlencode({'how': how, 'when': when})}")
    assert browser.answer.status == 200
    assert re.search(shown, browser.text), browser.text


def test_retrying_messages_are_grouped_delivered_and_cancelled(node: Cluster, browser: Browser) -> None:
    ids = [node.publish("n1", "flaky", b"x", f"?key=flaky-{n}") for n in range(3)]
    taken = node.receive("n1", "flaky", max=3, wait="5s")
    assert isinstance(taken, list)
    for message, reason in zip(taken, ("HTTP 503 after 3 s", "HTTP 503 after 4 s", "<b>timeout</b>"), strict=True):
        node.settle("n1", "nack", [message], reason=reason, delay="1h")
    browser.go("/console/topics/flaky/retrying")
    assert "3 retrying messages of flaky" in browser.text
    assert "HTTP # after # s" in browser.text
    assert "&lt;b&gt;timeout" in browser.page
    assert browser.text.count("attempt 2 of 84") == 3
    browser.go("/console/dead")
    assert "/console/topics/flaky/retrying" in browser.page
    browser.go("/console/topics?show=retrying&sort=retrying&q=flaky")
    assert "/console/topics/flaky/retrying" in browser.page
    browser.go("/console/topics/flaky")
    assert "3 messages wait for another attempt after a failed one." in browser.text
    browser.go("/console/messages?topic=flaky&state=retrying")
    assert browser.text.count("attempt 2 of 84") == 3
    browser.go(f"/console/messages/{ids[0]}")
    assert "attempt 2 of 84" in browser.text
    browser.go("/console/topics/flaky/retrying?error=HTTP+%23+after+%23+s")
    browser.send("/console/topics/flaky/retrying/deliver-all", error="HTTP # after # s", rate="100")
    until(lambda: node.topic("n1", "flaky")["ready"] == 2, "two are due")
    browser.go("/console/topics/flaky/retrying")
    browser.send("/console/topics/flaky/retrying/cancel", id=ids[2])
    assert "Cancel" in browser.text
    browser.go("/console/topics/flaky/retrying")
    browser.send("/console/topics/flaky/retrying/deliver", id=[ids[2]])
    until(lambda: node.topic("n1", "flaky")["ready"] == 3, "all are due")
    browser.go("/console/topics/flaky/retrying")
    browser.send("/console/topics/flaky/retrying/deliver", rate="1")
    assert browser.problem


def test_a_notice_is_shown_once(node: Cluster, browser: Browser) -> None:
    message = node.publish("n1", "notices", b"x", "?delay=1h")
    browser.go(f"/console/messages/{message}")
    browser.send(f"/console/messages/{message}/deliver-now")
    assert "The message is due now." in browser.text
    browser.go(f"/console/messages/{message}")
    assert "The message is due now." not in browser.text


def test_dead_letters_are_grouped_redriven_and_deleted(node: Cluster, browser: Browser) -> None:
    ids = [dead_letter(node, "dying", reason=f"timeout after {n} s") for n in range(3)]
    ids += [dead_letter(node, "dying", reason="HTTP 500")]
    browser.go("/console/dead")
    assert "dying 4" in browser.text
    browser.go("/console/topics/dying/dead")
    shown = r"(timeout after # s|HTTP #) (?:such as timeout after \d s|HTTP 500) .*? (\d) Redrive…"
    assert re.findall(shown, browser.text) == [("timeout after # s", "3"), ("HTTP #", "1")]
    page = browser.go("/console/topics/dying/dead?error=HTTP+%23")
    assert ids[3] in page.partition("<caption>Letters with")[2]
    assert ids[0] not in page.partition("<caption>Letters with")[2]

    browser.send("/console/topics/dying/dead/redrive", id=ids[3])
    assert "1 redriven." in browser.text
    browser.send("/console/topics/dying/dead/redrive", id=ids[3])
    assert "0 redriven; 1 not: ready" in browser.text
    browser.send("/console/topics/dying/dead/redrive")
    assert browser.problem
    browser.go("/console/topics/dying/dead")
    browser.send("/console/topics/dying/dead/redrive-all", rate="-3")
    assert browser.problem

    browser.go("/console/topics/dying/dead")
    browser.send("/console/topics/dying/dead/delete", shown="3", typed="4")
    assert browser.problem
    assert node.topic("n1", "dying")["dead"] == 3
    browser.go("/console/topics/dying/dead")
    browser.send("/console/topics/dying/dead/delete", shown="3000", typed="3,000")
    assert browser.problem, "the count was of another time"
    browser.go("/console/topics/dying/dead")
    browser.send("/console/topics/dying/dead/delete", shown="3", typed="3")
    assert "Deleted: 3 dead letters." in browser.text
    assert node.topic("n1", "dying")["dead"] == 0


def test_all_dead_letters_are_redriven(node: Cluster, browser: Browser) -> None:
    for n in range(3):
        dead_letter(node, "again", reason=str(n))
    browser.go("/console/topics/again/dead")
    browser.send("/console/topics/again/dead/redrive-all", rate="", shown="3", typed="2")
    assert "Type the count, 3, to confirm." in browser.problem
    browser.send("/console/topics/again/dead/redrive-all", rate="", shown="3", typed="3")
    assert "Redriving 3 dead letters." in browser.text
    until(lambda: node.topic("n1", "again")["dead"] == 0, "they are redriven")


def test_topics_are_searched_chosen_sorted_and_paged(node: Cluster, browser: Browser) -> None:
    for n in range(60):
        node.ask("n1", "PUT", f"/v1/topics/many-{n:02}", {"lease": "1m"})
    node.publish_many("n1", "many-07", ["x"] * 9, delay="1h")
    browser.go("/console/topics?q=MANY-")
    assert "60 topics, 1 to 50" in browser.text
    first = re.findall(r'href="/console/topics/(many-\d\d)"', browser.page)
    browser.go("/console/topics?q=many-&page=1")
    assert first + re.findall(r'href="/console/topics/(many-\d\d)"', browser.page) == [
        f"many-{n:02}" for n in range(60)
    ]
    part = browser.go("/console/topics?q=many-&sort=scheduled", HX_Request="true")
    assert "<html" not in part
    assert re.findall(r'href="/console/topics/(many-\d\d)"', part)[0] == "many-07"
    node.ask("n1", "POST", "/v1/topics/many-11:pause", {"reason": "INC-12"})
    browser.go("/console/topics?q=many-&show=paused")
    assert "1 topic " in browser.text
    assert "many-11 paused" in browser.text
    browser.go("/console/topics?q=nothing-like-it")
    assert "No topic matches." in browser.text


def test_a_topic_is_paused_resumed_and_purged(node: Cluster, browser: Browser) -> None:
    node.publish_many("n1", "turning", ["x"] * 5, delay="1h")
    browser.go("/console/topics/turning")
    browser.send("/console/topics/turning/pause", reason="receiver is down <b>")
    assert "Paused: receiver is down <b>." in browser.text
    assert node.topic("n1", "turning")["paused"] is True
    browser.send("/console/topics/turning/resume")
    assert "paused" not in node.topic("n1", "turning")
    browser.send("/console/topics/turning/purge", state=["scheduled", "ready"], shown="5", typed="4")
    assert browser.problem
    browser.go("/console/topics/turning")
    browser.send("/console/topics/turning/purge", state=["scheduled", "ready"], shown="5", typed="5")
    assert "Purged: scheduled and ready messages are cancelled." in browser.text
    assert node.topic("n1", "turning")["scheduled"] == 0


def test_a_purge_of_blocked_messages_names_and_counts_them(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/behind", {"group_concurrency": 1})
    node.publish_many("n1", "behind", ["x"] * 20, delay="1h", group="g")
    browser.go("/console/topics/behind")
    assert "19 blocked messages are cancelled, too" in browser.text
    assert "Type <b>20</b>, the count of all" in browser.page
    browser.send("/console/topics/behind/purge", state=["scheduled", "ready"], shown="1", typed="1")
    assert browser.problem
    assert "it is 20 now" in browser.text
    browser.go("/console/topics/behind")
    browser.send("/console/topics/behind/purge", state=["scheduled", "ready"], shown="20", typed="20")
    assert "Purged" in browser.text
    found = node.topic("n1", "behind")
    assert (found["scheduled"], found.get("blocked")) == (0, None)


def test_a_badge_says_which_limits_are_set(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/limited", {"rate": 2.5, "concurrency": 10})
    for path in ("/console/topics/limited", "/console/topics?q=limited"):
        assert 'title="rate 2.5 per second, concurrency 10">limit set</span>' in browser.go(path)


def test_all_settings_are_shown_without_secrets(node: Cluster, browser: Browser) -> None:
    secret = "whsec_" + base64.b64encode(b"s" * 32).decode()
    hook = {"url": "https://hooks.invalid/x", "secrets": [secret], "headers": {"Authorization": "Bearer abcdefgh"}}
    options = {"webhook": hook, "own_queue": False, "max_attempts": 3, "group_concurrency": 2, "expires_after": "1d"}
    assert node.ask("n1", "PUT", "/v1/topics/all-set", options).status == 200
    page = browser.go("/console/topics/all-set")
    for words in ("webhook.url https://hooks.invalid/x", "own_queue false", "expires_after 1d", "Alert: none"):
        assert words in browser.text
    assert secret not in page
    assert "abcdefgh" not in page
    assert "on_full" not in page, "a setting of subscriptions alone"
    assert 'placeholder="30 s, the default"' in page
    fields = {"was_group_concurrency": "2", "group_concurrency": "1", "was_group_rate": "", "group_rate": "5"}
    browser.send("/console/topics/all-set/settings", **fields)
    assert "Changed: group_concurrency, group_rate." in browser.text
    assert node.ask("n1", "PUT", "/v1/topics/all-set/subscriptions/one", {"on_full": "drop"}).status == 200
    browser.go("/console/topics/all-set~one")
    assert "on_full drop" in browser.text
    assert "own_queue" not in browser.text


def test_settings_are_checked_as_the_api_checks_them(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/settled", {"lease": "30s", "ttl": "1h"})
    browser.go("/console/topics/settled")
    fields = {"was_lease": "30s", "lease": "2m", "was_ttl": "1h", "ttl": "", "backoff": "1s,5s", "max_attempts": "7"}
    browser.send("/console/topics/settled/settings", **fields)
    assert "Changed: lease, max_attempts, backoff, ttl." in browser.text
    shown = node.topic("n1", "settled")
    assert (shown["lease"], shown["backoff"], shown["max_attempts"]) == ("2m", ["1s", "5s"], 7)
    assert "ttl" not in shown
    browser.send("/console/topics/settled/settings", backoff="min=1s,max=1m")
    assert node.topic("n1", "settled")["backoff"] == {"min": "1s", "max": "1m"}
    node.ask("n1", "PUT", "/v1/topics/settled", {"group_concurrency": 1})
    browser.go("/console/topics/settled")
    browser.send("/console/topics/settled/settings", group_rate="2")
    assert node.topic("n1", "settled")["group_rate"] == 2
    for field, value, problem in (
        ("rate", "-1", "rate: Messages per second"), ("lease", "abc", "lease"), ("max_attempts", "x", "whole number"),
    ):  # fmt: skip
        browser.go("/console/topics/settled")
        browser.send("/console/topics/settled/settings", **{field: value})
        assert browser.problem, (field, browser.text)
        assert problem in browser.text
    assert "topic.set" in [action for action, target, _ in audit(node) if target.startswith("settled")]


def test_a_test_message_that_is_refused_is_not_audited_as_published(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/brimful", {"max_messages": 1})
    browser.go("/console/topics/brimful")
    form = browser.page
    browser.send("/console/topics/brimful/publish", body="x", delay="1h")
    assert "Published." in browser.text
    browser.page = form
    browser.send("/console/topics/brimful/publish", body="x", delay="1h")
    assert browser.problem
    assert audit(node).count(("message.publish", "brimful", "done")) == 1


def test_a_test_message_is_published(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/trying", {"lease": "1m"})
    browser.go("/console/topics/trying")
    fields = {"body": '{"a": 1}', "content_type": "application/json", "delay": "1h", "key": "k1", "tags": "a,b"}
    browser.send("/console/topics/trying/publish", **fields)
    assert "Published." in browser.text
    found = node.ask("n1", "GET", "/v1/topics/trying/keys/k1").json
    assert (found["tags"], found["content_type"], found["size"]) == (["a", "b"], "application/json", 8)
    assert ("message.publish", "trying", "done") in audit(node)


def test_looking_at_a_topic_leases_nothing(node: Cluster, browser: Browser) -> None:
    node.publish("n1", "peeked", b"x")
    until(lambda: node.topic("n1", "peeked")["ready"] == 1, "it is ready")
    browser.go("/console/topics/peeked")
    assert "No consumer has asked for this topic" in browser.text
    leases = node.receive("n1", "peeked", consumer="worker-7", wait="5s")
    assert len(leases) == 1
    browser.go("/console/topics/peeked")
    assert re.search(r"worker-7 n1 asked \S+ m?s ago 1 0 ", browser.text), browser.text
    node.settle("n1", "ack", leases)
    node.publish_many("n1", "peeked", ["x"] * 3)
    until(lambda: node.topic("n1", "peeked")["ready"] == 3, "they are ready")
    node.settle("n1", "ack", node.receive("n1", "peeked", max=3, consumer="worker-8", wait="5s"))
    browser.go("/console/topics/peeked")
    assert re.search(r"worker-8 n1 asked \S+ m?s ago 0 3 ", browser.text), browser.text
    assert re.search(r"worker-7 n1 asked \S+ m?s ago 0 1 ", browser.text), browser.text


def test_groups_of_dead_letters_are_of_more_than_the_page_lists(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/many-dead", {"max_attempts": 1})
    node.publish_many("n1", "many-dead", ["x"] * 1_100)
    for number in (150, 900, 50):
        left = number
        while left:
            found = node.receive("n1", "many-dead", max=left, wait="5s")
            node.settle("n1", "nack", found, reason=f"first {number}" if number == 150 else "later")
            left -= len(found)
    page = browser.go("/console/topics/many-dead/dead")
    assert "by the last error of the first 1,000 of 1,100" in browser.text
    assert "later 850" in browser.text
    assert "first # such as first 150 150" in browser.text
    assert page.count('name="id"') == 200
    following = re.search(r'href="([^"]*after=[0-9a-f]{32})">Next page', page)
    assert following is not None
    page = browser.go(following[1])
    assert "by the last error of the next 900 of 1,100" in browser.text
    page = browser.go("/console/topics/many-dead/dead?error=later")
    assert page.count('name="id"') == 850
    following = re.search(r'href="([^"]*after=[0-9a-f]{32})">Next page', page)
    assert following is not None
    assert browser.go(following[1]).count('name="id"') == 100


def test_wrong_addresses_are_pages_too(browser: Browser) -> None:
    for path, status in (
        ("/console/topics/none-such", 404), ("/console/messages/xyz", 400), ("/console/messages/0000000000000", 404),
        ("/console/topics/x/dead?after=zz", 400), ("/console/typo", 404), ("/console/topics/x/y/z", 404),
        ("/console/topics/x/purge", 405), ("/console/jobs/begin", 405), ("/console/sign-out", 405),
    ):  # fmt: skip
        page = browser.go(path)
        assert browser.answer.status == status, path
        assert 'href="/console/">Back</a>' in page, path
    assert browser.ask("GET", "/console/sign-out").headers["allow"] == "POST"
    page = browser.go("/console/typo", Referer=f"{browser.url}/console/dead")
    assert 'href="/console/dead">Back</a>' in page
    assert 'href="/console/" aria-label="hadelay, overview"' in page
    assert browser.ask("GET", "/console/topics/%ff").status == 400
    assert browser.ask("PUT", "/console/topics").status == 405


def test_a_stream_sends_what_changed(node: Cluster, browser: Browser) -> None:
    message = node.publish("n1", "live", b"x", "?delay=1h")
    address = urllib.parse.urlsplit(node.urls["n1"])
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    connection.request("GET", f"/console/live/messages/{message}")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"

    def frame() -> dict[str, object]:
        lines: list[bytes] = []
        while (line := answer.readline().rstrip(b"\n")) or not lines:
            lines += [line] if line else []
        assert lines[0] == b"event: frame"
        found: dict[str, object] = json.loads(lines[1].removeprefix(b"data: "))
        return found

    try:
        assert "Due in" in str(frame()["html"])
        node.ask("n1", "DELETE", f"/v1/messages/{message}")
        state = ""
        while state != "cancelled":
            state = str((last := frame())["state"])
        assert "Cancelled" in str(last["html"])
    finally:
        connection.close()


def test_a_topic_shows_its_subscriptions_which_have_pages_and_settings(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/fanned", {})
    for name, settings in (("billing", {"tags": ["eu"], "max_attempts": 3}), ("mail", {})):
        assert node.ask("n1", "PUT", f"/v1/topics/fanned/subscriptions/{name}", settings).status == 200
    page = browser.go("/console/topics/fanned")
    assert 'href="/console/topics/fanned~billing"' in page
    assert "tags=eu" in page
    assert "max_attempts=3" in page
    page = browser.go("/console/topics/fanned~billing")
    assert 'href="/console/topics/fanned"' in page
    assert "Publish a test message" not in page
    browser.send("/console/topics/fanned~billing/settings", max_attempts="7", was_max_attempts="3")
    assert node.ask("n1", "GET", "/v1/topics/fanned~billing").json["max_attempts"] == 7


def test_a_refusal_before_a_page_is_one_too(browser: Browser) -> None:
    """A browser behind a proxy that changes Host must not be shown JSON."""
    for headers in ({"Host": "evil.example"}, {"Origin": "http://<b>.example", "Host": "localhost:1"}):
        answer = browser.ask("POST", "/console/topics/orders/resume", b"", **headers)
        assert (answer.status, answer.headers["content-type"]) == (403, "text/html; charset=utf-8")
        page = answer.body.decode()
        assert "<h1>" in page
        assert "http.hosts" in page or "proxy_set_header Host $http_host" in page
        assert "<b>" not in page
