"""Authenticates requests by bearer tokens, before anything else of a request is read (ADR 122).

With tokens switched on, every request needs one, except to open routes (health, the description of the API). The access
of a token is cached by the bytes of its header. The cache, and that of whole heads in requestheads.py, is cleared when
the cluster's tokens change or one of them expires.
"""

import hmac
import ipaddress
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from hadelay.api.service import Actor
from hadelay.errors import Forbidden, HadelayError, NoLeader, Unauthorized
from hadelay.http.routes import Route
from hadelay.platform.loglimit import LogLimit
from hadelay.rights import TOKEN_PREFIX, Rights, Token, hash_token
from hadelay.rules.access import RequestRights
from hadelay.server.service.node import TokenService as TokenService
from hadelay.settings.node import HttpConfig, SecurityConfig

log = logging.getLogger(__name__)
AccessDenied = TypeVar("AccessDenied", Unauthorized, Forbidden)

_TOKEN = re.compile(rf"{TOKEN_PREFIX}[A-Za-z0-9_-]{{43}}")
#: Pattern of host names: ASCII names as in DNS, and underscores.
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_BEARER = re.compile(r"bearer +(\S+) *", re.I)
#: Limit of cached Authorization headers, each spelling of a header counted; at the limit, the cache is emptied.
_MOST = 4_096
#: Default ports, which browsers leave out of the Host header; and pattern of the port in a Host header.
_DEFAULT_PORTS, _PORT = (80, 443), re.compile(r":\d+$")
#: Longest interval between two checks for expired tokens, in seconds.
_LOOK_S = 1.0


def _with_reason(reason: str, error: AccessDenied) -> AccessDenied:
    error.reason = reason
    return error


class Denials:
    """Counts refusals of tokens and rights by reason, and logs at most one line per reason in ten seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self._log_limit = LogLimit(monotonic)

    def note(self, route: str, error: HadelayError) -> None:
        if not isinstance(error, Unauthorized | Forbidden):
            return
        self.counts[error.reason] += 1
        if count := self._log_limit.count(error.reason):
            log.warning(
                "access_denied", extra={"reason": error.reason, "route": route, "detail": error.detail, "count": count}
            )


def check_site(method: str, headers: Mapping[str, str], port: int) -> None:
    """Raise Forbidden for a change that a web page of another site requests (cross-site request forgery): the user's
    browser may reach addresses that the site cannot, such as loopback. Browsers name the page's site in headers; other
    clients send no such headers. port: port at which this node listens. Unless it is a default port, browsers send it
    in the Host header. If Host has no port then, a proxy has dropped it, and only the host names are compared. A proxy
    may send the browser's host in X-Forwarded-Host instead."""
    if method in ("GET", "HEAD", "OPTIONS"):
        return
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    if site is not None:
        foreign = site.lower() not in ("same-origin", "none")
    else:
        host, (_, scheme, own) = headers.get("Host", "").lower(), (origin or "").lower().partition("://")
        dropped = port not in _DEFAULT_PORTS and not _PORT.search(host)
        # A page of another site cannot add X-Forwarded-Host: its browser would ask this node first (CORS preflight),
        # which refuses.
        forwarded = headers.get("X-Forwarded-Host", "").lower().split(",")
        named = {host, *filter(None, map(str.strip, forwarded))}
        same = own in named or (dropped and _PORT.sub("", own) == host)
        # A page in a sandboxed frame sends the origin "null", which has no scheme: it is refused like a foreign one.
        foreign = origin is not None and not (scheme and same)
    if foreign:
        said = f"Origin {origin[:128]!r}" if origin is not None else f"Sec-Fetch-Site {site!r:.64}"
        what = (
            f"a web page of another site sent this request ({said}); such pages may not change anything on this node. "
        )
        what += "Behind a proxy: let it pass on the Host of the browser (nginx: proxy_set_header Host $http_host)"
        raise _with_reason("cross_site", Forbidden(what))


class Hosts:
    """Checks Host headers, against DNS rebinding: an attacker's host name may resolve to this node's address, so that a
    browser takes the attacker's page and this node for one site. IP addresses need no check. Browsers send
    no token by themselves, so a node that requires tokens checks names only if `http.hosts` has some."""

    def __init__(self, config: HttpConfig, *, tokens: bool) -> None:
        self._checks = bool(config.hosts) or not tokens
        own = (_host_of(config.advertise.partition("://")[2]), _host_of(config.listen))
        self._patterns = tuple(name.lower() for name in (*config.hosts, *own, "localhost", "*.localhost") if name)

    def allows(self, host: str) -> bool:
        """Whether requests may use this host name. host: value of the Host header, with or without a port."""
        if not self._checks:
            return True
        name = _host_of(host.strip()).lower().removesuffix(".")
        if name and not _is_address(name) and not _NAME.fullmatch(name):
            return False  # refuse names such as evil.example#.localhost: a browser reads only the part before the #
        return not name or _is_address(name) or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def check(self, hosts: Iterable[str]) -> None:
        """Raises Forbidden if a Host header has a name that is not allowed."""
        for host in hosts:
            if not self.allows(host):
                what = f"host name {host[:128]!r} is not allowed here: add it to http.hosts, or use an IP address"
                raise _with_reason("foreign_host", Forbidden(what))


