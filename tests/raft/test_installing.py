"""While a node's state is being replaced it applies nothing: what was on its way belongs to the old state."""

from __future__ import annotations

from hadelay.raft import messages
from tests.raft.rig import Lone, Machine


def test_entries_that_reach_the_disk_during_an_installation_are_not_applied() -> None:
    lone = Lone()
    other = Machine()
    other.items, other.index, other.term = [b"a%d" % n for n in range(9)], 10, 1
    other.take_checkpoint()
    manifest = other.checkpoint
    assert manifest is not None
    lone.append([(2, 1, b"a0"), (3, 1, b"a1")], term=1, prev=(1, 0), commit=3)
    files = [[file.name, file.length, file.crc] for file in manifest.files]
    frame = messages.encode(messages.SNAPSHOT, 1, manifest.index, manifest.term, manifest.blob, files)
    lone.node.frame("n2", frame)
    assert lone.node.snapshots.installing
    lone.run(0.1)
    assert lone.machine.items == []
    file = manifest.files[1]
    lone.node.frame("n2", messages.encode(messages.CHUNK_REPLY, manifest.index, file.name, 0, file.crc, manifest.blob))
    lone.run(0.5)
    assert not lone.fatal
    assert lone.machine.items == other.items
    assert lone.node.applied_index == 10
