"""Connections to nodes of other shards: a few per server, each with one request at a time. Callbacks get the results.

A connection is used again only after the whole answer to its own request (exchange.py). A request that is given up, by
its client or by its timeout, closes the connection, so that the other node withdraws it too. The number of connections,
of requests that wait for one, and each time are limited.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from typing import NamedTuple, cast

from hadelay.http.forwarding.exchange import Exchange, Odd, State, TooLong, WholeAnswer
from hadelay.platform.tls import in_words

#: Limits per server: of connections; and of requests that wait for a connection, beyond which requests fail.
_CONNECTIONS, _WAITING = 256, 4_096
#: Limit of the memory for incomplete answers over all connections, in bytes; an answer that exceeds it fails.
_MAX_PARTIAL = 512 << 20
#: Idle time after which a connection is closed, in seconds: nodes close idle connections after 75 s, and a request that
#: is sent just then has an unknown outcome.
_IDLE_S = 30.0


class Server(NamedTuple):
    """A node of another shard. tls: context of its connections; None: without TLS."""

    host: str
    port: int
    tls: ssl.SSLContext | None


class Failure(NamedTuple):
    """Reason why a request has no complete answer. sent: whether bytes of the request were sent, so that it may have an
    effect. too_long: whether the answer exceeds the limit."""

    reason: str
    sent: bool
    too_long: bool = False


#: Callback of a request, called once: with the complete answer, or with the reason why there is none.
Done = Callable[[WholeAnswer | None, Failure | None], None]


class Request(NamedTuple):
    """Bytes of a request. timeout_s: time that its answer may take, counted from the sending."""

    data: bytes
    timeout_s: float


class Pool:
    """Connections of this node to the nodes of other shards. Construct it inside the running loop. full: tells whether
    the process has no socket left. connect_s: timeout of getting a connection."""

    def __init__(self, full: Callable[[], bool], connect_s: float) -> None:
        self._full, self.connect_s, self.loop = full, connect_s, asyncio.get_running_loop()
        self._peers: dict[Server, _Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False
        #: Number of connections, including those that are being opened.
        self.count = 0
        #: Number of bytes of all incomplete answers.
        self.partial = 0

    def ask(self, server: Server, request: Request, done: Done, *, fresh: bool = False) -> Asked:
        """Send a request. fresh: whether to open a new connection for it, because idle ones may be broken."""
        asked = Asked(self, request, done)
        peer = self._peers.get(server)
        if peer is None:
            peer = self._peers[server] = _Peer(server)
        asked.peer = peer
        if fresh:
            self._close_idle(peer)
        if peer.idle:
            peer.idle.pop().send(asked)
        elif len(peer.waiting) >= _WAITING or self._closed:
            what = "the node is shutting down" if self._closed else f"{_WAITING} requests wait for a connection"
            self.loop.call_soon(asked.fail, Failure(what, sent=False))
        else:
            peer.waiting[asked] = None
            asked.timer = self.loop.call_later(self.connect_s, asked.late)
            self._grow(peer)
        return asked

    def _grow(self, peer: _Peer) -> None:
        """Open connections for the requests that wait, within the limits."""
        while len(peer.waiting) > peer.connecting and peer.open < _CONNECTIONS:
            if self._full():
                if not peer.open:
                    self._fail_oldest(peer, "this node has no free socket")
                    continue
                return
            peer.open += 1
            peer.connecting += 1
            self.count += 1
            task = self.loop.create_task(self._connect(peer))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if not peer.open and not peer.waiting:
            self._peers.pop(peer.server, None)

    async def _connect(self, peer: _Peer) -> None:
        host, port, tls = peer.server
        link, reason = _Link(self, peer), "the node closed the new connection"
        try:
            async with asyncio.timeout(self.connect_s):
                await self.loop.create_connection(
                    lambda: link, host, port, ssl=tls, server_hostname=host if tls else None
                )
        except (OSError, ValueError) as error:
            reason = _why(error)
        finally:
            peer.connecting -= 1
            if link.transport is None:
                self._disconnected(peer)
        if link.usable:
            link.free()
        else:
            self._fail_oldest(peer, reason)
        self._grow(peer)

    def _fail_oldest(self, peer: _Peer, reason: str) -> None:
        if peer.waiting:
            asked = next(iter(peer.waiting))
            del peer.waiting[asked]
            self.loop.call_soon(asked.fail, Failure(reason, sent=False))

    def lost(self, link: _Link) -> None:
        """Note that a connection was closed."""
        peer = link.peer
        if link in peer.idle:
            peer.idle.remove(link)
        self._disconnected(peer)
        self._grow(peer)

    def _disconnected(self, peer: _Peer) -> None:
        """Subtract one connection from the counts."""
        peer.open -= 1
        self.count -= 1

    def idle(self, link: _Link) -> None:
        """Keep a connection that has no request. A server's idle connections are in the order in which they became
        idle."""
        if self._closed:
            link.end()
            return
        link.since = time.monotonic()
        link.peer.idle.append(link)
        if self._sweeping is None:
            self._sweeping = self.loop.call_later(_IDLE_S / 4, self._sweep)

    def _sweep(self) -> None:
        oldest = time.monotonic() - _IDLE_S
        for peer in self._peers.values():
            while peer.idle and peer.idle[0].since < oldest:
                peer.idle.pop(0).end()
        some = any(peer.idle for peer in self._peers.values())
        self._sweeping = self.loop.call_later(_IDLE_S / 4, self._sweep) if some else None

    @staticmethod
    def _close_idle(peer: _Peer) -> None:
        idle, peer.idle = peer.idle, []
        for link in idle:
            link.end()

    async def close(self) -> None:
        """Close all connections. Requests under way should have ended before."""
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for peer in list(self._peers.values()):
            self._close_idle(peer)


class _Peer:
    """A server, its connections, and the requests that wait for a connection, oldest first."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.idle: list[_Link] = []
        self.waiting: dict[Asked, None] = {}
        #: Number of connections, including those that are being opened; and number of those that are being opened.
        self.open = self.connecting = 0


