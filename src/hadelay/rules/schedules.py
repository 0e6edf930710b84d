"""Checks the names of schedules, and makes a schedule's specification and message from a document of the API."""

import re
from hashlib import sha256
from typing import Any

from msgspec.structs import replace

from hadelay.api.schedules import CATCH_UPS, OVERLAPS, PutSchedule, Times
from hadelay.codec.meta import mask_of
from hadelay.codec.schedules import MAX_TEMPLATE_BYTES, Spec, problem, template_meta
from hadelay.errors import BadRequest, Impossible, TooLarge
from hadelay.model import MAX_GROUP, Draft
from hadelay.rules.publishing import check_group, check_positive, check_tags, pack_meta
from hadelay.settings.node import HttpConfig

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._~-]{0,159}")
#: Number of hexadecimal digits of a hash in the message group of a schedule with a long name.
_GROUP_HASH = 16


def check_schedule_name(name: str) -> str:
    """Check the name of a schedule, and return it. Raises BadRequest for an invalid name."""
    if not _NAME.fullmatch(name):
        raise BadRequest(f"the schedule's name {name[:40]!r}: 1 to 160 of A-Z a-z 0-9 . _ ~ -, and no dot in front")
    return name


def schedule_spec(document: Times, topic: str) -> Spec:
    """Make a schedule's specification (Spec) from a request. Raises BadRequest and Impossible."""
    given = [name for name in ("cron", "every", "at") if getattr(document, name) is not None]
    if len(given) != 1:
        raise BadRequest(f"give exactly one of cron, every and at; given: {', '.join(given) or 'none'}")
    if document.cron is None and document.timezone != "UTC":
        raise BadRequest("timezone: only with cron; `every` and `at` are the same in all zones")
    options = {} if not isinstance(document, PutSchedule) else _options(document)
    start, end = (None if at is None else int(at) for at in (document.start, document.end))
    at_ms = None if document.at is None else sorted({int(at) for at in document.at})
    every_ms = None if document.every is None else int(document.every)
    spec = Spec(
        topic,
        cron=document.cron,
        every_ms=every_ms,
        at=at_ms,
        timezone=document.timezone,
        start_ms=start,
        end_ms=end,
        **options,
    )
    if wrong := problem(spec):
        raise BadRequest(wrong)
    return spec


def schedule_to_put(
    limits: HttpConfig,
    max_delay_ms: int,
    name: str,
    document: PutSchedule,
    payload: tuple[bytes, str],
    *,
    callback: str | None = None,
) -> tuple[Spec, Draft]:
    """Specification and message of a schedule to be set. payload: body and content type of the message. callback: its
    webhook URL. Raises BadRequest, Impossible, TooLarge."""
    if document.overlap == "wait" and document.group is not None:
        raise Impossible("group: a schedule with overlap=wait uses a group of its own; leave group out")
    group = _group_of(name) if document.overlap == "wait" else document.group
    spec = replace(schedule_spec(document, document.topic), group=None if group is None else check_group(group))
    body, content_type = payload
    if len(body) > MAX_TEMPLATE_BYTES:
        raise TooLarge(f"the body has {len(body)} bytes; a schedule's message may have at most {MAX_TEMPLATE_BYTES}")
    tags, ttl_ms = check_tags(limits, document.tags), check_positive("ttl", document.ttl, max_delay_ms)
    options: dict[str, Any] = {"tags": list(tags), "ttl": ttl_ms, "sch": name, "group": group, "cb": callback}
    meta, has_url = template_meta(pack_meta(limits, content_type, document.meta, **options)), callback is not None
    return spec, Draft(document.topic, 0, True, mask_of(tags), ttl_ms, meta, body, callback=has_url)


def _group_of(name: str) -> str:
    """Message group of a schedule with overlap=wait. A long name is cut, and ends in a hash instead, because other
    names may begin alike."""
    group = f"schedule.{name}"
    if len(group) <= MAX_GROUP:
        return group
    digest = sha256(name.encode()).hexdigest()[:_GROUP_HASH]
    return f"{group[: MAX_GROUP - _GROUP_HASH - 1]}.{digest}"


def _options(document: PutSchedule) -> dict[str, Any]:
    if document.max_occurrences is not None and document.max_occurrences < 1:
        raise BadRequest("max_occurrences: at least 1, or leave it out")
    found: dict[str, Any] = {
        "catch_up": CATCH_UPS.index(document.catch_up),
        "overlap": OVERLAPS.index(document.overlap),
    }
    for name, value in (("jitter_ms", document.jitter), ("window_ms", document.catch_up_window)):
        if value is not None:
            found[name] = int(value)
    return found if document.max_occurrences is None else found | {"max_occurrences": document.max_occurrences}
