"""Each promise of the checkers, kept and broken: a check that cannot fail is no check."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaos import flat
from chaos.checkers import ACKED, CHECKERS, COUNTED, OTHER_ENDS, check, fault_spans, overtaken
from chaos.history import History, body_of, number_of, term_of
from chaos.report import page, summary, table
from chaos.scenario import KINDS, Watch
from hadelay.core.tokens import encode_leases

HEAD = {"scenario": "test", "seed": 1, "seconds": 9, "replay": "again", "directory": "/"}


def put(history: History, n: int = 0, delay_s: float = 1.0, at: float = 10.0, syncs: int | None = None) -> str:
    history.record("put", n=n, delay_s=delay_s, size=3, asked=at)
    history.record("stored", n=n, t=at + 0.01, id=f"M{n}", syncs=syncs)
    return f"M{n}"


def give(history: History, n: int = 0, got: float = 11.1, attempt: int = 1, request: str = "r", **other: Any) -> None:
    """Handed out when it was due, in cluster time that is this clock's, for a lease of 2 s."""
    now_ms = int(got * 1000)
    fields = {"id": f"M{n}", "consumer": "c", "asked": got - 0.5, "now_ms": now_ms, "until_ms": now_ms + 2000}
    fields |= {"due_ms": 11_000, "redelivered": attempt > 1, "whole": True, "term": 1, **other}
    history.record("given", n=n, attempt=attempt, request=request, got=got, **fields)


CANCELLED = OTHER_ENDS[0]


def counted(history: History, node: str = "n1", other: dict[str, int] | None = None, ours: bool = True) -> None:
    """One message was published and cancelled, unless `other` says otherwise."""
    counts = dict.fromkeys(COUNTED, 0) | {"raft_applied_index": 9, "published_messages_total": 1, CANCELLED: 1}
    history.record("counted", t=20.0, node=node, ours=ours, counts=counts | (other or {}))


def load(history: History, **other: Any) -> None:
    history.record("load", t=9.0, **{"clocks": 1, "late_s": 5.0, "nodes": 3, **other})


def kept(history: History) -> None:
    load(history)
    put(history)
    give(history)
    give(history, got=13.2, attempt=2, request="r2")
    history.record("acked", id="M0", attempt=2, request="r2", t=13.3)
    put(history, n=1)
    history.record("cancel", n=1, t=10.5)
    history.record("cancelled", n=1, t=10.6)
    put(history, n=2, syncs=2)
    give(history, n=2, got=16.5)  # late, but it fell due while something was broken
    history.record("points", t=9.0, points=["journal.sync:after"])
    for at, nodes in (("journal.sync:after", []), ("journal.sync:after", ["n1"]), ("raft.send:before", [])):
        history.record("crash", t=9.5, at=at, nodes=nodes)  # of those that were drawn none is owed
    history.record("fault", t=10.9, kind="kill", nodes=["n1"], all=["n1", "n2", "n3"], deposed=False)
    history.record("healed", t=12.0, kind="kill", nodes=["n1"], began=10.9)
    history.record("replicas", t=20.0, code=0, said="all identical")
    history.record("recovered", t=12.1, s=0.1)
    sampled(history)
    for node in ("n1", "n2"):
        counted(history, node, {"published_messages_total": 3, ACKED: 2})
    counted(history, "n3", {"published_messages_total": 90}, ours=False)


def early_by_the_harness_clock(history: History) -> None:
    give(history, got=10.9, due_ms=10_900)


def handed_back_and_given_again(history: History) -> None:
    give(history, got=11.1, attempt=1, request="a")
    history.record("nack", id="M0", attempt=1, request="a", t=11.2)
    give(history, got=11.3, attempt=2, request="b")


def asked_twice(history: History) -> None:
    """One receive, asked again because its answer was lost: its lease was extended, and nothing is double."""
    give(history, got=11.1)
    give(history, got=12.1)


def overlapping(history: History) -> None:
    give(history, got=11.1, request="a")
    give(history, got=12.0, attempt=2, request="b")


def after_its_ack(history: History) -> None:
    give(history)
    history.record("acked", id="M0", attempt=1, request="r", t=11.2)
    give(history, got=14.0, attempt=2, request="r2")


def after_its_cancel(history: History) -> None:
    history.record("cancel", n=0, t=10.5)
    history.record("cancelled", n=0, t=10.6)
    give(history, asked=10.7)


def refused_and_given(history: History) -> None:
    history.record("put", n=7, delay_s=0.0, size=3, asked=10.0)
    history.record("refused", n=7, why="NoLeader")
    give(history, n=7)


def two_answers(history: History) -> None:
    history.record("stored", n=0, t=10.2, id="M9")
    give(history)


def only_one_disk(history: History) -> None:
    load(history)
    history.puts[0].syncs = 1
    give(history)


def of_an_older_term(history: History) -> None:
    give(history, term=4)
    give(history, n=1, got=12.0, term=3)


def much_too_late(history: History) -> None:
    load(history)
    give(history, got=16.5)


def not_the_same_everywhere(history: History) -> None:
    counted(history)
    counted(history, "n2", {CANCELLED: 0})


