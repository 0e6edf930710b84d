"""Sessions: signed cookies that every node accepts, that end, and that nobody else can make; nodes behind proxies."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

import pytest

from hadelay.console.sessions import FRESH_MS, IDLE_MS, LIFE_MS, Session, Sessions
from hadelay.server.sessions import CLOSED, KEYS, SharedSessions
from tests.console.conftest import BOOTSTRAP, TOKENS, Browser, make_token
from tests.system.cluster import Cluster, until


class Wires:
    """Links of nodes that deliver notes at once. Each node is a peer of all others."""

    def __init__(self, *names: str) -> None:
        self.handlers: dict[str, dict[str, Any]] = {name: {} for name in names}
        self.nodes = {
            name: SharedSessions(_Link(self, name), lambda name=name: [one for one in names if one != name])  # type: ignore[arg-type,misc]
            for name in names
        }


class _Link:
    def __init__(self, wires: Wires, name: str) -> None:
        self.wires, self.name, self.handlers = wires, name, wires.handlers[name]

    def note(self, peer: str, op: str, payload: Any) -> None:
        if op in self.wires.handlers[peer]:
            self.wires.handlers[peer][op](self.name, payload, None)


def test_all_nodes_have_the_same_keys_and_closed_sessions() -> None:
    wires = Wires("n1", "n2", "n3")
    one, two, three = wires.nodes.values()
    for shared in (one, two, three):
        shared.begin()
    assert one.keys == two.keys == three.keys
    assert len(one.keys) == 3
    two.close("x")
    assert all("x" in shared.closed for shared in wires.nodes.values())
    for _ in range(30):
        one.begin()
    for number in range(CLOSED + 5):
        three.close(str(number))
    assert one.keys == sorted(one.keys) == three.keys
    assert (len(two.keys), len(two.closed)) == (KEYS, CLOSED)
    assert "x" not in one.closed


def test_a_restarted_node_learns_the_keys_when_its_link_is_up() -> None:
    wires = Wires("n1", "n2")
    one, two = wires.nodes.values()
    one.begin()
    again = Wires("n1", "n2").nodes["n2"]
    assert again.keys == []
    again._hear("n1", [one.keys, list(one.closed)], None)  # type: ignore[arg-type]
    assert again.keys == one.keys
    for wrong in ([[b"short"], []], [[b"k" * 32] * 17, []], [[], ["x" * 65]], "x"):
        with pytest.raises(Exception, match=r"(?i)expected"):
            two._hear("n1", wrong, None)  # type: ignore[arg-type]


def test_sessions_end_and_are_renewed() -> None:
    shared, clock = Wires("n1").nodes["n1"], [1_000_000_000_000]
    shared.begin()
    sessions = Sessions(shared, lambda: clock[0])
    first = sessions.open("0123456789ab")
    cookie = sessions.cookie(first)
    assert sessions.find(cookie) == first
    assert sessions.renewed(first) is None, "its cookie is fresh"
    clock[0] += IDLE_MS
    assert sessions.find(cookie) == first
    clock[0] += 1
    assert sessions.find(cookie) is None, "nobody used it for an hour"
    session = second = sessions.open("0123456789ab")
    while (found := sessions.find(sessions.cookie(session))) is not None:
        clock[0] += FRESH_MS + IDLE_MS // 2
        session = sessions.renewed(found) or found
        assert session.csrf == second.csrf, "open forms can still be sent"
    assert clock[0] - second.opened_ms > LIFE_MS, "used all the time"
    third = sessions.open("0123456789ab")
    sessions.close(third)
    assert sessions.find(sessions.cookie(third)) is None


def test_only_a_node_makes_a_session() -> None:
    shared, other = Wires("n1").nodes["n1"], Wires("n1").nodes["n1"]
    shared.begin()
    other.begin()
    mine, foreign = Sessions(shared, lambda: 5), Sessions(other, lambda: 5)
    cookie = mine.cookie(mine.open("0123456789ab"))
    body, _, signature = cookie.partition(".")
    forged = foreign.cookie(Session("x" * 22, "0123456789ab", 5, 5))
    for wrong in (
        None, "", ".", "x", body, f"{body}.", f".{signature}", f"{body}.{signature[:-2]}", f"{body[:-2]}.{signature}",
        forged, f"{body}.{forged.partition('.')[2]}", "é.é", "A" * 10_000, f"{cookie}.{cookie}",
    ):  # fmt: skip
        assert mine.find(wrong) is None, wrong
    assert mine.find(cookie) is not None
    assert mine.csrf(mine.form)
    assert not mine.csrf(foreign.form)
    assert not mine.csrf("")


def test_a_page_under_a_path_of_a_proxy_has_addresses_under_it(node: Cluster, browser: Browser) -> None:
    """The proxy cuts the path off; without the header, a page without styles says which line is missing."""
    node.publish("n1", "proxied", b'="/console/x', "?delay=1h")
    under = {"X_Forwarded_Prefix": "/q/hadelay"}
    page = browser.ask("GET", "/console/topics", **under).body.decode()
    addresses = re.findall(r'(?:href|src|action|hx-get|data-stream)="(/[^"]*)"', page)
    assert len(addresses) > 20
    assert [one for one in addresses if not one.startswith("/q/hadelay/console/")] == []
    for wrong in ("//evil.example", "/a b", "/x/../y?", "https://evil.example", "/" + "x" * 70):
        page = browser.ask("GET", "/console/topics", X_Forwarded_Prefix=wrong).body.decode()
        assert 'href="/console/topics"' in page, wrong
    assert "X-Forwarded-Prefix" in page
    browser.page = page
    form = {
        "Content_Type": "application/x-www-form-urlencoded",
        "Referer": "https://x.example/q/hadelay/console/topics",
    }
    answer = browser.ask(
        "POST", "/console/topics/none-such/resume", f"csrf={browser.token()}".encode(), **form, **under
    )
    assert answer.headers["location"] == "/q/hadelay/console/topics"


def test_times_are_in_the_zone_that_the_reader_chose(node: Cluster, browser: Browser) -> None:
    day = f"{datetime.now(UTC).year + 1}-07-01"
    message = node.publish("n1", "zoned", b"x", f"?deliver_at={day}T12:00:00Z")
    assert f"1 Jul {day[:4]}, 12:00" in (browser.go(f"/console/messages/{message}"), browser.text)[1]
    browser.send("/console/zone", zone="Europe/Vienna")
    assert "times in Europe/Vienna" in browser.page
    assert f"1 Jul {day[:4]}, 14:00" in (browser.go(f"/console/messages/{message}"), browser.text)[1]
    assert message in browser.go(f"/console/messages?topic=zoned&from={day}T13:59:59&to={day}T14:00:01")
    assert message not in browser.go(f"/console/messages?topic=zoned&from={day}T11:59&to={day}T12:01")
    page = browser.go(f"/console/messages?topic=zoned&from={day}T11:59:00Z&to={day}T12:01:00Z")
    assert f'value="{day}T13:59:00"' in page, "a link has times of the API, a field those of the reader"
    assert message in page
    assert browser.refused("/console/zone", zone="Mars/Olympus")[1] == "zone"
    browser.cookies["hadelay-zone"] = "../../etc/passwd"
    assert browser.go("/console/topics").count("times in UTC") == 1


def test_a_session_is_accepted_by_every_node(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also by a node that has started anew, until the person signs out at any node."""
    with Cluster(tmp_path_factory.mktemp("shared"), settings=TOKENS) as cluster:
        token = make_token(cluster, BOOTSTRAP, "admin")
        browser = Browser(cluster.urls["n1"])
        browser.go("/console/messages")
        browser.send("/console/sign-in", token=token)
        there = {name: Browser(cluster.urls[name], dict(browser.cookies)) for name in cluster.names}

        def knows_a_leader(name: str) -> bool:  # without one, each page begins with a notice
            there[name].go("/console/access")
            return there[name].text.startswith("Access")

        for name, other in there.items():
            until(lambda: knows_a_leader(name), f"{name} shows the page")  # noqa: B023
            assert other.refused("/console/access/create", name="x", scopes="all")[:2] == (400, "scopes"), name

        def shows(name: str, status: int) -> None:
            until(lambda: there[name].ask("GET", "/console/topics").status == status, f"{name} answers {status}")

        cluster.kill("n3")
        cluster.restart("n3", settings=TOKENS)
        shows("n3", 200)
        browser.send("/console/sign-out")
        for name in there:
            shows(name, 303)
