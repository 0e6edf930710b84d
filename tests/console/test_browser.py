"""The console in a real Chromium, at a cluster of three nodes. HADELAY_SCREENSHOTS=DIR writes pictures for the docs."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.conftest import make_token
from tests.console.pages import (
    LOOKS,
    NARROW,
    PATHS,
    PICTURES,
    WIDTHS,
    first_paint,
    fits,
    made_frames,
    opened,
    picture,
    reached,
)
from tests.console.seeds import fill, sure, use
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
    """With a cold cache a page is at most 50 KiB over the wire, as docs/howto/console.md says. The test prints the time
    of the first paint, since machines differ."""
    with opened(chromium, cluster.urls["n1"]) as page:
        kib, paint_ms = first_paint(page, PATHS[name].format(**ids))
        print(f"{name}: {kib:.1f} KiB, first paint after {paint_ms:.0f} ms")
        assert kib < 50
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
            assert fits(page) == [], size
            page.evaluate("Promise.all(document.getAnimations().map((one) => one.finished.catch(() => null)))")
            found = page.evaluate("axe.run({resultTypes: ['violations'], preload: false})")["violations"]
            bad = [
                (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"])
                for one in found
                if one["impact"] in ("serious", "critical")
            ]
            assert bad == [], (size, scheme)
            picture(page, f"{name}-{scheme}-{size['width']}")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 860})
            page.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 160))")
            assert fits(page) == [], width


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
        page.wait_for_selector("#preview:has-text('→')")
        page.keyboard.press("Enter")
        reached(page, ".notice:has-text('Rescheduled')")
        assert page.locator(".undo button").inner_text() == "Undo"
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

        assert [tiles_with(n) for n in (1, 0)] == [top] * 2
        lower = tiles_with(60)
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
        reached(page, ".notice.warn:has-text('INC-13')")
        page.click("button:has-text('Resume')")
        reached(page, ".notice:has-text('Resumed')")
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


def test_lists_are_live_and_rows_stay_in_their_places(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    cluster.publish_many("n1", "live-1", ["x"] * 3, delay="2h")
    with opened(chromium, cluster.urls["n2"]) as page:
        page.goto("/console/topics?q=live-")
        page.wait_for_selector("#row-live-1 td:nth-child(2):text-is('3')")
        cluster.publish_many("n1", "live-1", ["x"] * 4, delay="2h")
        page.wait_for_selector("#row-live-1 td:nth-child(2):text-is('7')")
        page.fill("#q", "tri")
        page.wait_for_selector("#topics [data-stream*='q=tri']")
        sure(cluster, "POST", "/v1/topics/trials:resume", None)
        page.wait_for_function("() => !document.querySelector('#row-trials .badge.paused')")
        sure(cluster, "POST", "/v1/topics/trials:pause", {"reason": "receiver is down, INC-12"})
        page.wait_for_selector("#row-trials .badge.paused")
        page.goto("/console/schedules/cleanup")
        sure(cluster, "POST", "/v1/schedules/cleanup:pause", None)
        page.wait_for_selector(".verdict:has-text('paused')")
        page.wait_for_selector("#actions button:has-text('Resume')")
        sure(cluster, "POST", "/v1/schedules/cleanup:resume", None)
        page.wait_for_selector("#actions summary:has-text('Pause…')")


def test_verdict_facts_and_actions_of_a_message_change_together(
    cluster: Cluster, ids: dict[str, str], chromium: Any
) -> None:
    message = cluster.publish("n1", "together", b"x", "?delay=1h")
    with opened(chromium, cluster.urls["n1"]) as page:
        with page.expect_response(f"**/console/live/messages/{message}"):
            page.goto(f"/console/messages/{message}")
        page.click("summary:has-text('Cancel…')")
        assert cluster.ask("n1", "DELETE", f"/v1/messages/{message}").status == 200
        page.wait_for_selector(".verdict:has-text('Cancelled')")
        page.wait_for_selector("#live-notice:has-text('The message is cancelled now.')")
        assert page.locator("#actions summary").count() == 1, "a form that somebody reads stays"
        page.keyboard.press("Escape")
        page.wait_for_function("() => !document.querySelector('#actions summary')")


def test_a_second_click_opens_no_other_form(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/topics/invoices")
        places = "[...document.querySelectorAll('#actions summary')].map((one) => one.getBoundingClientRect().x)"
        before = page.evaluate(places)
        page.dblclick("summary:has-text('Pause…')")
        assert page.locator("details.confirm[open] summary").inner_text() == "Pause…"
        assert page.evaluate(places) == before, "nothing moves"
        page.mouse.click(900, 700)
        assert page.locator("details.confirm[open]").count() == 0


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
    answers: list[Any] = [None, {"at": [1_800_000_000, 1_800_000_010], "deaths": [[0, 1]]}]
    with opened(chromium, cluster.urls["n1"]) as page:
        page.add_init_script("const wait = setTimeout; window.setTimeout = (run, ms) => wait(run, ms / 20);")
        page.route(
            "**/console/charts/overview",
            lambda route: route.fulfill(json=answer) if (answer := answers.pop(0)) else route.fulfill(status=503),
        )
        page.goto("/console/dead")
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
            page.click("button[data-move=back]")
        start, end = (int(n) for n in re.findall(r"(?:from|to)=(\d+)", back.value.url))
        assert end - start > 300 * 86_400_000


def test_a_bar_of_due_times_opens_its_messages(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/")
        page.wait_for_selector("[data-due] canvas")
        assert page.locator("[data-due] + .legend a").count() == 4, "the largest topics have links"
        page.focus("[data-due]")
        page.keyboard.press("ArrowRight")
        for _ in range(140):
            if (says := page.inner_text("#due-says")) and not re.match(r"0 from|\d+ messages", says):
                break
            page.keyboard.press("ArrowRight")
        count = re.match(r"([\d,]+) from \w{3} \d+ \w{3}, ", says)[1]  # type: ignore[index]
        page.keyboard.press("Enter")
        reached(page, f"caption:has-text('of {count} messages of all topics')")
        assert re.search(r"from=\d{4}-\d\d-\d\dT\d\d%3A\d\d%3A00Z", page.url), page.url
        page.goto("/console/topics/invoices")
        page.wait_for_selector("[data-due] canvas")
        page.click("button[data-range=year]")
        page.wait_for_function("() => document.querySelector('#due-says').textContent.includes('day')")
        page.click("#due-list")
        reached(page, "caption:has-text('messages of invoices in due order')")


def test_rows_and_pages_are_reached_by_keys(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n2"]) as page:
        page.goto("/console/topics")
        page.wait_for_load_state("load")
        page.keyboard.press("?")
        page.wait_for_selector("dialog.keys:has-text('g s'):has-text('Schedules')")
        page.keyboard.press("Escape")
        page.wait_for_selector("dialog.keys", state="hidden")
        page.keyboard.press("g")
        page.keyboard.press("m")
        reached(page, "h1:has-text('Messages')")
        page.evaluate("document.activeElement.blur()")
        for key in ("j", "x", "j", "j", "k", "x"):
            page.keyboard.press(key)
        assert page.inner_text(".chosen") == "2 chosen"
        assert page.locator("tbody tr:nth-child(2) input:checked").count() == 1
        page.check("th.choose input")
        assert re.fullmatch(r"(4\d|50) chosen", page.inner_text(".chosen"))
        page.keyboard.press("/")
        assert page.evaluate("document.activeElement.id") == "search", "a box is no field in which a person types"
        page.keyboard.type("orders-7/x j")
        assert page.input_value("#search") == "orders-7/x j", "keys in a field are text"
        page.fill("#search", "emails-3")
        page.keyboard.press("Enter")
        reached(page, "h1:has-text('emails-3')")
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.click("button[aria-label='Copy the key']")
        page.wait_for_selector("button[data-done=copied]")
        assert page.evaluate("navigator.clipboard.readText()") == "emails-3"
        page.click("button[aria-label='Copy the body']")
        page.wait_for_selector("button[aria-label='Copy the body'][data-done=copied]")
        assert '"order"' in page.evaluate("navigator.clipboard.readText()")
        page.goto("/console/jobs")
        page.type("#topic", "remin")
        page.wait_for_function("() => document.querySelector('#topic-names option[value=reminders]') !== null")


#: Topic of some of the everyday jobs.
_DAILY = "jobs-of-a-day"


class Hand:
    """A person with a mouse and a keyboard, whose clicks and loaded pages count. Fields that are typed into count as
    clicks, and so does the Enter key in place of a button, except in the search."""

    def __init__(self, page: Any) -> None:
        self.page, self.clicks, self.loads = page, 0, 0
        page.on("load", self._loaded)

    def _loaded(self, _: Any) -> None:
        self.loads += 1

    def rest(self) -> tuple[int, int]:
        """Stop counting; returns (clicks, pages)."""
        self.page.remove_listener("load", self._loaded)
        return self.clicks, self.loads

    def click(self, selector: str) -> None:
        self.clicks += 1
        self.page.click(selector)

    def type(self, selector: str, text: str, *, enter: bool = False) -> None:
        self.click(selector)
        self.page.fill(selector, text)
        if enter:
            self.clicks += 1
            self.page.keyboard.press("Enter")

    def search(self, text: str) -> None:
        self.type("#search", text)
        self.page.keyboard.press("Enter")


def _plan(hand: Hand, key: str) -> None:
    """Create a schedule from a pattern."""
    hand.click("nav a:has-text('Schedules')")
    hand.click("a:text-is('New schedule')")
    for field, text in (("#when", "15m"), ("#name", f"every-{key}"), ("#topic", "chores")):
        hand.type(field, text)
    hand.click("button:text-is('Create')")


def _redrive(hand: Hand, key: str) -> None:
    hand.click("nav a:has-text('Dead letters')")
    hand.click("main a:text-is('mourned')")
    hand.click("a[aria-label^='Redrive letters']")
    hand.type("#group-rate", "50", enter=True)


def _tomorrow(hand: Hand, key: str) -> None:
    """Messages that fall due tomorrow from 9 to 10, of all topics."""
    hand.click("nav a:has-text('Messages')")
    hand.page.wait_for_selector("#from")
    day = time.strftime("%Y-%m-%d", time.gmtime(time.time() + 86_400))
    hand.type("#from", f"{day}T09:00:00")
    hand.type("#to", f"{day}T10:00:00", enter=True)


def _each(*steps: Any) -> Any:
    return lambda hand, key: [getattr(hand, step[0])(*(text.format(key) for text in step[1:])) for step in steps]


#: Everyday jobs → how a person does each from the first page, (clicks, pages loaded), and what stands there in the end.
JOBS: dict[str, tuple[Any, tuple[int, int], str]] = {
    "why a message waits": (_each(("search", "{}")), (1, 1), ".verdict:has-text('Due in')"),
    "reschedule": (
        _each(("search", "{}"), ("type", "#when", "3h"), ("click", "button:text-is('Reschedule')")),
        (3, 2), ".notice:has-text('Rescheduled')",
    ),
    "cancel": (
        _each(("search", "{}"), ("click", "summary:text('Cancel…')"), ("click", "button:text('Cancel the message')")),
        (3, 2), ".verdict:has-text('Cancelled')",
    ),
    "redrive one error": (_redrive, (5, 4), ".verdict:has-text('changed')"),
    "pause": (
        _each(("search", _DAILY), ("click", "summary:text('Pause…')"), ("click", "button:text('Pause hand-outs')")),
        (3, 2), ".notice:has-text('Paused')",
    ),
    "resume": (_each(("search", _DAILY), ("click", "button:text-is('Resume')")), (2, 2), ".notice:has-text('Resumed')"),
    "who consumes": (_each(("click", "nav a:has-text('Consumers')")), (1, 1), "tbody tr:has-text('shop-of-a-day')"),
    "what falls due tomorrow at nine": (_tomorrow, (4, 2), "caption:has-text('messages of all topics in due order')"),
    "create a schedule": (_plan, (6, 3), ".verdict:has-text('Every 15m')"),
    "a test message": (
        _each(("search", _DAILY), ("click", "button:text-is('Publish')")), (2, 2), ".notice:has-text('Published.')",
    ),
    "a token": (
        _each(
            ("click", "nav a:has-text('Access')"), ("type", "#name", "of-a-day"), ("type", "#scopes", "read"),
            ("click", "button:text-is('Create')"),
        ),
        (4, 2), ".secret",
    ),
}  # fmt: skip


def test_everyday_jobs_take_few_clicks_and_end_where_they_should(
    cluster: Cluster, ids: dict[str, str], chromium: Any
) -> None:
    now_s = int(time.time())
    nine_s = (now_s // 86_400 + 1) * 86_400 + 9 * 3_600 + 600
    sure(cluster, "PUT", "/v1/topics/mourned", {"max_attempts": 1})
    cluster.publish("n1", "mourned", b"x")
    leader = cluster.leader()
    cluster.settle("n1", "nack", cluster.receive(leader, "mourned", wait="5s"), reason="no route")
    cluster.publish("n1", "jobs-of-a-day", b"x", f"?deliver_at={nine_s * 1000}")
    cluster.publish("n1", "eaten-daily", b"x")
    # A lease is replicated: the next leader knows the consumer, too.
    cluster.receive(leader, "eaten-daily", consumer="shop-of-a-day", wait="5s", lease="10m")
    for n in range(len(JOBS)):
        cluster.publish("n1", "daily", b"x", f"?delay=1h&key=day-{n}")
    clicks = {}
    with opened(chromium, cluster.urls[leader]) as page:
        for n, (job, (do, _, end)) in enumerate(JOBS.items()):
            page.goto("/console/")
            page.wait_for_load_state("load")
            hand = Hand(page)
            do(hand, f"day-{n}")
            reached(page, end)
            clicks[job] = hand.rest()
    assert clicks == {job: most for job, (_, most, _) in JOBS.items()}


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
        reached(page, ".notice:has-text('Redriven')")
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
        page.click("summary:has-text('Redrive all…')")
        page.fill("#again", "1")
        page.keyboard.press("Enter")
        page.wait_for_selector(".confirm .wrong:has-text('Type the count')")
        page.fill("#again", page.inner_text("label[for=again] b"))
        page.click("button:text-is('Redrive')")
        page.wait_for_selector(".notice:has-text('Redriving')")
        until(lambda: cluster.topic("n1", "payments")["dead"] == 0, "all are redriven")


def test_a_webhook_is_tested_with_a_message(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/topics/reminders")
        page.fill("#p-body", '{"hello": 1}')
        page.click("button:text-is('Publish')")
        reached(page, ".notice:has-text('Published.')")
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
        reached(page, ".verdict:has-text('Due in 59 min')")
        page.click("button:text-is('Deliver now')")
        reached(page, ".notice:has-text('The message is due now.')")
        page.goto("/console/topics/invoices")
        page.click("summary:has-text('Change settings')")
        page.fill("#s-lease", "2m")
        page.keyboard.press("Enter")
        reached(page, ".notice:has-text('Changed: lease.')")
        page.wait_for_selector(".why:has-text('overdue by'):has-text('no consumer has asked')")


def test_a_schedule_is_previewed_triggered_and_paused(cluster: Cluster, ids: dict[str, str], chromium: Any) -> None:
    with opened(chromium, cluster.urls["n3"]) as page:
        page.goto("/console/schedules")
        page.fill("#cron", "0 9 * * mon-fri")
        page.keyboard.press("Enter")
        reached(page, ".said:has-text('09:00')")
        assert page.locator("ol.times li").count() == 10
        page.click("a:text-is('cleanup')")
        page.click("summary:has-text('Trigger…')")
        page.click("button:text-is('Trigger')")
        reached(page, ".notice:has-text('this is the message of cleanup')")
        page.goto("/console/schedules/cleanup")
        assert re.search(
            r"next in \d+ (min|s).*; the last one was .+ ago, its message is ready", page.inner_text(".verdict")
        )
        page.click("summary:has-text('Pause…')")
        page.click("button:text-is('Pause')")
        reached(page, ".verdict:has-text('paused')")
        page.click("button:text-is('Resume')")
        reached(page, ".notice:has-text('Resumed')")


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
        query = {"wait": "20s", "consumer": "shop-9"}
        waiting = cluster.later(cluster.ask, here, "POST", "/v1/topics/visited/receive?redirect=false", query)
        cluster.publish(here, "visited", b"x", "?delay=1h")
        until(lambda: cluster.topic(here, "visited").get("consumers"), "it waits", every=0.05)
        page.goto("/console/topics/visited")
        row = page.locator("#consumers tr:has-text('shop-9')")
        assert re.match(rf"shop-9\s+{here}\s+\S+ m?s\s+0", row.inner_text())
        assert "No message is ready." in page.inner_text(".why")
        cluster.publish(here, "visited", b"x")
        assert waiting.result(20).status == 200
        page.wait_for_selector("#consumers tr:has-text('shop-9'):has-text('asked')")


def test_typed_text_survives_the_end_of_the_session(guarded: Cluster, admin_token: str, chromium: Any) -> None:
    def sign_in(page: Any) -> None:
        page.goto("/console/new/schedule")
        page.fill("#token", admin_token)
        page.click("button:has-text('Sign in')")
        page.wait_for_selector("input[name=when]")

    with opened(chromium, guarded.urls["n1"]) as page:
        sign_in(page)
        for field, text in (("name", "survivor"), ("topic", "chores"), ("when", "0 9 * * *")):
            page.fill(f"input[name={field}]", text)
        page.context.clear_cookies()
        page.click("button:text-is('Create')")
        page.wait_for_selector("#wrong:has-text('You are signed out. Sign in again in another tab')")
        other = page.context.new_page()
        sign_in(other)
        other.close()
        page.click("button:text-is('Create')")
        page.wait_for_selector("#wrong:has-text('You signed in again')")
        page.click("button:text-is('Create')")
        page.wait_for_url("**/console/schedules/survivor")


def test_a_token_is_made_and_revoked_in_the_browser(guarded: Cluster, admin_token: str, chromium: Any) -> None:
    with opened(chromium, guarded.urls["n1"]) as page:
        page.goto("/console/access")
        page.fill("#token", admin_token)
        page.keyboard.press("Enter")
        reached(page, "h1:has-text('Access')")
        page.fill("#name", "night-watch")
        page.fill("#scopes", "read")
        page.keyboard.press("Enter")
        reached(page, ".secret")
        assert page.input_value(".secret input").startswith("hadelay_")
        page.goto("/console/access")
        assert page.locator(".secret").count() == 0
        page.click("summary[aria-label='Revoke night-watch…']")
        page.keyboard.press("Enter")
        reached(page, ".notice:has-text('The token night-watch is revoked.')")


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
        assert page.locator("form[method=post]").count() == 2, "a token that reads has the sign-out and the zone alone"
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


def test_the_page_of_retrying_messages_lives_and_delivers_the_chosen_one(cluster: Cluster, chromium: Any) -> None:
    sure(cluster, "PUT", "/v1/topics/limping", {"backoff": ["1h"]})
    cluster.publish_many("n1", "limping", ["x"] * 3)
    leased = until(
        lambda: cluster.receive(cluster.leader(), "limping", max=3, wait="1s", lease="10m"), "they are leased"
    )
    assert len(leased) == 3
    cluster.settle("n1", "nack", leased[:2], reason="HTTP 503")
    with opened(chromium, cluster.urls["n2"]) as page:
        page.goto("/console/topics/limping/retrying")
        page.wait_for_selector("h1:has-text('2 retrying messages of limping')")
        cluster.settle("n1", "nack", leased[2:], reason="HTTP 404")
        page.wait_for_selector("h1:has-text('3 retrying messages of limping')")
        page.wait_for_function("() => document.querySelectorAll('#messages tbody input').length === 3")
        page.locator("#messages tbody input").first.check()
        assert page.inner_text(".chosen") == "1 chosen"
        page.click("button:has-text('Deliver the chosen ones now')")
        reached(page, ".notice:has-text('has begun')")


def test_the_list_of_consumers_is_read_anew(cluster: Cluster, chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/consumers?q=latecomer")
        page.wait_for_selector("text=No consumer matches.")
        cluster.publish("n1", "visited-late", b"x")
        until(
            lambda: cluster.receive(cluster.leader(), "visited-late", consumer="latecomer", wait="1s"), "it is leased"
        )
        page.wait_for_selector("#consumers tr:has-text('latecomer'):has-text('visited-late')", timeout=30_000)


def test_a_choice_goes_along_from_page_to_page_of_a_list(cluster: Cluster, chromium: Any) -> None:
    cluster.publish_many("n1", "paged", ["x"] * 60, delay="2h")
    with opened(chromium, cluster.urls["n1"]) as page:
        page.goto("/console/messages?topic=paged")
        page.locator("tbody input").first.check()
        page.click("a[rel=next]")
        page.wait_for_selector(".chosen:has-text('1 chosen, 1 of them on other pages')")
        page.locator("tbody input").first.check()
        assert page.inner_text(".chosen") == "2 chosen, 1 of them on other pages"
        page.click(".chooser button:has-text('Cancel…')")
        page.wait_for_url(re.compile(r"/console/jobs\?.*ids=\w{13}%2C\w{13}$"))
        page.wait_for_selector("#count:has-text('2 messages')")
        page.goto("/console/messages?topic=paged")
        assert page.inner_text(".chosen") == "0 chosen", "the choice was sent"


def test_a_narrow_screen_has_a_menu_with_all_pages(cluster: Cluster, chromium: Any) -> None:
    with opened(chromium, cluster.urls["n1"]) as page:
        page.set_viewport_size(NARROW)
        page.goto("/console/topics")
        access = page.locator(".side nav a[data-key=a]")
        assert not access.is_visible()
        page.focus("#menu")
        page.keyboard.press("Space")
        access.click()
        page.wait_for_url("**/console/access")


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
        reached(page, f".notice:has-text('{notice}')")

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
