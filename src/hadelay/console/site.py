"""The console of one node: admits browsers, runs pages and actions, and answers their errors as pages."""

import secrets
import time
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from aiohttp import web
from multidict import CIMultiDict

from hadelay.codec.checksums import crc32c
from hadelay.console import access, cluster, dead, jobs, messages, overview, schedules, topics
from hadelay.console.live import Streams
from hadelay.console.render import SECURITY, Renderer, as_answer
from hadelay.console.samples import Sampler
from hadelay.console.sessions import Sessions
from hadelay.console.visit import NEXT, Handler, LiveHandler, Visit
from hadelay.errors import (
    BadRequest,
    Forbidden,
    HadelayError,
    MethodNotAllowed,
    NoLeader,
    NotFound,
    Overloaded,
    Unauthorized,
)
from hadelay.http.access import UNRESTRICTED
from hadelay.http.answers import Answer, unexpected
from hadelay.http.call import Call
from hadelay.http.routes import OPEN, Routes
from hadelay.server.service.node import NodeService

HOME = "/console/"
_SIGN_IN = "/console/sign-in"
#: Limit of the parts of a path for which an unknown page is answered with a page.
_DEEPEST = 6
#: Pages in the order of the navigation: (name, label, icon, scope, whether the scope is needed for the whole cluster).
_NAV = (
    ("overview", "Overview", "pulse", "read", True),
    ("topics", "Topics", "list", "read", False),
    ("messages", "Messages", "search", "read", False),
    ("dead", "Dead letters", "dead", "read", False),
    ("schedules", "Schedules", "clock", "read", False),
    ("jobs", "Bulk jobs", "layers", "read", False),
    ("cluster", "Cluster", "cluster", "read", True),
    ("access", "Access", "key", "admin", True),
)


