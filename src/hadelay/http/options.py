"""Options of a publish: headers and query of a single one, fields of a batch item.

A single publish becomes a `DraftTemplate`, which has all but the body. It depends on the bytes of the head alone, so
requestheads.py caches those of recent heads, and most publishes parse nothing.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from hadelay.api.publishing import BatchItem, PublishQuery
from hadelay.api.text import DOTS, check_new_topic, format_duration, parse_duration, parse_instant
from hadelay.codec.meta import OCTETS, Meta, mask_of, pack, unpack
from hadelay.codec.publishcommand import hash_group
from hadelay.errors import BadRequest, Impossible, UnsupportedMediaType
from hadelay.http.answers import JSON
from hadelay.http.decoding import parse_query, refuse_unknown
from hadelay.model import KEEP, MAX_GROUP, MAX_UNIQUE_MS, REJECT, REPLACE, Draft
from hadelay.settings.node import HttpConfig
from hadelay.settings.topic import MAX_FORWARD, fields_problem
from hadelay.settings.urls import url_problem

_RAW = msgspec.json.Decoder(msgspec.Raw)
#: Prefixes of headers that have a name of their own behind the prefix.
_META, _FORWARD = b"hadelay-meta-", b"hadelay-forward-"
#: Header names that no message may forward, besides those that no webhook may have: receivers believe that the cluster
#: says what begins with hadelay-, and the others concern a single connection (RFC 9110, 7.6.1).
_NOT_FORWARDED = re.compile(r"hadelay-|proxy-|(expect|keep-alive|trailer)$")
HEADERS = (
    "Hadelay-Delay", "Hadelay-Deliver-At", "Hadelay-Key", "Hadelay-On-Conflict", "Hadelay-Max-Wait",
    "Hadelay-Unique-For", "Hadelay-Tags", "Hadelay-TTL", "Hadelay-Callback", "Hadelay-Group", "Hadelay-On-Success",
    "Hadelay-On-Failure", "Hadelay-Meta-*",
    "Hadelay-Forward-*",
)  # fmt: skip
_KNOWN_QUERY = PublishQuery.__struct_fields__
#: Query options that few publishes have.
_EXTRAS = frozenset(_KNOWN_QUERY) - {"delay", "deliver_at"}
_ON_CONFLICT = {"keep": KEEP, "replace": REPLACE, "reject": REJECT}
_MAX_CONTENT_TYPE = 256
_MAX_IDEMPOTENCY_KEY = 255
#: Format of a traceparent (https://www.w3.org/TR/trace-context/); other values are ignored, as the standard asks.
TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

#: Pattern of the most common query: only delay or deliver_at, without percent-encoding.
_PLAIN_QUERY = re.compile(r"(delay|deliver_at)=([0-9A-Za-z.:-]*)")


class DraftTemplate(NamedTuple):
    """A publish of one message without its body."""

    draft: Draft
    idempotency_key: bytes | None = None
    #: True for the content type of forms, which `curl -d` sends with any body: the body may be JSON.
    form: bool = False

    def with_body(self, body: bytes) -> Draft:
        if self.form and _is_json(body):
            return replace(self.draft, body=body, meta=pack(replace(unpack(self.draft.meta), ct=JSON)))
        return replace(self.draft, body=body)


class PublishOptions(NamedTuple):
    """Options in the headers of a publish; other options may be in the query."""

    found: dict[str, str]
    content_type: str
    own_meta: dict[str, str]
    #: Header fields of the message's webhook calls.
    forward: dict[str, str]
    traceparent: str | None
    #: Encoded meta of the record: content type, own meta, header fields to forward, and traceparent.
    meta: bytes
    idempotency_key: bytes | None
    form: bool


def parse_head(
    limits: HttpConfig, max_delay_ms: int, topic: str, query: str, headers: Iterable[tuple[bytes, bytes]]
) -> DraftTemplate:
    """Template of a publish. query: percent-encoded. Raises BadRequest, Impossible or UnsupportedMediaType."""
    return with_line(limits, max_delay_ms, topic, query, parse_headers(limits, headers))


def parse_headers(limits: HttpConfig, headers: Iterable[tuple[bytes, bytes]]) -> PublishOptions:
    found: dict[str, str] = {}
    meta: dict[str, str] = {}
    forward: dict[str, str] = {}
    content_type = ""
    key: bytes | None = None
    trace: str | None = None
    for name, value in headers:
        name = name.lower()
        if name == b"content-type":
            content_type = text_of(value)
        elif name == b"idempotency-key":
            if key is not None:
                raise BadRequest("Idempotency-Key is given twice")
            key = check_idempotency_key(value)
        elif name == b"traceparent":
            trace = check_traceparent(value)
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise UnsupportedMediaType("messages do not keep a Content-Encoding: send the payload without this header")
        elif name.startswith(_META):
            _add_named(meta, name, len(_META), value)
        elif name.startswith(_FORWARD):
            _add_named(forward, name, len(_FORWARD), value)
        elif name.startswith(b"hadelay-"):
            option = name[8:].decode("latin-1").replace("-", "_")
            if option not in _KNOWN_QUERY:
                refuse_unknown("header", name.decode("latin-1").title(), HEADERS)
            _once(found, option, text_of(value))
    packed = pack_meta(limits, content_type, meta, tp=trace, fw=check_forward(forward))
    form = content_type.partition(";")[0].strip().lower() == "application/x-www-form-urlencoded"
    return PublishOptions(found, content_type, meta, forward, trace, packed, key, form)


def _add_named(fields: dict[str, str], name: bytes, prefix: int, value: bytes) -> None:
    """Add a header with a name of its own behind a prefix of so many bytes. Raises BadRequest."""
    own = name[prefix:].decode("latin-1")
    if not own or own in fields:
        raise BadRequest(f"{name.decode('latin-1').title()} {'is given twice' if own else 'has no name'}")
    fields[own] = text_of(value)


def with_line(limits: HttpConfig, max_delay_ms: int, topic: str, query: str, options: PublishOptions) -> DraftTemplate:
    found = options.found
    if query:
        found = found.copy()
        plain = _PLAIN_QUERY.fullmatch(query)
        pairs = [(plain[1], plain[2])] if plain else parse_query(query)
        for option, text in pairs:
            if option not in _KNOWN_QUERY:
                refuse_unknown("query parameter", option, _KNOWN_QUERY)
            _once(found, option, text)
    times = when(max_delay_ms, found.get("delay"), found.get("deliver_at"))
    check_new_topic(topic, limits.max_topic_bytes)
    if found.keys().isdisjoint(_EXTRAS):
        draft = Draft(topic, *times, 0, 0, options.meta, b"")
    else:
        given: dict[str, Any] = {**found}
        if "tags" in found:
            given["tags"] = found["tags"].split(",")
        item = BatchItem(
            topic, content_type=options.content_type, meta=options.own_meta, forward=options.forward, **given
        )
        draft = draft_of(limits, max_delay_ms, item, times, options.traceparent)
    return DraftTemplate(draft, options.idempotency_key, options.form)


def draft_of(
    limits: HttpConfig, max_delay_ms: int, item: BatchItem, times: tuple[int, bool], trace: str | None,
    body: bytes = b"",
) -> Draft:  # fmt: skip
    """Draft of message `item`, due at `times` (when_ms, relative), topic unchecked. Raises BadRequest or Impossible."""
    idem = None if item.idempotency_key is None else check_idempotency_key(item.idempotency_key.encode())
    key, on_conflict = item.key, item.on_conflict
    packed_key = None if key is None else key.encode()
    if packed_key is not None and not 0 < len(packed_key) <= limits.max_key_bytes:
        raise BadRequest(f"key: 1 to {limits.max_key_bytes} bytes, not {len(packed_key)}")
    if key in DOTS:
        raise BadRequest(f"key: {key!r}: clients and proxies remove this from a path (/v1/topics/{{topic}}/keys/{key})")
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
    tags = check_tags(limits, item.tags or ())
    meta = pack_meta(
        limits, item.content_type, item.meta, key=key, tags=list(tags), ttl=ttl_ms, cb=item.callback, tp=trace,
        group=item.group, fw=check_forward(item.forward or {}), os=item.on_success, of=item.on_failure,
    )  # fmt: skip
    return Draft(
        item.topic, *times, mask_of(tags), ttl_ms, meta, body, idem, packed_key,
        _ON_CONFLICT[on_conflict or "keep"], max_wait_ms, own != (None, None, None), group, unique_ms,
    )  # fmt: skip


def callback_topics(draft: Draft) -> list[str]:
    """Topics of its callbacks that a message names; its publisher needs the right to publish there."""
    meta = unpack(draft.meta) if draft.callback else None
    return [] if meta is None else [topic for topic in (meta.os, meta.of) if topic is not None]


def with_key(template: DraftTemplate, key: bytes, limits: HttpConfig) -> DraftTemplate | None:
    """The template with a client key in ASCII; None if the key is invalid, or the template has a key already."""
    draft = template.draft
    if draft.key is not None or len(key) > limits.max_key_bytes or key.decode() in DOTS:
        return None
    meta = pack(replace(unpack(draft.meta), key=key.decode()))
    return template._replace(draft=replace(draft, key=key, meta=meta))


def with_idempotency_key(template: DraftTemplate, key: bytes, limits: HttpConfig) -> DraftTemplate | None:
    """This template with an Idempotency-Key; None if the header is invalid or repeated."""
    if template.idempotency_key is not None or len(key) > _MAX_IDEMPOTENCY_KEY:
        return None
    return template._replace(idempotency_key=key)


def with_trace(template: DraftTemplate, trace: bytes, limits: HttpConfig) -> DraftTemplate | None:
    meta = pack(replace(unpack(template.draft.meta), tp=trace.decode()))
    return template._replace(draft=replace(template.draft, meta=meta))


def check_forward(fields: Mapping[str, str]) -> dict[str, str]:
    """Header fields of a message's webhook calls, their names in lower case. Raises BadRequest."""
    found = {name.lower(): text for name, text in fields.items()}
    if len(found) < len(fields):
        raise BadRequest("forward: a name is given twice")
    if kept := next(filter(_NOT_FORWARDED.match, found), None):
        raise BadRequest(f"forward: {kept} is not for publishers to set: leave it out")
    if wrong := fields_problem(found):
        raise BadRequest(f"forward: {wrong}")
    size = sum(len(name) + len(text) for name, text in found.items())
    if size > MAX_FORWARD:
        raise BadRequest(f"forward: {size} bytes, names included; at most {MAX_FORWARD} are allowed")
    return found


