"""Each promise of the checkers, kept and broken: a check that cannot fail is no check."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chaos import flat
from chaos.checkers import ACKED, CHECKERS, COUNTED, OTHER_ENDS, PARTS, REDRIVEN, Checker, check, judge
from chaos.history import Given, History, body_of, checksum, number_of, term_of
from chaos.lateness import fault_spans, overtaken
from chaos.report import page, summary, table
from chaos.scenario import KINDS, Watch
from hadelay.codec.leasetokens import encode_leases

HEAD = {"scenario": "test", "seed": 1, "seconds": 9, "replay": "again", "directory": "/"}


def put(history: History, n: int = 0, delay_s: float = 1.0, at: float = 10.0, **other: Any) -> str:
    """Stored at once, and due in cluster time that is this clock's."""
    reported = {name: other.pop(name) for name in ("syncs",) if name in other}
    history.record("put", n=n, delay_s=delay_s, size=3, asked=at, **{"topic": "t", **other})
    history.record("stored", n=n, t=at + 0.01, id=f"M{n}", due_ms=int((at + delay_s) * 1000), **reported)
    return f"M{n}"


def give(history: History, n: int = 0, got: float = 11.1, attempt: int = 1, request: str = "r", **other: Any) -> Given:
    """Handed out when it was due, in cluster time that is this clock's, for a lease of 2 s."""
    now_ms = int(got * 1000)
    fields = {"id": f"M{n}", "consumer": "c", "asked": got - 0.5, "now_ms": now_ms, "until_ms": now_ms + 2000}
    fields |= {"due_ms": 11_000, "redelivered": attempt > 1, "body": checksum(body_of(max(n, 0), 3)), "term": 1}
    history.record("given", n=n, attempt=attempt, request=request, got=got, **fields | {"topic": "t", **other})
    return history.given[-1]


CANCELLED, EXPIRED, DEAD = OTHER_ENDS
WAITING = PARTS[4]


def counted(history: History, node: str = "n1", *, ours: bool = True, **other: int) -> None:
    """What `kept` publishes, and what becomes of it."""
    counts = dict.fromkeys(COUNTED, 0) | {"raft_applied_index": 9, "published_messages_total": 12, ACKED: 9}
    counts |= {CANCELLED: 2, EXPIRED: 1, DEAD: 1, REDRIVEN: 1, **other}
    history.record("counted", t=20.0, node=node, ours=ours, counts=counts)


def load(history: History, **other: Any) -> None:
    history.record("load", t=8.0, **{"clocks": 1, "late_s": 3.0, "lease_s": 2.0, "nodes": 3, "sync": "commit", **other})


def settle(history: History, what: str, n: int, attempt: int, t: float, request: str = "r", **other: Any) -> None:
    history.record(what, id=f"M{n}", attempt=attempt, request=request, t=t, **other)


def said(history: History, term: int = 1, index: int = 9, leader: str = "n1", node: str = "n1") -> None:
    history.record("said", t=19.0, node=node, life=0, term=term, index=index, leader=leader)


