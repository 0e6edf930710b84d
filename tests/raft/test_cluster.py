"""Three nodes in a simulated world: elections, transfers, reads, incarnations, files, a slow disk."""

from __future__ import annotations

import dataclasses
from posixpath import dirname

import msgpack
import pytest

from chaos.sim.disk import SimDisk
from hadelay.errors import FatalError, HadelayError, NoLeader, Overloaded, TooLarge
from hadelay.raft import messages
from hadelay.raft.library import NO_OP
from hadelay.raft.ports import RaftTuning
from tests.raft.rig import CONFIG, Cluster, Lone, one_lags_behind_the_journal


def outcome(call) -> list[HadelayError | None]:
    answers: list[HadelayError | None] = []
    call(answers.append)
    return answers


def restore(disk: SimDisk, files: dict[str, bytes]) -> None:
    """Put an old copy of a disk back: all of it durable."""
    disk.wipe()
    for path, data in sorted(files.items()):
        disk.makedirs(dirname(path))
        disk.open(path, create=True).pwrite(data, 0)
    disk.sync_everything()


# -- proposals


def test_limits_are_answered_in_words():
    cluster = Cluster()
    leader, answers = cluster.leader(), []

    def done(result, error):
        answers.append(error)

    leader.propose(b"x" * 8001, done)
    leader.propose(b"x", done)
    cluster.nodes[cluster.followers()[0]].propose(b"xx", done)
    assert [type(error) for error in answers] == [TooLarge, TooLarge, NoLeader]
    assert all(str(error) for error in answers)


def test_waiting_proposals_are_bounded():
    cluster = Cluster(config=RaftTuning(max_entry_bytes=8000, max_waiting=10))
    answers = []
    for n in range(15):
        cluster.leader().propose(b"%02d" % n, lambda result, error: answers.append(error))
    assert [type(error) for error in answers] == [Overloaded] * 5
    cluster.until(lambda: len(answers) == 15)
    assert answers[5:] == [None] * 10


def test_one_node_alone_commits_when_its_disk_has_it():
    cluster = Cluster(count=1)
    leader = cluster.leader()
    cluster.disks["n1"].sync_delay_s = 0.1
    answers = []
    leader.propose(b"alone", lambda result, error: answers.append(result))
    cluster.run(0.04)
    assert (answers, leader.commit_index) == ([], leader.last_index - 1)
    cluster.until(lambda: answers)
    assert leader.journal.synced_index == leader.commit_index == leader.last_index


def test_applied_once_in_order_after_restarts_of_all():
    cluster = Cluster()
    sent = []
    for round in range(4):
        for n in range(10):
            sent.append(b"%d %d" % (round, n))
        cluster.commit(*sent[-10:])
        for name in cluster.names:
            if round % 2:
                cluster.machines[name].take_checkpoint()
            cluster.kill(name, power=bool(round % 2))
        for name in cluster.names:
            cluster.start(name)
        cluster.leader()
    cluster.settle()
    assert all(machine.items == sent for machine in cluster.machines.values())


def test_heartbeats_carry_the_leaders_info_and_idle_costs_nothing_else():
    cluster = Cluster()
    cluster.commit(b"something")
    cluster.run(1.0)
    sizes = {name: node.journal.size_bytes for name, node in cluster.nodes.items()}
    syncs = {name: disk.syncs for name, disk in cluster.disks.items()}
    frames, events = cluster.net.frames, cluster.world.events
    cluster.run(10.0)
    assert sizes == {name: node.journal.size_bytes for name, node in cluster.nodes.items()}
    assert syncs == {name: disk.syncs for name, disk in cluster.disks.items()}
    beats = 10_000 / CONFIG.heartbeat_ms
    assert cluster.net.frames - frames < beats * 4 * 1.1
    assert cluster.world.events - events < beats * 20
    for name in cluster.followers():
        assert b"time" in cluster.machines[name].infos


def test_the_nodes_own_traffic_uses_the_same_link():
    cluster = Cluster()
    leader = cluster.leader()
    other = cluster.followers()[0]
    assert leader.send(other, 64, b"hello")
    cluster.run(0.1)
    assert cluster.machines[other].messages == [(leader.name, 64, b"hello")]
    cluster.kill(other)
    cluster.run(0.1)
    assert not leader.send(other, 64, b"hello")
    assert not leader.membership.connected(other)


# -- transfers


