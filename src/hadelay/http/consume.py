"""Routes for consumers: receive, ack, nack, extend.

A disconnect cancels the handler and its poll, so that nothing is leased to a client that left. Only the leader hands
out; other nodes answer 307, or relay the poll for clients that cannot follow a redirect.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from hadelay.api import consuming
from hadelay.api.service import Handed, Leader, ReceiveRequest, SettleKind
from hadelay.api.text import check_topic
from hadelay.errors import BadRequest, HadelayError, Impossible, NoLeader, TooLarge
from hadelay.http import parts
from hadelay.http.answers import Answer
from hadelay.http.call import Call
from hadelay.http.forwarding.heads import SHARD
from hadelay.http.routes import Routes
from hadelay.model import MAX_REASON, MAX_RESULT, MAX_RUN
from hadelay.rules.access import RequestRights
from hadelay.rules.publishing import check_tags

routes = Routes()

_MAX_TOPICS = 1_000
_MAX_CONSUMER = 128
_MAX_REQUEST_ID = 64
#: Limit of leases in one ack, nack or extend request; a request with more is refused.
_MAX_LEASES = 10_000
#: Limit of searches for a leader by one poll: the leader may be deposed while the poll waits.
_ATTEMPTS = 3
_RECEIVING: Any = {
    "query": consuming.ReceiveQuery, "returns": {200: consuming.ReceivedMessages, 307: None}, "errors": (404, 409, 429),
    "short": True, "scope": "consume",
}  # fmt: skip


@routes.add("POST", "/v1/topics/{topic}/receive", body=consuming.Receive, **_RECEIVING)
async def receive(call: Call) -> Answer:
    """Lease due messages of one topic, waiting for the first"""
    return await _receive(call, [call.path["topic"]])


@routes.add(
    "POST", "/v1/receive", body=consuming.ReceiveTopics, own_topics=True, max_bytes=_MAX_TOPICS * 256, **_RECEIVING
)
async def receive_topics(call: Call) -> Answer:
    """Lease due messages of several topics, waiting for the first"""
    topics = call.body.topics
    if not 0 < len(topics) <= _MAX_TOPICS:
        raise BadRequest(f"topics: {len(topics)} names given; 1 to {_MAX_TOPICS} are allowed")
    for topic in topics:
        call.access.need("consume", topic)
    return await _receive(call, topics)


async def _receive(call: Call, topics: list[str]) -> Answer:
    found = await hand_out(call, call.access, _request(call, topics), lambda leader: _elsewhere(call, leader))
    return found if isinstance(found, Answer) else _answer(call, found)


async def hand_out(
    call: Call, access: RequestRights, ask: ReceiveRequest, elsewhere: Callable[[Leader], Awaitable[Answer]]
) -> Handed | Answer:
    """Lease messages if this node leads; otherwise return the answer that `elsewhere` makes for the leader."""
    with call.context.waiting.one_more(access):
        to = call.context.router.of_topics(ask.topics, call.request.headers.get(SHARD))
        call.context.router.check(call.chosen, to)
        if to is not None:
            return await elsewhere(await call.context.forwarder.find_leader(to))
        return await _from_leader(call, ask, elsewhere)


async def _from_leader(
    call: Call, ask: ReceiveRequest, elsewhere: Callable[[Leader], Awaitable[Answer]]
) -> Handed | Answer:
    context, loop = call.context, asyncio.get_running_loop()
    failure: HadelayError = NoLeader("there is no leader", retry_after_ms=500)
    until = loop.time() + ask.wait_ms / 1000
    for _ in range(_ATTEMPTS):
        leader = await call.service.cluster.find_leader()
        if not leader.here:
            return await elsewhere(leader)
        try:
            return await context.polls.run(call.service.consume.receive(ask))
        except NoLeader as error:  # this node lost the leadership: look for the new leader
            failure = error
            ask = msgspec.structs.replace(ask, wait_ms=max(0, int((until - loop.time()) * 1000)))
    raise failure


async def _elsewhere(call: Call, leader: Leader) -> Answer:
    if call.query.redirect:
        return Answer(307, {"Location": leader.url + call.target}, b"")
    request, path, context = call.request, call.target.partition("?")[0], call.context
    answer = context.relay.ask(leader, request.method, path, call.data, request.headers, call.body.wait or 0)
    return await context.polls.run(answer)


def _request(call: Call, topics: list[str]) -> ReceiveRequest:
    limits, document = call.context.config, call.body
    for topic in topics:
        check_topic(topic)
    count = limits.default_receive if document.max is None else document.max
    if not 1 <= count <= limits.max_receive:
        raise BadRequest(f"max: {count} is not allowed; 1 to {limits.max_receive} messages per receive")
    if not 1 <= document.group_max <= MAX_RUN:
        raise BadRequest(f"group_max: {document.group_max} is not allowed; 1 to {MAX_RUN} messages of one group")
    wait_ms = document.wait or 0
    if wait_ms > limits.max_wait_ms:
        raise BadRequest(f"wait: {wait_ms} ms is too long; wait at most {limits.max_wait_ms} ms, then receive again")
    consumer = document.consumer if document.consumer is not None else "anonymous"
    if not 0 < len(consumer.encode()) <= _MAX_CONSUMER or not consumer.isprintable():
        raise BadRequest(f"consumer: the name must have 1 to {_MAX_CONSUMER} bytes of printable text")
    request_id = os.urandom(16) if document.request_id is None else document.request_id.encode()
    if not 0 < len(request_id) <= _MAX_REQUEST_ID:
        raise BadRequest(f"request_id: it must have 1 to {_MAX_REQUEST_ID} bytes")
    lease_ms = None if document.lease is None else _lease(call, document.lease)
    tags, any_tags = check_tags(limits, document.tags), check_tags(limits, document.any_tags)
    return ReceiveRequest(
        list(dict.fromkeys(topics)),
        consumer,
        request_id,
        count,
        int(wait_ms),
        lease_ms,
        tags,
        any_tags,
        getattr(document, "order", "turns") == "listed",
        document.group_max,
        call.request.headers.get("Via", "").rpartition(" ")[2],
    )


def _lease(call: Call, lease_ms: int) -> int:
    longest = call.context.config.max_lease_ms
    if not 0 < lease_ms <= longest:
        raise BadRequest(f"lease: {lease_ms} ms; more than 0 and at most {longest} ms; extend it for longer work")
    return int(lease_ms)


def _answer(call: Call, handed: Handed) -> Answer:
    if not call.wants_msgpack():
        texts = call.request.headers.get("Accept-Body", "").lower() == "text"
        for message in handed.messages:
            payload = message.body
            message.body = _text(payload, message.content_type) if texts else msgspec.UNSET
            if message.body is msgspec.UNSET:
                message.body_base64 = payload
    answer = call.answer(consuming.ReceivedMessages(handed.messages))
    handed.answered()
    return answer


def _text(payload: Any, content_type: str) -> Any:
    """Payload as text; UNSET if its content type or its bytes are not text."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind.startswith("text/") or kind in _TEXTUAL or kind.endswith(("+json", "+xml")):
        try:
            return str(payload, "utf-8")
        except UnicodeDecodeError:
            pass
    return msgspec.UNSET


