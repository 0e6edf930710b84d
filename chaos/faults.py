"""Faults: one context manager per kind. Leaving the context heals the fault, whatever happened inside."""

import errno
import random
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from http.client import HTTPException

from chaos.cluster import Cluster
from chaos.disks import METADATA_FLUSHED, NOTHING_FLUSHED
from chaos.namespaces import Network
from chaos.scenario import KINDS, Fault
from chaos.tools import authorization

Strike = Callable[[Cluster, list[str], Fault], Iterator[None]]
Step = Callable[[Cluster, str, Fault], None]
_TRANSFER_S = 5.0
#: Kind of node that reaches a crash point (failpoints.Reached) → target of the crash; for other kinds, the fault's own
#: `target`.
_COME_BY = {"some": "all", "leader": "leader", "follower": "follower", "election": "all", "empty": "random"}
#: Kind of node that reaches a crash point while it starts → operations on the node before chaos arms the crash point
#: and starts the node.
_BEFORE = {"start": ("kill",), "empty": ("kill", "empty")}


def strike(cluster: Cluster, nodes: list[str], fault: Fault) -> AbstractContextManager[None]:
    """Context manager during which `fault` is in force on `nodes`."""
    return contextmanager(_STRIKES[fault.kind])(cluster, nodes, fault)


def choose(fault: Fault, names: list[str], leader: str | None, busy: set[str], draw: random.Random) -> list[str]:
    """Choose the nodes that a fault hits, from the nodes without another fault."""
    free = [name for name in names if name not in busy]
    draw.shuffle(free)
    if leader in free:  # put the leader first, so that a fault that hits a majority of the nodes hits the leader
        free.remove(leader)
        free.insert(0, leader)
    minority, majority = (len(names) - 1) // 2, len(names) // 2 + 1
    target = _COME_BY.get(fault.reached, fault.target)
    if target == "leader":
        return free[:1]
    if target == "follower":
        return [name for name in free if name != leader][:1]
    if target == "random":
        return draw.sample(free, min(1, len(free)))
    if target in ("minority", "majority", "all"):
        return free[: {"minority": minority, "majority": majority, "all": len(names)}[target]]
    return [target] if target in free else []


def _each(hit: Step, *heal: Step) -> Strike:
    """Fault that runs the step `hit` on each node in turn, and heals the nodes in reverse order with the steps `heal`.
    If a step fails, the other nodes are still healed."""

    def strike(cluster: Cluster, nodes: list[str], fault: Fault) -> Iterator[None]:
        with ExitStack() as healing:
            for name in nodes:
                for step in reversed(heal):
                    healing.callback(step, cluster, name, fault)
                hit(cluster, name, fault)
            yield

    return strike


def _do(*operations: str) -> Step:
    def step(cluster: Cluster, name: str, fault: Fault) -> None:
        for what in operations:
            cluster.do(what, name)

    return step


def _ask_for_transfer(cluster: Cluster, nodes: list[str]) -> None:
    # Ignore a refused or unanswered transfer of leadership: only its effect on the cluster matters.
    def ask(name: str) -> None:
        url = f"{cluster.urls[name]}/v1/cluster:transfer-leader"
        head = {"Content-Type": "application/json"} | authorization()
        with suppress(OSError, HTTPException):
            urllib.request.urlopen(urllib.request.Request(url, b"{}", head), timeout=_TRANSFER_S).close()

    for name in nodes[:1]:
        threading.Thread(target=ask, args=(name,)).start()


def _transfer(cluster: Cluster, nodes: list[str], fault: Fault) -> Iterator[None]:
    _ask_for_transfer(cluster, nodes)
    yield


def _arm(cluster: Cluster, name: str, fault: Fault) -> None:
    assert fault.at is not None
    _do(*_BEFORE.get(fault.reached, ()))(cluster, name, fault)
    cluster.arm(name, fault.at)
    if fault.reached in _BEFORE:
        cluster.do("start", name)


def _disarm(cluster: Cluster, name: str, fault: Fault) -> None:
    cluster.arm(name, "")


def _crash(cluster: Cluster, nodes: list[str], fault: Fault) -> Iterator[None]:
    with contextmanager(_each(_arm, _disarm, _do("start")))(cluster, nodes, fault):
        if fault.reached == "election":
            _ask_for_transfer(cluster, nodes)
        yield


def _on_network(hit: Callable[[Network, str, Fault], None], heal: str) -> Strike:
    def network(cluster: Cluster) -> Network:
        assert cluster.network
        return cluster.network

    return _each(
        lambda cluster, name, fault: hit(network(cluster), name, fault),
        lambda cluster, name, fault: getattr(network(cluster), heal)(name),
    )


