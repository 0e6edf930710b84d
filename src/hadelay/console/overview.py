"""The page Overview: rates, states, lateness, what falls due, alarms in words, members."""

import asyncio
import time
from contextlib import suppress
from typing import Any, NamedTuple

from hadelay.console.alarms import alarms
from hadelay.console.samples import Look, last_point
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import BadRequest, HadelayError
from hadelay.http.answers import Answer

pages = Pages()

_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
#: Ranges of "falls due in the next …", in ms.
SOON = (("minute", _MINUTE), ("hour", _HOUR), ("day", _DAY), ("month", 30 * _DAY))
#: Timeout in seconds of asking another shard for its leader.
_ASK_S = 1.0
#: Time in seconds for which all visitors share one count of the messages that fall due soon.
_SOON_S = 15.0
#: Histogram of due times: maximum number of bars; shortest and longest range, in ms.
_BARS, _LEAST, _MOST = 150, 20_000, 20 * 365 * _DAY
#: Number of topics, the largest ones, whose part of each bar the histogram shows separately.
_LARGEST = 4
#: Possible widths of a histogram's bars, in seconds.
_STEPS = (
    1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1_800, 3_600, 7_200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800,
    1_209_600, 2_592_000, 7_776_000,
)  # fmt: skip


@pages.get("/console/")
async def show(visit: Visit) -> Answer:
    if not visit.may("read"):
        return visit.go("/console/topics")
    return visit.page("overview.html", active="overview", title="Overview", **await values_of(visit))


@pages.live("/console/live/overview")
def live(visit: Visit) -> tuple[str, Any]:
    visit.need("read")

    async def frame() -> dict[str, Any]:
        values = await values_of(visit)
        parts = ("alarms", "tiles", "soon", "members", *(("shards",) if values["shards"] else ()))
        html = {part: visit.render(f"{part}.html", values) for part in parts}
        return {"html": html, "point": last_point(visit.site.sampler.charts())}

    return "overview", frame


async def values_of(visit: Visit) -> dict[str, Any]:
    look: Look = await visit.site.sampler.look()
    view, overview = await visit.service.cluster.view(stale=True), visit.service.overview
    return {
        "look": look, "view": view, "soon": await _soon(visit), "now_ms": look.totals.at_ms,
        "alarms": alarms(await visit.site.report(visit)), "clock_problems": overview.clock_problems,
        "free": overview.free_bytes, "shards": await _shards(visit),
    }  # fmt: skip


class _Shard(NamedTuple):
    """A shard, with the names of its nodes and the addresses of their consoles. leader: name of the shard's leader; ""
    if the shard does not answer."""

    shard: int
    here: bool
    nodes: list[tuple[str, str]]
    leader: str


async def _shards(visit: Visit) -> list[_Shard]:
    """All shards of the map; none without a map."""
    context = visit.call.context
    router, forwarder = context.router, context.forwarder
    router.look()
    if router.here is None:
        return []

    async def leader(to: Any) -> str:
        if to.shard == router.here:
            return visit.service.leader_name or ""
        with suppress(HadelayError, TimeoutError):
            async with asyncio.timeout(_ASK_S):
                return (await forwarder.find_leader(to)).name
        return ""

    every = sorted([router.destination(router.here), *router.others()])
    leaders = await asyncio.gather(*map(leader, every))
    return [
        _Shard(to.shard, to.shard == router.here, sorted(to.urls.items()), name)
        for to, name in zip(every, leaders, strict=True)
    ]


async def _soon(visit: Visit) -> list[tuple[str, int]]:
    """Messages that fall due soon: (name of the range, their number), counted at most every 15 s. Visitors who come
    during a count share it."""
    at, count = visit.site.soon
    if count is None or (count.done() and (count.exception() or time.monotonic() - at >= _SOON_S)):
        count = asyncio.create_task(_count_soon(visit))
        visit.site.soon = time.monotonic(), count
    return await asyncio.shield(count)


async def _count_soon(visit: Visit) -> list[tuple[str, int]]:
    now_ms = visit.service.access.now_ms() // 1000 * 1000
    starts, counts = await visit.service.topics.due(None, now_ms, now_ms + SOON[-1][1], _MINUTE, stale=True)
    return [
        (name, sum(count for start, count in zip(starts, counts, strict=True) if start < now_ms + length))
        for name, length in SOON
    ]


@pages.get("/console/charts/overview")
async def charts(visit: Visit) -> Answer:
    visit.need("read")
    return visit.json(visit.site.sampler.charts())


@pages.get("/console/charts/topics/{topic}")
async def topic_charts(visit: Visit) -> Answer:
    visit.need("read", visit.topic)
    return visit.json(visit.site.sampler.topic_charts(visit.topic))


@pages.get("/console/due")
async def due(visit: Visit) -> Answer:
    """Histogram of due times of one topic; or of all topics, with the largest topics shown separately."""
    topic = visit.query.get("topic") or None
    visit.need("read", topic)
    start, end = (_bound(visit, name) for name in ("from", "to"))
    if not _LEAST <= end - start <= _MOST:
        raise BadRequest("the range between `from` and `to` must be at least 20 seconds and at most 20 years")
    fitting = (s for s in _STEPS if (end - start) / 1000 <= s * _BARS)
    step_ms = next(fitting, _STEPS[-1]) * 1000
    start -= start % step_ms
    starts, counts = await visit.service.topics.due(topic, start, end, step_ms, stale=True)
    at = list(range(start, end, step_ms))

    def bars(starts: list[int], counts: list[int]) -> list[int]:
        number = dict(zip(starts, counts, strict=True))
        return [number.get(ms, 0) for ms in at]

    largest = [] if topic else await visit.service.topics.due_of_largest(start, end, step_ms, _LARGEST)
    return visit.json({
        "at": [ms // 1000 for ms in at], "count": bars(starts, counts), "step": step_ms // 1000, "total": sum(counts),
        "topics": [[name, bars(*of)] for name, *of in largest],
    })  # fmt: skip


def _bound(visit: Visit, name: str) -> int:
    if (found := whole(visit.query.get(name, ""), 14)) is None:
        raise BadRequest(f"{name}: write the time in Unix milliseconds")
    return found