def check_group(group: str) -> str:
    """The name of a message group. Raises BadRequest for an invalid one."""
    if not 0 < len(group.encode()) <= MAX_GROUP or group in DOTS:
        raise BadRequest(f"group: {group[:40]!r}: 1 to {MAX_GROUP} bytes, neither . nor ..")
    return group


def check_tags(limits: HttpConfig, tags: Iterable[str]) -> tuple[str, ...]:
    """Distinct tags in the order given, without spaces around them. Raises BadRequest."""
    found = tuple(dict.fromkeys(tag.strip() for tag in tags))
    if len(found) > limits.max_tags:
        raise BadRequest(f"tags: {len(found)} given; at most {limits.max_tags} are allowed")
    for tag in found:
        if not 0 < len(tag.encode()) <= limits.max_tag_bytes or "," in tag or not tag.isprintable():
            raise BadRequest(f"tags: {tag[:70]!r}; 1 to {limits.max_tag_bytes} bytes of printable text, no commas")
    return found


def _is_json(body: bytes) -> bool:
    """Whether the body is valid JSON. Parsing 1 MiB without building values takes at most 3 ms."""
    try:
        _RAW.decode(body)
        body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _positive(name: str, value: object, max_delay_ms: int) -> int:
    """Parse an option that is a positive duration; returns ms, and 0 for None. Raises BadRequest, Impossible."""
    return check_positive(name, None if value is None else parse_duration(name, value), max_delay_ms)


