"""What nodes tell each other each second, and when they checkpoint."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hadelay.core.clustertime import ClusterClock
from hadelay.server.checkpoints import Checkpoints
from hadelay.server.peers import Peer, Peers
from hadelay.version import VERSION

NAMES = ["n1", "n2", "n3"]


def test_an_answer_to_what_another_process_sent_moves_no_clock() -> None:
    """The machine was started anew, so that its monotonic clock began at nothing; the answer is to a note of before."""
    clock = ClusterClock("n1", NAMES)
    mono, link = [5.0], SimpleNamespace(handlers={}, note=lambda *_: None)
    runtime: Any = SimpleNamespace(monotonic=lambda: mono[0], wall_ms=lambda: 0)
    Peers(NAMES, runtime, link, clock, lambda: Peer("n1"), lambda: None)  # type: ignore[arg-type]

    def hear(yours: float, now_ms: int) -> None:
        link.handlers["hello"]("n2", [now_ms, now_ms, 9.0, yours, "", VERSION, 1, 0, True], None)

    hear(90_000.0, 1_000_000)
    assert not clock.ready
    hear(4.999, 2_000_000)
    assert clock.ready
    assert 0 <= clock.read(mono[0]) - 2_000_000 <= 1
    hear(90_000.0, 3_000_000)
    assert clock.read(mono[0]) < 2_000_010


def test_nodes_that_apply_the_same_checkpoint_apart() -> None:
    """ADR 182. Else none is left to commit quickly."""

    def begins_at(name: str, config: list[str]) -> int:
        """Bytes of entries that make this node checkpoint."""
        storage = SimpleNamespace(
            hours=SimpleNamespace(far_bytes=0), tables=SimpleNamespace(overlay_bytes=0), checkpointing=False
        )
        begun: list[bool] = []
        node: Any = SimpleNamespace(
            name=name, storage=storage, stopped=False,
            config=SimpleNamespace(
                members=config, storage=SimpleNamespace(checkpoint_bytes=64 << 20, far_buffer_bytes=32 << 20)
            ),
            runtime=SimpleNamespace(monotonic=lambda: 0.0, call_soon=lambda *_: begun.append(True)),
        )  # fmt: skip
        checkpoints = Checkpoints(node)
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
