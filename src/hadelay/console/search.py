"""The search of every page: messages by id or key, topics and schedules by name, batches by key."""

from functools import partial
from typing import Any

from hadelay.api.batches import Batch
from hadelay.api.messages import Message
from hadelay.console.messages import TONES, find_named
from hadelay.console.visit import Pages, Visit
from hadelay.errors import BadRequest, NotFound
from hadelay.http.answers import Answer
from hadelay.rules.publishing import check_batch_key

pages = Pages()

#: Limits: topics and schedules that a search shows, names that a field suggests, and characters of the searched text.
_SHOWN, _OFFERED, _CHARS = 20, 12, 256


@pages.get("/console/search")
async def search(visit: Visit) -> Answer:
    """Search messages, topics, schedules and batches. A single result redirects to its page; so does a topic or
    schedule with exactly this name."""
    text = visit.query.get("q", "").strip()[:_CHARS]
    if not text:
        return visit.go("/console/messages")
    may = partial(visit.may, "read")
    messages = await _messages(visit, text)
    topics, count = await visit.service.overview.find_topics(text, "name", 0, _SHOWN, may=may, stale=visit.stale)
    found = await visit.service.schedules.page(text, "", _SHOWN, stale=visit.stale, may=may)
    pages = [f"/console/messages/{one.id}" for one in messages]
    pages += [f"/console/topics/{one.topic}" for one in topics if len(topics) == 1 or one.topic == text]
    pages += [f"/console/schedules/{one.schedule}" for one in found.schedules if one.schedule == text or not topics]
    batch = await _batch(visit, text)
    pages += [] if batch is None else [f"/console/batches/{batch.batch}"]
    if len(pages) == 1:
        return visit.go(pages[0])
    values: dict[str, Any] = {
        "q": text, "messages": messages, "topics": topics, "count": count, "schedules": found.schedules, "tones": TONES,
        "batch": batch,
    }  # fmt: skip
    return visit.page("search.html", active="", title=f"Search for {text}", **values)


async def _messages(visit: Visit, text: str) -> list[Message[str]]:
    try:
        return await find_named(visit, "", text)
    except NotFound:
        return []


async def _batch(visit: Visit, text: str) -> Batch[str] | None:
    """The batch with this key, if there is one that the visitor may read."""
    try:
        batch = await visit.service.batches.get(check_batch_key(text), stale=visit.stale)
    except (BadRequest, NotFound):
        return None
    return batch if visit.may("read", batch.topic) else None


@pages.get("/console/names")
async def names(visit: Visit) -> Answer:
    """Names of topics that contain a text, as suggestions for fields that take a topic."""
    text, may = visit.query.get("q", "").strip()[:_CHARS], partial(visit.may, "read")
    found, _ = await visit.service.overview.find_topics(text, "name", 0, _OFFERED, may=may, stale=True)
    return visit.json([one.topic for one in found])
