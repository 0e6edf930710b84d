"""When a node checkpoints."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from chaos.sim.cluster import SimCluster
from hadelay.server.checkpoints import Checkpoints

NAMES = ["n1", "n2", "n3"]


def test_nodes_that_apply_the_same_checkpoint_apart() -> None:
    """ADR 182. Else none is left to commit quickly."""

    def begins_at(name: str, config_names: list[str]) -> int:
        """Bytes of entries that make this node checkpoint."""
        storage = SimpleNamespace(
            hours=SimpleNamespace(far_bytes=0), tables=SimpleNamespace(overlay_bytes=0), checkpointing=False
        )
        begun: list[bool] = []
        config: Any = SimpleNamespace(
            node=SimpleNamespace(data_dir="/data"), journal_dir="/data", members=config_names,
            storage=SimpleNamespace(checkpoint_bytes=64 << 20, far_buffer_bytes=32 << 20),
        )  # fmt: skip
        raft: Any = SimpleNamespace(
            name=name, stopped=False, runtime=SimpleNamespace(monotonic=lambda: 0.0),
            call_later=lambda *_: begun.append(True),
        )  # fmt: skip
        replica: Any = SimpleNamespace(storage=storage)
        nobody: Any = None
        checkpoints = Checkpoints(config, nobody, replica, raft, nobody, nobody)
        checkpoints._look_for_space = lambda: None  # type: ignore[method-assign]
        applied = 0
        while not begun:
            checkpoints.applied(1 << 20)
            applied += 1 << 20
        return applied

    bounds = [begins_at(name, NAMES) for name in NAMES]
    assert bounds == [begins_at(name, NAMES) for name in NAMES]
    assert all(a - b >= 6 << 20 for a, b in pairwise(bounds))
    assert 0.7 * (64 << 20) <= min(bounds) <= max(bounds) == 64 << 20
    assert begins_at("n9", ["n1", "n2", "n3"]) not in bounds[:3], "nor does one that joins"


def test_entries_applied_during_a_checkpoint_count_towards_the_next() -> None:
    cluster = SimCluster(1, names=("n1",))
    cluster.start_all()
    world = cluster.world
    world.run_until(world.now + 10, lambda: cluster.leader() is not None)
    node = cluster.leader()
    assert node is not None
    node.checkpoints.applied(1)
    node.checkpoints.begin()
    assert node.storage.checkpointing
    node.checkpoints.applied(1)
    world.run_until(world.now + 10, lambda: not node.storage.checkpointing)
    node.checkpoints.begin()
    assert node.storage.checkpointing
