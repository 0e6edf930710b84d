"""Pages of the console in a real Chromium, and what tests do with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

PICTURES = os.environ.get("HADELAY_SCREENSHOTS")
WIDE, NARROW = {"width": 1280, "height": 860}, {"width": 360, "height": 740}
#: Widths between these, at which nothing may be cut off either.
WIDTHS = (1024, 1440)
#: Sizes of the window, each in both colour schemes.
LOOKS = [(size, scheme) for size in (WIDE, NARROW) for scheme in ("light", "dark")]
PATHS = {
    "overview": "/console/", "topics": "/console/topics", "topic": "/console/topics/orders",
    "busy": "/console/topics/checkouts" if PICTURES else "/console/topics/reminders",
    "find": "/console/messages?topic=orders", "message": "/console/messages/{dead}", "dead": "/console/dead",
    "letters": "/console/topics/payments/dead", "cluster": "/console/cluster", "access": "/console/access",
    "scheduled": "/console/messages/{scheduled}", "schedules": "/console/schedules?cron=0+9+*+*+mon-fri",
    "schedule": "/console/schedules/report", "jobs": "/console/jobs?action=cancel&topic=orders",
    "job": "/console/jobs/{job}", "long": "/console/topics/{long}", "longest": "/console/messages/{longest}",
    "group": "/console/topics/tenants/group?q=customer-17",
    "list": "/console/messages", "consumers": "/console/consumers", "groups": "/console/groups",
    "schedule-form": "/console/schedules/report/edit", "settings": "/console/topics/reminders?open=settings",
    "search": "/console/search?q=e", "retrying": "/console/topics/{long}/retrying",
    "batches": "/console/batches", "batch": "/console/batches/import-7",
}  # fmt: skip
#: Pictures of docs/images; the others are for the eyes of who changes a page.
IN_DOCS = {
    "overview-light-1280": "console-overview", "message-light-1280": "console-message",
    "letters-light-1280": "console-dead-letters", "busy-light-1280": "console-topic",
}  # fmt: skip


@contextmanager
def opened(chromium: Any, url: str) -> Iterator[Any]:
    """A page in a profile of its own. Afterwards: no script failed, and the policy had nothing to refuse."""
    context = chromium.new_context(viewport=WIDE, base_url=url)
    page = context.new_page()
    page.set_default_timeout(15_000)
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    try:
        yield page
        assert [text for text in wrong if "Failed to load resource" not in text] == []
    finally:
        context.close()


def reached(page: Any, selector: str) -> None:
    """Wait for an element of the next page, and for the scripts of that page: keys pressed before go nowhere."""
    page.wait_for_selector(selector)
    page.wait_for_load_state("load")


def picture(page: Any, name: str) -> None:
    if not PICTURES:
        return
    from PIL import Image

    path = Path(PICTURES) / f"{IN_DOCS.get(name, name)}.png"
    page.screenshot(path=str(path))
    with Image.open(path) as opened_image:
        pixels = np.asarray(opened_image.convert("RGB"), np.int32)
    # The most frequent colours, exactly: averages would change the background, or small dots.
    codes, where, counts = np.unique(pixels @ (1 << 16, 1 << 8, 1), return_inverse=True, return_counts=True)
    colours = np.stack([codes >> 16, codes >> 8 & 255, codes & 255], axis=1)
    palette = colours[np.argsort(-counts)[:256]]
    nearest = ((colours[:, None] - palette) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    image = Image.fromarray(nearest[where].reshape(pixels.shape[:2]), "P")
    image.putpalette(palette.astype(np.uint8).tobytes())
    image.save(path, optimize=True)


#: Script that tells of the first paint. Playwright's own waits run scripts in the page, which delay the paint.
_TELL = (
    "new PerformanceObserver((list) => { if (list.getEntriesByName('first-contentful-paint').length) "
    "console.log('painted'); }).observe({type: 'paint', buffered: true})"
)


#: Script that finds what sticks out: of a card, of a tile, of the page.
_CUT = """() => [
  ...[...document.querySelectorAll('.card')].filter((one) => one.scrollWidth > one.clientWidth + 1),
  ...[...document.querySelectorAll('.tile dd')].filter((one) => one.scrollWidth > one.clientWidth + 1),
  ...(document.documentElement.scrollWidth > innerWidth ? [document.body] : []),
].map((one) => `${one.tagName} ${one.className} ${one.textContent.trim().slice(0, 60)}`)"""


def fits(page: Any) -> list[str]:
    """Elements that are cut off, or wider than their place, at the present width."""
    return list(page.evaluate(_CUT))


def first_paint(page: Any, path: str) -> tuple[float, float]:
    """Open a page with a cold cache. Returns KiB over the wire, charts included, and milliseconds to the first
    paint."""
    page.goto("/livez")
    page.add_init_script(_TELL)
    with page.expect_console_message(lambda said: said.text == "painted"):
        page.goto(path, wait_until="commit")
    page.wait_for_load_state("load")
    page.wait_for_function("() => !document.querySelector('meta[name=charts]') || document.querySelector('.legend')")
    size = (
        "performance.getEntriesByType('resource').filter((one) => one.initiatorType !== 'other')"
        ".reduce((n, one) => n + one.transferSize, performance.getEntriesByType('navigation')[0].transferSize)"
    )
    paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return page.evaluate(size) / 1024, page.evaluate(paint)


def made_frames(page: Any) -> Any:
    """Put a stream of our own in place of the page's stream; the returned function shows the page one frame."""
    page.add_init_script(
        "window.EventSource = class { constructor() { window.made = {}; } close() {} "
        "addEventListener(name, take) { window.made[name] = take; } }"
    )

    def show(**frame: Any) -> None:
        page.wait_for_function("() => window.made && made.frame")
        page.evaluate("(frame) => made.frame({data: JSON.stringify(frame)})", frame)

    return show
