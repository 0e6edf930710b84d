"""Machines of a simulated cluster, and the processes that run on them."""

from __future__ import annotations

from dataclasses import dataclass, field

from chaos.sim.disk import SimDisk
from chaos.sim.door import Call
from chaos.sim.loop import SimLoop
from chaos.sim.network import SimNetwork
from chaos.sim.runtime import SimRuntime
from hadelay.server.node import Node
from hadelay.server.service.node import NodeService


@dataclass(eq=False)
class Machine:
    """What outlives a process: the disk, and clocks with their faults."""

    name: str
    disk: SimDisk
    drift: float
    wall_offset_ms: int
    #: Added by the nemesis.
    stepped_ms: int = 0
    process: Process | None = None
    founded: bool = False
    #: Whom its configuration file names, besides itself.
    others: tuple[str, ...] = ()
    #: The newest entry that its journal ever called synced; and the newest one that is committed and that it called so
    #: when its last process ended: there it has to be when the next one starts.
    had: int = 0
    held: int = 0


@dataclass(eq=False)
class Process:
    """One run of one node, from its start to its end."""

    name: str
    runtime: SimRuntime
    network: SimNetwork
    #: For tasks on its virtual time.
    loop: SimLoop
    node: Node | None = None
    calls: list[Call] = field(default_factory=list)
    #: Receives that it relays to the leader.
    relays: set[Call] = field(default_factory=set)
    #: How many syncs of this disk had failed before it; and since when one of its own has.
    failed_before: int = 0
    failed_at: float | None = None
    #: Of the node, which it has too then.
    service: NodeService = field(init=False)
