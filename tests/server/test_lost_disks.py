"""A disk that comes back empty, whatever `cluster.init` says: nothing that was acknowledged goes with it."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from chaos.sim import oracles
from chaos.sim.cluster import SimCluster
from chaos.sim.door import whole
from hadelay.codec.commands import encode_cancel
from hadelay.codec.formats import INDEX, INDEX_SIZE
from hadelay.errors import DamagedFile, HadelayError
from hadelay.ledger import checkpoint
from hadelay.ledger.hours.lookup import find_entry
from hadelay.ledger.state import Ledger
from hadelay.ledger.topics.topics import TopicState
from hadelay.ledger.views import listing
from hadelay.ledger.views.describe import describe
from hadelay.model import FIRST, PENDING, Draft, unpack_id
from hadelay.raft.ports import FOUNDING, RaftTuning
from hadelay.server import node
from hadelay.server.node import Node, raft_config
from hadelay.settings.node import Config


class AlwaysInit(SimCluster):
    """Every node is started with --init each time, as a service file might have it."""

    def config(self, name: str) -> Config:
        self.machines[name].founded = False
        return super().config(name)


def publish(cluster: SimCluster, body: bytes) -> list[int]:
    """Publish at the leader, and wait for its answer."""
    answers: list[tuple[Any, HadelayError | None]] = []
    leader = cluster.leader()
    assert leader is not None
    draft = Draft("orders", 3_600_000, True, 0, 0, b"", body)
    leader.publishing.publish([draft], None, lambda result, error: answers.append((result, error)))
    cluster.world.run_until(cluster.world.now + 3.0, stop=lambda: bool(answers))
    ((result, error),) = answers
    assert error is None
    return list(result.ids)


def wait_for_leader(cluster: SimCluster) -> None:
    cluster.world.run_until(cluster.world.now + 5.0, stop=lambda: cluster.leader() is not None)
    assert cluster.leader() is not None


def test_a_wiped_node_with_an_order_to_found_a_cluster_does_not_vote_for_a_lagging_one() -> None:
    cluster = AlwaysInit(1, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    publish(cluster, b"all have this")
    leader = cluster.leader()
    assert leader is not None
    lagging, wiped = [name for name in cluster.names if name != leader.name]
    cluster.world.run_for(1.0)
    cluster.kill(lagging)
    (kept,) = publish(cluster, b"two of three have this")
    cluster.power_cut(*cluster.names)
    cluster.wipe(wiped)
    cluster.start(lagging)
    cluster.start(wiped)
    cluster.world.run_for(5.0)
    cluster.start(leader.name)
    cluster.world.run_for(5.0)
    wait_for_leader(cluster)
    assert [node.name for node in cluster.nodes() if find_entry(node.ledger, kept) is None] == []
    assert not cluster.violations
    publish(cluster, b"and on it goes")


def test_the_ledger_of_a_snapshot_is_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SimCluster(6, restart=False)
    cluster.checkpoint_bytes, cluster.journal_keep_bytes, cluster.segment_bytes = 1 << 18, 1 << 14, 1 << 16
    cluster.start_all()
    wait_for_leader(cluster)
    for _ in range(60):
        publish(cluster, bytes(10_000))
    leader = cluster.leader()
    assert leader is not None
    wiped = next(name for name in cluster.names if name != leader.name)
    cluster.kill(wiped)
    cluster.wipe(wiped)
    on_loop, calls, installed, load_topic = [False], list[bool](), Node.installed, checkpoint._TOPIC.load

    def counted(row: bytes) -> TopicState:
        calls.append(on_loop[0])
        return load_topic(row)

    def install(filling: Node, ledger: Ledger) -> None:
        on_loop[0] = True
        installed(filling, ledger)
        on_loop[0] = False

    cluster.start(wiped)
    monkeypatch.setattr(checkpoint._TOPIC, "load", counted)
    monkeypatch.setattr(Node, "installed", install)
    cluster.world.run_for(10.0)
    assert calls == [False]
    filled = next(one for one in cluster.nodes() if one.name == wiped)
    assert filled.raft.stats.snapshots_installed == 1
    assert oracles.digest(filled.ledger) == oracles.digest(leader.ledger)
    assert filled.ledger.store is filled.storage.hours
    publish(cluster, b"and on it goes")
    assert not cluster.violations


def test_founding_members_that_start_one_after_another_all_come_to_count() -> None:
    cluster = AlwaysInit(2, restart=False)
    first, second, late = cluster.names
    cluster.start(first)
    cluster.start(second)
    wait_for_leader(cluster)
    publish(cluster, b"before the third is there")
    cluster.power_cut(first)
    cluster.start(first)
    wait_for_leader(cluster)
    cluster.start(late)
    cluster.world.run_for(5.0)
    assert all(node.raft.journal.admitted for node in cluster.nodes())
    assert len(cluster.nodes()) == 3


def test_a_node_that_meets_damage_while_it_applies_begins_anew_from_the_others() -> None:
    cluster = SimCluster(5)
    cluster.start_all()
    wait_for_leader(cluster)
    (message_id,) = publish(cluster, b"its index entry rots on one node")
    cluster.world.run_for(1.0)
    leader = cluster.leader()
    assert leader is not None
    rotten = next(node for node in cluster.nodes() if node is not leader)
    machine = cluster.machines[rotten.name]
    _, hour, index = unpack_id(message_id)
    path = rotten.storage.hours.path(hour) + ".idx"
    rotten.storage.hours.lengths(hour)  # it is written by now, or the next line would hit nothing
    machine.disk.flip_bit(path, index * INDEX_SIZE + 16)
    leader.publishing.propose(encode_cancel("n1", [message_id]), lambda result, error: None)
    cluster.world.run_for(20.0)
    healed = next(node for node in cluster.nodes() if node.name == rotten.name)
    assert healed is not rotten
    assert healed.ledger.incarnations[rotten.name] > FOUNDING
    wait_for_leader(cluster)
    publish(cluster, b"and on it goes")
    cluster.world.run_for(2.0)
    assert len({node.ledger.chain for node in cluster.nodes()}) == 1
    assert {str(describe(node.ledger, message_id).state) for node in cluster.nodes()} == {"cancelled"}
    # The simulator knows nothing of our flip: it sees a node end itself, and come back without its term.
    expected = ("DamagedFile", "went back", "its disk says", "its disk is in", f"{rotten.name} had entry")
    assert [str(v) for v in cluster.violations if not any(word in str(v) for word in expected)] == []


def test_a_listing_says_where_an_index_entry_is_damaged_that_names_another_place() -> None:
    """The entry's own number is part of what rotted: from seed 11 of `python -m chaos sim --fault rot`."""
    cluster = SimCluster(6)
    cluster.start_all()
    wait_for_leader(cluster)
    ids = [publish(cluster, b"listed")[0] for _ in range(2)]
    leader = cluster.leader()
    assert leader is not None
    _, hour, index = unpack_id(ids[1])
    hours = leader.storage.hours
    hours.lengths(hour)  # it is written by now, or the next line would hit nothing
    own_number = INDEX.fields["index"][1]
    cluster.machines[leader.name].disk.flip_bit(f"{hours.path(hour)}.idx", index * INDEX_SIZE + own_number + 3, 7)
    topic = leader.ledger.topic("orders")
    assert topic is not None
    query = listing.ListQuery(topic.number, PENDING, 0, 1 << 52, 0, FIRST, 10)
    with pytest.raises(DamagedFile) as raised:
        whole(listing.listing(leader.ledger, query, leader.ledger.now_ms))
    assert (raised.value.path, raised.value.offset) == (f"{hours.path(hour)}.idx", index * INDEX_SIZE)