def _host_of(address: str) -> str:
    """Host part of an address: host, host:port or [v6]:port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def check_route(access: RequestRights, route: Route, path: Mapping[str, str]) -> None:
    """Raises Forbidden if the token may not use the route. path: variables of the request's path."""
    if access.first_only:
        if route.name != "create_token":
            what = "the bootstrap token may only create a token (POST /v1/tokens)"
            raise _with_reason("bootstrap", Forbidden(what))
        return
    scope = route.scope
    if not route.own_topics:
        access.need(scope, path.get("topic"))
    elif not access.rights.may_somewhere(scope):
        raise Forbidden(f"the token {access.actor.token!r} has no scope {scope}")


class Authenticator:
    """Finds the rights of a token. monotonic: clock in seconds. forget: clears other caches when tokens change."""

    def __init__(
        self, service: TokenService, config: SecurityConfig, monotonic: Callable[[], float], forget: Callable[[], None]
    ) -> None:
        self.service, self.config, self.monotonic, self.forget = service, config, monotonic, forget
        self._tokens: Mapping[str, Token] | None = None
        self._by_hash: dict[bytes, Token] = {}
        self._known: dict[str, RequestRights] = {}
        self._has_admin = False
        #: Cluster time at which the next token expires; None: no token expires.
        self._next_ms: int | None = None
        #: Monotonic time until which no check for expired tokens is needed.
        self._until = 0.0

    def look(self) -> None:
        """Clear the caches if tokens changed or expired. Call this before each answer from a cache."""
        if self.service.tokens is self._tokens and (self._next_ms is None or self.monotonic() < self._until):
            return
        tokens, now_ms = self.service.tokens, self.service.now_ms()
        if tokens is not self._tokens or (self._next_ms is not None and now_ms >= self._next_ms):
            living = [token for token in tokens.values() if token.holds(now_ms)]
            self._tokens, self._known = tokens, {}
            # Keep expired tokens too: the refusal of a request with an expired token says that the token has expired.
            self._by_hash = {token.hash: token for token in tokens.values()}
            self._has_admin = any(Rights(token.scopes).may("admin", None) for token in living)
            self._next_ms = min((t.expires_at_ms for t in living if t.expires_at_ms is not None), default=None)
            self.forget()
        if self._next_ms is not None:
            self._until = self.monotonic() + min(_LOOK_S, (self._next_ms - now_ms) / 1000)

    def admit(self, headers: Sequence[str]) -> RequestRights:
        """Rights of a request by its Authorization headers. Raises Unauthorized; NoLeader while tokens are unknown."""
        if len(headers) != 1:
            what = "two Authorization headers" if headers else "no token"
            what += f": send Authorization: Bearer {TOKEN_PREFIX}… (hadelay token create makes one)"
            raise _with_reason("no_token", Unauthorized(what))
        self.look()
        known = self._known.get(headers[0])
        if known is None:
            known = self._find(headers[0])
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[headers[0]] = known
        return known

    def admit_session(self, token_id: str) -> RequestRights:
        """Rights of a session of the console that the token with this id opened. Raises as `admit` does."""
        self.look()
        return self._rights_of(self.service.tokens.get(token_id))

    def _find(self, header: str) -> RequestRights:
        given = _BEARER.fullmatch(header)
        if given is None:
            what = "the Authorization header must be: Bearer, a space, and the token"
            raise _with_reason("malformed", Unauthorized(what))
        if not _TOKEN.fullmatch(given[1]):
            what = f"the token must be {TOKEN_PREFIX} and 43 characters; it has {len(given[1])} in all"
            raise _with_reason("malformed", Unauthorized(what))
        self._check_known()
        digest = hash_token(given[1])
        token = self._by_hash.get(digest)
        return self._bootstrap(digest) if token is None else self._rights_of(token)

    def _check_known(self) -> None:
        if not self.service.knows_tokens:
            # Admit no token until the tokens are known: some may have been revoked while this node was down.
            raise NoLeader("this node has just started and does not know the tokens yet", retry_after_ms=500)

    def _rights_of(self, token: Token | None) -> RequestRights:
        self._check_known()
        if token is None:
            raise Unauthorized("the token of this session was revoked")
        if not token.holds(self.service.now_ms()):
            raise _with_reason("expired", Unauthorized(f"the token {token.name!r} ({token.id}) has expired"))
        return RequestRights(Actor(token.id, token.name), Rights(token.scopes))

    def _bootstrap(self, digest: bytes) -> RequestRights:
        wanted = self.config.bootstrap_token_hash
        if not wanted or not hmac.compare_digest(bytes.fromhex(wanted), digest):
            raise Unauthorized("unknown token: it was revoked, or it belongs to another cluster")
        if self._has_admin:
            what = "the bootstrap token is no longer valid: this cluster has a token with the scope admin"
            raise _with_reason("bootstrap", Unauthorized(what))
        return RequestRights(Actor("", "bootstrap"), Rights(()), first_only=True)
