"""Options of a publish: headers and query of a single publish, and fields of a batch item.

A single publish becomes a `DraftTemplate`, which has all but the body. It depends on the bytes of the head alone, so
requestheads.py caches those of recent heads, and most publishes parse nothing.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from hadelay.api import publishoptions
from hadelay.api.publishrequest import BatchItem, PublishQuery
from hadelay.api.text import DOTS, check_new_topic
from hadelay.codec.meta import pack, unpack
from hadelay.errors import BadRequest, UnsupportedMediaType
from hadelay.http.answers import JSON
from hadelay.http.decoding import parse_query, refuse_underscore
from hadelay.model import Draft
from hadelay.rules.documents import refuse_unknown
from hadelay.rules.publishing import (
    MAX_IDEMPOTENCY_KEY,
    check_forward,
    check_idempotency_key,
    check_traceparent,
    draft_of,
    due_time,
    pack_meta,
)
from hadelay.settings.node import HttpConfig

_RAW = msgspec.json.Decoder(msgspec.Raw)
#: Prefixes of headers that carry a named field: the field's name follows the prefix.
_META, _FORWARD = b"hadelay-meta-", b"hadelay-forward-"
#: Headers that set an option of a publish, without the standard headers.
HEADERS = tuple(header for header in publishoptions.HEADERS.values() if header.startswith("Hadelay-"))
_KNOWN_QUERY = PublishQuery.__struct_fields__
#: Query options that few publishes have.
_EXTRAS = frozenset(_KNOWN_QUERY) - {"delay", "deliver_at"}

#: Pattern of the most common query: only delay or deliver_at, without percent-encoding.
_PLAIN_QUERY = re.compile(r"(delay|deliver_at)=([0-9A-Za-z.:-]*)")


class DraftTemplate(NamedTuple):
    """A publish of one message, without the message's body, which `with_body` adds."""

    draft: Draft
    idempotency_key: bytes | None = None
    #: True for the content type of forms, which `curl -d` sends with any body: the body may be JSON.
    form: bool = False
    #: Name of the request's token; "" without one.
    by: str = ""

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
        elif name.startswith(b"hadelay-") and name != b"hadelay-shard":
            option = name[8:].decode("latin-1").replace("-", "_")
            if option not in _KNOWN_QUERY:
                refuse_unknown("header", name.decode("latin-1").title(), HEADERS)
            _once(found, option, text_of(value))
        else:
            refuse_underscore(name)
    packed = pack_meta(limits, content_type, meta, tp=trace, fw=check_forward(forward))
    form = content_type.partition(";")[0].strip().lower() == "application/x-www-form-urlencoded"
    return PublishOptions(found, content_type, meta, forward, trace, packed, key, form)


def _add_named(fields: dict[str, str], name: bytes, prefix: int, value: bytes) -> None:
    """Add a header whose own name follows a prefix. prefix: length of the prefix, in bytes. Raises BadRequest."""
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
    times = due_time(max_delay_ms, found.get("delay"), found.get("deliver_at"))
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


def with_key(template: DraftTemplate, key: bytes, limits: HttpConfig) -> DraftTemplate | None:
    """The template with a client key in ASCII; None if the key is invalid, or the template has a key already."""
    draft = template.draft
    if draft.key is not None or len(key) > limits.max_key_bytes or key.decode() in DOTS:
        return None
    meta = pack(replace(unpack(draft.meta), key=key.decode()))
    return template._replace(draft=replace(draft, key=key, meta=meta))


def with_idempotency_key(template: DraftTemplate, key: bytes, limits: HttpConfig) -> DraftTemplate | None:
    """This template with an Idempotency-Key; None if the header is invalid or repeated."""
    if template.idempotency_key is not None or len(key) > MAX_IDEMPOTENCY_KEY:
        return None
    return template._replace(idempotency_key=key)


def with_trace(template: DraftTemplate, trace: bytes, limits: HttpConfig) -> DraftTemplate | None:
    meta = pack(replace(unpack(template.draft.meta), tp=trace.decode()))
    return template._replace(draft=replace(template.draft, meta=meta))


def _is_json(body: bytes) -> bool:
    """Whether the body is valid JSON. Parsing 1 MiB without building values takes at most 3 ms."""
    try:
        _RAW.decode(body)
        body.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _once(found: dict[str, str], option: str, text: str) -> None:
    if option in found:
        raise BadRequest(f"{option} is given twice: once by header or query is enough")
    found[option] = text


def text_of(value: bytes) -> str:
    """Decode a header's value: as UTF-8 if it is valid UTF-8, otherwise as latin-1."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
