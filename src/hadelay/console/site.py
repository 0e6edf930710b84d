"""The console of one node: admits browsers, runs pages and actions, and answers their errors as pages."""

import asyncio
import time
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from aiohttp import web
from multidict import CIMultiDict

from hadelay.api.attention import Attention
from hadelay.codec.checksums import crc32c
from hadelay.console import (
    access,
    batches,
    cluster,
    consumers,
    dead,
    jobs,
    messages,
    overview,
    publishing,
    reschedule,
    retrying,
    scheduleform,
    schedules,
    search,
    topics,
    topicsettings,
)
from hadelay.console.live import Frame, Make, Streams
from hadelay.console.problems import Flash, Problem, Wrong, problem_of
from hadelay.console.render import SECURITY, Renderer, as_answer, as_json
from hadelay.console.samples import Sampler
from hadelay.console.sessions import Sessions
from hadelay.console.visit import NEXT, Handler, LiveHandler, Visit
from hadelay.console.zones import COOKIE, LIFE_S, zone_of
from hadelay.errors import (
    BadRequest,
    Forbidden,
    HadelayError,
    Impossible,
    MethodNotAllowed,
    NoLeader,
    NotFound,
    Overloaded,
    Unauthorized,
)
from hadelay.http.answers import Answer, unexpected
from hadelay.http.call import Call
from hadelay.http.routes import OPEN, Routes
from hadelay.rules.access import UNRESTRICTED
from hadelay.server.service.node import NodeService

HOME = "/console/"
_SIGN_IN = "/console/sign-in"
#: Titles of error pages, for errors whose API title is not meant for people.
_TITLES: dict[type[HadelayError], str] = {
    BadRequest: "This address is not complete", Forbidden: "Not allowed", Impossible: "Not possible",
    MethodNotAllowed: "This address shows nothing", Overloaded: "This node is busy",
}  # fmt: skip
#: Time for which visitors share a report of what needs attention, and limit of the wait for one, in seconds; limit of
#: the number of shared reports.
_REPORT_S, _REPORT_WAIT_S, _REPORTS = 2.0, 1.0, 100
#: Interval at which an open list is reloaded, in seconds.
_AGAIN_S = 10
#: Modules that declare the console's pages.
_PARTS = (
    overview, search, topics, topicsettings, messages, reschedule, publishing, dead, retrying, consumers,
    schedules, scheduleform, batches, jobs, cluster, access,
)  # fmt: skip
#: Largest depth of an unknown path below /console that is answered with an error page.
_DEEPEST = 6
#: Pages in the order of the navigation: (name, label, icon, scope, whether the scope is needed for the whole cluster,
#: key that opens the page if it is pressed after g).
_NAV = (
    ("overview", "Overview", "pulse", "read", True, "o"),
    ("topics", "Topics", "list", "read", False, "t"),
    ("messages", "Messages", "search", "read", False, "m"),
    ("dead", "Dead letters", "dead", "read", False, "d"),
    ("consumers", "Consumers", "people", "read", False, "c"),
    ("groups", "Groups", "groups", "read", False, "g"),
    ("schedules", "Schedules", "clock", "read", False, "s"),
    ("batches", "Batches", "tally", "read", False, "b"),
    ("jobs", "Bulk jobs", "layers", "read", False, "j"),
    ("cluster", "Cluster", "cluster", "read", True, "l"),
    ("access", "Access", "key", "admin", True, "a"),
)


