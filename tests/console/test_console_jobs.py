"""The pages of bulk jobs and message groups, at real nodes without a browser."""

from __future__ import annotations

import html
import re
import urllib.parse

import msgspec
import pytest

from hadelay.api.jobs import Job
from hadelay.api.text import format_instant
from hadelay.console.jobs import time_left
from tests.console.conftest import Browser, make_token, signed_in
from tests.console.test_console_pages import dead_letter
from tests.system.cluster import Cluster, ask, until


def counted(browser: Browser, **asked: str) -> str:
    """Open the page with a form for a job; the last part of its count as text."""
    browser.go(f"/console/jobs?{urllib.parse.urlencode(asked)}")
    return follow(browser)


def follow(browser: Browser) -> str:
    """The last part of the count that the present page shows, as text."""
    found, page = re.search(r'hx-get="(/console/jobs/count[^"]+)"', browser.page), browser.at
    while found:
        browser.go(html.unescape(found[1]), HX_Request="true")
        assert browser.answer.status == 200
        browser.at, found = page, re.search(r'hx-get="(/console/jobs/count[^"]+)"', browser.page)
    return browser.text


@pytest.mark.parametrize(
    ("state", "progress", "spent_s", "said"),
    [
        ("running", 0.25, 60, "about 3 min left"), ("running", 0.5, 20, "about 20 s left"), ("running", 0.001, 60, ""),
        ("running", 1.0, 60, ""), ("done", 0.5, 60, ""),
    ],
)  # fmt: skip
def test_the_time_left_of_a_job(state: str, progress: float, spent_s: int, said: str) -> None:
    times = {"began_at": format_instant(0), "ended_at": None, "by": "", "state": state, "progress": progress}
    counts = dict.fromkeys(("done", "leased", "settled", "moved", "refused"), 0)
    job = msgspec.convert({"id": 1, "action": "cancel", "filter": {"topic": "x"}, **times, **counts}, Job[str])
    assert time_left(job, format_instant(spent_s * 1000)) == said


def begin(browser: Browser, typed: str) -> str:
    fields = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', browser.page))
    csrf = fields.pop("csrf")
    return browser.send("/console/jobs/begin", csrf, typed=typed, **{k: html.unescape(v) for k, v in fields.items()})


def test_a_job_is_counted_begun_once_and_watched(node: Cluster, browser: Browser) -> None:
    node.publish_many("n1", "bulk", ["x"] * 30, delay="2h", tags=["eu"])
    node.publish_many("n1", "bulk", ["x"] * 5, delay="2h", tags=["us"])
    assert "Reschedule: 30 messages" in counted(browser, action="reschedule", topic="bul*", tags="eu", shift="1d")
    form = browser.page
    begin(browser, "31")
    assert "Type the count, 30, to confirm" in browser.problem
    browser.page = form
    begin(browser, "30")
    assert re.search(r"Job \d+ has begun\.", browser.text)
    job = re.findall(r"Job (\d+): reschedule", browser.text)[0]
    until(lambda: browser.go(f"/console/jobs/{job}") and "30 messages changed" in browser.text, "the job is done")
    assert "bul*; tagged eu" in browser.text
    assert "Stop the job" not in browser.page
    browser.page = form
    begin(browser, "30")
    assert f"Job {job} has begun." in browser.text, "the same form begins no second job"
    assert re.search(
        rf"{job} Reschedule (bul\*; tagged eu ){{2}}done 30",
        " ".join(browser.go("/console/jobs") and browser.text.split()),
    )
    assert "No message matches" in counted(browser, action="cancel", topic="bulk", key_prefix="none-")


def test_a_count_that_has_changed_begins_no_job(node: Cluster, browser: Browser) -> None:
    node.publish_many("n1", "grows", ["x"] * 30, delay="2h")
    assert "Cancel: 30 messages" in counted(browser, action="cancel", topic="grows")
    node.publish_many("n1", "grows", ["x"] * 15, delay="2h")
    begin(browser, "30")
    assert "The count changed meanwhile: it is 45 now" in browser.text
    assert node.topic("n1", "grows")["scheduled"] == 45
    assert "Cancel: 45 messages" in counted(browser, action="cancel", topic="grows")
    assert "/console/messages?topic=grows&amp;" in browser.page, "a list has the same filter"
    form = browser.page
    begin(browser, "45")
    job = re.findall(r"Job (\d+) has begun", browser.text)[0]
    until(lambda: node.topic("n1", "grows")["scheduled"] == 0, "they are cancelled")
    browser.page = form
    begin(browser, "45")
    assert f"Job {job} has begun." in browser.text, "the same form, although nothing is left to count"


