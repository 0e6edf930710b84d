"""Deliberate bugs, switched on one at a time: the checks named beside a bug have to notice it."""

from chaos.sim.mutations import fanout, groups, oracles, raft, schedules, server, uniques
from chaos.sim.mutations.table import MUTATIONS, SEEDS, Mutation, broken

__all__ = [
    "MUTATIONS", "SEEDS", "Mutation", "broken", "fanout", "groups", "oracles", "raft", "schedules", "server", "uniques",
]  # fmt: skip
