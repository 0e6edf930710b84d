"""Accepts connections of clients, counted from the moment of accept: a TLS handshake takes a descriptor too.

A connection beyond the limits is a spare (ADR 192): one request to a health route is answered, anything else is 503. So
an orchestrator does not restart nodes because somebody opened too many connections. There are few spares, none stays
long, and a new one takes the place of an older one of the address that has most of them.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from hadelay.errors import ConfigError, Taken
from hadelay.http.call import Context
from hadelay.http.connection import Connection
from hadelay.platform.tls import Decrypted
from hadelay.settings.rules import split_address

log = logging.getLogger(__name__)

_BACKLOG = 4096
#: Limit of connections accepted in a row, before other work of the event loop has its turn.
_AT_ONCE = 16
#: Pause in seconds after an accept that failed for lack of descriptors or memory.
_RETRY_S = 0.1
#: Timeout of a TLS handshake, in seconds.
_HANDSHAKE_S = 10.0
#: Limit of spares (connections above the limits), at which a new spare replaces one of the address with most spares;
#: and lifetime of a spare in seconds, TLS handshake included.
_SPARES, _SPARE_S = 64, 2.0


class HttpListener:
    """Accepts client connections. make(lost, limit): makes the protocol of a connection, which calls `lost` when it is
    disconnected. limit: name of the limit that the connection exceeds, "" for none. sockets: limit of connections plus
    polls that this node relays; None: twice max_connections."""

    def __init__(
        self, context: Context, make: Callable[[Callable[[], None], str], Connection], sockets: int | None
    ) -> None:
        self._context, self._make = context, make
        self._loop = asyncio.get_running_loop()
        self._ssl = context.tls.listening if context.tls is not None else None
        self._sockets = sockets if sockets is not None else 2 * context.config.max_connections
        self._by_address: Counter[str] = Counter()
        #: Client address of each connection within the limits.
        self._inside: dict[socket.socket, str] = {}
        #: Spares (connections above the limits), oldest first: function that closes the spare → client address.
        self._spares: dict[Callable[[], None], str] = {}
        self._listening: list[socket.socket] = []
        self._connecting: set[asyncio.Task[None]] = set()

    @property
    def full(self) -> bool:
        """Whether the process has no free descriptor for another socket."""
        context = self._context
        return context.connections + context.relay.count + context.forwarder.connections >= self._sockets

    def listen(self, key: str, where: str) -> int:
        """Listen on every address of `where`, a host and a port; returns the port. key: name of the setting. Raises
        ConfigError or Taken."""
        try:
            for sock, family, address in _sockets(*split_address(where)):
                self._listening.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
                sock.listen(_BACKLOG)
        except OSError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise Taken(f"{key}: {where} is in use by another process") from None
            if error.errno == errno.EADDRNOTAVAIL:
                raise Taken(f"{key}: {where} is not an address of this machine, or not assigned yet") from None
            raise ConfigError(f"{key}: {where}: {error.strerror}") from None
        for sock in self._listening:
            self._loop.add_reader(sock, self._accept, sock)
        return int(self._listening[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more connections. Closes connections above the limits (spares) and unfinished TLS handshakes, which
        have no request yet; all other connections stay open."""
        for sock in self._listening:
            self._loop.remove_reader(sock)
            sock.close()
        self._listening = []
        for close_spare in list(self._spares):
            close_spare()
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
        if 0 < config.max_connections_per_address <= self._by_address[address]:
            self._add_spare(connection, peer, "max_connections_per_address")
        elif self._context.connections >= config.max_connections or self.full:
            self._add_spare(connection, peer, "max_connections")
        else:
            self._context.connections += 1
            self._by_address[address] += 1
            self._inside[connection] = address
            lost = partial(self._leave, connection)
            self._start(connection, lambda: self._make(lost, ""), lost)

    def _leave(self, connection: socket.socket) -> None:
        address = self._inside.pop(connection, None)
        if address is not None:
            self._context.connections -= 1
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _add_spare(self, connection: socket.socket, peer: str, limit: str) -> None:
        if count := self._context.log_limit.count("connections_refused"):
            log.warning("connections_refused", extra={"limit": limit, "peer": peer, "count": count})
        if len(self._spares) >= _SPARES:
            most = Counter(self._spares.values()).most_common(1)[0][0]
            next(close_spare for close_spare, address in self._spares.items() if address == most)()

        def lost() -> None:
            timer.cancel()
            self._spares.pop(close, None)

        def close() -> None:
            lost()
            if protocol.transport is not None:
                protocol.transport.abort()
            else:
                task.cancel()

        protocol = self._make(lost, limit)
        timer = self._loop.call_later(_SPARE_S, close)
        self._spares[close] = _network_of(peer)
        task = self._start(connection, lambda: protocol, lost)

    def _start(
        self, connection: socket.socket, make: Callable[[], asyncio.Protocol], gone: Callable[[], None]
    ) -> asyncio.Task[None]:
        """Connect a socket to the protocol that `make` returns; calls `gone` if that fails."""

        def over(task: asyncio.Task[None]) -> None:
            self._connecting.discard(task)
            error = None if task.cancelled() else task.exception()
            if task.cancelled() or error is not None:
                connection.close()
                gone()
            if error is not None and not isinstance(error, OSError):  # OSError: client left, or TLS handshake failed
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


def _sockets(host: str, port: int) -> Iterator[tuple[socket.socket, int, Any]]:
    """Yield (socket, family, address to bind) for each address of `host`. Raises OSError if there is no address.

    /etc/hosts may name an address twice, and a resolver may name addresses of a family that the kernel lacks.
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
    """Unit in which clients are counted: an IPv4 address, or the /64 network of an IPv6 address."""
    if ":" not in address:
        return address
    try:
        return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
    except ValueError:
        return address
