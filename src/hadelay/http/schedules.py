"""Schedules: set, list, pause, trigger, backfill and preview them."""

import re
from functools import partial
from hashlib import sha256
from typing import Any

from msgspec.structs import replace

from hadelay.api import schedules as api
from hadelay.api.base import Nothing
from hadelay.api.text import check_limit, check_new_topic
from hadelay.codec.meta import mask_of
from hadelay.codec.schedules import ANY_VERSION, MAX_TEMPLATE_BYTES, Spec, problem, template_meta
from hadelay.errors import BadRequest, Impossible, NotFound, TooLarge
from hadelay.http.answers import NOTHING, Answer
from hadelay.http.call import Call
from hadelay.http.options import check_group, check_idempotency_key, check_positive, check_tags, pack_meta
from hadelay.http.publish import payload
from hadelay.http.routes import Routes
from hadelay.model import MAX_GROUP, Draft
from hadelay.server.service.schedules import CATCH_UPS, OVERLAPS

routes = Routes()

_PATH = "/v1/schedules/{schedule}"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
#: Size limit of the body of a PUT, in bytes: room for the message in base64 and a list of times.
_MAX_BYTES = 256 << 10
_MAX_PREVIEW = 100
#: Number of hexadecimal digits of a hash in the message group of a schedule with a long name.
_GROUP_HASH = 16


def _name(call: Call) -> str:
    name = call.path["schedule"]
    if not _NAME.fullmatch(name):
        raise BadRequest(f"the schedule's name {name[:40]!r}: 1 to 128 of A-Z a-z 0-9 . _ -, and no dot in front")
    return name


async def _own(call: Call, scope: str = "publish") -> str:
    """The schedule's name in the path. Raises NotFound; Forbidden without this scope for its topic."""
    name = _name(call)
    if not await _exists(call, name, scope):
        raise NotFound(f"there is no schedule {name!r}")
    return name


async def _exists(call: Call, name: str, scope: str = "publish") -> bool:
    """Whether there is a schedule of this name. Raises Forbidden without this scope for its topic."""
    topic = await call.service.schedules.topic_of(name)
    if topic is not None:
        call.access.need_of(scope, topic, "schedule")
    return topic is not None


@routes.add(
    "PUT", _PATH, query=api.PutScheduleQuery, body=api.PutSchedule, returns={200: api.Schedule[str]},
    errors=(404, 409, 413, 422, 429), max_bytes=_MAX_BYTES, scope="publish", own_topics=True,
)  # fmt: skip
async def put_schedule(call: Call) -> Answer:
    """Create a schedule, or replace it as a whole"""
    name, wish, limits = _name(call), call.body, call.context.config
    call.access.need("publish", check_new_topic(wish.topic, limits.max_topic_bytes))
    await _exists(call, name)
    if wish.overlap == "wait" and wish.group is not None:
        raise Impossible("group: a schedule with overlap=wait uses a group of its own; leave group out")
    group = _group_of(name) if wish.overlap == "wait" else wish.group
    spec = replace(spec_of(wish, wish.topic), group=None if group is None else check_group(group))
    body, content_type = payload(wish)
    if len(body) > MAX_TEMPLATE_BYTES:
        raise TooLarge(f"a body of {len(body)} bytes; the message of a schedule has at most {MAX_TEMPLATE_BYTES}")
    tags, ttl_ms = check_tags(limits, wish.tags), check_positive("ttl", wish.ttl, call.context.max_delay_ms)
    meta = pack_meta(limits, content_type, wish.meta, tags=list(tags), ttl=ttl_ms, sch=name, group=group)
    version = call.query.version
    if version is not None and not 0 <= version < ANY_VERSION:
        raise BadRequest(f"version: {version}: expected the version of the schedule, or 0 for no schedule")
    draft = Draft(wish.topic, 0, True, mask_of(tags), ttl_ms, template_meta(meta), body)
    return call.answer(
        await call.service.schedules.put(
            name, spec, draft, call.actor, version=version, paused=wish.paused
        )
    )  # fmt: skip


def _group_of(name: str) -> str:
    """Message group of a schedule with overlap=wait. A long name is cut, and ends in a hash instead, because other
    names may begin alike."""
    group = f"schedule.{name}"
    if len(group) <= MAX_GROUP:
        return group
    digest = sha256(name.encode()).hexdigest()[:_GROUP_HASH]
    return f"{group[: MAX_GROUP - _GROUP_HASH - 1]}.{digest}"


def spec_of(wish: api.Times, topic: str) -> Spec:
    """Make a schedule's specification (Spec) from a request. Raises BadRequest and Impossible."""
    given = [name for name in ("cron", "every", "at") if getattr(wish, name) is not None]
    if len(given) != 1:
        raise BadRequest(f"say when by one of cron, every and at, not by {' and '.join(given) or 'none'}")
    if wish.cron is None and wish.timezone != "UTC":
        raise BadRequest("timezone: only with cron; `every` and `at` are the same in all zones")
    options = {} if not isinstance(wish, api.PutSchedule) else _options(wish)
    start, end = (None if at is None else int(at) for at in (wish.start, wish.end))
    at_ms = None if wish.at is None else sorted({int(at) for at in wish.at})
    every_ms = None if wish.every is None else int(wish.every)
    spec = Spec(
        topic, cron=wish.cron, every_ms=every_ms, at=at_ms, timezone=wish.timezone, start_ms=start, end_ms=end,
        **options,
    )  # fmt: skip
    if wrong := problem(spec):
        raise BadRequest(wrong)
    return spec


