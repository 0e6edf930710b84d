"""What PySyncObj 0.3.17 gets wrong (docs/explanation/pysyncobj.md): the plain library shows each fault, ours does not.

`test_plain_*` are controls: they pass while the library has the fault, so an upgrade that mends one shows here.
"""

from __future__ import annotations

import mmap
import os
import pickle
import zlib

import pysyncobj.journal
import pysyncobj.syncobj
import pytest
from pysyncobj import FAIL_REASON
from pysyncobj.node import Node
from pysyncobj.tcp_connection import TcpConnection

from hadelay.errors import ConfigError, DamagedFile, DiskFull, FatalError, NoLeader, OutcomeUnknown
from hadelay.raft import messages
from hadelay.raft.journal import Journal
from hadelay.storage.identity import Identity
from tests.raft.plain import PlainCluster, PlainNode
from tests.raft.rig import CONFIG, JOURNAL, Cluster, Lone, one_lags_behind_the_journal

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


def plain_follower(monkeypatch: pytest.MonkeyPatch, last: int, term: int = 1) -> PlainNode:
    """n1 with entries 2..last, from n2."""
    node = PlainCluster(monkeypatch, 3).nodes["n1"]
    node.receive("n2", plain_append([(i, term) for i in range(2, last + 1)], term=term, prev=(1, 0)))
    assert [entry[1] for entry in node.log()] == list(range(1, last + 1))
    return node


def plain_append(entries: list[tuple[int, int]], *, term: int, prev: tuple[int, int], commit: int = 0) -> dict:
    return {
        "type": "append_entries",
        "term": term,
        "commit_index": commit,
        "prevLogIdx": prev[0],
        "prevLogTerm": prev[1],
        "entries": [(b"\0x", index, at) for index, at in entries],
    }


def run_of(first: int, last: int, term: int) -> list[tuple[int, int, bytes]]:
    return [(index, term, b"c%d" % index) for index in range(first, last + 1)]


# -- what follows prevLogIdx is deleted even where it matches; the commit index goes beyond what was verified


def test_plain_deletes_entries_that_match(monkeypatch):
    node = plain_follower(monkeypatch, last=9)
    node.receive("n2", plain_append([(2, 1), (3, 1)], term=1, prev=(1, 0)))  # a late repeat
    assert node.log()[-1][1] == 3, "six acknowledged entries are gone"


def test_a_repeat_deletes_nothing():
    lone = Lone()
    lone.append(run_of(2, 9, 1), term=1, prev=(1, 0))
    lone.append(run_of(2, 3, 1), term=1, prev=(1, 0))
    lone.append([], term=1, prev=(4, 1))
    assert lone.log() == [(i, 1) for i in range(2, 10)]


def test_a_conflict_is_cut_from_where_it_begins():
    lone = Lone()
    lone.append(run_of(2, 9, 1), term=1, prev=(1, 0))
    lone.append(run_of(4, 5, 1) + run_of(6, 7, 3), term=3, prev=(3, 1), peer="n3")
    assert lone.log() == [(i, 1) for i in range(2, 6)] + [(6, 3), (7, 3)]
    lone.run(0.1)
    assert lone.wire.replies()[-1].match == 7


def test_plain_commits_what_the_message_did_not_verify(monkeypatch):
    node = plain_follower(monkeypatch, last=9)  # 4..9 came from a leader of term 1 that nobody else has heard
    node.receive("n3", plain_append([(2, 1)], term=2, prev=(1, 0), commit=9))
    node.receive("n2", plain_append([(3, 1), (4, 1)], term=2, prev=(2, 1), commit=0))
    node = plain_follower(monkeypatch, last=9)
    node.receive("n3", {"type": "append_entries", "term": 2, "commit_index": 9})
    assert node.raftCommitIndex == 9


def test_the_commit_index_goes_no_further_than_verified():
    lone = Lone()
    lone.append(run_of(2, 9, 1), term=1, prev=(1, 0))
    lone.append([], term=2, prev=(0, 0), commit=9, peer="n3")
    assert lone.node.commit_index == 1
    lone.append([], term=2, prev=(5, 1), commit=9, peer="n3")
    assert lone.node.commit_index == 5