def test_a_transfer_under_load_loses_nothing():
    cluster = Cluster()
    old, to = cluster.leader(), cluster.followers()[1]
    answers = []
    for n in range(50):
        old.propose(b"before %d" % n, lambda result, error: answers.append(error))
    handed = outcome(lambda done: old.transfer(to, done))
    for n in range(20):
        old.propose(b"during %d" % n, lambda result, error: answers.append(error))
    took = cluster.until(lambda: handed and cluster.nodes[to].is_leader)
    assert handed == [None]
    assert took < CONFIG.transfer_ms / 1000
    cluster.until(lambda: len(answers) == 70)
    assert answers[:50].count(None) + sum(isinstance(e, NoLeader) for e in answers) == 70
    cluster.settle()
    assert len(cluster.machines[to].items) == answers.count(None)


def test_a_leader_by_transfer_does_not_campaign_under_the_next_leader():
    """The campaign that a leader asked for ended with the election: heartbeats count again."""
    cluster = Cluster()
    first = cluster.leader()
    second = cluster.followers()[0]
    first.transfer(second, lambda error: None)
    cluster.until(lambda: cluster.nodes[second].is_leader)
    cluster.nodes[second].transfer(first.name, lambda error: None)
    cluster.until(lambda: first.is_leader)
    term = first.term
    cluster.run(3 * CONFIG.election_max_ms / 1000)
    assert first.is_leader
    assert first.term == term


def test_a_transfer_that_nobody_takes_ends_and_proposals_go_on():
    cluster = Cluster()
    leader, to = cluster.leader(), cluster.followers()[0]
    cluster.runtimes[to].pause()
    handed = outcome(lambda done: leader.transfer(to, done))
    again = outcome(lambda done: leader.transfer(to, done))
    answers = []
    leader.propose(b"held back", lambda result, error: answers.append(error))
    took = cluster.until(lambda: handed)
    assert isinstance(handed[0], Overloaded)
    assert isinstance(again[0], Overloaded)
    assert took == pytest.approx(CONFIG.transfer_ms / 1000, abs=0.02)
    cluster.until(lambda: answers)
    assert answers == [None]


def test_only_a_leader_hands_over_and_only_to_a_member_that_is_there():
    cluster = Cluster()
    follower = cluster.nodes[cluster.followers()[0]]
    assert isinstance(outcome(lambda done: follower.transfer(None, done))[0], NoLeader)
    assert isinstance(outcome(lambda done: cluster.leader().transfer("n9", done))[0], Overloaded)


def test_a_leader_whose_disk_hangs_hands_over():
    cluster = Cluster()
    old = cluster.leader()
    cluster.disks[old.name].sync_delay_s = 30.0
    old.propose(b"stuck", lambda result, error: None)
    took = cluster.until(lambda: any(node.is_leader for node in cluster.nodes.values() if node is not old))
    assert 1.0 <= took < 2.0
    cluster.commit(b"goes on without it")


# -- elections


def test_a_leader_that_dies_without_a_word_is_replaced_within_its_timeout():
    for seed in range(10):
        cluster = Cluster(seed=seed)
        old = cluster.leader()
        cluster.isolate(old.name)
        others = [node for node in cluster.nodes.values() if node is not old]
        assert cluster.until(lambda others=others: any(node.is_leader for node in others)) < 1.0


@pytest.mark.parametrize("count", [3, 5])
def test_nodes_that_ask_for_votes_at_once_do_not_split_them(count: int) -> None:
    config = dataclasses.replace(CONFIG, election_min_ms=200, election_max_ms=202)
    for seed in range(8):
        cluster = Cluster(count, seed, config)
        old = cluster.leader()
        cluster.run(0.3)
        cluster.isolate(old.name)
        others = [node for node in cluster.nodes.values() if node is not old]
        before = sum(node.stats.elections for node in others)
        assert cluster.until(lambda others=others: any(node.is_leader for node in others)) < 0.3
        assert sum(node.stats.elections for node in others) <= before + (1 if count == 3 else 2)


