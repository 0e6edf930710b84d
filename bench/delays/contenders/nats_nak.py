"""NATS JetStream 2.9, which has no delayed publish: a worker takes a message at once and gives it back with a delay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from bench.delays.contender import Client, Message, Received
from bench.delays.server import OneServer, Server
from bench.peers import program

T = TypeVar("T")


class NatsNak(OneServer):
    name = "nats-nak"
    setup = "NATS JetStream 2.9, one server, a work queue; a worker naks a message with the rest of its delay"
    durability = "file synced every two minutes (the default): a power cut loses up to that"
    cancels = "`delete_msg`, with the sequence number that the publish returned"
    notes = "delayed publish came with 2.12, which Debian lacks; a worker must run for a message to wait"
    programs = ("nats-server",)
    modules = ("nats",)

    def start(self) -> None:
        command = [program("nats-server"), "-a", "127.0.0.1", "-p", str(self.port), "-js"]
        self._server = Server([*command, "--store_dir", str(self.directory / "data")], self.directory, self.port)
        self._server.start()

    def prepare(self) -> None:
        client = _Client(self)
        client.make_stream(self.visibility_s)
        client.close()

    def connect(self) -> Client:
        return _Client(self)


class _Client(Client):
    """The library is asynchronous: each client has a loop, which runs while a method does."""

    def __init__(self, contender: NatsNak) -> None:
        import nats

        self._loop = asyncio.new_event_loop()
        address = f"nats://127.0.0.1:{contender.port}"
        self._nats: Any = self._run(nats.connect(address, allow_reconnect=False, connect_timeout=5))
        self._stream: Any = self._nats.jetstream()
        self._pulled: Any = None
        self._sequences: dict[str, int] = {}

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    def make_stream(self, ack_wait_s: float) -> None:
        from nats.js.api import ConsumerConfig, RetentionPolicy

        self._run(self._stream.add_stream(name="bench", subjects=["bench"], retention=RetentionPolicy.WORK_QUEUE))
        config = ConsumerConfig(durable_name="workers", ack_wait=ack_wait_s, max_ack_pending=-1, max_deliver=-1)
        self._run(self._stream.add_consumer("bench", config))

    def publish(self, messages: Sequence[Message]) -> None:
        async def publish() -> list[Any]:
            sent = [self._stream.publish("bench", m.body(), headers={"due": str(m.due_ms)}) for m in messages]
            return await asyncio.gather(*sent)

        for message, answer in zip(messages, self._run(publish()), strict=True):
            self._sequences[message.id] = answer.seq

    def receive(self, most: int, wait_s: float) -> list[Received]:
        return self._run(self._receive(most, wait_s))

    async def _receive(self, most: int, wait_s: float) -> list[Received]:
        import nats

        if self._pulled is None:
            self._pulled = await self._stream.pull_subscribe_bind(durable="workers", stream="bench")
        try:
            got = await self._pulled.fetch(most, timeout=wait_s)
        except nats.errors.TimeoutError:
            return []
        found = []
        for message in got:
            left_s = int(message.headers["due"]) / 1000 - time.time()
            if left_s > 0:
                await message.nak(delay=left_s)
            else:
                found.append(Received(message.data.decode().rstrip(), message))
        return found

    def ack(self, received: Sequence[Received]) -> None:
        async def ack() -> None:
            await asyncio.gather(*(one.token.ack_sync(timeout=5) for one in received))

        self._run(ack())

    def cancel(self, ids: Sequence[str]) -> int:
        async def cancel() -> list[bool]:
            return [await self._stream.delete_msg("bench", self._sequences.pop(id)) for id in ids]

        return sum(self._run(cancel()))

    def close(self) -> None:
        self._run(self._nats.close())
        self._loop.close()