def kept(history: History) -> None:
    """A run in which every branch of every check has something to decide, and every promise is kept."""
    load(history)
    history.record("topic", t=8.0, topic="limited", max_attempts=2)
    history.record("points", t=9.0, points=["journal.sync:after"])
    for at, nodes in (("journal.sync:after", []), ("journal.sync:after", ["n1"]), ("raft.send:before", [])):
        history.record("crash", t=9.5, at=at, nodes=nodes)  # of those that were drawn none is owed
    history.record("fault", t=10.9, kind="kill", nodes=["n1"], all=["n1", "n2", "n3"], deposed=False)
    history.record("healed", t=12.0, kind="kill", nodes=["n1"], began=10.9)
    history.record("recovered", t=12.1, s=0.1)
    history.record("failover", t=12.0, kind="kill", s=0.4, limit_s=2.0)
    # 0: the lease ran out, and another consumer acked it.
    put(history)
    give(history)
    give(history, got=13.2, attempt=2, request="r2")
    settle(history, "acked", 0, 2, 13.3, "r2")
    # 1: cancelled.
    put(history, n=1)
    history.record("cancel", n=1, t=10.5)
    history.record("cancelled", n=1, t=10.6)
    # 2: published twice under one key; late, but a node was killed when it fell due.
    put(history, n=2, syncs=2)
    history.record("stored", n=2, t=10.2, id="M2")
    history.record("placed", n=2, t=10.2, found=True, unsynced=["n3"])
    give(history, n=2, got=15.5)
    settle(history, "acked", 2, 1, 15.6)
    # 3: nacked, dead, and redriven.
    put(history, n=3, topic="limited")
    for attempt, got in ((1, 11.1), (2, 11.3)):
        give(history, n=3, attempt=attempt, got=got, request=f"r{attempt}", topic="limited")
        settle(history, "nack", 3, attempt, got + 0.05, f"r{attempt}")
    history.record("dead", id="M3", attempt=2, t=11.6)
    history.record("redrive", id="M3", t=12.3)
    history.record("redriven", id="M3", t=12.4)
    give(history, n=3, got=13.1, request="r3", due_ms=12_350, topic="limited")
    settle(history, "acked", 3, 1, 13.2, "r3")
    # 4: forgotten, and its TTL ended it.
    put(history, n=4, ttl_s=1.0)
    give(history, n=4)
    history.record("asked-for", t=14.0, id="M4", state="expired", ended_ms=13_200)
    # 5: rescheduled; with a key and tags.
    put(history, n=5, at=7.0, key="k", tags=["a", "b"])
    history.record("move", n=5, t=7.5, delay_s=2.0)
    history.record("moved", n=5, t=7.6, due_ms=9_500)
    give(history, n=5, got=9.6, due_ms=9_500, key="k", tags=["a", "b"], every=["a"], some=["b", "c"])
    settle(history, "acked", 5, 1, 9.7)
    # 6: its lease was extended.
    put(history, n=6)
    give(history, n=6)
    settle(history, "extend", 6, 1, 12.0, lease_s=2.0)
    settle(history, "extended", 6, 1, 12.1)
    give(history, n=6, got=14.1, attempt=2, request="r2")
    settle(history, "acked", 6, 2, 14.2, "r2")
    # 7: acked, and the answer was lost.
    put(history, n=7, at=5.0)
    give(history, n=7, got=6.1, due_ms=6_000)
    settle(history, "ack", 7, 1, 6.2)
    history.record("asked-for", t=14.0, id="M7", state="acked")
    # A schedule made three messages, the first of which came out twice, and was paused before the fourth was due.
    for at_ms in (1_000, 2_000, 3_000, 1_000):
        history.record("occurrence", t=10.0, id=f"O{at_ms}", at_ms=at_ms)
    history.record("scheduled", t=19.5, made=3, missed=0, refused=0)
    history.record("aside", t=19.5, published=4, acked=3)
    changed(history)
    copied(history)
    # A filled subscription; an acked message and a dead one, whose callback came twice; the ack of a third was lost.
    history.record("filled", t=12.0, topic="f-0", missing=[], doubled=[])
    for n, kind in enumerate(("success", "failure", "success")):
        history.record("settle", t=10.0, id=f"E{n}", kind=kind)
        reported_of(history, n, kind)
    reported_of(history, 1, "failure")
    for n, kind in enumerate(("success", "failure")):
        history.record("settled", t=10.1, id=f"E{n}", kind=kind)
    # Two messages of one group; a job, begun twice by one request.
    for n, t in ((0, 10.0), (3, 11.0)):
        history.record("line-given", t=t, n=n)
        history.record("line-ack", t=t + 0.5, n=n)
    moved(history)
    sampled(history)
    for _ in range(2):
        said(history)
    for by in ("checksums", "bytes"):
        history.record("replicas", t=20.0, by=by, code=0, said="all identical")
    for node in ("n1", "n2"):
        counted(history, node)
    counted(history, "n3", ours=False, published_messages_total=90)
    history.record("drained", t=20.0)


def moved(history: History) -> None:
    """Messages that a job moved; and two shards, with a new name whose message was published twice under its key."""
    history.record("moves", t=12.0, many=2, moved=2, cancelled=2, wrong=[])
    history.record("job", t=12.0, request="r", numbers=[1, 1])
    history.record("named", t=12.0, name="moving-0", ids=["A", "A"])
    history.record("map-ended", t=18.0, ok=True)
    history.record("topics", t=19.0, shard=0, owners={"orders": 0}, pending={})
    history.record("topics", t=19.0, shard=1, owners={"moving-0": 1}, pending={"moving-0": 1})


