"""The pages of dead letters: topics with dead letters, and the dead letters of one topic, grouped by their errors."""

import re
import secrets
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.parse import urlencode

from hadelay.api.messages import DeadLetter, Failure
from hadelay.api.text import parse_id
from hadelay.api.topicsettings import Topic
from hadelay.codec.jobcommands import MAX_IDS, JobSpec
from hadelay.console.errorgroups import error_of, grouped
from hadelay.console.messages import now
from hadelay.console.problems import Wrong
from hadelay.console.samples import last_point
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import BadRequest, Conflict
from hadelay.http.answers import Answer
from hadelay.model import encode_id
from hadelay.rules.messages import check_rate

pages = Pages()

#: Number of dead letters that a page lists, which is also the limit of ids in a bulk job; and number of dead letters
#: that it groups by error.
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
    retries, retrying = await visit.service.overview.find_topics(
        "",
        "retrying",
        0,
        _TOPICS,
        may=lambda name: visit.may("read", name),
        stale=visit.stale,
        choice="retrying",
    )
    values: dict[str, Any] = {"topics": found, "count": count, "retries": retries, "retrying": retrying}
    return visit.page("dead.html", active="dead", title="Dead letters", **values)


@pages.live("/console/live/dead")
def live(visit: Visit) -> tuple[str, Any]:
    """Stream of the page of topics with dead letters: rows of the topics that the page showed first, in the same
    order."""
    names = list[str]()

    async def frame() -> dict[str, Any]:
        if not names:
            found, _ = await visit.service.overview.find_topics(
                "", "dead", 0, _TOPICS, may=lambda name: visit.may("read", name), stale=visit.stale, choice="dead"
            )
            names.extend(topic.topic for topic in found)
        topics = await visit.service.overview.topics_of(names, stale=visit.stale)
        rows = {f"row-{topic.topic}": visit.render("dead_row.html", {"topic": topic}) for topic in topics}
        return {"html": rows, "point": last_point(visit.site.sampler.charts()) if visit.may("read") else None}

    return f"dead {visit.sees}", frame


@pages.live("/console/live/topics/{topic}/dead")
def live_letters(visit: Visit) -> tuple[str, Any]:
    return counted(visit, "dead", lambda topic: str(topic.dead))


def counted(visit: Visit, noun: str, state_of: Callable[[Topic[str]], str]) -> tuple[str, Any]:
    """Stream of a page whose title has a number of messages of a topic. The page reloads its lists when the value of
    `state_of` changes."""
    visit.need("read", visit.topic)

    async def frame() -> dict[str, Any]:
        topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
        html = {f"{noun}-count": visit.render(f"{noun}_count.html", {"topic": topic})}
        point = last_point(visit.site.sampler.topic_charts(topic.topic))
        return {"html": html, "state": state_of(topic), "point": point}

    return f"{noun} {visit.topic}", frame


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
        shown, after = [letter for letter in found if error_of(_last(letter)) == wanted], end
    topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    visit.site.sampler.looked_at(visit.topic)
    values: dict[str, Any] = {
        "topic": topic, "letters": shown, "groups": grouped((_last(letter), letter.died_at) for letter in found),
        "wanted": wanted, "cursor": cursor, "read": len(found), "after": "" if after is None else after.hex(),
        "now": now(visit),
    }  # fmt: skip
    return visit.page("dead_topic.html", active="dead", title=f"Dead letters of {visit.topic}", **values)


def _last(letter: DeadLetter[str]) -> Failure[str] | None:
    return letter.errors[-1] if letter.errors else None


def _home(visit: Visit, notice: str) -> Answer:
    return visit.go(f"/console/topics/{visit.topic}/dead", notice)


@pages.post("/console/topics/{topic}/dead/redrive")
async def redrive(visit: Visit) -> Answer:
    """Redrive the chosen dead letters: at once, or by a job if a rate is given."""
    visit.need("admin", visit.topic)
    rate = rate_of(visit)
    if visit.text("all"):
        return await _redrive_all(visit, visit.text("error"), rate)
    ids = chosen(visit)
    if rate is not None:
        return await begin(visit, JobSpec("redrive", visit.topic, ids=tuple(ids), rate=rate))
    outcomes = Counter(await visit.service.messages.redrive(visit.topic, ids, visit.actor))
    done = outcomes.pop("redriven", 0)
    rest = "".join(f"; {number} not: {outcome.replace('_', ' ')}" for outcome, number in outcomes.items())
    return _home(visit, f"{done} redriven{rest}.")


