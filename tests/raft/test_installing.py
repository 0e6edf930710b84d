"""While a node's state is being replaced it applies nothing: what was on its way belongs to the old state."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from unittest.mock import Mock

import pytest
from google_crc32c import value as crc32c

from hadelay.errors import DiskFull, FatalError, HadelayError
from hadelay.raft import messages
from tests.raft.rig import Installer, Lone, Machine


def offer(lone: Lone, other: Machine, *, taken: bool = True) -> None:
    """n2, which leads term 1, offers what `other` holds."""
    other.items, other.index, other.term = [b"a%d" % n for n in range(9)], 10, 1
    other.take_checkpoint()
    manifest = other.checkpoint
    assert manifest is not None
    files = [[file.name, file.length, file.crc] for file in manifest.files]
    lone.node.frame("n2", messages.encode(messages.SNAPSHOT, 1, manifest.index, manifest.term, manifest.blob, files))
    assert lone.node.applier.installing == taken


def send(lone: Lone, other: Machine, seconds: float = 0.5) -> None:
    """n2 sends it."""
    manifest = other.checkpoint
    assert manifest is not None
    file = manifest.files[1]
    lone.node.frame("n2", messages.encode(messages.CHUNK_REPLY, manifest.index, file.name, 0, file.crc, manifest.blob))
    lone.run(seconds)


def test_entries_that_reach_the_disk_during_an_installation_are_not_applied() -> None:
    lone, other = Lone(), Machine()
    lone.append([(2, 1, b"a0"), (3, 1, b"a1")], term=1, prev=(1, 0), commit=3)
    offer(lone, other)
    lone.run(0.1)
    assert lone.machine.items == []
    send(lone, other)
    assert not lone.fatal
    assert lone.machine.items == other.items
    assert lone.node.applied_index == 10


def test_a_snapshot_does_not_set_the_commit_index_back() -> None:
    """The log goes on behind the snapshot, and more of the log than the snapshot was committed already."""
    lone = Lone()
    lone.append([(n + 2, 1, b"a%d" % n) for n in range(11)], term=1, prev=(1, 0), commit=12)
    offer(lone, other := Machine())
    send(lone, other)
    assert lone.node.stats.snapshots_installed == 1
    assert lone.node.commit_index == 12
    assert lone.machine.items == [b"a%d" % n for n in range(11)]


def test_files_of_a_leader_that_is_none_any_more_are_not_waited_for() -> None:
    """Found by the simulator (seed 253): a node followed nobody for 15 s, waiting for files that nobody sent. Only
    the last file of a former leader is waited for, for two seconds."""
    lone = Lone()
    lone.append([(2, 1, b"a0"), (3, 1, b"a1")], term=1, prev=(1, 0), commit=1)
    offer(lone, Machine())
    lone.append([(4, 2, b"a2")], peer="n3", term=2, prev=(3, 1), commit=4)
    lone.run(2.1)
    assert not lone.node.applier.installing
    lone.append([(4, 2, b"a2")], peer="n3", term=2, prev=(3, 1), commit=4)
    lone.run(0.1)
    assert lone.machine.items == [b"a0", b"a1", b"a2"]


def test_files_are_kept_for_a_follower_as_long_as_it_says_that_it_installs_them() -> None:
    lone = Lone()
    lone.lead()
    lone.machine.take_checkpoint()
    lone.node.event(lone.node.snapshots.offer, lone.node.peers["n2"])

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
        lone.node.event(lone.node.snapshots.offer, peer)
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
    lone.node.event(lone.node.snapshots.offer, lone.node.peers["n2"])
    monkeypatch.setattr(lone.machine, "release", given_back)
    monkeypatch.setattr(lone.machine, "read_chunk", Mock(side_effect=OSError("a bad sector")))
    lone.node.frame("n2", messages.encode(messages.CHUNK, manifest.index, "state", 0, 1))
    lone.run(0.1)
    given_back.assert_called_once()
    assert len(lone.wire.take(messages.SNAPSHOT)) == 2
    assert not lone.wire.take(messages.CHUNK_REPLY)
    assert not lone.fatal
    assert lone.node.is_leader


def _fails(lone: Lone, monkeypatch: pytest.MonkeyPatch, step: str, error: HadelayError) -> None:
    if step == "install":
        monkeypatch.setattr(lone.machine, "install", Mock(side_effect=error))
    elif step == "write":
        monkeypatch.setattr(Installer, "write", Mock(side_effect=error))
    elif step == "last write":
        monkeypatch.setattr(Installer, "write", Mock(side_effect=[None, error]))
    else:
        monkeypatch.setattr(Installer, "finish", lambda self, done: done(error))


@pytest.mark.parametrize("step", ["install", "write", "last write", "finish"])
def test_a_node_without_room_for_files_goes_on_when_there_is(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """It is a follower as before meanwhile, and asks for nothing."""
    lone, other = Lone(), Machine()
    lone.append([], term=1, prev=(1, 0))
    _fails(lone, monkeypatch, step, DiskFull("no room"))
    offer(lone, other, taken=step in ("last write", "finish"))
    send(lone, other, 0.05)
    assert not lone.node.applier.installing
    assert not lone.fatal
    assert not lone.wire.take(messages.SNAPSHOT_DONE), "the leader would offer it again at once, and again"
    monkeypatch.undo()
    offer(lone, other)
    send(lone, other)
    assert lone.machine.items == other.items


def test_a_node_that_cannot_say_what_its_disk_has_installs_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    lone, other = Lone(), Machine()
    lone.append([], term=1, prev=(1, 0))
    error = FatalError("a sync failed")
    _fails(lone, monkeypatch, "finish", error)
    offer(lone, other)
    send(lone, other)
    assert lone.fatal == [error]


def test_a_follower_that_does_not_ask_for_files_is_offered_them_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have just started, and not know yet who leads."""
    lone = Lone()
    lone.lead()
    lone.machine.take_checkpoint()
    ticks, monotonic = count(), lone.runtime.monotonic
    monkeypatch.setattr(lone.runtime, "monotonic", lambda: monotonic() + next(ticks) * 1e-9)
    lone.node.event(lone.node.snapshots.offer, lone.node.peers["n2"])
    for _ in range(30):
        lone.answer("n3", 0)
        lone.run(0.1)
    assert len(lone.wire.take(messages.SNAPSHOT)) == 2