def changed(history: History) -> None:
    """A schedule that got another message and another interval, was paused, triggered and resumed. The occurrences at
    6 s and 11 s were leased just before a change."""
    for version, since_ms, every_ms, body in ((1, 1_000, 1_000, 1), (2, 3_500, 1_000, 2), (3, 5_950, 2_000, 3)):
        history.record("changed-set", t=9.0, version=version, since_ms=since_ms, every_ms=every_ms, body=body)
    history.record("changed-set", t=9.0, version=4, since_ms=10_950, every_ms=0, body=3)
    history.record("changed-set", t=9.0, version=5, since_ms=12_500, every_ms=2_000, body=3)
    for body, times in {1: (2_000, 3_000), 2: (4_000, 5_000, 6_000), 3: (8_000, 10_000, 11_000, 14_000)}.items():
        for at_ms in times:
            occurs(history, at_ms, body)
    occurs(history, 11_500, 3, "T")
    history.record("changed-trigger", t=9.0, ids=["T", "T"])
    history.record("changed-scheduled", t=19.5, made=9, missed=0, refused=0, manual=1)


def copied(history: History) -> None:
    """Two messages and a subscription; a copy of the second one is cancelled, and the other one came twice."""
    history.record("queues", t=8.0, queues=["f", "f~a"])
    for n in range(2):
        history.record("copied", t=9.0, n=n, id=f"F{n}", due_ms=9_500)
    history.record("copy-cancelled", t=9.2, n=1, queues=["f~a"])
    for n, queue, at in ((0, "f", 9.6), (0, "f~a", 9.7), (1, "f", 9.8), (1, "f", 12.0)):
        copy(history, n, queue, at)
        if (n, at) != (1, 9.8):
            history.record("copy-acked", t=at + 0.1, id=f"F{n}{queue[1:]}")


def reported_of(history: History, n: int, kind: str, name: str = "") -> None:
    history.record("callback", t=10.5, id=name or f"B{n}", of=f"E{n}", kind=kind)


def copy(history: History, n: int, queue: str, at: float, **other: Any) -> None:
    fields = {"asked": at - 0.2, "id": f"F{n}{queue[1:]}", "now_ms": int(at * 1000), **other}
    history.record("copy-given", t=at, n=n, queue=queue, **fields)


def occurs(history: History, at_ms: int, body: int, name: str = "") -> None:
    history.record("changed-occurrence", t=10.0, id=name or f"C{at_ms}", at_ms=at_ms, body=body)


def sampled(history: History, node: str = "n1", leak: str = "", rate: float = 0.0) -> None:
    """Of 20 minutes: a journal that grows and is cut; what `leak` names grows by `rate` a minute, more and more."""
    history.record("watch", t=0.0, **msgspec.structs.asdict(Watch()))
    for i in range(240):
        now = {"journal": i % 24 * 1e6, "hours": i * 4e5, "descriptors": 40, "anonymous": 50e6 + i % 7 * 1e6}
        now |= {leak: now[leak] + int(rate * i / 12 * i / 240)} if leak else {}
        text = f'hadelay_log_bytes {now["journal"]}\nhadelay_hour_bytes{{file="log"}} {now["hours"]}\n# HELP x\n'
        text += f"hadelay_published_messages_total {i * 1e3}\nprocess_open_fds {now['descriptors']}\n"
        history.record("sample", t=i * 5.0, node=node, **flat.parse(text), anonymous=now["anonymous"])


def first(history: History, n: int, attempt: int = 1) -> Given:
    return next(g for g in history.given if (g.n, g.attempt) == (n, attempt))


def later_and_later(history: History) -> None:
    """One receive, answered again and again."""
    for i in range(40):
        give(history, n=2, got=30.0 * (i + 1), asked=15.0)


def every_node(history: History, **other: int) -> None:
    history.of("counted").clear()
    for node in ("n1", "n2"):
        counted(history, node, **other)


def set_(n: int, **fields: Any) -> Callable[[History], None]:
    """Of the first hand-out of message n."""

    def plant(history: History) -> None:
        for name, value in fields.items():
            setattr(first(history, n), name, value)

    return plant


def set_put(n: int, **fields: Any) -> Callable[[History], None]:
    def plant(history: History) -> None:
        for name, value in fields.items():
            setattr(history.puts[n], name, value)

    return plant


def refused_and_given(history: History) -> None:
    history.record("put", n=8, delay_s=0.0, size=3, asked=10.0, topic="t")
    history.record("refused", n=8, why="NoLeader")
    give(history, n=8)


def slow_in_calm(history: History) -> None:
    history.puts[7].asked, history.puts[7].due_ms, first(history, 7).due_ms = 1.0, 2_000, 2_000


