"""Routes for bulk jobs, which change all messages that a filter selects; also count these messages beforehand."""

import struct
from typing import Any

import msgspec
from msgspec.structs import replace

from hadelay.api import jobs as api
from hadelay.api.messages import ReadQuery
from hadelay.codec.checksums import crc32c
from hadelay.codec.jobcommands import JobCursor
from hadelay.errors import BadRequest, Impossible, NotFound
from hadelay.http import merging
from hadelay.http.answers import Answer
from hadelay.http.call import Call
from hadelay.http.routes import Routes
from hadelay.rules.access import covered, need_begin, need_job
from hadelay.rules.jobs import job_spec
from hadelay.settings.shardmap import JOBS, job_of

routes = Routes()

#: Limit of a request_id, in bytes.
_LONGEST_REQUEST_ID = 64
#: Cursor of a count: hour and number of the next index entry to look at, and CRC-32C of the job's specification.
_CURSOR = struct.Struct(">III")
_ONE, _JOB = "/v1/jobs/{job}", {200: api.Job[str]}
_OWN: Any = {"own_topics": True}


class _Began(msgspec.Struct):
    """Members of a job by which lists of jobs are sorted."""

    began_at: str
    id: int


_ROWS = merging.Rows("jobs", _Began, lambda job: (job.began_at, job.id))


async def _of_pattern(call: Call) -> Answer:
    """Send a request about the messages of a filter to the one shard that may own their topics. Raises Impossible if
    several shards may."""
    router, pattern = call.router, call.body.filter.topic
    assert router is not None
    shards = router.reach(pattern)
    if len(shards) > 1:
        names = ", ".join(map(str, sorted(shards)))
        what = f"filter.topic: {pattern[:128]!r} may match topics of the shards {names}, and a job is of one shard"
        raise Impossible(f"{what}: begin one in each, with ?shard=, or narrow the pattern")
    (shard,) = shards
    return await merging.at(call, None if shard == router.here else shard)


@routes.add(
    "POST",
    "/v1/jobs",
    body=api.BeginJob,
    returns={202: api.Job[str]},
    errors=(404, 409, 422, 429),
    scope="publish",
    shards=_of_pattern,
    **_OWN,
)
async def begin_job(call: Call) -> Answer:
    """Begin to change all messages that a filter selects"""
    spec, request_id = job_spec(call.body, call.context.config), call.body.request_id or ""
    if call.body.request_id is not None and not 0 < len(request_id.encode()) <= _LONGEST_REQUEST_ID:
        raise BadRequest(f"request_id: 1 to {_LONGEST_REQUEST_ID} bytes, not {len(request_id.encode())}")
    need_begin(call.access, spec.action, spec.topic, spec.into)
    job = await call.service.jobs.begin(spec, request_id, call.actor)
    return call.answer(job, 202, {"Location": f"/v1/jobs/{job.id}"})


@routes.add(
    "POST",
    "/v1/jobs:count",
    body=api.CountJob,
    returns={200: api.JobCount[str]},
    errors=(404, 422, 503),
    scope="read",
    shards=_of_pattern,
    **_OWN,
)
async def count_job(call: Call) -> Answer:
    """Count the messages that a job would change, part by part; changes nothing"""
    spec = job_spec(call.body, call.context.config)
    call.access.need("read", covered(spec.topic))
    question = crc32c(repr(spec).encode())
    after = (0, 0) if call.body.cursor is None else _decode(call.body.cursor, question)
    found, cursor = await call.service.jobs.count(spec, after)
    text = None if cursor is None else _CURSOR.pack(*cursor, question).hex()
    return call.answer(replace(found, cursor=text))


@routes.add(
    "GET",
    "/v1/jobs",
    query=api.JobsQuery,
    returns={200: api.Jobs[str]},
    errors=(503,),
    scope="read",
    shards=merging.merged(_ROWS.whole()),
    **_OWN,
)
async def list_jobs(call: Call) -> Answer:
    """Running jobs, and jobs that ended last, oldest first"""
    jobs = await call.service.jobs.list_jobs(stale=call.query.stale)
    return call.answer(api.Jobs([job for job in jobs if call.access.may("read", covered(job.filter.topic))]))


@routes.add("GET", _ONE, query=ReadQuery, returns=_JOB, errors=(404, 503), scope="read", **_OWN)
async def get_job(call: Call) -> Answer:
    """A job with its progress and its counts"""
    job = await call.service.jobs.get_job(_number(call), stale=call.query.stale)
    call.access.need_of("read", job.filter.topic, "job")
    return call.answer(job)


@routes.add("DELETE", _ONE, returns=_JOB, errors=(404, 503, 504), scope="publish", **_OWN)
async def stop_job(call: Call) -> Answer:
    """Stop a job; messages that it changed stay changed"""
    job = await call.service.jobs.get_job(_number(call), stale=False)
    need_job(call.access, job.action, job.filter.topic)
    return call.answer(await call.service.jobs.stop(job.id, call.actor))


def _number(call: Call) -> int:
    text = call.path["job"]
    shard, number = job_of(text)
    if not number:
        raise NotFound(f"there is no job {text[:40]!r}: jobs have numbers, as GET /v1/jobs shows them")
    return shard * JOBS + number


def _decode(text: str, question: int) -> JobCursor:
    try:
        hour, index, asked = _CURSOR.unpack(bytes.fromhex(text))
    except (ValueError, struct.error):
        raise BadRequest("cursor: this is not a cursor from a count of messages") from None
    if asked != question:
        raise BadRequest("cursor: from a count with other options; repeat these, or leave it out to start again")
    return hour, index
