"""Processes for tasks with `cpu=True`.

Each runs one call at a time, so a crash or a timeout ends one attempt, not those of its neighbours.
"""

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from hadelay.tasks.attempt import Attempt
from hadelay.tasks.channel import LINE_BYTES
from hadelay.tasks.outcomes import Failed, Outcome
from hadelay.tasks.task import Call


class Work(msgspec.Struct, frozen=True):
    """Line from a worker to a CPU process: a call to run, with the fields of the attempt that `current()` shows."""

    call: Call
    id: str
    topic: str
    key: str | None
    number: int
    counted: int
    deadline_ms: float | None
    meta: dict[str, str]


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Line from a CPU process to its worker: the progress of the call, or its outcome."""

    progress: str = ""
    outcome: Outcome | None = None


class CpuProcess:
    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._process, self._reader, self._writer = process, reader, writer

    async def run(self, call: Call, attempt: Attempt) -> Any:
        """Run a call in this process; returns the call's result. Raises Failed after an exception of the function, and
        ConnectionError if the process ended."""
        work = Work(
            call,
            attempt.id,
            attempt.topic,
            attempt.key,
            attempt.number,
            attempt.counted,
            attempt.deadline.timestamp() * 1000 if attempt.deadline else None,
            dict(attempt.meta),
        )
        self._writer.write(msgspec.json.encode(work) + b"\n")
        await self._writer.drain()
        while line := await self._reader.readline():
            reply = msgspec.json.decode(line, type=Reply)
            if reply.outcome is None:
                attempt.progress(reply.progress)
            elif reply.outcome.kind != "done":
                raise Failed(reply.outcome)
            else:
                return reply.outcome.result
        raise ConnectionError(f"the task's process ended with code {await self._process.wait()}")

    def kill(self) -> None:
        self._writer.close()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


class CpuPool:
    """Pool of CPU processes: at most as many as the machine has processors, started when needed. where: MODULE:APP, the
    app that each process imports."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._room = asyncio.Semaphore(os.cpu_count() or 1)
        self._idle: list[CpuProcess] = []
        self._all: set[CpuProcess] = set()

    @contextlib.asynccontextmanager
    async def process(self) -> AsyncIterator[CpuProcess]:
        """Context that lends a process for one call. If the call did not end, because of a timeout or a stop, the
        process is killed."""
        async with self._room:
            one = self._idle.pop() if self._idle else await self._start()
            ended = False
            try:
                yield one
                ended = True
            except Failed:
                ended = True
                raise
            finally:
                if ended:
                    self._idle.append(one)
                else:
                    one.kill()
                    self._all.discard(one)

    async def _start(self) -> CpuProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            words = (sys.executable, "-m", "hadelay.tasks.cpu_process", str(theirs.fileno()), self._where)
            process = await asyncio.create_subprocess_exec(*words, pass_fds=(theirs.fileno(),), process_group=0)
        one = CpuProcess(process, *await asyncio.open_connection(sock=ours, limit=LINE_BYTES))
        self._all.add(one)
        return one

    def close(self) -> None:
        for one in self._all:
            one.kill()
