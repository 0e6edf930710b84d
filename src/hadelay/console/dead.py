"""The pages of dead letters: topics that have some, and the letters of one topic, grouped by the error."""

import re
from collections import Counter
from functools import partial
from typing import Any

from hadelay.api.messages import DeadLetter
from hadelay.api.text import parse_id
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import BadRequest, Conflict
from hadelay.http.answers import Answer
from hadelay.model import MAX_RATE

pages = Pages()

#: Number of dead letters that a page lists, and number that it groups by error: as many as one request redrives.
PAGE, GROUPED = 200, 1_000
#: Limit of topics on the page of topics with dead letters.
_TOPICS = 100
_CURSOR = re.compile(r"[0-9a-f]{32}")
_NUMBERS = re.compile(r"\d+")


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
        "topic": topic, "letters": shown, "groups": group(found), "wanted": wanted, "cursor": cursor,
        "read": len(found), "after": "" if after is None else after.hex(), "error_of": error_of,
    }  # fmt: skip
    return visit.page("dead_topic.html", active="dead", title=f"Dead letters of {visit.topic}", **values)


def error_of(letter: DeadLetter[str]) -> str:
    """Group of a letter: the reason of its last failed attempt, with # in place of numbers."""
    last = letter.errors[-1] if letter.errors else None
    if last is None:
        return "no attempt failed"
    return _NUMBERS.sub("#", last.reason) if last.reason else last.event.replace("_", " ")


def group(letters: list[DeadLetter[str]]) -> list[tuple[str, int, str]]:
    """Group letters by their error. Returns (error, number of letters, ids of the letters), largest group first."""
    counts = Counter(map(error_of, letters))
    ids: dict[str, list[str]] = {error: [] for error in counts}
    for letter in letters:
        ids[error_of(letter)].append(letter.id)
    return [(error, number, " ".join(ids[error])) for error, number in counts.most_common()]


def _home(visit: Visit, notice: str) -> Answer:
    return visit.go(f"/console/topics/{visit.topic}/dead", notice)


@pages.post("/console/topics/{topic}/dead/redrive")
async def redrive(visit: Visit) -> Answer:
    """Redrive the chosen letters. The form has fields `id`, each with one or more message ids."""
    visit.need("admin", visit.topic)
    ids = [parse_id(text) for field in visit.texts("id") for text in field.split()]
    if not ids:
        raise BadRequest("choose at least one letter")
    if len(ids) > GROUPED:
        raise BadRequest(f"{len(ids)} letters; at most {GROUPED} at once")
    outcomes = Counter(await visit.service.messages.redrive(visit.topic, list(dict.fromkeys(ids)), visit.actor))
    done = outcomes.pop("redriven", 0)
    rest = "".join(f"; {number} not: {outcome.replace('_', ' ')}" for outcome, number in outcomes.items())
    return _home(visit, f"{done} redriven{rest}.")


@pages.post("/console/topics/{topic}/dead/redrive-all")
async def redrive_all(visit: Visit) -> Answer:
    visit.need("admin", visit.topic)
    rate: float | None = None
    if text := visit.text("rate"):
        try:
            rate = float(text)
        except ValueError:
            rate = 0
        if not 0 < rate <= MAX_RATE:
            raise BadRequest(f"rate: messages per second, more than 0 and at most {MAX_RATE}, not {text[:40]!r}")
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