def test_a_node_that_slept_reads_its_mail_before_it_campaigns():
    """Its deadline passed while it slept, and the heartbeats of the leader wait to be read: it asks nobody, and goes on
    following. Pre-votes would be refused, so they are what to look for, not campaigns."""
    cluster = Cluster()
    leader = cluster.leader()
    sleeper = cluster.followers()[0]
    cluster.run(0.2)
    node, network = cluster.nodes[sleeper], cluster.net.nodes[sleeper]
    sent, send = list[int](), network.send
    network.send = lambda peer, frame, urgent=False: (  # type: ignore[method-assign]
        sent.append(bytes(frame if isinstance(frame, bytes) else b"".join(frame))[0]) or send(peer, frame, urgent)
    )
    for n in range(10):
        cluster.runtimes[sleeper].pause()
        cluster.run(0.7 + n * 0.005)
        cluster.runtimes[sleeper].resume()
        cluster.run(0.05)
        assert node.leader == leader.name
        cluster.run(0.15)
    assert leader.is_leader
    assert messages.APPEND_REPLY in sent
    assert not {messages.PRE_VOTE, messages.VOTE} & set(sent)


def test_a_vote_is_given_once_per_term():
    lone = Lone()
    lone.run(1.0)
    lone.wire.sent.clear()
    for peer in ("n2", "n3", "n2"):
        lone.node.frame(peer, messages.encode(messages.VOTE, 20, 9, 9, True))
    lone.run(0.1)
    assert [peer for peer, _ in lone.wire.take(messages.VOTE_REPLY)] == ["n2"]


def test_a_leader_does_not_campaign_when_answers_to_a_later_question_arrive():
    lone = Lone()
    lone.node.event(lone.node.elections.campaign)
    term = lone.node.term
    lone.run(2 * CONFIG.election_max_ms / 1000)
    assert lone.wire.take(messages.PRE_VOTE)
    lone.node.frame("n2", messages.encode(messages.VOTE_REPLY, term))
    assert lone.node.is_leader
    campaigns = lone.node.stats.elections
    lone.node.frame("n2", messages.encode(messages.PRE_VOTE_REPLY, term + 1, True, term))
    assert lone.node.stats.elections == campaigns


def test_pre_votes_go_to_those_whose_log_is_not_behind_and_only_without_a_leader():
    lone = Lone()
    lone.append([(2, 3, b"xx")], term=3, prev=(1, 0))

    def asked(term: int, index: int, last_term: int) -> bool:
        lone.wire.sent.clear()
        lone.node.frame("n3", messages.encode(messages.PRE_VOTE, term, index, last_term))
        return messages.decode(lone.wire.take(messages.PRE_VOTE_REPLY)[0][1], int, bool, int)[1]

    assert not asked(4, 9, 9), "a leader was heard just now"
    lone.run(CONFIG.election_min_ms / 1000 + 0.001)
    assert asked(4, 2, 3)
    assert not asked(3, 2, 3), "not for a term that is here already"
    assert not asked(4, 1, 3)
    assert not asked(4, 50, 2)
    assert lone.node.term == 3, "asking changes nothing"


def test_a_candidate_gives_way_only_to_one_that_it_agrees_to():
    """Else a node with an old log, which nobody can elect, would keep the others from campaigning."""
    lone = Lone()
    lone.append([(2, 3, b"xx")], term=3, prev=(1, 0))
    lone.run(2 * CONFIG.election_max_ms / 1000)
    assert lone.wire.take(messages.PRE_VOTE), "n1 asks"
    name, deadline = lone.node.elections._members.name, lone.node.elections._deadline
    lone.node.elections._members.name = "n9"  # the other candidate has the smaller name
    lone.node.frame("n2", messages.encode(messages.PRE_VOTE, lone.node.term + 1, 1, 1))
    assert not messages.decode(lone.wire.take(messages.PRE_VOTE_REPLY)[-1][1], int, bool, int)[1]
    assert lone.node.elections._deadline == deadline
    lone.node.elections._members.name = name
    campaigns = lone.node.stats.elections
    lone.node.frame("n3", messages.encode(messages.PRE_VOTE_REPLY, lone.node.term + 1, True, lone.node.term))
    assert lone.node.stats.elections == campaigns + 1, "its own question still counts"


# -- reads


@pytest.mark.parametrize("who", ["leader", "follower"])
def test_a_read_sees_everything_committed_before_it(who):
    cluster = Cluster()
    for n in range(20):
        cluster.commit(b"write %d" % n)
        name = cluster.leader().name if who == "leader" else cluster.followers()[n % 2]
        answers = outcome(cluster.nodes[name].read_index)
        cluster.until(lambda answers=answers: answers)
        assert answers == [None]
        assert len(cluster.machines[name].items) == n + 1


