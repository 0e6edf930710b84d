"""Answers that would be wrong rather than late: a batch in parts, a transfer asked for twice, a follower that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgpack
import numpy as np
import pytest

from chaos.sim.cluster import SimCluster
from hadelay.api.service import Actor, Granting, ReceiveRequest
from hadelay.codec.commands import encode_audited, encode_feature, encode_incarnation, encode_noop
from hadelay.codec.commandtypes import Command
from hadelay.codec.leasetokens import encode_leases
from hadelay.codec.results import Done, LeaseOutcome, LeaseResult, RedriveOutcome, RedriveResult, Refused
from hadelay.errors import BadRequest, DiskFull, HadelayError, NoLeader, NotFound, OutcomeUnknown, Overloaded
from hadelay.handout.polls import Poll
from hadelay.model import Draft
from hadelay.server.link import REPLY
from hadelay.server.node import Node
from hadelay.server.service.cluster import Clusters
from hadelay.server.service.consuming import ConsumingService
from hadelay.server.service.messages import MessageService
from hadelay.server.service.node import TokenService
from hadelay.server.service.part import Service
from hadelay.server.service.schedules import ScheduleService
from hadelay.server.service.topics import TopicService
from hadelay.server.webhooks.pool import CONSUMER
from hadelay.settings.cluster import Settings
from tests.server.test_groupcommit import Timers, Wire, door, group_commit
from tests.server.test_link import Pair
from tests.server.test_lost_disks import wait_for_leader
from tests.sim.test_members import Town

Answers = list[tuple[Any, HadelayError | None]]


def draft(size: int) -> Draft:
    return Draft("orders", 0, True, 0, 0, b"", bytes(size))


def led(seed: int, **options: Any) -> tuple[SimCluster, Node]:
    """A cluster that has a leader."""
    cluster = SimCluster(seed, restart=False, **options)
    cluster.start_all()
    wait_for_leader(cluster)
    cluster.world.run_for(1.0)
    leader = cluster.leader()
    assert leader is not None
    return cluster, leader


def test_a_batch_of_which_one_part_is_unknown_is_unknown() -> None:
    timers, wire = Timers(), Wire()
    batcher = group_commit(timers, wire, max_entry_bytes=2_000)
    answers: Answers = []
    door(batcher).publish([draft(1500), draft(1500)], b"key", lambda result, error: answers.append((result, error)))
    timers.turn()
    assert len(wire.sent) == 2
    wire.sent[0][1](None, DiskFull("nothing of this part was stored"))
    wire.sent[1][1](None, OutcomeUnknown("the link broke"))
    ((_, error),) = answers
    assert isinstance(error, OutcomeUnknown)


def test_a_second_transfer_is_refused_and_the_first_is_answered() -> None:
    cluster, leader = led(3)
    leader.publishing.publish([draft(10)], None, lambda result, error: None)
    leader.delivery.poll(Poll("me", b"1", ("orders",), 1, 5000, 5000, lambda delivery, error: None))
    grants = leader.delivery._grants
    assert grants is not None
    cluster.world.run_until(cluster.world.now + 1.0, stop=lambda: bool(grants.offers))
    first: list[HadelayError | None] = []
    second: list[HadelayError | None] = []
    leader.leadership.transfer(None, first.append)
    leader.leadership.transfer(None, second.append)
    assert [type(error) for error in second] == [Overloaded]
    cluster.world.run_for(2.0)
    assert first == [None]
    assert not leader.group_commit.paused


@pytest.mark.parametrize("seed", range(4, 10))
def test_waiting_requests_of_a_follower_go_to_a_new_leader_as_soon_as_there_is_one(seed: int) -> None:
    cluster, leader = led(seed)
    cluster.kill(leader.name)
    followers = cluster.nodes()
    cluster.world.run_until(cluster.world.now + 1.0, stop=lambda: all(f.raft.leader is None for f in followers))
    asked, answered = cluster.world.now, []
    for follower in followers:
        follower.publishing.publish([draft(10)], None, lambda result, error: answered.append(error))
    cluster.world.run_until(asked + 3.0, stop=lambda: len(answered) == 2)
    assert answered == [None, None]
    assert cluster.world.now - asked < 0.9


@pytest.mark.parametrize("result", [["OfALaterVersion", 1], []], ids=["unknown", "empty"])
def test_a_result_that_this_version_does_not_know_ends_no_node(result: list[Any]) -> None:
    pair = Pair()
    answers = pair.call("submit", [b"x"])
    pair.a.on_message("b", REPLY, msgpack.packb([1, [msgpack.ExtType(2, msgpack.packb(result))]]))
    pair.a.on_message("b", REPLY, msgpack.packb([]))
    pair.a.link_down("b")
    ((_, error),) = answers
    assert isinstance(error, OutcomeUnknown)


def test_no_schedule_is_triggered_or_backfilled_while_a_disk_is_full() -> None:
    _, leader = led(3)
    leader.peers.full = ["n2"]
    services = ScheduleService(leader)
    with pytest.raises(DiskFull, match="on n2: free space there"):
        asyncio.run(services.trigger("daily", None, Actor()))


D = TypeVar("D", bound=Service)


def scripted(kind: type[D], node: Node, *results: Any) -> D:
    """A door whose next commands have these results, or errors; after them no leader is known."""
    door, left = kind(node), list(results)

    async def propose(command: bytes) -> Any:
        if not left:
            raise NoLeader("no majority of the cluster can be reached; nothing was stored")
        return left.pop(0)

    async def confirm(stale: bool = False) -> None:
        raise NoLeader("no leader is known")

    door._propose, door._confirm = propose, confirm  # type: ignore[method-assign]
    return door


def alone() -> Node:
    return led(1, names=("n1",))[1]


def asked(call: Coroutine[Any, Any, Any]) -> HadelayError:
    with pytest.raises(HadelayError) as caught:
        asyncio.run(call)
    return caught.value


LEASES = encode_leases(0, 1, 1, [0, 1], [5, 5], [0, 1])


def test_a_nack_of_which_a_part_is_done_does_not_say_that_nothing_happened() -> None:
    node = alone()
    half = LeaseResult(np.array([LeaseOutcome.DONE, LeaseOutcome.AGAIN], np.uint8))
    assert isinstance(asked(scripted(ConsumingService, node, half).settle("nack", LEASES, None)), OutcomeUnknown)
    assert isinstance(asked(scripted(ConsumingService, node).settle("nack", LEASES, None)), NoLeader)


def test_a_redrive_of_which_a_part_is_done_does_not_say_that_nothing_happened() -> None:
    node = alone()
    half = RedriveResult(np.array([RedriveOutcome.REDRIVEN, RedriveOutcome.AGAIN], np.uint8))
    assert isinstance(asked(scripted(MessageService, node, half).redrive("t", [1, 2], Actor())), OutcomeUnknown)
    assert isinstance(asked(scripted(MessageService, node).redrive("t", [1, 2], Actor())), NoLeader)


def test_settings_that_cannot_be_read_back_are_set_all_the_same() -> None:
    node = alone()
    assert isinstance(asked(scripted(TopicService, node, Done()).put_topic("t", {}, Actor())), OutcomeUnknown)
    assert isinstance(asked(scripted(TopicService, node).put_topic("t", {}, Actor())), NoLeader)


def test_a_token_that_cannot_be_read_back_is_made_or_revoked_all_the_same() -> None:
    """No other answer has its secret: who creates it again leaves a token behind that nobody knows."""
    node = alone()
    for answer in (OutcomeUnknown, NoLeader):
        results = [Done()] * (answer is OutcomeUnknown)
        created = scripted(TokenService, node, *results).create_token("ci", bytes(32), ["read"], None, Actor())
        assert isinstance(asked(created), answer)
        assert isinstance(asked(scripted(TokenService, node, *results).revoke_token("00" * 6, Actor())), answer)


@pytest.mark.parametrize("granting", [True, False])
def test_a_receive_that_is_sent_away_says_whether_something_may_have_been_granted(granting: bool) -> None:
    cluster, node = led(1, names=("n1",))
    consuming, grants = ConsumingService(node), node.delivery._grants
    assert grants is not None
    if granting:
        node.publishing.publish([draft(10)], None, lambda result, error: None)
        cluster.world.run_for(1.0)

    async def sent_away() -> None:
        receive = consuming.receive(ReceiveRequest(["orders"], "me", b"1", 1, 5_000, 5_000))
        receiving = asyncio.create_task(receive)
        await asyncio.sleep(0)
        cluster.world.run_until(cluster.world.now + 1.0, stop=lambda: bool(grants.offers))
        assert bool(grants.offers) == granting
        receiving.cancel()
        await receiving

    with pytest.raises(asyncio.CancelledError) as cancelled:
        asyncio.run(sent_away())
    assert isinstance(cancelled.value, Granting) == granting


def test_commands_of_the_leader_alone_are_not_taken_from_a_follower() -> None:
    cluster, leader = led(3)
    follower = next(node for node in cluster.nodes() if node is not leader)
    level, before = leader.ledger.level, dict(leader.ledger.incarnations)
    feature, joined = encode_feature(200), encode_incarnation("n9", 7)
    audited = encode_audited("n9", "", "", "", "", feature)
    answers: Answers = []
    follower.link.call(
        leader.name, "submit", [feature, joined, audited, encode_noop()], 2.0, lambda *done: answers.append(done)
    )
    cluster.world.run_for(2.0)
    ((results, error),) = answers
    assert error is None
    assert [isinstance(result, Refused) for result in results] == [True, True, True, False]
    assert cluster.leader() is leader
    assert (leader.ledger.level, leader.ledger.incarnations) == (level, before)


def test_a_leader_that_falls_leaves_no_settings_of_its_own_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    _, leader = led(4)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(leader.group_commit, "propose", lambda command, done, term=0: asked.append((command[0], term)))
    leader.ledger.settings = Settings(max_delay_ms=5)
    leader.ledger.level = 0
    leader.leadership.agree_on_settings()
    leader.leadership.clock_changed()
    assert asked == [(Command.SETTINGS, leader.leading), (Command.FEATURE, leader.leading)]


def test_nobody_receives_under_the_name_of_who_pushes() -> None:
    """Or he could take a push's grant, whose request ids are no secret, or its place."""
    _, leader = led(5)
    receive = ConsumingService(leader).receive(ReceiveRequest(["orders"], CONSUMER, b"1", 1, 0, 5_000))
    with pytest.raises(BadRequest, match="reserved for webhooks"):
        asyncio.run(asyncio.wait_for(receive, 1.0))