def test_plain_cuts_what_is_applied(monkeypatch):
    node = plain_follower(monkeypatch, last=5)
    node.receive("n2", plain_append([], term=1, prev=(5, 1), commit=5))
    node.doTick(0.0)
    assert len(node.applied) == 4
    node.receive("n3", plain_append([(2, 2)], term=2, prev=(1, 0), commit=2))
    assert [entry[1:] for entry in node.log()] == [(1, 0), (2, 2)]


def test_a_conflict_with_what_is_committed_stops_the_node():
    lone = Lone()
    lone.append(run_of(2, 5, 1), term=1, prev=(1, 0), commit=5)
    lone.run(0.1)
    assert len(lone.machine.items) == 4
    lone.append(run_of(2, 2, 2), term=2, prev=(1, 0), peer="n3")
    assert isinstance(lone.fatal[0], FatalError)
    assert lone.log() == [(i, 1) for i in range(2, 6)], "and what it has stays as it is"


# -- answers to earlier batches set nextIndex back


def test_plain_an_answer_sets_next_index_back(monkeypatch):
    cluster = PlainCluster(monkeypatch, 3, appendEntriesBatchSizeBytes=20)
    leader = cluster.elect("n1")
    for n in range(6):
        leader.propose(b"%d" % n * 9)
    for _ in range(3):
        cluster.now += 0.2
        leader.doTick(0.0)
    peer = next(n for n in leader.otherNodes if n.id == "n2")
    sent = leader.get("raftNextIndex")[peer]
    leader.receive("n2", {"type": "next_node_idx", "next_node_idx": sent - 3, "reset": False, "success": True})
    assert leader.get("raftNextIndex")[peer] == sent - 3, "what is on its way is sent again"


def test_next_index_never_goes_back_on_success():
    lone = Lone()
    lone.lead()
    lone.answer("n2", lone.node.last_index)
    for n in range(6):
        lone.node.propose(b"command %d" % n, lambda result, error: None)
    peer = lone.node.peers["n2"]
    sent = peer.next
    assert sent == lone.node.last_index + 1
    lone.answer("n2", sent - 4)
    assert (peer.next, peer.match) == (sent, sent - 4)


def test_a_hint_is_clipped_between_match_and_next():
    lone = Lone()
    lone.lead()
    lone.answer("n2", lone.node.last_index)
    for n in range(6):
        lone.node.propose(b"command %d" % n, lambda result, error: None)
    peer = lone.node.peers["n2"]
    lone.answer("n2", 4)
    for hint, expected in ((1, 5), (1 << 40, lone.node.last_index + 1)):
        lone.wire.sent.clear()
        peer.probing, peer.probe_sent = True, True
        lone.answer("n2", 0, status=messages.MISMATCH, hint=hint)
        frames = [messages.decode_append(data) for name, data in lone.wire.sent if name == "n2"]
        assert [frame.prev_index + 1 for frame in frames] == [expected], "one probe, not a burst"


def test_an_ex_leader_with_a_tail_of_its_own_catches_up():
    """evidence: the plain library ping-pongs for ever between a reset index and a pipelined batch."""
    cluster = Cluster()
    old = cluster.leader()
    cluster.isolate(old.name)
    for n in range(40):
        old.propose(b"uncommitted %d" % n * 20, lambda result, error: None)
    cluster.run(3.0)
    for n in range(60):
        cluster.commit(b"committed %d" % n * 20)
    cluster.net.heal()
    cluster.settle()
    items = {tuple(machine.items) for machine in cluster.machines.values()}
    assert len(items) == 1
    assert len(next(iter(items))) == 60


# -- nothing is ever synced


def test_plain_syncs_nothing(monkeypatch, tmp_path):
    calls = []
    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, lambda *args: calls.append(args))
    journal = pysyncobj.journal.createJournal(str(tmp_path / "journal"))
    journal.setCurrentTerm(3, "n2")
    for index in range(1, 50):
        journal.add(b"command", index, 3)
    journal.onOneSecondTimer()
    assert calls == []


def test_acknowledged_entries_survive_a_power_cut_of_all():
    for seed in range(5):
        cluster = Cluster(seed=seed)
        for n in range(20):
            cluster.commit(b"acknowledged %d" % n)
        for name in cluster.names:
            cluster.kill(name, power=True)
        for name in cluster.names:
            cluster.start(name)
        cluster.commit(b"afterwards")
        cluster.settle()
        for machine in cluster.machines.values():
            assert machine.items == [b"acknowledged %d" % n for n in range(20)] + [b"afterwards"]