class Console:
    """The console of one node. secure: whether the node serves HTTPS; cookies are then sent over HTTPS alone."""

    def __init__(self, service: NodeService, *, secure: bool) -> None:
        self.service, self._secure = service, secure
        self.renderer, self.sessions = Renderer(service.node), Sessions(time.monotonic)
        self.streams, self.sampler = Streams(), Sampler(service)
        #: Last count of messages that fall due soon (overview.py): monotonic time in s, and numbers.
        self.soon: tuple[float, list[tuple[str, int]]] = (-1e9, [])
        #: CSRF secret of forms without a session: the sign-in form, and every form in a cluster without tokens.
        self.csrf = secrets.token_urlsafe(24)
        # Browsers send cookies to all ports of a host: the name of the cookie tells nodes on one machine apart.
        self._cookie = f"hadelay-{crc32c(service.node.encode()):08x}"
        self.notice_cookie = f"{self._cookie}-notice"
        self.routes = Routes()
        self._add("GET", "/", self._redirect, plain=True)
        self._add("GET", "/console", self._redirect, plain=True)
        self._add("GET", "/console/static/{name}", self._static, plain=True)
        self._add("GET", _SIGN_IN, self._sign_in_page, plain=True)
        self._add("POST", _SIGN_IN, self._sign_in, plain=True)
        self._add("POST", "/console/sign-out", self._sign_out)
        for part in (overview, topics, messages, dead, schedules, jobs, cluster, access):
            for method, path, handler in part.pages.all:
                self._add(method, path, handler)
            for path, live in part.pages.streams:
                self._add("GET", path, partial(self._stream, live))
        pages = {route.path for route in self.routes.all if route.method == "GET"}
        for path in {route.path for route in self.routes.all} - pages:
            self._add("GET", path, _only_a_form)
        for depth in range(1, _DEEPEST + 1):  # after all others: the first path that matches counts
            self._add("GET", "/console" + "".join(f"/{{p{n}}}" for n in range(depth)), _no_page)

    def nav(self, visit: Visit) -> list[tuple[str, str, str]]:
        """(name, label, icon) of the pages that the visitor may see."""
        return [
            (name, label, icon)
            for name, label, icon, scope, whole in _NAV
            if visit.may(scope) or (not whole and visit.access.rights.may_somewhere(scope))
        ]

    def start(self) -> None:
        """Begin to sample the counters for the charts."""
        self.sampler.start()

    async def stop(self) -> None:
        """End all streams."""
        self.streams.stop()
        await self.sampler.stop()

    def cookie(self, name: str, value: str, life_s: int | None = None) -> str:
        """A Set-Cookie header. life_s: None for a cookie that ends with the browser."""
        life = "" if life_s is None else f"; Max-Age={life_s}"
        return f"{name}={value}; Path=/; HttpOnly; SameSite=Strict{'; Secure' if self._secure else ''}{life}"

    def _add(self, method: str, path: str, handler: Any, *, plain: bool = False) -> None:
        """Add a route. plain: the handler gets a Call instead of a Visit, and needs no session."""
        run = handler if plain else partial(self._visit, handler)
        self.routes.add(
            method, path, returns={200: str}, own_head=True, scope=OPEN, described=False, name="console", summary="-"
        )(run)

    async def _visit(self, handler: Handler, call: Call) -> Any:
        try:
            visit = self._admit(call)
        except Unauthorized as error:
            call.context.denials.note("console", error)
            return self._signed_out(call)
        except HadelayError as error:
            return self._refused(Visit(self, call, None, UNRESTRICTED), error)
        try:
            if call.request.method == "POST":
                await visit.read_form()
            return await handler(visit)
        except HadelayError as error:
            call.context.denials.note("console", error)
            return self._refused(visit, error)
        except Exception as error:
            call.context.failed("console", error, call.request.method)
            return self._refused(visit, unexpected(error, call.request.method))

    def _admit(self, call: Call, *, looks: bool = True) -> Visit:
        """Check a request's session. Raises Unauthorized if its token is invalid; NoLeader while no tokens are
        known. looks: see Sessions.find."""
        authenticator = call.context.authenticator
        if authenticator is None:
            return Visit(self, call, None, UNRESTRICTED)
        name = call.request.cookies.get(self._cookie)
        session = self.sessions.find(name, looks=looks)
        if session is None:
            raise Unauthorized("no session, or one that is over: sign in")
        try:
            access = authenticator.admit([session.authorization])
        except Unauthorized:
            self.sessions.close(name)
            raise
        return Visit(self, call, session, access)

    def _signed_out(self, call: Call) -> Answer:
        if _wants_stream(call):
            return _over("You are signed out: reload the page to sign in.")
        if call.request.headers.get("HX-Request") == "true":
            return as_answer(HTTPStatus.UNAUTHORIZED, {"HX-Redirect": _SIGN_IN}, "", packs=False)
        after = call.target if call.request.method == "GET" and NEXT.fullmatch(call.target) else HOME
        where = _SIGN_IN if after == HOME else f"{_SIGN_IN}?next={quote(after, safe='')}"
        return Answer(HTTPStatus.SEE_OTHER, {"Location": where, "Cache-Control": "no-store"}, b"")

    def _refused(self, visit: Visit, error: HadelayError) -> Answer:
        if _wants_stream(visit.call) and (error.http_status < 500 or isinstance(error, Overloaded)):
            return _over(error.detail)
        if visit.partial:
            return as_answer(error.http_status, {}, self.renderer.block("error.html", {"error": error}), packs=False)
        again = error.retryable and visit.call.request.method == "GET"
        back = (visit.call.target if again else visit.origin) or HOME
        answer = visit.page("error.html", status=error.http_status, error=error, back=back, active="")
        allow = {"Allow": error.extra["allow"]} if isinstance(error, MethodNotAllowed) else {}
        return answer._replace(headers={**answer.headers, **allow})

    async def _redirect(self, call: Call) -> Answer:
        if call.target == "/" and "text/html" not in call.request.headers.get("Accept", ""):
            raise NotFound("path / does not exist; /openapi.json lists all paths")
        return Answer(HTTPStatus.SEE_OTHER, {"Location": HOME}, b"")

    async def _stream(self, live: LiveHandler, visit: Visit) -> web.StreamResponse:
        key, make = live(visit)
        return await self.streams.run(visit, key, make, partial(self._admit, visit.call, looks=False))

    async def _static(self, call: Call) -> Answer:
        file = self.renderer.static.get(call.path["name"])
        if file is None:
            raise NotFound("there is no such file of the console")
        if "gzip" in call.request.headers.get("Accept-Encoding", ""):
            return Answer(200, {**file.headers, "Content-Encoding": "gzip"}, file.packed)
        return Answer(200, file.headers, file.body)

    async def _sign_in_page(self, call: Call) -> Answer:
        if call.context.authenticator is None:
            return Answer(HTTPStatus.SEE_OTHER, {"Location": HOME}, b"")
        return self._ask_token(Visit(self, call, None, UNRESTRICTED))

    def _ask_token(self, visit: Visit, problem: str = "", status: int = 200) -> Answer:
        after = visit.query.get("next", "")
        return visit.page("sign_in.html", status=status, problem=problem, next=after if NEXT.fullmatch(after) else "")

    async def _sign_in(self, call: Call) -> Answer:
        visit = Visit(self, call, None, UNRESTRICTED)
        authenticator = call.context.authenticator
        if authenticator is None:
            return Answer(HTTPStatus.SEE_OTHER, {"Location": HOME}, b"")
        try:
            await visit.read_form()
            if not (token := visit.text("token")):
                raise Unauthorized("paste a token")
            header = f"Bearer {token}"
            if authenticator.admit([header]).first_only:
                raise Unauthorized("the bootstrap token makes the first token (hadelay token create), and nothing else")
        except (Unauthorized, Forbidden, BadRequest, NoLeader) as error:
            call.context.denials.note("console", error)
            return self._ask_token(visit, error.detail, error.http_status)
        self.sessions.close(call.request.cookies.get(self._cookie))
        after = visit.text("next")
        headers = CIMultiDict({"Location": after if NEXT.fullmatch(after) else HOME, "Cache-Control": "no-store"})
        headers.add("Set-Cookie", self.cookie(self._cookie, self.sessions.open(header)))
        return Answer(HTTPStatus.SEE_OTHER, headers, b"")

    async def _sign_out(self, visit: Visit) -> Answer:
        self.sessions.close(visit.call.request.cookies.get(self._cookie))
        cookie = self.cookie(self._cookie, "", 0)
        return Answer(HTTPStatus.SEE_OTHER, {"Location": _SIGN_IN, "Set-Cookie": cookie, **SECURITY}, b"")


async def _no_page(visit: Visit) -> Answer:
    raise NotFound(f"the console has no page {visit.call.target.partition('?')[0][:100]}")


async def _only_a_form(visit: Visit) -> Answer:
    raise MethodNotAllowed("this address takes a form of a page, and shows nothing by itself", allow="POST")


def _wants_stream(call: Call) -> bool:
    return "event-stream" in call.request.headers.get("Accept", "")


def _over(words: str) -> Answer:
    """A stream that says why it ends. The status is 200: EventSource tells a script nothing about other answers."""
    text = f"event: over\ndata: {' '.join(words.split())}\n\n"
    return as_answer(HTTPStatus.OK, {"Content-Type": "text/event-stream"}, text, packs=False)
