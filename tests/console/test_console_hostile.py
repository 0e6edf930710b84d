"""Hostile input to the console: odd addresses, numbers, texts and forms are refused in words, and shown as text."""

from __future__ import annotations

import time
import urllib.parse
from functools import partial

import pytest

from hadelay.console.live import Streams
from tests.console.conftest import Browser, make_token, signed_in
from tests.system.cluster import Cluster, ask

#: Text that breaks out of HTML, attributes, URLs, scripts and templates if anything shows it unescaped.
EVIL = "\"'><script>alert(1)</script>{{ 7*7 }}\u202e&amp;\\"
#: The same, for fields that take printable text alone.
PRINTABLE = EVIL.replace("\u202e", "")
NUMBERS = ("²", "٣", "-1", "1e3", "0x1", "9" * 15, "9" * 20, "9" * 30, "", " 1", "1\x00")


def harmless(page: str) -> bool:
    """Whether a page has none of EVIL's markup; a page that shows the text at all shows it escaped."""
    return "<script>alert" not in page and "'><" not in page and '"><script' not in page


@pytest.mark.parametrize("number", NUMBERS)
def test_odd_numbers_in_addresses_are_no_server_errors(node: Cluster, browser: Browser, number: str) -> None:
    node.publish("n1", "odd", b"x", "?delay=1h")
    text = urllib.parse.quote(number)
    for path in (
        f"/console/topics?page={text}", f"/console/due?from={text}&to={text}", f"/console/access?before={text}",
        f"/console/messages?topic=odd&after={text[:15]}-{text}", f"/console/topics/odd/dead?after={text}",
        f"/console/messages?topic=odd&from={text}", f"/console/schedules?cron={text}",
        f"/console/messages/{text or 'x'}", f"/console/batches?cursor={text}",
    ):  # fmt: skip
        assert browser.ask("GET", path).status < 500, path
    browser.go("/console/topics/odd")
    for path, fields in (
        ("purge", {"state": "scheduled", "shown": number, "typed": number}),
        ("dead/delete", {"shown": number, "typed": number}),
        ("dead/redrive-all", {"rate": number}), ("settings", {"rate": number, "was_rate": "x"}),
        ("settings", {"max_attempts": number, "was_max_attempts": "x"}), ("publish", {"body": "x", "delay": number}),
    ):  # fmt: skip
        assert browser.post(f"/console/topics/odd/{path}", **fields).status < 500, (path, fields)
    assert "console_failed" not in node.log("n1")


def test_hostile_texts_are_shown_as_text(node: Cluster, browser: Browser) -> None:
    url = node.urls["n1"]
    item = {
        "topic": "evil", "key": EVIL, "body": {EVIL: [EVIL, {"k": EVIL}]}, "tags": [PRINTABLE],
        "meta": {"a": EVIL}, "content_type": "application/json",
    }  # fmt: skip
    ask(url, "PUT", "/v1/topics/evil", {"max_attempts": 1})
    ask(url, "PUT", "/v1/topics/evil-paused", {})
    assert ask(url, "POST", "/v1/topics/evil-paused:pause", {"reason": EVIL}).status == 200
    made = ask(url, "POST", "/v1/messages:batch", [item, {**item, "key": None, "delay": "1h"}]).json["results"]
    assert all("id" in one for one in made), made
    dead, waiting = (one["id"] for one in made)
    found = node.receive("n1", "evil", consumer=PRINTABLE, wait="5s")
    node.settle("n1", "nack", found, reason=EVIL)
    quoted = urllib.parse.quote(EVIL)
    shown = {
        f"/console/messages/{dead}": 4, f"/console/messages/{dead}?as=text": 4, f"/console/messages/{dead}?as=hex": 3,
        f"/console/messages/{waiting}": 3, "/console/topics/evil": 0, "/console/topics/evil-paused": 1,
        "/console/topics/evil/dead": 2, f"/console/topics/evil/dead?error={quoted}": 1, "/console/dead": 0,
        "/console/messages?topic=evil&state=all": 2, f"/console/messages?topic=evil&tag={quoted}": 0,
        f"/console/messages?q={quoted}x": 1, f"/console/messages?q=evil/{quoted}": 0, f"/console/messages/{quoted}": 0,
        f"/console/topics?q={quoted}&show={quoted}&sort={quoted}": 1, f"/console/topics/{quoted}": 0,
        f"/console/schedules?q={quoted}&cron={quoted}&timezone={quoted}": 1, f"/console/schedules/{quoted}": 0,
        f"/console/due?topic={quoted}&from=0&to=1": 0, f"/console/{quoted}": 0, "/console/access": 0,
        f"/console/batches?q={quoted}&cursor={quoted}": 0, f"/console/batches/{quoted}": 0,
    }  # fmt: skip
    for path, least in shown.items():
        page = browser.ask("GET", path).body.decode()
        assert harmless(page), path
        assert page.count("alert(1)") >= least, (path, page.count("alert(1)"))
    browser.go("/console/topics/evil")
    for path, fields in (
        ("publish", {"body": EVIL, "key": EVIL, "content_type": EVIL, "delay": EVIL}), ("settings", {"lease": EVIL}),
        ("pause", {"reason": EVIL}), ("purge", {"shown": EVIL, "typed": EVIL}), ("dead/redrive", {"id": EVIL}),
        ("dead/redrive-all", {"rate": EVIL}),
    ):  # fmt: skip
        browser.go("/console/topics/evil")
        page = browser.send(f"/console/topics/evil/{path}", **fields)
        assert harmless(page), path
        assert browser.answer.status < 500, path
    browser.go("/console/cluster")
    for path, fields in (("transfer", {"to": EVIL}), ("drain", {"node": EVIL}), ("add", {"name": EVIL, "raft": EVIL})):
        browser.go("/console/cluster")
        page = browser.send(f"/console/cluster/{path}", **fields)
        assert harmless(page), path
        assert browser.answer.status < 500, path


