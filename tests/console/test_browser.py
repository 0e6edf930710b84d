"""The console in a real Chromium, at a cluster of three nodes. HADELAY_SCREENSHOTS=DIR writes pictures for the docs."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.conftest import make_token
from tests.console.pages import LOOKS, NARROW, PATHS, PICTURES, first_paint, landed, made_frames, opened, picture
from tests.console.seeds import fill, use
from tests.system.cluster import Cluster, ask, until

sync_api = pytest.importorskip("playwright.sync_api", reason="`make browser` installs the browser's driver")
#: The shell is Chromium without its own windows: a page there takes a third of the processor time.
CHROMIUM = os.environ.get("HADELAY_CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: `make browser` installs one")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--force-device-scale-factor=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes of their own: these tests fill them, and remove one at their end."""
    with Cluster(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest.fixture(scope="module")
def ids(cluster: Cluster) -> dict[str, str]:
    found = fill(cluster)
    if PICTURES:
        use(cluster, 150)
    return found


@pytest.fixture(scope="module")
def axe() -> str:
    """Script of the checks of accessibility."""
    import axe_playwright_python

    return (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield running
        running.close()


@pytest.mark.parametrize("name", PATHS)
def test_a_page_is_small_accessible_and_fits(
    cluster: Cluster, ids: dict[str, str], chromium: Any, axe: str, name: str
) -> None:
    """With a cold cache a page is at most 60 KB over the wire. The test prints the time of the first paint, since
    machines differ."""
    with opened(chromium, cluster.urls["n1"]) as page:
        kib, paint_ms = first_paint(page, PATHS[name].format(**ids))
        print(f"{name}: {kib:.1f} KiB, first paint after {paint_ms:.0f} ms")
        assert kib < 60
        page.wait_for_selector("h1")
        if name in ("overview", "topic"):
            page.wait_for_selector(".chart canvas")
        if PATHS[name].endswith("/reminders"):
            assert page.locator("#consumers .checks li").count() > 0, "the health of the topic's webhook"
        page.evaluate(axe)
        # The sizes differ in their layout alone, and the schemes in their colours: two of the four pairs have all.
        for size, scheme in LOOKS if PICTURES else (LOOKS[0], LOOKS[-1]):
            page.set_viewport_size(size)
            page.emulate_media(color_scheme=scheme)
            # Charts are drawn anew, a moment after the size has changed.
            page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
            cut = "[...document.querySelectorAll('.card')].map((one) => one.scrollWidth - one.clientWidth)"
            assert sum(page.evaluate(cut)) == 0, "a table is cut off"
            page.evaluate("Promise.all(document.getAnimations().map((one) => one.finished.catch(() => null)))")
            found = page.evaluate("axe.run({resultTypes: ['violations'], preload: false})")["violations"]
            bad = [
                (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"])
                for one in found
                if one["impact"] in ("serious", "critical")
            ]
            assert bad == [], (size, scheme)
            picture(page, f"{name}-{scheme}-{size['width']}")


def test_a_message_is_found_and_rescheduled_with_the_keyboard(
    cluster: Cluster, ids: dict[str, str], chromium: Any
) -> None:
    with opened(chromium, cluster.urls["n2"]) as page:
        page.goto("/console/topics")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        for _ in range(12):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent.trim()") == "Messages":
                break
        page.keyboard.press("Enter")
        page.wait_for_url("**/console/messages")
        page.wait_for_selector("#q:focus")
        page.keyboard.type("acts/act-1")
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile(r"/console/messages/\w{13}$"))
        assert re.search(r"Due in 5\d min", page.inner_text(".verdict"))
        page.focus("#when")
        page.keyboard.type("3h")
        page.keyboard.press("Enter")
        landed(page, ".notice:has-text('Rescheduled')")
        page.focus("summary:has-text('Cancel…')")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.textContent") == "Cancel the message"
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.textContent") == "Cancel…"
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        page.wait_for_selector(".verdict:has-text('Cancelled')")


def test_a_form_opens_once_and_takes_the_next_key(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/topics/reminders")
        focused = "document.querySelector('summary:has(+ form #reason)').click(); document.activeElement.id"
        assert page.evaluate(focused) == "reason", "the click itself moves the focus"
        page.keyboard.press("Escape")
        page.goto(f"/console/messages/{ids['scheduled']}")
        page.focus("summary:has-text('Cancel…')")
        for _ in range(4):
            page.keyboard.down("Enter")  # the second and later ones are repetitions of a held key
        page.keyboard.up("Enter")
        assert page.evaluate("document.activeElement.textContent") == "Cancel the message"
        assert page.locator("details.confirm[open]").count() == 1
        assert cluster.ask("n1", "GET", f"/v1/messages/{ids['scheduled']}").json["state"] == "scheduled"


def test_an_update_takes_nothing_from_the_person(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        show = made_frames(page)
        page.goto("/console/")
        rows = "<p id='news'>{} <a href='/other'>n1</a> <a href='/console/topics?sort=late'>n2</a></p>"
        show(html={"members": rows.format("one")})
        page.focus("#members a >> nth=1")
        show(html={"members": rows.format("two")})
        assert page.inner_text("#news").startswith("two"), "a focus holds up no news"
        assert page.evaluate("document.activeElement.textContent") == "n2"
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#news'))")
        show(html={"members": rows.format("three")})
        assert "two" in page.evaluate("getSelection().toString()")
        page.evaluate("getSelection().removeAllRanges()")
        show()
        assert page.inner_text("#news").startswith("three"), "news that were held up are shown afterwards"
        box = page.locator("#members a >> nth=1").bounding_box()
        page.mouse.move(box["x"] + 3, box["y"] + 3)
        page.mouse.down()
        show(html={"members": rows.format("four")})
        page.mouse.up()
        page.wait_for_url("**/console/topics?sort=late")


def test_a_live_notice_moves_nothing_and_ends(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        show = made_frames(page)
        page.goto(f"/console/messages/{ids['scheduled']}")
        show(leader=cluster.leader())
        page.click("summary:has-text('Cancel…')")
        page.fill("#when", "3 h")
        place = page.locator("summary:has-text('Cancel…')").bounding_box()
        show(problem="It is not known who leads.", state="leased")
        page.wait_for_selector("#live-notice:has-text('It is not known')")
        show()
        page.wait_for_selector("#live-notice:has-text('The message is leased now')")
        assert page.locator("summary:has-text('Cancel…')").bounding_box() == place
        assert page.input_value("#when") == "3 h"
        assert page.locator("details.confirm[open]").count() == 1


def test_alarms_and_tiles_that_come_and_go_move_nothing(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        show = made_frames(page)
        page.goto("/console/")
        top = page.locator("#tiles").bounding_box()["y"]

        def tiles_with(alarms: int) -> float:
            items = "".join(
                f"<li class='bad'>n{n} does not answer: start it, or read its log.</li>" for n in range(alarms)
            )
            show(html={"alarms": f"<ul class='alarms'>{items}</ul>"})
            return page.locator("#tiles").bounding_box()["y"]

        assert [tiles_with(n) for n in (1, 4, 0)] == [top] * 3
        lower = tiles_with(9)
        assert lower > top
        assert tiles_with(1) == lower, "the space stays"
        page.goto("/console/topics/tenants")
        assert page.locator("#counts .tile:has-text('Blocked')").count() == 1, "also with none blocked"


def test_hostile_bodies_do_nothing(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        for form in ("", "?as=text", "?as=hex"):
            page.goto(f"/console/messages/{ids['hostile']}{form}")
            assert "hacked" not in page.title()
            assert page.locator("main img, main script").count() == 0
        page.goto(f"/console/messages/{ids['hostile']}?as=text")
        assert "<script>document.title" in page.inner_text(".body")


def test_topics_are_searched_while_typing(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/topics")
        page.type("#q", "remind")
        page.wait_for_function("() => document.querySelectorAll('#topics tbody tr').length === 1")
        page.wait_for_url("**q=remind*")
        page.fill("#q", "")
        page.wait_for_function("() => document.querySelectorAll('#topics tbody tr').length > 4")
        page.focus("#topics th:has-text('Scheduled') a")
        page.keyboard.press("Enter")
        page.wait_for_selector("#topics th[aria-sort=descending]:has-text('Scheduled')")
        assert page.inner_text("#topics tbody tr:first-child td:first-child a").startswith("reminders")
        # The focus stays: htmx puts it on the new heading.
        page.wait_for_function("() => document.activeElement.textContent.trim().startsWith('Scheduled')")
        page.select_option("#show", "paused")
        page.wait_for_function("() => document.querySelectorAll('#topics tbody tr').length === 1")
        assert page.locator("#topics th[aria-sort=descending]:has-text('Scheduled')").count() == 1, "so does the order"
        assert "trials" in page.inner_text("#topics tbody")
        page.go_back()
        page.wait_for_selector("#topics tbody tr:nth-child(3)")


def test_topics_are_sorted_on_a_narrow_screen(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/topics?q=e")
        assert not page.is_visible("#sort"), "the headings sort where there is room for them"
        page.set_viewport_size(NARROW)
        page.select_option("#sort", "late")
        page.wait_for_url("**sort=late*")
        assert "q=e" in page.url
        assert page.input_value("#sort") == "late"
        page.select_option("#sort", "scheduled")
        page.wait_for_function("() => document.querySelector('#topics tbody a').textContent === 'reminders'")
        page.select_option("#show", "dead")
        page.wait_for_url("**show=dead*")
        assert "sort=scheduled" in page.url, "a choice keeps the order"


def test_a_hundred_thousand_topics_are_searched_and_sorted(
    tmp_path_factory: pytest.TempPathFactory, chromium: Any
) -> None:
    with Cluster(tmp_path_factory.mktemp("many"), nodes=1) as many:

        def publish(part: int) -> None:
            for first in range(part * 50_000, (part + 1) * 50_000, 1_000):
                items = [{"topic": f"queue-{n}", "body": "x", "delay": "1h"} for n in range(first, first + 1_000)]
                assert many.ask("n1", "POST", "/v1/messages:batch", items).status == 200

        for publisher in [many.later(publish, part) for part in (0, 1)]:
            publisher.result()
        with opened(chromium, many.urls["n1"]) as page:
            page.goto("/console/topics?sort=scheduled")
            page.wait_for_selector("caption:has-text('100,000 topics, 1 to 50')")
            assert page.locator("#topics tbody tr").count() == 50
            page.type("#q", "queue-7654")
            page.wait_for_selector("caption:has-text('11 topics')")
            page.wait_for_url("**q=queue-7654*")
            page.goto("/console/")
            page.wait_for_selector("#tiles:has-text('100,000 topics')")


def test_a_topic_is_paused_resumed_and_purged(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n3"]) as page:
        page.goto("/console/topics/acts")
        page.click("summary:has-text('Pause…')")
        page.keyboard.type("INC-13")
        page.keyboard.press("Enter")
        landed(page, ".notice.warn:has-text('INC-13')")
        page.click("button:has-text('Resume')")
        landed(page, ".notice:has-text('Resumed')")
        page.click("summary:has-text('Purge…')")
        count = page.get_attribute("input[name=shown]", "value")
        page.fill("#typed", count)
        page.click("button:text-is('Purge')")
        page.wait_for_selector(".notice:has-text('Purged')")
        until(lambda: cluster.topic("n3", "acts")["scheduled"] == 0, "they are cancelled")


def test_counts_are_live_and_nothing_moves(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n2"]) as page:
        cluster.publish_many("n1", "counted", ["x"] * 5, delay="2h")
        page.goto("/console/topics/counted")
        page.wait_for_selector(".chart canvas")
        page.evaluate(
            "window.shift = 0; new PerformanceObserver((list) => { for (const one of list.getEntries()) "
            "window.shift += one.value; }).observe({type: 'layout-shift'})"
        )
        cluster.publish_many("n1", "counted", ["x"] * 25, delay="2h")
        page.wait_for_function(
            "(n) => Number(document.querySelector('#counts .tile:first-child dd').textContent.replace(',', '')) === n",
            arg=30,
        )
        painted = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        page.evaluate(painted)
        assert page.evaluate("window.shift") < 0.02


def test_the_stream_is_closed_while_the_page_is_hidden(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n2"]) as page:
        ended: list[str] = []
        page.on("requestfailed", lambda request: ended.append(request.url) if "/live/" in request.url else None)
        with page.expect_request("**/console/live/overview"):
            page.goto("/console/")
        hide = (
            "(h) => { Object.defineProperty(document, 'hidden', {value: h, configurable: true}); "
            "document.dispatchEvent(new Event('visibilitychange')); }"
        )
        page.evaluate(hide, True)
        until(lambda: (page.wait_for_timeout(50), bool(ended))[1], "the stream is closed")
        with page.expect_request("**/console/live/overview?again=1"):
            page.evaluate(hide, False)


def test_a_chart_has_no_holes_after_the_page_was_hidden(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    """A point long after the last one: the samples between are loaded, and those of more than an hour ago are gone."""
    start = 1_800_000_000

    def series(first: int, last: int) -> dict[str, Any]:
        at = list(range(start + first, start + last + 1, 10))
        rates = [[float(n % 7) for n in range(len(at))]] * 2
        return {"at": at, "rates": rates, "lateness": [*rates, rates[0]], "pending": rates, "deaths": rates[:1]}

    answers = [series(0, 600), series(0, 4_500)]
    with opened(chromium, cluster.urls["n1"]) as page:
        # Put a class in the place of the library's that notes how many points each chart draws.
        page.add_init_script(
            "window.drawn = {}; Object.defineProperty(window, 'uPlot', {configurable: true, set(made) { "
            "Object.defineProperty(window, 'uPlot', {value: class extends made { constructor(options, data, place) { "
            "super(options, data, place); const own = this.setData, note = (some) => { "
            "window.drawn[place.dataset.chart] = some.map((one) => one.length); }; "
            "note(data); this.setData = (some) => { own(some); note(some); }; } }}); }});"
        )
        show = made_frames(page)
        page.route("**/console/charts/overview", lambda route: route.fulfill(json=answers[0]))
        page.goto("/console/")
        page.wait_for_function("() => window.drawn.rates && window.drawn.rates[0] === 61 && drawn.lateness")
        later = {"rates": [1, 2], "lateness": [1, 2, 3], "pending": [1, 2], "deaths": [0]}
        show(point={"at": start + 610, **later})
        assert page.evaluate("[drawn.rates, drawn.lateness]") == [[62] * 3, [62] * 4], "each chart grows by the point"
        answers.pop(0)
        with page.expect_response("**/console/charts/overview"):
            show(point={"at": start + 4_500, **later})
        page.wait_for_function("() => window.drawn.rates[0] === 360 && window.drawn.lateness[3] === 360")


def test_a_chart_of_a_page_without_updates_begins_by_itself(
    cluster: Cluster, ids: dict[str, str], chromium: Any
) -> None:
    answers: list[Any] = [{"at": [], "deaths": [[]]}, None, {"at": [1_800_000_000, 1_800_000_010], "deaths": [[0, 1]]}]
    with opened(chromium, cluster.urls["n1"]) as page:
        page.add_init_script("const wait = setTimeout; window.setTimeout = (run, ms) => wait(run, ms / 20);")
        page.route(
            "**/console/charts/overview",
            lambda route: route.fulfill(json=answer) if (answer := answers.pop(0)) else route.fulfill(status=503),
        )
        page.goto("/console/dead")
        page.wait_for_selector(".chart .empty:has-text('The chart begins in some seconds.')")
        page.wait_for_selector(".chart .empty:has-text('could not be loaded')")
        page.wait_for_selector(".chart canvas")


def test_due_times_are_zoomed_by_dragging(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/topics/orders")
        page.wait_for_selector("[data-due] canvas")
        with page.expect_response("**/console/due?**") as asked:
            page.click("button[data-range=minute]")
        assert asked.value.json()["step"] == 1
        page.goto("/console/")
        page.wait_for_selector("[data-due] canvas")
        with page.expect_response("**/console/due?**"):
            page.click("button[data-range=year]")
        page.wait_for_function("() => document.querySelector('#due-says').textContent.includes('day')")
        with page.expect_response("**/console/due?**") as asked:
            box = page.locator("[data-due] .u-over").bounding_box()
            page.mouse.move(box["x"] + 3, box["y"] + 40)
            page.mouse.down()
            page.mouse.move(box["x"] + 40, box["y"] + 40, steps=4)
            page.mouse.up()
        start, end = (int(n) for n in re.findall(r"(?:from|to)=(\d+)", asked.value.url))
        assert end - start < 80 * 86_400_000
        with page.expect_request("**/console/due?**") as back:
            page.locator("[data-due]").dblclick(position={"x": 160, "y": 40})
        start, end = (int(n) for n in re.findall(r"(?:from|to)=(\d+)", back.value.url))
        assert end - start > 300 * 86_400_000


def test_due_times_are_zoomed_with_the_keyboard(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/topics/orders")
        page.wait_for_selector("[data-due] canvas")

        def pressed(name: str) -> tuple[int, int]:
            page.focus(f"button[data-move='{name}']")
            with page.expect_response("**/console/due?**") as asked:
                page.keyboard.press("Enter")
            assert asked.value.status == 200
            page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            start, end = (int(n) for n in re.findall(r"(?:from|to)=(\d+)", asked.value.url))
            return start, end

        day = 86_400_000
        start, end = pressed("later")
        assert end - start == day
        assert pressed("zoom in") == (start + day // 4, end - day // 4)
        assert pressed("earlier") == (start, end - day // 2)
        assert page.locator("button[aria-pressed=true]").count() == 0
        for _ in range(16):
            start, end = pressed("zoom out")
        assert end - start == 20 * 365 * day, "the longest range"


def test_many_messages_are_counted_and_then_changed(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n2"]) as page:
        page.goto("/console/jobs")
        page.select_option("#action", "reschedule")
        page.fill("#topic", "emails")
        page.fill("#tags", "us")
        page.fill("#shift", "2d")
        page.keyboard.press("Enter")
        page.wait_for_selector("#count button.danger:has-text('Reschedule 27')")
        page.fill("#typed", "27")
        page.keyboard.press("Enter")
        page.wait_for_selector(".verdict:has-text('27 messages changed')")
        assert re.search(r"/console/jobs/\d+$", page.url)


def test_dead_letters_are_redriven(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto(f"/console/messages/{ids['dead']}")
        page.click("button:text-is('Redrive')")
        landed(page, ".notice:has-text('Redriven')")
        page.goto("/console/dead")
        page.click("a:text-is('payments')")
        page.wait_for_selector("h1:has-text('39 dead letters of payments')")
        assert "card declined: issuer #" in page.inner_text("main")
        page.check("tbody input[type=checkbox] >> nth=0")
        page.check("tbody input[type=checkbox] >> nth=1")
        page.click("button:has-text('Redrive the chosen ones')")
        page.wait_for_selector(".notice:has-text('2 redriven.')")
        page.click("a[aria-label='Redrive letters: HTTP # from bank']")
        page.fill("#group-rate", "50")
        page.keyboard.press("Enter")
        page.wait_for_selector(".verdict:has-text('messages changed')")
        page.goto("/console/topics/payments/dead")
        page.check("tbody input[type=checkbox] >> nth=0")
        page.click("button:has-text('Delete the chosen ones…')")
        page.wait_for_selector("#count button.danger:has-text('Delete dead letters 1')")
        page.fill("#typed", "1")
        page.keyboard.press("Enter")
        page.wait_for_selector(".verdict:has-text('1 message changed')")
        page.goto("/console/topics/payments/dead")
        page.click("button:has-text('Redrive all')")
        page.wait_for_selector(".notice:has-text('Redriving')")
        until(lambda: cluster.topic("n1", "payments")["dead"] == 0, "all are redriven")


def test_a_webhook_is_tested_with_a_message(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/topics/reminders")
        page.fill("#p-body", '{"hello": 1}')
        page.click("button:text-is('Publish')")
        landed(page, ".notice:has-text('Published.')")
        page.wait_for_selector(".timeline li:has-text('Given back'):has-text('name not resolved')")
        # On a slow machine the next attempts are over, too.
        page.wait_for_selector(r".verdict >> text=/attempt \d+ failed/")


def test_a_message_is_delayed_and_delivered_and_a_setting_saved(
    cluster: Cluster, ids: dict[str, str], chromium: Any
) -> None:
    with opened(chromium, cluster.urls["n2"]) as page:
        page.goto("/console/topics/invoices")
        page.fill("#p-delay", "1h")
        page.fill("#p-key", "by-hand")
        page.keyboard.press("Enter")
        landed(page, ".verdict:has-text('Due in 59 min')")
        page.click("button:text-is('Deliver now')")
        landed(page, ".notice:has-text('The message is due now.')")
        page.goto("/console/topics/invoices")
        page.fill("#s-lease", "2m")
        page.keyboard.press("Enter")
        landed(page, ".notice:has-text('Changed: lease.')")
        page.wait_for_selector(".why:has-text('overdue by'):has-text('no consumer has asked')")


def test_a_schedule_is_previewed_triggered_and_paused(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n3"]) as page:
        page.goto("/console/schedules")
        page.fill("#cron", "0 9 * * mon-fri")
        page.keyboard.press("Enter")
        landed(page, ".said:has-text('09:00')")
        assert page.locator("ol.times li").count() == 10
        page.click("a:text-is('cleanup')")
        page.click("summary:has-text('Trigger…')")
        page.click("button:text-is('Trigger')")
        landed(page, ".notice:has-text('this is the message of cleanup')")
        page.goto("/console/schedules/cleanup")
        assert re.search(
            r"next in \d+ (min|s).*; the last one was .+ ago, its message is ready", page.inner_text(".verdict")
        )
        page.click("summary:has-text('Pause…')")
        page.click("button:text-is('Pause')")
        landed(page, ".verdict:has-text('paused')")
        page.click("button:text-is('Resume')")
        landed(page, ".notice:has-text('Resumed')")


def test_a_page_goes_on_when_the_leader_dies(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    leader = cluster.leader()
    here = next(name for name in cluster.names if name != leader)
    with opened(chromium, cluster.urls[here]) as page:
        with page.expect_response("**/console/live/overview"):
            page.goto("/console/")

        def shown() -> str:
            """The leader as the page shows it; it may have changed since."""
            name = cluster.leader()
            there = page.locator(f"#members tr:has-text('{name}') .badge.leader").count()
            return name if there and name != here else ""

        leader = until(shown, "the page shows who leads", every=0.2)
        cluster.kill(leader)
        page.wait_for_function(
            "(old) => /^Leader changed: n\\d leads since/.test(document.querySelector('#live-notice').textContent) "
            "&& !document.querySelector('#live-notice').textContent.includes(old + ' leads')",
            arg=leader,
        )
        page.wait_for_selector(f"#alarms li.bad:has-text('{leader} does not answer')")
        page.wait_for_selector("#alarms li.bad:has-text('If one more member fails, the cluster stops.')")
        page.wait_for_selector(f"#members tr:has-text('{leader}') .badge.unknown")
        cluster.restart(leader)
        page.wait_for_selector(f"#members tr:has-text('{leader}') .badge.follower")
        page.goto("/console/cluster")
        assert page.locator("#terms tbody tr").count() >= 2
        assert page.locator(f"#terms tr:has-text('{leader} closed its connections')").count() == 1


def test_a_page_goes_on_when_its_node_is_back(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    here = cluster.followers()[0]
    with opened(chromium, cluster.urls[here]) as page:
        with page.expect_response("**/console/live/cluster"):
            page.goto("/console/cluster")
        cluster.kill(here, number=signal.SIGTERM)
        # By the time that the page is asked, its first try to connect may have failed.
        page.wait_for_selector("#live-notice:has-text('is stopping'), #live-notice:has-text('No news')")
        with page.expect_response("**/console/live/cluster?again=1"):
            cluster.restart(here)
        # A node that has just started knows no leader for a moment.
        page.wait_for_function(
            "() => document.querySelector('#live-notice').hidden || "
            "document.querySelector('#live-notice').textContent.startsWith('Leader changed')"
        )


def test_leadership_is_transferred(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    leader = cluster.leader()
    to = next(name for name in cluster.names if name != leader)
    with opened(chromium, cluster.urls[leader]) as page:
        page.goto("/console/cluster")
        page.click("summary:has-text('Transfer leadership…')")
        page.select_option("#to", to)
        page.click("button:text-is('Transfer')")
        page.wait_for_selector(f".notice:has-text('{to} leads.')")
        page.wait_for_selector(f"#terms tbody tr:first-child:has-text('{leader} handed over: it was asked to')")


def test_a_consumer_is_shown_with_the_node_that_it_asked(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    here = next(name for name in cluster.names if name != cluster.leader())
    with opened(chromium, cluster.urls[here]) as page:
        wish = {"wait": "20s", "consumer": "shop-9"}
        waiting = cluster.later(cluster.ask, here, "POST", "/v1/topics/visited/receive?redirect=false", wish)
        cluster.publish(here, "visited", b"x", "?delay=1h")
        until(lambda: cluster.topic(here, "visited").get("consumers"), "it waits", every=0.05)
        page.goto("/console/topics/visited")
        row = page.locator("#consumers tr:has-text('shop-9')")
        assert re.match(rf"shop-9\s+{here}\s+\S+ m?s ago\s+0", row.inner_text())
        assert "nothing waits" in page.inner_text(".why")
        cluster.publish(here, "visited", b"x")
        assert waiting.result(20).status == 200
        page.wait_for_selector("#consumers tr:has-text('shop-9'):has-text('asked')")


def test_a_token_is_made_and_revoked_in_the_browser(guarded: Cluster, admin_token: str, chromium: Any) -> None:
    with opened(chromium, guarded.urls["n1"]) as page:
        page.goto("/console/access")
        page.fill("#token", admin_token)
        page.keyboard.press("Enter")
        landed(page, "h1:has-text('Access')")
        page.fill("#name", "night-watch")
        page.fill("#scopes", "read")
        page.keyboard.press("Enter")
        landed(page, ".secret")
        assert page.input_value(".secret input").startswith("hadelay_")
        page.goto("/console/access")
        assert page.locator(".secret").count() == 0
        page.click("summary[aria-label='Revoke night-watch…']")
        page.keyboard.press("Enter")
        landed(page, ".notice:has-text('The token night-watch is revoked.')")


def test_a_session_that_ends_says_so(guarded: Cluster, admin_token: str, chromium: Any) -> None:
    token = make_token(guarded, admin_token, "read", name="visitor")
    head = {"Authorization": f"Bearer {admin_token}"}
    with opened(chromium, guarded.urls["n1"]) as page:
        page.goto("/console/cluster")
        page.wait_for_selector("h1:has-text('Sign in')")
        picture(page, "sign-in")
        page.fill("#token", token)
        with page.expect_response("**/console/live/cluster"):
            page.keyboard.press("Enter")
            page.wait_for_url("**/console/cluster")
        assert page.locator("form[method=post]").count() == 1, "a token that reads has the sign-out alone"
        assert token not in page.content()
        assert page.evaluate("document.cookie") == ""
        tokens = ask(guarded.urls["n1"], "GET", "/v1/tokens", headers=head).json["tokens"]
        mine = next(one["id"] for one in tokens if one["name"] == "visitor")
        ask(guarded.urls["n1"], "DELETE", f"/v1/tokens/{mine}", headers=head)
        page.wait_for_selector("#live-notice:has-text('signed out')")
        page.click("a:has-text('Topics')")
        page.wait_for_selector("h1:has-text('Sign in')")


def test_a_page_without_scripts_still_works(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    context = chromium.new_context(base_url=cluster.urls[cluster.living[0]], java_script_enabled=False)
    page = context.new_page()
    page.goto("/console/topics")
    page.fill("#q", "orders")
    page.keyboard.press("Enter")
    page.wait_for_url("**q=orders**")
    assert page.locator("#topics tbody tr").count() == 1
    context.close()


def test_members_are_drained_added_and_removed(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    """The last test of this cluster: its leader leaves it."""
    leader = cluster.leader()
    here, other = (name for name in cluster.names if name != leader)

    def act(form: str, button: str, notice: str, **fields: str) -> None:
        page.click(f"summary:has-text('{form}')")
        for field, value in fields.items():
            place = page.locator(f"#{field.replace('_', '-')}")
            (place.select_option if place.evaluate("(one) => one.tagName") == "SELECT" else place.fill)(value)
        page.click(f"button:text-is('{button}'):visible")
        landed(page, f".notice:has-text('{notice}')")

    with opened(chromium, cluster.urls[here]) as page:
        page.goto("/console/cluster")
        act("Drain…", "Go", f"{other} is drained", d_node=other)
        act("Drain…", "Go", f"{other} takes part again", d_node=other, d_undo="yes")
        act("Add a member…", "Add", "n4 is added", a_name="n4", a_raft="127.0.0.1:9")
        page.wait_for_selector("#members tr:has-text('n4') .badge.learner")
        act("Remove a member…", "Remove", "n4 is no member any more", r_node="n4", r_typed="n4")
        act("Remove a member…", "Remove", f"{leader} is no member any more", r_node=leader, r_typed=leader)
        page.wait_for_selector(f"#terms tbody tr:first-child:has-text('{leader} handed over: it is removed')")
        page.wait_for_function("() => document.querySelectorAll('#members tbody tr').length === 2")
