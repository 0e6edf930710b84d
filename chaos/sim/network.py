"""Network of a simulated world: connections that behave like TCP connections.

Frames of one direction arrive in order and whole. A cut holds them back (they are retransmitted once it heals) until
either end gives up; only the end of a connection loses them. The two ends learn of that end at different times, or,
across a cut, long after: half-open connections exist. A crashed process resets its connections; a paused one keeps
them and reads nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chaos.sim.runtime import SimRuntime, SimWorld
from hadelay.platform.network import MAX_FRAME, Buffer, Receiver

#: Size of a socket's buffer, in bytes: an urgent frame cannot overtake the bytes in it.
_SOCKET_BUFFER = 64 << 10


@dataclass
class NetworkProfile:
    """Delays and losses of the links; the nemesis changes them during the run."""

    delay_s: tuple[float, float] = (0.0001, 0.002)
    #: Share of frames with an extra delay.
    hiccup: float = 0.002
    #: Longest extra delay, in seconds.
    hiccup_s: float = 0.3
    bytes_per_s: float = 100e6
    #: Range of the time, in seconds, after which an end closes a silent connection.
    timeout_s: tuple[float, float] = (2.0, 8.0)
    retry_s: tuple[float, float] = (0.05, 0.4)
    #: Limit of the bytes in flight in one direction; `send` refuses more.
    buffer_bytes: int = 32 << 20


class Observer(Protocol):
    """Observer of the network: it is called about every frame and every reset of all processes."""

    def sent(self, process: SimNetwork, peer: str, data: bytes) -> None: ...

    def arrives(self, process: SimNetwork, peer: str, data: bytes) -> None:
        """Called before the process handles the frame."""

    def received(self, process: SimNetwork, peer: str, data: bytes) -> None:
        """Called after the process has handled the frame."""

    def was_reset(self, process: SimNetwork, peer: str) -> None: ...


class _Connection:
    """A connection between two processes, until both ends have lost it. `queued[a]`: heap of frames that a sent and b
    has not received."""

    __slots__ = ("arrival", "in_flight", "queued")

    def __init__(self, a: str, b: str) -> None:
        self.queued: dict[str, list[tuple[float, int, bytes]]] = {a: [], b: []}
        self.in_flight = {a: 0, b: 0}
        self.arrival = {a: 0.0, b: 0.0}


@dataclass(eq=False)
class SimNetwork:
    """Network of one process (platform/network.py): the process's open connections, by peer."""

    net: SimNet
    name: str
    runtime: SimRuntime
    receiver: Receiver = field(init=False)
    links: dict[str, _Connection] = field(default_factory=dict)
    #: Peers that this process connects to; None: all.
    members: frozenset[str] | None = None
    refused: Counter[str] = field(default_factory=Counter)

    def start(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.net.join(self)

    def send(self, peer: str, frame: Buffer | Sequence[Buffer], urgent: bool = False) -> bool:
        connection = self.links.get(peer)
        if connection is None:
            return False
        data = bytes(frame) if isinstance(frame, (bytes, bytearray, memoryview)) else b"".join(frame)
        assert len(data) <= MAX_FRAME
        if connection.in_flight[self.name] + len(data) > self.net.profile.buffer_bytes:
            return False
        if self.net.observer is not None:
            self.net.observer.sent(self, peer, data)
        self.net.carry(connection, self.name, peer, data, urgent)
        return True

    def frame(self, peer: str, data: bytes) -> None:
        if self.net.observer is not None:
            self.net.observer.arrives(self, peer, data)
        self.receiver.frame(peer, data)
        if self.net.observer is not None:
            self.net.observer.received(self, peer, data)

    def link_down(self, peer: str, reset: bool) -> None:
        if reset and self.net.observer is not None:
            self.net.observer.was_reset(self, peer)
        self.receiver.link_down(peer, reset)

    def buffered(self, peer: str) -> int:
        connection = self.links.get(peer)
        return connection.in_flight[self.name] if connection else 0

    def set_members(self, peers: Mapping[str, str]) -> None:
        self.members = frozenset(peers)
        for peer in sorted(self.links):
            if peer not in self.members:
                self.net.drop(self.name, peer)

    def wants(self, peer: str) -> bool:
        return self.members is None or peer in self.members

    def disconnect(self, peer: str) -> None:
        self.net.drop(self.name, peer)

    def close(self) -> None:
        self.net.leave(self)


class SimNet:
    """All connections between the processes of a world."""

    def __init__(self, world: SimWorld, profile: NetworkProfile | None = None) -> None:
        self.world = world
        self.profile = profile or NetworkProfile()
        self.nodes: dict[str, SimNetwork] = {}
        #: Directions that are cut: (from, to).
        self.cuts: set[tuple[str, str]] = set()
        #: Slow directions: (from, to) → bytes per second.
        self.slow: dict[tuple[str, str], float] = {}
        self.frames = 0
        self.observer: Observer | None = None
        self._sent = 0

    def network(self, name: str, runtime: SimRuntime) -> SimNetwork:
        return SimNetwork(self, name, runtime)

    def join(self, node: SimNetwork) -> None:
        self.nodes[node.name] = node
        for peer in sorted(self.nodes):
            if peer != node.name:
                self._dial_later(node.name, peer)

    def leave(self, node: SimNetwork) -> None:
        """Close the connections of a process that ended: its peers see connection resets."""
        if self.nodes.get(node.name) is node:
            del self.nodes[node.name]
            for peer in sorted(node.links):
                self._lose_end(node.links.pop(peer), node.name, peer, reset=True)

    def _dial_later(self, a: str, b: str) -> None:
        self.world.after(self.world.random.uniform(*self.profile.retry_s), self._dial, a, b)

    def _dial(self, a: str, b: str) -> None:
        """Connect a to b, if the network is not cut; the new connection replaces an older one between a and b."""
        one, two = self.nodes.get(a), self.nodes.get(b)
        if one is None or two is None or b in one.links:
            return
        strange = not (one.wants(b) and two.wants(a))
        if strange or (a, b) in self.cuts or (b, a) in self.cuts or one.runtime.paused or two.runtime.paused:
            self._dial_later(a, b)
            return
        old = two.links.pop(a, None)
        if old is not None:
            self._tell_down(two, a, False)
        connection = _Connection(a, b)
        for node, peer in ((one, b), (two, a)):
            node.links[peer] = connection
            self.world.at(self.world.now, node.receiver.link_up, peer, owner=node.runtime)

    def carry(self, connection: _Connection, a: str, b: str, data: bytes, urgent: bool) -> None:
        world, profile = self.world, self.profile
        delay = world.random.uniform(*profile.delay_s)
        if profile.hiccup and world.random.random() < profile.hiccup:
            delay += world.random.uniform(0, profile.hiccup_s)
        rate = self.slow.get((a, b), profile.bytes_per_s)
        if urgent and connection.in_flight[a] > _SOCKET_BUFFER:
            at = world.now + delay + _SOCKET_BUFFER / rate
        else:
            at = connection.arrival[a] = max(connection.arrival[a], world.now + delay) + len(data) / rate
        connection.in_flight[a] += len(data)
        self._sent += 1
        heapq.heappush(connection.queued[a], (at, self._sent, data))
        world.at(at, self._arrive, connection, a, b)

    def _arrive(self, connection: _Connection, a: str, b: str) -> None:
        """Deliver the frames that are due. While the direction is cut, frames stay in the queue; `heal` then calls this
        method again."""
        queue, node = connection.queued[a], self.nodes.get(b)
        while queue and queue[0][0] <= self.world.now and (a, b) not in self.cuts:
            _, _, data = heapq.heappop(queue)
            connection.in_flight[a] -= len(data)
            if node is not None and node.links.get(a) is connection:
                self.frames += 1
                self.world.record(data)
                self.world.run_as(node.runtime, node.frame, a, data)

    def _tell_down(self, node: SimNetwork, peer: str, reset: bool) -> None:
        self.world.at(self.world.now, node.link_down, peer, reset, owner=node.runtime)

    def drop(self, a: str, b: str) -> None:
        """Close the connection from a's end; both processes dial again."""
        node = self.nodes.get(a)
        connection = node.links.pop(b, None) if node is not None else None
        if node is None or connection is None:
            return
        self._tell_down(node, b, False)
        self._lose_end(connection, a, b, reset=True)
        self._dial_later(a, b)

    def reset(self, a: str, b: str) -> None:
        """Reset the connection from outside: both ends see the reset, and frames under way are lost."""
        for one, two in ((a, b), (b, a)):
            node = self.nodes.get(one)
            if node is not None and node.links.pop(two, None) is not None:
                self._tell_down(node, two, True)
                self._dial_later(one, two)

    def _lose_end(self, connection: _Connection, gone: str, peer: str, *, reset: bool) -> None:
        """Tell `peer` that the end `gone` has closed: by a reset, or, while the network is cut, by a timeout."""
        connection.queued[peer].clear()
        delay = self.world.random.uniform(*self.profile.delay_s)
        if (gone, peer) in self.cuts:
            delay = self.world.random.uniform(*self.profile.timeout_s)
            reset = False
        at = max(connection.arrival[gone], self.world.now + delay)
        self.world.at(at, self._end_lost, connection, peer, gone, reset)

    def _end_lost(self, connection: _Connection, name: str, peer: str, reset: bool) -> None:
        node = self.nodes.get(name)
        if node is not None and node.links.get(peer) is connection:
            del node.links[peer]
            self._tell_down(node, peer, reset)
            self._dial_later(name, peer)

    def cut(self, a: str, b: str) -> None:
        """Cut the network from a to b, in this direction only; both ends close the connection after a while."""
        if (a, b) in self.cuts:
            return
        self.cuts.add((a, b))
        for one, two in ((a, b), (b, a)):
            node = self.nodes.get(one)
            if node is not None and two in node.links:
                wait = self.world.random.uniform(*self.profile.timeout_s)
                self.world.after(wait, self._give_up, node.links[two], one, two, (a, b))

    def _give_up(self, connection: _Connection, name: str, peer: str, cut: tuple[str, str]) -> None:
        if cut in self.cuts:
            self._end_lost(connection, name, peer, False)

    def heal(self) -> None:
        """End all cuts and slow links; frames that they delayed arrive now."""
        self.slow.clear()
        self.mend(*sorted(self.cuts))

    def mend(self, *healed: tuple[str, str]) -> None:
        """End these cuts, given as (from, to)."""
        self.cuts -= set(healed)
        for a, b in healed:
            node = self.nodes.get(a)
            connection = node.links.get(b) if node is not None else None
            if connection is not None:
                self.world.after(self.world.random.uniform(0.0, 0.2), self._arrive, connection, a, b)
