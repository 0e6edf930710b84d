"""The pages of dead letters: topics that have some, and the letters of one topic, grouped by the error."""

import re
import secrets
from collections import Counter
from functools import partial
from typing import Any
from urllib.parse import urlencode

from hadelay.api.messages import DeadLetter
from hadelay.api.text import parse_id
from hadelay.codec.jobcommands import MAX_IDS, JobSpec
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import BadRequest, Conflict
from hadelay.http.answers import Answer
from hadelay.model import MAX_RATE, encode_id
from hadelay.words import error_group

pages = Pages()

#: Number of dead letters that a page lists, as many as one bulk job names; and number that it groups by error.
PAGE, GROUPED = MAX_IDS, 1_000
#: Limit of topics on the page of topics with dead letters.
_TOPICS = 100
_CURSOR = re.compile(r"[0-9a-f]{32}")


@pages.get("/console/dead")
async def overview(visit: Visit) -> Answer:
    """Topics with dead letters."""
    found, count = await visit.service.overview.find_topics(
        "", "dead", 0, _TOPICS, may=lambda name: visit.may("read", name), stale=visit.stale, choice="dead"
    )
    return visit.page("dead.html", active="dead", title="Dead letters", topics=found, count=count)


@pages.get("/console/topics/{topic}/dead")
async def letters(visit: Visit) -> Answer:
    """Dead letters of a topic, oldest first."""
    visit.need("read", visit.topic)
    cursor, wanted = visit.query.get("after", ""), visit.query.get("error")
    if cursor and not _CURSOR.fullmatch(cursor):
        raise BadRequest("after: expected a value from a link of this page")
    read = partial(visit.service.messages.dead_letters, visit.topic, body=False, stale=visit.stale)
    found, after = await read(bytes.fromhex(cursor), PAGE)
    shown, end = found, after
    if end is not None:
        more, end = await read(end, GROUPED - PAGE)
        found = found + more
    if wanted is not None:
        shown, after = [letter for letter in found if error_of(letter) == wanted], end
    topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    visit.site.sampler.looked_at(visit.topic)
    values: dict[str, Any] = {
        "topic": topic, "letters": shown, "groups": Counter(map(error_of, found)).most_common(), "wanted": wanted,
        "cursor": cursor, "read": len(found), "after": "" if after is None else after.hex(),
    }  # fmt: skip
    return visit.page("dead_topic.html", active="dead", title=f"Dead letters of {visit.topic}", **values)


def error_of(letter: DeadLetter[str]) -> str:
    """Group of a letter by its last error."""
    last = letter.errors[-1] if letter.errors else None
    return error_group(None, None) if last is None else error_group(last.event, last.reason)


def _home(visit: Visit, notice: str) -> Answer:
    return visit.go(f"/console/topics/{visit.topic}/dead", notice)


@pages.post("/console/topics/{topic}/dead/redrive")
async def redrive(visit: Visit) -> Answer:
    """Redrive the chosen letters: at once, or by a job if a rate is given."""
    visit.need("admin", visit.topic)
    ids, rate = _chosen(visit), _rate(visit)
    if rate is not None:
        return await _begin(visit, JobSpec("redrive", visit.topic, ids=tuple(ids), rate=rate))
    outcomes = Counter(await visit.service.messages.redrive(visit.topic, ids, visit.actor))
    done = outcomes.pop("redriven", 0)
    rest = "".join(f"; {number} not: {outcome.replace('_', ' ')}" for outcome, number in outcomes.items())
    return _home(visit, f"{done} redriven{rest}.")


def _chosen(visit: Visit) -> list[int]:
    """Ids of the letters that the person chose. Raises BadRequest."""
    ids = list(dict.fromkeys(parse_id(text) for text in visit.texts("id")))
    if not ids:
        raise BadRequest("choose at least one letter")
    if len(ids) > PAGE:
        raise BadRequest(f"{len(ids)} letters; at most {PAGE} at once")
    return ids


def _rate(visit: Visit) -> float | None:
    """Messages per second from the form; None for no limit. Raises BadRequest."""
    if not (text := visit.text("rate")):
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0
    if not 0 < rate <= MAX_RATE:
        raise BadRequest(f"rate: messages per second, more than 0 and at most {MAX_RATE}, not {text[:40]!r}")
    return rate


async def _begin(visit: Visit, spec: JobSpec) -> Answer:
    """Begin a bulk job, and go to its page."""
    job = await visit.service.jobs.begin(spec, secrets.token_urlsafe(12), visit.actor)
    return visit.go(f"/console/jobs/{job.id}", f"Job {job.id} has begun.")


@pages.post("/console/topics/{topic}/dead/redrive-group")
async def redrive_group(visit: Visit) -> Answer:
    """Redrive all letters of the topic whose last error is of one group, by a job."""
    visit.need("admin", visit.topic)
    if not visit.text("error"):
        raise BadRequest("error: choose a group of errors")
    return await _begin(visit, JobSpec("redrive", visit.topic, error=visit.text("error"), rate=_rate(visit)))


@pages.post("/console/topics/{topic}/dead/delete-chosen")
async def delete_chosen(visit: Visit) -> Answer:
    """Go to the page that counts the chosen letters, and deletes them once their number is typed."""
    visit.need("admin", visit.topic)
    ids = ",".join(map(encode_id, _chosen(visit)))
    return visit.go(f"/console/jobs?{urlencode({'action': 'delete_dead', 'topic': visit.topic, 'ids': ids})}")


@pages.post("/console/topics/{topic}/dead/redrive-all")
async def redrive_all(visit: Visit) -> Answer:
    visit.need("admin", visit.topic)
    rate = _rate(visit)
    number = await visit.service.messages.redrive_all(visit.topic, rate, visit.actor)
    at = f" at {rate:g} per second" if rate else ""
    return _home(visit, f"Redriving {number:,} dead letters{at}.")


def check_typed(typed: str, shown: str, present: int) -> None:
    """Check the count that a person typed before a purge. shown: count that the page showed. Raises BadRequest, and
    Conflict if the count has changed by more than a tenth since."""
    count = whole(shown, 15)
    if count is None or typed.replace(",", "") != shown:
        raise BadRequest(f"type the count, {shown[:20]}, to confirm")
    if abs(present - count) > max(10, count // 10):
        raise Conflict(f"the count changed meanwhile: it is {present:,} now; open the page again")


@pages.post("/console/topics/{topic}/dead/delete")
async def delete(visit: Visit) -> Answer:
    """Delete all letters of the topic, after the person typed their number."""
    visit.need("admin", visit.topic)
    topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    check_typed(visit.text("typed"), visit.text("shown"), topic.dead)
    await visit.service.messages.purge(visit.topic, ["dead"], visit.actor)
    return _home(visit, f"Deleted: {topic.dead:,} dead letters.")
