"""While a node's state is being replaced it applies nothing: what was on its way belongs to the old state."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest

from hadelay.raft import messages
from tests.raft.rig import Lone, Machine


def offer(lone: Lone, other: Machine) -> None:
    """n2, which leads term 1, offers what `other` holds."""
    other.items, other.index, other.term = [b"a%d" % n for n in range(9)], 10, 1
    other.take_checkpoint()
    manifest = other.checkpoint
    assert manifest is not None
    files = [[file.name, file.length, file.crc] for file in manifest.files]
    lone.node.frame("n2", messages.encode(messages.SNAPSHOT, 1, manifest.index, manifest.term, manifest.blob, files))
    assert lone.node.snapshots.installing


def test_entries_that_reach_the_disk_during_an_installation_are_not_applied() -> None:
    lone, other = Lone(), Machine()
    lone.append([(2, 1, b"a0"), (3, 1, b"a1")], term=1, prev=(1, 0), commit=3)
    offer(lone, other)
    lone.run(0.1)
    assert lone.machine.items == []
    manifest = other.checkpoint
    assert manifest is not None
    file = manifest.files[1]
    lone.node.frame("n2", messages.encode(messages.CHUNK_REPLY, manifest.index, file.name, 0, file.crc, manifest.blob))
    lone.run(0.5)
    assert not lone.fatal
    assert lone.machine.items == other.items
    assert lone.node.applied_index == 10


def test_files_of_a_leader_that_is_none_any_more_are_not_waited_for() -> None:
    """Found by the simulator (seed 253): a node followed nobody for 15 s, waiting for files that nobody sent."""
    lone = Lone()
    lone.append([(2, 1, b"a0"), (3, 1, b"a1")], term=1, prev=(1, 0), commit=1)
    offer(lone, Machine())
    lone.append([(4, 2, b"a2")], peer="n3", term=2, prev=(3, 1), commit=4)
    lone.run(0.1)
    assert not lone.node.snapshots.installing
    assert lone.machine.items == [b"a0", b"a1", b"a2"]


def test_files_are_kept_for_a_follower_as_long_as_it_says_that_it_installs_them() -> None:
    lone = Lone()
    lone.lead()
    lone.machine.take_checkpoint()
    lone.node.snapshots.offer(lone.node.peers["n2"])

    def wait(seconds: int, **says: int) -> int:
        """How often files are offered meanwhile."""
        for _ in range(seconds * 10):
            for name, status in says.items():
                lone.answer(name, 0, status=status)
            lone.run(0.1)
        assert lone.node.is_leader
        return len(lone.wire.take(messages.SNAPSHOT))

    assert wait(40, n2=messages.INSTALLING, n3=messages.OK) == 1
    assert wait(40, n3=messages.OK) >= 1, "who says nothing is given up, and offered them anew"


def test_a_chunk_that_was_read_too_late_is_not_sent() -> None:
    """The files were given back while the thread read one of them; they may be gone."""
    lone = Lone()
    lone.lead()
    lone.machine.take_checkpoint()
    peer, manifest = lone.node.peers["n2"], lone.machine.checkpoint
    assert manifest is not None
    file = manifest.files[-1]
    ask = messages.encode(messages.CHUNK, manifest.index, file.name, 0, 1)

    def asked(meanwhile: Callable[[], None]) -> int:
        lone.node.snapshots.offer(peer)
        lone.node.frame("n2", ask)
        meanwhile()
        lone.run(0.1)
        return len(lone.wire.take(messages.CHUNK_REPLY))

    assert asked(lambda: None) == 1
    assert asked(lambda: lone.node.snapshots.release(peer)) == 0
    assert not lone.fatal


def test_files_that_cannot_be_read_are_given_back_and_offered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    lone = Lone()
    lone.lead()
    lone.machine.take_checkpoint()
    manifest, given_back = lone.machine.checkpoint, Mock(side_effect=lone.machine.release)
    assert manifest is not None
    lone.node.snapshots.offer(lone.node.peers["n2"])
    monkeypatch.setattr(lone.machine, "release", given_back)
    monkeypatch.setattr(lone.machine, "read_chunk", Mock(side_effect=OSError("a bad sector")))
    lone.node.frame("n2", messages.encode(messages.CHUNK, manifest.index, "state", 0, 1))
    lone.run(0.1)
    given_back.assert_called_once()
    assert len(lone.wire.take(messages.SNAPSHOT)) == 2
    assert not lone.wire.take(messages.CHUNK_REPLY)
    assert not lone.fatal
    assert lone.node.is_leader