def test_a_cut_off_leader_confirms_no_read():
    cluster = Cluster()
    old = cluster.leader()
    cluster.isolate(old.name)
    answers = outcome(old.read_index)
    follower = next(name for name in cluster.names if name != old.name)
    theirs = outcome(cluster.nodes[follower].read_index)
    cluster.until(lambda: answers and theirs)
    assert isinstance(answers[0], NoLeader)
    assert isinstance(theirs[0], NoLeader)


def test_an_answer_to_a_heartbeat_from_before_a_read_does_not_confirm_it():
    lone = Lone()
    lone.lead()
    node = lone.node
    lone.answer("n2", node.last_index)
    assert node.commit_index == node.last_index
    sent = node.replication.round
    answers = outcome(node.read_index)
    lone.run(0.001)

    def heard(round: int) -> None:
        reply = messages.encode_append_reply(messages.OK, node.term, node.last_index, 0, round)
        node.frame("n2", reply)
        lone.run(0.001)

    # This answer may have been on its way for long, and n2 may follow another leader by now.
    heard(sent)
    assert not answers
    assert node.replication.round > sent
    heard(node.replication.round)
    assert answers == [None]


def test_a_read_ends_when_the_entries_that_it_waits_for_may_never_come():
    """The leader has confirmed it, and was cut off before its entries arrived."""
    lone = Lone()
    lone.append([], term=1, prev=(1, 0))
    answers = outcome(lone.node.read_index)
    lone.run(0.001)
    lone.node.frame("n2", messages.encode(messages.READ_REPLY, 1, True, 9))
    for _ in range(100):
        lone.append([], term=1, prev=(1, 0))
        lone.run(0.1)
    assert not answers, "as long as there is a leader, the node may be catching up"
    lone.run(1.0)
    assert isinstance(answers[0], NoLeader)


def test_reads_share_one_round():
    cluster = Cluster()
    leader = cluster.leader()
    cluster.run(0.1)
    before = leader.replication.round
    answers = []
    for _ in range(500):
        leader.read_index(answers.append)
    cluster.until(lambda: len(answers) == 500)
    assert leader.replication.round - before <= 3


# -- incarnations


def test_a_wiped_node_is_admitted_before_it_votes():
    cluster = Cluster()
    cluster.commit(*[b"%d" % n * 5 for n in range(30)])
    wiped = cluster.followers()[0]
    other = cluster.followers()[1]
    cluster.kill(wiped)
    cluster.disks[wiped].wipe()
    cluster.start(wiped, incarnation=1_790_000_000_000)
    node = cluster.nodes[wiped]
    # Between the two that are left and the one that forgot, the log must not be lost.
    cluster.isolate(cluster.leader().name)
    cluster.run(3.0)
    assert not cluster.nodes[other].is_leader
    assert not node.elections.eligible
    cluster.net.heal()
    cluster.until(lambda: node.journal.admitted)
    assert node.applied_index >= 31
    cluster.settle()
    assert len(cluster.machines[wiped].items) == 30
    assert cluster.machines[other].incarnations == {wiped: 1_790_000_000_000}
    # Now it counts: the cluster lives with it and without the other.
    cluster.kill(other)
    cluster.commit(b"with the new one")


def test_a_node_that_is_not_admitted_keeps_no_leader_in_office():
    cluster = Cluster()
    cluster.commit(b"one")
    wiped, other = cluster.followers()
    cluster.kill(other)
    cluster.kill(wiped)
    cluster.disks[wiped].wipe()
    cluster.start(wiped, incarnation=1_790_000_000_000)
    cluster.run(3.0)
    assert not any(node.is_leader for node in cluster.nodes.values())
    cluster.start(other)
    cluster.until(lambda: cluster.nodes[wiped].journal.admitted)
    cluster.commit(b"two")


def test_an_old_copy_put_back_is_noticed_and_admitted_anew():
    cluster = Cluster()
    restored = cluster.followers()[0]
    cluster.commit(*[b"early %d" % n for n in range(10)])
    cluster.settle()
    copy = cluster.disks[restored].copy()
    cluster.commit(*[b"late %d" % n for n in range(10)])
    cluster.run(1.0)
    cluster.kill(restored)
    restore(cluster.disks[restored], copy)
    node = cluster.start(restored)
    assert node.journal.admitted, "it cannot know"
    cluster.until(lambda: node.journal.incarnation != 1)
    assert not node.journal.admitted
    cluster.until(lambda: node.journal.admitted)
    cluster.settle()
    assert len(cluster.machines[restored].items) == 20


