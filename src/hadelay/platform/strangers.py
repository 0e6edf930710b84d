"""Connections to the node link before HELLO: limited, fair between addresses, cheap to refuse (ADR 195).

A new connection is a bare socket until its first bytes arrive and are judged. An accepted connection then gets a
transport, a TLS handshake and a timeout for HELLO. Each of these stages has a limit; beyond it, the oldest connection
of the address with the most connections is closed.
"""

import asyncio
import enum
import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress

#: Limit of accepted connections that have sent no byte yet.
MAX_SILENT = 128
#: Limit of connections that have sent bytes and wait to begin the handshake.
MAX_READY = 64
#: Limit of connections that are in the TLS handshake, or have sent only a part of their HELLO.
MAX_BEGUN = 64
#: Limits of connections that begin the handshake: per second, and in a burst. With TLS, a handshake takes about 1 ms.
_RATE, _BURST = 300.0, 32.0
#: Limit of connections accepted in a row, before the event loop does other work.
_ACCEPTS = 32
#: Timeout of the first bytes, of the TLS handshake, and of HELLO, in seconds each.
HELLO_TIMEOUT_S = 5.0
#: Maximum size of a HELLO, in bytes.
MAX_HELLO = 4096
#: Wait after a failed accept, for example without free descriptors, in seconds.
_ACCEPT_RETRY_S = 0.1


class Verdict(enum.Enum):
    #: The connection's first bytes are a complete and acceptable HELLO.
    NOW = enum.auto()
    #: The connection's first bytes may be the beginning of a HELLO: the connection waits for its turn.
    IN_TURN = enum.auto()
    #: The connection's first bytes cannot become a HELLO. `judge` has counted the refusal and answered.
    NEVER = enum.auto()


class Stranger:
    """A connection before HELLO."""

    __slots__ = ("connection", "crowd", "host", "network", "timeout")
    #: Timer that closes a connection without first bytes.
    timeout: asyncio.TimerHandle

    def __init__(self, connection: socket.socket, host: str) -> None:
        self.connection, self.host = connection, host
        self.crowd: Crowd | None = None
        #: Sender's network, the unit of the limits: an IPv4 address, or the /64 of an IPv6 address.
        self.network = host
        if ":" in host:
            address = int(ipaddress.IPv6Address(host.partition("%")[0]))
            self.network = f"{ipaddress.IPv6Address(address >> 64 << 64)}/64"


