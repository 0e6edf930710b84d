"""Forms: every change answers with a redirect, a problem appears once and at its field, a secret is shown once."""

from __future__ import annotations

import re

from hadelay.console.problems import Flash, Problem, problem_of
from hadelay.errors import BadRequest, NoLeader, OutcomeUnknown
from tests.console.conftest import Browser, signed_in
from tests.system.cluster import Cluster


def test_a_problem_is_at_its_field(node: Cluster, browser: Browser) -> None:
    node.publish("n1", "fielded", b"x", "?delay=1h")
    browser.go("/console/topics/fielded")
    for path, fields, field, words in (
        ("publish", {"body": "x", "delay": "soon"}, "delay", "'soon'"),
        ("settings", {"lease": "abc"}, "lease", "'abc'"),
        ("settings", {"max_attempts": "x", "was_max_attempts": ""}, "max_attempts", "whole number"),
        ("purge", {"state": "ready", "shown": "1", "typed": "2"}, "typed", "Type the count, 1, to confirm."),
        ("purge", {"shown": "1", "typed": "1"}, "state", "Choose the messages to purge"),
        ("dead/redrive-all", {"rate": "fast"}, "rate", "'fast' is not a number of messages per second."),
    ):  # fmt: skip
        status, where, said = browser.refused(f"/console/topics/fielded/{path}", **fields)
        assert (status, where) == (400, field), (path, said)
        assert words in said
        assert said.endswith(".")


def test_a_form_that_a_script_sends_gets_the_next_page_as_json(node: Cluster, browser: Browser) -> None:
    browser.go("/console/topics/charted")
    form = {"Content_Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    answer = browser.ask("POST", "/console/topics/charted/resume", f"csrf={browser.token()}".encode(), **form)
    assert (answer.status, answer.json) == (200, {"go": "/console/topics/charted"})
    assert "Resumed" in browser.go("/console/topics/charted")
    answer = browser.ask("POST", "/console/topics/charted/resume", b"csrf=x", **form)
    assert (answer.status, answer.json["field"]) == (403, "")


def test_a_reload_after_a_token_makes_no_second_one(guarded: Cluster, admin_token: str) -> None:
    browser = signed_in(guarded, admin_token)
    browser.go("/console/access")
    answer = browser.post("/console/access/create", name="once", scopes="read")
    assert (answer.status, answer.headers["location"]) == (303, "/console/access")
    page = browser.go("/console/access")
    assert len(re.findall(r'value="hadelay_[\w-]{43}"', page)) == 1
    for _ in range(2):
        page = browser.go("/console/access")
        assert "hadelay_" not in page.partition("<main")[2]
    assert browser.page.count("<b>once</b>") == 1


def test_a_form_after_the_session_says_that_it_is_over(guarded: Cluster, admin_token: str) -> None:
    browser = signed_in(guarded, admin_token)
    browser.go("/console/access")
    form = {"Content_Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    browser.cookies = {}
    answer = browser.ask("POST", "/console/access/create", b"csrf=x", **form)
    assert answer.status == 401
    assert answer.json["words"].startswith("You are signed out.")


def test_errors_are_sentences() -> None:
    assert problem_of(BadRequest("lease: expected a duration"), {"lease"}) == Problem("Expected a duration.", "lease")
    assert problem_of(BadRequest("filter.tags: too many"), {"tags"}) == Problem("Too many.", "tags")
    assert problem_of(BadRequest("n1: is no name"), {"name"}) == Problem("n1: is no name.")
    assert problem_of(NoLeader("nobody leads")).words == (
        "Nobody leads. Nothing was changed: the same may work in a moment."
    )
    assert "It is not known whether this was done" in problem_of(OutcomeUnknown("no answer")).words


def test_the_notice_of_a_redirect_is_read_again() -> None:
    flash = Flash("done", Problem("wrong", "lease"), "night-watch", "hadelay_x")
    assert Flash.from_cookie(flash.to_cookie()) == flash
    for text in (None, "", "x", "!!", "WzEyXQ", "é"):
        assert Flash.from_cookie(text) == Flash()
    long = Flash.from_cookie(Flash("é" * 5_000, Problem("ü" * 5_000)).to_cookie())
    assert (len(long.notice), len(long.problem.words)) == (400, 400)