def test_dead_letters_are_redriven_and_deleted_by_group_and_by_choice(node: Cluster, browser: Browser) -> None:
    ids = [dead_letter(node, "sorted", reason=f"timeout after {n} s") for n in range(3)]
    ids += [dead_letter(node, "sorted", reason=text) for text in ("no card", "no card", "HTTP 500", "HTTP 503")]
    here = "/console/topics/sorted/dead"

    def state(message: str) -> int | str:
        answer = node.ask("n1", "GET", f"/v1/messages/{message}")
        return str(answer.json["state"]) if answer.status == 200 else answer.status

    browser.go(here)
    browser.send(f"{here}/redrive-group", error="timeout after # s", rate="2")
    assert "sorted; error: timeout after # s" in browser.text
    assert "2 per second" in browser.text
    until(lambda: [state(one) for one in ids[:3]] == ["ready"] * 3, "the group is redriven")

    page = browser.go(here)
    link = re.findall(r'href="/console/jobs\?(action=delete_dead[^"]*error=no[^"]*)"', page)[0]
    assert "Delete dead letters: 2 messages" in counted(browser, **dict(urllib.parse.parse_qsl(html.unescape(link))))
    begin(browser, "2")
    until(lambda: [state(one) for one in ids[3:5]] == [404, 404], "the group is deleted")

    browser.go(here)
    browser.send(f"{here}/redrive", id=ids[5], rate="9")
    assert "1 chosen" in browser.text
    until(lambda: state(ids[5]) == "ready", "the chosen letter is redriven")
    browser.go(here)
    csrf = browser.token()
    browser.send(f"{here}/delete-chosen", id=ids[6])
    assert "Delete dead letters: 1 message" in follow(browser)
    begin(browser, "1")
    until(lambda: node.topic("n1", "sorted")["dead"] == 0, "the chosen letter is deleted")
    for action, fields in (("redrive", {"id": ids, "rate": "x"}), ("delete-chosen", {}), ("redrive-group", {})):
        browser.send(f"{here}/{action}", csrf, **fields)
        assert browser.problem, action


def test_a_slow_job_is_stopped(node: Cluster, browser: Browser) -> None:
    node.publish_many("n1", "slowly", ["x"] * 50, delay="2h")
    assert "Cancel: 50 messages" in counted(browser, action="cancel", topic="slowly", rate="1")
    begin(browser, "50")
    job = re.findall(r"Job (\d+): cancel", browser.text)[0]
    assert "1 per second" in browser.text
    browser.send(f"/console/jobs/{job}/stop")
    assert "The job is stopped." in browser.text
    assert "Stop the job" not in browser.page
    assert int(node.topic("n1", "slowly")["scheduled"]) > 40


def test_wrong_jobs_are_refused_in_words(browser: Browser) -> None:
    for asked, words in (
        ({"action": "reschedule", "topic": "x", "shift": "1d", "at": "2027-01-01T00:00"}, "Give one of: later by"),
        ({"action": "reschedule", "topic": "x", "shift": "soon"}, 'data-field="shift"'),
        ({"action": "cancle", "topic": "x"}, "no action"),
        ({"action": "cancel", "topic": "a b*"}, "neither a name nor a pattern"),
        ({"action": "cancel", "topic": "x", "rate": "fast"}, 'data-field="rate"'),
    ):  # fmt: skip
        browser.go(f"/console/jobs?{urllib.parse.urlencode(asked)}")
        assert browser.answer.status == 200
        assert words in (browser.page if "=" in words else browser.text)
        assert "Counting" not in browser.text
    browser.go("/console/jobs/count?action=cancel&topic=none-such")
    assert browser.answer.status == 404
    for job in ("0", "x", "²", "9" * 30):
        browser.go(f"/console/jobs/{urllib.parse.quote(job)}")
        assert browser.answer.status == 404