def test_a_removal_that_was_not_answered_is_done_when_it_is_asked_for_again() -> None:
    town = Town()
    town.add("n4")
    town.world.run_for(1.0)
    leader, answers = town.on(town.first), list[HadelayError | None]()
    for _ in range(2):
        leader.leadership.ask_leader("members", ["remove", "n4", ""], 10.0, lambda _, error: answers.append(error))
    town.until(lambda: len(answers) == 2)
    assert [type(error) for error in answers] == [Overloaded, type(None)], "the removal may still be undone"
    founder = town.others[0]
    town.must("remove", founder)
    for name in ("n4", founder):
        assert town.change("remove", name) is None
    assert isinstance(town.change("remove", "n9"), NotFound)


def test_a_transfer_is_answered_with_the_new_leader_by_a_node_that_has_not_heard_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster, leader = led(3)
    follower = next(node for node in cluster.nodes() if node is not leader)
    clusters = Clusters(follower)

    async def at_once(*_: Any) -> None:
        """The answer comes before the follower hears of a new term."""

    async def moved() -> str:
        monkeypatch.setattr(clusters, "_propose", at_once)
        monkeypatch.setattr(clusters, "_ask_leader", at_once)
        transfer = asyncio.create_task(clusters.transfer(None, Actor()))
        for _ in range(5):
            await asyncio.sleep(0)
        leader.leadership.transfer(None, lambda error: None)
        cluster.world.run_for(2.0)
        return await transfer

    new = asyncio.run(moved())
    assert cluster.leader() is not leader
    assert new == follower.raft.leader != leader.name