def test_answers_wait_for_the_disk_and_appends_do_not():
    lone = Lone()
    lone.disk.sync_delay_s = 0.5
    lone.append(run_of(2, 3, 1), term=1, prev=(1, 0))
    lone.run(0.1)
    assert lone.wire.replies() == [], "nothing is on the disk yet"
    lone.run(2.0)
    assert [reply.match for reply in lone.wire.replies()][-1] == 3

    lone = Lone()
    lone.lead()
    for peer in lone.peers:
        lone.answer(peer, lone.node.last_index)
    lone.wire.sent.clear()
    lone.disk.sync_delay_s = 0.05
    lone.node.propose(b"command", lambda result, error: None)
    sent = [messages.decode_append(data) for _, data in lone.wire.take(messages.APPEND)]
    assert sent, "the frame leaves while the sync has not even begun"
    index = lone.node.last_index
    for peer in lone.peers:
        lone.answer(peer, index)
    assert lone.node.commit_index < index, "the leader's own disk has not got it"
    lone.run(0.15)
    assert lone.node.commit_index == index


def test_a_sign_of_life_takes_no_answer_from_entries_that_wait_for_the_disk():
    lone = Lone()
    lone.append([], term=1, prev=(1, 0))
    lone.run(1.0)
    lone.wire.sent.clear()
    lone.disk.sync_delay_s = 0.5
    lone.append(run_of(2, 3, 1), term=1, prev=(1, 0))
    lone.append([], term=1, prev=(0, 0))
    assert [reply.match for reply in lone.wire.replies()] == [1], "answered at once, with what the disk has"
    lone.run(2.0)
    assert [reply.match for reply in lone.wire.replies()] == [3]


def test_a_vote_leaves_when_it_is_on_disk():
    lone = Lone()
    lone.disk.sync_delay_s = 0.4
    lone.run(0.5)
    lone.node.frame("n2", messages.encode(messages.VOTE, 9, 5, 1, True))
    assert lone.node.journal.voted_for == "n2"
    assert lone.wire.take(messages.VOTE_REPLY) == []
    lone.run(1.0)
    assert len(lone.wire.take(messages.VOTE_REPLY)) == 1


# -- a full disk under a written map kills the process


def test_plain_writes_through_a_map(tmp_path):
    journal = pysyncobj.journal.createJournal(str(tmp_path / "journal"))
    file = journal._FileJournal__journalFile
    assert isinstance(file._ResizableFile__mm, mmap.mmap)
    file.write(100, b"x")  # through the map: SIGBUS where the file system has no block for it


def test_a_full_disk_refuses_and_goes_on():
    cluster = Cluster()
    cluster.commit(b"before")
    leader = cluster.leader()
    disk = cluster.disks[leader.name]
    disk.capacity = disk.used + 1000
    answers = []
    for _ in range(100):
        cluster.leader().propose(b"x" * 1500, lambda result, error: answers.append(error))
        cluster.run(0.02)
        if leader.name in cluster.fatal:
            break
    assert not cluster.fatal
    assert any(isinstance(error, DiskFull) for error in answers)
    disk.capacity *= 2
    cluster.run(1.0)
    cluster.commit(b"after")


# -- compaction empties the file and writes the rest again


