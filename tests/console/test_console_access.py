"""Who gets into the console, to what, and until when."""

from __future__ import annotations

import html
import re
from pathlib import Path

from tests.console.conftest import BOOTSTRAP, Browser, make_token, signed_in
from tests.system.cluster import Cluster, ask


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def publish(guarded: Cluster, token: str, topic: str) -> str:
    answer = ask(guarded.urls["n1"], "POST", f"/v1/topics/{topic}/messages?delay=1h", b"secret body", bearer(token))
    assert answer.status == 201, answer
    return str(answer.json["id"])


def test_nothing_is_shown_without_a_session(guarded: Cluster, admin_token: str) -> None:
    message = publish(guarded, admin_token, "private")
    browser = Browser(guarded.urls["n1"])
    for path in ("/console/", "/console/topics/private", f"/console/messages/{message}", "/console/dead"):
        answer = browser.ask("GET", path)
        assert (answer.status, answer.body) == (303, b"")
        assert answer.headers["location"].startswith("/console/sign-in")
    answer = browser.ask("GET", f"/console/live/messages/{message}", Accept="text/event-stream")
    assert answer.body == b"event: over\ndata: You are signed out.\n\n"
    answer = browser.ask("GET", "/console/topics", HX_Request="true")
    assert (answer.status, answer.headers["hx-redirect"]) == (401, "/console/sign-in")
    assert browser.post(f"/console/messages/{message}/cancel", "x").headers["location"] == "/console/sign-in"
    # A token in a header is for the API: a page of another site could not make a browser send one, but a session could.
    assert browser.ask("GET", "/console/topics", **bearer(admin_token)).status == 303


def test_sign_in_and_out(guarded: Cluster, admin_token: str) -> None:
    publish(guarded, admin_token, "private")
    browser = Browser(guarded.urls["n1"])
    browser.go("/console/topics/private")
    assert "Sign in to n1" in browser.text
    browser.send("/console/sign-in", token=admin_token, next="/console/topics/private")
    assert "private" in browser.text
    cookie = browser.baked[-1]
    assert "HttpOnly" in cookie
    assert "SameSite=Lax" in cookie, "a link in a mail opens its page"
    assert "Max-Age" not in cookie, "the cookie ends with the browser"
    assert admin_token not in cookie + browser.page
    browser.send("/console/sign-out")
    assert "Sign in to n1" in browser.text
    browser.cookies = {}
    browser.go("/console/topics")
    assert "Sign in to n1" in browser.text


def test_a_session_that_was_closed_is_over(guarded: Cluster, admin_token: str) -> None:
    browser = signed_in(guarded, admin_token)
    stolen = dict(browser.cookies)
    browser.go("/console/topics")
    browser.send("/console/sign-out")
    browser.cookies = stolen
    assert browser.ask("GET", "/console/topics").status == 303


def test_wrong_tokens(guarded: Cluster, admin_token: str) -> None:
    browser = Browser(guarded.urls["n1"])
    browser.go("/console/")
    for token, problem in (
        ("hello", "43 characters"), ("hadelay_" + "x" * 43, "Unknown token"), (BOOTSTRAP, "The bootstrap token"),
        ("", "Paste a token"), ("a b", "Bearer, a space, and the token"),
    ):  # fmt: skip
        browser.send("/console/sign-in", token=token, next="/console/dead")
        assert problem in browser.text
        assert 'name="next" value="/console/dead"' in browser.page, "a wrong token keeps the page to go on to"
        assert not token or token not in browser.page
        assert not any("notice" not in name for name in browser.cookies)


def test_sign_in_goes_on_to_pages_of_the_console_alone(guarded: Cluster, admin_token: str) -> None:
    for wrong in (
        "//evil.example/",
        "https://evil.example/",
        "/v1/topics",
        "/console/\\evil",
        "/console/x\r\nSet-Cookie: a=b",
    ):
        browser = Browser(guarded.urls["n1"])
        browser.go("/console/sign-in")
        answer = browser.post("/console/sign-in", token=admin_token, next=wrong)
        assert answer.headers["location"] == "/console/"


