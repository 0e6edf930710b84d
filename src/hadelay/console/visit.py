"""One request of a browser, and the declaration of pages."""

from __future__ import annotations

import hmac
import re
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, parse_qsl

from multidict import CIMultiDict

from hadelay.api.attention import Attention
from hadelay.api.service import Actor
from hadelay.api.text import check_topic
from hadelay.console.problems import Flash, Problem, Wrong, problem_of
from hadelay.console.render import as_answer, as_json
from hadelay.console.zones import COOKIE, zone_of
from hadelay.errors import BadRequest, Forbidden, HadelayError, TooLarge
from hadelay.http.answers import Answer

if TYPE_CHECKING:
    from hadelay.console.sessions import Session
    from hadelay.http.call import Call
    from hadelay.rules.access import RequestRights
    from hadelay.server.service.node import NodeService

_FORM = "application/x-www-form-urlencoded"
#: Limits of a form: its size in bytes, and the number of its fields.
_MAX_FORM, _MAX_FIELDS = 256 << 10, 1_100
#: Pattern of the path under which a proxy serves a node.
_PREFIX = re.compile(r"(/[A-Za-z0-9._~-]{1,64}){1,8}")
#: Lifetime of the cookie with the texts that the next page shows once, in seconds.
_FLASH_S = 30
#: Pattern of the paths to which a browser may be redirected after the sign-in.
NEXT = re.compile(r"/console/[A-Za-z0-9._~/?&=%+:*,-]*")


