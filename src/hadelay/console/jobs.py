"""The pages Bulk jobs and Job: count what a job would change, begin it, watch it, stop it."""

import secrets
import time
from typing import Any

import msgspec

from hadelay.api.base import decode_hook
from hadelay.api.jobs import CountJob, Job
from hadelay.api.text import suggest
from hadelay.codec.jobcommands import JobSpec
from hadelay.console.dead import check_typed
from hadelay.console.messages import to_instant
from hadelay.console.visit import Pages, Visit, whole
from hadelay.errors import BadRequest, HadelayError, NotFound
from hadelay.http.answers import Answer
from hadelay.http.decoding import decoded
from hadelay.http.jobs import covered, need_for, scope_of, spec_of

pages = Pages()

#: Actions of jobs, and what a page calls them.
_ACTIONS = {
    "cancel": "Cancel",
    "reschedule": "Reschedule",
    "deliver_now": "Deliver now",
    "redrive": "Redrive",
    "delete_dead": "Delete dead letters",
}
#: All actions that a job may have, in words: a new subscription begins fills.
_NAMES = {**_ACTIONS, "fill": "Fill a subscription"}
_FILTER = ("topic", "tags", "key_prefix", "group", "schedule", "ids", "error", "from", "to")
#: Fields of the form: of the filter, then of the action.
FIELDS = ("action", *_FILTER, "shift", "at", "rate")
#: Number of jobs in the table, the latest first.
_SHOWN = 100
#: Sums of a count so far, in the address of its next part; and the largest hour and index.
_SUMS, _LARGEST = ("hour", "index", "matched", "leased"), (1 << 32) - 1
#: Time limit of the count before a job begins, in seconds.
_RECOUNT_S = 5.0


@pages.get("/console/jobs")
async def overview(visit: Visit) -> Answer:
    """The latest jobs, and a form for a new one: the form counts first."""
    asked = {name: visit.query.get(name, "").strip() for name in FIELDS}
    problem = ""
    if asked["topic"]:
        try:
            _spec(visit, asked)
        except HadelayError as error:
            problem = error.detail
    jobs = await visit.service.jobs.list_jobs(stale=visit.stale)
    mine = [job for job in reversed(jobs) if visit.may("read", covered(job.filter.topic))]
    values: dict[str, Any] = {
        "jobs": mine[:_SHOWN], "asked": asked, "problem": problem, "actions": _ACTIONS, "names": _NAMES,
        "filter_of": in_words, "counts": bool(asked["topic"]) and not problem,
        "begins": visit.access.rights.may_somewhere("publish"),
    }  # fmt: skip
    return visit.page("jobs.html", active="jobs", title="Bulk jobs", **values)


def _spec(visit: Visit, asked: dict[str, str]) -> JobSpec:
    """Specification of the job that a form asks for. Raises BadRequest, Forbidden."""
    of: dict[str, Any] = {name: asked[name] for name in _FILTER if asked[name]}
    of |= {name: [text for text in asked[name].split(",") if text.strip()] for name in ("tags", "ids")}
    for name in ("from", "to"):
        if asked[name]:
            of[name] = to_instant(name, asked[name], 0)
    wish: dict[str, Any] = {"action": asked["action"], "filter": of}
    if asked["action"] not in _ACTIONS:
        raise BadRequest(f"action: {asked['action'][:40]!r} is none{suggest(asked['action'], _ACTIONS)}")
    if asked["action"] == "reschedule":
        if bool(asked["shift"]) == bool(asked["at"]):
            raise BadRequest("reschedule: give either a shift, such as 1d or -90m, or a due time")
        wish |= {"shift": asked["shift"]} if asked["shift"] else {"to": to_instant("due time", asked["at"], 0)}
    if asked["rate"]:
        wish["rate"] = asked["rate"]
    document = decoded(lambda: msgspec.convert(wish, CountJob, strict=False, dec_hook=decode_hook), CountJob)
    need_for(visit.access, document.action, document.filter.topic)
    visit.need("read", covered(document.filter.topic))
    return spec_of(document, visit.call.context.config)


