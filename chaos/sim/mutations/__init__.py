"""Deliberate bugs, switched on one at a time: the checks named beside a bug have to notice it."""

from chaos.sim.mutations import (
    batches,
    delays,
    fanout,
    features,
    groups,
    jobs,
    oracles,
    raft,
    schedules,
    server,
    transfers,
    uniques,
)
from chaos.sim.mutations.table import MUTATIONS, SEEDS, Mutation, broken

__all__ = [
    "MUTATIONS", "SEEDS", "Mutation", "batches", "broken", "delays", "fanout", "features", "groups", "jobs", "oracles",
    "raft", "schedules", "server", "transfers", "uniques",
]  # fmt: skip
