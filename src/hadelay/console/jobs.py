"""The pages Bulk jobs and Job: count what a job would change, begin it, watch it, stop it."""

import secrets
import time
from typing import Any
from urllib.parse import urlencode

from hadelay.api.jobs import CountJob, Job
from hadelay.api.text import suggest
from hadelay.codec.jobcommands import JobSpec
from hadelay.console.dead import check_typed
from hadelay.console.messages import now
from hadelay.console.problems import Wrong
from hadelay.console.visit import Pages, Visit, whole
from hadelay.console.zones import millis, to_instant
from hadelay.errors import HadelayError, NotFound
from hadelay.http.answers import Answer
from hadelay.rules.access import covered, job_scope, need_begin, need_job
from hadelay.rules.documents import converted
from hadelay.rules.jobs import job_spec
from hadelay.words import span

pages = Pages()

#: Action of a job → name of the action on pages, for the actions that a form offers.
_ACTIONS = {
    "cancel": "Cancel",
    "reschedule": "Reschedule",
    "deliver_now": "Deliver now",
    "redrive": "Redrive",
    "delete_dead": "Delete dead letters",
    "transfer": "Move to another topic",
}
#: Action of a job → name of the action on pages, for all actions; only a new subscription begins the action `fill`.
_NAMES = {**_ACTIONS, "fill": "Fill a subscription"}
_FILTER = ("topic", "tags", "key_prefix", "group", "schedule", "ids", "error", "from", "to", "retrying")
#: Field of the form for a new due time → field of the API.
_CHANGES = {"shift": "shift", "delay": "delay", "at": "deliver_at"}
#: Conditions of a filter that the form shows only on request, unless one of them is set.
_RARE = ("error", "group", "schedule", "retrying", "ids")
#: Progress of a job, from 0 to 1, from which on the page estimates the time left.
_KNOWN = 0.02
#: Fields of the form: the action, the filter, and the action's options (new due time, target topic, rate).
FIELDS = ("action", *_FILTER, *_CHANGES, "into", "rate")
#: Number of jobs in the table, which has the latest ones.
_SHOWN = 100
#: Fields in the address that returns the next part of a count: position in the index (hour and index), and numbers of
#: messages counted so far. And largest valid value of hour and index.
_SUMS, _LARGEST = ("hour", "index", "matched", "leased"), (1 << 32) - 1
#: Time limit of the count before a job begins, in seconds.
_RECOUNT_S = 5.0


@pages.get("/console/jobs")
async def overview(visit: Visit) -> Answer:
    """The latest jobs, and a form for a new job, which counts the messages first."""
    asked = {name: visit.query.get(name, "").strip() for name in FIELDS}
    problem = None
    if asked["topic"]:
        try:
            _spec(visit, asked)
        except HadelayError as error:
            problem = visit.problem_of(error)
    values: dict[str, Any] = {
        "jobs": await _latest(visit), "asked": asked, "problem": problem, "actions": _ACTIONS, "names": _NAMES,
        "filter_of": in_words, "counts": bool(asked["topic"]) and not problem, "now": now(visit), "left_of": time_left,
        "rare": any(asked[name] for name in _RARE),
        "begins": visit.access.rights.may_somewhere("publish"),
    }  # fmt: skip
    return visit.page("jobs.html", active="jobs", title="Bulk jobs", **values)


async def _latest(visit: Visit) -> list[Job[str]]:
    """The latest jobs of topics that the visitor may read, the latest first."""
    jobs = await visit.service.jobs.list_jobs(stale=visit.stale)
    return [job for job in reversed(jobs) if visit.may("read", covered(job.filter.topic))][:_SHOWN]


@pages.live("/console/live/jobs")
def live_rows(visit: Visit) -> tuple[str, Any]:
    """Stream of the list of jobs: its rows."""

    async def frame() -> dict[str, Any]:
        shared = {"names": _NAMES, "filter_of": in_words, "now": now(visit), "left_of": time_left}
        jobs = await _latest(visit)
        return {"html": {f"row-{job.id}": visit.render("job_row.html", {"job": job, **shared}) for job in jobs}}

    return f"jobs {visit.sees}", frame


