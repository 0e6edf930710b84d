"""Routes for publishing: POST /v1/topics/{topic}/messages and POST /v1/messages:batch.

connection.py answers most single publishes without a task. The handler here answers those that need more of HTTP
(chunked bodies, Expect, a body in many pieces), and wrong ones.
"""

from binascii import Error as Base64Error
from binascii import a2b_base64
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import asdict, fields

from hadelay.api.publishing import BatchResult, BatchResults, Published
from hadelay.api.publishrequest import BatchItem, PublishQuery, UsualItem
from hadelay.api.service import Receipts, answered
from hadelay.api.text import DOTS, LARGEST_MS, SMALLEST_INSTANT_MS, check_new_topic
from hadelay.codec.meta import Meta, pack
from hadelay.codec.publishcommand import hash_group
from hadelay.errors import BadRequest, HadelayError, TooLarge
from hadelay.http import options, parts, receipts
from hadelay.http.answers import JSON, JSON_TYPE, MSGPACK_TYPE, Answer
from hadelay.http.batches import slices
from hadelay.http.call import Call
from hadelay.http.routes import Routes
from hadelay.model import MAX_GROUP, Draft
from hadelay.rules import publishing

routes = Routes()


async def commit(call: Call, drafts: list[Draft], key: bytes | None) -> Receipts:
    """Publish and wait for the commit; a disconnect does not undo the publish."""
    found: Receipts = await answered(lambda done: call.service.publish(drafts, key, done, call.actor.token))
    return found


@routes.add(
    "POST",
    "/v1/topics/{topic}/messages",
    query=PublishQuery,
    headers=options.HEADERS,
    returns={201: Published[str], 200: Published[str]},
    errors=(404, 409, 429),
    raw_body=True,
    own_head=True,
    scope="publish",
)
async def publish(call: Call) -> Answer:
    """Publish one message; the body is the payload"""
    context, request = call.context, call.request
    _, query = context.router.choose(request.rel_url.raw_query_string)
    template = options.parse_head(context.config, context.max_delay_ms, call.path["topic"], query, request.raw_headers)
    for topic in publishing.callback_topics(template.draft):
        call.access.need("publish", topic)
    draft = template.with_body(await call.read(context.config.max_body_bytes, "max_body_bytes"))
    answer = await commit(call, [draft], template.idempotency_key)
    status, message_id, document = receipts.one(draft, answer)
    where = f"/v1/messages/{message_id}"
    return Answer(status, {"Content-Type": JSON, "Location": where}, document)


@routes.add(
    "POST",
    "/v1/messages:batch",
    returns={200: BatchResults[str]},
    errors=(429,),
    raw_body=True,
    short=True,
    scope="publish",
    own_topics=True,
)
async def publish_batch(call: Call) -> Answer:
    """Publish many messages in one commit; results are in the order of the items"""
    request = call.request
    keys = request.headers.getall("Idempotency-Key", ())
    if len(keys) > 1:
        raise BadRequest("Idempotency-Key is given twice")
    request_key = publishing.check_idempotency_key(keys[0].encode("utf-8", "surrogateescape")) if keys else None
    limits = call.context.config
    data = await call.read(limits.max_batch_bytes, "max_batch_bytes")
    built, turns, router = _Drafts(call), call.context.turns, call.router
    if call.chosen is not None:
        router = call.context.router  # divide the batch to refuse messages of other shards than the chosen one
    division = None if router is None else parts.Division(call, router)
    for some in slices(data, call.media_type, limits.max_batch_items, limits.max_body_bytes):
        built.add(some.items if division is None else division.take(some.items))
        turns.count(some.work)
        if some.more:
            await turns.next()
    if division is not None and division.elsewhere:
        return await _publish_divided(call, division, built, request_key)
    answer = await commit(call, built.drafts, request_key) if built.drafts else Receipts([], [])
    msgpack = call.wants_msgpack()
    for error in built.problems.values():
        call.context.denials.note(call.route.name, error)
    document = await receipts.batch(answer, built.problems, built.total, msgpack, turns)
    return Answer(200, MSGPACK_TYPE if msgpack else JSON_TYPE, document)


