"""Every fault heals what it broke, on every node it hit, also when something fails on the way."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chaos.cluster import Cluster
from chaos.faults import choose, strike
from chaos.scenario import KINDS, Fault, Mistake
from tests.system.cluster import until

NODES = ["n1", "n2", "n3"]
#: What is done to a node when the fault begins, and when it is healed.
DONE = {
    "kill": ("kill", "start"),
    "stop": ("stop", "start"),
    "wipe": ("kill empty", "start"),
    "rot": ("kill rot", "start"),
    "old-copy": ("kill copy start", "kill restore start"),
    "crash": ("arm(journal.write:before)", "arm() start"),
    "pause": ("pause", "resume"),
    "few-files": ("limit", "unlimit"),
    "transfer": ("", ""),
    "cut": ("cut", "uncut"),
    "deaf": ("network.cut(heard=True)", "network.uncut"),
    "mute": ("network.cut(hears=True)", "network.uncut"),
    "loss": ("network.lose(20)", "network.lose_nothing"),
    "reset": ("network.reset", "network.lose_nothing"),
    "delay": ("network.shape(netem,delay,50ms)", "network.unshape"),
    "slow-link": ("network.shape(tbf,rate,1000kbit,burst,16kb,latency,200ms)", "network.unshape"),
    "slow-sync": ("control(sync_delay_ms=50)", "control start"),
    "fail-sync": ("control(sync_errno=5)", "control start"),
    "clock": ("control(clock_offset_ms=3600000)", "control start"),
    "full-disk": ("disk.fill", "disk.unfill start"),
    "stalled-disk": ("disk.freeze", "disk.thaw start"),
    "power-cut": ("disk.cut_power(2) kill disk.detach", "kill disk.detach disk.attach start"),
}


#: What is done in turns, and to heal.
TURNS = {
    "starve": ("pause", "resume"),
    "flap": ("cut", "uncut"),
    "strobe": ("control(clock_offset_ms=3600000)", "control"),
}


class Recorder:
    """Writes down what is called on it, as `prefix.name(arguments)`; `fails` raises when it is asked for."""

    def __init__(self, cluster: Recorded, prefix: str, node: str | None = None) -> None:
        self._cluster, self._prefix, self._node = cluster, prefix, node

    def __getattr__(self, name: str) -> Any:
        def called(*words: object, **named: object) -> None:
            node, *rest = (self._node, *words) if self._node else words
            given = ",".join([*map(str, rest), *(f"{key}={value}" for key, value in named.items())])
            self._cluster.note(str(node), f"{self._prefix}{name}" + (f"({given})" if given else ""))

        return called


class Recorded(Cluster):
    def __init__(self, fails: tuple[str, str] = ("", "")) -> None:
        self.urls = dict.fromkeys(NODES, "http://127.0.0.1:1")
        self.seen: dict[str, list[str]] = {name: [] for name in NODES}
        self.fails = fails
        self.network = Recorder(self, "network.")  # type: ignore[assignment]
        self.disks = {name: Recorder(self, "disk.", name) for name in NODES}  # type: ignore[misc]

    def note(self, node: str, what: str) -> None:
        self.seen[node].append(what)
        if (node, what) == self.fails:
            raise Mistake(f"{node}: {what} failed")

    def do(self, what: str, name: str) -> None:
        self.note(name, what)

    def control(self, name: str, **values: int) -> None:
        Recorder(self, "").control(name, **values)

    def arm(self, name: str, point: str) -> None:
        self.note(name, f"arm({point})")


def fault(kind: str) -> Fault:
    amount = KINDS[kind].amount
    more: dict[str, Any] = {"at": "journal.write:before"} if kind == "crash" else {}
    return Fault(kind=kind, **({amount[0]: amount[1]} if amount else more))


def test_every_kind_is_here() -> None:
    assert DONE.keys() | TURNS.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", DONE)
def test_a_fault_heals_what_it_broke_even_if_the_run_ends_in_the_middle(kind: str) -> None:
    hit, heal = (words.split() for words in DONE[kind])
    cluster = Recorded()

    def interrupted() -> None:
        with strike(cluster, ["n1", "n3"], fault(kind)):
            assert cluster.seen == {"n1": hit, "n2": [], "n3": hit}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert cluster.seen == {"n1": hit + heal, "n2": [], "n3": hit + heal}


@pytest.mark.parametrize("kind", TURNS)
def test_an_alternating_fault_is_off_in_the_end(kind: str) -> None:
    cluster = Recorded()
    with strike(cluster, ["n1", "n3"], fault(kind)):
        until(lambda: len(cluster.seen["n3"]) > 4, "it went on and off twice")
    for name in ("n1", "n3"):
        assert tuple(cluster.seen[name][:2]) == TURNS[kind]
        assert cluster.seen[name][-1] == TURNS[kind][1]
    assert not cluster.seen["n2"]


def test_a_node_is_killed_to_come_by_a_point_of_its_start() -> None:
    cluster = Recorded()
    with strike(cluster, ["n2"], Fault(kind="crash", at="snapshot.verify:after")):
        assert cluster.seen["n2"] == ["kill", "empty", "arm(snapshot.verify:after)", "start"]
    assert cluster.seen["n2"][4:] == ["arm()", "start"]


@pytest.mark.parametrize("kind", ["kill", "pause", "cut"])
def test_a_node_that_cannot_be_healed_does_not_keep_the_others_broken(kind: str) -> None:
    heal = DONE[kind][1]
    for failing in ("n1", "n3"):
        cluster = Recorded((failing, heal))
        with pytest.raises(Mistake), strike(cluster, ["n1", "n3"], fault(kind)):
            pass
        assert cluster.seen["n1"][-1] == cluster.seen["n3"][-1] == heal


@pytest.mark.parametrize(
    ("kind", "failing"),
    [("pause", "pause"), ("power-cut", "disk.cut_power(2)"), ("power-cut", "kill"), ("power-cut", "disk.detach")],
)
def test_a_fault_that_cannot_begin_is_healed_where_it_began(kind: str, failing: str) -> None:
    hit, heal = (words.split() for words in DONE[kind])
    cluster = Recorded(("n3", failing))
    with pytest.raises(Mistake), strike(cluster, ["n1", "n3"], fault(kind)):
        raise AssertionError("it never held")
    assert cluster.seen["n1"][0] == hit[0]
    assert cluster.seen["n1"][-len(heal) :] == heal
    assert cluster.seen["n3"][-1] == heal[-1]


@pytest.mark.parametrize(
    ("target", "busy", "chosen"),
    [
        ("leader", set(), {"n2"}),
        ("minority", set(), {"n2"}),
        ("majority", {"n1"}, {"n2", "n3"}),
        ("all", set(), {"n1", "n2", "n3"}),
        ("all", {"n3"}, {"n1", "n2"}),
        ("follower", {"n1"}, {"n3"}),
        ("n3", set(), {"n3"}),
        ("n3", {"n3"}, set()),
        ("random", {"n1", "n2", "n3"}, set()),
    ],
)
def test_nodes_hit_by_a_fault(target: str, busy: set[str], chosen: set[str]) -> None:
    hit = choose(Fault(kind="kill", target=target), NODES, "n2", busy, random.Random(1))
    assert set(hit) == chosen


@pytest.mark.parametrize(
    ("point", "chosen"),
    [("raft.commit:before", {"n2"}), ("raft.take:after", {"n1"}), ("journal.vote:before", set(NODES))],
)
def test_nodes_that_have_to_be_hit_to_pass_a_crash_point(point: str, chosen: set[str]) -> None:
    hit = choose(Fault(kind="crash", at=point, target="n3"), NODES, "n2", {"n3"} - chosen, random.Random(1))
    assert set(hit) == chosen
