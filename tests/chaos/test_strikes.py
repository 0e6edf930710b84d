"""Which failovers a run times, from when to when; and how many nodes it breaks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from threading import Event
from typing import Any

import pytest

from chaos.cluster import Cluster
from chaos.history import History
from chaos.run import Run
from chaos.scenario import Fault, Mistake, Scenario


class Still(Cluster):
    """What is done to it takes a second of its own time each, but for a start; n1 leads."""

    def __init__(self, nodes: int) -> None:
        self.urls = {f"n{i + 1}": f"http://127.0.0.1:{i + 1}" for i in range(nodes)}
        self.now = 100.0
        self.offsets: dict[str, int] = {}
        self.most_offsets = 0

    def do(self, what: str, name: str) -> None:
        self.now += what != "start"

    def control(self, name: str, *, sync_delay_ms: int = 0, sync_errno: int = 0, clock_offset_ms: int = 0) -> None:
        self.offsets[name] = clock_offset_ms
        self.most_offsets = max(self.most_offsets, sum(map(bool, self.offsets.values())))


class Answers:
    """Instead of traffic: the second put is stored."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def client(self, urls: Sequence[str]) -> str:
        return urls[0]

    async def put_one(self, client: str, timeout_s: float) -> bool:
        self.asked.append(client)
        return len(self.asked) > 1

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.ensure_future(work)


def strike(nodes: int, *together: Fault, lame: Sequence[str] = ()) -> tuple[Run, Still, list[str]]:
    """One round. Also who was asked to store something meanwhile."""
    cluster, history, answers = Still(nodes), History(), Answers()
    run = Run(Scenario(), 1, cluster, history, lambda text: None)
    run.traffic, run.leader = answers, "n1"  # type: ignore[assignment]
    run._lame.update(lame)
    history.clock = lambda: cluster.now

    async def all_of_them() -> None:
        await asyncio.gather(*map(run._strike, together))

    asyncio.run(all_of_them())
    return run, cluster, answers.asked


def timed(run: Run) -> list[tuple[str, float]]:
    return [(event["kind"], event["s"]) for event in run.history.of("failover")]


KILL, WIPE = (Fault(kind=kind, seconds=0.0) for kind in ("kill", "wipe"))
OTHER = Fault(kind="pause", target="follower", seconds=0.0)


def test_a_failover_is_timed_from_the_beginning_of_its_fault_by_the_other_nodes() -> None:
    run, _, asked = strike(3, WIPE)
    assert timed(run) == [("wipe", 2.0)]
    assert asked == ["http://127.0.0.1:2", "http://127.0.0.1:3"]


@pytest.mark.parametrize(
    ("nodes", "others", "lame", "is_timed"),
    [
        (1, [], [], False),
        (2, [], [], False),
        (3, [], [], True),
        (3, [OTHER], [], False),
        (5, [OTHER], [], True),
        (5, [OTHER], ["n5", "n4"], False),
        (3, [], ["n2"], False),  # not ready again in time: it is none of a majority
        (3, [Fault(kind="transfer", target="n2")], [], True),  # that takes nobody away
    ],
)
def test_only_while_a_majority_is_left(nodes: int, others: list[Fault], lame: list[str], is_timed: bool) -> None:
    for together in ([KILL, *others], [*others, KILL]):
        run, _, _ = strike(nodes, *together, lame=lame)
        assert len(timed(run)) == is_timed
        assert [event["deposed"] for event in run.history.of("fault")].count(True) == 1


def test_faults_that_never_hit_more_than_a_minority_do_not_add_up_to_one() -> None:
    clocks = [Fault(kind="clock", target=target, seconds=0.0, ms=3_600_000) for target in ("follower", "random", "n1")]
    for nodes, most in ((1, 0), (3, 1), (5, 2)):
        assert strike(nodes, *clocks)[1].most_offsets == most


class Slow(Still):
    """As an admin's own cluster: what is done takes a while, and is done in threads."""

    slow = True

    def __init__(self) -> None:
        super().__init__(3)
        self.killing, self.go_on = Event(), Event()
        self.done: list[tuple[str, str]] = []

    def do(self, what: str, name: str) -> None:
        if what == "kill":
            self.killing.set()
            assert self.go_on.wait(10)
        self.done.append((what, name))


def test_an_interrupted_run_has_healed_every_fault_when_it_ends() -> None:
    """One is healed at once; the other one is still being done to its node."""
    cluster = Slow()
    run = Run(Scenario(), 1, cluster, History(), lambda text: None)
    together = Fault(kind="pause", target="n1", seconds=60.0), Fault(kind="kill", target="n2", seconds=60.0)

    async def interrupted() -> None:
        work = asyncio.ensure_future(run._strike_all(together))
        await asyncio.to_thread(cluster.killing.wait)
        work.cancel()
        asyncio.get_running_loop().call_later(0.05, cluster.go_on.set)
        with pytest.raises(asyncio.CancelledError):
            await work
        assert set(cluster.done) == {("pause", "n1"), ("resume", "n1"), ("kill", "n2"), ("start", "n2")}

    asyncio.run(interrupted())


def test_a_fault_that_cannot_be_done_is_a_mistake_and_the_others_are_healed() -> None:
    done: list[str] = []

    class Fails(Still):
        def do(self, what: str, name: str) -> None:
            if what == "kill":
                raise Mistake("n2: ssh: no route to host")
            done.append(what)

    cluster = Fails(3)
    run = Run(Scenario(), 1, cluster, History(), lambda text: None)
    together = Fault(kind="pause", target="n1", seconds=60.0), Fault(kind="kill", target="n2", seconds=60.0)
    with pytest.raises(Mistake, match=r"^n2: ssh: no route to host$"):
        asyncio.run(run._strike_all(together))
    assert done == ["pause", "start", "resume"]