_TEXTUAL = ("application/json", "application/xml", "application/x-ndjson", "application/x-www-form-urlencoded")

#: Options of the routes for leases. max_bytes: enough for _MAX_LEASES tokens of 29 characters, with quotes and commas.
_SETTLING: Any = {"short": True, "scope": "consume", "own_topics": True, "max_bytes": _MAX_LEASES * 48}


#: Options of the ack route. Its bodies may be larger, because results may be larger than lease tokens.
_ACKING: Any = {**_SETTLING, "max_bytes": 512 << 10}


@routes.add("POST", "/v1/leases:ack", body=consuming.Ack, returns={200: consuming.AckResults}, **_ACKING)
async def ack(call: Call) -> Answer:
    """Acknowledge messages, with results if there are any: they are never handed out again"""
    return await _settle(call, "ack", None, results=_results(call.body))


def _results(ack: consuming.Ack) -> list[bytes]:
    """JSON of each lease's result; [] if no result is given."""
    if ack.result is msgspec.UNSET and ack.results is None:
        return []
    results = [ack.result] if ack.results is None else ack.results
    if (ack.results is not None and ack.result is not msgspec.UNSET) or len(results) != len(ack.leases):
        raise BadRequest(f"{len(ack.leases)} leases: give a result for one lease, or results with one for each lease")
    try:
        encoded = [msgspec.json.encode(result) for result in results]
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"result: {error}") from None
    if max(map(len, encoded), default=0) > MAX_RESULT:
        raise TooLarge(f"result: at most {MAX_RESULT} bytes of JSON")
    return encoded