def test_a_token_sees_and_begins_jobs_of_its_topics_alone(guarded: Cluster, admin_token: str) -> None:
    url, head = guarded.urls["n1"], {"Authorization": f"Bearer {admin_token}"}
    for topic in ("mine-jobs", "other-jobs"):
        assert ask(url, "POST", f"/v1/topics/{topic}/messages?delay=1h", b"x", head).status == 201
    made = {
        topic: ask(url, "POST", "/v1/jobs", {"action": "deliver_now", "filter": {"topic": topic}}, head).json["id"]
        for topic in ("mine-jobs", "other-jobs", "*")
    }
    browser = signed_in(guarded, make_token(guarded, admin_token, "read:mine-*", "publish:mine-*", name="some"))
    browser.go("/console/jobs")
    assert "mine-jobs" in browser.text
    assert "other-jobs" not in browser.text
    for topic in ("other-jobs", "*"):
        browser.go(f"/console/jobs/{made[topic]}")
        assert browser.answer.status == 403
        assert "other-jobs" not in browser.page
        browser.go(f"/console/jobs/count?action=cancel&topic={topic}")
        assert browser.answer.status == 403
        browser.go("/console/jobs")
        begun = browser.post(
            "/console/jobs/begin", action="cancel", topic=topic, typed="1", matched="1", request_id="a"
        )
        assert begun.status == 403
        assert browser.post(f"/console/jobs/{made[topic]}/stop").status == 403
    redrive = browser.post("/console/jobs/begin", action="redrive", topic="mine-jobs", typed="1", matched="1")
    assert redrive.status == 403, "redriving needs the scope admin"
    reader = signed_in(guarded, make_token(guarded, admin_token, "read", name="looks"))
    assert "Change many messages" not in reader.go("/console/jobs")
    assert "Stop the job" not in reader.go(f"/console/jobs/{made['*']}")
    entries = ask(url, "GET", "/v1/audit?limit=1000", headers=head).json["entries"]
    assert not [entry for entry in entries if entry["token"] == "some"]
    counted(browser, action="cancel", topic="mine-jobs")
    browser.go("/console/jobs")
    browser.send("/console/jobs/begin", action="cancel", topic="mine-*", typed="1", matched="1", request_id="b")
    assert browser.answer.status == 200
    entries = ask(url, "GET", "/v1/audit?limit=1000", headers=head).json["entries"]
    assert [entry["action"] for entry in entries if entry["token"] == "some"] == ["job.cancel"]


def test_a_group_shows_who_blocks_it(node: Cluster, browser: Browser) -> None:
    node.ask("n1", "PUT", "/v1/topics/grouped", {"group_concurrency": 1})
    ids = node.publish_many("n1", "grouped", ["x"] * 4, delay="1h", group="customer 17 <b>")
    assert "Groups" in browser.go("/console/topics/grouped")
    browser.go(f"/console/messages/{ids[2]}")
    link = re.search(r'href="(/console/topics/grouped/group[^"]+)"', browser.page)
    assert link
    browser.go(html.unescape(link[1]))
    assert "Group customer 17 <b>" in browser.text
    assert "3 messages wait behind 1" in browser.text
    assert ids[0] in browser.text
    browser.go("/console/topics/grouped/group?q=nobody")
    assert "No pending message" in browser.text
    assert browser.answer.status == 200


def test_messages_are_moved_to_another_topic(node: Cluster, browser: Browser) -> None:
    node.publish_many("n1", "moved-from", ["x"] * 3, delay="2h")
    node.ask("n1", "PUT", "/v1/topics/moved-to", {})
    assert "Move to another topic: 3 messages" in counted(
        browser, action="transfer", topic="moved-from", into="moved-to"
    )
    begin(browser, "3")
    job = re.findall(r"Job (\d+): move to another topic", browser.text)[0]
    until(lambda: browser.go(f"/console/jobs/{job}") and "3 messages changed" in browser.text, "the job is done")
    assert "moved-from; to moved-to" in browser.text
    assert [node.topic("n1", name)["scheduled"] for name in ("moved-from", "moved-to")] == [0, 3]


def test_topics_that_no_message_can_be_moved_to(node: Cluster) -> None:
    document = {"action": "transfer", "filter": {"topic": "moved-to"}, "into": "moved-from"}
    assert node.ask("n1", "POST", "/v1/jobs", document | {"into": "nobody-made-this"}).status == 404
    assert node.ask("n1", "POST", "/v1/jobs", document | {"into": "moved-to"}).status == 400
