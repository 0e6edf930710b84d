"""Operator of the simulated world, who changes the members of the cluster."""

from collections.abc import Callable
from typing import Any

from chaos.sim.cluster import SimCluster
from chaos.sim.door import Client
from hadelay.api.service import Actor
from hadelay.errors import HadelayError, NotFound
from hadelay.server.service.node import NodeService

#: Timeout of a member change, in seconds: longer than a node retries a change that cannot be made yet.
_CHANGE_TIMEOUT_S = 8.0
#: Range of the pause between two requests for a member change, in seconds.
_ASK_AGAIN_S = (0.1, 0.6)
#: Maximum number of members of a simulated cluster.
_MOST_MEMBERS = 5


class Operator(Client):
    """Operator who adds, removes and replaces members, one change at a time, and repeats each request until the answer
    is definite. least: smallest number of members."""

    cluster: SimCluster

    def __init__(self, cluster: SimCluster, least: int) -> None:
        super().__init__(cluster, "operator")
        self.least = least
        #: Number of member changes begun so far.
        self.begun = 0
        self._made = 0

    def strike(self) -> None:
        """Begin a member change, unless one is under way (`cluster.changing`)."""
        cluster, names = self.cluster, self.cluster.names
        if cluster.changing:
            return
        kinds = ["replace"] if len(names) > 1 else []
        kinds += ["add"] * 2 if len(names) < _MOST_MEMBERS else []
        kinds += ["remove"] * 2 if len(names) > self.least else []
        kind, other = self.random.choice(kinds), self.random.choice(names)
        if kind == "remove":
            self._begin("remove", other, lambda: None)
            return
        back = sorted(cluster.retired)
        self._made += 1
        fresh = self.random.choice(back) if back and self.random.random() < 0.4 else f"m{self._made}"
        if kind == "replace" and self.random.random() < 0.5:
            self.note(f"{other} is dead, and {fresh} shall take its place")
            cluster.kill(other)
        then = (lambda: self._begin("remove", other, lambda: None)) if kind == "replace" else (lambda: None)
        cluster.join(fresh)
        self._begin("add", fresh, then)

    def _begin(self, op: str, name: str, then: Callable[[], None]) -> None:
        self.cluster.changing = f"{op} {name}"
        self.begun += 1
        self.note(self.cluster.changing)
        self._ask(op, name, then)

    def _ask(self, op: str, name: str, then: Callable[[], None]) -> None:
        async def change(service: NodeService) -> None:
            cluster, by = service.cluster, Actor()
            await (cluster.add_member(name, f"{name}:1", by) if op == "add" else cluster.remove_member(name, by))

        self.ask(change, lambda result, error: self._answered(op, name, then, error), _CHANGE_TIMEOUT_S)

    def _answered(self, op: str, name: str, then: Callable[[], None], error: HadelayError | None) -> None:
        if op == "add" and (error is None or "a member already" in str(error)):
            self._wait_for_vote(name, then)
        elif op == "remove" and (error is None or isinstance(error, NotFound)):
            self.cluster.history.count("a member was removed")
            self.note(f"{name} is removed")
            self.cluster.retire(name)
            self._over(then)
        else:
            self.cluster.history.count("a change of members was refused")
            self._later(self._ask, op, name, then)

    def _wait_for_vote(self, name: str, then: Callable[[], None]) -> None:
        leader = self.cluster.leader()
        membership = leader.raft.membership if leader is not None else None
        if membership is not None and membership.committed and name in membership.voters:
            self.cluster.history.count("a member was added")
            self.note(f"{name} votes")
            self._over(then)
        else:
            self._later(self._wait_for_vote, name, then)

    def _over(self, then: Callable[[], None]) -> None:
        self.cluster.changing = ""
        then()

    def _later(self, fn: Callable[..., None], *args: Any) -> None:
        self.world.after(self.random.uniform(*_ASK_AGAIN_S), fn, *args)