def chosen(visit: Visit) -> list[int]:
    """Ids of the messages that the person chose. Raises BadRequest."""
    ids = list(dict.fromkeys(parse_id(text) for text in visit.texts("id")))
    if not ids:
        raise BadRequest("choose at least one message")
    if len(ids) > PAGE:
        raise BadRequest(f"{len(ids)} messages; at most {PAGE} at once")
    return ids


def rate_of(visit: Visit) -> float | None:
    """Messages per second from the form; None for no limit. Raises BadRequest."""
    if not (text := visit.text("rate")):
        return None
    try:
        return check_rate(float(text))
    except ValueError:
        raise Wrong("rate", f"{text[:40]!r} is not a number of messages per second.") from None


async def begin(visit: Visit, spec: JobSpec) -> Answer:
    """Begin a bulk job, and go to its page."""
    job = await visit.service.jobs.begin(spec, secrets.token_urlsafe(12), visit.actor)
    return visit.go(f"/console/jobs/{job.id}", f"Job {job.id} has begun.")


@pages.post("/console/topics/{topic}/dead/redrive-group")
async def redrive_group(visit: Visit) -> Answer:
    """Redrive all dead letters of the topic whose last error belongs to one group, by a job."""
    visit.need("admin", visit.topic)
    if not visit.text("error"):
        raise BadRequest("error: choose a group of errors")
    return await _redrive_all(visit, visit.text("error"), rate_of(visit))


async def _redrive_all(visit: Visit, error: str, rate: float | None) -> Answer:
    """Redrive the topic's dead letters with this error, by a job; without an error, redrive all of them."""
    if error:
        return await begin(visit, JobSpec("redrive", visit.topic, error=error, rate=rate))
    number = await visit.service.messages.redrive_all(visit.topic, rate, visit.actor)
    at = f" at {rate:g} per second" if rate else ""
    return _home(visit, f"Redriving {number:,} dead letters{at}.")


@pages.post("/console/topics/{topic}/dead/delete-chosen")
async def delete_chosen(visit: Visit) -> Answer:
    """Go to the page that counts the chosen dead letters, and deletes them once their number is typed."""
    visit.need("admin", visit.topic)
    some = {"error": visit.text("error")} if visit.text("all") else {"ids": ",".join(map(encode_id, chosen(visit)))}
    return visit.go(f"/console/jobs?{urlencode({'action': 'delete_dead', 'topic': visit.topic, **some})}")


@pages.post("/console/topics/{topic}/dead/redrive-all")
async def redrive_all(visit: Visit) -> Answer:
    """Redrive all dead letters of the topic, after the person typed their number."""
    visit.need("admin", visit.topic)
    rate, topic = rate_of(visit), await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    check_typed(visit.text("typed"), visit.text("shown"), topic.dead)
    return await _redrive_all(visit, "", rate)


def check_typed(typed: str, shown: str, present: int) -> None:
    """Check the count that a person typed to confirm an action. shown: count that the page showed. Raises BadRequest if
    another count was typed, and Conflict if the count has changed by more than a tenth since."""
    count = whole(shown, 15)
    if count is None or typed.replace(",", "") != shown:
        raise Wrong("typed", f"Type the count, {shown[:20]}, to confirm.")
    if abs(present - count) > max(10, count // 10):
        raise Conflict(f"the count changed meanwhile: it is {present:,} now; reload the page, and check it again")


@pages.post("/console/topics/{topic}/dead/delete")
async def delete(visit: Visit) -> Answer:
    """Delete all dead letters of the topic, after the person typed their number."""
    visit.need("admin", visit.topic)
    topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    check_typed(visit.text("typed"), visit.text("shown"), topic.dead)
    await visit.service.messages.purge(visit.topic, ["dead"], visit.actor)
    return _home(visit, f"Deleted: {topic.dead:,} dead letters.")
