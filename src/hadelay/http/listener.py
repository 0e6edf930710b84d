"""Accepts connections of clients, counted from the moment of accept: a TLS handshake takes a descriptor too.

Beyond the limits a connection becomes a `Spare`: it may ask one of the health routes once, and anything else is
answered 503. So an orchestrator does not restart nodes because somebody opened too many connections. There are
few spares, none stays long, and a new one takes the place of an older one of the address that has most of them.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

from hadelay.errors import ConfigError, HadelayError, Overloaded, Taken
from hadelay.http.answers import Answer, header_lines
from hadelay.http.call import Context
from hadelay.http.health import probe
from hadelay.platform.tls import Decrypted

log = logging.getLogger(__name__)

_BACKLOG = 4096
#: Limit of connections accepted in a row, before others on the loop have their turn.
_AT_ONCE = 16
#: Pause after an accept that failed for want of descriptors or memory.
_RETRY_S = 0.1
#: Timeout of a TLS handshake.
_HANDSHAKE_S = 10.0
#: Limit of spares, and how long one may take, its TLS handshake included.
_SPARES, _SPARE_S = 64, 2.0
_MAX_HEAD = 8_190
_PROBE = re.compile(rb"GET /(livez|readyz)(?:\?([!-~]*))? HTTP/1\.[01]\r\n")


class Listener:
    """`make` gets what it has to call when its connection is lost, and returns the protocol of one connection.
    sockets: limit of connections together with the polls that this node relays; None: twice max_connections."""

    def __init__(
        self, context: Context, make: Callable[[Callable[[], None]], asyncio.Protocol], sockets: int | None
    ) -> None:
        self._context, self._make = context, make
        self._loop = asyncio.get_running_loop()
        self._ssl = context.tls.listening if context.tls is not None else None
        self._sockets = sockets if sockets is not None else 2 * context.config.max_connections
        self._by_address: Counter[str] = Counter()
        #: Oldest first.
        self._spares: dict[Spare, None] = {}
        self._listening: list[socket.socket] = []
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def full(self) -> bool:
        """No descriptor is left for another socket."""
        return self._context.connections + self._context.relay.count >= self._sockets

    # ---- accepting

    def listen(self, host: str, port: int) -> int:
        """Listens on every address of `host`; returns the port. Raises ConfigError or Taken."""
        where = self._context.config.listen
        try:
            for sock, family, address in _sockets(host, port):
                self._listening.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
                sock.listen(_BACKLOG)
        except OSError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise Taken(f"http.listen: {where} is in use by another process") from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise Taken(f"http.listen: {where} is no address of this machine, or not yet") from None
            raise ConfigError(f"http.listen: {where}: {error.strerror}") from None
        for sock in self._listening:
            self._loop.add_reader(sock, self._accept, sock)
        return int(self._listening[0].getsockname()[1])

    def close(self) -> None:
        """No new connections; those that are there stay, except TLS handshakes: they have asked nothing yet."""
        for sock in self._listening:
            self._loop.remove_reader(sock)
            sock.close()
        self._listening = []
        for spare in list(self._spares):
            spare.close()
        for task in self._connecting if self._ssl is not None else ():
            task.cancel()

    def _accept(self, sock: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                connection, address = sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if count := self._context.log_limit.count("accept_failed"):
                    log.warning("accept_failed", extra={"reason": error.strerror or str(error), "count": count})
                self._loop.remove_reader(sock)
                self._loop.call_later(_RETRY_S, self._again, sock)
                return
            connection.setblocking(False)
            self._enter(connection, address[0])

    def _again(self, sock: socket.socket) -> None:
        if sock in self._listening:
            self._loop.add_reader(sock, self._accept, sock)

    def _enter(self, connection: socket.socket, peer: str) -> None:
        config, address = self._context.config, _network_of(peer)
        limit = config.max_connections_per_address
        if limit and self._by_address[address] >= limit:
            self._add_spare(connection, peer, "max_connections_per_address")
        elif self._context.connections >= config.max_connections or self.full:
            self._add_spare(connection, peer, "max_connections")
        else:
            self._context.connections += 1
            self._by_address[address] += 1
            left = _Once(lambda: self._leave(address))
            self._start(connection, lambda: self._make(left), left)

    def _leave(self, address: str) -> None:
        self._context.connections -= 1
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def _start(
        self, connection: socket.socket, make: Callable[[], asyncio.Protocol], gone: Callable[[], None]
    ) -> asyncio.Task[None]:
        """`gone` is called if `connection` comes to nothing; otherwise its protocol gets to know when it is lost."""

        def over(task: asyncio.Task[None]) -> None:
            self._connecting.discard(task)
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:
                connection.close()
                gone()
            if error is not None and not isinstance(error, OSError):  # it left, or speaks no TLS
                log.error("accept_failed", exc_info=error)

        task = self._loop.create_task(self._connect(connection, make))
        self._connecting.add(task)
        task.add_done_callback(over)
        return task

    async def _connect(self, connection: socket.socket, make: Callable[[], asyncio.Protocol]) -> None:
        if self._ssl is None:
            await self._loop.connect_accepted_socket(make, connection)
        else:
            await self._loop.connect_accepted_socket(
                lambda: Decrypted(make()), connection, ssl=self._ssl, ssl_handshake_timeout=_HANDSHAKE_S
            )

    # ---- beyond the limits

    def _add_spare(self, connection: socket.socket, peer: str, limit: str) -> None:
        if count := self._context.log_limit.count("connections_refused"):
            log.warning("connections_refused", extra={"limit": limit, "peer": peer, "count": count})
        if len(self._spares) >= _SPARES:
            most = Counter(spare.address for spare in self._spares).most_common(1)[0][0]
            next(spare for spare in self._spares if spare.address == most).close()
        spare = Spare(self._context, limit, _network_of(peer), self._spares)
        spare.task = self._start(connection, lambda: spare, spare.close)


class Spare(asyncio.Protocol):
    """A connection beyond `limit`. It is in `spares` until it is closed."""

    def __init__(self, context: Context, limit: str, address: str, spares: dict[Spare, None]) -> None:
        self.address, self.task = address, cast("asyncio.Task[None] | None", None)
        self._context, self._limit, self._spares = context, limit, spares
        self._transport: asyncio.Transport | None = None
        self._head, self._answered = b"", False
        self._timer = asyncio.get_running_loop().call_later(_SPARE_S, self.close)
        spares[self] = None

    def close(self) -> None:
        self._timer.cancel()
        self._spares.pop(self, None)
        if self._transport is not None:
            self._transport.abort()
        elif self.task is not None:
            self.task.cancel()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.close()

    def data_received(self, data: bytes) -> None:
        if self._answered or self._transport is None:
            return  # until the client has closed: a reset would take the answer from it
        self._head += data
        if b"\r\n\r\n" not in self._head and len(self._head) <= _MAX_HEAD:
            return
        self._answered = True
        route, answer = self._answer()
        self._context.count(route, answer.status)
        lines = header_lines(answer.headers) + b"Connection: close\r\n"
        self._transport.write(self._context.head_of(answer.status, lines, len(answer.body)) + answer.body)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _answer(self) -> tuple[str, Answer]:
        asked = _PROBE.match(self._head)
        name = asked[1].decode() if asked is not None else "none"
        try:
            if asked is not None:
                return name, probe(self._context, name, (asked[2] or b"").decode())
            raise Overloaded(f"too many connections ({self._limit})", retry_after_ms=1_000)
        except HadelayError as error:
            return name, self._context.refused(name, error)


class _Once:
    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call()


def _sockets(host: str, port: int) -> Iterator[tuple[socket.socket, int, Any]]:
    """(socket, its family, address to bind it to) of every address of `host`. OSError if there is none.

    /etc/hosts may name an address twice, and a resolver addresses of a family that the kernel does not have.
    """
    found, unsupported = 0, None
    for family, kind, protocol, _, address in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
        try:
            sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            unsupported = error
        else:
            found += 1
            yield sock, family, address
    if not found and unsupported is not None:
        raise unsupported


def _network_of(address: str) -> str:
    """Who an address stands for: whoever has one of IPv6 has the 2^64 of its network."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address
