"""Sends a request to a node of the shard that owns its topic, and decides the outcome for the client.

    nothing was sent                    the next node of the shard; 503 after the last one
    sent, but no whole answer           once more on a fresh connection if the request may be repeated; then 504
    421 (misdirected), with addresses   once more, to these addresses; a second 421 is 503
    any other answer                    the client gets it

The first node is the shard's leader, as its answers name it: any other node would pass the request on to the leader.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from hadelay.api.problems import NONSENSE
from hadelay.api.service import Granting, Leader
from hadelay.errors import Forbidden, HadelayError, NoLeader, OtherShard, OutcomeUnknown, Overloaded, TooLarge
from hadelay.http.answers import Answer
from hadelay.http.forwarding.exchange import WholeAnswer
from hadelay.http.forwarding.heads import ForwardHead
from hadelay.http.forwarding.pool import Asked, Failure, Pool, Request, Server
from hadelay.platform.tls import Certificates
from hadelay.settings.node import HttpConfig

#: Time in seconds for which a node that could not be reached is asked after all others; and limit of such nodes, at
#: which all of them are forgotten.
_AVOID_S, _MOST_AVOIDED = 1.0, 1_024
_RETRY_MS = 200
#: Pattern of the base URL of a node, as a shard map may have it.
_URL = re.compile(r"https?://(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?/?")
#: Age of the knowledge about a shard's leader, in seconds, up to which a client is redirected without asking the shard
#: again.
_FRESH_S = 1.0
#: Header of forwarded answers: URL of the shard's leader, to which the client may send later requests directly.
DIRECT = "Hadelay-Direct"
#: Request to find a shard's leader: every node answers it, with a header that names its leader.
_PROBE = ForwardHead("GET", b"GET /livez HTTP/1.1\r\n", b"", repeatable=True)
#: Headers of an answer that are written anew for the client's connection.
_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"content-length"))

#: Callback of a forwarded request, called once: with the owner's answer, or with an error.
Done = Callable[[WholeAnswer | None, HadelayError | None], None]


class Destination(NamedTuple):
    """A shard, and its nodes: name → URL. version: version of the shard map that names these nodes."""

    shard: int
    version: int
    urls: Mapping[str, str]


class Misdirected(msgspec.Struct):
    """Part of a 421's problem document: the shard that owns the topic, by the map of the node that answers. Its
    addresses are not used: a node sends requests, with their tokens, only to addresses of its own map."""

    shard: int


class _Error(msgspec.Struct):
    type: str = ""


class _Item(msgspec.Struct):
    error: _Error | None = None


class _Items(msgspec.Struct):
    """The results in the answer to a publish of a batch; `_holds_for_all_tries` needs their errors."""

    results: list[_Item] = []


#: Types of errors of batch items that nodes do not remember under the batch's Idempotency-Key.
_PASSING = frozenset((OtherShard.type, Forbidden.type))


class _Seen(NamedTuple):
    """Name of a shard's leader, and when an answer named it last, in seconds of the monotonic clock."""

    name: str
    at: float