def _shaping(*discipline: str) -> Strike:
    def shape(network: Network, name: str, fault: Fault) -> None:
        network.shape(name, *(word.format(fault.amount()) for word in discipline))

    return _on_network(shape, "unshape")


def _control(values: Callable[[Fault], dict[str, int]]) -> Step:
    return lambda cluster, name, fault: cluster.control(name, **values(fault))


_JUMP, _RIGHT = _control(lambda fault: {"clock_offset_ms": fault.amount()}), _control(lambda fault: {})


def _disk(operation: str) -> Step:
    return lambda cluster, name, fault: getattr(cluster.disks[name], operation)()


def _toggling(on: Step, off: Step, on_s: float, off_s: float) -> Strike:
    """Fault that runs the steps `on` and `off` in turns, with pauses of on_s and off_s seconds after them, and heals
    with the step `off`."""

    def strike(cluster: Cluster, nodes: list[str], fault: Fault) -> Iterator[None]:
        over = threading.Event()

        def turns() -> None:
            while not over.is_set():
                for step, seconds in ((on, on_s), (off, off_s)):
                    for name in nodes:
                        step(cluster, name, fault)
                    over.wait(seconds)

        thread = threading.Thread(target=turns)
        with ExitStack() as healing:
            for name in nodes:
                healing.callback(off, cluster, name, fault)
            thread.start()
            healing.callback(thread.join)
            healing.callback(over.set)
            yield

    return strike


def _cut_power(cluster: Cluster, name: str, fault: Fault) -> None:
    cluster.disks[name].cut_power(NOTHING_FLUSHED if fault.target != "random" else METADATA_FLUSHED)


def _lose_power(cluster: Cluster, name: str, fault: Fault) -> None:
    cluster.do("kill", name)
    cluster.disks[name].detach()


def _power_cut(cluster: Cluster, nodes: list[str], fault: Fault) -> Iterator[None]:
    # Register the healing before the first power cut: a later cut may fail, and this node then has to be healed too.
    healed = _each(_cut_power, _lose_power, _disk("attach"), _do("start"))
    with contextmanager(healed)(cluster, nodes, fault):
        for name in nodes:  # cut the power of all nodes before any of them can react
            _lose_power(cluster, name, fault)
        yield


_STRIKES: dict[str, Strike] = {
    "kill": _each(_do("kill"), _do("start")),
    "stop": _each(_do("stop"), _do("start")),
    "wipe": _each(_do("kill", "empty"), _do("start")),
    "rot": _each(_do("kill", "rot"), _do("start")),
    "old-copy": _each(_do("kill", "copy", "start"), _do("kill"), _do("restore"), _do("start")),
    "crash": _crash,
    "pause": _each(_do("pause"), _do("resume")),
    "starve": _toggling(_do("pause"), _do("resume"), 0.045, 0.005),
    "few-files": _each(_do("limit"), _do("unlimit")),
    "transfer": _transfer,
    "cut": _each(_do("cut"), _do("uncut")),
    "deaf": _on_network(lambda network, name, fault: network.cut(name, heard=True), "uncut"),
    "mute": _on_network(lambda network, name, fault: network.cut(name, hears=True), "uncut"),
    "loss": _on_network(lambda network, name, fault: network.lose(name, fault.amount()), "lose_nothing"),
    "delay": _shaping("netem", "delay", "{}ms"),
    "slow-link": _shaping("tbf", "rate", "{}kbit", "burst", "16kb", "latency", "200ms"),
    "reset": _on_network(lambda network, name, fault: network.reset(name), "lose_nothing"),
    "flap": _toggling(_do("cut"), _do("uncut"), 0.1, 0.1),
    "slow-sync": _each(_control(lambda fault: {"sync_delay_ms": fault.amount()}), _RIGHT, _do("start")),
    "fail-sync": _each(_control(lambda fault: {"sync_errno": errno.EIO}), _RIGHT, _do("start")),
    "clock": _each(_JUMP, _RIGHT, _do("start")),
    "strobe": _toggling(_JUMP, _RIGHT, 0.025, 0.025),
    "full-disk": _each(_disk("fill"), _disk("unfill"), _do("start")),
    "stalled-disk": _each(_disk("freeze"), _disk("thaw"), _do("start")),
    "power-cut": _power_cut,
}
assert _STRIKES.keys() == KINDS.keys()
#: Kinds of faults whose nodes may end by themselves, because a node never ignores a disk error.
MAY_END = {"fail-sync", "full-disk", "stalled-disk", "power-cut", "rot", "old-copy", "few-files"}
#: Kinds of faults that depose a leader; chaos then measures the time until another node commits.
DEPOSING = {"kill", "stop", "pause", "wipe", "cut", "stalled-disk", "power-cut", "fail-sync"}
