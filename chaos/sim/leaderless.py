"""Check that the cluster is never without a leader for long, while a majority of voters runs and is connected."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

from chaos.sim.network import SimNet
from hadelay.raft.node import RaftNode

#: Limit of the time without a leader, in seconds: enough for some election timeouts and split votes, and a second for
#: nodes that let others campaign first.
LEADERLESS_S = 3.0
#: Limit, in seconds, of the time between two calls of `look`; a longer time counts as a suspension of all machines.
_PAUSE_S = 1.0


class Leaderless:
    """Checks one cluster, which calls `look` in a loop."""

    def __init__(self, net: SimNet, decide: Callable[..., None]) -> None:
        """decide: counts a checked case of a promise and notes a violation, see `Machines.decide`."""
        self._net, self._decide = net, decide
        #: Nodes fit to lead at the last call of `look`; a restarted node counts as another node.
        self._fit: list[RaftNode] = []
        #: `_since`: time since which the same nodes are fit and have no leader. `_looked`: time of the last call of
        #: `look`.
        self._since = self._looked = 0.0
        #: Longest time without a leader so far, in ms.
        self.longest_ms = 0

    def look(self, rafts: list[RaftNode], undisturbed: Callable[[], list[RaftNode]]) -> None:
        """Check that a majority of the voters that runs undisturbed, with all links between its nodes, soon has a
        leader. rafts: all running nodes. undisturbed: returns those that may lead and that no fault slows down."""
        now = self._net.world.now
        paused, self._looked = now - self._looked > _PAUSE_S, now
        # check first whether a node leads: this is cheap, and nearly always true
        led = any(raft.is_leader for raft in rafts)
        fit = [] if led else undisturbed()
        if led or fit != self._fit or paused or not self._can_elect(fit):
            self._fit, self._since = fit, now
            return
        self.longest_ms = max(self.longest_ms, round((now - self._since) * 1000))
        names = [raft.name for raft in fit]
        text = f"{names} run, are connected, and have had no leader for {now - self._since:.2f} s"
        self._decide("leaderless", now - self._since > LEADERLESS_S, text)

    def _can_elect(self, fit: list[RaftNode]) -> bool:
        """Whether the nodes are a majority of the voters that all of them know, and are connected with one another."""
        voters = {frozenset(raft.membership.voters) for raft in fit}
        known = voters.pop() if len(voters) == 1 else frozenset()
        if not known or 2 * sum(raft.name in known for raft in fit) <= len(known):
            return False
        return all(self._linked(one, two) for one, two in combinations(fit, 2))

    def _linked(self, one: RaftNode, two: RaftNode) -> bool:
        """Whether frames pass between the nodes in both directions, at the usual speed."""
        net, ways = self._net, ((one.name, two.name), (two.name, one.name))
        if any(way in net.cuts or way in net.slow for way in ways):
            return False
        return one.membership.connected(two.name) and two.membership.connected(one.name)
