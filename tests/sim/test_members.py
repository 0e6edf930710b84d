"""Members that come and go: each step of a change, with whatever can go wrong at it."""

from __future__ import annotations

from typing import Any

import pytest

from chaos.sim.mutations import broken
from hadelay.errors import BadRequest, HadelayError, NoLeader, OutcomeUnknown, Overloaded
from hadelay.raft.library import DISK, NOBODY
from hadelay.raft.messages import BadFrame
from hadelay.raft.part import Ready
from tests.sim.test_scenarios import Scene

#: Answers after which the same is asked again.
AGAIN = (NoLeader, OutcomeUnknown, Overloaded)


class Town(Scene):
    def change(self, op: str, name: str, to: str = "", address: str = "") -> HadelayError | None:
        """One question to the leader (or to `to`); the answer."""
        answers: list[HadelayError | None] = []
        process = self.process(to or self.first)
        assert process is not None

        def call(node: Any, done: Any) -> None:
            node.leadership.ask_leader("members", [op, name, address or f"{name}:1"], 10.0, done)

        self.door.call(process, call, lambda result, error: answers.append(error))
        self.until(lambda: bool(answers))
        return answers[0]

    def must(self, op: str, name: str) -> None:
        error = self.asked(op, name)
        assert error is None, error

    def asked(self, op: str, name: str) -> HadelayError | None:
        """Until the answer is definite."""
        for _ in range(30):
            error = self.change(op, name)
            if not isinstance(error, AGAIN):
                break
            self.world.run_for(0.3)
        return error

    def switch_on(self) -> None:
        """An entry of this term is committed."""
        self.must("add", "n7")
        self.must("remove", "n7")

    def voters(self, name: str = "") -> list[str]:
        node = self.on(name or self.first)
        return [m.name for m in node.raft.membership.members if m.voter]

    def add(self, name: str) -> None:
        self.join(name)
        self.must("add", name)
        self.until(lambda: self.leader() is not None and name in self.voters(), 30)

    def remove(self, name: str) -> None:
        self.must("remove", name)
        self.retire(name)


def test_one_grows_to_three_and_five_and_shrinks_again():
    town = Town(names=("n1",))
    ids = [town.publish()]
    for name in ("n2", "n3", "n4", "n5"):
        town.add(name)
        ids.append(town.publish())
    assert town.voters() == ["n1", "n2", "n3", "n4", "n5"]
    town.converge()
    for name in ("n1", "n4"):
        town.remove(name)
        ids.append(town.publish())
    town.converge()
    assert town.voters() == ["n2", "n3", "n5"]
    assert "n1 handed over: it is removed" in [why for _, why in town.on("n3").logbook.terms()]
    assert sorted(town.receive_all()) == sorted(ids)
    town.kill("n2")
    town.until(lambda: town.leader() is not None)
    town.publish()
    town.power_cut("n3", "n5")
    town.converge()
    assert [town.voters(name) for name in town.names] == [["n2", "n3", "n5"]] * 3


def test_refused_changes_of_members_and_their_reasons():
    town = Town()
    for op, name, why in [
        ("add", "n2", "a member already"),
        ("remove", "n9", "there is no node"),
        ("add", "n/4", "a node's name is"),
        ("add", "..", "a node's name is"),
        ("add", NOBODY, "a node's name is"),
        ("add", DISK, "a node's name is"),
    ]:
        assert why in str(town.change(op, name)), (op, name)
    for address in ("n4:0", "0.0.0.0:8500", "é" * 200 + ":1", "n4\n:1", "n4:²", "n4"):
        # Over the node link too, where what is not refused would end the leader.
        for to in town.names:
            assert isinstance(town.change("add", "n4", to, address), BadRequest), address
    town.join("n4")
    town.kill("n4")
    town.must("add", "n4")
    assert "n4 is still catching up" in str(town.change("add", "n5"))
    assert "n4 is still catching up" in str(town.change("remove", town.others[0]))
    town.must("remove", "n4")
    town.retire("n4")
    # With one of three away no other may go, but the one that is away may.
    away, other = town.others
    town.kill(away)
    town.world.run_for(4.0)
    assert f"at least 2 must answer and vote, and only 1 can; bring {away} back" in str(town.change("remove", other))
    town.must("remove", away)
    town.retire(away)
    town.must("remove", other)
    town.retire(other)
    assert "the only voter" in str(town.change("remove", town.first))
    town.publish()
    town.converge()


