"""Redis by hand: a sorted set by due time, a hash of bodies, and a Lua script that leases what is due."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from bench.delays.contender import POLL_S, Client, Message, Received
from bench.delays.server import OneServer, Server
from bench.peers import program

#: Lease up to ARGV[1] due messages for ARGV[2] ms, by the server's clock: their scores become the leases' ends, so the
#: messages of a worker that died are handed out again.
_LEASE = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local ids = redis.call('ZRANGEBYSCORE', 'due', '-inf', now, 'LIMIT', 0, ARGV[1])
local found = {}
for _, id in ipairs(ids) do
  redis.call('ZADD', 'due', now + ARGV[2], id)
  found[#found + 1] = redis.call('HGET', 'body', id)
end
return found
"""


class RedisServer(OneServer):
    """One server with an append-only file."""

    programs: ClassVar[tuple[str, ...]] = ("redis-server",)
    modules: ClassVar[tuple[str, ...]] = ("redis",)
    fsync: ClassVar[str] = "everysec"
    durability = "append-only file, synced each second: a power cut loses up to a second"

    def start(self) -> None:
        command = [program("redis-server"), "--bind", "127.0.0.1", "--port", str(self.port), "--save", ""]
        command += ["--dir", str(self.directory), "--appendonly", "yes", "--appendfsync", self.fsync]
        self._server = Server(command, self.directory, self.port)
        self._server.start()


class RedisEverySecond(RedisServer):
    name = "redis-everysec"
    setup = f"Redis 7, a sorted set and a Lua script that leases what is due; workers poll every {POLL_S * 1000:.0f} ms"
    cancels = "ZREM and HDEL"

    def connect(self) -> Client:
        return _Client(self)


class RedisAlways(RedisEverySecond):
    name = "redis-always"
    fsync = "always"
    durability = "append-only file, synced before each answer, on one machine"


class _Client(Client):
    def __init__(self, contender: RedisServer) -> None:
        import redis

        self._redis = redis.Redis("127.0.0.1", contender.port, socket_timeout=10)
        self._lease = self._redis.register_script(_LEASE)
        self._lease_ms = int(contender.visibility_s * 1000)

    def publish(self, messages: Sequence[Message]) -> None:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset("body", mapping={m.id: m.body() for m in messages})
            pipe.zadd("due", {m.id: m.due_ms for m in messages}, nx=True)
            pipe.execute()

    def receive(self, most: int, wait_s: float) -> list[Received]:
        until = time.monotonic() + wait_s
        while not (bodies := self._lease(args=[most, self._lease_ms])):
            if time.monotonic() > until:
                return []
            time.sleep(POLL_S)
        return [Received(body.decode().rstrip()) for body in bodies]

    def ack(self, received: Sequence[Received]) -> None:
        self._remove([one.id for one in received])

    def cancel(self, ids: Sequence[str]) -> int:
        return self._remove(ids)

    def _remove(self, ids: Sequence[str]) -> int:
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.zrem("due", *ids)
            pipe.hdel("body", *ids)
            removed, _ = pipe.execute()
        return int(removed)

    def close(self) -> None:
        self._redis.close()