class Visit:
    """A browser's request, with its session and its rights. Handlers of pages take a Visit, and return an answer."""

    def __init__(self, site: Any, call: Call, session: Session | None, access: RequestRights) -> None:
        self.site, self.call, self.session, self.access = site, call, session, access
        self.query: dict[str, str] = dict(parse_qsl(call.target.partition("?")[2], keep_blank_values=True))
        self._form: dict[str, list[str]] = {}
        #: Whether htmx asks for a part of the page.
        self.partial = call.request.headers.get("HX-Request") == "true"
        #: Whether console.js sent the form: the answer is then JSON, with the address to which the script goes.
        self.scripted = call.request.headers.get("Accept") == "application/json"
        #: Time zone in which pages show times, and in which a person types them.
        self.zone = zone_of(call.request.cookies.get(COOKIE))
        #: Report of problems, for the navigation and the page's title; None: unknown.
        self.report: Attention[str] | None = None

    @property
    def service(self) -> NodeService:
        return self.call.service

    @property
    def actor(self) -> Actor:
        return self.access.actor

    @property
    def path(self) -> dict[str, str]:
        return self.call.path

    @property
    def topic(self) -> str:
        """Topic of the path. Raises BadRequest."""
        return check_topic(self.path["topic"])

    @property
    def problems(self) -> int:
        """Number of problems in the report."""
        return count_of(self.report)

    @property
    def sees(self) -> tuple[str, ...]:
        """Patterns of the topics that the visitor may read. Visitors with the same patterns share one live list."""
        return tuple(sorted(self.access.rights.globs["read"]))

    @property
    def csrf(self) -> str:
        return self.site.sessions.form if self.session is None else self.session.csrf

    @property
    def stale(self) -> bool:
        """Whether the page shows the state of this node, which may be stale, because no leader is known. Actions always
        ask the leader."""
        return self.service.leader_name is None and self.call.request.method != "POST"

    @property
    def origin(self) -> str:
        """Path and query of the console's page that sent this request; "" for any other page. The page's host is not
        compared, because a proxy may have changed Host. A redirect to the path stays on this host."""
        _, _, rest = self.call.request.headers.get("Referer", "").partition("://")
        target = "/" + rest.partition("/")[2].partition("#")[0]
        target = target.removeprefix(self.prefix)
        return target if NEXT.fullmatch(target) else ""

    @property
    def prefix(self) -> str:
        """Path under which a proxy serves this node: "" or such as /hadelay, without a slash at its end."""
        given = self.call.request.headers.get("X-Forwarded-Prefix", "").rstrip("/")
        return given if _PREFIX.fullmatch(given) else ""

    @property
    def asked(self) -> bool:
        """Whether a person made the request, and not a script of an open page."""
        return self.call.request.method == "POST" or "text/html" in self.call.request.headers.get("Accept", "")

    @property
    def packs(self) -> bool:
        return "gzip" in self.call.request.headers.get("Accept-Encoding", "")

    def may(self, scope: str, topic: str | None = None) -> bool:
        return self.access.may(scope, topic)

    def need(self, scope: str, topic: str | None = None) -> None:
        self.access.need(scope, topic)

    async def read_form(self) -> None:
        """Read the form of a change. Raises Forbidden unless the form comes from a page of this session."""
        if self.call.media_type != _FORM:
            raise BadRequest(f"the console takes forms ({_FORM})")
        try:
            data = await self.call.read(_MAX_FORM, "a form")
        except TooLarge:
            raise TooLarge(
                f"the form is too large: {_MAX_FORM >> 10} KiB are allowed; publish larger bodies with"
                " `hadelay publish`"
            ) from None
        try:
            self._form = parse_qs(data.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        except ValueError:
            raise BadRequest("the body of the request is not a form") from None
        given, session = self.text("csrf"), self.session
        mine = session is not None and hmac.compare_digest(given.encode(), session.csrf.encode())
        if not mine and (session is not None or not self.site.sessions.csrf(given)):
            what = "this form does not come from this session: open the page again, and repeat the change there"
            raise Forbidden(what)

    def text(self, name: str) -> str:
        """First value of a field of the form, without spaces around it; "" without one."""
        return self._form.get(name, [""])[0].strip()

    def raw(self, name: str) -> str:
        return self._form.get(name, [""])[0]

    def texts(self, name: str) -> list[str]:
        return self._form.get(name, [])

    def problem_of(self, error: HadelayError) -> Problem:
        """Describe an error in words for people. If the error names a field of the form or of the query, the page shows
        the words at this field."""
        return problem_of(error, self._form if self.call.request.method == "POST" else self.query)

    def fields(self) -> dict[str, str]:
        return {name: values[0].strip() for name, values in self._form.items() if name != "csrf"}

    def page(self, template: str, *, status: int = HTTPStatus.OK, **values: Any) -> Answer:
        """Render a page."""
        jar = self.call.request.cookies.get(self.site.flash_cookie)
        stale = self.stale and status == HTTPStatus.OK
        common = {"visit": self, "flash": Flash.from_cookie(jar), "leader": self.service.leader_name, "stale": stale}
        values = {**common, **values}
        headers = {"Set-Cookie": self.site.cookie(self.site.flash_cookie, "", 0)} if jar else {}
        text = self.under(self.site.renderer.render(template, values, self.zone))
        return as_answer(status, headers, text, packs=self.packs)

    def part(self, template: str, **values: Any) -> Answer:
        """Render a part of a page."""
        text = self.under(self.site.renderer.block(template, {"visit": self, **values}, self.zone))
        return as_answer(200, {}, text, packs=self.packs)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """HTML of a part of a page. The HTML must not depend on the visitor, except for the time zone, because a stream
        sends it to several visitors."""
        return str(self.site.renderer.block(template, values, self.zone))

    def under(self, html: str) -> str:
        """Put the path of the proxy in front of the addresses in HTML. Users' texts stay unchanged, because their
        quotes are escaped."""
        return html.replace('="/console/', f'="{self.prefix}/console/') if self.prefix else html

    def json(self, value: Any) -> Answer:
        return as_json(value, packs=self.packs)

    def go(self, where: str, notice: str | Flash = "") -> Answer:
        """Redirect the browser to a page of the console, which shows the notice once. where: path, begins with
        /console/. A form that console.js sent gets the address as JSON."""
        flash = Flash(notice) if isinstance(notice, str) else notice
        headers = CIMultiDict({"Cache-Control": "no-store"})
        if flash != Flash():
            headers.add("Set-Cookie", self.site.cookie(self.site.flash_cookie, flash.to_cookie(), _FLASH_S))
        if self.scripted:
            return as_json({"go": self.prefix + where}, packs=False, headers=headers)
        headers["Location"] = self.prefix + where
        return Answer(HTTPStatus.SEE_OTHER, headers, b"")

    def refuse(self, error: HadelayError) -> Answer:
        """The answer to a form: console.js shows the problem at its field, and leaves the form as it is. Without
        scripts, the page that the form comes from shows the problem."""
        problem = self.problem_of(error)
        if self.scripted:
            return as_json(problem, packs=False, status=error.http_status)
        words = f"{problem.field}: {problem.words}" if problem.field else problem.words
        return self.go(self.origin or "/console/", Flash(problem=Problem(words)))


def count_of(report: Attention[str] | None) -> int:
    return 0 if report is None else len(report.rows) + sum(report.more.values())


def whole(text: str, digits: int) -> int | None:
    """The number that `text` writes in at most `digits` decimal digits; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None


def pairs(field: str, text: str) -> list[tuple[str, str]]:
    """Parse a form's field with lines NAME=VALUE: pairs of name and value. Raises BadRequest."""
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise Wrong(field, f"{line[:40]!r}: write NAME=VALUE, one per line.")
        found.append((name.strip(), value.strip()))
    return found


Handler = Callable[[Visit], Awaitable[Any]]
H = TypeVar("H", bound=Handler)
LiveHandler = Callable[[Visit], tuple[str, Callable[[], Awaitable[dict[str, Any]]]]]


class Pages:
    """Pages and actions of one module, declared by their handlers."""

    def __init__(self) -> None:
        #: Routes of pages and actions: (method, path, handler).
        self.all: list[tuple[str, str, Handler]] = []
        #: (path, handler) of streams of server-sent events; the handler returns (name of the content, function that
        #: makes a frame).
        self.streams: list[tuple[str, LiveHandler]] = []

    def get(self, path: str) -> Callable[[H], H]:
        return self._add("GET", path)

    def post(self, path: str) -> Callable[[H], H]:
        """Decorator for an action (POST). Its form is accepted only from a page of the same session; the handler checks
        rights."""
        return self._add("POST", path)

    def live(self, path: str) -> Callable[[LiveHandler], LiveHandler]:
        """Decorator for the handler of a stream, which keeps a page up to date."""

        def declare(handler: LiveHandler) -> LiveHandler:
            self.streams.append((path, handler))
            return handler

        return declare

    def _add(self, method: str, path: str) -> Callable[[H], H]:
        def declare(handler: H) -> H:
            self.all.append((method, path, handler))
            return handler

        return declare