def test_admitted_members_still_vote_after_all_have_restarted():
    """Their checkpoints may be older than their admissions: the journal itself remembers."""
    cluster = Cluster()
    cluster.commit(b"something")
    for name in cluster.followers():
        cluster.kill(name)
        cluster.disks[name].wipe()
        cluster.start(name, incarnation=1000 + int(name[1:]))
        cluster.until(lambda name=name: cluster.nodes[name].journal.admitted)
        cluster.settle()
    for name in cluster.names:
        cluster.kill(name)
        cluster.checkpoints[name] = None
    for name in cluster.names:
        cluster.start(name)
    cluster.commit(b"and on")


def test_data_ahead_of_the_journal_is_refused():
    cluster = Cluster()
    name = cluster.followers()[0]
    copy = cluster.disks[name].copy()
    cluster.commit(*[b"%d!" % n for n in range(10)])
    cluster.settle()
    cluster.machines[name].take_checkpoint()
    cluster.kill(name)
    restore(cluster.disks[name], copy)
    with pytest.raises(FatalError, match="an old copy of the journal"):
        cluster.start(name)


# -- files


def test_a_follower_behind_the_journal_gets_files_and_the_rest_from_the_log():
    cluster, lagging = one_lags_behind_the_journal()
    leader = cluster.leader()
    node, machine = cluster.nodes[lagging], cluster.machines[lagging]
    cluster.until(lambda: node.applier.installing)
    assert not node.elections.eligible
    assert machine.items == []
    cluster.until(lambda: len(machine.items) == 61, seconds=30)
    cluster.settle()
    assert machine.items == cluster.machines[leader.name].items
    assert (node.stats.snapshots_installed, leader.stats.snapshots_sent) == (1, 1)
    assert node.journal.base_index > 2
    cluster.kill(lagging)
    cluster.start(lagging)
    cluster.commit(b"and on")
    cluster.settle()
    assert len(cluster.machines[lagging].items) == 62


@pytest.mark.parametrize(("commands", "snapshots"), [(1_100, 1), (900, 0)])
def test_an_empty_follower_gets_files_if_they_save_it_many_entries(commands: int, snapshots: int):
    cluster = Cluster()
    for n in range(0, commands, 100):
        cluster.commit(*[b"command %d" % m for m in range(n, n + 100)])
    wiped = cluster.followers()[0]
    for name, machine in cluster.machines.items():
        if name != wiped:
            machine.take_checkpoint()
    cluster.commit(b"after the checkpoint")
    assert cluster.leader().journal.base_index == 1
    cluster.kill(wiped)
    cluster.disks[wiped].wipe()
    cluster.start(wiped, incarnation=1_790_000_000_000)
    cluster.until(lambda: len(cluster.machines[wiped].items) == commands + 1, seconds=30)
    cluster.settle()
    assert cluster.machines[wiped].items == cluster.machines[cluster.leader().name].items
    cluster.until(lambda: cluster.nodes[wiped].journal.admitted)
    assert cluster.leader().stats.snapshots_sent == snapshots


@pytest.mark.parametrize("fault", ["unreadable", "not made again"])
def test_an_empty_follower_gets_the_log_if_its_files_cannot_be_had(fault: str):
    """The leader offers a snapshot, and cannot read its files; or it cannot make the files of the next checkpoint."""
    cluster = Cluster()
    for n in range(0, 1_100, 100):
        cluster.commit(*[b"command %d" % m for m in range(n, n + 100)])
    wiped = cluster.followers()[0]
    leader = cluster.leader()
    machine = cluster.machines[leader.name]
    machine.take_checkpoint()

    def spoil(chunk: bytes) -> bytes:
        if fault == "not made again":
            machine.manifest = lambda: None  # type: ignore[method-assign]
        raise OSError("the disk cannot read the file")

    machine.spoil = spoil
    cluster.kill(wiped)
    cluster.disks[wiped].wipe()
    cluster.start(wiped, incarnation=1_790_000_000_000)
    cluster.until(lambda: len(cluster.machines[wiped].items) == 1_100, seconds=60)
    assert cluster.leader() is leader
    assert leader.stats.snapshots_sent > 0
    assert cluster.nodes[wiped].stats.snapshots_installed == 0


