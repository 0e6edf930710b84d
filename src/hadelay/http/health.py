"""Routes for health and metrics: /livez, /readyz, /v1/health/quorum, /metrics, /openapi.json."""

from hadelay.api.cluster import CheckOut, Health, Quorum, QuorumQuery, ReadyQuery
from hadelay.errors import Conflict
from hadelay.http.answers import JSON, Answer
from hadelay.http.call import Call
from hadelay.http.metrics import CONTENT_TYPE
from hadelay.http.openapi import document
from hadelay.http.routes import OPEN, Routes

routes = Routes()
#: Health routes for orchestrators: served under any host name, and to connections above the limits.
PROBES = frozenset(("livez", "readyz"))
#: Path of an OPTIONS request → path of the health route that answers it as a GET: load balancers check nodes by such
#: requests. HAProxy's plain `option httpchk` sends `OPTIONS / HTTP/1.0`.
PLAIN_CHECKS = {"/": "/readyz", "/readyz": "/readyz", "/livez": "/livez"}


@routes.add("GET", "/livez", query=ReadyQuery, returns={200: Health}, errors=(503,), scope=OPEN)
async def livez(call: Call) -> Answer:
    """Should this process live on? Never depends on a quorum"""
    return _answer(call, call.service.cluster.livez())


@routes.add("GET", "/readyz", query=ReadyQuery, returns={200: Health}, errors=(503,), scope=OPEN)
async def readyz(call: Call) -> Answer:
    """Can this node serve? `verbose` shows all checks, `exclude` leaves some out"""
    checks = call.service.cluster.readyz()
    if call.context.draining:
        checks = [*checks, CheckOut("draining", False, "the node is shutting down")]
    return _answer(call, checks)


def _answer(call: Call, checks: list[CheckOut]) -> Answer:
    left_out = set((call.query.exclude or "").split(","))
    checks = [check for check in checks if check.name not in left_out]
    fine = all(check.ok for check in checks)
    verbose = call.query.verbose not in (None, "false", "0") or not fine
    return call.answer(Health("ok" if fine else "failing", checks if verbose else []), 200 if fine else 503)


@routes.add("GET", "/v1/health/quorum", query=QuorumQuery, returns={200: Quorum}, errors=(404, 409, 503), scope="read")
async def quorum(call: Call) -> Answer:
    """May this node, or another one, stop now with a majority left? In the view of the answering node"""
    view = await call.service.cluster.quorum(call.query.without or call.service.node)
    if len(view.left) < view.needed:
        raise Conflict(
            f"{view.without} may not stop now: of {view.members} nodes {len(view.left)} would be left as far as "
            f"{call.service.node} sees ({', '.join(view.left) or 'none'}), and {view.needed} are needed",
            without=view.without,
            left=view.left,
            members=view.members,
            needed=view.needed,
        )
    return call.answer(view)


@routes.add("GET", "/metrics", returns={200: str}, scope="read")
async def metrics(call: Call) -> Answer:
    """Metrics for Prometheus"""
    context = call.context
    text = await context.metrics.exposition(context.connections, context.waiting.count, context.budget.taken)
    return Answer(200, {"Content-Type": CONTENT_TYPE}, text)


@routes.add("GET", "/openapi.json", returns={200: dict}, scope=OPEN)
async def openapi(call: Call) -> Answer:
    """This API as OpenAPI 3.1"""
    context = call.context
    if not context.openapi:
        described = [route for route in context.routes.all if route.described]
        context.openapi = document(described, tokens=context.authenticator is not None)
    return Answer(200, {"Content-Type": JSON}, context.openapi)
