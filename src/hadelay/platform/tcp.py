"""`AsyncioNetwork`: the node link over TCP (docs/spec/node-link.md).

One connection per pair of nodes; the node with the later name dials, and retries. Both sides first send HELLO, and
refuse unknown nodes with a reason. With TLS, both first show a certificate, which must contain the name in HELLO (ADR
120). A frame has a length and a checksum; a damaged or unknown frame ends the connection. Nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from hadelay.codec.checksums import crc32c
from hadelay.errors import ConfigError, Taken
from hadelay.platform import strangers
from hadelay.platform.hello import HEAD, REFUSED, Hello, refusal
from hadelay.platform.loglimit import LogLimit
from hadelay.platform.network import MAX_FRAME, Buffer, Receiver
from hadelay.platform.runtime import Runtime
from hadelay.platform.strangers import MAX_HELLO, Stranger, Strangers, Verdict
from hadelay.platform.tls import Certificates, Decrypted, in_words, names_of

log = logging.getLogger(__name__)

#: Timeout of receiving a whole frame, in seconds: the frame's length may be damaged, and more bytes may never come.
_FRAME_TIMEOUT_S = 30.0
#: Limit of connections that the kernel queues while the loop is busy.
_BACKLOG = 1024
_RETRY_S = (0.05, 1.0)
_REFUSED_RETRY_S = 5.0
#: After _TAKEOVERS replaced links of a peer in _TAKEN_S seconds, no link in use is replaced: two nodes may have the
#: same name by mistake.
_TAKEOVERS, _TAKEN_S = 8, 30.0
#: Limit of bytes passed to the asyncio transport; further frames wait in queues, where urgent frames go first.
_WRITE_HIGH = 256 << 10
_SOCKET_BUFFER = 512 << 10
#: Limit of queued bytes per peer.
_MAX_QUEUED = 32 << 20
_JOIN_BYTES = 64 << 10


class _Link(asyncio.Protocol):
    def __init__(self, network: AsyncioNetwork, dialled: str | None, stranger: Stranger | None = None) -> None:
        self.network = network
        #: The accepted connection; None if this node opened the connection.
        self.stranger = stranger
        #: dialled: name of the peer that this node dialled; None for an accepted connection. peer: name in the accepted
        #: HELLO; "" before the HELLO.
        self.dialled, self.peer = dialled, ""
        self.closed: asyncio.Future[None] = network.loop.create_future()
        #: refused: whether either side refused the connection. retry_s: seconds until this node dials again.
        self.refused, self.retry_s = False, _RETRY_S[0]
        self._buffer = bytearray()
        #: Number of received frames.
        self.arrived = 0
        #: Timeout of a partially received frame; None if there is none.
        self._partial: asyncio.TimerHandle | None = None
        self._paused = False
        self._queues: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        self._queued = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        #: Names in the peer's certificate.
        self.names = names_of(transport.get_extra_info("peercert"))
        self.transport.set_write_buffer_limits(high=_WRITE_HIGH)
        sock = transport.get_extra_info("socket")
        for level, option, value in _SOCKET_OPTIONS:
            sock.setsockopt(level, option, value)
        self.network.links.add(self)
        self.transport.write(self.network.hello.packed)
        self._timeout = self.network.loop.call_later(strangers.HELLO_TIMEOUT_S, self._no_hello)

    def _no_hello(self) -> None:
        if not self.peer:
            self.network.say_refused(self.whom, f"no HELLO within {strangers.HELLO_TIMEOUT_S:g} s", "silent")
            self.transport.abort()

    @property
    def whom(self) -> str:
        """Name of the other side for the log: the peer's accepted name, else the dialled name, else the address."""
        return self.peer or self.dialled or (self.stranger.host if self.stranger is not None else "unknown")

    def _broken(self, event: str, size: int) -> None:
        self.network.broken_frame(event, self.whom, size)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timeout.cancel()
        if self._partial is not None:
            self._partial.cancel()
        self.network.links.discard(self)
        self._is_no_stranger()
        if self.dialled and self.network.tls is not None and not self.peer and not self.refused:
            # In TLS 1.3 the dialling side's handshake ends before the other side has checked its certificate. If the
            # connection ends before HELLO, the other side may have refused the certificate.
            self.refused, self.retry_s = True, _RETRY_S[1]
            reason = in_words(exc) if isinstance(exc, ssl.SSLError) else _HUNG_UP
            self.network.say_refused(self.dialled, reason, "tls")
        if not self.closed.done():
            self.closed.set_result(None)
        # A clean end or a reset means that the peer's process closed the link; other errors may mean only silence.
        self.network.lost(self, exc is None or isinstance(exc, _RESETS))

    def _is_no_stranger(self) -> None:
        if self.stranger is not None:
            self.network.strangers.leave(self.stranger)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        if buffer:
            buffer += data
            data = bytes(buffer) if len(buffer) - HEAD.size >= _length(buffer, 0) else b""
            if not data:
                self._check_length(buffer)
                return
            buffer.clear()
        start, size = 0, len(data)
        while size - start >= HEAD.size:
            length, crc = HEAD.unpack_from(data, start)
            first = start + HEAD.size
            start = first + length
            if start > size:
                start = first - HEAD.size
                break
            self.arrived += 1
            frame = data[first:start]
            if crc32c(frame) != crc:
                self._broken("frame_damaged", length)
                return
            self._frame(frame)
            if self.transport.is_closing():
                return
        if start < size:
            buffer += data[start:] if start else data
            self._check_length(buffer)

    def _check_length(self, buffer: bytearray) -> None:
        if len(buffer) >= 4 and _length(buffer, 0) > (MAX_FRAME if self.peer else MAX_HELLO):
            self._broken("frame_too_long", _length(buffer, 0))
        elif self._partial is None:
            self._partial = self.network.loop.call_later(_FRAME_TIMEOUT_S, self._is_stuck, self.arrived)

    def _is_stuck(self, arrived: int) -> None:
        self._partial = None
        if self._buffer and not self.transport.is_closing():
            if arrived == self.arrived:
                self._broken("frame_incomplete", len(self._buffer))
            else:
                self._partial = self.network.loop.call_later(_FRAME_TIMEOUT_S, self._is_stuck, self.arrived)

    def _frame(self, frame: bytes) -> None:
        if not frame:
            self.transport.abort()
        elif frame[0] == REFUSED:
            # REFUSED may also come after HELLO: this node accepted the peer, but the peer refuses this node.
            self.refused, self.retry_s = True, _REFUSED_RETRY_S
            self.network.say_refused(self.whom, frame[1:500].decode(errors="replace"), "by_peer")
            self.transport.abort()
        elif self.peer:
            self.network.deliver(self.peer, frame)
        else:
            self._on_hello(frame)

    def _on_hello(self, frame: bytes) -> None:
        name, reason = self.network.hello.read(frame, self.network.peers, self.dialled)
        reason = reason or self.network.twice(name)
        if not reason and self.network.tls is not None and name not in self.names:
            whom = ", ".join(sorted(self.names)) or "nobody"
            reason = f"{name} shows a certificate that names {whom}: a node's certificate must name the node"
        if reason:
            self.network.say_refused(self.whom, reason, "hello")
            self.refused, self.retry_s = True, _REFUSED_RETRY_S
            self.transport.write(refusal(reason))
            self.transport.close()
        else:
            self.peer = name
            self._is_no_stranger()
            self.network.linked(self)

    @property
    def buffered(self) -> int:
        return self._queued + self.transport.get_write_buffer_size()

    def write(self, parts: list[Buffer], size: int, urgent: bool) -> None:
        if not self._paused:
            if size <= _JOIN_BYTES:
                self.transport.write(b"".join(parts))
            else:
                self.transport.writelines(parts)
        else:
            self._queues[0 if urgent else 1].append(b"".join(parts))
            self._queued += size

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        for queue in self._queues:
            while queue and not self._paused:
                frame = queue.popleft()
                self._queued -= len(frame)
                self.transport.write(frame)