def unlucky_end(history: History) -> None:
    give(history)
    history.record("ended", t=11.0, node="n1", code=70, may=False)


def sampled(history: History, leaked: float = 0.0, node: str = "n1") -> None:
    """Of 20 minutes: a journal that grows and is cut, and `leaked` descriptors a minute."""
    history.record("watch", t=0.0, **msgspec.structs.asdict(Watch()))
    for i in range(240):
        text = f'hadelay_log_bytes {i % 24 * 1e6}\nhadelay_hour_bytes{{file="log"}} {i * 4e5}\n'
        text += f"hadelay_published_messages_total {i * 1e3}\n# HELP x\nprocess_open_fds {40 + int(leaked * i / 12)}\n"
        history.record("sample", t=i * 5.0, node=node, **flat.parse(text), anonymous=50e6 + i % 7 * 1e6)


def nobody_came_by(history: History) -> None:
    history.record("points", t=9.0, points=["journal.sync:after"])
    history.record("crash", t=9.5, at="journal.sync:after", nodes=[])


BROKEN: list[tuple[str, Callable[[History], None]]] = [
    ("I1 lost", lambda history: None),  # stored, and never seen again
    ("I1 lost", lambda history: history.record("asked-for", t=20.0, id="M0", state="acked")),
    ("I3 phantom", lambda history: give(history, n=5)),
    ("I3 phantom", lambda history: give(history, whole=False)),
    ("I3 phantom", after_its_cancel),
    ("I3 phantom", refused_and_given),
    ("I5 resurrection", after_its_ack),
    ("I6 double lease", overlapping),
    ("I6 double lease", lambda history: [give(history, request=one) for one in "ab"] and None),
    ("I8 duplicate", two_answers),
    ("I8 duplicate", lambda history: give(history, id="M9")),
    ("I9 early", lambda history: give(history, got=11.1, due_ms=11_200)),
    ("I9 early", early_by_the_harness_clock),
    ("I2 conservation", lambda history: counted(history, "n1", {CANCELLED: 0})),
    ("I2 conservation", lambda history: counted(history, "n1", {"sweeper_found_messages_total": 1}, ours=False)),
    ("I10 late", much_too_late),
    ("I12 divergence", lambda history: history.record("replicas", t=20.0, code=1, said="1 of 3 files differ")),
    ("I13 log safety", lambda history: history.record("unsafe", t=20.0, why="n1 went back from term 2 to 1")),
    ("I14 durability", only_one_disk),
    ("I15 liveness", lambda history: history.record("not-recovered", t=20.0, s=9.0, why="n1 not ready")),
    ("I15 liveness", lambda history: history.record("asked-for", t=20.0, id="M0", state="ready")),
    ("I16 fencing", of_an_older_term),
    ("I17 fail-stop", unlucky_end),
    ("I18 honesty", lambda history: counted(history, "n1", {"published_messages_total": 2})),
    ("I18 honesty", lambda history: counted(history, "n1", {ACKED: 1})),
    ("I18 honesty", not_the_same_everywhere),
    ("flat", lambda history: sampled(history, leaked=1.0)),
    ("crash points", nobody_came_by),
]


def broken(history: History) -> set[str]:
    return {verdict.name for verdict in check(history) if verdict.violations}


@pytest.mark.parametrize("story", [kept, handed_back_and_given_again, asked_twice])
def test_a_cluster_that_kept_its_promises_is_not_accused(story: Callable[[History], Any]) -> None:
    history = History()
    put(history)
    story(history)
    history.record("drained", t=20.0)
    assert broken(history) == set()


def test_what_an_interrupted_run_did_not_wait_for_is_not_lost() -> None:
    history = History()
    put(history)
    assert broken(history) == set()


@pytest.mark.parametrize(("name", "story"), BROKEN)
def test_each_broken_promise_is_noticed(name: str, story: Callable[[History], None]) -> None:
    history = History()
    put(history)
    story(history)
    history.record("drained", t=20.0)
    assert name in broken(history)


def test_every_check_can_fail() -> None:
    assert {name for name, _ in BROKEN} == set(CHECKERS)


def test_a_cold_start_takes_time_from_wall_clocks_which_may_differ_between_machines() -> None:
    for clocks, noticed in ((1, True), (3, False)):
        history = History()
        load(history, clocks=clocks)
        put(history)
        history.record("fault", t=10.2, kind="kill", nodes=["n1", "n2"], all=["n1", "n2", "n3"], deposed=True)
        early_by_the_harness_clock(history)
        assert ("I9 early" in broken(history)) == noticed


def test_interval_mode_promises_less() -> None:
    history = History()
    put(history)
    overlapping(history)
    assert not any(verdict.violations for verdict in check(history, "interval"))


