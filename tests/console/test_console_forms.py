"""Forms that create, edit and delete topics and schedules, at a real node without a browser: what a form sends is what
the API takes, refusals keep what was typed, and rights are those of the API."""

from __future__ import annotations

import base64
import html
import json
import re
from datetime import UTC, datetime, timedelta

from tests.console.conftest import Browser, make_token, signed_in
from tests.system.cluster import Cluster, ask, until


def audited(node: Cluster) -> set[tuple[str, str]]:
    entries = node.ask("n1", "GET", "/v1/audit?limit=1000").json["entries"]
    return {(entry["action"], entry["target"]) for entry in entries}


def test_a_topic_is_created_set_and_deleted(node: Cluster, browser: Browser) -> None:
    browser.go("/console/topics")
    browser.send("/console/new/topic", name="by-form")
    assert "by-form is created." in browser.text
    assert 'class="fold" open><summary>Change settings' in browser.page
    assert 'placeholder="84, the default"' in browser.page
    browser.send("/console/new/topic", name="by-form")
    assert "There is a topic by-form already" in browser.text
    fields = {"own_queue": "false", "expires_after": "2d", "dead_letter": "by-form-2", "rate": "5"}
    browser.send("/console/topics/by-form/settings", **fields)
    found = node.topic("n1", "by-form")
    assert {name: found[name] for name in fields} == {**fields, "own_queue": False, "rate": 5}
    browser.send("/console/new/topic", name="by-form~one")
    fields = {"tags": "vip, eu", "on_full": "drop", "was_on_full": ""}
    browser.send("/console/topics/by-form~one/settings", **fields)
    assert (found := node.ask("n1", "GET", "/v1/topics/by-form~one").json)["tags"] == ["vip", "eu"]
    assert found["on_full"] == "drop"
    assert browser.refused("/console/new/topic", name="no such/name")[0] == 400
    node.publish("n1", "by-form", b"x", "?delay=1h")
    browser.go("/console/topics/by-form")
    for path, typed, status in (
        ("by-form", "by-for", 400),
        ("by-form", "by-form", 409),
        ("none-such", "none-such", 404),
    ):
        assert browser.refused(f"/console/topics/{path}/delete", typed=typed)[0] == status
    for name in ("by-form~one", "by-form"):
        browser.send(f"/console/topics/{name}/delete", typed=name, force="yes")
        assert f"{name} is deleted." in browser.text
    assert node.ask("n1", "GET", "/v1/topics/by-form").status == 404
    assert {("topic.delete", "by-form"), ("topic.set", "by-form"), ("topic.set", "by-form~one")} <= audited(node)


def test_a_webhook_and_its_secrets_are_edited(node: Cluster, browser: Browser) -> None:
    secrets = ["whsec_" + base64.b64encode(bytes([n]) * 32).decode() for n in range(2)]
    node.ask("n1", "PUT", "/v1/topics/hooked", {})
    browser.go("/console/topics/hooked")
    path, url = "/console/topics/hooked/settings/webhook", "https://hooks.invalid/x"
    fields = {"url": url, "secrets": "\n".join(secrets), "headers": "Authorization=Bearer abcdefgh", "timeout": "5s"}
    page = browser.send(path, **fields)
    assert "The webhook is set." in browser.text
    assert secrets[0] not in page
    found = node.topic("n1", "hooked")["webhook"]
    assert (found["url"], found["timeout"], len(found["secrets"])) == (url, "5s", 2)
    masked = re.search(r'name="headers"[^>]*>\n(Authorization=[^<]+)</textarea>', page)
    assert masked
    browser.send(path, url=f"{url}/y", headers=html.unescape(masked[1]), allow_per_message="true")
    changed = node.topic("n1", "hooked")["webhook"]
    assert (changed["url"], changed["secrets"], changed["headers"]) == (f"{url}/y", found["secrets"], found["headers"])
    assert changed["allow_per_message"] is True
    browser.send(path, url=url, secrets=secrets[1])
    assert len(node.topic("n1", "hooked")["webhook"]["secrets"]) == 1
    for wrong in ({"url": "ftp://x"}, {"url": url, "secrets": "short"}, {"url": url, "headers": "no-equals"}, {}):
        browser.go("/console/topics/hooked")
        browser.send(path, **wrong)
        assert browser.problem, wrong
    browser.go("/console/topics/hooked")
    browser.send("/console/topics/hooked/settings/alert", url="https://alerts.invalid/")
    assert node.topic("n1", "hooked")["alert"]["url"] == "https://alerts.invalid/"
    browser.send(path, remove="yes", url=url)
    assert "webhook" not in node.topic("n1", "hooked")
    assert browser.refused("/console/topics/hooked/settings/lease", url=url)[0] == 404