def test_a_voter_counts_for_a_removal_only_once_it_has_an_entry_of_this_leader():
    """A new leader has two links over which nothing comes, and has not noticed yet."""
    town = Town(names=("n1", "n2", "n3", "n4", "n5"))
    town.switch_on()
    old, new, gone, *cut = town.first, *town.others
    town.net.cuts |= {pair for one in cut for other in (old, new, gone) for pair in ((one, other), (other, one))}
    answers: list[HadelayError | None] = []
    town.on(old).leadership.transfer(new, lambda error: None)
    town.until(lambda: town.on(new).raft.is_leader and town.on(new).leading)
    town.on(new).leadership.ask_leader(
        "members", ["remove", gone, ""], 10.0, lambda result, error: answers.append(error)
    )
    assert [type(error) for error in answers] == [Overloaded]
    assert f"at least 3 must have caught up with the leader; wait for {', '.join(cut)}" in str(answers[0])
    assert town.voters(new) == list(town.names)
    town.world.run_for(4.0)
    assert f"bring {', '.join(cut)} back" in str(town.change("remove", gone, new))
    town.net.heal()
    town.until(lambda: any(town.on(new).raft.replication.hears(name) for name in cut))
    town.must("remove", gone)
    town.retire(gone)
    town.publish()
    town.converge()


def test_two_changes_at_once_are_one_and_a_refusal():
    town = Town()
    leader = town.leader()
    assert leader is not None
    answers: list[HadelayError | None] = []
    town.switch_on()
    for op in ("add", "remove"):
        leader.leadership.ask_leader("members", [op, "n4", "n4:1"], 10.0, lambda result, error: answers.append(error))
    town.until(lambda: len(answers) == 2)
    assert sorted(str(error) for error in answers) == ["None", "another member change is under way: try again later"]


@pytest.mark.parametrize("crash", ["leader", "joiner", "everything", "wipe"])
@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.4, 0.9])
def test_a_crash_at_each_step_of_an_addition(crash: str, after_s: float):
    """The level, the learner, its filling, its admission, its promotion: whatever is cut short goes on."""
    town = Town(seed=int(after_s * 1000) + len(crash))
    ids = [town.publish() for _ in range(3)]
    town.switch_on()
    town.join("n4")
    leader = town.leader()
    assert leader is not None
    leader.leadership.ask_leader("members", ["add", "n4", "n4:1"], 10.0, lambda result, error: None)
    town.world.run_for(after_s)
    if crash == "leader":
        town.kill(leader.name)
    elif crash == "joiner":
        town.power_cut("n4")
    elif crash == "wipe":
        town.world.run_for(0.3)
        town.wipe(town.others[0])
    else:
        town.power_cut(*town.names)
    for name in town.names:
        town.start(name)
    town.until(lambda: town.leader() is not None)
    town.world.run_for(1.0)
    error = town.asked("add", "n4")
    assert error is None or "member already" in str(error), error
    town.until(lambda: town.leader() is not None and "n4" in town.voters(), 40)
    ids.append(town.publish())
    town.converge()
    assert [town.voters(name) for name in town.names] == [["n1", "n2", "n3", "n4"]] * 4
    assert sorted(town.receive_all()) == sorted(ids)


