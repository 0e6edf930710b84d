"""Routes for bulk jobs, which change all messages that a filter selects; also count these messages beforehand."""

import re
import struct
from typing import Any

from msgspec.structs import replace

from hadelay.api import jobs as api
from hadelay.api.messages import ReadQuery
from hadelay.api.text import END_OF_YEARS_MS, LONGEST_TOPIC, check_topic, parse_duration, parse_id, parse_instant
from hadelay.codec.checksums import crc32c
from hadelay.codec.jobcommands import MAX_IDS, ON_DEAD, JobCursor, JobSpec
from hadelay.errors import BadRequest, NotFound
from hadelay.http.access import RequestRights
from hadelay.http.answers import Answer
from hadelay.http.call import Call
from hadelay.http.options import check_tags
from hadelay.http.routes import Routes
from hadelay.settings.node import HttpConfig

routes = Routes()

_PATTERN = re.compile(rf"[A-Za-z0-9._*~-]{{1,{LONGEST_TOPIC}}}")
#: Limit of a request_id, in bytes.
_LONGEST_REQUEST_ID = 64
#: Cursor of a count: hour and index of the next entry to look at, and CRC-32C of the job's specification.
_CURSOR = struct.Struct(">III")
_ONE, _JOB = "/v1/jobs/{job}", {200: api.Job[str]}
_OWN: Any = {"own_topics": True}


@routes.add(
    "POST", "/v1/jobs", body=api.BeginJob, returns={202: api.Job[str]}, errors=(404, 409, 422, 429), scope="publish",
    **_OWN,
)  # fmt: skip
async def begin_job(call: Call) -> Answer:
    """Begin to change all messages that a filter selects"""
    spec, request_id = spec_of(call.body, call.context.config), call.body.request_id or ""
    if call.body.request_id is not None and not 0 < len(request_id.encode()) <= _LONGEST_REQUEST_ID:
        raise BadRequest(f"request_id: 1 to {_LONGEST_REQUEST_ID} bytes, not {len(request_id.encode())}")
    need_for(call.access, spec.action, spec.topic)
    job = await call.service.jobs.begin(spec, request_id, call.actor)
    return call.answer(job, 202, {"Location": f"/v1/jobs/{job.id}"})


@routes.add(
    "POST", "/v1/jobs:count", body=api.CountJob, returns={200: api.JobCount[str]}, errors=(404, 422, 503),
    scope="read", **_OWN,
)  # fmt: skip
async def count_job(call: Call) -> Answer:
    """Count the messages that a job would change, part by part; changes nothing"""
    spec = spec_of(call.body, call.context.config)
    call.access.need("read", covered(spec.topic))
    question = crc32c(repr(spec).encode())
    after = (0, 0) if call.body.cursor is None else _decode(call.body.cursor, question)
    found, cursor = await call.service.jobs.count(spec, after)
    text = None if cursor is None else _CURSOR.pack(*cursor, question).hex()
    return call.answer(replace(found, cursor=text))


@routes.add("GET", "/v1/jobs", query=ReadQuery, returns={200: api.Jobs[str]}, errors=(503,), scope="read", **_OWN)
async def list_jobs(call: Call) -> Answer:
    """Running jobs and the latest ended ones, oldest first"""
    jobs = await call.service.jobs.list_jobs(stale=call.query.stale)
    return call.answer(api.Jobs([job for job in jobs if call.access.may("read", covered(job.filter.topic))]))


@routes.add("GET", _ONE, query=ReadQuery, returns=_JOB, errors=(404, 503), scope="read", **_OWN)
async def get_job(call: Call) -> Answer:
    """A job, how far it is, and what it did"""
    job = await call.service.jobs.get_job(_number(call), stale=call.query.stale)
    call.access.need_of("read", job.filter.topic, "job")
    return call.answer(job)


@routes.add("DELETE", _ONE, returns=_JOB, errors=(404, 503, 504), scope="publish", **_OWN)
async def stop_job(call: Call) -> Answer:
    """Stop a job; messages that it changed stay changed"""
    job = await call.service.jobs.get_job(_number(call), stale=False)
    need_for(call.access, job.action, job.filter.topic)
    return call.answer(await call.service.jobs.stop(job.id, call.actor))


def need_for(access: RequestRights, action: str, topic: str) -> None:
    """Raises Forbidden if the token lacks the scope of the action for all topics of the pattern."""
    access.need(scope_of(action), covered(topic))


def scope_of(action: str) -> str:
    """Scope that a token needs to begin a job of this action, or to stop it."""
    return "admin" if action in ON_DEAD or action == "fill" else "publish"


def covered(pattern: str) -> str | None:
    """Topic or pattern for the check of rights: the token must cover all topics that match. None: all topics."""
    return None if not pattern.strip("*") else pattern


def _number(call: Call) -> int:
    text = call.path["job"]
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise NotFound(f"there is no job {text[:40]!r}: jobs have numbers, as GET /v1/jobs shows them")
    return int(text)


def spec_of(wish: api.JobWish | api.CountJob, config: HttpConfig) -> JobSpec:
    """Specification of a job from a document of the API. Raises BadRequest."""
    of = wish.filter
    if "*" not in of.topic:
        check_topic(of.topic)
    elif not _PATTERN.fullmatch(of.topic):
        raise BadRequest(f"filter.topic: {of.topic[:80]!r} is neither a name nor a pattern such as orders-*")
    if len(of.ids) > MAX_IDS:
        raise BadRequest(f"filter.ids: {len(of.ids)} given; at most {MAX_IDS} are allowed")
    for name, at in (("from", of.from_), ("to", of.to)):
        if at is not None and not 0 <= at < END_OF_YEARS_MS:
            # Times beyond could not be shown with the job.
            raise BadRequest(f"filter.{name}: expected a time from 1970 to 9999")
    return JobSpec(
        wish.action,
        of.topic,
        check_tags(config, of.tags),
        of.key_prefix,
        None if of.from_ is None else int(of.from_),
        None if of.to is None else int(of.to),
        of.group,
        of.schedule,
        tuple(dict.fromkeys(map(parse_id, of.ids))),
        of.error,
        shift_ms=None if wish.shift is None else _shift(wish.shift),
        at_ms=None if wish.to is None else parse_instant("to", wish.to),
        delay_ms=None if wish.delay is None else parse_duration("delay", wish.delay),
        rate=wish.rate,
    )


def _shift(value: str | int | float) -> int:
    """Milliseconds of a duration with a sign."""
    back = value.strip().startswith("-") if isinstance(value, str) else value < 0
    if isinstance(value, str):
        ms = parse_duration("shift", value.strip().removeprefix("-" if back else "+"))
    else:
        ms = parse_duration("shift", abs(value))
    return -ms if back else ms


def _decode(text: str, question: int) -> JobCursor:
    try:
        hour, index, asked = _CURSOR.unpack(bytes.fromhex(text))
    except (ValueError, struct.error):
        raise BadRequest("cursor: this is not a cursor from a count of messages") from None
    if asked != question:
        raise BadRequest("cursor: from a count with other options; repeat these, or leave it out to start again")
    return hour, index