def test_a_pattern_becomes_a_schedule_that_is_edited_and_deleted(node: Cluster, browser: Browser) -> None:
    browser.go("/console/schedules?cron=0+9+*+*+mon-fri&timezone=Europe/Vienna")
    use = re.search(r'href="(/console/new/schedule\?[^"]+)"', browser.page)
    assert use
    page = browser.go(html.unescape(use[1]))
    assert 'value="0 9 * * mon-fri"' in page
    assert 'value="Europe/Vienna"' in page
    form = {"version": "0", "when": "0 9 * * mon-fri", "timezone": "Europe/Vienna", "topic": "chores-form"}
    page = browser.send("/console/new/schedule", **form, preview="yes", name="nine", body='{"n": 1}')
    assert len(re.findall(r"<li><time", page)) == 10
    assert "{&#34;n&#34;: 1}" in page, "a preview keeps what was typed"
    assert node.ask("n1", "GET", "/v1/schedules/nine").status == 404
    for wrong in ({"when": "99 * * * *"}, {"name": "no/name"}, {"topic": "a b"}, {"meta": "none"}, {"jitter": "soon"}):
        page = browser.send("/console/new/schedule", **{**form, "name": "nine", "body": "typed text", **wrong})
        assert browser.answer.status == 400, wrong
        assert 'role="alert"' in page
        assert "typed text" in page
    more = {"tags": "a,b", "meta": "from=form", "ttl": "1h", "jitter": "5s", "catch_up": "all", "overlap": "skip"}
    browser.send("/console/new/schedule", **form, name="nine", body="one\r\ntwo", content_type="text/plain", **more)
    assert browser.answer.status == 200, browser.text
    found = node.ask("n1", "GET", "/v1/schedules/nine?body=true").json
    assert base64.b64decode(found["body_base64"]) == b"one\ntwo"
    assert (found["cron"], found["timezone"], found["tags"]) == (form["when"], form["timezone"], ["a", "b"])
    assert (found["meta"], found["catch_up"], found["overlap"], found["jitter"]) == (
        {"from": "form"},
        "all",
        "skip",
        "5s",
    )
    page = browser.send("/console/new/schedule", **form, name="nine", body="x")
    assert (browser.answer.status, "There is a schedule nine already" in page) == (409, True)
    page = browser.go("/console/schedules/nine/edit")
    fields = {
        name: html.unescape(value) for name, value in re.findall(r'name="(\w+)"[^>]*? value="([^"]*)"', page) if value
    } | {name: html.unescape(text) for name, text in re.findall(r'<textarea[^>]*name="(\w+)"[^>]*>\n([^<]*)<', page)}
    fields |= dict(re.findall(r'<select[^>]*name="(\w+)">(?:(?!</select>).)*?value="(\w+)" selected', page, re.S))
    for name in ("csrf", "preview", "q"):
        fields.pop(name, None)
    page = browser.send("/console/new/schedule", **{**fields, "when": "15m", "timezone": "UTC"})
    again = node.ask("n1", "GET", "/v1/schedules/nine?body=true").json
    assert (again["every"], again["body_base64"], again["meta"]) == ("15m", found["body_base64"], found["meta"])
    assert again["catch_up"] == "all"
    page = browser.send("/console/new/schedule", **fields)
    assert browser.answer.status == 409, "somebody changed it since the form was opened"
    browser.go("/console/schedules/nine")
    assert browser.refused("/console/schedules/nine/delete", typed="ten")[0] == 400
    browser.send("/console/schedules/nine/delete", typed="nine")
    assert "The schedule nine is deleted." in browser.text
    assert {("schedule.set", "nine: chores-form"), ("schedule.delete", "nine")} <= audited(node)