def slow_beside_faults(history: History) -> None:
    set_(2, got=18.5, now_ms=18_500)(history)


def says(**fields: Any) -> Callable[[History], None]:
    return lambda history: said(history, **fields)


def notes(event: str, **fields: Any) -> Callable[[History], None]:
    return lambda history: history.record(event, **fields)


def leaks(kind: str, rate: float) -> Callable[[History], None]:
    return lambda history: sampled(history, "n2", kind, rate)


def left_out(history: History) -> None:
    history.record("occurrence", t=10.0, id="O5", at_ms=5_000)
    history.of("scheduled")[0].update(made=4)


def occurred(at_ms: int, body: int, name: str = "") -> Callable[[History], None]:
    """One more occurrence, which the changed schedule counts if it is no second message of one that it made."""

    def plant(history: History) -> None:
        occurs(history, at_ms, body, name)
        history.of("changed-scheduled")[0]["made"] += not name

    return plant


def triggered(*ids: str) -> Callable[[History], None]:
    def plant(history: History) -> None:
        history.record("changed-trigger", t=9.0, ids=ids)
        history.of("changed-scheduled")[0].update(manual=len({"T", *ids}))

    return plant


def remove(history: History, event: str, **fields: Any) -> None:
    """The first event of that kind with these fields."""
    events = history.of(event)
    events.remove(next(one for one in events if fields.items() <= one.items()))


def never_came(history: History) -> None:
    remove(history, "changed-occurrence", at_ms=2_000)
    history.of("changed-scheduled")[0].update(made=8)