def test_a_log_with_another_entry_at_a_snapshots_end_does_not_stay():
    """A leader that was cut off comes back: its log is longer than the snapshot that it gets, with other entries."""
    cluster = Cluster()
    cluster.commit(b"before")
    cluster.settle()
    name = cluster.leader().name
    cluster.isolate(name)
    for n in range(90):
        cluster.nodes[name].propose(b"y" * 1500 + b"%d" % n, lambda result, error: None)
    cluster.until(lambda: not cluster.nodes[name].is_leader)
    cluster.kill(name)
    for n in range(60):
        cluster.commit(b"x" * 1500 + b"%d" % n)
    for other, machine in cluster.machines.items():
        machine.take_checkpoint()
        cluster.nodes[other].compact(machine.index)
    cluster.net.heal()
    back, leader = cluster.start(name), cluster.leader()
    assert back.last_index > leader.last_index
    assert leader.journal.base_index > 3
    cluster.until(lambda: back.stats.snapshots_installed, seconds=30)
    cluster.settle()
    assert cluster.machines[name].items == cluster.machines[leader.name].items
    assert (back.last_index, back.journal.last_term) == (leader.last_index, leader.journal.last_term)


def test_entries_behind_a_snapshot_on_its_way_stay_in_the_journal():
    """Without them the follower, when it has the snapshot, would need another one."""
    cluster, lagging = one_lags_behind_the_journal()
    leader = cluster.leader()
    cluster.until(lambda: leader.peers[lagging].manifest is not None)
    manifest = leader.peers[lagging].manifest
    cluster.net.cut(lagging, leader.name)
    for n in range(30):
        cluster.commit(b"y" * 1500 + b"%d" % n)
    assert leader.peers[lagging].manifest is manifest
    leader.compact(leader.applied_index)
    assert leader.journal.base_index <= manifest.index
    cluster.net.heal()
    cluster.settle()
    assert leader.stats.snapshots_sent == 1


def test_damage_in_old_entries_makes_the_leader_send_files():
    cluster, lagging = one_lags_behind_the_journal(compact=False)
    leader = cluster.leader().name
    for name in cluster.names:
        if name != lagging:
            cluster.kill(name)
    disk = cluster.disks[leader]
    path = next(path for path, data in sorted(disk.copy().items()) if data.count(b"x" * 1500) > 9)
    disk.flip_bit(path, 9000)
    cluster.kill(lagging)
    other = next(name for name in cluster.names if name not in (leader, lagging))
    cluster.start(leader)
    cluster.start(other)
    cluster.leader()
    cluster.until(lambda: cluster.nodes[leader].last_index == cluster.nodes[other].last_index)
    if not cluster.nodes[leader].is_leader:
        cluster.leader().transfer(leader, lambda error: None)
        cluster.until(lambda: cluster.nodes[leader].is_leader)
    cluster.start(lagging)
    cluster.until(lambda: len(cluster.machines[lagging].items) == 61, seconds=30)
    assert cluster.nodes[leader].stats.snapshots_sent == 1
    assert not cluster.fatal


def test_a_pull_outlives_the_leader_it_began_with():
    cluster, lagging = one_lags_behind_the_journal()
    node = cluster.nodes[lagging]
    cluster.until(lambda: node.applier.installing)
    cluster.leader().transfer(None, lambda error: None)
    cluster.until(lambda: len(cluster.machines[lagging].items) == 61, seconds=60)
    cluster.settle()


@pytest.mark.parametrize("steps", range(1, 24))
def test_a_crash_at_any_step_of_an_installation(steps):
    cluster, lagging = one_lags_behind_the_journal()
    cluster.until(lambda: cluster.nodes[lagging].applier.installing)
    cluster.disks[lagging].crash_in = steps
    cluster.run(2.0)
    if lagging not in cluster.nodes:
        cluster.disks[lagging].power_cut()
        cluster.start(lagging)
    cluster.until(lambda: len(cluster.machines[lagging].items) == 61, seconds=30)
    cluster.settle()


def test_a_vote_that_waits_for_a_rewound_disk_does_not_leave():
    for rewound_first in (False, True):
        lone = Lone()
        lone.append([(2, 1, b"a0")], term=1, prev=(1, 0))
        frames = [
            ("n3", messages.encode(messages.VOTE, 9, 9, 9, True)), ("n2", messages.encode(messages.REWOUND, 1, 5, 9)),
        ]  # fmt: skip
        for frame in reversed(frames) if rewound_first else frames:
            lone.node.frame(*frame)
        lone.run(0.2)
        assert lone.node.journal.incarnation > 1
        assert not lone.wire.take(messages.VOTE_REPLY)
        assert not lone.fatal


