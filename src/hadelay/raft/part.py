"""State that all parts of a RaftNode share."""

from collections.abc import Callable
from dataclasses import dataclass

from hadelay.platform.network import Network
from hadelay.platform.runtime import Runtime
from hadelay.raft.journal import Journal
from hadelay.raft.library import Core
from hadelay.raft.ports import Machine, Propose, RaftStats, RaftTuning


@dataclass(frozen=True, kw_only=True)
class Shared:
    core: Core
    journal: Journal
    network: Network
    runtime: Runtime
    machine: Machine
    config: RaftTuning
    stats: RaftStats
    propose: Propose
    #: event(step, *args): let the node handle something that ended outside of its events.
    event: Callable[..., None]


class RaftPart:
    def __init__(self, shared: Shared) -> None:
        self._core, self._journal, self._network = shared.core, shared.journal, shared.network
        self._runtime, self._machine, self._config = shared.runtime, shared.machine, shared.config
        self._stats, self._propose, self._event = shared.stats, shared.propose, shared.event
