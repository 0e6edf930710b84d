"""Schedules: set, list, pause, trigger, backfill and preview them."""

from collections.abc import Awaitable
from functools import partial
from typing import Any
from urllib.parse import quote

import msgspec

from hadelay.api import schedules as api
from hadelay.api.base import Nothing
from hadelay.api.text import check_limit, check_new_topic
from hadelay.codec.schedules import ANY_VERSION
from hadelay.errors import BadRequest, Conflict, HadelayError, Impossible, NotFound
from hadelay.http import merging, parts
from hadelay.http.answers import NOTHING, Answer
from hadelay.http.call import Call
from hadelay.http.publish import payload
from hadelay.http.routes import Routes
from hadelay.rules.publishing import check_idempotency_key
from hadelay.rules.schedules import check_schedule_name, schedule_spec, schedule_to_put

routes = Routes()

_PATH = "/v1/schedules/{schedule}"
#: Size limit of the body of a PUT, in bytes: room for the message in base64 and a list of times.
_MAX_BYTES = 256 << 10
_MAX_PREVIEW = 100


def _name(call: Call) -> str:
    return check_schedule_name(call.path["schedule"])


class _Named(msgspec.Struct):
    """Member of a schedule by which lists are sorted: its name, which is also the cursor of a page that begins after
    it."""

    schedule: str


_ROWS = merging.Rows("schedules", _Named, lambda row: row.schedule)


async def _page_of_all(call: Call, lists: merging.Lists) -> dict[str, Any]:
    page = merging.page(await _ROWS.of(call, lists), lists, call, str.encode)
    return {"schedules": page.rows, "cursor": page.cursor}


async def _put_at_owner(call: Call) -> Answer:
    """Set a schedule in the shard of its topic. No other shard may have a schedule of this name, or both would publish
    the message."""
    router, name, topic = call.router, _name(call), call.body.topic
    assert router is not None
    call.access.need("publish", check_new_topic(topic, call.context.config.max_topic_bytes))
    owner = router.owner(topic)
    there = router.here if owner is None else owner
    for shard, one in (await _looked_up(call, but=there)).items():
        if not isinstance(one, HadelayError):
            what = f"schedule {name!r} is in shard {shard}, and topic {topic!r} belongs to shard {there}"
            raise Conflict(f"{what}: a schedule cannot move to another shard. Delete it first, or name it otherwise")
        if not isinstance(one, NotFound):
            raise one
    return await merging.at(call, owner)


async def _looked_up(call: Call, but: int | None = None) -> dict[int, object]:
    """Ask the shards for the schedule: shard → a result if it has the schedule, or an error. NotFound: it does not have
    the schedule; Forbidden: it has, but the token may not change the schedule. but: shard that is not asked."""
    router = call.router
    assert router is not None
    path = f"/v1/schedules/{quote(_name(call), safe='')}/topic"
    asking: dict[int, Awaitable[object]] = {} if router.here in (None, but) else {router.here: _own(call)}
    for to in router.others():
        if to.shard != but:
            asking[to.shard] = parts.ask_shard(call, to, method="GET", target=path)
    return dict(sorted(zip(asking, await parts.all_parts(asking.values()), strict=True)))


async def _change_in_one(call: Call) -> Answer:
    """Make a change in the one shard that has the schedule. All shards are looked up first: if two had the name, both
    would make the change."""
    having = [shard for shard, one in (await _looked_up(call)).items() if not isinstance(one, HadelayError)]
    if len(having) > 1:
        raise merging.in_several(having)
    if not having:
        # No shard has the schedule, but one may remember the outcome of an earlier request under its Idempotency-Key.
        return await merging.wherever(call)
    assert call.router is not None
    return await merging.at(call, None if having[0] == call.router.here else having[0])


async def _delete_in_all(call: Call) -> Answer:
    """Delete the schedule in all shards; in no shard if one of them refuses."""
    for one in (await _looked_up(call)).values():
        if isinstance(one, HadelayError) and not isinstance(one, NotFound) and not one.retryable and one.outcome_known:
            raise one
    return await merging.in_all(call)


async def _own(call: Call, scope: str = "publish") -> str:
    """Get the schedule's name from the path, and check access. Raises NotFound; Forbidden without this scope for the
    schedule's topic."""
    name = _name(call)
    if not await _exists(call, name, scope):
        raise NotFound(f"there is no schedule {name!r}")
    return name


async def _exists(call: Call, name: str, scope: str = "publish") -> bool:
    """Whether there is a schedule of this name. Raises Forbidden without this scope for the schedule's topic."""
    topic = await call.service.schedules.topic_of(name)
    if topic is not None:
        call.access.need_of(scope, topic, "schedule")
    return topic is not None


@routes.add(
    "PUT",
    _PATH,
    query=api.PutScheduleQuery,
    body=api.PutSchedule,
    returns={200: api.Schedule[str]},
    errors=(404, 409, 413, 422, 429),
    max_bytes=_MAX_BYTES,
    scope="publish",
    own_topics=True,
    shards=_put_at_owner,
)
async def put_schedule(call: Call) -> Answer:
    """Create a schedule, or replace it as a whole"""
    name, document, limits = _name(call), call.body, call.context.config
    call.access.need("publish", check_new_topic(document.topic, limits.max_topic_bytes))
    await _exists(call, name)
    spec, draft = schedule_to_put(limits, call.context.max_delay_ms, name, document, payload(document))
    version = call.query.version
    if version is not None and not 0 <= version < ANY_VERSION:
        raise BadRequest(f"version: {version}: expected the version of the schedule, or 0 for no schedule")
    return call.answer(
        await call.service.schedules.put(name, spec, draft, call.actor, version=version, paused=document.paused)
    )