class Crowd:
    """Connections before HELLO by address, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.size = limit, 0
        self._by_network: dict[str, dict[Stranger, None]] = {}

    def add(self, stranger: Stranger) -> Stranger | None:
        """Add a connection. Beyond the limit, return the connection to close: the oldest of the address that has the
        most connections."""
        self._by_network.setdefault(stranger.network, {})[stranger] = None
        self.size += 1
        if self.size <= self.limit:
            return None
        most = max(self._by_network, key=lambda network: len(self._by_network[network]))
        return next(iter(self._by_network[most]))

    def remove(self, stranger: Stranger) -> None:
        mine = self._by_network[stranger.network]
        del mine[stranger]
        self.size -= 1
        if not mine:
            del self._by_network[stranger.network]

    def newest(self) -> Stranger:
        """Newest connection of the address with the fewest connections: in a flood, most likely an honest client."""
        fewest = min(self._by_network, key=lambda network: len(self._by_network[network]))
        return next(reversed(self._by_network[fewest]))

    def all(self) -> list[Stranger]:
        return [stranger for mine in self._by_network.values() for stranger in mine]


class Strangers:
    """Accepts connections; `begin` gets the connections that may become links.

    judge(stranger, first bytes): see Verdict. begin: makes a transport for the stranger's connection, and calls `leave`
    once it has said HELLO or is gone. refused(host, reason, kind): counts and logs a refusal.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        judge: Callable[[Stranger, bytes], Verdict],
        begin: Callable[[Stranger], None],
        refused: Callable[[str, str, str], None],
    ) -> None:
        self._loop, self._judge, self._begin, self._refused = loop, judge, begin, refused
        self._listening: socket.socket | None = None
        self._retry: asyncio.TimerHandle | None = None
        #: Connections by stage: without a received byte; waiting to begin the handshake; in the handshake or without a
        #: complete HELLO.
        self._silent, self._ready, self._begun = Crowd(MAX_SILENT), Crowd(MAX_READY), Crowd(MAX_BEGUN)
        #: Token bucket. _tokens: number of connections that may begin the handshake. _counted: time of that count.
        self._tokens, self._counted = _BURST, loop.time()
        self._next_turn: asyncio.TimerHandle | None = None

    def serve(self, listening: socket.socket) -> None:
        """Accept connections on the socket `listening`, and own the socket from now on."""
        self._listening = listening
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        for timer in (self._retry, self._next_turn):
            if timer is not None:
                timer.cancel()
        if self._listening is not None:
            self._loop.remove_reader(self._listening)
            self._listening.close()
            self._listening = None
        for stranger in self._silent.all() + self._ready.all():
            self._close(stranger)

    def _accept(self) -> None:
        assert self._listening is not None
        for _ in range(_ACCEPTS):
            try:
                connection, address = self._listening.accept()
            except BlockingIOError:
                return
            except ConnectionError:  # the client closed the connection before accept
                continue
            except OSError as error:
                self._refused("unknown", f"accept failed: {error.strerror or error}", "accept")
                self._loop.remove_reader(self._listening)
                self._retry = self._loop.call_later(_ACCEPT_RETRY_S, self.serve, self._listening)
                return
            connection.setblocking(False)
            stranger = Stranger(connection, address[0])
            quiet = f"the connection sent nothing for {HELLO_TIMEOUT_S:g} s"
            stranger.timeout = self._loop.call_later(HELLO_TIMEOUT_S, self._drop, stranger, quiet, "silent")
            self._move(stranger, self._silent)
            self._loop.add_reader(connection, self._spoke, stranger)

    def _spoke(self, stranger: Stranger) -> None:
        self._loop.remove_reader(stranger.connection)
        self._move(stranger, None)
        try:
            data = stranger.connection.recv(MAX_HELLO, socket.MSG_PEEK)
        except OSError:
            data = b""
        verdict = self._judge(stranger, data) if data else Verdict.NEVER
        if verdict is Verdict.NEVER:
            self._close(stranger)
        elif verdict is Verdict.NOW:
            self._enter(stranger)
        else:
            self._move(stranger, self._ready)
            self._take_turns()

    def _take_turns(self) -> None:
        if self._next_turn is not None:
            return
        now = self._loop.time()
        self._tokens = min(_BURST, self._tokens + (now - self._counted) * _RATE)
        self._counted = now
        while self._ready.size and self._tokens >= 1.0:
            self._tokens -= 1.0
            self._enter(self._ready.newest())
        if self._ready.size:
            self._next_turn = self._loop.call_later((1.0 - self._tokens) / _RATE, self._turn_came)

    def _turn_came(self) -> None:
        self._next_turn = None
        self._take_turns()

    def _enter(self, stranger: Stranger) -> None:
        stranger.timeout.cancel()  # this timeout is for the first bytes; the TLS handshake and HELLO have others
        self._move(stranger, self._begun)
        self._begin(stranger)

    def leave(self, stranger: Stranger) -> None:
        """Remove a connection that has sent HELLO, or is closed."""
        self._move(stranger, None)

    def _move(self, stranger: Stranger, crowd: Crowd | None) -> None:
        if stranger.crowd is not None:
            stranger.crowd.remove(stranger)
        stranger.crowd = crowd
        if crowd is not None and (victim := crowd.add(stranger)) is not None:
            self._drop(victim, _CROWDED, "crowded")

    def _drop(self, stranger: Stranger, reason: str, kind: str) -> None:
        self._refused(stranger.host, reason, kind)
        if stranger.crowd is not self._begun:
            self._close(stranger)
            return
        self._move(stranger, None)
        with suppress(OSError):  # no close() here: the connection's transport closes the socket
            stranger.connection.shutdown(socket.SHUT_RDWR)

    def _close(self, stranger: Stranger) -> None:
        stranger.timeout.cancel()
        if stranger.crowd is self._silent:
            self._loop.remove_reader(stranger.connection)
        self._move(stranger, None)
        stranger.connection.close()


_CROWDED = (
    "too many connections without a HELLO: closed the oldest of the address with the most; let only the nodes reach "
    "raft.listen"
)