def test_sign_in_goes_on_to_the_page_that_was_asked_for(guarded: Cluster, admin_token: str) -> None:
    for target in ("/console/jobs?action=cancel&topic=orders-*&tags=vip,eu", "/console/topics/orders~billing"):
        browser = Browser(guarded.urls["n1"])
        browser.go(target)
        after = re.search(r'name="next" value="([^"]+)"', browser.page)
        assert after
        assert html.unescape(after[1]) == target
        assert browser.post("/console/sign-in", token=admin_token, next=target).headers["location"] == target


def test_forms_of_other_sessions_and_sites_are_refused(guarded: Cluster, admin_token: str) -> None:
    message = publish(guarded, admin_token, "forms")
    browser, other = signed_in(guarded, admin_token), signed_in(guarded, admin_token)
    other.go("/console/topics")
    path = f"/console/messages/{message}/cancel"
    for csrf in ("", "x", other.token()):
        assert browser.post(path, csrf).status == 403
    browser.go("/console/topics")
    data = f"csrf={browser.token()}".encode()
    form = "application/x-www-form-urlencoded"
    assert browser.ask("POST", path, data, Content_Type="text/plain").headers["location"] == "/console/"
    assert browser.ask("POST", path, data, Content_Type="text/plain", Accept="application/json").status == 400
    for headers in ({"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}):
        assert browser.ask("POST", path, data, Content_Type=form, **headers).status == 403
    assert browser.ask("GET", path).status == 405
    assert browser.ask("POST", path, data, Content_Type=form).status == 303


def test_forms_are_checked_without_tokens_too(node: Cluster) -> None:
    message = node.publish("n1", "forms", b"x", "?delay=1h")
    browser = Browser(node.urls["n1"])
    assert browser.post(f"/console/messages/{message}/cancel", "x").status == 403
    assert node.describe("n1", message)["state"] == "scheduled"


def test_a_token_that_reads_changes_nothing(guarded: Cluster, admin_token: str) -> None:
    message = publish(guarded, admin_token, "looked-at")
    reader = signed_in(guarded, make_token(guarded, admin_token, "read"))
    page = reader.go(f"/console/messages/{message}")
    assert "secret body" in page or "73 65 63" in page
    assert "Reschedule" not in page
    page = reader.go("/console/topics/looked-at")
    assert "Purge" not in page
    assert "Publish a test message" not in page
    token = reader.token()
    for path, fields in (
        (f"/console/messages/{message}/cancel", {}), (f"/console/messages/{message}/deliver-now", {}),
        (f"/console/messages/{message}/reschedule", {"when": "1h"}), ("/console/topics/looked-at/pause", {}),
        ("/console/topics/looked-at/purge", {"state": "scheduled", "shown": "1", "typed": "1"}),
        ("/console/topics/looked-at/settings", {"lease": "1m"}), ("/console/topics/looked-at/publish", {"body": "x"}),
        ("/console/topics/looked-at/dead/redrive-all", {}), ("/console/topics/looked-at/dead/redrive", {"id": message}),
        ("/console/topics/looked-at/dead/delete", {"shown": "0", "typed": "0"}),
        ("/console/topics/looked-at/dead/redrive-group", {"error": "x"}),
        ("/console/topics/looked-at/dead/delete-chosen", {"id": message}),
    ):  # fmt: skip
        assert reader.post(path, token, **fields).status == 403, path


def test_a_token_sees_its_topics_alone(guarded: Cluster, admin_token: str) -> None:
    mine, other = publish(guarded, admin_token, "mine-1"), publish(guarded, admin_token, "other-1")
    browser = signed_in(guarded, make_token(guarded, admin_token, "read:mine-*"))
    browser.go("/console/topics")
    assert "mine-1" in browser.text
    assert "other-1" not in browser.text
    assert mine in browser.go("/console/messages?topic=mine-1")
    for path in (f"/console/messages/{other}", "/console/topics/other-1", "/console/topics/other-1/dead"):
        browser.go(path)
        assert browser.answer.status == 403, path
        assert "secret body" not in browser.page
    browser.go("/console/messages?topic=other-1")
    assert other not in browser.page
    for topic in ("mine-1", "other-1"):
        answer = ask(
            guarded.urls["n1"], "POST", f"/v1/topics/{topic}/messages?delay=1h&key=4711", b"x", bearer(admin_token)
        )
        assert answer.status == 201
    browser.go("/console/messages?q=4711")
    assert "mine-1" in browser.text, "the one of two messages with this key that the token may see"
    browser.go("/console/messages?q=other-1/4711")
    assert "No message has the id or the key" in browser.text
    publisher = signed_in(guarded, make_token(guarded, admin_token, "publish:mine-*"))
    publisher.go(f"/console/messages/{mine}")
    assert publisher.answer.status == 403, "who may publish may not read bodies"


def test_a_token_for_a_topic_sees_and_changes_the_copies_for_its_subscriptions(
    guarded: Cluster, admin_token: str
) -> None:
    for path in ("copied", "copied/subscriptions/billing"):
        assert ask(guarded.urls["n1"], "PUT", f"/v1/topics/{path}", {}, bearer(admin_token)).status == 200
    message = publish(guarded, admin_token, "copied")
    browser = signed_in(guarded, make_token(guarded, admin_token, "read:copied", "publish:copied"))
    page = browser.go(f"/console/messages/{message}")
    copy = re.findall(r'class="mono" href="/console/messages/(\w+)"', page.partition('id="copies"')[2])[0]
    browser.go(f"/console/messages/{copy}")
    assert (browser.answer.status, "Due in" in browser.text) == (200, True), browser.text
    browser.send(f"/console/messages/{copy}/cancel")
    assert "The message is cancelled." in browser.text
    other = signed_in(guarded, make_token(guarded, admin_token, "read:other-*"))
    other.go(f"/console/messages/{copy}")
    assert other.answer.status == 403


def test_actions_are_audited_under_the_tokens_name(guarded: Cluster, admin_token: str) -> None:
    message = publish(guarded, admin_token, "audited")
    browser = signed_in(guarded, make_token(guarded, admin_token, "read", "publish", name="night-shift"))
    browser.go(f"/console/messages/{message}")
    browser.send(f"/console/messages/{message}/cancel")
    answer = ask(guarded.urls["n1"], "GET", "/v1/audit?limit=1000", headers=bearer(admin_token))
    last = [entry for entry in answer.json["entries"] if entry["target"] == message][-1]
    assert (last["action"], last["token"], last["outcome"]) == ("message.cancel", "night-shift", "done")


def test_a_revoked_token_ends_its_sessions(guarded: Cluster, admin_token: str) -> None:
    token = make_token(guarded, admin_token, "read", name="leaver")
    browser = signed_in(guarded, token)
    browser.go("/console/topics")
    assert browser.answer.status == 200
    listed = ask(guarded.urls["n1"], "GET", "/v1/tokens", headers=bearer(admin_token)).json["tokens"]
    mine = next(one["id"] for one in listed if one["name"] == "leaver")
    assert ask(guarded.urls["n1"], "DELETE", f"/v1/tokens/{mine}", headers=bearer(admin_token)).status == 204
    assert browser.ask("GET", "/console/topics").status == 303


def test_no_token_is_in_the_log(guarded: Cluster, admin_token: str) -> None:
    signed_in(guarded, admin_token)
    assert admin_token not in guarded.log("n1")


def test_the_console_can_be_switched_off(tmp_path: Path) -> None:
    with Cluster(tmp_path / "c", nodes=1, settings=("http.console=false", "http.aws=false")) as cluster:
        browser = Browser(cluster.urls["n1"])
        for path in ("/", "/console/", "/console/sign-in", "/console/static/console.css"):
            assert browser.ask("GET", path).status == 404
        assert cluster.ask("n1", "GET", "/v1/topics").status == 200
