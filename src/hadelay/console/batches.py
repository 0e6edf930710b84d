"""The pages Batches and Batch: progress, outcomes, callback and failures of batches; seal and cancel."""

from functools import partial
from typing import Any

from hadelay.api.batches import Batch, Batches
from hadelay.console.messages import TONES, now
from hadelay.console.problems import Wrong
from hadelay.console.visit import Pages, Visit
from hadelay.http.answers import Answer
from hadelay.rules.batches import cursor_of
from hadelay.rules.publishing import check_batch_key

pages = Pages()

#: Number of batches, or of failures of one batch, on a page.
_PAGE = 100
#: Limit of calls of the service for one page: a call may find no batch that the visitor may read.
_CALLS = 10
#: Condition for the callback of an unfinished batch, in words, by the batch's `on`.
_AWAITED = {
    "complete": "once all members are settled",
    "success": "once all members are acked",
    "death": "once all members are settled, if one is a dead letter",
}


@pages.get("/console/batches")
async def overview(visit: Visit) -> Answer:
    """List all batches, the newest first. If the query has a key, redirect to the batch with this key."""
    if key := visit.query.get("q", "").strip():
        return visit.go(f"/console/batches/{check_batch_key(key)}")
    page = await _page(visit)
    values: dict[str, Any] = {
        "batches": page.batches, "after": page.cursor or "", "cursor": _cursor(visit), "first": _first(page),
        **_shared(visit),
    }  # fmt: skip
    return visit.page("batches.html", active="batches", title="Batches", **values)


def _cursor(visit: Visit) -> str:
    return visit.query.get("cursor", "")[:20]


async def _page(visit: Visit) -> Batches:
    """Batches that the visitor may read, from the query's cursor on. If ten calls in a row found none, the page is
    empty, but has a cursor for the next page."""
    may = partial(visit.may, "read")
    page = await visit.service.batches.page(cursor_of(_cursor(visit) or None), _PAGE, stale=visit.stale, may=may)
    for _ in range(1, _CALLS):
        if page.batches or page.cursor is None:
            break
        page = await visit.service.batches.page(cursor_of(page.cursor), _PAGE, stale=visit.stale, may=may)
    return page


def _first(page: Batches) -> str:
    """Key of the first batch of a page. Once a new batch is the first one, an open page reloads its list."""
    return page.batches[0].batch if page.batches else "none"


def _shared(visit: Visit) -> dict[str, Any]:
    return {"shares": shares, "tone": tone, "now": now(visit)}


@pages.live("/console/live/batches")
def live_rows(visit: Visit) -> tuple[str, Any]:
    """Stream the rows of a list of batches that a browser shows."""

    async def frame() -> dict[str, Any]:
        page, shared = await _page(visit), _shared(visit)
        rows = {f"row-{one.batch}": visit.render("batch_row.html", {"one": one, **shared}) for one in page.batches}
        return {"html": rows, "state": _first(page)}

    return f"batches {_cursor(visit)} {visit.sees}", frame


def shares(batch: Batch[str]) -> tuple[float, float]:
    """Percentages of the members that were acked, and that failed. If any member failed, the second one is at least 1,
    so that one failure in a million can be seen."""
    if not batch.joined:
        return 0.0, 0.0
    failed = 100 * _failed(batch) / batch.joined
    failed = max(1.0, failed) if failed else 0.0
    return round(min(100 * batch.acked / batch.joined, 100 - failed), 2), round(failed, 2)


def _failed(batch: Batch[str]) -> int:
    return batch.dead + batch.expired + batch.cancelled


def tone(batch: Batch[str]) -> str:
    """Severity of a batch's state, as the name of a colour."""
    if batch.state in ("expired", "cancelled"):
        return "warn"
    if batch.dead:
        return "bad"
    if _failed(batch):
        return "warn"
    return "good" if batch.state == "done" else "calm"


def about_callback(batch: Batch[str]) -> str:
    """Whether and when the callback is published, in words."""
    if batch.callback_id:
        return "published"
    if batch.state == "expired":
        return "none: the batch expired before all members were settled"
    if batch.state != "done":
        return _AWAITED[batch.on]
    if batch.on == "death" and not batch.dead:
        return "none: no member became a dead letter"
    if batch.on == "success" and batch.acked < batch.joined:
        return f"none: of {batch.joined:,} members, {_failed(batch):,} were not acked"
    cancelled = "the batch was cancelled, or " if batch.on == "success" else ""
    return f"none: {cancelled}its topic could not take the message"


def _key(visit: Visit) -> str:
    return check_batch_key(visit.path["batch"])


async def _look(visit: Visit) -> dict[str, Any]:
    """Values for a batch's page. Raises NotFound; Forbidden without the right to read the topic of its callback."""
    key, start = _key(visit), cursor_of(_cursor(visit) or None) or 0
    found = await visit.service.batches.get(key, stale=visit.stale)
    visit.access.need_of("read", found.topic, "batch")
    failures = await visit.service.batches.failures(key, start, _PAGE, stale=visit.stale)
    return {
        "batch": found,
        "failures": failures.failures,
        "after": failures.cursor or "",
        "cursor": _cursor(visit),
        "callback": about_callback(found),
        "tones": TONES,
        **_shared(visit),
    }


#: Id of a part of a batch's page → its template.
_LIVE = {
    "said": "batch_said.html",
    "tiles": "batch_tiles.html",
    "about": "batch_facts.html",
    "failures": "batch_failures.html",
}


@pages.live("/console/live/batches/{batch}")
def live(visit: Visit) -> tuple[str, Any]:
    async def frame() -> dict[str, Any]:
        values = await _look(visit)
        html = {name: visit.render(part, values) for name, part in _LIVE.items()}
        return {"html": html, "state": values["batch"].state}

    return f"batch {_key(visit)} {_cursor(visit)} {visit.actor.token_id}", frame


@pages.get("/console/batches/{batch}")
async def show(visit: Visit) -> Answer:
    values = await _look(visit)
    return visit.page("batch.html", active="batches", title=f"Batch {values['batch'].batch}", **values)


async def _own(visit: Visit) -> str:
    """Get the batch's key from the path, and check access. Raises NotFound, and Forbidden if the visitor may not
    publish to the callback's topic."""
    key = _key(visit)
    visit.access.need_of("publish", await visit.service.batches.topic_of(key), "batch")
    return key


@pages.post("/console/batches/{batch}/seal")
async def seal(visit: Visit) -> Answer:
    """Seal the batch: no further message can join."""
    key = await _own(visit)
    found = await visit.service.batches.seal(key, visit.actor)
    said = "Sealed: no further message can join."
    if found.state in ("cancelled", "expired"):
        said = f"The batch is {found.state} already: nothing was changed."
    return visit.go(f"/console/batches/{key}", said)


@pages.post("/console/batches/{batch}/cancel")
async def cancel(visit: Visit) -> Answer:
    """Begin to cancel the members that wait, after the person typed the key of the batch."""
    key = await _own(visit)
    if visit.text("typed") != key:
        raise Wrong("typed", f"Type the key of the batch, {key}, to confirm.")
    found = await visit.service.batches.cancel(key, visit.actor)
    said = "The members that wait are being cancelled; leased ones go on."
    if found.state in ("done", "expired"):
        said = f"The batch is {found.state}: no member is left to cancel."
    return visit.go(f"/console/batches/{key}", said)
