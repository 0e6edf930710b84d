"""Servers for tests of forwarding, which answer with bytes that no node would send, or stop in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

#: Answers one request: peer, number of the request on this peer, and the bytes of the request.
Act = Callable[["Peer", int, bytes], Awaitable[None]]


def answer_of(body: bytes, status: str = "200 OK", *lines: str) -> bytes:
    head = "".join(f"{line}\r\n" for line in (*lines, f"Content-Length: {len(body)}"))
    return f"HTTP/1.1 {status}\r\n{head}\r\n".encode() + body


class Peer:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def close(self) -> None:
        self.writer.close()

    async def left(self) -> None:
        """Wait until the other side has closed the connection."""
        try:
            while await self.reader.read(1 << 16):
                pass
        except ConnectionError:
            pass


class Peers:
    """A server. requests: the bytes of all requests so far. connections: their number so far."""

    def __init__(self, act: Act) -> None:
        self.act, self.requests, self.connections = act, list[bytes](), 0
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                request = head + await reader.readexactly(length)
                self.requests.append(request)
                await self.act(Peer(reader, writer), len(self.requests) - 1, request)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def close_connections(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def peers(act: Act) -> AsyncIterator[Peers]:
    found = Peers(act)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        found.close_connections()