def cut_off_in_a_change() -> tuple[Town, str]:
    """The old leader has the change alone, in the minority; the majority has gone on without."""
    town = Town()
    town.switch_on()
    old = town.leader()
    assert old is not None
    town.cut_off(old.name)
    town.join("n4")
    old.leadership.ask_leader("members", ["add", "n4", "n4:1"], 10.0, lambda result, error: None)
    town.world.run_for(0.05)
    assert "n4" in [m.name for m in old.raft.membership.members], "in force as soon as it is in the log"
    town.until(lambda: town.leader() not in (None, old))
    town.publish()
    town.net.heal()
    return town, old.name


def test_a_change_that_is_cut_off_is_undone():
    """It comes back to the list of the others."""
    town, old = cut_off_in_a_change()
    town.until(lambda: "n4" not in [m.name for m in town.on(old).raft.membership.members])
    town.until(lambda: "n4" not in town.on(old).raft.peers)
    town.must("add", "n4")
    town.until(lambda: town.leader() is not None and "n4" in town.voters(), 30)
    town.converge()


def test_a_change_that_stays_in_force_when_it_is_cut_off_is_noticed():
    with broken("kept_change"):
        town, _ = cut_off_in_a_change()
        town.until(lambda: bool(town.violations))
    assert town.violations[0].invariant == "I13 log safety, members"


def test_a_removed_node_that_goes_on_disturbs_nobody():
    town = Town(names=("n1", "n2", "n3", "n4"))
    gone = town.others[-1]
    town.must("remove", gone)
    town.world.run_for(1.0)
    term, first = town.on(town.first).raft.term, town.first
    for _ in range(3):
        town.kill(gone)  # it comes back with all that it knew
        town.start(gone)
        town.world.run_for(3.0)
    assert (town.on(first).raft.term, town.first) == (term, first)
    assert not any(node.raft.peers.get(gone) for node in town.nodes() if node.name != gone)
    assert town.on(gone).raft.term == term
    town.retire(gone)
    town.publish()
    town.converge()


def test_a_removed_node_that_never_heard_of_it_disturbs_nobody():
    """It was cut off meanwhile: by its own log it still votes. It asks, and is told no."""
    town = Town(names=("n1", "n2", "n3", "n4"))
    town.converge()
    gone = town.others[-1]
    town.cut_off(gone)
    town.world.run_for(0.5)
    town.must("remove", gone)
    town.publish()
    first, term = town.first, town.on(town.first).raft.term
    town.world.run_for(2.0)
    town.net.heal()
    town.world.run_for(10.0)
    assert (town.first, town.on(first).raft.term) == (first, term)
    assert gone in town.voters(gone)
    town.retire(gone)
    town.converge()


def test_the_majority_of_the_old_members_decides_nothing_without_one_of_the_new():
    """Three of five, after two were added, against two of the three: the latter are cut off and elect nobody."""
    town = Town()
    town.add("n4")
    town.add("n5")
    old = [name for name in ("n1", "n2", "n3") if name != town.first][:2]
    town.cut_off(*old)
    town.until(lambda: town.leader() is not None and town.first not in old)
    town.publish()
    town.world.run_for(5.0)
    assert not any(town.on(name).raft.is_leader for name in old)
    town.converge()


def test_a_node_that_was_down_while_all_it_knew_were_replaced_comes_back_by_its_file():
    town = Town()
    town.switch_on()
    late = town.others[0]
    town.until(lambda: town.on(late).storage.applied_index >= town.on(late).raft.membership.index)  # a checkpoint
    town.kill(late)
    for new in ("n4", "n5"):
        town.add(new)
        town.remove(next(name for name in town.names if name not in (late, "n4", "n5")))
    town.publish()
    town.machines[late].others = town.names
    town.cut_off(late)
    town.start(late)
    town.world.run_for(3.0)
    town.net.heal()
    town.until(lambda: town.leader() is not None and town.voters(late) == sorted([late, "n4", "n5"]), 20)
    town.converge()
    assert sorted(town.on(late).raft.peers) == ["n4", "n5"]


