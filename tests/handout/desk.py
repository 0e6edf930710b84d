"""One leader's dispatcher in simulated time: the real state machine with its files in memory, and a log that commits
every proposal `commit_ms` later, stamped when it was proposed. Times are milliseconds since START_MS."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from chaos.sim import cursorcheck, ledgercheck, memorycheck
from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.codec import commands
from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import encode_entry
from hadelay.codec.leasetokens import LEASE
from hadelay.codec.meta import Meta, filter_of, mask_of, pack
from hadelay.codec.publishcommand import hash_group
from hadelay.codec.results import Done as Result
from hadelay.errors import HadelayError
from hadelay.handout.dispatcher import Dispatcher
from hadelay.handout.matching import Offer
from hadelay.handout.polls import Delivery, Poll
from hadelay.ledger.apply import apply_entry
from hadelay.ledger.state import Ledger
from hadelay.model import HOUR_MS, Draft
from hadelay.server.clustertime import ClusterClock
from hadelay.server.delivery.loop import DeliveryLoop
from hadelay.settings.node import Config, DispatchConfig, RetentionConfig
from hadelay.version import FEATURE_LEVEL
from tests.memory import MemoryHours, MemoryNames, MemoryTables

#: 2026-11-20T18:00:00Z, the beginning of an hour
START_MS = 1_795_197_600_000
START_HOUR = START_MS // HOUR_MS

Done = Callable[[Any, HadelayError | None], None]


class Received:
    """One answered poll."""

    def __init__(self, desk: Desk, poll: Poll, delivery: Delivery | None, error: HadelayError | None) -> None:
        self.at = desk.now
        self.poll, self.delivery, self.error = poll, delivery, error
        self.names: list[str] = []
        if delivery is not None:
            self.names = [desk.name_of(int(i)) for i in delivery.rows["first_id"]]

    def leases(self, *names: str) -> np.ndarray:
        d = self.delivery
        assert d is not None
        rows = np.zeros(len(d.indexes), LEASE)
        rows["term"], rows["seq"], rows["pos"] = d.term, d.seq, d.positions
        rows["hour"], rows["index"] = d.hours, d.indexes
        return rows if not names else rows[[self.names.index(name) for name in names]]


class Desk:
    def __init__(
        self, *, commit_ms: float = 2.0, sync: str = "commit", window: int = 65_536, start_ms: int = 0,
        preload_ms: int = 10_000, retention: RetentionConfig | None = None, sweep_ms: int = 10_000,
        checking: bool = True, store: Any = None,
    ) -> None:  # fmt: skip
        self.world = SimWorld(1, epoch_ms=START_MS + start_ms)
        self.runtime = SimRuntime(self.world, "n1")
        self.store = store if store is not None else MemoryHours()
        self.ledger = Ledger(0, self.store, MemoryTables(), MemoryNames())
        self.ledger.level = FEATURE_LEVEL
        dispatch = DispatchConfig(sync=sync, ready_window=window, preload_ms=preload_ms, sweep_ms=sweep_ms)  # type: ignore[arg-type]
        self.config = Config(dispatch=dispatch, retention=retention or RetentionConfig())
        self.commit_ms = commit_ms
        self.checking = checking
        #: Proposals that come while this is set are answered with it instead.
        self.refuse_with: HadelayError | None = None
        #: Commits nothing while set; what was proposed waits.
        self.stuck = False
        self._waiting: deque[tuple[int, bytes, Done]] = deque()
        self.term = 1
        self.index = 0
        #: (commit time, command type) of everything that went through the log.
        self.log: list[tuple[float, Command]] = []
        self.received: list[Received] = []
        self.names: dict[int, str] = {}
        self.damage: list[tuple[int, int, str]] = []
        self._counter = 0
        self.new_leader(lead=False)

    # the world

    @property
    def now(self) -> float:
        return self.world.wall_ms() - START_MS + self.world.now * 1000 % 1

    def run_to(self, ms: float) -> None:
        self.world.run_until(self.world.now + max(0.0, (ms - self.now) / 1000))

    def run(self, ms: float) -> None:
        self.run_to(self.now + ms)

    def suspend(self, ms: float) -> None:
        """Let time pass without the dispatcher, as on a suspended machine."""
        self.world.now += ms / 1000

    def until(self, condition: Callable[[], bool], ms: float = 60_000) -> None:
        self.world.run_until(self.world.now + ms / 1000, condition)
        assert condition()

    # leadership

    def new_leader(self, *, lead: bool = True, sync: str | None = None, clock_behind_ms: int = 0) -> None:
        """A node takes over: it has the state, and nothing else of its predecessor."""
        self.clock = ClusterClock("n1", ["n1"], floor_ms=0)
        start_ms = START_MS + int(self.now) - clock_behind_ms
        self.clock.observe_wall("n1", start_ms, self.runtime.monotonic(), now_ms=start_ms)
        self.delivery = DeliveryLoop(
            ledger=self.ledger,
            runtime=self.runtime,
            clock=self.clock,
            propose=self.propose,
            config=self.config,
            on_damage=lambda hour, index, what: self.damage.append((hour - START_HOUR, index, what)),
        )
        if lead:
            self.lead()

    def lead(self) -> None:
        self.term += 1
        self.clock.lead(0, self.runtime.monotonic())
        self.delivery.on_leader(self.term)

    def depose(self) -> None:
        self.delivery.on_follower()
        self.clock.follow(self.runtime.monotonic())

    @property
    def core(self) -> Dispatcher:
        """Of the leader that there is."""
        grants = self.delivery._grants
        assert grants is not None
        return grants.core

    def offers(self) -> list[Offer]:
        """On their way."""
        grants = self.delivery._grants
        return list(grants.offers.values()) if grants is not None else []

    def cluster_ms(self) -> int:
        return self.clock.read(self.runtime.monotonic()) - START_MS

    # the log

    def propose(self, command: bytes, done: Done) -> None:
        if self.refuse_with is not None:
            self.runtime.call_soon(done, None, self.refuse_with)
            return
        stamp = self.clock.read(self.runtime.monotonic())
        self._waiting.append((stamp, command, done))
        if not self.stuck:
            self.runtime.call_later(self.commit_ms / 1000, self._commit_first)

    def _commit_first(self) -> None:
        if self._waiting and not self.stuck:
            self._commit(*self._waiting.popleft())

    def unstick(self) -> None:
        self.stuck = False
        for _ in range(len(self._waiting)):
            self._commit_first()

    def forget_waiting(self) -> None:
        """What was proposed never reaches a majority."""
        self.stuck = False
        self._waiting.clear()

    def _commit(self, stamp: int, command: bytes, done: Done | None) -> Any:
        self.index += 1
        self.log.append((self.now, Command(command[0])))
        (result,) = apply_entry(self.ledger, self.index, self.term, encode_entry(stamp, [command]))
        self.clock.raise_floor(self.ledger.now_ms)
        if self.checking:
            ledgercheck.check(self.ledger)
            if self.delivery._grants is not None:
                memorycheck.check(self.core)
                cursorcheck.check(self.core)
                memorycheck.check_leases(self.delivery)
        if done is not None:
            done(result, None)
        return result

    def do(self, command: bytes) -> Any:
        """Propose, commit and apply at this instant, after what was proposed before (unless that is stuck)."""
        self.delivery.before_settlement()
        for _ in range(len(self._waiting)):
            self._commit_first()
        return self._commit(self.clock.read(self.runtime.monotonic()), command, None)

    def ask(self, command: bytes, done: Done) -> None:
        """As a node proposes what its users ask for."""
        self.delivery.before_settlement()
        self.propose(command, self.delivery.in_order(command, done))

    def kinds(self, since: float = 0.0) -> list[Command]:
        return [kind for at, kind in self.log if at >= since]

    # what users do

    def publish(
        self, *names: str, topic: str = "t", at: float | None = None, delay: int = 0, body: bytes = b"x",
        tags: Sequence[str] = (), ttl: int = 0, group: str | None = None,
    ) -> None:  # fmt: skip
        mask, meta = mask_of(tags), pack(Meta(tags=list(tags), group=group))
        one = Draft(topic, delay, True, mask, ttl, meta, body, group=None if group is None else hash_group(group))
        if at is not None:
            one = replace(one, when_ms=START_MS + int(at), relative=False)
        drafts = [one] * len(names)
        result = self.do(commands.encode_publish("n1", drafts))
        assert not result.codes.any()
        for name, message_id in zip(names, result.ids.tolist(), strict=True):
            self.names[message_id] = name

    def publish_many(
        self, count: int, *, topic: str = "t", at: float = 0.0, spread_ms: int = 0, tags: Sequence[str] = (),
        group: int | None = None,
    ) -> list[int]:  # fmt: skip
        step, mask, meta = spread_ms / count, mask_of(tags), pack(Meta(tags=list(tags)))
        one = Draft(topic, START_MS + int(at), False, mask, 0, meta, b"x", group=group)
        drafts = [replace(one, when_ms=START_MS + int(at + n * step)) for n in range(count)]
        ids: list[int] = []
        for first in range(0, count, 1000):
            ids += self.do(commands.encode_publish("n1", drafts[first : first + 1000])).ids.tolist()
        return ids

    def name_of(self, message_id: int) -> str:
        return self.names.get(message_id, f"{message_id:x}")

    def id_of(self, name: str) -> int:
        return next(i for i, known in self.names.items() if known == name)

    def poll(
        self, *topics: str, max: int = 10, wait: int = 60_000, lease: int = 30_000, consumer: str = "",
        request: bytes = b"", tags: Sequence[str] = (), any_tags: Sequence[str] = (), listed: bool = False,
        group_max: int = 1,
    ) -> Poll:  # fmt: skip
        if not consumer:
            self._counter += 1
            consumer = f"c{self._counter}"

        def done(delivery: Delivery | None, error: HadelayError | None) -> None:
            self.received.append(Received(self, poll, delivery, error))

        wanted = filter_of(tags, any_tags)
        poll = Poll(consumer, request, topics or ("t",), max, lease, wait, done, wanted, listed, group_max)
        self.delivery.poll(poll)
        return poll

    def answer(self, poll: Poll) -> Received | None:
        return next((r for r in reversed(self.received) if r.poll is poll), None)

    def ack(self, received: Received, *names: str) -> list[int]:
        return self.do(commands.encode_ack("n1", received.leases(*names))).outcomes.tolist()

    def nack(self, received: Received, *names: str, delay: int = -1) -> list[int]:
        return self.do(commands.encode_nack("n1", received.leases(*names), delay)).outcomes.tolist()

    def extend(self, received: Received, lease: int, *names: str) -> list[int]:
        return self.do(commands.encode_extend("n1", received.leases(*names), lease)).outcomes.tolist()

    def cancel(self, *names: str) -> list[int]:
        return self.do(commands.encode_cancel("n1", [self.id_of(name) for name in names])).outcomes.tolist()

    def reschedule(self, name: str, delay: int) -> int:
        command = commands.encode_reschedule("n1", delay, True, [self.id_of(name)])
        return int(self.do(command).outcomes[0])

    def put(self, topic: str = "t", **config: Any) -> None:
        """Settings of the topic; None takes one back."""
        assert isinstance(self.do(commands.encode_topic_put(topic, config)), Result)

    def consume(self, topic: str = "t", *, max: int = 100, ack: bool = True, tags: Sequence[str] = ()) -> None:
        """Poll for ever, acking at once."""

        def done(delivery: Delivery | None, error: HadelayError | None) -> None:
            received = Received(self, poll, delivery, error)
            self.received.append(received)
            if delivery is not None and len(delivery.indexes) and ack:
                self.runtime.call_soon(self.ack, received)
            if error is None:
                self.runtime.call_soon(partial(self.consume, topic, max=max, ack=ack, tags=tags))

        self._counter += 1
        poll = Poll(f"c{self._counter}", b"", (topic,), max, 30_000, 60_000, done, filter_of(tags, ()))
        self.delivery.poll(poll)

    def delivered(self) -> list[str]:
        return [name for received in self.received for name in received.names]