def _spec(visit: Visit, asked: dict[str, str]) -> JobSpec:
    """Specification of the job that a form asks for. Raises BadRequest, Forbidden."""
    of: dict[str, Any] = {name: asked[name] for name in _FILTER if asked[name]}
    of["retrying"] = bool(asked["retrying"])
    of |= {name: [text for text in asked[name].split(",") if text.strip()] for name in ("tags", "ids")}
    for name in ("from", "to"):
        if asked[name]:
            of[name] = to_instant(name, asked[name], 0, visit.zone)
    fields: dict[str, Any] = {"action": asked["action"], "filter": of}
    if asked["action"] not in _ACTIONS:
        raise Wrong("action", f"{asked['action'][:40]!r} is no action{suggest(asked['action'], _ACTIONS)}.")
    if asked["action"] == "reschedule":
        given = {name: asked[name] for name in _CHANGES if asked[name]}
        if len(given) != 1:
            raise Wrong("shift", "Give one of: later by, such as 1d or -90m; in, such as 15m; or at a due time.")
        ((name, text),) = given.items()
        fields[_CHANGES[name]] = to_instant(name, text, 0, visit.zone) if name == "at" else text
    used = ("rate", "into") if asked["action"] == "transfer" else ("rate",)
    fields |= {name: asked[name] for name in used if asked[name]}
    document = converted(fields, CountJob)
    need_begin(visit.access, document.action, document.filter.topic, document.into)
    visit.need("read", covered(document.filter.topic))
    return job_spec(document, visit.call.context.config)


@pages.get("/console/jobs/count")
async def count(visit: Visit) -> Answer:
    """Count a part of the messages that a job would change, for about a second; htmx asks for the next part at once.
    The address carries the numbers counted so far. The node does not check them: only this person sees them, and no job
    depends on them."""
    asked = {name: visit.query.get(name, "").strip() for name in FIELDS}
    spec = _spec(visit, asked)
    hour, index, matched, leased = (whole(visit.query.get(name, "0"), 15) or 0 for name in _SUMS)
    found, cursor = await visit.service.jobs.count(spec, (min(hour, _LARGEST), min(index, _LARGEST)))
    first, last = visit.query.get("first", "")[:40], visit.query.get("last", "")[:40]
    first, last = min(filter(None, (first, found.first)), default=""), max(last, found.last or "")
    sums = {"matched": matched + found.matched, "leased": leased + found.leased, "first": first, "last": last}
    following = None if cursor is None else {**asked, **sums, "hour": cursor[0], "index": cursor[1]}
    return visit.part(
        "job_count.html",
        asked=asked,
        sums=sums,
        following=following,
        progress=found.progress,
        actions=_ACTIONS,
        request_id=secrets.token_urlsafe(12),
        fields=FIELDS,
        listed=_list_of(asked),
    )


def _list_of(asked: dict[str, str]) -> str:
    """Address of a list with exactly the messages of a job's filter; "" if no list can show exactly these."""
    given, dead = {name for name in _FILTER if asked[name]}, asked["action"] in ("redrive", "delete_dead")
    if any(letter in asked["topic"] for letter in "*?["):
        return ""
    if dead and given <= {"topic", "error"}:
        of = {"error": asked["error"]} if asked["error"] else {}
        return f"/console/topics/{asked['topic']}/dead" + (f"?{urlencode(of)}" if of else "")
    pending = asked["action"] in ("cancel", "reschedule", "deliver_now")
    if pending and given <= {"topic", "tags", "from", "to", "retrying"}:
        state = "retrying" if asked["retrying"] else "pending"
        of = {"topic": asked["topic"], "tag": asked["tags"], "from": asked["from"], "to": asked["to"], "state": state}
        return f"/console/messages?{urlencode(of)}"
    return ""