def test_a_pause_of_the_leader_is_no_round_trip():
    """Followers would wait ten times as long before an election, once this node leads again."""
    lone = Lone()
    lone.lead()
    lone.runtime.pause()
    lone.run(20.0)
    for peer in lone.peers:
        reply = messages.encode_append_reply(messages.OK, lone.node.term, 0, 0, lone.node.replication.round)
        lone.node.frame(peer, reply)
    assert 0 < lone.node.replication._rtt_ms() <= 25


def test_a_manifest_that_names_files_outside_is_a_bad_frame():
    lone = Lone()
    lone.append([], term=1, prev=(0, 0))
    for files in ([["../../etc/passwd", 1, 1]], [["/etc/passwd", 1, 1]], [[1, 2, 3]], ["x"]):
        lone.wire.dropped.clear()
        lone.node.frame("n2", messages.encode(messages.SNAPSHOT, 1, 50, 1, b"", files))
        assert lone.wire.dropped == ["n2"]
    assert not lone.node.applier.installing
    assert not lone.fatal


def test_entries_with_a_gap_between_them_are_a_bad_frame():
    lone = Lone()
    lone.append([(2, 1, b"a0"), (4, 1, b"a1"), (4, 1, b"a2")], term=1, prev=(1, 0))
    assert lone.wire.dropped == ["n2"]
    assert lone.log() == []
    assert not lone.fatal


def test_frames_of_kinds_that_nobody_knows_yet_are_passed_over():
    lone = Lone()
    lone.node.frame("n2", bytes((40,)) + msgpack.packb(["from", "the future"]))
    assert not lone.wire.dropped


@pytest.mark.parametrize(("unapplied", "waits"), [(10, False), (600, True)])
def test_a_node_with_much_left_to_apply_lets_others_campaign_first(unapplied: int, waits: bool) -> None:
    lone = Lone()
    entries = [(index, 1, b"entry") for index in range(2, unapplied + 2)]
    lone.append(entries, term=1, prev=(1, 0))
    lone.run(0.1)
    lone.node.link_down("n2", True)
    lone.run(0.7)
    assert bool(lone.wire.take(messages.PRE_VOTE)) is not waits
    lone.run(1.0)
    assert lone.wire.take(messages.PRE_VOTE), "nobody else may be left"


def test_a_caller_whose_entry_was_cut_off_is_answered_when_another_entry_takes_its_index() -> None:
    lone = Lone()
    lone.lead()
    answered: list[bytes] = []

    def propose(command: bytes) -> None:
        lone.node.propose(command, lambda result, error: answered.append(command))

    for command in (b"first", b"second", b"third"):
        propose(command)
    lone.run(0.01)
    term, first = lone.node.term, lone.node.last_index - 2
    lone.append([(first, term + 1, NO_OP)], term=term + 1, prev=(first - 1, term))
    lone.run(0.01)
    assert lone.log()[-1] == (first, term + 1)
    lone.lead()
    lone.answer("n2", lone.node.last_index)
    lone.run(0.01)
    assert answered == [b"first", b"second"]
    propose(b"another")
    lone.run(0.01)
    lone.answer("n2", lone.node.last_index)
    lone.run(3.0)
    assert sorted(answered) == [b"another", b"first", b"second", b"third"]


@pytest.mark.parametrize("seed", range(5))
def test_a_leader_lease_holds_also_while_a_follower_whose_link_was_reset_is_elected(seed: int) -> None:
    """By one that came back and has never heard of the leader."""
    cluster = Cluster(seed=seed)
    old = cluster.leader()
    cluster.commit(b"before")
    cluster.settle()
    near, back = cluster.followers()
    cluster.kill(back)
    for a, b in ((old.name, back), (back, old.name)):
        cluster.net.cut(a, b)
    cluster.start(back)
    cluster.run(0.2)
    assert old.has_leader_lease()
    cluster.net.reset(old.name, near)
    elected = cluster.nodes[near]
    while not elected.is_leader:
        cluster.run(0.001)
        assert not (old.has_leader_lease() and elected.is_leader)
        assert old.is_leader, "it heard of the next one first: that shows nothing"