#: What each branch of each check has to notice, and no other one: planted into `kept`.
PLANTED: dict[tuple[str, str], list[Callable[[History], Any]]] = {
    ("I1 lost", "never handed out"): [lambda history: history.given.remove(first(history, 2))],
    ("I1 lost", "not acked"): [
        lambda history: history.ends.update(M7=("cancelled", None)),
        lambda history: history.ends.update(M7=("expired", None)),  # and it has no TTL
        lambda history: history.ends.update(M7=("not found", None)),
        set_(7, ack_asked=None),  # acked, and nobody asked for that
    ],
    ("I1 lost", "redriven"): [
        lambda history: history.given.remove(next(g for g in history.given if g.request == "r3"))
    ],
    ("I2 conservation", "sum"): [lambda history: every_node(history, **{WAITING: 1})],
    ("I2 conservation", "forgotten"): [lambda history: counted(history, sweeper_found_messages_total=1)],
    ("I3 phantom", "published"): [lambda history: give(history, n=-1), lambda history: give(history, n=77)],
    ("I3 phantom", "body"): [set_(2, body=checksum(body_of(2, 4))), set_(2, body=checksum(b"\2\0\0\0\2\2\3"))],
    ("I3 phantom", "topic"): [set_(2, topic="u")],
    ("I3 phantom", "key"): [set_(5, key="l"), set_(5, key=None), set_(2, key="k")],
    ("I3 phantom", "tags"): [set_(5, tags=("a", "b", "c")), set_(2, tags=("a",))],
    ("I3 phantom", "refused"): [refused_and_given],
    ("I3 phantom", "cancelled"): [lambda history: give(history, n=1, asked=10.7)],
    ("filters", "all of"): [set_(5, every=["a", "z"])],
    ("filters", "one of"): [set_(2, some=["a", "b"])],
    ("I5 resurrection", "acked"): [lambda history: give(history, got=17.0, attempt=3, request="r3")],
    ("I5 resurrection", "dead"): [
        lambda history: give(history, n=3, attempt=2, got=12.2, asked=11.7, request="r2", topic="limited")
    ],
    ("I6 double lease", "one attempt"): [
        lambda history: give(history, got=13.25, attempt=2, request="other", asked=13.0)
    ],
    ("I6 double lease", "lease"): [
        lambda history: set_neighbour(history, 0, 12_000),
        lambda history: set_neighbour(history, 6, 12_000) or set_(6, extended=None)(history),
    ],
    ("I6 double lease", "extended lease"): [lambda history: set_neighbour(history, 6, 13_800)],
    ("attempts", "too many"): [lambda history: setattr(last(history, 3), "attempt", 3)],
    ("attempts", "too few"): [lambda history: setattr(history.redrives["M3"][0], "attempt", 1)],
    ("I8 duplicate", "answers"): [notes("stored", n=2, t=10.2, id="M99")],
    ("I8 duplicate", "handed out"): [lambda history: give(history, n=2, id="M98")],
    ("I9 early", "cluster time"): [set_(2, now_ms=10_900)],
    ("I9 early", "published"): [set_put(2, delay_s=6.0), set_put(2, asked=14.6)],
    ("I9 early", "published, as answered"): [set_put(2, due_ms=11_100), set_put(2, due_ms=10_900)],
    ("I9 early", "rescheduled"): [set_put(5, move_delay_s=2.2)],
    ("I9 early", "rescheduled, as answered"): [
        set_put(5, moved_due_ms=9_550),
        set_put(5, moved_due_ms=9_000, due_ms=9_500),  # it stayed where it was
    ],
    ("I10 late", "calm"): [slow_in_calm],
    ("I10 late", "beside faults"): [slow_beside_faults],
    ("TTL", "handed out"): [lambda history: give(history, n=4, got=14.5, attempt=2, request="r2")],
    ("TTL", "ended"): [lambda history: history.ends.update(M4=("expired", 11_990))],
    ("I12 divergence", "checksums"): [notes("replicas", t=20.0, by="checksums", code=1, said="1 of 3 files differ")],
    ("I12 divergence", "bytes"): [notes("replicas", t=20.0, by="bytes", code=True, said="2026112302.log differs")],
    ("I13 log safety", "two leaders"): [says(leader="n2"), says(leader="n2", node="n3")],
    ("I13 log safety", "term"): [says(term=0, leader="")],
    ("I13 log safety", "applied"): [says(index=8)],
    ("I14 durability", "a journal"): [set_put(2, syncs=1), set_put(2, syncs=0)],
    ("I14 durability", "its place"): [notes("placed", n=2, t=10.2, found=True, unsynced=["n2", "n3"])],
    ("I15 liveness", "ready"): [notes("recovered", t=20.0, s=9.0, why="n1 not ready")],
    ("I15 liveness", "owed"): [
        lambda history: history.ends.update(M7=("ready", None)),
        lambda history: history.ends.update(M7=("dead", None)),
    ],
    ("I15 liveness", "failover"): [notes("failover", t=20.0, kind="kill", s=2.1, limit_s=2.0)],
    ("I16 fencing", "term"): [set_(2, term=0)],
    ("I17 fail-stop", "ended"): [notes("ended", t=11.0, node="n1", code=70, may=False)],
    ("I18 honesty", "one index"): [notes("uncounted", t=20.0, why="n2 is behind")],
    ("I18 honesty", "published"): [
        lambda history: every_node(history, **{"published_messages_total": 13, WAITING: 1}),
        lambda history: every_node(history, **{"published_messages_total": 11, ACKED: 8}),
    ],
    ("I18 honesty", "acked"): [
        lambda history: every_node(history, **{ACKED: 7, CANCELLED: 4}),
        lambda history: every_node(history, **{ACKED: 11, REDRIVEN: 3}),
    ],
    ("I18 honesty", "replicas"): [
        lambda history: counted(history, "n3", raft_applied_index=8),
        lambda history: counted(history, "n3", **{CANCELLED: 3, EXPIRED: 0}),
    ],
    ("S1 schedules", "once"): [notes("occurrence", t=10.0, id="O4", at_ms=3_000)],
    ("S1 schedules", "each"): [left_out],
    ("S1 schedules", "counts"): [
        lambda history: history.of("scheduled")[0].update(made=4),
        notes("unscheduled", t=19.5, seen=2),
        notes("occurrence", t=9.0, id="O4", at_ms=4_000),
    ],
    ("S4 changes", "once"): [occurred(8_000, 3, "C")],
    ("S4 changes", "each"): [never_came],
    ("S4 changes", "paused"): [occurred(12_000, 3)],
    ("S4 changes", "replaced"): [
        occurred(9_000, 3),  # the interval is 2 s by then
        lambda history: next(e for e in history.of("changed-occurrence") if e["at_ms"] == 8_000).update(body=2),
    ],
    ("S4 changes", "triggered"): [triggered("T", "U"), triggered("U", "U")],
    ("S4 changes", "counts"): [
        lambda history: history.of("changed-scheduled")[0].update(made=10),
        lambda history: history.of("changed-scheduled")[0].update(manual=2),
    ],
    ("S4 changes", "ended"): [notes("changed-unscheduled", t=19.5, seen=2)],
    ("G2 groups", "in order"): [notes("line-given", t=10.2, n=3), notes("line-given", t=12.0, n=6 + 3)],
    ("G2 groups", "ended"): [notes("unended", t=20.0, topic="chaos-lines")],
    ("F1 copies", "each"): [lambda history: remove(history, "copy-given", id="F0~a")],
    ("F1 copies", "once"): [
        lambda history: copy(history, 0, "f~a", 9.75, id="F2"),
        lambda history: copy(history, 0, "f", 9.65, id="F2"),
    ],
    ("F1 copies", "early"): [lambda history: copy(history, 0, "f", 9.6, now_ms=9_490)],
    ("F1 copies", "acked"): [lambda history: copy(history, 0, "f~a", 15.0)],
    ("F1 copies", "cancelled"): [lambda history: copy(history, 1, "f~a", 9.9)],
    ("F1 copies", "ended"): [notes("unended", t=20.0, topic="chaos-copies")],
    ("F1 fills", "each"): [notes("filled", t=12.0, topic="f-1", missing=["7"], doubled=[])],
    ("F1 fills", "once"): [notes("filled", t=12.0, topic="f-1", missing=[], doubled=["7"])],
    ("F1 fills", "ended"): [notes("unended", t=20.0, topic="chaos-fills")],
    ("C1 callbacks", "each"): [lambda history: remove(history, "callback", of="E0")],
    ("C1 callbacks", "once"): [lambda history: reported_of(history, 1, "failure", "B9")],
    ("C1 callbacks", "kind"): [
        lambda history: remove(history, "callback", of="E2") or reported_of(history, 2, "failure"),
        lambda history: reported_of(history, 3, "success"),
    ],
    ("C1 callbacks", "ended"): [notes("unended", t=20.0, topic="chaos-callbacks")],
    ("J1 jobs", "once"): [notes("moves", t=12.0, many=2, moved=2, cancelled=2, wrong=["M1"])],
    ("J1 jobs", "counts"): [
        notes("moves", t=12.0, many=2, moved=1, cancelled=2, wrong=[]),
        notes("moves", t=12.0, many=2, moved=2, cancelled=3, wrong=[]),
    ],
    ("J1 jobs", "repeated"): [notes("job", t=12.0, request="r", numbers=[1, 2])],
    ("J1 jobs", "ended"): [notes("unended", t=20.0, topic="chaos-moves")],
    ("M1 shards", "one shard"): [notes("topics", t=19.0, shard=1, owners={"orders": 1}, pending={})],
    ("M1 shards", "own shard"): [notes("topics", t=19.0, shard=1, owners={"users": 0}, pending={})],
    ("M1 shards", "once"): [
        notes("named", t=12.0, name="moving-0", ids=["A", "B"]),
        notes("named", t=12.0, name="moving-1", ids=["C", "C"]),
        notes("topics", t=19.0, shard=0, owners={}, pending={"moving-0": 1}),
    ],
    ("M1 shards", "ended"): [notes("map-ended", t=18.0, ok=False)],
    ("flat", "anonymous"): [leaks("anonymous", 2e6)],
    ("flat", "descriptors"): [leaks("descriptors", 1.0)],
    ("flat", "journal"): [leaks("journal", 2e7)],
    ("flat", "per message"): [leaks("hours", 2e6)],
    ("flat", "late p50"): [later_and_later],
    ("crash points", "met"): [notes("points", t=9.0, points=["raft.send:before"])],
}


