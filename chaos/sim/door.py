"""Network between clients and nodes in the simulated world: a call runs on the node as events of the node, and its
answer travels back.

A process that ends breaks its calls: their callers do not know what became of them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, TypeVar

from chaos.sim.file import is_injected
from chaos.sim.machines import Machines, Process
from chaos.sim.network import NetworkProfile
from chaos.sim.runtime import SimWorld
from hadelay.api.service import ReceiveRequest
from hadelay.errors import DamagedFile, HadelayError, NoLeader, OutcomeUnknown
from hadelay.server.service.node import NodeService

T = TypeVar("T")
Reply = Callable[[Any, HadelayError | None], None]
#: Type of a function begin(node, done), which starts a call on a node and passes the outcome to `done`.
Begin = Callable[[Any, Reply], None]
Request = Callable[[NodeService], Coroutine[Any, Any, Any]]


def whole(slices: Generator[Any, None, T]) -> T:
    """Run a generator to its end, without running other events in between; returns its result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Door:
    """Calls from clients to nodes. Each call gets one answer: from the node, from a broken connection, or from the
    client's timeout."""

    def __init__(self, cluster: Machines) -> None:
        self.cluster, self.world = cluster, cluster.world

    def call(self, process: Process, begin: Begin, reply: Reply, timeout_s: float = 4.0) -> Call:
        """Run begin(node, done) as an event of the process; then run reply(result, error) at the caller."""
        call = Call(self, process, reply)
        process.calls.append(call)
        self.world.after(self.latency(), call.begin, begin, owner=process.runtime)
        self.world.after(timeout_s, call.answer, None, OutcomeUnknown("the client's time limit"))
        return call

    def ask(self, process: Process, request: Request, reply: Reply, timeout_s: float = 4.0) -> Call:
        """Await request(service) in a task of the process, as its HTTP layer does; then run reply(result, error) at the
        caller. A hang-up cancels the task."""

        def begin(node: Any, done: Reply) -> None:
            call.task = process.loop.run(request(process.service), call.ended)

        call = self.call(process, begin, reply, timeout_s)
        return call

    def latency(self) -> float:
        return self.world.random.uniform(0.0001, 0.002)


class Call:
    __slots__ = ("door", "open", "process", "reply", "task")

    def __init__(self, door: Door, process: Process, reply: Reply) -> None:
        self.door, self.process, self.reply, self.open = door, process, reply, True
        self.task: asyncio.Task[Any] | None = None

    def begin(self, begin: Begin) -> None:
        if self.process.node is None:
            self.done(None, NoLeader("still starting"))
            return
        try:
            begin(self.process.node, self.done)
        except DamagedFile as damage:
            self.ended(None, damage)

    def ended(self, result: Any, error: BaseException | None) -> None:
        """End a call on the node: send its result or error to the caller. An error that a node must not answer with is
        raised."""
        if isinstance(error, DamagedFile):
            excused = self.process.name in self.door.cluster.rotten
        else:
            excused = error is None or isinstance(error, HadelayError)
        if error is not None and not excused:
            if not is_injected(error):
                raise error
            error = OutcomeUnknown(f"HTTP 500: {error}")
        self.done(result, error)  # type: ignore[arg-type]

    def done(self, result: Any, error: HadelayError | None) -> None:
        door = self.door
        lost = door.cluster.lost_answers
        if lost and door.world.random.random() < lost:
            result, error = None, OutcomeUnknown("the answer was lost")
        door.world.after(door.latency(), self.answer, result, error)

    def broken(self) -> None:
        self.door.world.after(self.door.latency(), self.answer, None, OutcomeUnknown("connection reset"))

    def hang_up(self) -> None:
        """Close the connection: the caller gets no answer, and the node cancels the task when it notices."""
        self._close()
        self.door.world.after(self.door.latency(), self._cancel, owner=self.process.runtime)

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    def answer(self, result: Any, error: HadelayError | None) -> None:
        if self.open:
            self._close()
            self.reply(result, error)

    def _close(self) -> None:
        self.open = False
        if self in self.process.calls:
            self.process.calls.remove(self)


class Served(Machines):
    """Machines whose nodes serve clients."""

    def __init__(self, world: SimWorld, names: tuple[str, ...], profile: NetworkProfile | None, **more: Any) -> None:
        super().__init__(world, names, profile, **more)
        self.door = Door(self)


class Client:
    """Base class of the simulated clients. Each client draws from its own random stream."""

    def __init__(self, cluster: Served, name: str) -> None:
        self.cluster, self.name = cluster, name
        self.world, self.history, self.door = cluster.world, cluster.history, cluster.door
        self.random = random.Random(f"{cluster.seed} {name}")
        #: `good`: True in the drain, in which the client settles all messages. `stopped`: True once the client sends no
        #: more requests.
        self.good = self.stopped = False
        #: Number of acts that this client has begun; an act is a request with its repetitions.
        self.acts = 0

    def ask(
        self, request: Request, replied: Reply, timeout_s: float = 4.0, *, rng: random.Random | None = None
    ) -> bool:
        """Send a request to any node. False if no node runs: then `replied` gets NoLeader a moment later."""
        process = self.cluster.any_process(rng or self.random)
        if process is None:
            self.world.after(0.1, replied, None, NoLeader("no node runs"))
        else:
            self.door.ask(process, request, replied, timeout_s)
        return process is not None

    def take(self, topics: Sequence[str], counted: str, *, fails: bool = False) -> None:
        """Receive due messages of these topics once, and ack all of them or, if `fails`, nack all of them. counted:
        name under which the history counts the received messages."""
        poll = ReceiveRequest(list(topics), self.name, b"%d" % int(self.world.now * 1000), 20, 0, 900)

        async def taken(service: NodeService) -> int:
            if not (await service.cluster.find_leader()).here:
                return 0
            handed = await service.consume.receive(poll)
            handed.answered()
            if leases := [message.lease for message in handed.messages]:
                await service.consume.settle(*(("nack", leases, 50) if fails else ("ack", leases, None)))
            return len(leases)

        self.ask(taken, lambda count, error: self.history.count(counted, count or 0))

    def next_act(self) -> str:
        """Begin an act of this client, with a new random stream that no earlier act influences. Returns the act's name,
        for `cluster.parts`."""
        self.acts += 1
        name = f"{self.name}.{self.acts}"
        self.random = random.Random(f"{self.cluster.seed} {name}")
        return name

    def note(self, text: str, *ids: int) -> None:
        self.history.note(self.world.now, self.name, text, frozenset(ids))
