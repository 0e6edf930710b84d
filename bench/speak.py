"""One stored message in each peer's own protocol, over a plain socket: `Speaker.put` returns when it is acknowledged.

Small on purpose, for the same reason as http1: the client must not be what is measured, and no client library has to
be installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import struct
import time
from typing import Protocol

from bench.http1 import Connection, Failed, request

BODY = b"0123456789abcdefghij" * 10


class Speaker(Protocol):
    async def open(self, port: int) -> None: ...

    async def put(self) -> None: ...


class _Stream:
    async def open(self, port: int) -> None:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)


class Hadelay:
    async def open(self, port: int) -> None:
        self._connection = await Connection.open(f"127.0.0.1:{port}")
        self._request = request("POST", "/v1/topics/bench/messages?delay=45m", BODY)

    async def put(self) -> None:
        status, answer = await self._connection.send(self._request)
        if status != 201:
            raise Failed(status, answer)


class Redis(_Stream):
    """A sorted set by due time and a hash of bodies, in one transaction, acknowledged by both replicas (WAIT 2)."""

    async def put(self) -> None:
        key = os.urandom(8)
        due = repr(time.time() + random.random() * 3600).encode()
        for words in (
            [b"MULTI"],
            [b"HSET", b"body", key, BODY],
            [b"ZADD", b"due", due, key],
            [b"EXEC"],
            [b"WAIT", b"2", b"5000"],
        ):
            self.writer.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
        # OK, QUEUED, QUEUED, *2 with two integers, and the number of replicas.
        lines = [await self.reader.readline() for _ in range(7)]
        if lines[-1] != b":2\r\n":
            raise ConnectionError(f"redis: {lines}")


class Beanstalkd(_Stream):
    async def put(self) -> None:
        self.writer.write(b"put 10 3000 60 %d\r\n%s\r\n" % (len(BODY), BODY))
        answer = await self.reader.readline()
        if not answer.startswith(b"INSERTED"):
            raise ConnectionError(f"beanstalkd: {answer!r}")


class Nats(_Stream):
    async def open(self, port: int) -> None:
        await super().open(port)
        await self.reader.readline()
        self._inbox = f"_INBOX.{os.urandom(8).hex()}".encode()
        self.writer.write(
            b'CONNECT {"verbose":false,"headers":true,"no_responders":true}\r\nSUB %s 1\r\n' % self._inbox
        )

    async def make_stream(self) -> None:
        stream = {"name": "s", "subjects": ["s.*"], "num_replicas": 3, "storage": "file", "retention": "limits"}
        for _ in range(50):
            # Nobody answers at all before the three have agreed on a leader for such questions.
            with contextlib.suppress(TimeoutError):
                answer = await asyncio.wait_for(self._ask(b"$JS.API.STREAM.CREATE.s", json.dumps(stream).encode()), 2)
                if b'"error"' not in answer and b"503" not in answer:
                    return
            await asyncio.sleep(0.3)
        raise ConnectionError("nats: no stream of three replicas")

    async def put(self) -> None:
        answer = await self._ask(b"s.a", BODY)
        if b'"seq"' not in answer:
            raise ConnectionError(f"nats: {answer!r}")

    async def _ask(self, subject: bytes, payload: bytes) -> bytes:
        self.writer.write(b"PUB %s %s %d\r\n%s\r\n" % (subject, self._inbox, len(payload), payload))
        while True:
            line = await self.reader.readline()
            if not line:
                raise ConnectionError("nats hung up")
            if line.startswith((b"MSG", b"HMSG")):
                return (await self.reader.readexactly(int(line.split()[-1]) + 2))[:-2]
            if line.startswith(b"PING"):
                self.writer.write(b"PONG\r\n")


class RabbitMq(_Stream):
    """AMQP 0-9-1 by hand: a quorum queue with a TTL that dead-letters into another; publisher confirms."""

    async def open(self, port: int) -> None:
        await super().open(port)
        self.writer.write(b"AMQP\x00\x00\x09\x01")
        await self._method(10, 10)
        plain = _long_string(b"\x00guest\x00guest")
        self._send(0, 10, 11, struct.pack(">I", 0) + _short("PLAIN") + plain + _short("en_US"))
        await self._method(10, 30)
        self._send(0, 10, 31, struct.pack(">HIH", 2047, 131072, 0))
        self._send(0, 10, 40, _short("/") + b"\x00\x00")
        await self._method(10, 41)
        self._send(1, 20, 10, b"\x00")
        await self._method(20, 11)
        await self._declare("due", {"x-queue-type": "quorum"})
        delay: dict[str, str | int] = {"x-queue-type": "quorum", "x-message-ttl": 3_600_000}
        await self._declare("delay", {**delay, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "due"})
        self._send(1, 85, 10, b"\x00")
        await self._method(85, 11)
        header = struct.pack(">HHQHB", 60, 0, len(BODY), 0x1000, 2)
        publish = struct.pack(">HHH", 60, 40, 0) + _short("") + _short("delay") + b"\x00"
        self._publish = _frame(1, 1, publish) + _frame(2, 1, header) + _frame(3, 1, BODY)

    async def put(self) -> None:
        self.writer.write(self._publish)
        await self._method(60, 80)

    async def _declare(self, name: str, arguments: dict[str, str | int]) -> None:
        self._send(1, 50, 10, b"\x00\x00" + _short(name) + b"\x02" + _table(arguments))
        await self._method(50, 11)

    def _send(self, channel: int, class_id: int, method: int, arguments: bytes) -> None:
        self.writer.write(_frame(1, channel, struct.pack(">HH", class_id, method) + arguments))

    async def _method(self, class_id: int, method: int) -> None:
        while True:
            kind, _, size = struct.unpack(">BHI", await self.reader.readexactly(7))
            payload = (await self.reader.readexactly(size + 1))[:-1]
            if kind == 8:
                continue
            if struct.unpack(">HH", payload[:4]) != (class_id, method):
                raise ConnectionError(f"rabbitmq: {payload[:200]!r}")
            return


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _long_string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def _table(arguments: dict[str, str | int]) -> bytes:
    packed = b"".join(
        _short(key)
        + (b"S" + _long_string(value.encode()) if isinstance(value, str) else b"l" + struct.pack(">q", value))
        for key, value in arguments.items()
    )
    return _long_string(packed)


async def rate(kind: type[Speaker], port: int, connections: int, seconds: float) -> float:
    """Acknowledged messages per second."""
    speakers = [kind() for _ in range(connections)]
    for speaker in speakers:
        await speaker.open(port)
    if isinstance(speakers[0], Nats):
        await speakers[0].make_stream()
    done = 0
    end = time.perf_counter() + seconds

    async def work(speaker: Speaker) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await speaker.put()
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(work(speaker) for speaker in speakers))
    return done / (time.perf_counter() - began)
