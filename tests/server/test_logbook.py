"""What nodes remember for people: why leadership changed. Backups: test_copies.py."""

from __future__ import annotations

import re

import pytest

from chaos.sim.cluster import SimCluster
from hadelay.server.logbook import TERMS, Logbook, TermSeen
from hadelay.server.node import Node
from tests.server.test_lost_disks import wait_for_leader


@pytest.fixture
def cluster() -> SimCluster:
    cluster = SimCluster(1, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(1.5)
    return cluster


def leads(cluster: SimCluster) -> Node:
    found = cluster.leader()
    assert found is not None
    return found


def why(cluster: SimCluster) -> str:
    """The last change of leadership, told alike by every living node."""
    reported = {(node.logbook.terms()[0][0].term, node.logbook.terms()[0][1]) for node in cluster.nodes()}
    assert [term for term, _ in reported] == [leads(cluster).raft.term]
    return reported.pop()[1]


def wait_for_another(cluster: SimCluster, old: str) -> None:
    def another() -> bool:
        leader = cluster.leader()
        return leader is not None and leader.name != old and bool(leader.leading)

    cluster.world.run_until(cluster.world.now + 10.0, stop=another)
    assert another()
    cluster.world.run_for(1.5)


def test_a_node_that_has_just_started_knows_no_terms(cluster: SimCluster) -> None:
    node = leads(cluster)
    node.logbook._terms.clear()
    assert node.logbook.terms() == []


def test_every_node_knows_why_leadership_changed(cluster: SimCluster) -> None:
    assert re.fullmatch(r"first election|n\d has heard no leader since it started", why(cluster))
    old = leads(cluster)
    old.leadership.transfer(None, lambda error: None, "it is stopping")
    wait_for_another(cluster, old.name)
    assert why(cluster) == f"{old.name} handed over: it is stopping"
    old = leads(cluster)
    old.leadership.drain(True, lambda error: None)
    wait_for_another(cluster, old.name)
    assert why(cluster) == f"{old.name} handed over: it is drained"
    old = leads(cluster)
    cluster.kill(old.name)
    wait_for_another(cluster, old.name)
    assert why(cluster) == f"{old.name} closed its connections, as a process does that ends"
    cluster.start(old.name)
    cluster.world.run_for(3.0)
    again = next(node for node in cluster.nodes() if node.name == old.name)
    assert len(again.logbook.terms()) >= 4, "a node that starts is told what was before"
    assert why(cluster).startswith(old.name)


def test_a_leader_that_is_cut_off_was_not_heard(cluster: SimCluster) -> None:
    old = leads(cluster)
    others = [name for name in cluster.names if name != old.name]
    for name in others:
        cluster.net.cut(old.name, name)
        cluster.net.cut(name, old.name)
    cluster.world.run_for(3.0)
    new = next(node for node in cluster.nodes() if node.leading and node.name != old.name)
    silent = re.fullmatch(rf"{old.name} was not heard for (\d+) ms", new.logbook.terms()[0][1])
    assert silent
    assert 200 <= int(silent[1]) < 3_000
    cluster.net.heal()
    cluster.world.run_for(3.0)
    assert re.fullmatch(rf"{old.name} stepped down: no majority answered within \d+ ms", why(cluster))


def test_a_node_without_news_reports_nothing_and_forgets_old_terms(cluster: SimCluster) -> None:
    leader = leads(cluster)
    follower = next(node for node in cluster.nodes() if not node.leading)
    follower.logbook = book = Logbook(follower.runtime, follower.raft, follower.link, follower.clock)
    cluster.world.run_for(1.0)
    ((row, reason),) = book.terms()
    assert (row.leader, row.term, reason) == (leader.name, leader.raft.term, "")
    book._hear(leader.name, [[[term, "n9", 0, "why"] for term in range(100, 200)], []], lambda result, error: None)
    assert [row.term for row, _ in book.terms()] == list(range(199, 199 - TERMS, -1))
    for wrong in ([[[7, "n1", -1]], []], [[[7, "n1" * 300, 0]], []], [[], [["n1", "7", 0, 1, 0, "odd"]]], [[]], 7):
        with pytest.raises(ValueError, match=r"Expected|Invalid"):
            book._hear(leader.name, wrong, lambda result, error: None)


def test_the_leaders_own_lines_stay(cluster: SimCluster) -> None:
    book = leads(cluster).logbook
    rows = [[90, "n1", 5, "", ""], [90, "n1", 4, "n2 handed over", ""], [90, "n1", 6, "else", "n1 left"]]
    book._hear("n2", [rows, []], lambda result, error: None)
    assert book.terms()[0] == (TermSeen(90, "n1", 4, "n2 handed over", "n1 left"), "n2 handed over")


def test_every_node_knows_how_a_leader_resumed(cluster: SimCluster) -> None:
    old = leads(cluster)
    cluster.kill(old.name)
    wait_for_another(cluster, old.name)
    new = leads(cluster)
    reported = [node.logbook.terms()[0][0].took_over for node in cluster.nodes()]
    assert len(reported) == 2
    assert reported[0] is not None
    assert [tuple(one or ()) for one in reported] == [tuple(reported[0])] * 2
    assert reported[0][3:] == (0, 0, 0)
    rows = [[new.raft.term, new.name, 5, "", "", [1, 2, 3, 4, 5, 6]]]
    new.logbook._hear("n2", [rows, []], lambda result, error: None)
    assert new.logbook.terms()[0][0].took_over == reported[0], "what the leader itself says stays"
    new.logbook._hear("n2", [[[99, "n9", 5, "", "", [1, 2, 3, 4, 5, 6]]], []], lambda result, error: None)
    assert new.logbook.terms()[0][0].took_over == (1, 2, 3, 4, 5, 6)