def _options(wish: api.PutSchedule) -> dict[str, Any]:
    if wish.max_occurrences is not None and wish.max_occurrences < 1:
        raise BadRequest("max_occurrences: at least 1, or leave it out")
    found: dict[str, Any] = {"catch_up": CATCH_UPS.index(wish.catch_up), "overlap": OVERLAPS.index(wish.overlap)}
    for name, value in (("jitter_ms", wish.jitter), ("window_ms", wish.catch_up_window)):
        if value is not None:
            found[name] = int(value)
    return found if wish.max_occurrences is None else found | {"max_occurrences": wish.max_occurrences}


@routes.add(
    "GET", _PATH, query=api.ScheduleQuery, returns={200: api.Schedule[str]}, errors=(404, 503), scope="read",
    own_topics=True,
)  # fmt: skip
async def get_schedule(call: Call) -> Answer:
    """A schedule with its next occurrences, and its last ones with their messages"""
    found = await call.service.schedules.get(_name(call), body=call.query.body, stale=call.query.stale)
    call.access.need_of("read", found.topic, "schedule")
    return call.answer(found)


@routes.add(
    "GET", "/v1/schedules", query=api.ListSchedulesQuery, returns={200: api.Schedules}, errors=(503,), scope="read",
    own_topics=True,
)  # fmt: skip
async def list_schedules(call: Call) -> Answer:
    """Schedules by name, of the topics that the token may read"""
    query = call.query
    return call.answer(
        await call.service.schedules.page(
            query.prefix, query.cursor or "", check_limit(query.limit), stale=query.stale,
            may=partial(call.access.may, "read"),
        )
    )  # fmt: skip


@routes.add("DELETE", _PATH, returns={204: None}, scope="publish", own_topics=True)
async def delete_schedule(call: Call) -> Answer:
    """Delete a schedule, if there is one; messages that are not due yet are cancelled"""
    name = _name(call)
    if await _exists(call, name):
        await call.service.schedules.delete(name, call.actor)
    return NOTHING


@routes.add(
    "POST", _PATH + ":pause", body=Nothing, returns={200: api.Schedule[str]}, errors=(404,), scope="publish",
    own_topics=True,
)  # fmt: skip
async def pause_schedule(call: Call) -> Answer:
    """Make no occurrences until the schedule is resumed; messages that are not due yet are cancelled"""
    return call.answer(await call.service.schedules.pause(await _own(call), True, call.actor))


@routes.add(
    "POST", _PATH + ":resume", body=Nothing, returns={200: api.Schedule[str]}, errors=(404,), scope="publish",
    own_topics=True,
)  # fmt: skip
async def resume_schedule(call: Call) -> Answer:
    """Go on from now; occurrences of the pause are not made"""
    return call.answer(await call.service.schedules.pause(await _own(call), False, call.actor))


@routes.add(
    "POST", _PATH + ":trigger", body=Nothing, returns={201: api.Triggered[str], 200: api.Triggered[str]},
    errors=(404, 409, 429), scope="publish", own_topics=True,
)  # fmt: skip
async def trigger_schedule(call: Call) -> Answer:
    """Make one occurrence, due now"""
    made = await call.service.schedules.trigger(await _own(call), _key(call), call.actor)
    return call.answer(made, 200 if made.duplicate else 201)


@routes.add(
    "POST", _PATH + ":backfill", body=api.Backfill, returns={200: api.Backfilled[str]}, errors=(404, 409, 422, 429),
    scope="publish", own_topics=True,
)  # fmt: skip
async def backfill_schedule(call: Call) -> Answer:
    """Make the occurrences of a past range, also those made before, due now"""
    name, start, end = await _own(call), int(call.body.from_), int(call.body.to)
    if end <= start:
        raise Impossible("to: must be after from")
    return call.answer(await call.service.schedules.backfill(name, start, end, _key(call), call.actor))


def _key(call: Call) -> bytes | None:
    keys = call.request.headers.getall("Idempotency-Key", ())
    if len(keys) > 1:
        raise BadRequest("Idempotency-Key is given twice")
    return check_idempotency_key(keys[0].encode("utf-8", "surrogateescape")) if keys else None


@routes.add(
    "POST", "/v1/schedules:preview", body=api.Preview, returns={200: api.Previewed[str]}, errors=(422,), scope="read",
    own_topics=True,
)  # fmt: skip
async def preview_schedule(call: Call) -> Answer:
    """The next times of a schedule that need not exist, in words, and what clock changes do to it"""
    wish = call.body
    if not 1 <= wish.count <= _MAX_PREVIEW:
        raise BadRequest(f"count: 1 to {_MAX_PREVIEW}, not {wish.count}")
    after_ms = None if wish.after is None else int(wish.after)
    return call.answer(await call.service.schedules.preview(spec_of(wish, "preview"), after_ms, wish.count))