async def _publish_divided(call: Call, division: parts.Division, built: "_Drafts", key: bytes | None) -> Answer:
    """Publish a batch with messages for several shards, or for one other shard."""
    division.check()
    for shard in division.elsewhere:
        call.context.router.check(call.chosen, call.context.router.destination(shard))
    if (to := division.only) is not None:
        return await call.forward(to)

    async def here() -> list[BatchResult[str]]:
        answer = await commit(call, built.drafts, key) if built.drafts else Receipts([], [])
        return list(receipts.mixed(answer, built.problems, built.total))

    results, msgpack = await division.publish(here), call.wants_msgpack()
    document = await receipts.encoded(iter(results), len(results), msgpack, call.context.turns)
    return Answer(200, MSGPACK_TYPE if msgpack else JSON_TYPE, document)


def _only(*names: str) -> Callable[[Any], bool]:
    """Make a function that tells whether a batch item has no fields but `names`. The function is compiled from all
    fields of an item: it is as fast as a condition written by hand, which may forget a field."""
    default = {field.name: field.default for field in fields(BatchItem) if field.name not in names}
    code = " and ".join(f"item.{name} is default_{name}" for name in default)
    scope = {f"default_{name}": value for name, value in default.items()}
    return eval(f"lambda item: {code}", scope)  # type: ignore[no-any-return]


_is_usual = _only(*UsualItem.__struct_fields__)
_has_no_options = _only("topic", "body", "body_base64", "content_type", "delay", "deliver_at")
#: Limit of the topics in a batch: each new topic costs every node some 20 µs of one turn of its event loop.
_MAX_TOPICS = 1_000


