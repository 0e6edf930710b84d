"""Who asks, and what they may: bearer tokens, looked up before anything else of a request is read (ADR 122).

Where tokens are asked for, every request names one, but for those of routes that are open (health, the description of
the API). What a token may is remembered by its header to the byte, and forgotten as soon as the tokens of the cluster
are others, or one of them expires; so is what connection.py remembers of whole heads.
"""

from __future__ import annotations

import hashlib
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
from hadelay.loglimit import LogLimit
from hadelay.rights import Rights, Token
from hadelay.server.service.tokens import Access as TokenService
from hadelay.settings.node import HttpConfig, SecurityConfig

log = logging.getLogger(__name__)
AccessDenied = TypeVar("AccessDenied", Unauthorized, Forbidden)

#: Before a token's 43 random characters: for people, and for programs that look for secrets where none should be.
PREFIX = "hadelay_"
_TOKEN = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{43}}")
_BEARER = re.compile(r"bearer +(\S+) *", re.I)
#: Headers remembered: each token has one, however it is spelt.
_MOST = 4_096
#: At least so often the clock is asked whether a token expired, in seconds.
_LOOK_S = 1.0


def hash_token(token: str) -> bytes:
    """What is kept of a token. It has 256 random bits: there is nothing to slow a guesser down for."""
    return hashlib.sha256(token.encode()).digest()


def _with_reason(reason: str, error: AccessDenied) -> AccessDenied:
    error.reason = reason
    return error


class Denials:
    """Requests that were refused for who asked. Counted by reason, and told in the log: a line per reason in ten
    seconds, with how many there were since the last one."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter()
        self._log_limit = LogLimit(monotonic)

    def note(self, route: str, error: HadelayError) -> None:
        if not isinstance(error, Unauthorized | Forbidden):
            return
        self.counts[error.reason] += 1
        if count := self._log_limit.count(error.reason):
            log.warning(
                "access_denied",
                extra={"reason": error.reason, "route": route, "detail": error.detail, "count": count},
            )


def check_site(method: str, headers: Mapping[str, str]) -> None:
    """A web page of another site may make a browser send requests to addresses that only the browser can reach, such as
    loopback. Browsers say so; what is no browser says nothing. Raises Forbidden, for what changes something."""
    if method in ("GET", "HEAD", "OPTIONS"):
        return
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    if site is not None:
        foreign = site.lower() not in ("same-origin", "none")
    else:
        foreign = origin is not None and origin.lower().partition("://")[2] != headers.get("Host", "").lower()
    if foreign:
        said = f"Origin {origin[:128]!r}" if origin is not None else f"Sec-Fetch-Site {site!r:.64}"
        what = f"this was sent by a web page of another site ({said}), which may change nothing here"
        raise _with_reason("cross_site", Forbidden(what))


class Hosts:
    """Names that requests may ask this node by. An attacker's name may lead to any address, loopback too. Then the
    attacker's web page is of the same site as this node, and reads and changes everything (DNS rebinding). An address
    in place of the name cannot be forged so. A browser shows no token by itself: where tokens are asked for, names are
    checked only if `http.hosts` has some."""

    def __init__(self, config: HttpConfig, *, tokens: bool) -> None:
        self._checks = bool(config.hosts) or not tokens
        own = (_host_of(config.advertise.partition("://")[2]), _host_of(config.listen))
        self._patterns = tuple(name.lower() for name in (*config.hosts, *own, "localhost", "*.localhost") if name)

    def allows(self, host: str) -> bool:
        """host: as the header says, with a port or without."""
        if not self._checks:
            return True
        name = _host_of(host.strip()).lower().removesuffix(".")
        return not name or _is_address(name) or any(fnmatchcase(name, pattern) for pattern in self._patterns)

    def check(self, hosts: Iterable[str]) -> None:
        """Raises Forbidden."""
        for host in hosts:
            if not self.allows(host):
                what = f"this node is not asked by the name {host[:128]!r}: add it to http.hosts, or use an address"
                raise _with_reason("foreign_host", Forbidden(what))


def _host_of(address: str) -> str:
    """Of host, host:port, or [v6]:port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Access:
    """What one request may do."""

    def __init__(self, actor: Actor, rights: Rights, *, first_only: bool = False) -> None:
        self.actor, self.rights = actor, rights
        #: The bootstrap token: good for making a token, and nothing else.
        self.first_only = first_only

    def may(self, scope: str, topic: str | None) -> bool:
        return self.rights.may(scope, topic)

    def need(self, scope: str, topic: str | None) -> None:
        """Raises Forbidden. topic None: all topics, and the cluster."""
        if not self.rights.may(scope, topic):
            where = "for the whole cluster" if topic is None else f"for topic {topic[:128]!r}"
            raise Forbidden(f"the token {self.actor.token!r} has no scope {scope} {where}")

    def need_of(self, scope: str, topic: str, what: str) -> None:
        """The same for the topic of `what`, which the request did not name: neither does the answer."""
        if not self.rights.may(scope, topic):
            raise Forbidden(f"the token {self.actor.token!r} has no scope {scope} for the topic of this {what}")

    def check(self, route: Route, path: Mapping[str, str]) -> None:
        if self.first_only:
            if route.name != "create_token":
                what = "the bootstrap token makes a token (POST /v1/tokens), and nothing else"
                raise _with_reason("bootstrap", Forbidden(what))
            return
        scope = route.scope
        if not route.own_topics:
            self.need(scope, path.get("topic"))
        elif not self.rights.may_somewhere(scope):
            raise Forbidden(f"the token {self.actor.token!r} has no scope {scope}")


