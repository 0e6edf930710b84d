"""The simulated network: TCP as Raft sees it."""

from __future__ import annotations

from chaos.sim.network import NetworkProfile, SimNet, SimNetwork
from chaos.sim.runtime import SimRuntime, SimWorld


class Ear:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def link_up(self, peer: str) -> None:
        self.heard.append(("up", peer))

    def link_down(self, peer: str, reset: bool) -> None:
        self.heard.append(("down", peer, reset))

    def frame(self, peer: str, data: bytes) -> None:
        self.heard.append(data)


def pair(seed: int = 1, **profile: float) -> tuple[SimWorld, SimNet, list[SimNetwork], list[Ear]]:
    world = SimWorld(seed)
    net = SimNet(world, NetworkProfile(**profile))  # type: ignore[arg-type]
    networks, ears = [], []
    for name in ("a", "b"):
        network, ear = net.network(name, SimRuntime(world, name)), Ear()
        network.start(ear)
        networks.append(network)
        ears.append(ear)
    world.run_for(1.0)
    assert ears[0].heard == [("up", "b")]
    assert ears[1].heard == [("up", "a")]
    for ear in ears:
        ear.heard.clear()
    return world, net, networks, ears


def test_frames_arrive_in_order_and_whole():
    world, _, (a, _), (_, b) = pair(hiccup=0.5)
    frames = [b"%d" % i for i in range(100)]
    for frame in frames:
        assert a.send("b", [frame[:1], frame[1:]])
    assert a.buffered("b") == sum(map(len, frames))
    world.run_for(1.0)
    assert b.heard == frames
    assert a.buffered("b") == 0
    assert not a.send("c", b"")


def test_a_cut_holds_frames_back_until_it_heals():
    world, net, (a, b), (one, two) = pair(timeout_s=(60, 60))
    net.cut("a", "b")
    a.send("b", b"held")
    b.send("a", b"through")
    world.run_for(5.0)
    assert (one.heard, two.heard) == ([b"through"], [])
    net.heal()
    world.run_for(1.0)
    assert two.heard == [b"held"]


def test_a_long_cut_ends_the_connection_and_loses_what_was_on_its_way():
    world, net, (a, _), (one, two) = pair()
    net.cut("a", "b")
    a.send("b", b"lost")
    world.run_for(20.0)
    assert (one.heard, two.heard) == ([("down", "b", False)], [("down", "a", False)])
    net.heal()
    world.run_for(2.0)
    assert (one.heard[1:], two.heard[1:]) == ([("up", "b")], [("up", "a")])


def test_a_reset_loses_frames_and_the_link_comes_back():
    world, net, (a, _), (one, two) = pair()
    a.send("b", b"lost")
    net.reset("a", "b")
    world.run_for(2.0)
    assert two.heard == [("down", "a", True), ("up", "a")]
    assert one.heard == [("down", "b", True), ("up", "b")]


def test_a_process_that_ends_resets_its_links():
    world, _, (a, _), (_, two) = pair()
    a.send("b", b"last words")
    a.close()
    world.run_for(1.0)
    assert two.heard == [b"last words", ("down", "a", True)]


def test_a_restarted_process_replaces_a_half_open_connection():
    world, net, (a, _), (_, two) = pair(timeout_s=(50, 60))
    net.cut("a", "b")
    a.close()  # b does not learn of it
    world.run_for(3.0)
    assert two.heard == []
    net.heal()
    net.network("a", SimRuntime(world, "a")).start(Ear())
    world.run_for(1.0)
    assert two.heard == [("down", "a", False), ("up", "a")]


def test_a_paused_process_reads_what_arrived_before_its_link_ended():
    """The link ends before the pause does. Both ends fall due while hours pass, so they run at one instant."""
    world, net, (a, b), (_, two) = pair(timeout_s=(1.0, 1.0))
    b.runtime.pause()
    world.after(2.0, b.runtime.resume)
    a.send("b", b"heartbeat")
    world.run_for(0.1)
    net.cut("b", "a")
    world.now += 3600.0
    world.run_for(0.0)
    assert two.heard == [b"heartbeat", ("down", "a", False)]


def test_urgent_frames_pass_bulk_that_waits():
    world, net, (a, _), (_, two) = pair()
    net.slow["a", "b"] = 1e6
    for _ in range(4):
        a.send("b", bytes(1 << 20))
    a.send("b", b"heartbeat", urgent=True)
    world.run_for(0.5)
    assert two.heard == [b"heartbeat"]
    world.run_for(10.0)
    assert [len(f) for f in two.heard if isinstance(f, bytes)] == [9] + [1 << 20] * 4