@routes.add(
    "GET",
    _PATH,
    query=api.ScheduleQuery,
    returns={200: api.Schedule[str]},
    errors=(404, 409, 503),
    scope="read",
    own_topics=True,
    shards=merging.wherever,
)
async def get_schedule(call: Call) -> Answer:
    """A schedule with its next occurrences, and its last occurrences with their messages"""
    found = await call.service.schedules.get(_name(call), body=call.query.body, stale=call.query.stale)
    call.access.need_of("read", found.topic, "schedule")
    return call.answer(found)


@routes.add(
    "GET",
    "/v1/schedules",
    query=api.ListSchedulesQuery,
    returns={200: api.Schedules},
    errors=(503,),
    scope="read",
    own_topics=True,
    shards=merging.merged(_page_of_all),
)
async def list_schedules(call: Call) -> Answer:
    """Schedules by name, of the topics that the token may read"""
    query = call.query
    return call.answer(
        await call.service.schedules.page(
            query.prefix,
            query.cursor or "",
            check_limit(query.limit),
            stale=query.stale,
            may=partial(call.access.may, "read"),
        )
    )


@routes.add(
    "GET",
    _PATH + "/topic",
    returns={200: api.ScheduleTopic},
    errors=(404, 409, 503),
    scope="publish",
    own_topics=True,
    shards=merging.wherever,
)
async def get_schedule_topic(call: Call) -> Answer:
    """The topic of a schedule, for tokens that may publish to it"""
    name = _name(call)
    topic = await call.service.schedules.topic_of(name)
    if topic is None:
        raise NotFound(f"there is no schedule {name!r}")
    call.access.need_of("publish", topic, "schedule")
    return call.answer(api.ScheduleTopic(topic))


@routes.add(
    "DELETE", _PATH, returns={204: None}, errors=(503, 504), scope="publish", own_topics=True, shards=_delete_in_all
)
async def delete_schedule(call: Call) -> Answer:
    """Delete a schedule, if there is one; messages that are not due yet are cancelled"""
    name = _name(call)
    if await _exists(call, name):
        await call.service.schedules.delete(name, call.actor)
    return NOTHING


@routes.add(
    "POST",
    _PATH + ":pause",
    body=Nothing,
    returns={200: api.Schedule[str]},
    errors=(404, 409),
    scope="publish",
    own_topics=True,
    shards=_change_in_one,
)
async def pause_schedule(call: Call) -> Answer:
    """Make no occurrences until the schedule is resumed; messages that are not due yet are cancelled"""
    return call.answer(await call.service.schedules.pause(await _own(call), True, call.actor))


@routes.add(
    "POST",
    _PATH + ":resume",
    body=Nothing,
    returns={200: api.Schedule[str]},
    errors=(404, 409),
    scope="publish",
    own_topics=True,
    shards=_change_in_one,
)
async def resume_schedule(call: Call) -> Answer:
    """Resume a schedule from now on; occurrences that fell into the pause are not made"""
    return call.answer(await call.service.schedules.pause(await _own(call), False, call.actor))


@routes.add(
    "POST",
    _PATH + ":trigger",
    body=Nothing,
    returns={201: api.Triggered[str], 200: api.Triggered[str]},
    errors=(404, 409, 429),
    scope="publish",
    own_topics=True,
    shards=_change_in_one,
)
async def trigger_schedule(call: Call) -> Answer:
    """Make one occurrence of a schedule, due now"""
    key, name = _key(call), _name(call)
    exists = await _may_run(call, name, key)
    made = await call.service.schedules.trigger(name, key, call.actor, exists=exists)
    return call.answer(made, 200 if made.duplicate else 201)


@routes.add(
    "POST",
    _PATH + ":backfill",
    body=api.Backfill,
    returns={200: api.Backfilled[str]},
    errors=(404, 409, 422, 429),
    scope="publish",
    own_topics=True,
    shards=_change_in_one,
)
async def backfill_schedule(call: Call) -> Answer:
    """Make the occurrences of a past range, due now, even if they were made before"""
    key, name, start, end = _key(call), _name(call), int(call.body.from_), int(call.body.to)
    exists = await _may_run(call, name, key)
    if end <= start:
        raise Impossible("to: must be after from")
    return call.answer(await call.service.schedules.backfill(name, start, end, key, call.actor, exists=exists))


async def _may_run(call: Call, name: str, key: bytes | None) -> bool:
    """Whether the schedule exists. Raises Forbidden; NotFound for a missing schedule only if the request has no
    Idempotency-Key: with a key, apply must refuse, because the cluster remembers answers under their keys."""
    return await _exists(call, name) if key is not None else bool(await _own(call))


def _key(call: Call) -> bytes | None:
    keys = call.request.headers.getall("Idempotency-Key", ())
    if len(keys) > 1:
        raise BadRequest("Idempotency-Key is given twice")
    return check_idempotency_key(keys[0].encode("utf-8", "surrogateescape")) if keys else None


@routes.add(
    "POST",
    "/v1/schedules:preview",
    body=api.Preview,
    returns={200: api.Previewed[str]},
    errors=(422,),
    scope="read",
    own_topics=True,
)
async def preview_schedule(call: Call) -> Answer:
    """The next times of a schedule that need not be stored, its times in words, and effects of clock changes"""
    document = call.body
    if not 1 <= document.count <= _MAX_PREVIEW:
        raise BadRequest(f"count: 1 to {_MAX_PREVIEW}, not {document.count}")
    after_ms = None if document.after is None else int(document.after)
    return call.answer(
        await call.service.schedules.preview(schedule_spec(document, "preview"), after_ms, document.count)
    )