def last(history: History, n: int) -> Given:
    return [g for g in history.given if g.n == n][-1]


def set_neighbour(history: History, n: int, now_ms: int) -> None:
    """The second hand-out of message n comes at that time."""
    g = first(history, n, attempt=2)
    g.now_ms, g.got, g.asked, g.until_ms = now_ms, now_ms / 1000, now_ms / 1000 - 0.1, now_ms + 2000


def broken(history: History) -> set[tuple[str, str]]:
    return {(verdict.name, branch) for verdict in check(history) for branch in verdict.broken}


def test_a_cluster_that_kept_its_promises_is_not_accused() -> None:
    history = History()
    kept(history)
    verdicts = check(history)
    assert {verdict.name: verdict.violations for verdict in verdicts if verdict.violations} == {}
    idle = {(verdict.name, branch) for verdict in verdicts for branch, cases in verdict.decided.items() if not cases}
    assert idle == set(), "nothing is planted where nothing is decided"


@pytest.mark.parametrize(
    ("branch", "plant"),
    [(branch, plant) for branch, plants in PLANTED.items() for plant in plants],
    ids=[f"{': '.join(branch)} {i}".strip() for branch, plants in PLANTED.items() for i in range(len(plants))],
)
def test_exactly_one_branch_notices_what_it_is_for(branch: tuple[str, str], plant: Callable[[History], Any]) -> None:
    history = History()
    kept(history)
    plant(history)
    assert broken(history) == {branch}