def test_an_empty_node_becomes_ready_while_leadership_moves_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the tables alone takes longer than a term, and each leader has another one."""

    def slow(config: Config) -> RaftTuning:
        return replace(raft_config(config), pull_bytes_per_s=40_000, chunk_bytes=4 << 10)

    monkeypatch.setattr(node, "raft_config", slow)
    cluster = SimCluster(3, restart=False)
    cluster.checkpoint_bytes, cluster.journal_keep_bytes, cluster.segment_bytes = 1 << 18, 1 << 14, 1 << 16
    cluster.start_all()
    wait_for_leader(cluster)
    world, number = cluster.world, count()

    def load(messages: int, size: int) -> None:
        drafts = [
            Draft("orders", 3_600_000, True, 0, 0, b"", bytes(size), b"%d" % next(number)) for _ in range(messages)
        ]
        if (leader := cluster.leader()) is not None:
            leader.publishing.publish(drafts, None, lambda result, error: None)

    for _ in range(16):
        load(100, 10)
        world.run_for(0.1)
    world.run_for(6.0)
    empty, *others = sorted(cluster.names, key=lambda name: name == cluster.leader().name)  # type: ignore[union-attr]
    cluster.kill(empty)
    for _ in range(6):
        load(50, 1_000)
        world.run_for(0.2)
    cluster.wipe(empty)
    cluster.start(empty)
    begun, terms = world.now, set[int]()
    while world.now < begun + 60.0:
        until = world.now + 2.0
        while world.now < until:
            load(1, 10)
            world.run_for(0.2)
        ready = next((one for one in cluster.nodes() if one.name == empty), None)
        if ready is not None and ready.raft.journal.admitted and ready.leadership.serves():
            break
        if (leader := cluster.leader()) is not None and leader.name in others:
            terms.add(leader.raft.term)
            leader.leadership.transfer(next(name for name in others if name != leader.name), lambda error: None)
    assert world.now < begun + 60.0, f"not ready after {len(terms)} transfers"
    assert len(terms) > 2, "the snapshot was complete before leadership moved"
    assert ready is not None
    assert ready.raft.stats.snapshots_installed == 1
    assert not cluster.violations