def test_a_schedule_of_single_times_and_bytes_is_kept(node: Cluster, browser: Browser) -> None:
    body, at = bytes(range(256)), datetime.now(UTC).replace(microsecond=0) + timedelta(days=3)
    schedule = {"topic": "chores-form", "at": [at.isoformat()], "body_base64": base64.b64encode(body).decode()}
    assert node.ask("n1", "PUT", "/v1/schedules/bytes", schedule).status == 200
    page = browser.go("/console/schedules/bytes/edit")
    assert "Body in base64: it is not text" in browser.text
    form = {"version": "1", "name": "bytes", "topic": "chores-form", "timezone": "UTC", "encoding": "base64"}
    texts = dict(re.findall(r'<textarea[^>]*name="(at|body)"[^>]*>\n([^<]*)<', page))
    browser.send("/console/new/schedule", **form, body=html.unescape(texts["body"]), at=texts["at"])
    found = node.ask("n1", "GET", "/v1/schedules/bytes?body=true").json
    assert (base64.b64decode(found["body_base64"]), len(found["at"])) == (body, 1)
    browser.go("/console/schedules/bytes/edit")
    browser.send("/console/new/schedule", **form, body="no base64!", at=texts["at"])
    assert browser.answer.status == 400


def test_a_schedule_is_backfilled(node: Cluster, browser: Browser) -> None:
    schedule = {"topic": "backfilled", "body": "x", "every": "1h"}
    assert node.ask("n1", "PUT", "/v1/schedules/hourly", schedule).status == 200
    end = datetime.now(UTC) - timedelta(days=1)
    times = {"from": f"{end - timedelta(hours=5):%Y-%m-%dT%H:%M:%S}", "to": f"{end:%Y-%m-%dT%H:%M:%S}"}
    browser.go("/console/schedules/hourly")
    browser.send("/console/schedules/hourly/backfill", **times)
    assert "Backfilled: 5 messages are due now." in browser.text
    browser.go("/console/schedules/hourly")
    for wrong, status in (({"from": times["from"]}, 400), ({"from": times["to"], "to": times["from"]}, 422)):
        assert browser.refused("/console/schedules/hourly/backfill", **wrong)[0] == status
    assert ("schedule.backfill", "hourly: 5") in audited(node)


def test_a_viewer_sees_no_form_and_sends_none(guarded: Cluster, admin_token: str) -> None:
    head, url = {"Authorization": f"Bearer {admin_token}"}, guarded.urls["n1"]
    for topic in ("seen-1", "unseen-1"):
        assert ask(url, "POST", f"/v1/topics/{topic}/messages?delay=1h", b"x", head).status == 201
    schedule = {"topic": "seen-1", "body": "x", "every": "1h"}
    assert ask(url, "PUT", "/v1/schedules/seen", schedule, head).status == 200
    assert ask(url, "POST", "/v1/batches", {"key": "seen", "callback": {"topic": "seen-1"}}, head).status == 201
    message = ask(url, "GET", "/v1/topics/seen-1/messages", headers=head).json["messages"][0]["id"]
    viewer = signed_in(guarded, make_token(guarded, admin_token, "read:seen-*", name="viewer"))
    for path in (
        "topics",
        "topics/seen-1",
        "schedules",
        "schedules/seen",
        "batches",
        "batches/seen",
        f"messages/{message}",
        "messages?topic=seen-1",
    ):
        page = viewer.go(f"/console/{path}")
        forms = re.findall(r'<form[^>]* method="post"[^>]* action="([^"]+)"|action="([^"]+)"', page)
        assert {a or b for a, b in forms if "search" not in (a or b)} <= {
            "/console/sign-out", "/console/zone", "/console/topics", "/console/schedules", "/console/messages",
            "/console/batches",
        }, path  # fmt: skip
    assert "unseen-1" not in viewer.go("/console/messages")
    assert json.loads(viewer.ask("GET", "/console/names?q=seen-1").body) == ["seen-1"]
    token = viewer.token()
    for path, fields in (
        ("new/topic", {"name": "seen-2"}), ("topics/seen-1/delete", {"typed": "seen-1"}),
        ("topics/seen-1/settings/webhook", {"url": "https://x.invalid/"}),
        ("topics/seen-1/settings", {"own_queue": "false"}),
        ("new/schedule", {"name": "s", "topic": "seen-1", "when": "1h", "version": "0"}),
        ("new/schedule", {"name": "seen", "topic": "seen-1", "when": "1h", "version": "1"}),
        ("schedules/seen/delete", {"typed": "seen"}),
        ("batches/seen/seal", {}), ("batches/seen/cancel", {"typed": "seen"}),
        ("schedules/seen/backfill", {"from": "2026-01-01", "to": "2026-01-02"}),
        (f"messages/{message}/again", {}), ("messages/chosen", {"action": "cancel", "id": f"{message}@seen-1"}),
        ("messages/chosen", {"action": "cancel", "all": "yes"}),
    ):  # fmt: skip
        assert viewer.post(f"/console/{path}", token, **fields).status == 403, path
        assert viewer.post(f"/console/{path}", "x", **fields).status == 403, "without the token of the session"
    assert viewer.ask("GET", "/console/schedules/seen/edit").status == 403
    assert viewer.ask("GET", "/console/new/schedule").status == 403
    publisher = signed_in(guarded, make_token(guarded, admin_token, "publish:seen-*", "read:seen-*", name="publisher"))
    page = publisher.go("/console/new/schedule?cron=1h")
    publisher.send("/console/new/schedule", name="theirs", topic="unseen-1", when="1h", version="0")
    assert publisher.answer.status == 403
    assert publisher.post("/console/new/topic", token, name="seen-2").status == 403