def test_every_branch_has_something_planted_for_it() -> None:
    assert PLANTED.keys() == {(name, branch) for name, checker in CHECKERS.items() for branch in checker.branches}


def test_a_case_of_a_branch_that_is_not_declared_is_an_error() -> None:
    checker = Checker(lambda history: iter([("other", "")]), {"one": "never"})
    with pytest.raises(KeyError, match="other"):
        judge("test", checker, History())


def handed_back_and_given_again(history: History) -> None:
    give(history, got=11.1, attempt=1, request="a")
    settle(history, "nack", 0, 1, 11.2, "a")
    give(history, got=11.3, attempt=2, request="b")
    settle(history, "acked", 0, 2, 11.4, "b")


def asked_twice(history: History) -> None:
    """One receive, asked again because its answer was lost: its lease was extended, and nothing is double."""
    give(history, got=11.1)
    give(history, got=12.1)
    settle(history, "acked", 0, 1, 12.2)


def maybe_rescheduled(history: History) -> None:
    """Nobody answered, so both times may count."""
    history.record("move", n=0, t=10.1, delay_s=0.1)
    give(history, got=10.3, due_ms=10_200)
    settle(history, "acked", 0, 1, 10.4)


def maybe_changed_in_between(history: History) -> None:
    """The version says that the network repeated a request: what was in force since is not known."""
    for version, since_ms, every_ms in ((1, 1_000, 1_000), (3, 5_000, 2_000), (4, 9_000, 1_000)):
        history.record("changed-set", t=9.0, version=version, since_ms=since_ms, every_ms=every_ms, body=1)
    for at_ms in (2_000, 4_000, 7_000):
        occurs(history, at_ms, 0)
    settle_first(history)


def changed_in_an_outage(history: History) -> None:
    """The last occurrences before a change were not made in time, and the first ones have the later message."""
    for version, since_ms, every_ms in ((1, 1_000, 1_000), (2, 5_000, 2_000), (3, 9_000, 1_000)):
        history.record("changed-set", t=9.0, version=version, since_ms=since_ms, every_ms=every_ms, body=version)
    for at_ms in (2_000, 3_000, 6_000):
        occurs(history, at_ms, 3)
    settle_first(history)


def settle_first(history: History) -> None:
    give(history)
    settle(history, "acked", 0, 1, 11.2)


def maybe_redriven(history: History) -> None:
    """The redrive was not answered: attempts begin anew at any time."""
    give(history, attempt=1, request="a")
    settle(history, "nack", 0, 1, 11.2, "a")
    history.record("dead", id="M0", attempt=1, t=11.3)
    history.record("redrive", id="M0", t=11.4)
    give(history, attempt=1, got=11.9, request="b")
    settle(history, "acked", 0, 1, 12.0, "b")


def lost_answer_after_a_fault(history: History) -> None:
    """The first lease went to somebody who hung up: what is seen first is the second attempt."""
    load(history)
    give(history, got=16.5, attempt=2, request="b")
    settle(history, "acked", 0, 2, 16.6, "b")


@pytest.mark.parametrize(
    "trace",
    [
        handed_back_and_given_again,
        asked_twice,
        maybe_rescheduled,
        maybe_redriven,
        lost_answer_after_a_fault,
        maybe_changed_in_between,
        changed_in_an_outage,
    ],
)
def test_facts_that_a_black_box_cannot_know_are_nobodys_fault(trace: Callable[[History], Any]) -> None:
    history = History()
    put(history)
    trace(history)
    history.record("drained", t=20.0)
    assert broken(history) == set()


def test_messages_that_an_interrupted_run_did_not_wait_for_are_not_lost() -> None:
    history = History()
    put(history)
    assert broken(history) == set()