class Forwarder:
    """Forwards requests of this node's clients. tls: certificates of this node's HTTPS; None: it serves HTTP. full:
    tells whether the process has no socket left."""

    def __init__(self, config: HttpConfig, tls: Certificates | None, node: str, full: Callable[[], bool]) -> None:
        self.node, self._tls, self._full = node, tls, full
        self.answer_s, self._connect_s = config.io_timeout_ms / 1000, config.no_leader_wait_ms / 1000
        #: Function: shard → its nodes by this node's shard map; None for a shard that is not in the map.
        self.known: Callable[[int], Destination | None] = lambda shard: None
        #: Pool of connections, made at the first request: a node without a shard map never opens it.
        self._pool: Pool | None = None
        #: Shard → its leader, as the shard's answers name it.
        self._leaders: dict[int, _Seen] = {}
        #: (shard, leader) → addresses in the shard map, and URLs of the shard's nodes made from these, the leader
        #: first.
        self._orders: dict[tuple[int, str | None], tuple[Mapping[str, str] | None, tuple[str, ...]]] = {}
        #: URL of a node that could not be reached → time until which this node is asked last.
        self._avoided: dict[str, float] = {}
        #: Counts for /metrics: requests by outcome (answered, repeated, unreachable, unknown).
        self.counts = {"answered": 0, "repeated": 0, "unreachable": 0, "unknown": 0}

    @property
    def connections(self) -> int:
        return 0 if self._pool is None else self._pool.count

    def ask(self, to: Destination, head: ForwardHead, body: bytes, done: Done) -> Forwarding:
        if self._pool is None:
            self._pool = Pool(self._full, self._connect_s)
        forwarding = Forwarding(self, self._pool, head, body, done)
        forwarding.begin(to)
        return forwarding

    async def answer(self, to: Destination, head: ForwardHead, body: bytes) -> Answer:
        """Forward a request, and wait for the answer; cancelling this abandons the request. Raises HadelayError."""
        found: asyncio.Future[WholeAnswer] = asyncio.get_running_loop().create_future()

        def done(answer: WholeAnswer | None, error: HadelayError | None) -> None:
            if found.done():
                return
            if answer is not None:
                found.set_result(answer)
            elif error is not None:
                found.set_exception(error)

        forwarding = self.ask(to, head, body, done)
        try:
            whole = await found
        except asyncio.CancelledError:
            forwarding.cancel()
            # Granting says that messages may be leased: the other shard may have begun to lease some to this client.
            raise Granting from None
        headers = {
            name.decode().title(): value.decode("utf-8", "surrogateescape")
            for name, value in whole.fields.items()
            if name not in _HOP
        }
        if (url := self.leader_url(to)) is not None:
            headers[DIRECT] = url
        return Answer(whole.status, headers, whole.body)

    def direct_line(self, to: Destination) -> bytes:
        """Header line of an answer that names the shard's leader to the client; empty if the leader is not known."""
        url = self.leader_url(to)
        return b"" if url is None else _direct_line(url)

    async def find_leader(self, to: Destination) -> Leader:
        """The leader of a shard, to redirect a client to it: as an answer of the shard named it within the last second,
        otherwise by asking a node of the shard. Raises NoLeader."""
        seen = self._leaders.get(to.shard)
        if seen is None or seen.at < time.monotonic() - _FRESH_S or seen.name not in to.urls:
            await self.answer(to, _PROBE, b"")
            seen = self._leaders.get(to.shard)
        url = self.leader_url(to)
        if seen is None or url is None:
            raise NoLeader(f"shard {to.shard} has no leader with an address for clients", retry_after_ms=_RETRY_MS)
        return Leader(seen.name, url, False)

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()

    def leader_url(self, to: Destination) -> str | None:
        """URL of the shard's leader, if its answers named one."""
        seen = self._leaders.get(to.shard)
        url = None if seen is None else to.urls.get(seen.name)
        # A node that serves HTTPS sends no client to an unencrypted address.
        return None if url is None or (self._tls is not None and not url.startswith("https:")) else url

    def nodes(self, to: Destination) -> list[str]:
        """URLs of the shard's nodes in the order in which they are asked: the leader; the node with the name of this
        node, which is often on the same machine; other nodes; and last, nodes that could not be reached lately."""
        seen = self._leaders.get(to.shard)
        leader = None if seen is None else seen.name
        of, urls = self._orders.get((to.shard, leader), (None, ()))
        if of is not to.urls:
            names = sorted(to.urls, key=lambda name: (name != leader, name != self.node, name))
            urls = tuple(dict.fromkeys(to.urls[name] for name in names))
            self._orders[to.shard, leader] = to.urls, urls
        now = time.monotonic() if self._avoided else 0.0
        return sorted(urls, key=lambda url: self._avoided.get(url, 0.0) > now) if self._avoided else list(urls)

    def avoid(self, to: Destination, url: str) -> None:
        """Ask this node last for a while, because it could not be reached or did not answer."""
        seen = self._leaders.get(to.shard)
        if seen is not None and to.urls.get(seen.name) == url:
            del self._leaders[to.shard]
        if len(self._avoided) >= _MOST_AVOIDED:
            self._avoided.clear()
        self._avoided[url] = time.monotonic() + _AVOID_S

    def learn(self, to: Destination, url: str, answer: WholeAnswer) -> None:
        """Remember the shard's leader, if the answer names it, and whether the node at `url` is to be asked last."""
        if self._avoided:
            self._avoided.pop(url, None)
        leader = answer.fields.get(b"hadelay-leader", b"").decode("latin-1")
        if leader in to.urls:
            self._leaders[to.shard] = _Seen(leader, time.monotonic())
        if answer.status == HTTPStatus.SERVICE_UNAVAILABLE and to.urls.get(leader, url) == url:
            self.avoid(to, url)  # ask other nodes first: one may know the leader, or not be drained

    def server(self, url: str) -> Server:
        """Address of a node to connect to. Raises Overloaded if this node serves HTTPS and the other node does not:
        tokens and messages are not sent unencrypted."""
        try:
            scheme, host, port = _address(url)
        except ValueError:
            raise Overloaded(f"{url[:80]!r} is no address of a node") from None
        if scheme == "https":
            return Server(host, port, _trusted() if self._tls is None else self._tls.client)
        if self._tls is not None:
            what = f"{url} is not encrypted, and this node serves HTTPS: no token or message is sent to it"
            raise Overloaded(f"{what}. Give the shard's nodes https:// addresses in the shard map")
        return Server(host, port, None)


