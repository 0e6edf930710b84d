"""Routes for the cluster, its members and its consumers."""

from functools import partial

from hadelay.api.attention import Attention
from hadelay.api.cluster import AddedMember, AddMember, Cluster, Drain, Drained, Transfer, Transferred
from hadelay.api.consumers import Consumers
from hadelay.api.messages import ReadQuery
from hadelay.http.answers import NOTHING, Answer
from hadelay.http.call import Call
from hadelay.http.routes import Routes

routes = Routes()


@routes.add("GET", "/v1/cluster", query=ReadQuery, returns={200: Cluster[str]}, errors=(503,), scope="read")
async def cluster(call: Call) -> Answer:
    """Members, leader, cluster time and the dispatch cursor"""
    return call.answer(await call.service.cluster.view(stale=call.query.stale))


@routes.add("GET", "/v1/attention", returns={200: Attention[str]}, errors=(503,), scope="read", own_topics=True)
async def attention(call: Call) -> Answer:
    """Problems of the cluster, and of the topics and schedules that the token may read, the worst first"""
    return call.answer(await call.service.attention.report(call.access.rights))


@routes.add(
    "GET", "/v1/consumers", query=ReadQuery, returns={200: Consumers[str]}, errors=(503,), scope="read", own_topics=True
)
async def consumers(call: Call) -> Answer:
    """Consumers of the topics that the token may read, those with most leases first"""
    may = partial(call.access.may, "read")
    return call.answer(await call.service.consumers.list_consumers(may=may, stale=call.query.stale))


@routes.add("POST", "/v1/cluster:transfer-leader", body=Transfer, returns={200: Transferred}, errors=(404, 409))
async def transfer_leader(call: Call) -> Answer:
    """Hand leadership to the named node, or to the most advanced one"""
    return call.answer(Transferred(await call.service.cluster.transfer(call.body.to, call.actor)))


@routes.add("POST", "/v1/cluster:drain", body=Drain, returns={200: Drained}, errors=(404, 409, 503, 504))
async def drain(call: Call) -> Answer:
    """Take a node out of traffic: it hands over leadership and refuses publishes and polls until undone or restarted"""
    await call.service.cluster.drain(call.body.node, call.body.undo, call.actor)
    return call.answer(Drained(call.body.node, not call.body.undo))


@routes.add("POST", "/v1/cluster/members", body=AddMember, returns={201: AddedMember}, errors=(409, 429, 503))
async def add_member(call: Call) -> Answer:
    """Add a node: it copies the data from other nodes, and votes once it has caught up"""
    name, raft = call.body.name, call.body.raft
    await call.service.cluster.add_member(name, raft, call.actor)
    return call.answer(AddedMember(name, raft, "learner"), 201)


@routes.add("DELETE", "/v1/cluster/members/{node}", returns={204: None}, errors=(404, 409, 503))
async def remove_member(call: Call) -> Answer:
    """Remove a node; a leader hands over first"""
    await call.service.cluster.remove_member(call.path["node"], call.actor)
    return NOTHING