@pages.post("/console/jobs/begin")
async def begin(visit: Visit) -> Answer:
    """Begin a job, after the person typed the number of messages that the count found."""
    asked = {name: visit.text(name) for name in FIELDS}
    spec = _spec(visit, asked)
    typed, shown, request_id = visit.text("typed"), visit.text("matched"), visit.text("request_id")[:64]
    check_typed(typed, shown, counted := whole(shown, 15) or 0)
    present = await _recount(visit, spec, counted)
    # If the form is sent twice, show the job of the first time, although the count may differ: that job may have
    # changed messages meanwhile.
    if not await visit.service.jobs.begun(request_id):
        check_typed(typed, shown, present)
    job = await visit.service.jobs.begin(spec, request_id, visit.actor)
    return visit.go(f"/console/jobs/{job.id}", f"Job {job.id} has begun.")


async def _recount(visit: Visit, spec: JobSpec, counted: int) -> int:
    """Number of messages that a job would change now. If counting takes too long: `counted`, or the number found so far
    if it is larger."""
    until, matched, cursor = time.monotonic() + _RECOUNT_S, 0, (0, 0)
    while time.monotonic() < until:
        found, following = await visit.service.jobs.count(spec, cursor)
        matched += found.matched
        if following is None:
            return matched
        cursor = following
    return max(matched, counted)


@pages.get("/console/jobs/{job}")
async def show(visit: Visit) -> Answer:
    job = await _job(visit)
    values: dict[str, Any] = {"job": job, "names": _NAMES, "filter_of": in_words, "left": _left(visit, job)}
    stops = job.state in ("queued", "running") and visit.may(job_scope(job.action), covered(job.filter.topic))
    return visit.page("job.html", active="jobs", title=f"Job {job.id}", stops=stops, **values)


@pages.live("/console/live/jobs/{job}")
def live(visit: Visit) -> tuple[str, Any]:
    async def frame() -> dict[str, Any]:
        job = await _job(visit)
        html = visit.render("job_progress.html", {"job": job, "left": _left(visit, job)})
        return {"html": {"progress": html}, "state": job.state}

    return f"job {visit.path['job'][:15]} {visit.actor.token_id}", frame


@pages.post("/console/jobs/{job}/stop")
async def stop(visit: Visit) -> Answer:
    job = await _job(visit)
    need_job(visit.access, job.action, job.filter.topic)
    await visit.service.jobs.stop(job.id, visit.actor)
    return visit.go(f"/console/jobs/{job.id}", "The job is stopped. Messages that it changed stay changed.")


async def _job(visit: Visit) -> Job[str]:
    """Get the job of the path. Raises NotFound, and Forbidden without the right to read the job's topics."""
    number = whole(visit.path["job"], 15)
    if number is None:
        raise NotFound(f"there is no job {visit.path['job'][:40]!r}")
    job = await visit.service.jobs.get_job(number, stale=visit.stale)
    visit.access.need_of("read", job.filter.topic, "job")
    return job


def time_left(job: Job[str], now: str) -> str:
    """Estimate of the time until a running job ends, at its pace so far; "" if nothing is known yet."""
    if job.state != "running" or not _KNOWN <= job.progress < 1:
        return ""
    spent_ms = max(0, millis(now) - millis(job.began_at))
    left_ms = max(1_000, spent_ms * (1 - job.progress) / job.progress)
    return f"about {span(left_ms if left_ms < 60_000 else left_ms // 60_000 * 60_000)} left"


def _left(visit: Visit, job: Job[str]) -> str:
    return time_left(job, now(visit))


def in_words(job: Job[str]) -> str:
    """Describe the messages of a job's filter in words."""
    of = job.filter
    parts = [of.topic]
    parts += [f"tagged {', '.join(of.tags)}"] if of.tags else []
    parts += [f"key {of.key_prefix}…"] if of.key_prefix else []
    parts += [f"group {of.group}"] if of.group else []
    parts += [f"schedule {of.schedule}"] if of.schedule else []
    parts += [f"{len(of.ids):,} chosen"] if of.ids else []
    parts += ["retrying"] if of.retrying else []
    parts += [f"error: {of.error}"] if of.error else []
    parts += [f"from {of.from_}"] if of.from_ else []
    parts += [f"before {of.to}"] if of.to else []
    parts += [f"to {job.into or 'the topics in which they died'}"] if job.action == "transfer" else []
    parts += [f"copied to {job.subscription}"] if job.subscription else []
    return "; ".join(parts)