@routes.add("POST", "/v1/leases:nack", body=consuming.Nack, returns={200: consuming.NackResults}, **_SETTLING)
async def nack(call: Call) -> Answer:
    """Give messages back: they are handed out again after a delay or the topic's backoff, or become dead letters"""
    delay, dead = call.body.delay, call.body.dead
    if dead and (delay is not None or not call.body.count):
        raise BadRequest("dead: a dead message has no further attempt: leave out delay and count")
    if delay is not None and delay > call.context.max_delay_ms:
        raise Impossible(f"delay: {delay} ms is beyond max_delay, {call.context.max_delay_ms} ms")
    reason = call.body.reason or ""
    if len(reason.encode()) > MAX_REASON:
        raise BadRequest(f"reason: at most {MAX_REASON} bytes")
    return await _settle(call, "nack", None if delay is None else int(delay), reason, count=call.body.count, dead=dead)


@routes.add("POST", "/v1/leases:extend", body=consuming.Extend, returns={200: consuming.ExtendResults}, **_SETTLING)
async def extend(call: Call) -> Answer:
    """Extend leases: they end the given time from now"""
    progress = call.body.progress or ""
    if len(progress.encode()) > MAX_REASON:
        raise BadRequest(f"progress: at most {MAX_REASON} bytes")
    return await _settle(call, "extend", _lease(call, call.body.lease), progress)


async def _settle(call: Call, kind: SettleKind, value_ms: int | None, reason: str = "", **how: Any) -> Answer:
    leases = call.body.leases
    if len(leases) > _MAX_LEASES:
        raise BadRequest(f"leases: {len(leases)} given; at most {_MAX_LEASES} are allowed per request")
    router = call.context.router
    if router.known.current is None or SHARD in call.request.headers:
        if not call.access.may("consume", None):
            await _check_leases(call, leases)
        outcomes = await call.service.consume.settle(kind, leases, value_ms, reason, **how) if leases else []
    else:
        given = how.pop("results", [])

        async def here(places: list[int]) -> list[str]:
            some, more = [leases[place] for place in places], how
            if given:
                more = {**how, "results": [given[place] for place in places]}
            if not call.access.may("consume", None):
                await _check_leases(call, some)
            return await call.service.consume.settle(kind, some, value_ms, reason, **more)

        outcomes = await parts.settle(call, router, here)
    results: list[Any] = [{"lease": lease, "outcome": outcome} for lease, outcome in zip(leases, outcomes, strict=True)]
    return call.answer({"results": results})


async def _check_leases(call: Call, leases: list[str]) -> None:
    """Raises Forbidden if the token may not consume the topic of a lease."""
    for topic in await call.service.consume.topics_of_leases(leases):
        call.access.need_of("consume", topic, "lease")
