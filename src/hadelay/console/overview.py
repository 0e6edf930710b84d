"""The page Overview: rates, states, lateness, what falls due, alarms in words, members."""

import time
from typing import Any

from hadelay.api.cluster import CheckOut, Cluster
from hadelay.console.samples import Look, last_point
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import BadRequest
from hadelay.http.answers import Answer
from hadelay.server.service.overview import LATE_MS
from hadelay.words import span

pages = Pages()

_MINUTE, _HOUR, _DAY = 60_000, 3_600_000, 86_400_000
#: Ranges of "falls due in the next …", in ms.
SOON = (("minute", _MINUTE), ("hour", _HOUR), ("day", _DAY), ("month", 30 * _DAY))
#: Time in seconds for which all visitors share one count of the messages that fall due soon.
_SOON_S = 15.0
#: Thresholds of alarms: a member's lag in log entries; days until a certificate expires.
_LAG, _CERTIFICATE_DAYS = 10_000, 14
#: Roles of members that vote; one that does not answer is "unknown".
_VOTERS = ("leader", "follower", "unknown")
_CLUSTER = "/console/cluster"
#: Alarm: (severity "bad" or "warn", sentence, path of a page about the problem or "").
Alarm = tuple[str, str, str]
#: Histogram of due times: maximum number of bars; shortest and longest range, in ms.
_BARS, _LEAST, _MOST = 150, 20_000, 20 * 365 * _DAY
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
        html = {part: visit.render(f"{part}.html", values) for part in ("alarms", "tiles", "soon", "members")}
        return {"html": html, "point": last_point(visit.site.sampler.charts())}

    return "overview", frame


async def values_of(visit: Visit) -> dict[str, Any]:
    look: Look = await visit.site.sampler.look()
    view, overview = await visit.service.cluster.view(stale=True), visit.service.overview
    clock, ends = overview.clock_problems, [one.expires_s for one in visit.call.context.metrics.certificates]
    return {
        "look": look, "view": view, "soon": await _soon(visit), "now_ms": look.totals.at_ms,
        "alarms": alarms(view, look, visit.service.cluster.readyz(), clock, ends), "clock_problems": clock,
        "free": overview.free_bytes,
    }  # fmt: skip


async def _soon(visit: Visit) -> list[tuple[str, int]]:
    """Messages that fall due soon: (name of the range, their number), counted at most every 15 s."""
    at, known = visit.site.soon
    if time.monotonic() - at < _SOON_S:
        return known  # type: ignore[no-any-return]
    now_ms = visit.service.access.now_ms() // 1000 * 1000
    starts, counts = await visit.service.topics.due(None, now_ms, now_ms + SOON[-1][1], _MINUTE, stale=True)
    found = [
        (name, sum(count for start, count in zip(starts, counts, strict=True) if start < now_ms + length))
        for name, length in SOON
    ]
    visit.site.soon = time.monotonic(), found
    return found


def alarms(
    view: Cluster[str], look: Look, checks: list[CheckOut], clock: list[str], certificates: list[float]
) -> list[Alarm]:
    """List alarms, the worst first. clock: problems of the wall clocks in words. certificates: Unix times in s at which
    this node's certificates expire."""
    found = [*_of_members(view), *(("warn", f"{words[0].upper()}{words[1:]}.", _CLUSTER) for words in clock)]
    # A full disk of this node is among the alarms of members.
    wrong = (check for check in checks if not check.ok and check.name != "space")
    found += [("warn", f"This node: {check.detail}.", _CLUSTER) for check in wrong]
    late, totals = look.recent, look.totals
    if late is not None and late.handed_out and late.p99_ms >= LATE_MS:
        words = f"Hand-outs are late: p99 {span(late.p99_ms)} over the last five minutes."
        found.append(("warn", words, "/console/topics?sort=late"))
    if late is not None and late.ready and totals.at_ms - late.oldest_ms >= _MINUTE:
        words = f"A message has been ready for {span(totals.at_ms - late.oldest_ms)} and nobody has taken it."
        found.append(("warn", words, "/console/topics?sort=oldest"))
    if totals.dead:
        found.append(("warn", f"{totals.dead:,} dead letter{'' if totals.dead == 1 else 's'}.", "/console/dead"))
    if totals.paused:
        words = f"{totals.paused:,} topic{' is' if totals.paused == 1 else 's are'} paused."
        found.append(("warn", words, "/console/topics?show=paused"))
    for expires_s in certificates:
        left_ms = (expires_s - time.time()) * 1000
        if left_ms < _CERTIFICATE_DAYS * _DAY:
            words = f"expired {span(-left_ms)} ago" if left_ms < 0 else f"ends in {span(left_ms)}"
            found.append(("bad", f"A certificate of this node {words}.", _CLUSTER))
    return sorted(found, key=lambda alarm: alarm[0] != "bad")


def _of_members(view: Cluster[str]) -> list[Alarm]:
    """Alarms about the members of the cluster."""
    found: list[Alarm] = []
    if view.leader is None:
        words = "No leader is known: nothing is accepted and nothing is handed out until a majority of members answers."
        found.append(("bad", words, _CLUSTER))
    for member in view.members:
        if member.role == "unknown":
            words = f"{member.name} does not answer: start it, or read in its log why it ended."
            found.append(("bad", words, _CLUSTER))
        elif member.lag > _LAG:
            found.append(("warn", f"{member.name} is {member.lag:,} entries behind.", _CLUSTER))
    if full := ", ".join(member.name for member in view.members if member.has_space is False):
        words = f"Too little disk space on {full}: every node refuses publishes until space is freed there."
        found.append(("bad", words, _CLUSTER))
    silent, voters = (sum(member.role in roles for member in view.members) for roles in (("unknown",), _VOTERS))
    if view.leader is not None and silent and voters - silent == voters // 2 + 1:
        found.append(("bad", "If one more member fails, the cluster stops.", _CLUSTER))
    levels = {member.feature_level for member in view.members if member.role != "unknown"}
    if len(levels) > 1:
        found.append(("warn", "Members run different releases: an upgrade is under way.", _CLUSTER))
    return found


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
    """Histogram of due times over all topics, or of one topic."""
    topic = visit.query.get("topic") or None
    visit.need("read", topic)
    start, end = (_bound(visit, name) for name in ("from", "to"))
    if not _LEAST <= end - start <= _MOST:
        raise BadRequest("the range between `from` and `to` must be at least 20 seconds and at most 20 years")
    fitting = (s for s in _STEPS if (end - start) / 1000 <= s * _BARS)
    step_ms = next(fitting, _STEPS[-1]) * 1000
    start -= start % step_ms
    starts, counts = await visit.service.topics.due(topic, start, end, step_ms, stale=True)
    number = dict(zip(starts, counts, strict=True))
    at = list(range(start, end, step_ms))
    return visit.json({
        "at": [ms // 1000 for ms in at], "count": [number.get(ms, 0) for ms in at], "step": step_ms // 1000,
        "total": sum(counts),
    })  # fmt: skip


def _bound(visit: Visit, name: str) -> int:
    if (found := whole(visit.query.get(name, ""), 14)) is None:
        raise BadRequest(f"{name}: write the time in Unix milliseconds")
    return found
