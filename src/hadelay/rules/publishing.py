"""Checks the options of a message, and makes the draft that is published."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hadelay.api.publishrequest import BatchItem
from hadelay.api.text import DOTS, check_new_topic, format_duration, parse_duration, parse_instant
from hadelay.codec.meta import OCTETS, Meta, mask_of, pack, unpack
from hadelay.codec.publishcommand import hash_group
from hadelay.errors import BadRequest, Impossible
from hadelay.model import KEEP, MAX_GROUP, MAX_UNIQUE_MS, OWN_DELAY, REJECT, REPLACE, Draft
from hadelay.settings.kinds import MAX_FORWARD, fields_problem
from hadelay.settings.node import HttpConfig
from hadelay.settings.urls import url_problem

#: Header names that no message may forward, besides those that no webhook may have: receivers trust that headers
#: beginning with hadelay- are from the cluster, and the other headers concern a single connection (RFC 9110, 7.6.1).
_NOT_FORWARDED = re.compile(r"hadelay-|proxy-|(expect|keep-alive|trailer)$")
_BATCH_KEY = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9._~-]{0,127}")
_ON_CONFLICT = {"keep": KEEP, "replace": REPLACE, "reject": REJECT}
#: Limits of a Content-Type in characters, and of an Idempotency-Key in bytes.
_MAX_CONTENT_TYPE, MAX_IDEMPOTENCY_KEY = 256, 255
#: Format of a traceparent (https://www.w3.org/TR/trace-context/); other values are ignored, as the standard asks.
TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def draft_of(
    limits: HttpConfig, max_delay_ms: int, item: BatchItem, times: tuple[int, bool], trace: str | None,
    body: bytes = b"",
) -> Draft:  # fmt: skip
    """Make the draft of message `item`, due at `times` (when_ms, relative). Does not check the topic. Raises BadRequest
    or Impossible."""
    idem = None if item.idempotency_key is None else check_idempotency_key(item.idempotency_key.encode())
    key, on_conflict = item.key, item.on_conflict
    packed_key = None if key is None else key.encode()
    if packed_key is not None and not 0 < len(packed_key) <= limits.max_key_bytes:
        raise BadRequest(f"key: 1 to {limits.max_key_bytes} bytes, not {len(packed_key)}")
    if key in DOTS:
        raise BadRequest(f"key: {key!r}: clients and proxies drop it from a path, …/keys/{key}: take another")
    if on_conflict is not None and on_conflict not in _ON_CONFLICT:
        raise BadRequest(f"on_conflict: {on_conflict[:40]!r}; choose keep, replace or reject")
    if on_conflict is not None and key is None:
        raise BadRequest("on_conflict is only allowed with a key")
    if item.max_wait is not None and on_conflict != "replace":
        raise BadRequest("max_wait is only allowed with on_conflict=replace")
    max_wait_ms, ttl_ms = _positive("max_wait", item.max_wait, max_delay_ms), _positive("ttl", item.ttl, max_delay_ms)
    unique_ms = 0 if item.unique_for is None else _unique_ms(item)
    if item.callback is not None and (wrong := url_problem(item.callback)):
        raise BadRequest(f"callback: {wrong}")
    own = item.callback, item.on_success, item.on_failure
    for topic in own[1:]:
        if topic is not None:
            check_new_topic(topic, limits.max_topic_bytes)
    group = None if item.group is None else hash_group(check_group(item.group))
    batch = None if item.batch is None else check_batch_key(item.batch)
    tags = check_tags(limits, item.tags or ())
    meta = pack_meta(
        limits, item.content_type, item.meta, key=key, tags=list(tags), ttl=ttl_ms, cb=item.callback, tp=trace,
        group=item.group, fw=check_forward(item.forward or {}), os=item.on_success, of=item.on_failure,
        batch=batch,
    )  # fmt: skip
    return Draft(
        item.topic, *times, mask_of(tags), ttl_ms, meta, body, idem, packed_key,
        _ON_CONFLICT[on_conflict or "keep"], max_wait_ms, own != (None, None, None), group, unique_ms,
        batch is not None,
    )  # fmt: skip


def callback_topics(draft: Draft) -> list[str]:
    """Topics that a message names for its callbacks; its publisher needs the right to publish to these topics."""
    meta = unpack(draft.meta) if draft.callback else None
    return [] if meta is None else [topic for topic in (meta.os, meta.of) if topic is not None]


def check_forward(fields: Mapping[str, str]) -> dict[str, str]:
    """Check the header fields of a message's webhook calls; returns them with names in lower case. Raises
    BadRequest."""
    found = {name.lower(): text for name, text in fields.items()}
    if len(found) < len(fields):
        raise BadRequest("forward: a name is given twice, in upper or lower case")
    # Many receivers read an underscore in a header's name as a dash, so a name with one is judged as if it had a dash.
    dashed = {name.replace("_", "-"): text for name, text in found.items()}
    if kept := next(filter(_NOT_FORWARDED.match, dashed), None):
        raise BadRequest(f"forward: {kept} is not for publishers to set: leave it out")
    if wrong := fields_problem(found) or fields_problem(dashed):
        raise BadRequest(f"forward: {wrong}")
    size = sum(len(name) + len(text) for name, text in found.items())
    if size > MAX_FORWARD:
        raise BadRequest(f"forward: {size} bytes, names included; at most {MAX_FORWARD} are allowed")
    return found


def check_group(group: str) -> str:
    """Check the name of a message group, and return it. Raises BadRequest for an invalid name."""
    if not 0 < len(group.encode()) <= MAX_GROUP or group in DOTS:
        raise BadRequest(f"group: {group[:40]!r}: 1 to {MAX_GROUP} bytes, neither . nor ..")
    return group


def check_batch_key(key: str) -> str:
    """Check the key of a batch, and return it. Raises BadRequest for an invalid key."""
    if not _BATCH_KEY.fullmatch(key):
        raise BadRequest(f"batch: {key[:40]!r}: 1 to 128 of A-Z a-z 0-9 . _ ~ -, and no dot in front")
    return key


def check_tags(limits: HttpConfig, tags: Iterable[str]) -> tuple[str, ...]:
    """Check tags; returns the distinct ones in the order given, without spaces around them. Raises BadRequest."""
    found = tuple(dict.fromkeys(tag.strip() for tag in tags))
    if len(found) > limits.max_tags:
        raise BadRequest(f"tags: {len(found)} given; at most {limits.max_tags} are allowed")
    for tag in found:
        if not 0 < len(tag.encode()) <= limits.max_tag_bytes or "," in tag or not tag.isprintable():
            raise BadRequest(f"tags: {tag[:70]!r}; 1 to {limits.max_tag_bytes} bytes of printable text, no commas")
    return found


def _positive(name: str, value: object, max_delay_ms: int) -> int:
    """Parse an option that is a positive duration; returns ms, and 0 for None. Raises BadRequest, Impossible."""
    return check_positive(name, None if value is None else parse_duration(name, value), max_delay_ms)


def check_positive(name: str, ms: int | None, max_delay_ms: int) -> int:
    """Check the duration of an option; returns ms, and 0 for None. Raises BadRequest if the duration is not positive,
    Impossible if it is longer than max_delay."""
    if ms is None:
        return 0
    if ms <= 0:
        raise BadRequest(f"{name}: must be more than 0, not {format_duration(ms)}; leave it out for none")
    if ms > max_delay_ms:
        raise Impossible(f"{name}: {format_duration(ms)} is beyond max_delay, {max_delay_ms / 86_400_000:g} days")
    return int(ms)  # a plain int, as msgspec cannot encode a Duration


def _unique_ms(item: BatchItem) -> int:
    """Parse `unique_for`; returns ms."""
    if item.key is None:
        raise BadRequest("unique_for is only allowed with a key")
    if item.on_conflict not in (None, "keep"):
        raise BadRequest(f"unique_for is not allowed with on_conflict={item.on_conflict}: a repeated key is dropped")
    ms = parse_duration("unique_for", item.unique_for)
    if ms <= 0:
        raise BadRequest(f"unique_for: must be more than 0, not {item.unique_for}; leave it out for none")
    if ms > MAX_UNIQUE_MS:
        raise Impossible(f"unique_for: {item.unique_for} is beyond the limit of {MAX_UNIQUE_MS // 86_400_000} days")
    return ms


def due_time(max_delay_ms: int, delay: object, deliver_at: object) -> tuple[int, bool]:
    """Due time of a draft, as (when_ms, relative), from `delay` or `deliver_at`; default: the topic's delay. Raises
    BadRequest, Impossible."""
    if delay is not None:
        if deliver_at is not None:
            raise BadRequest("delay and deliver_at contradict each other: give one of them")
        ms = parse_duration("delay", delay)
        if ms > max_delay_ms:
            days = max_delay_ms / 86_400_000
            raise Impossible(f"delay: {delay} is beyond max_delay, {days:g} days; it is refused, never shortened")
        return ms, True
    if deliver_at is None:
        return OWN_DELAY, True
    ms = parse_instant("deliver_at", deliver_at)
    return (ms, False) if ms > 0 else (0, True)


def pack_meta(
    limits: HttpConfig, content_type: str | None, meta: Mapping[str, str] | None, **options: Any
) -> bytes:  # fmt: skip
    """Encode the meta of a record (codec/meta.py), empty if no option is set. options: fields of Meta."""
    if content_type and (len(content_type) > _MAX_CONTENT_TYPE or not content_type.isprintable()):
        raise BadRequest(f"Content-Type: at most {_MAX_CONTENT_TYPE} printable characters")
    if meta:
        size = sum(len(name.encode()) + len(value.encode()) for name, value in meta.items())
        if size > limits.max_meta_bytes:
            raise BadRequest(f"meta has {size} bytes, names included; at most {limits.max_meta_bytes} are allowed")
    return pack(Meta(content_type or OCTETS, meta=dict(meta or {}), **options))


def check_traceparent(value: bytes) -> str | None:
    return value.decode() if TRACEPARENT.fullmatch(value) else None


def check_idempotency_key(value: bytes) -> bytes:
    value = value.strip()
    if not 0 < len(value) <= MAX_IDEMPOTENCY_KEY:
        raise BadRequest(f"Idempotency-Key: 1 to {MAX_IDEMPOTENCY_KEY} bytes, not {len(value)}")
    return value
