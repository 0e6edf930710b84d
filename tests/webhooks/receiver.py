"""Receivers on loopback that behave as real ones do, and worse. What they got is in `calls`."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass
class Call:
    path: str
    headers: dict[str, str]
    body: bytes
    #: Of which connection, from 0.
    connection: int
    method: str = "POST"


def verified_by(secret: str, headers: dict[str, str], body: bytes) -> bool:
    """A verifier of Standard Webhooks, from the specification."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    text = b".".join([headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body])
    expected = base64.b64encode(hmac.new(key, text, hashlib.sha256).digest()).decode()
    return any(
        version == "v1" and hmac.compare_digest(given, expected)
        for version, _, given in (part.partition(",") for part in headers["webhook-signature"].split(" "))
    )


Behave = Callable[[asyncio.StreamWriter, Call], Awaitable[None]]


def answers(status: int, *headers: str, body: bytes = b"") -> Behave:
    async def behave(writer: asyncio.StreamWriter, call: Call) -> None:
        head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
        writer.write("\r\n".join([*head, "", ""]).encode() + body)

    return behave


def says(text: bytes, then_ends: bool = False, *, pieces: int = 1 << 20) -> Behave:
    async def behave(writer: asyncio.StreamWriter, call: Call) -> None:
        for at in range(0, len(text), pieces):
            writer.write(text[at : at + pieces])
            await writer.drain()
            await asyncio.sleep(0)
        if then_ends:
            writer.close()

    return behave


async def hangs(writer: asyncio.StreamWriter, call: Call) -> None:
    await asyncio.Event().wait()


async def resets(writer: asyncio.StreamWriter, call: Call) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def hangs_up(writer: asyncio.StreamWriter, call: Call) -> None:
    writer.close()


async def babbles(writer: asyncio.StreamWriter, call: Call) -> None:
    writer.write(b"SSH-2.0-OpenSSH\r\n")


async def byte_by_byte(writer: asyncio.StreamWriter, call: Call) -> None:
    """An answer that would take hours, a byte at a time, none of them late."""
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Padding: yes\r\n" * 100_000:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.02)


async def endless_head(writer: asyncio.StreamWriter, call: Call) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        writer.write(b"x" * 65_536)
        await writer.drain()


def gigabyte(status: int) -> Behave:
    async def behave(writer: asyncio.StreamWriter, call: Call) -> None:
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {1 << 30}\r\n\r\n".encode())
        for _ in range(1 << 14):
            writer.write(bytes(65_536))
            await writer.drain()

    return behave


def in_turn(*behaviours: Behave) -> Behave:
    """Each call the next one; the last one goes on."""
    left = list(behaviours)

    async def behave(writer: asyncio.StreamWriter, call: Call) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(writer, call)

    return behave


class Receiver:
    """Use it with `async with`."""

    def __init__(self, behave: Behave, tls: ssl.SSLContext | None = None) -> None:
        self.behave, self.tls = behave, tls
        self.calls: list[Call] = []
        self.connections = 0
        self._more = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Receiver:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        self.port = self.server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}/hook"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def called(self, times: int, seconds: float = 30.0) -> list[Call]:
        """Once it was called so often."""
        async with asyncio.timeout(seconds):
            while len(self.calls) < times:
                self._more.clear()
                await self._more.wait()
        return self.calls

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        number, self.connections = self.connections, self.connections + 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    call = await self._read(reader, number)
                    self.calls.append(call)
                    self._more.set()
                    await self.behave(writer, call)
                    await writer.drain()
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, number: int) -> Call:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = head[0].split()
        return Call(path, headers, body, number, method)