def test_a_leader_that_a_node_has_never_heard_of_is_followed():
    """n3 sleeps while n4 and n5 come and one of them leads: its log knows neither, and its peers tell it."""
    town = Town()
    late = town.others[0]
    town.switch_on()
    town.cut_off(late)
    town.join("n4")
    town.net.cut(late, "n4")
    town.net.cut("n4", late)
    town.must("add", "n4")
    town.until(lambda: town.leader() is not None and "n4" in town.voters(), 30)
    leader = town.leader()
    assert leader is not None
    leader.leadership.transfer("n4", lambda error: None)
    town.until(lambda: town.leader() is not None and town.first == "n4")
    town.publish()
    assert "n4" not in town.on(late).raft.peers
    town.net.heal()
    town.until(lambda: town.on(late).raft.leader == "n4" and "n4" in town.voters(late))
    assert town.first == "n4"
    town.converge()


def test_a_node_that_was_removed_comes_back_with_its_disk():
    town = Town()
    town.add("n4")
    incarnation = town.on("n4").raft.journal.incarnation
    town.must("remove", "n4")
    town.world.run_for(0.5)
    town.retire("n4")
    town.publish()
    town.add("n4")
    assert town.on("n4").raft.journal.incarnation == incarnation
    town.publish()
    town.converge()


def start_as_founder_of_another_cluster(town: Town) -> None:
    stranger = Town(seed=2, names=("n4",))
    stranger.publish()
    stranger.kill("n4")
    town.join("n4")
    town.kill("n4")
    town.machines["n4"].disk = stranger.machines["n4"].disk
    town.start("n4")


def test_a_founder_is_not_added_with_what_it_founded():
    """Another cluster's log, of the same terms, would pass for a beginning of this one's."""
    town = Town(restart=False)
    start_as_founder_of_another_cluster(town)
    town.must("add", "n4")
    town.until(lambda: bool(town.violations))
    town.world.run_for(0.1)  # it ends
    assert "hold the data of a founding member" in str(town.violations.pop())
    town.wipe("n4")
    town.start("n4")
    town.until(lambda: town.leader() is not None and "n4" in town.voters(), 30)
    town.converge()


def greeted_before_its_addition_is_committed() -> Town:
    """A founder of another cluster, linked as soon as the entry is in the log, while commits are slow."""
    town = Town(restart=False)
    town.switch_on()
    start_as_founder_of_another_cluster(town)
    for name in town.others:
        town.machines[name].disk.sync_delay_s = 3.0
    leader = town.leader()
    assert leader is not None
    leader.leadership.ask_leader("members", ["add", "n4", "n4:1"], 10.0, lambda result, error: None)
    town.until(lambda: bool(town.violations), 20.0)
    town.world.run_for(0.1)
    return town


def test_a_founder_that_is_greeted_before_its_addition_is_committed_is_refused_then():
    """Its log counts for nothing before that is applied, nor after."""
    town = greeted_before_its_addition_is_committed()
    assert "hold the data of a founding member" in str(town.violations.pop())
    town.wipe("n4")
    town.start("n4")
    for name in ("n1", "n2", "n3"):
        town.machines[name].disk.sync_delay_s = 0.0004
    town.until(lambda: town.leader() is not None and "n4" in town.voters(), 30)
    town.converge()


def test_a_founder_that_joins_as_it_is_is_noticed():
    with broken("founder_joins"):
        town = greeted_before_its_addition_is_committed()
    assert town.violations[0].invariant == "I12 divergence, entries"


def test_a_founder_that_is_removed_and_added_at_once_is_asked_to_come_empty():
    """Its link was never down, so nobody greeted it as what it is now."""
    town = Town(restart=False)
    town.switch_on()
    gone = town.others[0]
    town.must("remove", gone)
    town.must("add", gone)
    town.until(lambda: bool(town.violations))
    town.world.run_for(0.1)
    assert "hold the data of a founding member" in str(town.violations.pop())
    town.wipe(gone)
    town.start(gone)
    town.until(lambda: town.leader() is not None and gone in town.voters(), 30)
    town.converge()