def test_plain_a_crash_in_compaction_loses_the_log(tmp_path, monkeypatch):
    path = str(tmp_path / "journal")
    journal = pysyncobj.journal.createJournal(path)
    for index in range(1, 100):
        journal.add(b"command", index, 1)

    def die(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(pysyncobj.journal.FileJournal, "add", die)
    with pytest.raises(KeyboardInterrupt):
        journal.deleteEntriesTo(50)
    journal.flush()
    assert len(pysyncobj.journal.createJournal(path)) == 0, "entries 51 to 99 are gone as well"


def test_compaction_deletes_whole_segments_at_any_crash():
    for steps in range(1, 12):
        cluster = Cluster(count=1, seed=steps)
        for n in range(60):
            cluster.commit(b"x" * 1500 + b"%d" % n)
        node = cluster.nodes["n1"]
        assert len(node.journal._segments) > 2
        cluster.machines["n1"].take_checkpoint()
        cluster.disks["n1"].crash_in = steps
        cluster.runtimes["n1"].call_soon(node.compact, node.applied_index)
        cluster.run(0.2)
        if "n1" in cluster.nodes:
            cluster.kill("n1", power=True)
        cluster.start("n1")
        cluster.leader()
        assert len(cluster.machines["n1"].items) == 60


# -- no checksums


def test_plain_takes_a_flipped_byte_for_the_truth(tmp_path):
    path = tmp_path / "journal"
    journal = pysyncobj.journal.createJournal(str(path))
    journal.setCurrentTerm(7, "n2")
    journal.add(b"deliver at 1000", 2, 7)
    journal._destroy()
    data = bytearray(path.read_bytes())
    data[data.index(b"1000")] ^= 8
    path.write_bytes(data)
    (tmp_path / "journal.meta").write_bytes(b"damaged")
    again = pysyncobj.journal.createJournal(str(path))
    assert again[0][0] == b"deliver at 9000"
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (0, None), "free to vote a second time"


def test_a_flipped_byte_is_refused_with_file_and_offset():
    cluster = Cluster(count=1)
    cluster.commit(b"deliver at 1000", b"and another")
    cluster.kill("n1")
    disk = cluster.disks["n1"]
    path = next(path for path, data in disk.copy().items() if b"deliver at 1000" in data)
    disk.flip_bit(path, disk.copy()[path].index(b"1000"))
    with pytest.raises(DamagedFile, match=rf"{path}, offset \d+: .*move the node's directories away"):
        cluster.start("n1")


# -- answers carry no term; votes are counted by message


def test_plain_counts_an_answer_to_another_term(monkeypatch):
    cluster = PlainCluster(monkeypatch, 3)
    leader = cluster.elect("n1")
    leader.propose(b"x")
    cluster.now += 0.2
    leader.doTick(0.0)
    index = leader.log()[-1][1]
    leader.receive("n2", {"type": "next_node_idx", "next_node_idx": index + 1, "reset": False, "success": True})
    leader.doTick(0.0)
    assert leader.raftCommitIndex == index, "n2 said that in another term, about other entries"


def test_an_answer_to_another_term_is_dropped():
    lone = Lone()
    lone.lead()
    lone.node.propose(b"command", lambda result, error: None)
    lone.run(0.1)
    before = lone.node.commit_index
    lone.answer("n2", lone.node.last_index, term=lone.node.term - 1)
    assert (lone.node.commit_index, lone.node.peers["n2"].match) == (before, 0)
    lone.answer("n2", lone.node.last_index)
    assert lone.node.commit_index == lone.node.last_index


def test_plain_counts_one_voter_twice(monkeypatch):
    cluster = PlainCluster(monkeypatch, 5)
    node = cluster.nodes["n1"]
    node._SyncObj__raftElectionDeadline = 0
    node.doTick(0.0)
    for _ in range(2):
        node.receive("n2", {"type": "response_vote", "term": 1})
    assert node._isLeader(), "with two of five"


def test_an_answer_to_an_earlier_term_does_not_count():
    """Row 7 for appends: what a follower had in an earlier term may have been cut off since."""
    lone = Lone()
    lone.lead()
    first = lone.node.term
    lone.node.propose(b"x" * 20, lambda result, error: None)
    lone.run(0.01)
    last = lone.node.last_index
    lone.node.event(lambda now, ready: lone.node.core.step_down(first + 1))
    lone.run(0.01)
    lone.lead()
    commit = lone.node.commit_index
    for peer in lone.peers:
        lone.answer(peer, last, term=first)
        assert lone.node.peers[peer].counted == 0
    assert lone.node.commit_index == commit


def test_one_voter_counts_once():
    lone = Lone(peers=4)
    lone.node.event(lone.node.elections.campaign)
    lone.run(0.05)
    for _ in range(3):
        lone.node.frame("n2", messages.encode(messages.VOTE_REPLY, lone.node.term))
    assert not lone.node.is_leader
    lone.node.frame("n3", messages.encode(messages.VOTE_REPLY, lone.node.term))
    assert lone.node.is_leader


# -- pickles from the wire (the rest of it: test_tcp.py)


RAN: list[str] = []


class Attack:
    def __reduce__(self):
        return run_from_the_wire, ("code",)


def run_from_the_wire(what: str) -> None:
    RAN.append(what)


def test_plain_runs_what_it_is_sent():
    RAN.clear()
    connection = TcpConnection(None)
    connection._TcpConnection__readBuffer = bytearray(_framed(zlib.compress(pickle.dumps(Attack()))))
    connection._TcpConnection__processParseMessage()
    assert RAN


def test_a_pickle_is_only_a_bad_frame():
    RAN.clear()
    lone = Lone()
    body = pickle.dumps(Attack())
    for kind in range(2, 18):
        lone.node.frame("n2", bytes((kind,)) + body)
        lone.node.frame("n2", bytes((kind,)) + zlib.compress(body))
    assert not RAN
    assert not lone.fatal
    assert lone.log() == []
    assert lone.wire.dropped


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "little") + data


