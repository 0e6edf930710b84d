"""`python -m bench waterfall`: stages add up, from made-up instants and those of real nodes; the page has places."""

from __future__ import annotations

import asyncio
import gc
import statistics
from pathlib import Path

import numpy as np
import pytest

from bench.cluster import Cluster
from bench.instants import Instants, collected, environment
from bench.rows.deliver import steady
from bench.rows.waterfall import Answers
from bench.waterfall import (
    DELIVERY,
    FOLLOWER,
    PAGE,
    PUBLISH,
    WHOLE,
    Answer,
    delivery,
    figures,
    publishes,
    tables,
    written,
)  # fmt: skip
from chaos.freeports import free_ports


def leader() -> Instants:
    """Two messages due at 10.000 and 10.004 s are offered at 9.990 s; their grant is committed at 9.996 s."""
    return Instants(
        node="n1",
        offers=[(7, "a", 9.980, 9.990, [10_000, 10_004])],
        entries=[(5, 9.991, 9.997, [7], [0.002], 100)],
        syncs=[(4, 9.880, 9.890), (5, 9.992, 9.994)],
        calls=[(9.992, 9.993)],
        replies=[("n2", 5, 9.996), ("n3", 5, 9.999)],
        commits=[(5, 9.996)],
        decided={7: 9.997}, released={7: 10.005}, written={7: 10.006},
    )  # fmt: skip


def follower(name: str, late: float) -> Instants:
    return Instants(node=name, received=[(5, 9.992 + late)], syncs=[(5, 9.993 + late, 9.995 + late)])


def test_stages_of_a_delivery_add_up_to_its_lateness() -> None:
    stages, facts = delivery(leader(), [Answer("a", 10.007, 10.007)])
    assert stages.sum(axis=1) == pytest.approx([7, 3])
    assert stages[0] == pytest.approx([0, 0, 0, 0, 0, 0, 0, 4, 1, 1, 1])
    assert stages[1] == pytest.approx([0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1])
    assert facts["messages per answer"] == 2
    assert facts["offered before the first message is due, median"] == pytest.approx(10)


def test_a_receive_that_comes_late_and_a_clock_that_differs() -> None:
    found = leader()
    found.offers = [(7, "a", 9.980, 9.990, [9_970 + 100_000])]
    stages, _ = delivery(found, [Answer("a", 10.007, 110.007)])
    assert stages[0] == pytest.approx([10, 10, 1, 1, 2, 2, 1, 0, 8, 1, 1])


def test_figures_of_stages() -> None:
    found = dict(figures(np.array([[1.0, 2.0]] * 99 + [[1.0, 9.0]]), ("one", "two")))
    assert found["two; median"] == 2
    assert [found[f"{name}; slowest hundredth"] for name in ("one", "two", WHOLE)] == [1, 9, 10]
    assert [found[f"{name}; middle tenth"] for name in ("one", "two", WHOLE)] == pytest.approx([1, 2.07, 3.07], abs=0.1)


def test_stages_of_a_publish_add_up_to_the_time_of_a_request() -> None:
    found = publishes([leader(), follower("n2", 0.0), follower("n3", 0.003)], 9.9, 10.9, 10.0)
    assert [found[f"{name}; mean"] for name in PUBLISH] == pytest.approx([2, 1, 2, 2, 1, 2])
    assert [found[f"{name}; mean"] for name in FOLLOWER] == pytest.approx([1, 1, 2, 1])
    assert (found["entries per second"], found["publishes per entry"], found["a sync"]) == pytest.approx((1, 1, 2))


def test_the_page_has_places_for_the_figures() -> None:
    names = [f"lateness: {name}; {kind}" for name in (*DELIVERY, WHOLE) for kind in _KINDS]
    for side in ("undelayed", "delayed"):
        names += [f"slowdisk, {side}: {name}; mean" for name in (*PUBLISH, WHOLE, *FOLLOWER)]
    names += ["lateness: messages per answer", "slowdisk, undelayed: a sync", "slowdisk, delayed: a sync"]
    row = {"name": "waterfall", "samples": {name: [4711.0] for name in names}, "units": dict.fromkeys(names, "")}
    machine = {"date": "2026-11-30 12:00 UTC", "commit": "abc", "cpus": 2, "cpu": "EPYC"}
    page = written(PAGE.read_text(), tables({"machine": machine, "rows": [row]}))
    assert page.count("4,711") == len(names)
    assert written(page, {}) == page


_KINDS = ("median", "p99", "middle tenth", "slowest hundredth")


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_real_nodes_note_the_instants_of_all_deliveries(tmp_path: Path) -> None:
    tally, directory = Answers(), tmp_path / "instants"
    directory.mkdir()
    with Cluster.start(tmp_path / "cluster", free_ports(24), environment=environment(directory)) as cluster:
        asyncio.run(steady(cluster, 200, 2, tally=tally))
        cluster.stop()
    gc.collect()  # now, where it may warn: the harness leaves its sockets to the collector
    nodes = collected(directory)
    stages, _ = delivery(nodes[0], tally.answers)
    assert len(stages) == len(tally.late_ms) > 0
    assert statistics.mean(stages.sum(axis=1)) == pytest.approx(statistics.mean(tally.late_ms), abs=1)
    found = publishes(nodes, 0, 1e9, 1000.0)
    assert all(found[f"{name}; mean"] >= 0 for name in (*PUBLISH, *FOLLOWER))