def test_the_members_that_a_peer_reports_are_a_list_of_members():
    town = Town()
    raft = town.on("n1").raft
    peer = raft.peers["n2"]
    for rows in (
        [[f"m{n:03}", f"m{n}:1"] for n in range(65)],
        [["b", "b:1"], ["a", "a:1"]],
        [["", "a:1"]],
        [],
        [["a"]],
    ):
        with pytest.raises(BadFrame):
            raft.membership.on_members(peer, 1 << 40, rows, 0.0, Ready())
    assert sorted(raft.peers) == ["n2", "n3"]


def test_a_node_with_an_order_to_found_a_cluster_joins_all_the_same():
    town = Town()
    town.switch_on()
    town.join("n4")
    town.kill("n4")
    town.wipe("n4")
    town.machines["n4"].founded = False
    town.start("n4")
    town.must("add", "n4")
    town.until(lambda: town.leader() is not None and "n4" in town.voters(), 30)
    assert town.on("n4").raft.journal.incarnation > 1
    town.converge()


def lost_by_two_lists_at_once() -> None:
    """Ongaro's case: n1 has n5 in its list, the others' leader has n1 out of its own, and neither list is the other's.

    n1 and n5 know a list of five; n2 and n3 commit by a list of three; then n1 asks n4, which knows of neither."""
    town = Town(names=("n1", "n2", "n3", "n4"))
    town.switch_on()
    leader = town.leader()
    assert leader is not None
    if leader.name != "n1":
        leader.leadership.transfer("n1", lambda error: None)
        town.until(lambda: town.leader() is not None and town.first == "n1")
    town.join("n5")
    town.must("add", "n5")
    old = town.on("n1")
    town.until(lambda: town.on("n5").raft.journal.admitted and "n5" in old.raft.peers)
    beat, old.raft.membership.beat = old.raft.membership.beat, lambda ready: None  # type: ignore[method-assign]
    town.until(lambda: old.raft.peers["n5"].admitted)
    for name in ("n2", "n3", "n4"):
        for other in ("n1", "n5"):
            town.net.cut(name, other)
            town.net.cut(other, name)
    members = tuple(m._replace(voter=True) for m in old.raft.membership.members)
    old.raft.membership.propose(members, lambda result, error: None)
    town.world.run_for(0.1)
    assert "n5" in town.voters("n5")
    for name in ("n1", "n5"):
        process = town.process(name)
        assert process is not None
        process.runtime.pause()
    town.until(lambda: any(town.on(name).raft.is_leader for name in ("n2", "n3", "n4")))
    new = next(town.on(name) for name in ("n2", "n3", "n4") if town.on(name).raft.is_leader)
    near, far = (name for name in ("n2", "n3", "n4") if name != new.name)
    for name in (near, new.name):
        town.net.reset(name, far)  # before the entry that begins its term has arrived
        town.net.cut(name, far)
        town.net.cut(far, name)
    without = tuple(m for m in new.raft.membership.members if m.name != "n1")
    new.raft.membership.propose(without, lambda result, error: None)
    town.world.run_for(0.1)
    for name in ("n1", "n5"):
        process = town.process(name)
        assert process is not None
        process.runtime.resume()
        town.net.cuts -= {(name, far), (far, name)}
    town.world.run_for(10.0)
    committed = min(old.raft.commit_index, new.raft.commit_index)
    terms = [[raft.journal.term_at(index) for index in range(2, committed + 1)] for raft in (old.raft, new.raft)]
    assert terms[0] == terms[1], "two histories"
    old.raft.membership.beat = beat  # type: ignore[method-assign]
    town.converge()
    town.publish()