# -- large commands break


def test_plain_a_large_command_breaks_the_follower(monkeypatch):
    cluster = PlainCluster(monkeypatch, 3, appendEntriesBatchSizeBytes=1000)
    leader = cluster.elect("n1")
    leader.propose(b"x" * 1990)
    with pytest.raises((EOFError, pickle.UnpicklingError, UnicodeDecodeError, TypeError, ValueError)):
        cluster.run(1.0)


def test_commands_of_every_size_arrive():
    cluster = Cluster()
    commands = [bytes([n % 251]) * size for n, size in enumerate((2, 3, 999, 1000, 1001, 1990, 7999, 8000))]
    cluster.commit(*commands)
    cluster.settle()
    assert all(machine.items == commands for machine in cluster.machines.values())


# -- an exception in apply is retried for ever, one in a callback applies twice


def test_plain_retries_a_failing_apply_for_ever(monkeypatch):
    node = plain_follower(monkeypatch, last=2)
    calls = []

    def fail(value):
        calls.append(value)
        raise ValueError("cannot apply")

    node.on_apply = fail
    node.receive("n2", plain_append([], term=1, prev=(2, 1), commit=2))
    for _ in range(20):
        with pytest.raises(ValueError):
            node.doTick(0.0)
    assert len(calls) == 20


def test_a_failing_apply_stops_the_node():
    lone = Lone()
    lone.machine.raises = ValueError("cannot apply")
    lone.append(run_of(2, 3, 1), term=1, prev=(1, 0), commit=3)
    lone.run(1.0)
    assert lone.machine.asked_for == 1
    assert [str(error) for error in lone.fatal] == ["cannot apply"]


def test_plain_a_failing_callback_applies_twice(monkeypatch):
    cluster = PlainCluster(monkeypatch, 3)
    leader = cluster.elect("n1")

    def fail(result, error):
        raise ValueError("in the callback")

    leader.propose(b"once", fail)
    with pytest.raises(ValueError):
        cluster.run(1.0)
    cluster.run(1.0)
    assert leader.applied == [b"once", b"once"]


def test_a_failing_callback_stops_the_node_and_applies_once():
    cluster = Cluster()
    leader = cluster.leader()

    def fail(result, error):
        raise ValueError("in the callback")

    leader.propose(b"once", fail)
    cluster.run(1.0)
    assert cluster.machines[leader.name].items == [b"once"]
    assert str(cluster.fatal[leader.name]) == "in the callback"


# -- no pre-vote; a cut-off leader goes on believing


def test_plain_a_node_that_was_cut_off_deposes_the_leader(monkeypatch):
    cluster = PlainCluster(monkeypatch, 3, leaderFallbackTimeout=30.0)
    leader = cluster.elect("n1")
    for other in ("n1", "n2"):
        cluster.cut("n3", other)
    cluster.run(5.0)
    cluster.connect("n3", "n1")
    cluster.connect("n3", "n2")
    cluster.run(3.0)
    assert leader.raftCurrentTerm > 1


def test_a_node_that_was_cut_off_disturbs_nobody():
    cluster = Cluster()
    leader = cluster.leader()
    term = leader.term
    cluster.isolate(cluster.followers()[0])
    cluster.run(5.0)
    cluster.net.heal()
    cluster.run(3.0)
    assert leader.is_leader
    assert {node.term for node in cluster.nodes.values()} == {term}


def test_plain_a_cut_off_leader_believes_for_half_a_minute(monkeypatch):
    cluster = PlainCluster(monkeypatch, 3)
    leader = cluster.elect("n1")
    for other in ("n2", "n3"):
        cluster.cut("n1", other)
    cluster.run(10.0)
    assert leader._isLeader()
    assert any(node._isLeader() for node in cluster.nodes.values() if node is not leader), "and so does its successor"


def test_a_cut_off_leader_steps_down_within_an_election_timeout():
    cluster = Cluster()
    leader = cluster.leader()
    cluster.isolate(leader.name)
    took = cluster.until(lambda: not leader.is_leader)
    assert took < (CONFIG.election_min_ms + 3 * CONFIG.heartbeat_ms) / 1000
    assert cluster.machines[leader.name].followed == 1
    assert leader.leader is None


