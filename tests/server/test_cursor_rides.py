"""The dispatch cursor rides in entries that are written anyway."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.sim.cluster import SimCluster
from hadelay.codec.commandtypes import Command
from hadelay.codec.entries import decode_entry
from hadelay.codec.meta import Meta, pack
from hadelay.handout.polls import Delivery, Poll
from hadelay.model import Draft
from hadelay.server.node import Node
from tests.server.test_lost_disks import wait_for_leader


class Counted:
    """Entries that a leader proposes, by whether they hold the cursor and anything else."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alone = self.rode = self.without = 0
        propose = node.raft.propose

        def counting(entry: bytes, done: Any) -> None:
            kinds = [kind for kind, _ in decode_entry(entry)[2]]
            self.alone += kinds == [Command.CURSOR]
            self.rode += Command.CURSOR in kinds and len(kinds) > 1
            self.without += Command.CURSOR not in kinds
            propose(entry, done)

        monkeypatch.setattr(node.raft, "propose", counting)


def consume(node: Node, got: list[int]) -> None:
    def done(delivery: Delivery | None, error: Exception | None) -> None:
        if delivery is not None:
            got.extend(delivery.rows["first_id"].tolist())
        node.runtime.call_soon(consume, node, got)

    node.delivery.poll(Poll("c", b"", ("t",), 10, 600_000, 60_000, done, None, False))


def test_the_cursor_has_no_entry_of_its_own_while_messages_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 messages a second for 5 s: each cursor shares an entry of publishes or grants."""
    cluster = SimCluster(1, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(1.5)
    node = cluster.leader()
    assert node is not None
    got: list[int] = []
    node.runtime.call_soon(consume, node, got)
    counted = Counted(node, monkeypatch)

    def publish() -> None:
        draft = Draft("t", 500, True, 0, 0, pack(Meta()), b"x")
        node.publishing.publish([draft], None, lambda receipts, error: None)

    for n in range(500):
        node.runtime.call_later(n / 100, publish)
    cluster.world.run_for(5.2)
    assert len(got) >= 450
    assert counted.rode >= 80  # one per 50 ms, at the least
    assert counted.alone <= 2
    cluster.world.run_for(2.0)
    assert len(got) == 500
    assert node.ledger.cursor == node.delivery._grants.core.cursor  # type: ignore[union-attr]
    written = counted.alone + counted.rode + counted.without
    cluster.world.run_for(60.0)
    assert counted.alone + counted.rode + counted.without == written, "an idle cluster writes nothing"