class Console:
    """The console of one node. secure: whether the node serves HTTPS; cookies are then sent over HTTPS alone."""

    def __init__(self, service: NodeService, *, secure: bool) -> None:
        self.service, self._secure = service, secure
        self.renderer = Renderer(service.node, service.cluster_id)
        self.sessions = Sessions(service.sessions, service.access.now_ms)
        self.streams, self.sampler = Streams(), Sampler(service)
        #: Recent reports of what needs attention: scopes of the reader → monotonic time in s, and task; the oldest
        #: first.
        self._reports: dict[tuple[str, ...], tuple[float, asyncio.Task[Attention[str]]]] = {}
        #: Last count of messages that fall due soon (overview.py): monotonic time at which it began in s, and its task.
        self.soon: tuple[float, asyncio.Task[list[tuple[str, int]]] | None] = (0.0, None)
        # Browsers send cookies to all ports of a host, so the cookie's name differs between clusters on the same
        # machine.
        self._cookie = f"hadelay-{crc32c(service.cluster_id.encode()):08x}"
        self.flash_cookie = f"{self._cookie}-flash"
        self.routes = Routes()
        self._add("GET", "/", self._redirect, plain=True)
        self._add("GET", "/console", self._redirect, plain=True)
        self._add("GET", "/console/static/{name}", self._static, plain=True)
        self._add("GET", _SIGN_IN, self._sign_in_page, plain=True)
        self._add("POST", _SIGN_IN, self._sign_in, plain=True)
        self._add("POST", "/console/sign-out", self._sign_out)
        self._add("POST", "/console/zone", self._set_zone)
        self._add("GET", "/console/live/frame", partial(self._stream, _frame))
        self._add("GET", "/console/live/again", partial(self._stream, _again))
        for part in _PARTS:
            for method, path, handler in part.pages.all:
                self._add(method, path, handler)
            for path, live in part.pages.streams:
                self._add("GET", path, partial(self._stream, live))
        pages = {route.path for route in self.routes.all if route.method == "GET"}
        for path in {route.path for route in self.routes.all} - pages:
            self._add("GET", path, _only_a_form)
        for depth in range(1, _DEEPEST + 1):  # add these routes last: the first matching path counts
            self._add("GET", "/console" + "".join(f"/{{p{n}}}" for n in range(depth)), _no_page)

    def nav(self, visit: Visit) -> list[tuple[str, str, str, str]]:
        """(name, label, icon, key) of the pages that the visitor may see."""
        return [
            (name, label, icon, key)
            for name, label, icon, scope, whole, key in _NAV
            if visit.may(scope) or (not whole and visit.access.rights.may_somewhere(scope))
        ]

    async def report(self, visit: Visit) -> Attention[str] | None:
        """Report of the problems that the visitor may see; None if the leader does not answer. Visitors with the same
        rights share a report for two seconds."""
        rights = visit.access.rights
        scopes = tuple(sorted(rights.globs["read"]))
        if not scopes:
            return None
        at, task = self._reports.get(scopes, (0.0, None))
        if task is None or (task.done() and time.monotonic() - at >= _REPORT_S):
            self._reports.pop(scopes, None)
            if len(self._reports) >= _REPORTS:
                del self._reports[next(iter(self._reports))]
            task = asyncio.create_task(self.service.attention.report(rights))
            self._reports[scopes] = time.monotonic(), task
        done, _ = await asyncio.wait((task,), timeout=_REPORT_WAIT_S)
        return task.result() if done and task.exception() is None else None

    def start(self) -> None:
        """Begin to sample the counters for the charts, and make sure that there is a key to sign sessions with."""
        self.service.sessions.begin()
        self.sampler.start()

    async def stop(self) -> None:
        """End all streams."""
        self.streams.stop()
        await self.sampler.stop()

    def cookie(self, name: str, value: str, life_s: int | None = None) -> str:
        """Value of a Set-Cookie header. life_s: lifetime; None: until the browser is closed. SameSite=Lax, so that a
        link in a mail opens its page; a secret protects the forms."""
        life = "" if life_s is None else f"; Max-Age={life_s}"
        return f"{name}={value}; Path=/; HttpOnly; SameSite=Lax{'; Secure' if self._secure else ''}{life}"

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
            elif not visit.partial:
                visit.report = await self.report(visit)
            return self._renewed(visit, await handler(visit))
        except HadelayError as error:
            call.context.denials.note("console", error)
            return self._refused(visit, error)
        except Exception as error:
            call.context.failed("console", error, call.request.method)
            return self._refused(visit, unexpected(error, call.request.method))

    def _renewed(self, visit: Visit, answer: Any) -> Any:
        """The answer, with a renewed session cookie if a person made the request. An open page that nobody looks at
        makes requests, too, for its charts and its stream: these must not keep the session alive."""
        session = visit.session
        if session is None or not isinstance(answer, Answer) or not visit.asked:
            return answer
        if (used := self.sessions.renewed(session)) is None:
            return answer
        headers = CIMultiDict(answer.headers)
        headers.add("Set-Cookie", self.cookie(self._cookie, self.sessions.cookie(used)))
        return answer._replace(headers=headers)

    def _admit(self, call: Call) -> Visit:
        """Check a request's session. Raises Unauthorized if its token is invalid; NoLeader while no tokens are
        known."""
        authenticator = call.context.authenticator
        if authenticator is None:
            return Visit(self, call, None, UNRESTRICTED)
        session = self.sessions.find(call.request.cookies.get(self._cookie))
        if session is None:
            raise Unauthorized("there is no session, or it has ended: sign in")
        return Visit(self, call, session, authenticator.admit_session(session.token_id))

    def _signed_out(self, call: Call) -> Answer:
        if _wants_stream(call):
            return _over("You are signed out.")
        if call.request.headers.get("Accept") == "application/json":
            problem = Problem("You are signed out. Sign in again in another tab, then send this form once more.")
            return as_json(problem, packs=False, status=HTTPStatus.UNAUTHORIZED)
        visit = Visit(self, call, None, UNRESTRICTED)
        if visit.partial:
            return as_answer(HTTPStatus.UNAUTHORIZED, {"HX-Redirect": visit.prefix + _SIGN_IN}, "", packs=False)
        return visit.go(_sign_in_for(call.target if call.request.method == "GET" else HOME))

    def _refused(self, visit: Visit, error: HadelayError) -> Answer:
        if _wants_stream(visit.call) and (error.http_status < 500 or isinstance(error, Overloaded)):
            return _over(error.detail)
        if visit.partial:
            words = problem_of(error).words
            text = self.renderer.block("error.html", {"words": words}, visit.zone)
            return as_answer(error.http_status, {}, text, packs=False)
        if visit.call.request.method == "POST" and (visit.scripted or not isinstance(error, Forbidden)):
            return visit.refuse(error)
        again = error.retryable and visit.call.request.method == "GET"
        back = (visit.call.target if again else visit.origin) or HOME
        title, words = _TITLES.get(type(error), error.title), problem_of(error).words
        answer = visit.page("error.html", status=error.http_status, title=title, words=words, error=error, back=back)
        if isinstance(error, MethodNotAllowed):
            return answer._replace(headers=CIMultiDict([*answer.headers.items(), ("Allow", error.extra["allow"])]))
        return answer

    async def _redirect(self, call: Call) -> Answer:
        if call.target == "/" and "text/html" not in call.request.headers.get("Accept", ""):
            raise NotFound("path / does not exist; /openapi.json lists all paths")
        # The location is relative, because a proxy may serve this node under a path.
        return Answer(HTTPStatus.SEE_OTHER, {"Location": "console/"}, b"")

    async def _stream(self, live: LiveHandler, visit: Visit) -> web.StreamResponse:
        key, make = live(visit)
        return await self.streams.run(visit, f"{key} {visit.zone.key}", make, partial(self._admit, visit.call))

    async def _static(self, call: Call) -> Answer:
        file = self.renderer.static.get(call.path["name"])
        if file is None:
            raise NotFound("there is no such file of the console")
        if "gzip" in call.request.headers.get("Accept-Encoding", ""):
            return Answer(200, {**file.headers, "Content-Encoding": "gzip"}, file.packed)
        return Answer(200, file.headers, file.body)

    async def _sign_in_page(self, call: Call) -> Answer:
        if call.context.authenticator is None:
            return Visit(self, call, None, UNRESTRICTED).go(HOME)
        visit = Visit(self, call, None, UNRESTRICTED)
        after = visit.query.get("next", "")
        return visit.page("sign_in.html", next=after if NEXT.fullmatch(after) else "")

    async def _sign_in(self, call: Call) -> Answer:
        """Open a session. A wrong token leads back to the form, which shows the error once, and keeps `next` in its
        address."""
        visit = Visit(self, call, None, UNRESTRICTED)
        authenticator = call.context.authenticator
        if authenticator is None:
            return Visit(self, call, None, UNRESTRICTED).go(HOME)
        try:
            await visit.read_form()
            if not (token := visit.text("token")):
                raise Unauthorized("paste a token")
            access = authenticator.admit([f"Bearer {token}"])
            if access.first_only:
                raise Unauthorized("the bootstrap token makes the first token (hadelay token create), and nothing else")
        except (Unauthorized, Forbidden, BadRequest, NoLeader) as error:
            call.context.denials.note("console", error)
            return visit.go(_sign_in_for(visit.text("next")), Flash(problem=problem_of(error)))
        if (before := self.sessions.find(call.request.cookies.get(self._cookie))) is not None:
            self.sessions.close(before)
        session, after = self.sessions.open(access.actor.token_id), visit.text("next")
        answer = visit.go(after if NEXT.fullmatch(after) else HOME)
        headers = CIMultiDict(answer.headers)
        headers.add("Set-Cookie", self.cookie(self._cookie, self.sessions.cookie(session)))
        return answer._replace(headers=headers)

    async def _set_zone(self, visit: Visit) -> Answer:
        """Store the time zone that a person chose in a cookie, and return to the page."""
        if (name := visit.text("zone") or "UTC") != zone_of(name).key:
            raise Wrong("zone", f"{name[:64]!r} is no time zone: write a name such as Europe/Vienna.")
        answer = visit.go(visit.origin or HOME)
        headers = CIMultiDict(answer.headers)
        headers.add("Set-Cookie", self.cookie(COOKIE, name, LIFE_S))
        return answer._replace(headers=headers)

    async def _sign_out(self, visit: Visit) -> Answer:
        if visit.session is not None:
            self.sessions.close(visit.session)
        cookie = self.cookie(self._cookie, "", 0)
        headers = {"Location": visit.prefix + _SIGN_IN, "Set-Cookie": cookie, **SECURITY}
        return Answer(HTTPStatus.SEE_OTHER, headers, b"")


