"""One request of a browser, and the declaration of pages."""

from __future__ import annotations

import hmac
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, parse_qsl

from multidict import CIMultiDict

from hadelay.api.service import Actor
from hadelay.api.text import check_topic
from hadelay.console.render import as_answer, as_json
from hadelay.errors import BadRequest, Forbidden
from hadelay.http.answers import Answer
from hadelay.http.decoding import media_type

if TYPE_CHECKING:
    from hadelay.console.sessions import Session
    from hadelay.http.access import RequestRights
    from hadelay.http.call import Call
    from hadelay.server.service.node import NodeService

_FORM = "application/x-www-form-urlencoded"
#: Limits of a form: its size in bytes, and the number of its fields.
_MAX_FORM, _MAX_FIELDS = 256 << 10, 1_100
#: Limit of the characters of a notice, the text about an action that the next page shows.
_MAX_NOTICE = 400
#: Pattern of the paths to which a browser may be redirected after the sign-in.
NEXT = re.compile(r"/console/[A-Za-z0-9._~/?&=%+:*,-]*")


class Visit:
    """A request, its session and its rights. Pages get one, and return an answer."""

    def __init__(self, site: Any, call: Call, session: Session | None, access: RequestRights) -> None:
        self.site, self.call, self.session, self.access = site, call, session, access
        self.query: dict[str, str] = dict(parse_qsl(call.target.partition("?")[2], keep_blank_values=True))
        self._form: dict[str, list[str]] = {}
        #: Whether htmx asks for a part of the page.
        self.partial = call.request.headers.get("HX-Request") == "true"

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
    def csrf(self) -> str:
        return self.site.csrf if self.session is None else self.session.csrf

    @property
    def stale(self) -> bool:
        """Whether the page shows what this node knows by itself, because there is no leader to ask. Actions ask it."""
        return self.service.leader_name is None and self.call.request.method != "POST"

    @property
    def origin(self) -> str:
        """Target of the page that this request comes from; "" if that is no page of the console."""
        _, _, rest = self.call.request.headers.get("Referer", "").partition("://")
        host, slash, target = rest.partition("/")
        same = host == self.call.request.headers.get("Host") and NEXT.fullmatch(slash + target)
        return slash + target if same else ""

    @property
    def packs(self) -> bool:
        return "gzip" in self.call.request.headers.get("Accept-Encoding", "")

    def may(self, scope: str, topic: str | None = None) -> bool:
        return self.access.may(scope, topic)

    def need(self, scope: str, topic: str | None = None) -> None:
        self.access.need(scope, topic)

    async def read_form(self) -> None:
        """Read the form of a change. Raises Forbidden unless the form comes from a page of this session."""
        if media_type(self.call.request) != _FORM:
            raise BadRequest(f"the console takes forms ({_FORM})")
        data = await self.call.read(_MAX_FORM, "of this form")
        try:
            self._form = parse_qs(data.decode(), keep_blank_values=True, max_num_fields=_MAX_FIELDS)
        except ValueError:
            raise BadRequest("the body of the request is not a form") from None
        if not hmac.compare_digest(self.text("csrf").encode(), self.csrf.encode()):
            what = "this form does not come from this session: open the page again, and repeat the change there"
            raise Forbidden(what)

    def text(self, name: str) -> str:
        """First value of a field of the form, without spaces around it; "" without one."""
        return self._form.get(name, [""])[0].strip()

    def raw(self, name: str) -> str:
        return self._form.get(name, [""])[0]

    def texts(self, name: str) -> list[str]:
        return self._form.get(name, [])

    def fields(self) -> dict[str, str]:
        return {name: values[0].strip() for name, values in self._form.items() if name != "csrf"}

    def page(self, template: str, *, status: int = HTTPStatus.OK, **values: Any) -> Answer:
        """Render a page."""
        jar = self.call.request.cookies.get(self.site.notice_cookie)
        stale = self.stale and status == HTTPStatus.OK
        values = {"visit": self, "notice": _notice(jar), "leader": self.service.leader_name, "stale": stale, **values}
        headers = {"Set-Cookie": self.site.cookie(self.site.notice_cookie, "", 0)} if jar else {}
        return as_answer(status, headers, self.site.renderer.render(template, values), packs=self.packs)

    def part(self, template: str, **values: Any) -> Answer:
        """Render a part of a page."""
        return as_answer(200, {}, self.site.renderer.block(template, {"visit": self, **values}), packs=self.packs)

    def render(self, template: str, values: Mapping[str, Any]) -> str:
        """HTML of a part of a page. It must not depend on the visitor: streams share it."""
        return str(self.site.renderer.block(template, values))

    def json(self, value: Any) -> Answer:
        return as_json(value, packs=self.packs)

    def go(self, where: str, notice: str = "") -> Answer:
        """Redirect the browser to a page of the console, which shows the notice. where: path, begins with /console/."""
        headers = CIMultiDict({"Location": where, "Cache-Control": "no-store"})
        if notice:
            text = urlsafe_b64encode(notice[:_MAX_NOTICE].encode()).decode().rstrip("=")
            headers.add("Set-Cookie", self.site.cookie(self.site.notice_cookie, text, 30))
        return Answer(HTTPStatus.SEE_OTHER, headers, b"")


def whole(text: str, digits: int) -> int | None:
    """The number that `text` writes in at most `digits` decimal digits; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= digits else None


def _notice(text: str | None) -> str:
    if not text:
        return ""
    try:
        return urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()[:_MAX_NOTICE]
    except (Base64Error, ValueError):
        return ""


Handler = Callable[[Visit], Awaitable[Any]]
H = TypeVar("H", bound=Handler)
LiveHandler = Callable[[Visit], tuple[str, Callable[[], Awaitable[dict[str, Any]]]]]


class Pages:
    """Pages and actions of one module, declared by their handlers."""

    def __init__(self) -> None:
        #: Routes of pages and actions: (method, path, handler).
        self.all: list[tuple[str, str, Handler]] = []
        #: (path, handler) of streams of server-sent events; the handler returns (name of the content, maker of frames).
        self.streams: list[tuple[str, LiveHandler]] = []

    def get(self, path: str) -> Callable[[H], H]:
        return self._add("GET", path)

    def post(self, path: str) -> Callable[[H], H]:
        """Decorator for an action (POST). The form is checked to be of this session; the handler checks rights."""
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