#: Access of every request where no tokens are asked for.
UNRESTRICTED = Access(Actor(), Rights(("admin",)))


class Authenticator:
    """Looks tokens up. `monotonic`: seconds. `forget` is called when a request that was allowed may be so no more."""

    def __init__(
        self, service: TokenService, config: SecurityConfig, monotonic: Callable[[], float], forget: Callable[[], None]
    ) -> None:
        self.service, self.config, self.monotonic, self.forget = service, config, monotonic, forget
        self._tokens: Mapping[str, Token] | None = None
        self._by_hash: dict[bytes, Token] = {}
        self._known: dict[str, Access] = {}
        self._has_admin = False
        #: When the next token expires, in cluster time; and until when that need not be looked at.
        self._next_ms: int | None = None
        self._until = 0.0

    def look(self) -> None:
        """Before anything is answered from memory. Costs next to nothing while nothing changes."""
        if self.service.tokens is self._tokens and (self._next_ms is None or self.monotonic() < self._until):
            return
        tokens, now_ms = self.service.tokens, self.service.now_ms()
        if tokens is not self._tokens or (self._next_ms is not None and now_ms >= self._next_ms):
            living = [token for token in tokens.values() if token.holds(now_ms)]
            self._tokens, self._known = tokens, {}
            # The others too, so that who comes with one is told that it expired.
            self._by_hash = {token.hash: token for token in tokens.values()}
            self._has_admin = any(Rights(token.scopes).may("admin", None) for token in living)
            self._next_ms = min((t.expires_at_ms for t in living if t.expires_at_ms is not None), default=None)
            self.forget()
        if self._next_ms is not None:
            self._until = self.monotonic() + min(_LOOK_S, (self._next_ms - now_ms) / 1000)

    def admit(self, headers: Sequence[str]) -> Access:
        """headers: every Authorization of the request. Raises Unauthorized; NoLeader while this node knows of none."""
        if len(headers) != 1:
            what = "two Authorization headers" if headers else "no token"
            what += f": send Authorization: Bearer {PREFIX}… (hadelay token create makes one)"
            raise _with_reason("no_token", Unauthorized(what))
        self.look()
        known = self._known.get(headers[0])
        if known is None:
            known = self._find(headers[0])
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[headers[0]] = known
        return known

    def _find(self, header: str) -> Access:
        given = _BEARER.fullmatch(header)
        if given is None:
            raise _with_reason("malformed", Unauthorized("Authorization: expected Bearer and a token"))
        if not _TOKEN.fullmatch(given[1]):
            what = f"this is not a whole token: {PREFIX} and 43 characters, not {len(given[1])} in all"
            raise _with_reason("malformed", Unauthorized(what))
        if not self.service.knows_tokens:
            # It was off: what it remembers may hold no longer.
            raise NoLeader("this node has just started and does not know the tokens yet", retry_after_ms=500)
        digest = hash_token(given[1])
        token = self._by_hash.get(digest)
        if token is None:
            return self._bootstrap(digest)
        if not token.holds(self.service.now_ms()):
            raise _with_reason("expired", Unauthorized(f"the token {token.name!r} ({token.id}) has expired"))
        return Access(Actor(token.id, token.name), Rights(token.scopes))

    def _bootstrap(self, digest: bytes) -> Access:
        wanted = self.config.bootstrap_token_hash
        if not wanted or not hmac.compare_digest(bytes.fromhex(wanted), digest):
            raise Unauthorized("this token is not known: it was revoked, or it is of another cluster")
        if self._has_admin:
            what = "the bootstrap token is spent: this cluster has a token with the scope admin"
            raise _with_reason("bootstrap", Unauthorized(what))
        return Access(Actor("", "bootstrap"), Rights(()), first_only=True)