class _Drafts:
    """Drafts of one batch's items. An invalid item is refused in its position; the other items are published.

    Topics, times and metas repeat within a batch, so their results are cached.
    """

    def __init__(self, call: Call) -> None:
        self.limits, self.access = call.context.config, call.access
        self.max_delay_ms = call.context.max_delay_ms
        self.topics: set[str] = set()
        self.whens: dict[tuple[object, object], tuple[int, bool]] = {}
        self.metas: dict[str, bytes] = {}
        #: Traceparent of the request, for items without their own.
        self.trace = publishing.check_traceparent(
            call.request.headers.get("traceparent", "").encode("utf-8", "surrogateescape")
        )
        self.plain = pack(Meta(tp=self.trace))
        self.drafts: list[Draft] = []
        #: Refusals of items, by position in the batch.
        self.problems: dict[int, HadelayError] = {}
        self.total = 0

    def add(self, items: list[Any]) -> None:
        """Add the next items of the batch; an error stands for an item that was not decoded."""
        drafts, first = self.drafts, self.total
        self.total += len(items)
        topics, when_of, one, plain = self.topics, self._when, self._one, self.plain
        max_body, max_delay_s = self.limits.max_body_bytes, self.max_delay_ms // 1000
        # Names of this many characters are never too long: a character has at most four bytes in UTF-8.
        short_key, short_group = self.limits.max_key_bytes // 4, MAX_GROUP // 4
        for place, item in enumerate(items, first):
            if isinstance(item, HadelayError):
                self.problems[place] = item
                continue
            body, key, group, delay, at = item.body, item.key, item.group, item.delay, item.deliver_at
            try:
                # Fast path for usual items: a body of bytes, a known topic, a due time, perhaps a client key and group.
                if not (
                    (type(item) is UsualItem or (type(body) is bytes and _is_usual(item)))
                    and len(body) <= max_body
                    and item.topic in topics
                    and (key is None or (0 < len(key) <= short_key and key not in DOTS))
                    and (group is None or (0 < len(group) <= short_group and group not in DOTS))
                ):
                    drafts.append(one(item))
                    continue
                if at is None and type(delay) is int and 0 <= delay <= max_delay_s:
                    when_ms, relative = delay * 1000, True
                elif delay is None and type(at) is int and SMALLEST_INSTANT_MS <= at < LARGEST_MS:
                    when_ms, relative = at, False
                else:
                    when_ms, relative = when_of(delay, at)
                if key is None and group is None:
                    drafts.append(Draft(item.topic, when_ms, relative, 0, 0, plain, body))
                else:
                    drafts.append(self._named(item, when_ms, relative))
            except HadelayError as error:
                self.problems[place] = error

    def _when(self, delay: object, at: object) -> tuple[int, bool]:
        # In the cache `whens`, 1, 1.0 and True are the same key. That is safe: the item's decoder has refused True.
        times = self.whens.get((delay, at))
        if times is None:
            times = self.whens[delay, at] = publishing.due_time(self.max_delay_ms, delay, at)
        return times

    def _named(self, item: Any, when_ms: int, relative: bool) -> Draft:
        """Draft of a usual item with a client key, a group or both. The caller has checked key and group."""
        key, group = item.key, item.group
        return Draft(
            item.topic,
            when_ms,
            relative,
            0,
            0,
            pack(Meta(key=key, tp=self.trace, group=group)),
            item.body,
            key=None if key is None else key.encode(),
            group=None if group is None else hash_group(group),
        )

    def _one(self, item: Any) -> Draft:
        limits = self.limits
        if type(item) is UsualItem:
            item = BatchItem(**asdict(item))
        if item.topic not in self.topics:
            if len(self.topics) >= _MAX_TOPICS:
                raise TooLarge(
                    f"a batch has messages for at most {_MAX_TOPICS} topics: send the others in another batch"
                )
            self.access.need("publish", check_new_topic(item.topic, limits.max_topic_bytes))
            self.topics.add(item.topic)
        times = self._when(item.delay, item.deliver_at)
        body, content_type = payload(item)
        if len(body) > limits.max_body_bytes:
            raise TooLarge(
                f"a payload of {len(body)} bytes; at most {limits.max_body_bytes} are allowed (max_body_bytes)"
            )
        if not _has_no_options(item):
            trace = self.trace if item.traceparent is None else publishing.check_traceparent(item.traceparent.encode())
            item.content_type = content_type
            draft = publishing.draft_of(limits, self.max_delay_ms, item, times, trace, body)
            for topic in publishing.callback_topics(draft):
                self.access.need("publish", topic)
            return draft
        meta = self.metas.get(content_type)
        if meta is None:
            meta = self.metas[content_type] = publishing.pack_meta(limits, content_type, None, tp=self.trace)
        when_ms, relative = times
        return Draft(item.topic, when_ms, relative, 0, 0, meta, body)


def payload(item: Any) -> tuple[bytes, str]:
    """Payload of a batch item: (bytes, content type). Raises BadRequest."""
    body, given = item.body, item.content_type or ""
    if item.body_base64 is not UNSET:
        if body is not UNSET and (not isinstance(body, Raw) or bytes(body)):
            raise BadRequest("body and body_base64 are both given: give only one")
        try:
            return a2b_base64(item.body_base64, strict_mode=True), given
        except (Base64Error, ValueError) as error:
            raise BadRequest(f"body_base64: {error}") from None
    kind = type(body)
    if kind is bytes:
        return body, given
    if kind is Raw:
        text = bytes(body)
        if text[:1] == b'"':
            return msgspec.json.decode(text, type=str).encode(), given or "text/plain"
        return text, given or ("application/json" if text else "")
    if kind is str:
        return body.encode(), given or "text/plain"
    if body is UNSET:
        return b"", given
    try:
        return msgspec.json.encode(body), given or "application/json"
    except (TypeError, ValueError, RecursionError) as error:  # the body has a value that only MessagePack can express
        raise BadRequest(f"body: cannot be converted to JSON ({error}); send it as bytes") from None