class Asked:
    """A request that is under way. `cancel` abandons it: its callback is not called."""

    __slots__ = ("_done", "_pool", "link", "peer", "request", "timer")

    def __init__(self, pool: Pool, request: Request, done: Done) -> None:
        self._pool, self.request = pool, request
        self._done: Done | None = done
        self.peer: _Peer
        #: Connection on which the request was sent; None before.
        self.link: _Link | None = None
        self.timer: asyncio.TimerHandle | None = None

    def sent(self, link: _Link) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.link = link
        self.timer = self._pool.loop.call_later(self.request.timeout_s, self.late)

    def late(self) -> None:
        """Fail the request, which has waited for too long: for a connection, or for its answer."""
        if self.link is None:
            self.fail(Failure(f"no connection within {self._pool.connect_s:g} s", sent=False))
        else:
            self.fail(Failure(f"no answer within {self.request.timeout_s:g} s", sent=True))

    def cancel(self) -> None:
        self._done = None
        self._leave()

    def fail(self, failure: Failure) -> None:
        done, self._done = self._done, None
        self._leave()
        if done is not None:
            done(None, failure)

    def answer(self, whole: WholeAnswer) -> None:
        done, self._done, self.link = self._done, None, None
        self._leave()
        if done is not None:
            done(whole, None)

    def _leave(self) -> None:
        """Stop waiting; close the request's connection unless the answer is complete."""
        if self.timer is not None:
            self.timer.cancel()
        self.peer.waiting.pop(self, None)
        link, self.link = self.link, None
        if link is not None:
            link.end()


class _Link(asyncio.Protocol):
    """One connection to a node of another shard."""

    __slots__ = ("_asked", "_partial", "_pool", "exchange", "peer", "since", "transport")

    def __init__(self, pool: Pool, peer: _Peer) -> None:
        self._pool, self.peer, self.exchange = pool, peer, Exchange()
        self._asked: Asked | None = None
        #: Number of bytes of the incomplete answer.
        self._partial = 0
        self.since = 0.0
        #: Transport of the connection; None until it is open.
        self.transport: asyncio.Transport | None = None

    @property
    def usable(self) -> bool:
        """Whether another request may be sent: all bytes of the previous request are sent, and its answer has
        arrived."""
        transport = self.transport
        return (
            self.exchange.state is State.IDLE
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, asked: Asked) -> None:
        self.exchange.begin()
        self._asked = asked
        asked.sent(self)
        assert self.transport is not None
        self.transport.write(asked.request.data)

    def free(self) -> None:
        """Send the next waiting request on this connection, or mark the connection as idle; close it if it is not
        usable."""
        if not self.usable:
            self.end()
        elif self.peer.waiting:
            asked = next(iter(self.peer.waiting))
            del self.peer.waiting[asked]
            self.send(asked)
        else:
            self._pool.idle(self)

    def end(self) -> None:
        """Close the connection, which carries no further request."""
        self._asked = None
        self._count(0)
        self.exchange.end()
        if self.transport is not None:
            self.transport.abort()

    def _count(self, size: int) -> None:
        self._pool.partial += size - self._partial
        self._partial = size

    def data_received(self, data: bytes) -> None:
        asked = self._asked
        try:
            whole = self.exchange.feed(data)
        except Odd as odd:
            self._fail(str(odd), too_long=isinstance(odd, TooLong))
            return
        if whole is None:
            self._count(self._partial + len(data))
            if self._pool.partial > _MAX_PARTIAL:
                self._fail("answers of other shards take too much memory just now", too_long=True)
        elif asked is not None:
            self._asked = None
            self._count(0)
            self.free()
            asked.answer(whole)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail("the connection broke before the whole answer")
        self._pool.lost(self)

    def _fail(self, reason: str, *, too_long: bool = False) -> None:
        asked = self._asked
        # An idle connection that receives bytes, or is closed, must not get another request.
        if self in self.peer.idle:
            self.peer.idle.remove(self)
        self.end()
        if asked is not None:
            asked.fail(Failure(reason, sent=True, too_long=too_long))


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not error.args:
        return "no connection in time"
    if isinstance(error, ssl.SSLError):
        return in_words(error)
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error)