@pages.get("/console/jobs/count")
async def count(visit: Visit) -> Answer:
    """One part of a count, which takes about a second; htmx asks for the next part at once. The address has the sums so
    far: they are shown to this person alone, and change nothing."""
    asked = {name: visit.query.get(name, "").strip() for name in FIELDS}
    spec = _spec(visit, asked)
    hour, index, matched, leased = (whole(visit.query.get(name, "0"), 15) or 0 for name in _SUMS)
    found, cursor = await visit.service.jobs.count(spec, (min(hour, _LARGEST), min(index, _LARGEST)))
    first, last = visit.query.get("first", "")[:40], visit.query.get("last", "")[:40]
    first, last = min(filter(None, (first, found.first)), default=""), max(last, found.last or "")
    sums = {"matched": matched + found.matched, "leased": leased + found.leased, "first": first, "last": last}
    following = None if cursor is None else {**asked, **sums, "hour": cursor[0], "index": cursor[1]}
    return visit.part(
        "job_count.html", asked=asked, sums=sums, following=following, progress=found.progress, actions=_ACTIONS,
        request_id=secrets.token_urlsafe(12), fields=FIELDS,
    )  # fmt: skip


@pages.post("/console/jobs/begin")
async def begin(visit: Visit) -> Answer:
    """Begin a job, after the person typed the number of messages that the count found."""
    asked = {name: visit.text(name) for name in FIELDS}
    spec = _spec(visit, asked)
    typed, shown, request_id = visit.text("typed"), visit.text("matched"), visit.text("request_id")[:64]
    check_typed(typed, shown, counted := whole(shown, 15) or 0)
    present = await _recount(visit, spec, counted)
    # A form that is sent twice leads to the job of the first time, which may have changed messages meanwhile.
    if not await visit.service.jobs.begun(request_id):
        check_typed(typed, shown, present)
    job = await visit.service.jobs.begin(spec, request_id, visit.actor)
    return visit.go(f"/console/jobs/{job.id}", f"Job {job.id} has begun.")


async def _recount(visit: Visit, spec: JobSpec, counted: int) -> int:
    """Number of messages that a job would change now. Where a count takes longer than some seconds, `counted` stands
    in, unless more were found by then."""
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
    values: dict[str, Any] = {"job": job, "names": _NAMES, "filter_of": in_words}
    stops = job.state in ("queued", "running") and visit.may(scope_of(job.action), covered(job.filter.topic))
    return visit.page("job.html", active="jobs", title=f"Job {job.id}", stops=stops, **values)


@pages.live("/console/live/jobs/{job}")
def live(visit: Visit) -> tuple[str, Any]:
    async def frame() -> dict[str, Any]:
        job = await _job(visit)
        return {"html": {"progress": visit.render("job_progress.html", {"job": job})}, "state": job.state}

    return f"job {visit.path['job'][:9]} {visit.actor.token_id}", frame


@pages.post("/console/jobs/{job}/stop")
async def stop(visit: Visit) -> Answer:
    job = await _job(visit)
    need_for(visit.access, job.action, job.filter.topic)
    await visit.service.jobs.stop(job.id, visit.actor)
    return visit.go(f"/console/jobs/{job.id}", "The job is stopped. Messages that it changed stay changed.")


async def _job(visit: Visit) -> Job[str]:
    """The job of the path. Raises NotFound, and Forbidden without the right to read its topics."""
    number = whole(visit.path["job"], 9)
    if number is None:
        raise NotFound(f"there is no job {visit.path['job'][:40]!r}")
    job = await visit.service.jobs.get_job(number, stale=visit.stale)
    visit.access.need_of("read", job.filter.topic, "job")
    return job


def in_words(job: Job[str]) -> str:
    """Messages that a job is for, in words."""
    of = job.filter
    parts = [of.topic]
    parts += [f"tagged {', '.join(of.tags)}"] if of.tags else []
    parts += [f"key {of.key_prefix}…"] if of.key_prefix else []
    parts += [f"group {of.group}"] if of.group else []
    parts += [f"schedule {of.schedule}"] if of.schedule else []
    parts += [f"{len(of.ids):,} chosen"] if of.ids else []
    parts += [f"error: {of.error}"] if of.error else []
    parts += [f"from {of.from_}"] if of.from_ else []
    parts += [f"before {of.to}"] if of.to else []
    parts += [f"copied to {job.subscription}"] if job.subscription else []
    return "; ".join(parts)