class AsyncioNetwork:
    def __init__(
        self,
        name: str,
        listen: str,
        peers: Mapping[str, str],
        *,
        cluster_id: str,
        group: int,
        runtime: Runtime,
        feature_level: int = 1,
        tls: Certificates | None = None,
    ) -> None:
        """peers: name → host:port of the members; this node's own entry is ignored. tls: mutual certificates."""
        self.name, self.listen = name, listen
        self.peers = {peer: address for peer, address in peers.items() if peer != name}
        self.loop = runtime.loop
        self.tls = tls
        self.hello = Hello(name, cluster_id=cluster_id, group=group, feature_level=feature_level, tls=tls is not None)
        self.links: set[_Link] = set()
        self._up: dict[str, _Link] = {}
        #: Peer → (start of the present period, number of links replaced in it, frames received on the present link at
        #: the last refusal).
        self._taken: dict[str, tuple[float, int, int]] = {}
        self._receiver: Receiver | None = None
        #: Number of refused connections, by reason.
        self.refused: Counter[str] = Counter()
        self._log_limit = LogLimit(runtime.monotonic)
        self.strangers = Strangers(self.loop, judge=self._judge, begin=self._begin, refused=self.say_refused)
        self._serving = False
        self._dialling: dict[str, asyncio.Task[None]] = {}
        self._shaking: set[asyncio.Task[None]] = set()

    def start(self, receiver: Receiver) -> None:
        """Listen and dial. ConfigError if listening on the address fails."""
        self._receiver = receiver
        self._reach_out()

    def _reach_out(self) -> None:
        """Listen if there are peers, and dial the peers whose names sort before this node's name."""
        if self.peers and not self._serving:
            self.strangers.serve(self._listen())
            self._serving = True
        for peer in self.peers:
            if peer < self.name and peer not in self._dialling:
                self._dialling[peer] = self.loop.create_task(self._dial(peer))

    def _listen(self) -> socket.socket:
        host, _, port = self.listen.rpartition(":")
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            sock = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=_BACKLOG)
        except OSError as error:
            what = f"raft.listen: cannot listen on {self.listen}: {error.strerror or error}"
            now = error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL)
            raise (Taken if now else ConfigError)(what) from error
        sock.setblocking(False)
        return sock

    def send(self, peer: str, frame: Buffer | Sequence[Buffer], urgent: bool = False) -> bool:
        link = self._up.get(peer)
        if link is None or link.transport.is_closing():
            return False
        parts = [frame] if isinstance(frame, (bytes, bytearray, memoryview)) else frame
        size = sum(map(len, parts))
        if size > MAX_FRAME or (link.buffered + size > _MAX_QUEUED and not urgent):
            return False
        crc = 0
        for part in parts:
            crc = crc32c(part, crc)
        link.write([HEAD.pack(size, crc), *parts], size + HEAD.size, urgent)
        return True

    def set_members(self, peers: Mapping[str, str]) -> None:
        before, self.peers = self.peers, {name: peers[name] for name in peers if name != self.name}
        for name in before:
            if self.peers.get(name) != before[name]:
                if name in self._dialling:
                    self._dialling.pop(name).cancel()
                if name not in self.peers:
                    self.disconnect(name)
        if self._receiver is not None:
            try:
                self._reach_out()
            except ConfigError as error:
                # The node keeps serving without listening; nodes that cannot link with it log that.
                log.error("cannot_listen", extra={"error": str(error)})

    def buffered(self, peer: str) -> int:
        return self._up[peer].buffered if peer in self._up else 0

    def disconnect(self, peer: str) -> None:
        if peer in self._up:
            self._up[peer].transport.abort()

    def close(self) -> None:
        self._receiver = None
        self.strangers.close()
        for task in (*self._dialling.values(), *self._shaking):
            task.cancel()
        for link in list(self.links):
            link.transport.abort()

    def _judge(self, stranger: Stranger, data: bytes) -> Verdict:
        verdict, reason = self.hello.judge(data, self.peers)
        if verdict is Verdict.NEVER:
            self.say_refused(stranger.host, reason, "hello" if self.tls is None else "tls")
            if self.tls is None:
                with suppress(OSError):
                    # Read the bytes: closing with unread bytes resets the connection before the refusal arrives
                    stranger.connection.recv(MAX_HELLO)
                    stranger.connection.send(self.hello.packed + refusal(reason))
        return verdict

    def _begin(self, stranger: Stranger) -> None:
        task = self.loop.create_task(self._accept(stranger))
        self._shaking.add(task)
        task.add_done_callback(partial(self._has_begun, stranger))

    def _has_begun(self, stranger: Stranger, task: asyncio.Task[None]) -> None:
        self._shaking.discard(task)
        if task.cancelled():  # a cancelled task may have no transport that closes the socket
            stranger.connection.close()

    async def _accept(self, stranger: Stranger) -> None:
        options: dict[str, Any] = {}
        if self.tls is not None:
            options = {"ssl": self.tls.server, "ssl_handshake_timeout": strangers.HELLO_TIMEOUT_S}
        link = _Link(self, None, stranger)
        try:
            await self.loop.connect_accepted_socket(partial(self._protocol, link), stranger.connection, **options)
        except ssl.SSLError as error:
            self.say_refused(stranger.host, in_words(error), "tls")
        except OSError as error:
            log.debug("stranger_left", extra={"peer": stranger.host, "reason": str(error)})
        else:
            return
        self.strangers.leave(stranger)

    async def _dial(self, peer: str) -> None:
        host, _, port = self.peers[peer].rpartition(":")
        wait = _RETRY_S[0]
        while True:
            options: dict[str, Any] = {}
            if self.tls is not None:
                # No host name to check: the peer's certificate is compared with the name in its HELLO.
                limit_s = strangers.HELLO_TIMEOUT_S
                options = {"ssl": self.tls.client, "server_hostname": "", "ssl_handshake_timeout": limit_s}
            link = _Link(self, peer)
            try:
                await self.loop.create_connection(partial(self._protocol, link), host.strip("[]"), int(port), **options)
            except ssl.SSLError as error:
                self.say_refused(peer, in_words(error), "tls")
                wait = _REFUSED_RETRY_S
            # A reset in the handshake means that the peer has too many connections: dial again soon.
            except (ConnectionResetError, ConnectionAbortedError):
                wait = _RETRY_S[0]
            # ValueError (also UnicodeError) and OverflowError are raised for an invalid address.
            except (OSError, ValueError, OverflowError):
                wait = min(wait * 2, _RETRY_S[1])
            else:
                await link.closed
                wait = link.retry_s
            await asyncio.sleep(wait)

    def _protocol(self, link: _Link) -> asyncio.BaseProtocol:
        return link if self.tls is None else Decrypted(link)

    def say_refused(self, whom: str, reason: str, kind: str) -> None:
        """Count and log a refusal. whom: a node's name, or an address. kind: label of the metric."""
        self.refused[kind] += 1
        if count := self._log_limit.count(f"{kind} {whom}"):
            log.error("link_refused", extra={"peer": whom, "reason": reason, "count": count})

    def broken_frame(self, event: str, whom: str, size: int) -> None:
        self.refused["frame"] += 1
        if count := self._log_limit.count(f"{event} {whom}"):
            log.warning(event, extra={"peer": whom, "bytes": size, "count": count})

    def twice(self, name: str) -> str:
        """Reason to refuse a second link with the node `name`; "" if the new link may replace the old one."""
        old = self._up.get(name)
        if old is None:
            return ""
        now = self.loop.time()
        since, times, arrived = self._taken.get(name, (now, 0, 0))
        if now - since > _TAKEN_S:
            since, times = now, 0
        alive = times >= _TAKEOVERS and old.arrived != arrived
        self._taken[name] = since, times + 1, old.arrived if alive else 0
        if not alive:
            return ""
        host = (old.transport.get_extra_info("peername") or ["?"])[0]
        return f"{self.name} is linked with another {name}, at {host}: two nodes must not share a name"

    def linked(self, link: _Link) -> None:
        old = self._up.pop(link.peer, None)
        if old is not None:
            # Report the end of the old link first: the peer has dropped it, and the frames in flight on it are lost.
            old.transport.abort()
            if self._receiver is not None:
                self._receiver.link_down(link.peer, False)
        self._up[link.peer] = link
        if self._receiver is not None:
            self._receiver.link_up(link.peer)

    def lost(self, link: _Link, reset: bool) -> None:
        if link.peer and self._up.get(link.peer) is link:
            del self._up[link.peer]
            if self._receiver is not None:
                self._receiver.link_down(link.peer, reset)

    def deliver(self, peer: str, frame: bytes) -> None:
        if self._receiver is not None:
            self._receiver.frame(peer, frame)


def _length(data: bytes | bytearray, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


_HUNG_UP = "the peer closed the connection before HELLO: it may not accept this node's certificate; see its log"
_RESETS = (ConnectionResetError, BrokenPipeError, ssl.SSLEOFError)
_SOCKET_OPTIONS = [
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER),
    # Keep-alive probes and a timeout of unacknowledged data detect a vanished peer within about five seconds.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 5_000),
]
