"""Routes for the shard map."""

from hadelay.api.messages import ReadQuery
from hadelay.api.shards import NamesQuery, PutShards, ShardNames, ShardsOut
from hadelay.api.text import check_limit
from hadelay.http.answers import Answer
from hadelay.http.call import Call
from hadelay.http.routes import Routes

routes = Routes()

#: Size limit of a PUT, in bytes: JSON takes up to twice as much as the stored map.
_MAX_BYTES = 4 << 20


@routes.add("GET", "/v1/shards", query=ReadQuery, returns={200: ShardsOut}, errors=(503,), scope="read")
async def shards(call: Call) -> Answer:
    """The shard map, as this shard has it"""
    return call.answer(await call.service.shards.view(stale=call.query.stale))


@routes.add("PUT", "/v1/shards", body=PutShards, returns={200: ShardsOut}, errors=(409, 503, 504), max_bytes=_MAX_BYTES)
async def put_shards(call: Call) -> Answer:
    """One step of a change of the shard map, in this shard alone: `hadelay shards` takes the steps in all shards"""
    return call.answer(await call.service.shards.put(call.body.step, call.body.map, call.actor))


@routes.add("GET", "/v1/shards/names", query=NamesQuery, returns={200: ShardNames}, errors=(503,))
async def shard_names(call: Call) -> Answer:
    """Names that belong to this shard: its topics, and the topics that its settings and schedules name"""
    query = call.query
    return call.answer(await call.service.shards.names(query.after, check_limit(query.limit)))
