"""Alarms of the Overview: members, disks, clocks, certificates."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from hadelay.api.cluster import CheckOut, Cluster, Dispatch, Member
from hadelay.console.overview import alarms
from hadelay.console.samples import Look
from hadelay.server.service.cluster import clock_problems
from hadelay.server.service.overview import Totals
from tests.console.conftest import Browser
from tests.system.cluster import Cluster as Processes
from tests.system.cluster import until

LOOK = Look(Totals(0, 1, 0, 0, 0, 0, 0, 0, 0, 0), None, 0.0, 0.0, 0.0)


def view(*members: Member) -> Cluster[str]:
    return Cluster("c", 5, "n1", 3, "7", "", Dispatch("2026112019", 1, 0, "commit"), list(members))


def member(name: str, role: str = "follower", **more: Any) -> Member:
    return Member(name, "", "", role, "7", 0, "0.1.0", 5, 0.0, **{"has_space": True, **more})


def said(*members: Member, checks: tuple[CheckOut, ...] = (), clock: tuple[str, ...] = (), ends: Any = ()) -> list[str]:
    found = alarms(view(*members), LOOK, list(checks), list(clock), list(ends))
    return [f"{tone}: {words}" for tone, words, _ in found]


def test_a_full_disk_of_any_member_is_an_alarm() -> None:
    assert said(member("n1", "leader"), member("n2")) == []
    own = CheckOut("space", False, "3 MiB are free: less than storage.min_free_bytes")
    assert said(member("n1", "leader", has_space=False), member("n3", has_space=False), checks=(own,)) == [
        "bad: Too little disk space on n1, n3: every node refuses publishes until space is freed there.",
    ]  # fmt: skip


def test_wrong_clocks_are_alarms_in_words() -> None:
    clock: Any = SimpleNamespace(alarms={"skew:n2", "no_majority"}, skews=lambda mono: {"n2": -1312.6})
    node: Any = SimpleNamespace(clock=clock, runtime=SimpleNamespace(monotonic=time.monotonic))
    assert said(member("n1", "leader"), clock=tuple(clock_problems(node))) == [
        "warn: The wall clocks of a majority do not agree, or are not known.",
        "warn: The wall clock of n2 is -1,313 ms off cluster time.",
    ]


def test_a_certificate_that_ends_is_an_alarm() -> None:
    now, day = time.time(), 86_400
    ends = [now + 30 * day, now + 1.5 * day, now - 3.01 * day]
    assert said(member("n1", "leader"), ends=ends) == [
        "bad: A certificate of this node ends in 1 d 11 h.",
        "bad: A certificate of this node expired 3 d ago.",
    ]


def test_pages_of_other_nodes_tell_of_a_full_disk(cluster: Processes) -> None:
    """Nothing is really full: one node says that less than storage.min_free_bytes is free."""
    full, other = cluster.followers()
    cluster.kill(full)
    cluster.restart(full, settings=("storage.min_free_bytes=900TiB",))
    browser = Browser(cluster.urls[other])
    alarm = f"Too little disk space on {full}: every node refuses publishes until space is freed there."
    until(lambda: alarm in (browser.go("/console/"), browser.text)[1], "the Overview tells", every=0.2)
    browser.go("/console/cluster")
    assert alarm in browser.text
    assert "too full" in browser.text
    members = cluster.ask(other, "GET", "/v1/cluster").json["members"]
    assert {one["name"]: one["has_space"] for one in members} == {
        name: name != full for name in cluster.names
    }  # fmt: skip
    cluster.kill(full)
    cluster.restart(full)
    until(lambda: alarm not in (browser.go("/console/"), browser.text)[1], "there is space again", every=0.2)
