"""Which voters are left without a node, as a node sees it."""

from __future__ import annotations

from dataclasses import replace

from chaos.sim.cluster import SimCluster
from hadelay.errors import HadelayError, Overloaded
from hadelay.server.node import Node
from hadelay.server.service.cluster import others_left


def test_a_node_that_is_not_admitted_does_not_count_as_left() -> None:
    cluster = SimCluster(1, names=("n1", "n2", "n3"))
    cluster.start_all()
    world = cluster.world

    def node(name: str) -> Node:
        return next(each for each in cluster.nodes() if each.name == name)

    world.run_until(world.now + 30, lambda: others_left(node("n1"), "n3") == ["n1", "n2"])
    assert others_left(node("n1"), "n3") == ["n1", "n2"]
    cluster.kill("n3")
    cluster.wipe("n2")
    cluster.start("n2")
    world.run_for(5.0)
    assert node("n1").peers.live("n2")
    assert others_left(node("n1"), "n3") == []
    cluster.start("n3")
    world.run_until(world.now + 30, lambda: others_left(node("n1"), "n3") == ["n1", "n2"])
    assert others_left(node("n1"), "n3") == ["n1", "n2"]


def test_a_drain_that_cannot_hand_over_ends() -> None:
    """The node goes on to lead, and takes publishes and receives."""
    cluster = SimCluster(1, restart=False)
    cluster.start_all()
    cluster.world.run_until(cluster.world.now + 10, lambda: cluster.leader() is not None)
    leader, answers = cluster.leader(), list[HadelayError | None]()
    assert leader is not None
    cluster.world.run_for(1.0)
    leader.raft.config = replace(leader.raft.config, transfer_ms=100)
    for name in cluster.names:
        cluster.net.cut(leader.name, name)
    leader.leadership.drain(True, answers.append)
    cluster.world.run_until(cluster.world.now + 10, lambda: bool(answers))
    assert isinstance(answers[0], Overloaded)
    assert not leader.raft.elections.draining


def test_a_drain_that_is_asked_for_twice_holds() -> None:
    """The repetition is refused while the first one hands over; the first is answered, and the node is drained."""
    cluster = SimCluster(1, restart=False)
    cluster.start_all()
    cluster.world.run_until(cluster.world.now + 10, lambda: cluster.leader() is not None)
    leader, answers = cluster.leader(), list[tuple[str, HadelayError | None]]()
    assert leader is not None
    cluster.world.run_for(1.0)
    for name in ("first", "second"):
        leader.leadership.drain(True, lambda error, name=name: answers.append((name, error)))  # type: ignore[misc]
    cluster.world.run_until(cluster.world.now + 10, lambda: len(answers) == 2)
    found = dict(answers)
    assert isinstance(found["second"], Overloaded)
    assert found["first"] is None
    assert leader.leadership.drained
