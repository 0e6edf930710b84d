"""Deliberate bugs, switched on one at a time: each has to be noticed by the check named beside it."""

from chaos.sim.mutations import raft, server
from chaos.sim.mutations.table import MUTATIONS, SEEDS, Mutation, broken

__all__ = ["MUTATIONS", "SEEDS", "Mutation", "broken", "raft", "server"]