def test_chosen_messages_become_a_job(node: Cluster, browser: Browser) -> None:
    ids = node.publish_many("n1", "chosen-1", ["x"] * 60, delay="1h")
    other = node.publish("n1", "chosen-2", b"x", "?delay=1h")
    page = browser.go("/console/messages?topic=chosen-1")
    assert page.count('name="id"') == 50
    assert "all 60 of this list" in browser.text
    list_of = {"topic": "chosen-1", "state": "pending"}

    def sent(**fields: object) -> str:
        browser.page = page
        return html.unescape(browser.post("/console/messages/chosen", **fields).headers.get("location", ""))

    few = [f"{one}@chosen-1" for one in ids[:2]]
    assert sent(action="cancel", id=few) == f"/console/jobs?action=cancel&topic=chosen-1&ids={ids[0]}%2C{ids[1]}"
    assert sent(action="cancel", id=[*few, f"{other}@chosen-2"]).startswith(
        "/console/jobs?action=cancel&topic=%2A&ids="
    )
    assert sent(action="reschedule", all="yes", **list_of) == "/console/jobs?action=reschedule&topic=chosen-1"
    assert "&from=20" in sent(action="cancel", all="yes", **(list_of | {"state": "scheduled"}))
    assert "&to=20" in sent(action="cancel", all="yes", **(list_of | {"state": "ready"}))
    assert browser.refused("/console/messages/chosen", action="cancel")[2] == "Choose at least one message."
    browser.go(sent(action="deliver_now", all="yes", **list_of))
    assert "Counting" in browser.text
    page = browser.go("/console/messages?topic=chosen-1&state=acked")
    assert 'name="id"' not in page


def test_a_message_is_published_again_and_downloaded(node: Cluster, browser: Browser) -> None:
    body = bytes(range(256))
    query = "?delay=1h&key=k-again&tags=a,b&group=g"
    message = node.publish("n1", "once-more", body, query, Content_Type="image/x", Hadelay_Meta_Shop="7")
    answer = browser.ask("GET", f"/console/messages/{message}/body")
    assert (answer.body, answer.headers["content-type"]) == (body, "application/octet-stream")
    assert "attachment" in answer.headers["content-disposition"]
    browser.go(f"/console/messages/{message}")
    browser.send(f"/console/messages/{message}/again", delay="2h")
    assert "Published." in browser.text
    assert message not in browser.page
    new = re.search(r'data-copy="([0-9A-Z]{13})"', browser.page)
    assert new
    first, second = (node.describe("n1", one) for one in (message, new[1]))
    for name in ("tags", "meta", "content_type", "group", "size"):
        assert first[name] == second[name], name
    assert "key" not in second or second["key"] is None
    node.ask("n1", "PUT", "/v1/topics/once-more/subscriptions/sub", {})
    copied = node.publish("n1", "once-more", b"x", "?delay=1h")
    copy = node.describe("n1", copied)["copies"][0]["id"]
    assert "Publish again" not in browser.go(f"/console/messages/{copy}")
    assert browser.refused(f"/console/messages/{copy}/again")[0] == 422


