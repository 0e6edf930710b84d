"""One real node in the event loop of a test: on the simulator's disk, without other nodes, and with a clock that the
test moves. The services are the real ones; `Served` can delay or fail a call of theirs, and notes what they were asked.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from chaos.sim.disk import SimDisk
from chaos.sim.tables import SimBackend
from hadelay.api.messages import Message
from hadelay.api.service import Handed, Leader, PublishDone, Receipts, ReceiveRequest, SettleKind, Target
from hadelay.errors import HadelayError
from hadelay.ledger.views.describe import describe
from hadelay.model import Description, Draft
from hadelay.platform.network import Buffer, Receiver
from hadelay.platform.runtime import Ended, Runtime
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.server.service.cluster import Clusters
from hadelay.server.service.consuming import ConsumingService
from hadelay.server.service.messages import MessageService
from hadelay.server.service.node import NodeService
from hadelay.settings.load import load
from hadelay.settings.node import HttpConfig

_SETTINGS = (
    "cluster.init=true", "node.name=n1", "node.data_dir=/data", "storage.min_free_bytes=0B",
    "limits.max_delay_ms=7300d", "webhooks.allow=0.0.0.0/0,::/0",
)  # fmt: skip
_CONFIG = load(None, {}, _SETTINGS)
#: Sizes of a journal segment, which the start fills with zeros: for entries of 256 KiB, and for the largest ones.
_SEGMENT_BYTES, _ROOMY_BYTES = 1 << 20, 5 << 20
#: Time that a new node may take to elect itself, and steps in which its clock passes it, in seconds.
_START_S, _STEP_S = 4.0, 0.5
#: While the clock stands still: longest delay of a timer that fires at once, and delay of the others, in seconds.
_SHORT_S, _NEVER_S = 0.05, 1e6


class Alone:
    """The network of a node without others."""

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()

    def start(self, receiver: Receiver) -> None:
        pass

    def send(self, peer: str, frame: Buffer | Sequence[Buffer], urgent: bool = False) -> bool:
        return False

    def disconnect(self, peer: str) -> None:
        pass

    def set_members(self, peers: Mapping[str, str]) -> None:
        pass

    def close(self) -> None:
        pass


class MovedRuntime(Runtime):
    """A runtime whose clock the test moves, and whose jobs run on the event loop instead of in threads. at_ms: wall
    time of a clock that stands still between two moves; None: the clock goes on by itself, too."""

    def __init__(self, loop: asyncio.AbstractEventLoop, at_ms: int | None = None) -> None:
        super().__init__(loop)
        self.random, self._at_ms = random.Random(1), at_ms
        #: Time by which the clock is ahead of the machine's. A start takes _START_S of it at once.
        self.offset_s = -_START_S
        #: Time of each timer, its callback, and its timer on the event loop.
        self._timers: dict[_Timer, asyncio.TimerHandle] = {}

    def monotonic(self) -> float:  # type: ignore[override]
        return (time.monotonic() if self._at_ms is None else 0.0) + self.offset_s

    def wall_ms(self) -> int:
        return (super().wall_ms() if self._at_ms is None else self._at_ms) + round(self.offset_s * 1000)

    def call_later(self, delay_s: float, fn: Callable[..., None], *args: Any) -> _Timer:
        timer = _Timer(self._timers, self.monotonic() + delay_s, fn, args)
        self._timers[timer] = self._armed(timer)
        return timer

    def _armed(self, timer: _Timer) -> asyncio.TimerHandle:
        left_s = max(0.0, timer.at - self.monotonic())
        if self._at_ms is not None:
            left_s = 0.0 if left_s <= _SHORT_S else _NEVER_S
        return self.loop.call_later(left_s, timer.fire)

    def in_thread(self, lane: str, fn: Callable[[], Any], done: Ended, *, brief: bool = False) -> None:
        def run() -> None:
            result, error = None, None
            try:
                result = fn()
            except Exception as raised:
                error = raised
            done(result, error)

        self.loop.call_soon(run)

    def join(self, lane: str) -> None:
        """No job of a lane is under way."""

    def move(self, seconds: float) -> None:
        """Move the clock forward; timers that are due then fire soon."""
        ahead = [timer for timer in self._timers if timer.at > self.monotonic()]
        self.offset_s += seconds
        for timer in sorted(ahead, key=lambda timer: timer.at):
            self._timers[timer].cancel()
            self._timers[timer] = self._armed(timer)


class _Timer:
    def __init__(
        self, timers: dict[_Timer, asyncio.TimerHandle], at: float, fn: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        self.timers, self.at, self.fn, self.args = timers, at, fn, args

    def fire(self) -> None:
        del self.timers[self]
        self.fn(*self.args)

    def cancel(self) -> None:
        if self in self.timers:
            self.timers.pop(self).cancel()


def _fatal(error: BaseException) -> None:
    raise RuntimeError("the node has failed, as it would end a process of its own") from error


class Settlement(NamedTuple):
    """What a request to settle leases said."""

    kind: SettleKind
    reason: str
    count: bool = True
    dead: bool = False


class _Consuming(ConsumingService):
    def __init__(self, served: Served, node: Node) -> None:
        super().__init__(node)
        self._served = served

    async def receive(self, ask: ReceiveRequest) -> Handed:
        self._served.polls.append(ask)
        self._served.check()
        try:
            handed = await super().receive(ask)
            for message in handed.messages:
                self._served.leases.pop(message.id, None)
                self._served.leases[message.id] = message.lease
            return handed
        except asyncio.CancelledError:
            self._served.withdrawn += 1
            raise

    async def settle(
        self, kind: SettleKind, leases: list[str], value_ms: int | None, reason: str = "", **how: Any
    ) -> list[str]:
        self._served.settled.append(Settlement(kind, reason, **{n: how[n] for n in ("count", "dead") if n in how}))
        self._served.check()
        return await super().settle(kind, leases, value_ms, reason, **how)


class _Messages(MessageService):
    def __init__(self, served: Served, node: Node) -> None:
        super().__init__(node)
        self._served = served

    async def describe(self, target: Target, *, body: bool, stale: bool, wait_ms: int = 0) -> Message[str]:
        self._served.check()
        return await super().describe(target, body=body, stale=stale, wait_ms=wait_ms)


class _Clusters(Clusters):
    def __init__(self, served: Served, node: Node) -> None:
        super().__init__(node)
        self._served = served

    async def find_leader(self) -> Leader:
        return await super().find_leader() if self._served.leader is None else self._served.leader


class Served(NodeService):
    """The services of a node. leader: what the node says about who leads; None: what it knows."""

    def __init__(self, node: Node, runtime: MovedRuntime) -> None:
        super().__init__(node)
        self.raft_node, self.runtime = node, runtime
        self.leader: Leader | None = None
        #: Drafts of all publishes that were answered, repetitions of an Idempotency-Key aside; keys of these publishes.
        self.published: list[Draft] = []
        self.keys: list[bytes] = []
        #: Ids of the published messages; last lease of each, the latest last.
        self.ids: list[int] = []
        self.leases: dict[str, str] = {}
        self._known: set[int] = set()
        #: All receives, and all requests to settle leases.
        self.polls: list[ReceiveRequest] = []
        self.settled: list[Settlement] = []
        #: Number of receives that were cancelled.
        self.withdrawn = 0
        #: Error of the next publishes, receives, settlements and reads of a message; None: they are carried out.
        self.fail: HadelayError | None = None
        #: Publishes that wait for `release`; None: publishes do not wait.
        self.deferred: list[Callable[[], None]] | None = None
        self._publish, self.publish = self.publish, self._noted
        self.consume, self.messages, self.cluster = _Consuming(self, node), _Messages(self, node), _Clusters(self, node)

    @property
    def leader_name(self) -> str | None:
        return super().leader_name if self.leader is None else self.leader.name

    def check(self) -> None:
        if self.fail is not None:
            raise self.fail

    def hold(self) -> None:
        self.deferred = []

    def release(self) -> None:
        deferred, self.deferred = self.deferred or [], None
        for go in deferred:
            go()

    def _noted(self, drafts: list[Draft], request_key: bytes | None, done: PublishDone, by: str = "") -> None:
        def noted(receipts: Receipts | None, error: HadelayError | None) -> None:
            if receipts is not None and (request_key is None or request_key not in self.keys):
                self.published += drafts
                made = (one for n, one in enumerate(receipts.ids) if n not in receipts.problems)
                self.ids += [one for one in dict.fromkeys(made) if one not in self._known]
                self._known.update(self.ids)
                self.keys += [] if request_key is None else [request_key]
            done(receipts, error)

        def go() -> None:
            if self.fail is not None:
                done(None, self.fail)
            else:
                self._publish(drafts, request_key, noted, by)

        if self.deferred is not None:
            self.deferred.append(go)
        else:
            go()

    @property
    def messages_now(self) -> list[Description]:
        """The published messages as the node describes them, in the order of their publishes."""
        node = self.raft_node
        found = (describe(node.ledger, one, node.now_ms()) for one in self.ids)
        return [message for message in found if message is not None]

    @property
    def states(self) -> list[str]:
        """States of the published messages, sorted."""
        return sorted(str(message.state) for message in self.messages_now)

    def close(self) -> None:
        self.raft_node.stop()
        self.runtime.close()


async def serve(
    http: HttpConfig, *, lost: bool = False, roomy: bool = False, at_ms: int | None = None, group: int = 0
) -> Served:
    """Start a node; returns when it leads. lost: the node is one of three members and does not reach the others. at_ms:
    time at which its clock stands still (MovedRuntime). roomy: with room for entries of more than 256 KiB, which takes
    10 ms more. group: number of its Raft group."""
    peers = {f"n{n}": f"127.0.0.1:{n}" for n in (1, 2, 3)} if lost else {}
    size = _ROOMY_BYTES if roomy else _SEGMENT_BYTES
    cluster = replace(_CONFIG.cluster, group=group)
    config = replace(_CONFIG, cluster=cluster, http=http, raft=replace(_CONFIG.raft, segment_bytes=size, peers=peers))
    disk, runtime = SimDisk(random.Random(1)), MovedRuntime(asyncio.get_running_loop(), at_ms)
    disk.makedirs("/data")
    node = open_node(config, disk, Alone(), runtime, _fatal, backend=lambda path: SimBackend(disk, path))
    node.start()
    while not lost and not (node.leadership.serves() and node.leading):
        runtime.move(_STEP_S)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    runtime.move(-runtime.offset_s)
    served = Served(node, runtime)
    served.access.knows_tokens = True
    return served
