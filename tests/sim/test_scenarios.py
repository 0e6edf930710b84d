"""Schedules made by hand: the few orders of events that are worth naming."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hadelay.core.commands import Draft
from hadelay.core.dispatch import Poll
from hadelay.errors import OutcomeUnknown
from hadelay.server.node import Node
from hadelay.server.recover import open_node
from hadelay.testing import invariants
from hadelay.testing.clients import Consumer
from hadelay.testing.cluster import HOUR_S, SimCluster
from hadelay.testing.disk import SimDisk
from hadelay.testing.network import SimNet
from hadelay.testing.run import check, settle
from hadelay.testing.runtime import SimRuntime, SimWorld
from hadelay.testing.tables import SimBackend


class Scene(SimCluster):
    """A cluster with a clock to wait by, one producer and one consumer."""

    def __init__(self, seed: int = 1, **more: Any) -> None:
        super().__init__(seed, **more)
        self.start_all()
        self.until(lambda: self.leader() is not None)

    def until(self, condition: Any, seconds: float = 15.0) -> None:
        self.world.run_until(self.world.now + seconds, condition)
        assert condition(), f"not within {seconds} s"

    @property
    def first(self) -> str:
        leader = self.leader()
        assert leader is not None
        return leader.name

    @property
    def others(self) -> list[str]:
        return [name for name in self.names if name != self.first]

    def publish(self, delay_ms: int = 0, at: str = "") -> int:
        """The id of a message that was answered as stored."""
        process = self.process(at or self.first)
        answers: list[tuple[Any, Any]] = []
        draft = Draft("orders", delay_ms, True, 0, 0, b"", b"body")
        assert process is not None
        self.door.call(
            process, lambda node, done: node.publish([draft], None, done), lambda r, e: answers.append((r, e))
        )
        self.until(lambda: bool(answers))
        assert answers[0][1] is None, answers[0][1]
        return int(answers[0][0].ids[0])

    def receive(self, wait_ms: int = 1000, consumer: str = "c") -> list[int]:
        node, got = self.leader(), []
        assert node is not None
        poll = Poll(consumer, b"", ("orders",), 100, 5000, wait_ms, lambda d, e: got.append((d, e)))
        node.runtime.call_soon(node.dispatcher.poll, poll)
        self.until(lambda: bool(got))
        delivery, error = got[0]
        assert error is None, error
        return [int(row["first_id"]) for row in delivery.rows]

    def state(self, message_id: int) -> str:
        return str(self.nodes()[0].state.describe(message_id).state)

    def cut_off(self, *names: str) -> None:
        for a in names:
            for b in self.names:
                if b not in names:
                    self.net.cut(a, b)
                    self.net.cut(b, a)

    def converge(self) -> None:
        self.net.heal()
        for name in self.names:
            self.start(name)
        self.until(lambda: len(self.nodes()) == len(self.names) and self.leader() is not None)
        self.world.run_for(2.0)
        settle(self)
        for violation in [*self.violations, *invariants.diverged(self)]:
            raise violation


def test_a_node_with_an_empty_disk_gives_no_vote_that_could_lose_a_message():
    """The message is on two disks, and one of these is replaced. The third node never saw it: the two of them are a
    majority by number, and would elect and forget."""
    scene = Scene(restart=False)
    holder, (wiped, behind) = scene.first, scene.others
    scene.cut_off(behind)
    ids = [scene.publish(HOUR_S * 1000) for _ in range(5)]
    scene.kill(holder)
    scene.wipe(wiped)
    scene.net.heal()
    scene.start(wiped)
    scene.world.run_for(10.0)
    assert scene.leader() is None
    assert all(node.raft.applied_index <= 10 for node in scene.nodes())
    scene.start(holder)
    scene.until(lambda: scene.leader() is not None)
    scene.converge()
    assert [scene.state(i) for i in ids] == ["scheduled"] * 5
    # Now that it has everything, it counts again: it and `behind` go on without the holder.
    scene.kill(holder)
    scene.until(lambda: scene.leader() is not None and scene.first != holder)
    scene.publish()


def test_the_power_fails_everywhere_right_after_the_answer():
    for seed in range(5):
        scene = Scene(seed)
        ids = [scene.publish(HOUR_S * 1000) for _ in range(4)]
        scene.power_cut(*scene.names)
        scene.converge()
        assert [scene.state(i) for i in ids] == ["scheduled"] * 4


def test_twenty_five_hours_on_the_leaders_clock_deliver_nothing_early():
    scene = Scene()
    soon, later = scene.publish(2_000), scene.publish(24 * HOUR_S * 1000)
    started = scene.world.now
    scene.step_clock(scene.first, 25 * HOUR_S * 1000)
    assert scene.receive(wait_ms=1500) == []
    assert scene.receive(wait_ms=3000) == [soon]
    assert scene.world.now - started == pytest.approx(2.0, abs=0.1)
    scene.kill(scene.first)
    scene.until(lambda: scene.leader() is not None)
    assert scene.receive(wait_ms=1000) == []
    assert scene.state(later) == "scheduled"


def test_a_leader_that_was_paused_over_an_election_hands_out_nothing_twice():
    scene = Scene()
    old = scene.process(scene.first)
    assert old is not None
    ids = {scene.publish(800) for _ in range(3)}
    node, late = old.node, []
    assert isinstance(node, Node)
    node.dispatcher.poll(Poll("old", b"", ("orders",), 10, 5000, 30_000, lambda d, e: late.append((d, e))))
    old.runtime.pause()
    scene.until(lambda: scene.leader() is not None and scene.first != node.name)
    got: set[int] = set()
    while got != ids:
        answer = scene.receive(wait_ms=3000)
        assert answer
        assert not got & set(answer)
        got |= set(answer)
    old.runtime.resume()
    scene.world.run_for(2.0)
    assert [d for d, e in late if d is not None and len(d.rows)] == []
    scene.converge()


def test_what_interval_mode_repeats_is_marked():
    """The leader hands out, and dies before the hand-out is replicated."""
    scene = Scene(sync="interval", restart=False)
    message = scene.publish(500)
    scene.world.run_for(0.6)
    scene.cut_off(scene.first)
    assert scene.receive() == [message]
    dead = scene.first
    scene.kill(dead)
    scene.net.heal()
    scene.until(lambda: scene.leader() is not None and scene.first != dead)
    node, got = scene.leader(), []
    assert node is not None
    node.dispatcher.poll(Poll("c2", b"", ("orders",), 10, 5000, 3000, lambda d, e: got.append(d)))
    scene.until(lambda: bool(got))
    assert [int(i) for i in got[0].rows["first_id"]] == [message]
    assert got[0].redelivered.all()


def test_an_idle_cluster_writes_nothing():
    scene = Scene()
    scene.publish()
    assert len(scene.receive()) == 1
    scene.world.run_for(10.0)
    before = [(node.raft.last_index, node.raft.journal.size_bytes) for node in scene.nodes()]
    scene.world.run_for(60.0)
    assert [(node.raft.last_index, node.raft.journal.size_bytes) for node in scene.nodes()] == before


def test_two_groups_share_a_process():
    world = SimWorld(1)
    nets = [SimNet(world), SimNet(world)]
    template = SimCluster(1, world=world)
    nodes: dict[tuple[int, str], Node] = {}

    def boot(name: str, disk: SimDisk, runtime: SimRuntime) -> None:
        for group in (0, 1):
            template.group = group
            node = open_node(
                template.config(name),
                disk,
                nets[group].network(name, runtime),
                runtime,
                lambda error: pytest.fail(str(error)),
                backend=lambda path: SimBackend(disk, path),
            )
            node.start()
            nodes[group, name] = node

    for name in template.names:
        disk = SimDisk(random.Random(name))
        runtime = SimRuntime(world, name, disk)
        runtime.call_soon(boot, name, disk, runtime)
    world.run_for(3.0)
    leaders = [next(n for (g, _), n in nodes.items() if g == group and n.leading) for group in (0, 1)]
    ids: dict[int, int] = {}
    for group, leader in enumerate(leaders):
        draft = Draft("t", 0, True, 0, 0, b"", b"x")
        leader.publish([draft], None, lambda r, e, group=group: ids.__setitem__(group, r.ids[0]))
    world.run_for(1.0)
    assert {group: i >> 56 for group, i in ids.items()} == {0: 0, 1: 1}
    for (group, _), node in nodes.items():
        assert node.state.describe(ids[group]) is not None
        assert node.state.describe(ids[1 - group]) is None


def test_the_checks_run_on_a_quiet_cluster():
    scene = Scene()
    consumer = Consumer(scene, "c0")
    consumer.start()
    consumer.good = True
    for _ in range(3):
        scene.publish(100)
    scene.world.run_for(3.0)
    consumer.stopped = True
    scene.history.hand_outs.clear()  # its bodies are not the history's
    settle(scene)
    check(scene)


def test_a_node_that_restarts_does_not_take_the_time_from_what_waited() -> None:
    """Found by seed 18. Here everything that comes to it waits 0.7 s, from the moment its links are up."""
    scene = Scene()
    scene.publish()
    name = scene.others[0]
    scene.kill(name)
    scene.start(name)
    scene.until(lambda: any(process.links for process in scene.net.nodes.values() if process.name == name))
    for other in scene.names:
        if other != name:
            scene.net.cut(other, name)
    scene.world.run_for(0.7)
    scene.net.heal()
    node, leader = scene.process(name), scene.leader()
    assert node is not None
    assert node.node is not None
    assert leader is not None
    clock = node.node.clock
    assert not clock.ready
    scene.until(lambda: clock.ready)
    error_ms = clock.exact(node.runtime.monotonic()) - leader.clock.exact(leader.runtime.monotonic())
    assert abs(error_ms) < 5


def test_a_leader_that_slept_hands_out_nothing_of_what_others_had_meanwhile():
    """Granted ahead of its time; before that comes its leader is stopped, for longer than the lease."""
    scene = Scene(restart=False)
    for _ in range(5):  # how long grants take
        scene.publish()
        scene.receive()
    asleep = scene.process(scene.first)
    leader = asleep.node
    message = scene.publish(500)
    got: list[tuple[Any, Any]] = []
    poll = Poll("early", b"r", ("orders",), 1, 700, 5000, lambda d, e: got.append((d, e)))
    leader.runtime.call_soon(leader.dispatcher.poll, poll)
    scene.until(lambda: bool(leader.dispatcher._term.early))
    asleep.runtime.pause()
    scene.until(lambda: scene.leader() is not leader)
    received = scene.receive(4000)
    assert received == [message]
    asleep.runtime.resume()
    scene.until(lambda: bool(got))
    ((delivery, error),) = got
    assert delivery is None, "the lease was over, and somebody else has the message"
    assert isinstance(error, OutcomeUnknown)
    scene.converge()