def test_one_search_finds_messages_topics_and_schedules(node: Cluster, browser: Browser) -> None:
    for topic in ("findable-1", "findable-2"):
        node.ask("n1", "PUT", f"/v1/topics/{topic}", {})
    node.ask("n1", "PUT", "/v1/schedules/findable-s", {"topic": "findable-1", "body": "x", "every": "1h"})
    message = node.publish("n1", "findable-1", b"x", "?delay=1h&key=only-once")

    def found(text: str) -> str:
        answer = browser.ask("GET", f"/console/search?q={text}")
        return answer.headers.get("location", "") or answer.body.decode()

    assert found(message) == found("only-once") == f"/console/messages/{message}"
    assert found("findable-2") == "/console/topics/findable-2"
    assert found("findable-s") == "/console/schedules/findable-s"
    page = found("findable")
    assert all(
        f'href="/console/{one}"' in page for one in ("topics/findable-1", "topics/findable-2", "schedules/findable-s")
    )
    assert "Nothing is called &lt;b&gt;" in found("%3Cb%3E")
    assert found("") == "/console/messages"
    assert json.loads(browser.ask("GET", "/console/names?q=findable").body) == ["findable-1", "findable-2"]


def test_consumers_of_all_topics_are_listed(node: Cluster, browser: Browser) -> None:
    ids = node.publish_many("n1", "eaten-1", ["x"] * 3) + node.publish_many("n1", "eaten-2", ["x"])
    acked, nacked, *kept = node.receive("n1", "eaten-1", max=3, consumer="eater", wait="5s")
    node.settle("n1", "ack", [acked])
    node.settle("n1", "nack", [nacked], reason="card <declined>")
    kept += node.receive("n1", "eaten-2", consumer="eater", wait="5s")
    found = {one["name"]: one for one in node.ask("n1", "GET", "/v1/consumers").json["consumers"]}["eater"]
    assert (found["topics"], found["leased"], found["node"]) == (["eaten-1", "eaten-2"], 2, "n1")
    assert (found["failed"]["reason"], found["failed"]["topic"]) == ("card <declined>", "eaten-1")
    assert (found["acked"], found["oldest"]["message"], found["oldest"]["topic"]) == (1, kept[0]["id"], "eaten-1")
    assert found["oldest"]["message"] in ids
    page = browser.go("/console/consumers?q=eat")
    row = r"ago at n1 eaten-1 , eaten-2 2 1 card <declined> eaten-1, \S+ \w+ ago \w{13} for "
    assert re.search(row, browser.text), browser.text
    assert f'href="/console/messages/{kept[0]["id"]}"' in page
    assert "eater" not in browser.go("/console/consumers?q=nobody")
    assert "eater" in browser.go("/console/consumers?q=eat&show=failing")
    assert "eater" not in browser.go("/console/consumers?q=eat&show=not+asking")
    for n in range(101):
        node.ask("n1", "POST", "/v1/topics/eaten-2/receive", {"consumer": f"of-many-{n:03}", "wait": "0s"})
    browser.go("/console/consumers?q=of-many-")
    assert "1 to 100 of 101 consumers" in browser.text
    browser.go("/console/consumers?q=of-many-&page=2")
    assert "101 to 101 of 101 consumers" in browser.text
    node.settle("n1", "ack", kept)


def test_groups_are_listed_with_the_stuck_ones_first(node: Cluster, browser: Browser) -> None:
    for topic in ("held-1", "held-2"):
        node.ask("n1", "PUT", f"/v1/topics/{topic}", {"group_concurrency": 1, "backoff": ["1h"]})
    node.publish_many("n1", "held-1", ["x"] * 4, delay="1h", group="later")
    node.publish_many("n1", "held-1", ["x"] * 3, group="stuck")
    node.publish_many("n1", "held-2", ["x"] * 2, group="other")
    for topic in ("held-1", "held-2"):
        node.settle("n1", "nack", node.receive("n1", topic, wait="5s"), reason="no route")

    def groups(query: str = "") -> list[tuple[str, str, int, bool, str]]:
        found = node.ask("n1", "GET", f"/v1/groups{query}").json
        return [
            (one["topic"], one["group"], one["blocked"], one["since"] is not None, one.get("error", ""))
            for one in found["groups"]
            if one["topic"].startswith("held-")
        ]

    one = ("held-1", "stuck", 2, True, "no route"), ("held-1", "later", 3, False, "")
    until(lambda: groups("?topic=held-1") == list(one), "the stuck group comes first")
    assert groups() == [one[0], ("held-2", "other", 1, True, "no route"), one[1]]
    assert node.ask("n1", "GET", "/v1/groups?topic=none-such").status == 404
    for path in ("/console/groups", "/console/topics/held-1/group"):
        browser.go(path)
        assert re.search(
            r"stuck (held-1 )?2 \S+ \S+ \w{13} \w+ 1 no route .*later (held-1 )?3 not due yet", browser.text
        ), browser.text