# -- slow failover


def test_plain_waits_for_its_timeout_though_the_connection_was_reset(monkeypatch):
    cluster = PlainCluster(monkeypatch, 3)
    cluster.elect("n1")
    cluster.run(0.2)
    for other in ("n2", "n3"):
        cluster.cut("n1", other)
        cluster.nodes[other].transport._onNodeDisconnected(Node("n1"))
    del cluster.nodes["n1"]
    cluster.run(0.3, step=0.01)
    assert not any(node._isLeader() for node in cluster.nodes.values())


@pytest.mark.parametrize("seed", range(20))
def test_a_reset_from_the_leader_brings_the_next_one_quickly(seed):
    cluster = Cluster(seed=seed)
    old = cluster.leader()
    cluster.commit(b"before")
    cluster.kill(old.name)
    took = cluster.until(lambda: any(node.is_leader for node in cluster.nodes.values()))
    assert took < 0.3


# -- snapshots (more of it: test_snapshot.py)


def test_plain_goes_on_empty_when_a_dump_does_not_load(monkeypatch, tmp_path, caplog):
    dump = tmp_path / "dump"
    dump.write_bytes(b"damaged")
    cluster = PlainCluster(monkeypatch, 1, fullDumpFile=str(dump))
    node = cluster.nodes["n1"]
    cluster.run(2.0)
    assert "failed to load full dump" in caplog.text
    assert node.log()[-1][1] == 2, "and it leads, with nothing in it"


def test_a_spoiled_chunk_is_not_taken():
    cluster, lagging = one_lags_behind_the_journal()
    leader = cluster.leader()
    spoilt = []

    def spoil(chunk: bytes) -> bytes:
        spoilt.append(chunk)
        return chunk[:-1] + bytes([chunk[-1] ^ 1]) if len(spoilt) < 3 else chunk

    cluster.machines[leader.name].spoil = spoil
    cluster.until(lambda: spoilt)
    assert cluster.machines[lagging].items == []
    cluster.until(lambda: len(cluster.machines[lagging].items) == 61, seconds=60)
    assert not cluster.fatal


# -- who proposed may wait for ever


def test_plain_a_deposed_leader_never_answers(monkeypatch):
    cluster = PlainCluster(monkeypatch, 3)
    leader = cluster.elect("n1")
    for other in ("n2", "n3"):
        cluster.cut("n1", other)
    answers = []
    leader.propose(b"x", lambda result, error: answers.append(error))
    cluster.run(60.0)
    assert answers == []


def test_a_deposed_leader_says_that_it_does_not_know():
    cluster = Cluster()
    leader = cluster.leader()
    cluster.isolate(leader.name)
    answers = []
    leader.propose(b"was it committed?", lambda result, error: answers.append(error))
    took = cluster.until(lambda: answers)
    assert isinstance(answers[0], OutcomeUnknown)
    assert took < 2.0
    cluster.run(5.0)
    assert len(answers) == 1


def test_plain_and_ours_say_when_another_entry_took_the_place(monkeypatch):
    plain = PlainCluster(monkeypatch, 3)
    leader = plain.elect("n1")
    for other in ("n2", "n3"):
        plain.cut("n1", other)
    answers = []
    leader.propose(b"lost", lambda result, error: answers.append(error))
    plain.run(1.0)
    assert answers == []

    cluster = Cluster(config=CONFIG.__class__(max_entry_bytes=8000, deposed_timeout_ms=4000))
    old = cluster.leader()
    cluster.isolate(old.name)
    ours = []
    old.propose(b"lost", lambda result, error: ours.append(error))
    cluster.run(1.0)
    cluster.commit(b"took its place")
    cluster.net.heal()
    cluster.until(lambda: ours)
    assert isinstance(ours[0], NoLeader), "definite: it never happened"
    assert FAIL_REASON.SUCCESS == 0


def test_a_journal_of_another_node_is_refused():
    cluster = Cluster(count=1)
    cluster.kill("n1")
    with pytest.raises(ConfigError, match="belongs to node 'n1', and this is node 'n2'"):
        Journal.open(cluster.disks["n1"], "/raft", cluster.runtimes["n1"], Identity("test", 0, "n2"), JOURNAL)
