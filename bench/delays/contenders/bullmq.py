"""BullMQ on Redis: producer and worker are programs in Node.js (bench/delays/node)."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bench.delays.contender import Client, Message
from bench.delays.contenders.redis_zset import RedisServer
from bench.delays.field import HERE, NODE, has_node_module
from bench.wrk_run import Missing


class BullMq(RedisServer):
    name = "bullmq"
    setup = "BullMQ, `addBulk` with `delay`, workers with concurrency 100, Redis with appendfsync everysec"
    cancels = "`job.remove`"
    programs = ("redis-server", "node")
    modules = ()

    @classmethod
    def missing(cls) -> str:
        absent = [name for name in ("bullmq", "ioredis") if not has_node_module(name)]
        return super().missing() or (f"{', '.join(absent)} not installed" if absent else "")

    def connect(self) -> Client:
        return _Client(self)

    def worker(self) -> list[str]:
        return ["node", str(script("worker.mjs"))]


def script(name: str) -> Path:
    """A copy of a program beside the libraries: Node.js looks for these from the program upwards."""
    if not NODE.exists():
        raise Missing("python -m bench delays --install")
    return Path(shutil.copy(HERE / "node" / name, NODE / name))


class _Client(Client):
    """A producer's child process, which answers each line with a line."""

    def __init__(self, contender: BullMq) -> None:
        command = ["node", str(script("producer.mjs")), str(contender.port)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _ask(self, question: dict[str, object]) -> int:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(question).encode() + b"\n")
        self._child.stdin.flush()
        answer = json.loads(self._child.stdout.readline() or b'{"error": "the producer ended"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return int(answer["count"])

    def publish(self, messages: Sequence[Message]) -> None:
        self._ask({"add": [{"id": m.id, "due": m.due_ms, "padding": m.body().decode()} for m in messages]})

    def cancel(self, ids: Sequence[str]) -> int:
        return self._ask({"remove": list(ids)})

    def close(self) -> None:
        self._child.kill()
        self._child.wait()