def _frame(visit: Visit) -> tuple[str, Make]:
    """Stream of a page without live parts: sends only the leader and the number of problems."""

    async def frame() -> Frame:
        return {}

    return "frame", frame


def _again(visit: Visit) -> tuple[str, Make]:
    """Stream of a list, which console.js reloads every ten seconds."""

    async def frame() -> Frame:
        return {"state": str(time.monotonic() // _AGAIN_S)}

    return "again", frame


async def _no_page(visit: Visit) -> Answer:
    raise NotFound(f"the console has no page {visit.call.target.partition('?')[0][:100]}")


async def _only_a_form(visit: Visit) -> Answer:
    raise MethodNotAllowed("this address only takes a form: open the page of the console with the form", allow="POST")


def _sign_in_for(after: str) -> str:
    """Address of the sign-in form; after the sign-in, the browser goes to the page `after`."""
    return f"{_SIGN_IN}?next={quote(after, safe='')}" if after != HOME and NEXT.fullmatch(after) else _SIGN_IN


def _wants_stream(call: Call) -> bool:
    return "event-stream" in call.request.headers.get("Accept", "")


def _over(words: str) -> Answer:
    """Answer with a stream that only gives the reason for its end. The status is 200, because EventSource hides other
    answers from scripts."""
    text = f"event: over\ndata: {' '.join(words.split())}\n\n"
    return as_answer(HTTPStatus.OK, {"Content-Type": "text/event-stream"}, text, packs=False)