class Forwarding:
    """One forwarded request. `cancel` abandons it, because its client has disconnected."""

    __slots__ = ("_asked", "_body", "_by", "_done", "_head", "_pool", "_redirected", "_sent", "_to", "_url", "_urls")

    def __init__(self, by: Forwarder, pool: Pool, head: ForwardHead, body: bytes, done: Done) -> None:
        self._by, self._pool, self._head, self._body = by, pool, head, body
        self._done: Done | None = done
        self._to: Destination
        #: URLs that are left to try, the next one at the end.
        self._urls: list[str] = []
        #: URL of the node that is being asked.
        self._url = ""
        self._asked: Asked | None = None
        #: Whether a node may have carried out the request; and whether a node has redirected it to another shard.
        self._sent = self._redirected = False

    def begin(self, to: Destination) -> None:
        self._to = to
        self._urls = self._by.nodes(to)[::-1]
        self._next("the shard map names no node")

    def cancel(self) -> None:
        asked, self._asked, self._done = self._asked, None, None
        if asked is not None:
            asked.cancel()

    def _next(self, reason: str, *, fresh: bool = False) -> None:
        """Ask the next node. reason: text for the error if no node is left. fresh: use a new connection."""
        while self._urls:
            self._url = self._urls.pop()
            try:
                server = self._by.server(self._url)
            except HadelayError as error:
                reason = error.detail
                continue
            data = self._head.data(_netloc(self._url), self._to.shard, self._to.version, self._body)
            request = Request(data, self._by.answer_s + self._head.wait_s)
            self._asked = self._pool.ask(server, request, self._over, fresh=fresh)
            return
        self._fail(reason)

    def _over(self, answer: WholeAnswer | None, failure: Failure | None) -> None:
        self._asked = None
        if answer is not None:
            self._answered(answer)
            return
        assert failure is not None
        reason = f"{self._url}: {failure.reason}"
        if failure.too_long and self._head.reads:
            what = f"shard {self._to.shard}: {failure.reason}. Ask for less at a time, or ask {self._url} itself"
            self._end(None, TooLarge(what))
            return
        self._by.avoid(self._to, self._url)
        if not failure.sent:
            self._next(reason)
        elif self._head.repeatable and not self._sent:
            self._sent = True
            self._by.counts["repeated"] += 1
            self._urls = self._by.nodes(self._to)[::-1]
            self._next(reason, fresh=True)
        else:
            self._sent = True
            self._fail(reason)

    def _answered(self, answer: WholeAnswer) -> None:
        by, to = self._by, self._to
        by.learn(to, self._url, answer)
        if answer.status == HTTPStatus.MISDIRECTED_REQUEST:
            self._elsewhere(answer)
        elif self._sent and not self._head.reads and not _holds_for_all_tries(answer):
            # The repetition was refused, but the first request may have been carried out, or may still be: the outcome
            # is unknown.
            self._fail(f"{self._url} refused its repetition, or parts of it ({answer.status})")
        else:
            by.counts["answered"] += 1
            self._end(answer, None)

    def _elsewhere(self, answer: WholeAnswer) -> None:
        """Handle an answer 421: another shard owns the topic, and the node has done nothing."""
        reason = f"{self._url} and this node have different shard maps"
        try:
            found = msgspec.json.decode(answer.body, type=Misdirected)
        except NONSENSE:
            found = None
        to = None if found is None or self._redirected else self._by.known(found.shard)
        if to is None or not to.urls:
            self._urls = []
            self._next(reason)
            return
        self._redirected = True
        self.begin(to)

    def _fail(self, reason: str) -> None:
        what, counts = f"shard {self._to.shard}: {reason}", self._by.counts
        unknown = self._sent and not self._head.reads
        counts["unknown" if unknown else "unreachable"] += 1
        error: HadelayError = (
            OutcomeUnknown(f"{what}. The request may have been carried out")
            if unknown
            else NoLeader(f"{what}. Nothing has happened", retry_after_ms=_RETRY_MS)
        )
        # Call `done` in the next pass of the event loop: now, the caller may still be in `Forwarder.ask`.
        self._pool.loop.call_soon(self._end, None, error)

    def _end(self, answer: WholeAnswer | None, error: HadelayError | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            done(answer, error)


def _holds_for_all_tries(answer: WholeAnswer) -> bool:
    """Whether the answer to a repetition under an Idempotency-Key also tells the outcome of the first request.

    The answer of a batch is remembered under its key, errors included, if one of its messages is stored. Otherwise, and
    if an item's error depends on the token's scopes or the shard map of the moment, the first request may have another
    outcome."""
    if not 200 <= answer.status < 300:
        return False
    form: Any = msgspec.msgpack if b"msgpack" in answer.fields.get(b"content-type", b"") else msgspec.json
    try:
        items = form.decode(answer.body, type=_Items).results
    except NONSENSE:
        return True  # the answer has no batch items to check
    passing = any(item.error is not None and item.error.type in _PASSING for item in items)
    return not items or (not passing and any(item.error is None for item in items))


@lru_cache(maxsize=1024)
def _direct_line(url: str) -> bytes:
    return b"%b: %b\r\n" % (DIRECT.encode(), url.encode())


@lru_cache(maxsize=1024)
def _netloc(url: str) -> str:
    return urlsplit(url).netloc


@lru_cache(maxsize=1024)
def _address(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a node's URL. Raises ValueError for any other text."""
    if not _URL.fullmatch(url):
        raise ValueError(url)
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


@lru_cache(maxsize=1)
def _trusted() -> ssl.SSLContext:
    """TLS context that trusts the system's certificate authorities."""
    return ssl.create_default_context()
