"""/livez, /readyz, /v1/health/quorum, /metrics, /openapi.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from hadelay.errors import Conflict
from hadelay.http import types
from hadelay.http.access import OPEN
from hadelay.http.metrics import CONTENT_TYPE
from hadelay.http.routes import JSON, Answer, Call, Routes, decode_query, encoded, parse_query
from hadelay.server.api import Check

if TYPE_CHECKING:
    from hadelay.http.app import HttpServer

routes = Routes()
#: Names of the routes that orchestrators ask: by any name, and when all connections are taken.
PROBES = frozenset(("livez", "readyz"))


@routes.add("GET", "/livez", query=types.ReadyQuery, returns={200: types.Health}, errors=(503,), scope=OPEN)
async def livez(call: Call) -> Answer:
    """Is this process worth keeping? Never depends on a quorum"""
    return _answer(call.server, "livez", call.query, packed=call.wants_msgpack())


@routes.add("GET", "/readyz", query=types.ReadyQuery, returns={200: types.Health}, errors=(503,), scope=OPEN)
async def readyz(call: Call) -> Answer:
    """Can it serve? `verbose` says why not, `exclude` leaves checks out"""
    return _answer(call.server, "readyz", call.query, packed=call.wants_msgpack())


def probe(server: HttpServer, name: str, query: str) -> Answer:
    """What livez or readyz (`name`) answers to this query, without a Call. Raises BadRequest."""
    return _answer(server, name, decode_query(parse_query(query), types.ReadyQuery), packed=False)


def _answer(server: HttpServer, name: str, query: Any, *, packed: bool) -> Answer:
    checks = server.service.livez() if name == "livez" else server.service.readyz()
    if server.draining and name == "readyz":
        checks = [*checks, Check("draining", False, "the node is shutting down")]
    left_out = set((query.exclude or "").split(","))
    checks = [check for check in checks if check.name not in left_out]
    fine = all(check.ok for check in checks)
    verbose = query.verbose not in (None, "false", "0") or not fine
    document = types.Health("ok" if fine else "failing", checks if verbose else [])
    return encoded(document, packed=packed)._replace(status=200 if fine else 503)


@routes.add(
    "GET", "/v1/health/quorum", query=types.QuorumQuery, returns={200: types.Quorum}, errors=(404, 409), scope="read"
)
async def quorum(call: Call) -> web.Response:
    """May this node stop now, or another one: would a majority be left? As the asked node sees it"""
    service = call.server.service
    view = service.quorum(call.query.without or service.node)
    if len(view.left) < view.needed:
        raise Conflict(
            f"{view.without} may not stop now: of {view.members} nodes {len(view.left)} would be left as far as "
            f"{service.node} sees ({', '.join(view.left) or 'none'}), and {view.needed} are needed",
            without=view.without, left=view.left, members=view.members, needed=view.needed,
        )  # fmt: skip
    return call.reply(view)


@routes.add("GET", "/metrics", returns={200: str}, scope="read")
async def metrics(call: Call) -> web.Response:
    """Prometheus"""
    server = call.server
    text = await server.metrics.exposition(server.connections, server.waiting, server.room.taken)
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


@routes.add("GET", "/openapi.json", returns={200: dict}, scope=OPEN)
async def openapi(call: Call) -> web.Response:
    """This API as OpenAPI 3.1"""
    return web.Response(body=call.server.openapi_document(), headers={"Content-Type": JSON})
