"""beanstalkd with its log."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from bench.delays.contender import Client, Message, Received
from bench.delays.server import OneServer, Server
from bench.peers import program


class Beanstalkd(OneServer):
    name = "beanstalkd"
    setup = "beanstalkd with a log that is synced after each write (`-b DIR -f 0`); put with a delay, reserve, delete"
    durability = "log synced before each answer, on one machine"
    cancels = "`delete`, with the id that the publish returned"
    notes = "delays are whole seconds, rounded up here: rounded down they would be early"
    programs = ("beanstalkd",)
    modules = ("greenstalk",)

    def start(self) -> None:
        log = self.directory / "log"
        log.mkdir()
        command = [program("beanstalkd"), "-l", "127.0.0.1", "-p", str(self.port), "-b", str(log), "-f", "0"]
        self._server = Server(command, self.directory, self.port)
        self._server.start()

    def connect(self) -> Client:
        return _Client(self)


class _Client(Client):
    def __init__(self, contender: Beanstalkd) -> None:
        import greenstalk

        self._library = greenstalk
        self._connection = greenstalk.Client(("127.0.0.1", contender.port), encoding=None)
        self._ttr = math.ceil(contender.visibility_s)
        self._jobs: dict[str, int] = {}

    def publish(self, messages: Sequence[Message]) -> None:
        for message in messages:
            delay = max(0, math.ceil(message.due_ms / 1000 - time.time()))
            self._jobs[message.id] = self._connection.put(message.body(), delay=delay, ttr=self._ttr)

    def receive(self, most: int, wait_s: float) -> list[Received]:
        found: list[Received] = []
        try:
            while len(found) < most:
                job = self._connection.reserve(timeout=0 if found else math.ceil(wait_s))
                found.append(Received(job.body.decode().rstrip(), job))
        except self._library.TimedOutError:
            pass
        except self._library.DeadlineSoonError:
            if not found:
                raise
        return found

    def ack(self, received: Sequence[Received]) -> None:
        for one in received:
            self._connection.delete(one.token)

    def cancel(self, ids: Sequence[str]) -> int:
        cancelled = 0
        for id in ids:
            try:
                self._connection.delete(self._jobs.pop(id))
                cancelled += 1
            except (KeyError, self._library.NotFoundError):
                pass
        return cancelled

    def close(self) -> None:
        self._connection.close()
