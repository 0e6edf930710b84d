"""The least HTTP/1.1 client that can put load on a server: one request at a time per connection, no redirects.

A full client library costs as much as the server's own work per request, and the machine has two cores: what is to be
measured is the server. Answers with Content-Length only, which is what ours and the peers' gateways send.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any


class Failed(Exception):
    """An answer outside 2xx: `status` and the first bytes of what it said."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"{status}: {body[:300].decode(errors='replace')}")
        self.status = status


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiter: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, address: str) -> Connection:
        """`host:port` or an http:// URL."""
        host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
        _, connection = await asyncio.get_running_loop().create_connection(cls, host, int(port))
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._waiter and not self._waiter.done():
            self._waiter.set_exception(error or ConnectionResetError("the server hung up"))

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(buffer[:end]).lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(buffer) < end + 4 + length:
            return
        body = bytes(buffer[end + 4 : end + 4 + length])
        del buffer[: end + 4 + length]
        if self._waiter and not self._waiter.done():
            self._waiter.set_result((int(head[9:12]), body))

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """(status, body) of one request, already laid out as bytes."""
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiter

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        """A JSON call; raises Failed for anything but 2xx."""
        packed = b"" if body is None else json.dumps(body).encode()
        status, answer = await self.send(request(method, path, packed))
        if not 200 <= status < 300:
            raise Failed(status, answer)
        return json.loads(answer) if answer else None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None


def request(
    method: str, path: str, body: bytes = b"", *, kind: str = "json", accept: str = "", headers: str = ""
) -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/{kind}\r\n"
        f"Accept: application/{accept or kind}\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body
