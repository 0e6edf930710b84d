"""Batches with one completion callback: open, look at, seal and cancel them."""

from functools import partial
from typing import Any

from msgspec import UNSET

from hadelay.api import batches as api
from hadelay.api.base import Nothing
from hadelay.api.text import check_limit
from hadelay.http.answers import Answer
from hadelay.http.call import Call
from hadelay.http.merging import of_one
from hadelay.http.publish import payload
from hadelay.http.routes import Routes
from hadelay.rules.batches import batch_to_open, cursor_of
from hadelay.rules.publishing import check_batch_key

routes = Routes()

_PATH = "/v1/batches/{batch}"
_ONE = {200: api.Batch[str]}
#: Options of all routes: the handlers check the token for the topic of the batch's callback, and with several shards a
#: request must name the batch's shard.
_OWN: Any = {"own_topics": True, "shards": of_one}
#: Size limit of the body of a POST, in bytes: room for the callback's body in base64.
_MAX_BYTES = 64 << 10


async def _own(call: Call, scope: str) -> str:
    """Get the batch's key from the path, and check access. Raises NotFound; Forbidden without this scope for the topic
    of the batch's callback."""
    key = check_batch_key(call.path["batch"])
    call.access.need_of(scope, await call.service.batches.topic_of(key), "batch")
    return key


@routes.add(
    "POST",
    "/v1/batches",
    body=api.OpenBatch,
    returns={201: api.Batch[str], 200: api.Batch[str]},
    errors=(404, 409, 413, 422, 429),
    max_bytes=_MAX_BYTES,
    scope="publish",
    **_OWN,
)
async def open_batch(call: Call) -> Answer:
    """Open a batch; a repetition answers 200 with the present state of the batch"""
    document, callback = call.body, call.body.callback
    given = callback.body is not UNSET or callback.body_base64 is not UNSET
    limits, max_delay_ms = call.context.config, call.context.max_delay_ms
    key, spec = batch_to_open(limits, max_delay_ms, document, payload(callback) if given else None)
    call.access.need("publish", spec.topic)
    opened, batch = await call.service.batches.open(key, spec, call.actor)
    return call.answer(batch, 201 if opened else 200, {"Location": f"/v1/batches/{key}"})


@routes.add(
    "GET",
    "/v1/batches",
    query=api.ListBatchesQuery,
    returns={200: api.Batches},
    errors=(503,),
    scope="read",
    **_OWN,
)
async def list_batches(call: Call) -> Answer:
    """Batches, the newest first, with callbacks to topics that the token may read"""
    query = call.query
    before, limit = cursor_of(query.cursor), check_limit(query.limit)
    may = partial(call.access.may, "read")
    return call.answer(await call.service.batches.page(before, limit, stale=query.stale, may=may))


@routes.add("GET", _PATH, query=api.BatchQuery, returns=_ONE, errors=(404, 503), scope="read", **_OWN)
async def get_batch(call: Call) -> Answer:
    """A batch with the numbers of its members by outcome"""
    found = await call.service.batches.get(check_batch_key(call.path["batch"]), stale=call.query.stale)
    call.access.need_of("read", found.topic, "batch")
    return call.answer(found)


@routes.add("POST", _PATH + ":seal", body=Nothing, returns=_ONE, errors=(404,), scope="publish", **_OWN)
async def seal_batch(call: Call) -> Answer:
    """Seal a batch: no further message can join, and the batch ends once all members are settled"""
    return call.answer(await call.service.batches.seal(await _own(call, "publish")))


@routes.add("POST", _PATH + ":cancel", body=Nothing, returns=_ONE, errors=(404,), scope="publish", **_OWN)
async def cancel_batch(call: Call) -> Answer:
    """Seal a batch, and begin to cancel its waiting members; leased members are not cancelled"""
    return call.answer(await call.service.batches.cancel(await _own(call, "publish")))


@routes.add(
    "GET",
    _PATH + "/failures",
    query=api.ListBatchesQuery,
    returns={200: api.BatchFailures},
    errors=(404, 503),
    scope="read",
    **_OWN,
)
async def list_batch_failures(call: Call) -> Answer:
    """The first 1,000 members of a batch that died, expired or were cancelled"""
    key, query = await _own(call, "read"), call.query
    start, limit = cursor_of(query.cursor) or 0, check_limit(query.limit)
    return call.answer(await call.service.batches.failures(key, start, limit, stale=query.stale))
