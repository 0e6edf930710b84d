"""The page of a topic's retrying messages, grouped by their last error."""

from typing import Any
from urllib.parse import urlencode

from hadelay.api.messages import Failure, Message
from hadelay.api.service import ListRequest
from hadelay.api.text import LARGEST_MS
from hadelay.api.topicsettings import Topic
from hadelay.codec.jobcommands import JobSpec
from hadelay.console.dead import GROUPED, PAGE, begin, chosen, counted, rate_of
from hadelay.console.errorgroups import error_of, grouped
from hadelay.console.messages import now
from hadelay.console.visit import Pages, Visit
from hadelay.http.answers import Answer
from hadelay.model import FIRST, encode_id
from hadelay.rules.access import need_job

pages = Pages()

#: Interval at which an open page reloads its lists, in ms.
_AGAIN_MS = 10_000


@pages.get("/console/topics/{topic}/retrying")
async def show(visit: Visit) -> Answer:
    """Messages of a topic that wait after a failed attempt, those due first, grouped by their last error."""
    visit.need("read", visit.topic)
    topic = await visit.service.topics.get_topic(visit.topic, stale=visit.stale)
    ask = ListRequest(frozenset(), 0, LARGEST_MS, (), FIRST, GROUPED, retrying=True)
    found, behind = await visit.service.messages.list_messages(visit.topic, ask, stale=visit.stale)
    wanted = visit.query.get("error")
    shown = found if wanted is None else [message for message in found if error_of(_last(message)) == wanted]
    visit.site.sampler.looked_at(visit.topic)
    values: dict[str, Any] = {
        "topic": topic, "messages": shown[:PAGE], "groups": grouped(map(_failed, found)), "now": now(visit),
        "wanted": wanted, "state": _state(visit, topic), "read": len(found), "more": behind is not None,
        "left": max(0, len(shown) - PAGE),
    }  # fmt: skip
    return visit.page("retrying.html", active="dead", title=f"Retrying messages of {visit.topic}", **values)


@pages.live("/console/live/topics/{topic}/retrying")
def live(visit: Visit) -> tuple[str, Any]:
    return counted(visit, "retrying", lambda topic: _state(visit, topic))


def _state(visit: Visit, topic: Topic[str]) -> str:
    """Value whose change makes an open page reload its lists. It changes with the number of messages, and every
    _AGAIN_MS, because messages may fail again while their number stays the same."""
    period = visit.service.access.now_ms() // _AGAIN_MS if topic.retrying else 0
    return f"{topic.retrying} {period}"


def _last(message: Message[str]) -> Failure[str] | None:
    return message.retry.last if message.retry is not None else None


def _failed(message: Message[str]) -> tuple[Failure[str] | None, str]:
    last = _last(message)
    return last, message.published_at if last is None else last.at


@pages.post("/console/topics/{topic}/retrying/deliver")
async def deliver(visit: Visit) -> Answer:
    """Make the chosen messages due now, by a job."""
    need_job(visit.access, "deliver_now", visit.topic)
    return await begin(visit, JobSpec("deliver_now", visit.topic, ids=tuple(chosen(visit)), rate=rate_of(visit)))


@pages.post("/console/topics/{topic}/retrying/deliver-all")
async def deliver_all(visit: Visit) -> Answer:
    """Make all retrying messages of the topic, or those with one last error, due now, by a job."""
    need_job(visit.access, "deliver_now", visit.topic)
    spec = JobSpec("deliver_now", visit.topic, error=visit.text("error"), retrying=True, rate=rate_of(visit))
    return await begin(visit, spec)


@pages.post("/console/topics/{topic}/retrying/cancel")
async def cancel(visit: Visit) -> Answer:
    """Go to the page that counts the chosen messages, and cancels them once their number is typed."""
    need_job(visit.access, "cancel", visit.topic)
    ids = ",".join(map(encode_id, chosen(visit)))
    return visit.go(f"/console/jobs?{urlencode({'action': 'cancel', 'topic': visit.topic, 'ids': ids})}")