def test_an_error_leads_back_to_the_page_of_the_form(node: Cluster, browser: Browser) -> None:
    node.publish("n1", "back", b"x", "?delay=1h")
    browser.go("/console/topics/back")
    wrong = {"csrf": browser.token(), "delay": "soon"}
    data = urllib.parse.urlencode(wrong).encode()
    form = {"Content_Type": "application/x-www-form-urlencoded"}
    for referer, target in (
        (f"{browser.url}/console/topics/back?x=1", "/console/topics/back?x=1"),
        ("https://evil.example/", "/console/"), ("https://proxy.example/console/dead", "/console/dead"),
        (f"{browser.url}/v1/topics", "/console/"), ("", "/console/"), ("http://[", "/console/"),
    ):  # fmt: skip
        answer = browser.ask("POST", "/console/topics/back/publish", data, Referer=referer, **form)
        assert (answer.status, answer.headers["location"]) == (303, target)
        assert "delay: 'soon'" in (browser.go(target) and browser.problem)
        browser.go(target)
        assert not browser.problem, "a problem is shown once"


def test_numbers_of_a_json_body_are_shown_as_they_were_written(node: Cluster, browser: Browser) -> None:
    body = b'{"amount": 12.50, "large": 123456789012345678901234567890.10, "tiny": 1e-400, "n": -0.0}'
    message = node.publish("n1", "numbers", body, "?delay=1h", **{"Content-Type": "application/json"})
    browser.go(f"/console/messages/{message}")
    for number in ("12.50", "123456789012345678901234567890.10", "1e-400", "-0.0"):
        assert f": {number}" in browser.text, number


async def test_many_different_pages_are_rendered_more_rarely() -> None:
    streams, rendered = Streams(), list[str]()

    async def render(name: str) -> dict[str, str]:
        rendered.append(name)
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        return {"name": name}

    frames = [await streams._frame(name, partial(render, name)) for name in "abca"]
    assert rendered == ["a"]
    assert frames == [{"name": "a"}, {}, {}, {"name": "a"}]
    assert await streams._frame("a", partial(render, "a"), time.monotonic()) == {}, "older than the page"


def test_a_new_sign_in_ends_the_session_before(guarded: Cluster, admin_token: str) -> None:
    browser = signed_in(guarded, admin_token)
    before = dict(browser.cookies)
    browser.go("/console/sign-in")
    browser.send("/console/sign-in", token=make_token(guarded, admin_token, "read", name="second"))
    assert browser.cookies != before
    browser.cookies = before
    assert browser.ask("GET", "/console/topics").status == 303