@pytest.mark.parametrize(
    ("kind", "nodes", "got", "allowed"),
    [
        ("kill", ["n1"], 16.8, True),  # an election, twice the time to come back, and late_s
        ("kill", ["n1"], 17.5, False),
        ("pause", ["n1"], 21.8, True),  # a silent node keeps its clients waiting
        ("pause", ["n1"], 23.5, False),
        ("kill", ["n1", "n2"], 33.5, True),  # no majority: until all are ready again
        ("slow-sync", ["n1"], 33.5, True),  # it is slow all the time
        ("slow-sync", ["n1"], 34.6, False),
    ],
)
def test_the_allowed_lateness_follows_from_the_faults(kind: str, nodes: list[str], got: float, allowed: bool) -> None:
    history = History()
    load(history)
    put(history)
    history.record("fault", t=11.0, kind=kind, nodes=nodes, all=["n1", "n2", "n3"], deposed=True)
    history.record("healed", t=29.0, kind=kind, nodes=nodes, began=11.0)
    history.record("recovered", t=30.0, s=1.0)
    give(history, got=got)
    assert (("I10 late", "beside faults") in broken(history)) == (not allowed)


def test_a_machine_that_stood_still_makes_nobody_late() -> None:
    for stalled_s in (0.3, 3.0):
        history = History()
        load(history)
        put(history)
        history.record("stall", t=14.0, s=stalled_s)
        give(history, got=16.0)
        assert bool(broken(history)) == (stalled_s < 1)


def test_a_cold_start_takes_time_from_wall_clocks_which_may_differ_between_machines() -> None:
    for clocks, noticed in ((1, True), (3, False)):
        history = History()
        load(history, clocks=clocks)
        put(history)
        history.record("fault", t=10.2, kind="kill", nodes=["n1", "n2"], all=["n1", "n2", "n3"], deposed=True)
        give(history, got=10.9, due_ms=10_900)
        history.puts[0].due_ms = 10_900
        assert (("I9 early", "published") in broken(history)) == noticed


def test_interval_mode_promises_less() -> None:
    for name, checker in CHECKERS.items():
        for branch in checker.branches:
            history = History()
            kept(history)
            history.of("load")[0]["sync"] = "interval"
            PLANTED[name, branch][0](history)
            assert broken(history) == (set() if branch in checker.commit_only else {(name, branch)})


@pytest.mark.parametrize(
    ("term", "redelivered", "noticed"), [(2, True, False), (2, False, True), (1, True, True), (1, False, True)]
)
def test_a_new_leader_marks_repeated_hand_outs_in_interval_mode(term: int, redelivered: bool, noticed: bool) -> None:
    history = History()
    load(history, sync="interval")
    put(history)
    give(history, request="a")
    give(history, request="b", got=11.5, term=term, redelivered=redelivered)
    assert broken(history) == ({("I6 double lease", "one attempt")} if noticed else set())


def test_lateness_is_split_by_the_faults_in_force_while_a_message_was_owed() -> None:
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


def test_overtaken_messages_are_counted() -> None:
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
    assert "I1 lost         kept      never handed out 7" in table(found)
    assert "<svg" in page(again, found)


def test_watched_figures_are_plotted_and_growth_is_named() -> None:
    history = History()
    sampled(history)
    sampled(history, "n2", "descriptors", 2.0)
    give(history, got=20.0, due_ms=19_990)
    verdicts = check(history)
    reported = [violation for verdict in verdicts if verdict.name == "flat" for violation in verdict.violations]
    assert reported == ["file descriptors, of n2: grew by 29.0, and watch.descriptors is 5"]
    found = summary(history, verdicts, HEAD)
    row = next(row for row in found["watched"] if row["what"] == "file descriptors" and row["node"] == "n2")
    assert (row["first"], row["last"], row["limit"]) == (40, 79, 5.0)
    assert page(history, found).count("<svg") == 1 + len({row["what"] for row in found["watched"]})
    assert "growth may be 5" in table(found)


def test_the_docs_have_a_row_for_every_branch() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "checks.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text.partition("\n## Chaos\n")[2], re.M)
    reported = [(name, branch, what) for name, checker in CHECKERS.items() for branch, what in checker.branches.items()]
    assert rows[1 : len(reported) + 1] == reported


def test_a_rise_is_at_most_what_was_seen() -> None:
    """The few values of a node that was wiped late: 48 to 72 descriptors within 5 s are no 75 of a run of 20 s."""
    late = [(0.0, 51.0), (1.0, 51.0), (10.0, 48.0), (12.0, 48.0), (13.0, 60.0), (14.0, 72.0), (20.0, 72.0)]
    assert 0 < flat.Series("descriptors", "n3", late, 60).rise <= 24
    assert flat.Series("descriptors", "n1", [(float(t), 2.0 * t) for t in range(100)], 60).rise == 98