def test_lateness_is_told_apart_by_what_was_broken_when_a_message_was_owed() -> None:
    history = History()
    for t, began, again in ((12.0, 11.0, 13.0), (13.5, 11.5, 13.6), (30.0, 29.0, 31.0)):
        history.record("healed", t=t, kind="kill", nodes=["n1"], began=began)
        history.record("recovered", t=again, s=0.1)
    assert fault_spans(history) == [(11.0, 14.6), (29.0, 32.0)]
    for n, (got, late_ms) in enumerate(((10.0, 5), (14.0, 20), (20.0, 6), (20.0, 6_000), (32.5, 1))):
        put(history, n)
        give(history, n, got=got, due_ms=int(got * 1000) - late_ms)
    late = summary(history, [], HEAD)["late_ms"]
    assert late["calm"] == {"n": 3, "p50": 5, "p99": 6, "max": 6}
    assert late["during faults"] == {"n": 2, "p50": 6000, "p99": 6000, "max": 6000}


def test_what_was_due_later_and_came_sooner_is_counted() -> None:
    history = History()
    for n, (due, asked, got) in enumerate(((11.0, 13.0, 13.1), (12.5, 12.0, 12.6), (11.9, 12.7, 12.8))):
        put(history, n)
        give(history, n, got=got, asked=asked, due_ms=int(due * 1000))
    assert overtaken(history) == 1  # the third is no second ahead of the second


def test_page_and_table_agree_on_the_latest_message() -> None:
    """Of one whose first answer was lost, the next attempt is what was seen first."""
    history = History()
    give(history, got=14.0, attempt=2, due_ms=11_000)
    found = summary(history, [], HEAD)
    assert found["late_ms"]["calm"]["max"] == 3_000
    assert "latest: 3000 ms" in page(history, found)


def test_each_kind_of_fault_has_a_row_of_its_own_in_the_page() -> None:
    history, nodes = History(), ["n1", "n2", "n3"]
    for i, kind in enumerate(KINDS):
        history.record("fault", t=float(i), kind=kind, nodes=nodes, all=nodes, deposed=False)
        history.record("healed", t=i + 0.5, kind=kind, nodes=nodes, began=float(i))
    text = page(history, summary(history, [], HEAD))
    labels = {kind: float(y) - 11 for y, kind in re.findall(r'<text x="0" y="([\d.]+)">([\w-]+)</text>', text)}
    bars = re.findall(r'y="([\d.]+)" width="[\d.]+" height="[\d.]+" fill="([^"]+)"[^>]*><title>(\S+) of (n\d)<', text)
    places = {(kind, node): (float(y), colour) for y, colour, kind, node in bars}
    assert len({y for y, _ in places.values()}) == len(places) == len(KINDS) * len(nodes)
    assert len({colour for _, colour in places.values()}) == len(nodes)
    assert all(0 <= y - labels[kind] < 12 for (kind, _), (y, _) in places.items())


def test_a_report_says_how_many_failovers_were_timed() -> None:
    history = History()
    for deposed in (True, True, False):
        history.record("fault", t=10.0, kind="kill", nodes=["n1"], all=["n1", "n2", "n3"], deposed=deposed)
    history.record("failover", t=10.5, kind="kill", s=0.5)
    lines = table(summary(history, [], HEAD)).splitlines()
    assert next(line.split() for line in lines if "leaders hit" in line)[:4] == ["leaders", "hit", "2,", "1"]
    assert any(line.split()[:4] == ["failover,", "kill", "p50", "500"] for line in lines)


def test_a_lease_says_in_which_term_it_was_granted() -> None:
    tokens = encode_leases(255, 0xFEDCBA98, 0xFFFFFFFF, [1], [494_000], [7]) + encode_leases(0, 7, 1, [0], [1], [2])
    assert list(map(term_of, tokens)) == [0xFEDCBA98, 7]


def test_a_payload_says_which_message_it_is_and_whether_it_is_whole() -> None:
    assert number_of(body_of(70_000, 9)) == 70_000
    assert number_of(body_of(70_000, 9)[:-1] + b"\0") is None


def test_a_history_that_was_written_reads_the_same_even_if_it_was_cut_short(tmp_path: Path) -> None:
    with open(tmp_path / "history.jsonl", "wb") as file:
        history = History(file=file)
        kept(history)
        file.write(b'{"e":"give')
    again = History.read(tmp_path / "history.jsonl")
    assert (again.puts, again.given, again.events) == (history.puts, history.given, history.events)
    found = summary(again, check(again), HEAD)
    assert found["ok"]
    assert "I1 lost" in table(found)
    assert "<svg" in page(again, found)


def test_what_was_watched_is_plotted_and_says_who_grew() -> None:
    history = History()
    sampled(history)
    sampled(history, leaked=2.0, node="n2")
    give(history, got=20.0, due_ms=19_990)
    verdicts = check(history)
    told = [violation for verdict in verdicts if verdict.name == "flat" for violation in verdict.violations]
    assert told == ["file descriptors, of n2: grew by 19.8, and watch.descriptors is 5"]
    found = summary(history, verdicts, HEAD)
    row = next(row for row in found["watched"] if row["what"] == "file descriptors" and row["node"] == "n2")
    assert (row["first"], row["last"], row["limit"]) == (40, 79, 5.0)
    assert page(history, found).count("<svg") == 1 + len({row["what"] for row in found["watched"]})
    assert "growth may be 5" in table(found)
