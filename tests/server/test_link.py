"""Calls between nodes: answers, refusals, and what a broken link means."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from chaos.sim.cluster import SimCluster
from hadelay.codec.results import Done, PublishResult, Refused
from hadelay.errors import Conflict, HadelayError, NoLeader, OutcomeUnknown
from hadelay.raft import messages
from hadelay.server.link import CALL, Link
from hadelay.server.node import Node
from tests.server.test_groupcommit import Timers
from tests.server.test_lost_disks import wait_for_leader


class Pair:
    """Two nodes' links back to back."""

    def __init__(self) -> None:
        self.timers, self.up = Timers(), True
        self.a = Link(self.timers, self._sender("a", "b"))
        self.b = Link(self.timers, self._sender("b", "a"))

    def _sender(self, me: str, other: str) -> Any:
        def send(peer: str, kind: int, payload: bytes) -> bool:
            assert peer == other
            if self.up:
                self.timers.call_soon(getattr(self, other).on_message, me, kind, payload)
            return self.up

        return send

    def call(self, op: str, payload: Any) -> list[tuple[Any, HadelayError | None]]:
        answers: list[tuple[Any, HadelayError | None]] = []
        self.a.call("b", op, payload, 1.0, lambda result, error: answers.append((result, error)))
        return answers


def test_results_cross_as_they_are() -> None:
    pair = Pair()
    sent = [
        PublishResult(np.array([1 << 63], np.uint64), np.array([5]), np.zeros(1, np.uint8), np.array([True])),
        Done(False),
        Refused("bad_config", "no"),
    ]
    pair.b.handlers["submit"] = lambda peer, payload, reply: reply(sent, None)
    answers = pair.call("submit", [b"x"])
    pair.timers.turn()
    ((results, error),) = answers
    assert error is None
    assert results[0].ids.tolist() == [1 << 63]
    assert results[0].duplicate.tolist() == [True]
    assert results[1:] == sent[1:]


def test_a_refusal_keeps_its_type_words_and_extras() -> None:
    pair = Pair()
    refusal = Conflict("it is leased", outcome="leased", retry_after_ms=7)
    pair.b.handlers["x"] = lambda peer, payload, reply: reply(None, refusal)
    answers = pair.call("x", None)
    pair.timers.turn()
    error = answers[0][1]
    assert isinstance(error, Conflict)
    assert (error.detail, error.extra, error.retry_after_ms) == ("it is leased", {"outcome": "leased"}, 7)


def test_not_sent_means_that_nothing_happened() -> None:
    pair = Pair()
    pair.up = False
    assert isinstance(pair.call("x", None)[0][1], NoLeader)


def test_a_link_that_breaks_before_the_answer_leaves_the_outcome_unknown() -> None:
    pair = Pair()
    pair.b.handlers["x"] = lambda peer, payload, reply: None
    answers = pair.call("x", None)
    pair.timers.turn()
    pair.a.link_down("b")
    assert isinstance(answers[0][1], OutcomeUnknown)
    pair.timers.later()
    assert len(answers) == 1


def test_silence_ends_with_the_time_limit() -> None:
    pair = Pair()
    pair.b.handlers["x"] = lambda peer, payload, reply: None
    answers = pair.call("x", None)
    pair.timers.later()
    assert isinstance(answers[0][1], OutcomeUnknown)
    assert str(answers[0][1]) == "node b did not answer in time"


def test_nonsense_and_unknown_calls_end_nothing() -> None:
    pair = Pair()
    for payload in (b"", b"\xc1", b"\x93\x01\x02", b"\x93\x01\xa1x\xc0" * 3):
        pair.b.on_message("a", CALL, payload)
    answers = pair.call("never heard of", None)
    pair.timers.turn()
    assert answers[0][1] is not None


def test_an_answer_meant_for_the_process_before_is_not_taken_for_ours() -> None:
    """Found by the simulator (seed 47): a restarted node told its client the id of another message."""
    pair = Pair()
    kept: list[Any] = []
    pair.b.handlers["x"] = lambda peer, payload, reply: kept.append(reply)
    pair.call("x", "before")
    pair.timers.turn()
    pair.a = Link(pair.timers, pair._sender("a", "b"))  # a restarted
    answers = pair.call("x", "after")
    pair.timers.turn()
    kept[0]("the old answer", None)
    pair.timers.turn()
    assert answers == []
    kept[1]("the new answer", None)
    pair.timers.turn()
    assert answers == [("the new answer", None)]


def three_nodes() -> tuple[SimCluster, Node]:
    """(a cluster, its leader)"""
    cluster = SimCluster(3, restart=False)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(1.0)
    leader = cluster.leader()
    assert leader is not None
    return cluster, leader


@pytest.mark.parametrize(
    "files",
    [
        [],
        ["names"],
        ["state-9", "state-10"],
        ["state-9", "state-9"],
        ["state-9", "complete"],
        ["state-9", "hours"],
        ["state-9", "hours/a/b"],
        ["state-9", "hours/a\0b"],
        ["state-9", "hours/" + "a" * 300],
    ],
)
def test_an_offer_of_files_that_no_node_has_ends_the_link_and_no_node(files: list[str]) -> None:
    cluster, leader = three_nodes()
    raft = next(node.raft for node in cluster.nodes() if node is not leader)
    offer = raft.term, raft.applied_index + 9, raft.term, b"", [[name, 1, 1] for name in files]
    raft.frame(leader.name, messages.encode(messages.SNAPSHOT, *offer))
    assert not raft.stopped
    assert not raft.applier.installing
    cluster.world.run_for(3.0)
    assert raft.peers[leader.name].up


@pytest.mark.parametrize(
    ("op", "payload"),
    [
        ("ready", [float("inf")]),
        ("ready", [1 << 63, -1]),
        ("ready", ["9" * 5_000]),
        ("bytes", [(1 << 64) - 1, ".log", -1, 1]),
        ("bytes", [-(1 << 63), ".idx", -1, 1]),
    ],
)
def test_a_call_with_numbers_that_mean_nothing_ends_no_leader(op: str, payload: list[Any]) -> None:
    cluster, leader = three_nodes()
    peer = next(name for name in cluster.names if name != leader.name)
    leader.raft.frame(peer, bytes((CALL,)) + msgpack.packb([1, op, payload]))
    assert not leader.raft.stopped