@pytest.mark.parametrize("later", [False, True])
def test_a_node_whose_journal_cannot_begin_anew_ends(monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    """Its state is the snapshot's by then: one that waited in vain for its journal would be installing for good."""
    lone, other = Lone(), Machine()
    lone.append([], term=1, prev=(1, 0))
    if later:  # as storage does it: from a thread's end
        finish = Installer.finish
        monkeypatch.setattr(
            Installer, "finish", lambda self, done: lone.runtime.in_thread("disk", int, lambda *_: finish(self, done))
        )
    offer(lone, other)
    lone.disk.capacity = lone.disk.used
    send(lone, other)
    assert isinstance(lone.fatal[0], OSError)


def test_a_chunk_that_is_longer_than_its_file_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage would end the node: nothing may be written behind the end of a file."""
    lone, other, write = Lone(), Machine(), Mock()
    lone.append([], term=1, prev=(1, 0))
    offer(lone, other)
    manifest = other.checkpoint
    assert manifest is not None
    monkeypatch.setattr(Installer, "write", write)
    data = manifest.blob + b"more"
    lone.node.frame("n2", messages.encode(messages.CHUNK_REPLY, manifest.index, "state", 0, crc32c(data), data))
    write.assert_not_called()
    assert not lone.node.applier.installing
    assert lone.wire.take(messages.SNAPSHOT_DONE) == [("n2", messages.encode(messages.SNAPSHOT_DONE, 0))]


def test_a_follower_that_claims_to_have_more_than_the_leader_is_sent_the_end_of_the_log() -> None:
    lone = Lone()
    lone.lead()
    lone.machine.take_checkpoint()
    lone.node.event(lone.node.snapshots.offer, lone.node.peers["n2"])
    lone.node.frame("n2", messages.encode(messages.SNAPSHOT_DONE, 1 << 40))
    lone.run(0.1)
    assert not lone.fatal
    assert lone.node.peers["n2"].next == lone.node.last_index + 1


def test_the_files_of_an_interrupted_pull_do_not_hold_up_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    lone, had = Lone(), list[str]()
    lone.append([], term=1, prev=(1, 0))

    def have(self: Installer, name: str) -> int:
        had.append(name)
        return 7

    monkeypatch.setattr(Installer, "have", have)
    files = [*([f"hours/{n}", 7, 0] for n in range(1_000)), ["state", 9, 0]]
    lone.node.frame("n2", messages.encode(messages.SNAPSHOT, 1, 50, 1, b"", files))
    assert 100 < len(had) < 300
    lone.run(0.01)
    assert len(had) == len(files)
    assert lone.wire.take(messages.CHUNK) == [("n2", messages.encode(messages.CHUNK, 50, "state", 7, 2))]