def check_positive(name: str, ms: int | None, max_delay_ms: int) -> int:
    """The duration `ms` of an option, and 0 for None. Raises BadRequest if it is not positive, Impossible if it is
    longer than max_delay."""
    if ms is None:
        return 0
    if ms <= 0:
        raise BadRequest(f"{name}: must be more than 0, not {format_duration(ms)}; leave it out for none")
    if ms > max_delay_ms:
        raise Impossible(f"{name}: {format_duration(ms)} is beyond max_delay, {max_delay_ms / 86_400_000:g} days")
    return int(ms)  # msgspec encodes no Duration


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


def _once(found: dict[str, str], option: str, text: str) -> None:
    if option in found:
        raise BadRequest(f"{option} is given twice: once by header or query is enough")
    found[option] = text


def text_of(value: bytes) -> str:
    """A header's value: UTF-8, else latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def when(max_delay_ms: int, delay: object, deliver_at: object) -> tuple[int, bool]:
    """(when_ms, relative) of a draft from `delay` or `deliver_at`; default: now. Raises BadRequest, Impossible."""
    if delay is not None:
        if deliver_at is not None:
            raise BadRequest("delay and deliver_at contradict each other: give one of them")
        ms = parse_duration("delay", delay)
        if ms > max_delay_ms:
            days = max_delay_ms / 86_400_000
            raise Impossible(f"delay: {delay} is beyond max_delay, {days:g} days; it is refused, never shortened")
        return ms, True
    if deliver_at is None:
        return 0, True
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
            raise BadRequest(f"meta has {size} bytes, names included; at most {limits.max_meta_bytes} are kept")
    return pack(Meta(content_type or OCTETS, meta=dict(meta or {}), **options))


def check_traceparent(value: bytes) -> str | None:
    return value.decode() if TRACEPARENT.fullmatch(value) else None


def check_idempotency_key(value: bytes) -> bytes:
    value = value.strip()
    if not 0 < len(value) <= _MAX_IDEMPOTENCY_KEY:
        raise BadRequest(f"Idempotency-Key: 1 to {_MAX_IDEMPOTENCY_KEY} bytes, not {len(value)}")
    return value
