"""Parts of Raft, each alone: one event, and what the part writes into its Ready."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from hadelay.errors import HadelayError, NoLeader, Overloaded
from hadelay.raft import messages
from hadelay.raft.apply import Applier, Reads
from hadelay.raft.election import Elections
from hadelay.raft.follower import Follower
from hadelay.raft.part import Peer, Ready
from hadelay.raft.ports import RaftStats, RaftTuning
from hadelay.raft.transfer import Transfers

CONFIG = RaftTuning()


def shared(core: Core, end: Any | None = None, **other: Any) -> Any:
    """What the parts have in common, with this library and end of the log."""
    runtime = SimpleNamespace(random=Random(1))
    no = dict.fromkeys(("network", "machine", "propose", "event"))
    return SimpleNamespace(
        **no | {"core": core, "journal": end or log_end(), "runtime": runtime, "config": CONFIG} | other,
        stats=RaftStats(),
    )


class Core(SimpleNamespace):
    """The library, as parts see it: this node is a follower of n2 in term 5."""

    def __init__(self, **other: Any) -> None:
        super().__init__(**{"term": 5, "leader": "n2", "leads": False, "commit_index": 7, "no_op": 6} | other)
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append((name, *args))


def log_end(**other: Any) -> Any:
    end = {"last_index": 9, "last_term": 5, "synced_index": 9, "admitted": True, "term": 5, "voted_for": None}
    return SimpleNamespace(**end | {"base_index": 1, "term_is_durable": True} | other)


def members(*up: str) -> Any:
    peers = {name: Peer(name, up=name in up, admitted=True) for name in ("n2", "n3")}
    return SimpleNamespace(
        peers=peers, voters=frozenset(("n1", "n2", "n3")), others=["n2", "n3"], electable=True, sole_voter=False,
        connected=lambda name: name in up, agreed=lambda peers: len(list(peers)) >= 1,
    )  # fmt: skip


def elections(core: Core, end: Any | None = None, *up: str, installing: bool = False) -> Elections:
    applier: Any = SimpleNamespace(applied=9, installing=installing)
    return Elections(shared(core, end), members(*up), applier)


def sent(ready: Ready) -> list[tuple[str, int, list[Any]]]:
    """Peer, kind and fields of what leaves."""
    types = {
        messages.READ: (int,), messages.READ_REPLY: (int, bool, int), messages.PRE_VOTE_REPLY: (int, bool, int),
        messages.VOTE_REPLY: (int,), messages.TIMEOUT_NOW: (int,),
    }  # fmt: skip
    return [(peer, frame[0], messages.decode(bytes(frame), *types[frame[0]])) for peer, frame, _ in ready.sends]


# ---- reads


def reads(core: Core, *up: str, confirm: Any = None) -> Reads:
    applier: Any = SimpleNamespace(when_applied=lambda index, done: done(None))
    return Reads(shared(core), members(*up), applier, confirm)


def test_reads_that_wait_are_one_question_to_the_leader() -> None:
    part, ready = reads(Core(), "n2"), Ready()
    for _ in range(3):
        part.read(lambda error: None, 0.0, ready)
    assert [delay for delay, *_ in ready.timers] == [0.0]
    part._ask(0.0, ready)
    assert sent(ready) == [("n2", messages.READ, [1])]


@pytest.mark.parametrize("leader", [None, "n2"])
def test_a_read_without_a_leader_that_can_be_asked_is_refused(leader: str | None) -> None:
    part, ready = reads(Core(leader=leader)), Ready()
    reported: list[HadelayError | None] = []
    part.read(reported.append, 0.0, ready)
    part._ask(0.0, ready)
    assert not reported, "those who asked hear of it when the event is over"
    ready.answers[0]()
    assert isinstance(reported[0], NoLeader)


def test_a_follower_says_that_it_cannot_confirm_a_read() -> None:
    part, ready = reads(Core()), Ready()
    part.on_read(Peer("n3"), 4, 0.0, ready)
    assert sent(ready) == [("n3", messages.READ_REPLY, [4, False, 0])]


# ---- elections


@pytest.mark.parametrize(
    ("term", "index", "last_term", "yes"),
    [(6, 9, 5, True), (5, 9, 5, False), (6, 8, 5, False), (6, 99, 4, False), (6, 1, 6, True)],
)
def test_a_pre_vote_is_for_a_later_term_and_a_log_that_is_no_older(
    term: int, index: int, last_term: int, yes: bool
) -> None:
    ready = Ready()
    elections(Core()).on_pre_vote(Peer("n3"), term, index, last_term, 0.0, ready)
    assert sent(ready) == [("n3", messages.PRE_VOTE_REPLY, [term, yes, 5])]


def test_nobody_gets_a_pre_vote_while_a_leader_is_heard() -> None:
    part, ready = elections(Core()), Ready()
    part.heard_leader(10.0)
    part.on_pre_vote(Peer("n3"), 6, 9, 5, 10.1, ready)
    part.on_pre_vote(Peer("n3"), 6, 9, 5, 10.3, ready)
    assert [fields[1] for _, _, fields in sent(ready)] == [False, True]


def test_a_node_whose_state_is_replaced_does_not_vote() -> None:
    core, ready = Core(), Ready()
    vote = messages.Vote(6, 9, 5, called=True)
    elections(core, installing=True).on_vote(Peer("n3", admitted=True), vote, 0.0, ready)
    assert core.calls == []


def test_a_vote_leaves_when_it_is_durable_and_only_in_its_term() -> None:
    core, ready = Core(), Ready()
    part = elections(core, None, "n3")
    part.vote("n3", 5, ready)
    assert ready.sends == []
    ((step, args),) = ready.when_durable
    step(*args, 0.0, ready)
    assert sent(ready) == [("n3", messages.VOTE_REPLY, [5])]
    core.term = 6
    step(*args, 0.0, later := Ready())
    assert later.sends == []


def test_a_reply_to_an_earlier_pre_vote_does_not_count() -> None:
    core, ready = Core(leader=None), Ready()
    part = elections(core, None, "n2")
    part._ask(10.0, ready)
    part.on_pre_vote_reply(Peer("n2"), 5, True, 5, 10.0, ready)
    assert "campaign" not in [name for name, *_ in core.calls]
    part.on_pre_vote_reply(Peer("n2"), 6, True, 5, 10.0, ready)
    assert "campaign" in [name for name, *_ in core.calls]


def test_a_voter_counts_once() -> None:
    core, ready = Core(), Ready()
    part = elections(core, None, "n3")
    for _ in range(2):
        part.on_vote_reply(Peer("n3", admitted=True), 5, 0.0, ready)
    part.on_vote_reply(Peer("n2"), 5, 0.0, ready)
    assert core.calls == [("voted", "n3", 5)]
    assert ready.sync


# ---- transfers


def transfers(core: Core, voters: Any, config: RaftTuning = CONFIG) -> Transfers:
    replication: Any = SimpleNamespace(round=3)
    return Transfers(shared(core, propose=lambda command, done: None, config=config), voters, replication)


def test_the_furthest_follower_is_asked_to_take_over_once_it_has_the_whole_log() -> None:
    voters, ready = members("n2", "n3"), Ready()
    voters.peers["n2"].match, voters.peers["n3"].match = 7, 8
    core = Core(leads=True)
    part = transfers(core, voters)
    part.begin(None, lambda error: None, "it is drained", 0.0, ready)
    assert ready.sends == []
    voters.peers["n3"].match = 9
    for _ in range(2):
        part.progress(ready)
    assert sent(ready) == [("n3", messages.TIMEOUT_NOW, [5])]
    assert core.left == "handed over: it is drained"


@pytest.mark.parametrize("reported", [True, False])
def test_a_failed_transfer_is_in_doubt_only_if_its_target_was_asked(reported: bool) -> None:
    voters, ready = members("n3"), Ready()
    voters.peers["n3"].match = 9 if reported else 8
    core = Core(leads=True)
    part = transfers(core, voters, RaftTuning(fence_failed_transfer=True))
    part.begin("n3", lambda error: None, "it is drained", 0.0, ready)
    ((_, give_up, args),) = ready.timers
    give_up(*args, 1.0, ready)
    assert part.target is None
    assert part.in_doubt == reported
    assert core.left == "", "it leads on"
    voters.peers["n3"].round = 4
    assert not part.in_doubt, "the target follows: it has answered a later heartbeat"


def test_a_transfer_without_a_follower_that_can_lead_is_refused() -> None:
    ready, reported = Ready(), []
    transfers(Core(leads=True), members()).begin(None, reported.append, "it is drained", 0.0, ready)
    ready.answers[0]()
    assert isinstance(reported[0], Overloaded)


# ---- apply


def test_entries_that_were_read_ahead_and_then_cut_are_not_applied() -> None:
    """The slice ends early. Before the next slice, another leader replaces the last entry, which was not committed."""
    log = [(b"e8", 8, 5, None), (b"e9", 9, 5, None), (b"cut", 10, 5, None)]
    journal = log_end(
        last_index=10, synced_index=10, base_index=7, base_term=5,
        entries=lambda index, max_bytes: [entry for entry in log if entry[1] >= index],
    )  # fmt: skip
    core, applied = Core(commit_index=9), list[bytes]()
    machine = SimpleNamespace(apply=lambda index, term, command: applied.append(command))
    common = shared(core, journal, machine=machine)
    clock = iter([1.0])  # the first entry takes longer than a slice
    common.runtime.monotonic = lambda: next(clock, 0.0)
    nobody: Any = SimpleNamespace(appended_lists=[])
    part, ready = Applier(common, nobody), Ready()
    part.run(0.0, ready)
    assert applied == [b"e8"]
    log[2] = (b"another", 10, 6, None)
    core.commit_index = 10
    ((_, again, args),) = ready.timers
    again(*args, 0.0, ready)
    part.run(0.0, ready)
    assert applied == [b"e8", b"e9", b"another"]


# ---- followers


def follower(core: Core, journal: Any, installing: bool = False) -> Follower:
    part: Any = SimpleNamespace(heard_leader=lambda now: None, leader_changed=lambda ready: None, rtt_ms=0)
    applier: Any = SimpleNamespace(installing=installing, applied=7)
    return Follower(shared(core, journal, machine=part), members("n2"), part, part, applier)


def append(term: int = 5, prev: tuple[int, int] = (0, 0), commit: int = 0) -> messages.Append:
    return messages.decode_append(messages.encode_append(term, *prev, commit, 3))


def replies(ready: Ready) -> list[messages.AppendReply]:
    return [messages.decode_append_reply(bytes(frame)) for _, frame, _ in ready.sends]


def test_a_leader_of_an_earlier_term_hears_of_the_later_one() -> None:
    ready = Ready()
    follower(Core(), log_end()).on_append(Peer("n3"), append(term=4), 0.0, ready)
    assert replies(ready) == [messages.AppendReply(messages.HIGHER_TERM, 5, 0, 0, 0)]


def test_a_node_that_installs_files_takes_no_entries() -> None:
    core, ready = Core(), Ready()
    follower(core, log_end(), installing=True).on_append(Peer("n2"), append(prev=(9, 5)), 0.0, ready)
    assert replies(ready) == [messages.AppendReply(messages.INSTALLING, 5, 0, 0, 3)]


def test_commands_that_waited_for_a_transfer_are_proposed_at_its_end_and_not_again_at_the_next() -> None:
    voters, proposed = members("n3"), list[bytes]()
    part = transfers(Core(leads=True), voters)
    part._propose = lambda command, done: proposed.append(command)
    for command in (b"first", b"second"):
        ready = Ready()
        part.begin("n3", lambda error: None, "it is drained", 0.0, ready)
        part.hold(command, lambda result, error: None)
        assert command not in proposed
        ((_, give_up, args),) = ready.timers
        give_up(*args, 1.0, ready)
        for answer in ready.answers:
            answer()
    assert proposed == [b"first", b"second"]


def test_the_commit_index_goes_no_further_than_what_was_verified() -> None:
    core, ready = Core(), Ready()
    part = follower(core, log_end(term_at=lambda index: 5))
    part.on_append(Peer("n2"), append(commit=9), 0.0, ready)
    part.on_append(Peer("n2"), append(prev=(8, 5), commit=9), 0.0, ready)
    assert core.calls == [("heard", "n2", 5, 0), ("heard", "n2", 5, 8)]


def test_an_answer_waits_for_the_disk() -> None:
    core, ready = Core(), Ready()
    journal = log_end(synced_index=8, term_at=lambda index: 5)
    part = follower(core, journal)
    part.on_append(Peer("n2"), append(prev=(9, 5)), 0.0, ready)
    assert ready.sends == []
    journal.synced_index = 9
    part.synced(ready)
    assert replies(ready) == [messages.AppendReply(messages.OK, 5, 9, 0, 3)]


def test_an_answer_waits_for_its_term_on_the_disk() -> None:
    ready, journal = Ready(), log_end(term_is_durable=False, term_at=lambda index: 5)
    part = follower(Core(), journal)
    part.on_append(Peer("n2"), append(prev=(9, 5)), 0.0, ready)
    part.synced(ready)
    assert ready.sends == []
    journal.term_is_durable = True
    part.synced(ready)
    assert replies(ready) == [messages.AppendReply(messages.OK, 5, 9, 0, 3)]