def test_a_leader_changes_nothing_before_an_entry_of_its_own_term_is_committed():
    lost_by_two_lists_at_once()


def test_two_leaders_would_commit_apart_but_for_that_rule():
    with broken("two_lists_at_once"), pytest.raises(AssertionError, match="two histories"):
        lost_by_two_lists_at_once()


def test_a_drained_node_does_not_lead_while_another_can():
    town = Town()
    first, town_ids = town.first, [town.publish()]
    answers: list[HadelayError | None] = []
    town.on(first).leadership.drain(True, answers.append)
    town.until(lambda: bool(answers) and town.leader() is not None)
    assert answers == [None]
    assert town.first != first
    assert town.on(first).leadership.drained
    for _ in range(3):
        town.kill(town.first)
        town.until(lambda: town.leader() is not None)
        assert town.first != first
        for name in town.names:
            town.start(name)
        town.world.run_for(2.0)
    # If no other can, it does: a node of two that are left would be none.
    both = [name for name in town.names if name != first]
    town.kill(both[0])
    town.until(lambda: town.leader() is not None and town.first == both[1])
    town_ids.append(town.publish())
    town.on(first).leadership.drain(False, answers.append)
    assert not town.on(first).leadership.drained
    town.converge()
    assert sorted(town.receive_all()) == sorted(town_ids)


def test_a_node_that_alone_knows_of_its_removal_leads_until_it_is_committed():
    """The leader's disk lost the entry that removes n2, and n2 has it: it gives nobody with less its vote."""
    town = Town(names=("n1", "n2", "n3"))
    gone, third = town.others
    town.must("remove", third)
    town.retire(third)
    leader = town.leader()
    assert leader is not None
    town.machines[leader.name].disk.sync_delay_s = 1.0
    leader.leadership.ask_leader("members", ["remove", gone, ""], 10.0, lambda result, error: None)
    town.world.run_for(0.1)
    assert town.voters(gone) == [leader.name]
    town.power_cut(leader.name)
    town.machines[leader.name].disk.sync_delay_s = 0.0004
    town.start(leader.name)
    town.until(lambda: town.leader() is not None and town.first == leader.name and town.voters() == [leader.name], 20)
    town.until(lambda: not town.on(gone).raft.is_leader)
    town.retire(gone)
    town.publish()
    town.converge()


def at_once(town: Town, leader: str, op: str, name: str) -> list[HadelayError | None]:
    """Ask a leader over no link, so that it answers by what it knows now; later answers join the list."""
    answers: list[HadelayError | None] = []
    node = town.on(leader)
    assert node.leading
    node.link.handlers["members"](leader, [op, name, f"{name}:1"], lambda result, error: answers.append(error))
    return answers


def test_a_new_leader_does_not_refuse_a_removal_for_a_voter_that_it_has_not_heard_yet():
    town = Town()
    town.switch_on()
    old = town.first
    new, slow = town.others
    pairs = {pair for other in (old, new) for pair in ((slow, other), (other, slow))}
    town.net.cuts |= pairs
    town.world.run_for(2.0)
    town.on(old).leadership.transfer(new, lambda error: None)
    town.until(lambda: town.on(new).leading)
    town.world.run_for(1.0)
    answers = at_once(town, new, "remove", old)
    town.until(lambda: bool(answers))
    assert isinstance(answers[0], Overloaded), answers
    town.net.cuts -= pairs
    assert town.asked("remove", old) is None


def test_a_leader_that_is_cut_off_refuses_no_change_for_good():
    town = Town()
    town.switch_on()
    old = town.first
    town.net.cuts |= {pair for other in town.others for pair in ((old, other), (other, old))}
    answers = [at_once(town, old, *change) for change in (("remove", "n9"), ("add", "n2"), ("remove", "n7"))]
    town.world.run_for(10.0)
    assert [type(error) for found in answers for error in found] == [NoLeader] * 3
