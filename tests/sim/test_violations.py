"""One broken promise at a time, planted into the record of a run that kept all promises: the check has to notice it,
under the full name of its branch. This is cheaper than a deliberate bug, and does not depend on what a seed draws."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec.structs import replace as with_fields

from chaos.sim import cluster as cluster_module
from chaos.sim import fanout, grouporder, leases, promises, replicas, times, timetable, uniques, views
from chaos.sim import run as runs
from chaos.sim.batches import Seen, judge
from chaos.sim.cluster import SimCluster
from chaos.sim.history import FannedOut, HandOut, Message, Order, Violation
from chaos.sim.leaderless import LEADERLESS_S
from chaos.sim.nemesis import Nemesis
from chaos.sim.owndelays import OwnDelays
from chaos.sim.timetable import Known, Timetable
from chaos.sim.uniques import Uniques
from hadelay.codec.batches import ENDED, SEALED
from hadelay.codec.commands import encode_publish
from hadelay.codec.entries import decode_entry, encode_entry
from hadelay.codec.jobcommands import LAST, JobSpec, JobStep
from hadelay.codec.meta import filter_of
from hadelay.codec.results import PublishResult, RowCode
from hadelay.codec.schedules import Overlap
from hadelay.ledger.topics.topicchanges import READY, SCHEDULED
from hadelay.model import OWN_DELAY, Draft, Event, State, pack_id
from hadelay.raft import messages
from hadelay.server.webhooks.pool import CONSUMER
from tests.ledger.test_schedules import Owner, every
from tests.ledger.world import START_MS
from tests.sim.checked import CHECKED

#: Seed of the run, which has no faults; with subscriptions, and a receiver of webhook calls and alerts.
SEED = 22
#: An id that no message has, and a time after the run.
NOBODY, LATER = 0x7777 << 32, 1_000.0


@cache
def recorded() -> SimCluster:
    cluster, shape = runs.build(SEED, None, "commit")
    runs.play(cluster, Nemesis(cluster, shape.faults_s, {}), shape, runs.Report(SEED))
    runs.check(cluster)
    return cluster


class Record:
    """A run, whose record a case may change; `patched` undoes changes of nodes."""

    def __init__(self, cluster: SimCluster, patches: ExitStack) -> None:
        self.cluster, self.history, self.patches = cluster, cluster.history, patches
        self.node = cluster.nodes()[0]

    def patched(self, owner: Any, name: str, value: Any) -> None:
        self.patches.enter_context(patch.object(owner, name, value))

    def taken(self, topic: int = 0) -> tuple[HandOut, Message]:
        """The only hand-out of a message that was acked, and was not changed since its publish."""
        for h in self.history.hand_outs:
            m = self.history.message_of(h.body)
            if m is None or m.topic != self.cluster.workload.topics[topic] or m.id != h.id or h.acked is None:
                continue
            plain = not (m.ttl_ms or m.client_key or m.max_wait_ms or self.history.moved(m)) and m.relative
            if plain and sum(other.id == h.id for other in self.history.hand_outs) == 1:
                return h, m
        raise LookupError("the seed has no such message: choose another")

    def again(self, h: HandOut, **changes: Any) -> HandOut:
        """Add another hand-out of the same message."""
        other = copy.copy(h)
        for name, value in {"request_id": b"again", "acked": None, "ack_invoked": None, **changes}.items():
            setattr(other, name, value)
        self.history.hand_outs.append(other)
        return other

    def two(self) -> tuple[HandOut, Message, HandOut, Message]:
        """Two hand-outs of different messages, in the order of time."""
        known = [(h, m) for h in self.history.hand_outs if (m := self.history.message_of(h.body)) and m.id == h.id]
        (h, m), *others = sorted(known, key=lambda one: one[0].answered)
        return h, m, *next((g, n) for g, n in others if g.id != h.id)


@pytest.fixture
def record() -> Iterator[Record]:
    """The run, with a record of its own: what a case changes is undone."""
    cluster = recorded()
    kept = dict(vars(cluster))
    for name, value in kept.items():
        if isinstance(value, dict | list | set):
            setattr(cluster, name, copy.copy(value))
    cluster.history = copy.deepcopy(cluster.history)
    with ExitStack() as patches:
        yield Record(cluster, patches)
    for name, value in kept.items():
        setattr(cluster, name, value)


Plant = Callable[[Record], None]
Check = Callable[[SimCluster], object]
#: Name of the promise's branch, the function that plants the violation, and the check.
CASES: list[tuple[str, Plant, Check | None]] = []


def planted(branch: str, check: Check | None = None) -> Callable[[Plant], Plant]:
    """Decorator: a violation of this branch, which `check` notices, or which is noticed at once."""

    def add(plant: Plant) -> Plant:
        CASES.append((branch, plant, check))
        return plant

    return add


@planted("I1 lost", promises.lost)
def lost(r: Record) -> None:
    r.taken()[1].id = NOBODY


@planted("I1 lost", promises.lost)
def acked_by_nobody(r: Record) -> None:
    r.taken()[0].ack_invoked = None


@planted("I3 phantom", promises.as_published)
def body_of_nobody(r: Record) -> None:
    r.taken()[0].body = b"\0"


@planted("I3 phantom, body", promises.as_published)
def longer_body(r: Record) -> None:
    h, _ = r.taken()
    h.body += bytes([h.body[0]])


@planted("I3 phantom, refused", promises.as_published)
def refused(r: Record) -> None:
    r.taken()[1].absent = True


@planted("I3 phantom, tags", promises.as_published)
def other_tags(r: Record) -> None:
    r.taken()[0].tags = ("other",)


@planted("filters", promises.as_published)
def without_all_tags(r: Record) -> None:
    r.taken()[0].wanted = filter_of(("other",), ())


@planted("filters", promises.as_published)
def without_any_tag(r: Record) -> None:
    r.taken()[0].wanted = filter_of((), ("other",))


@planted("I3 phantom, cancelled", promises.cancelled_means_never)
def after_its_cancel(r: Record) -> None:
    h, m = r.taken()
    m.cancelled = h.answered - 0.001


@planted("I3 phantom, purged", promises.purged_means_never)
def after_a_purge(r: Record) -> None:
    limited = r.cluster.workload.limited
    m = next(m for h in r.history.hand_outs if (m := r.history.message_of(h.body)) and m.topic == limited)
    m.invoked, m.stored = 0.0, 0.001
    r.history.orders = [Order("purge", m.topic, 0.002, SCHEDULED | READY, answered=0.003)]


@planted("I5 resurrection", leases.resurrected)
def after_its_ack(r: Record) -> None:
    r.again(r.taken()[0], answered=LATER)


@planted("I5 resurrection", leases.resurrected)
def extended_after_its_ack(r: Record) -> None:
    _repeated(r, after_s=0.001)


def test_a_repeated_receive_that_an_ack_overtakes_is_no_violation(record: Record) -> None:
    _repeated(record, after_s=-0.001)
    leases.resurrected(record.cluster)


def _repeated(r: Record, after_s: float) -> None:
    """Repeat an answered receive: its lease is extended this long after the ack was confirmed."""
    h, _ = r.taken()
    assert h.acked is not None
    r.again(h, request_id=h.request_id, again=True, answered=LATER, until_ms=h.until_ms + 100)
    r.cluster.extended[h.term, h.seq, h.position] = [(h.until_ms + 100, h.acked + after_s)]


@planted("I5 resurrection, dead", leases.dead_is_over)
def after_its_end(r: Record) -> None:
    h, _ = r.taken()
    h.nack_invoked = h.dead = h.answered
    r.again(h, answered=LATER, dead=None)


@planted("I6 double lease, attempts", leases.double_leases)
def attempt_twice(r: Record) -> None:
    h, _ = r.taken()
    r.again(h, answered=h.answered + 0.1)


@planted("I6 double lease, attempts", leases.double_leases)
def attempt_before(r: Record) -> None:
    h, _ = r.taken()
    r.again(h, answered=h.answered + 0.1, attempt=h.attempt - 1)


@planted("I6 double lease, overlap", leases.double_leases)
def leased_meanwhile(r: Record) -> None:
    h, _ = r.taken()
    r.again(h, answered=LATER, attempt=h.attempt + 1, now_ms=h.until_ms - 1)


@planted("I6 double lease, overlap", leases.double_leases)
def leased_while_extended(r: Record) -> None:
    h, _ = r.taken()
    r.cluster.extended[h.term, h.seq, h.position] = [(h.until_ms + 100, h.answered)]
    r.again(h, answered=LATER, attempt=h.attempt + 1, now_ms=h.until_ms + 99)


@planted("I6 double lease, true time", leases.double_leases)
def leased_too_soon(r: Record) -> None:
    h, _ = r.taken()
    r.again(h, answered=h.answered + 0.001, attempt=h.attempt + 1, now_ms=h.until_ms)


@planted("I6 double lease, interval", leases.double_leases)
def unmarked(r: Record) -> None:
    r.cluster.sync = "interval"
    h, _ = r.taken()
    r.again(h, answered=LATER, term=h.term + 1)


@planted("I6 double lease, bounds", leases.marked)
def unrecorded_out_of_bounds(r: Record) -> None:
    r.cluster.sync = "interval"
    h, _ = r.taken()
    del r.cluster.grants[h.term, h.seq]
    r.cluster.bounds = [(1, 0, 0), (h.leading + 1, h.deliver_at_ms + 1, h.deliver_at_ms + 2)]


@planted("I6 double lease, marks", leases.marked)
def marked_out_of_bounds(r: Record) -> None:
    r.cluster.sync = "interval"
    h, _ = r.taken()
    h.redelivered, r.cluster.bounds = True, [(h.leading, 0, h.deliver_at_ms - 1)]


@planted("attempts", leases.double_leases)
def one_attempt_more(r: Record) -> None:
    h, m = r.taken()
    m.topic, m.invoked, r.history.limited = r.cluster.workload.limited, LATER, 0.0
    r.history.orders = [order for order in r.history.orders if order.answered is not None]
    h.attempt, h.nack_invoked = r.cluster.workload.max_attempts, h.answered
    r.again(h, answered=LATER, attempt=h.attempt + 1)


@planted("I8 duplicate, answered", promises.two_ids)
def reported_twice(r: Record) -> None:
    _, m, _, n = r.two()
    r.history.second_ids.append((m.number, m.id or 0, n.id or 0))


@planted("I8 duplicate, handed out", promises.two_ids)
def two_messages(r: Record) -> None:
    h, _, _, n = r.two()
    h.id = n.id or 0


@planted("I9 early, cluster time", times.early)
def early_in_cluster_time(r: Record) -> None:
    h, _ = r.taken()
    h.now_ms = h.deliver_at_ms - 1


@planted("I9 early, delay", times.early)
def early_by_its_delay(r: Record) -> None:
    h, m = r.taken()
    m.when_ms = int((h.answered - m.invoked) * 1000 + 100)


@planted("I9 early, time of day", times.early)
def early_by_the_time_of_day(r: Record) -> None:
    h, m = r.taken()
    m.relative, m.when_ms = False, int(r.cluster.world.epoch_ms + h.answered * 1000 + 500)


@planted("I9 early, clock", times.clock_runs_true)
def clock_runs_ahead(r: Record) -> None:
    at, now_ms = max(r.cluster.stamps)
    r.cluster.stamps.append((at + 0.001, now_ms + 100))


@planted("I10 late", times.late)
def late(r: Record) -> None:
    h, _ = r.taken()
    h.answered, h.now_ms = LATER, h.deliver_at_ms + 1_001


@planted("TTL, leased", times.in_time)
def leased_after_its_ttl(r: Record) -> None:
    h, m = r.taken()
    m.ttl_ms, m.deliver_at_ms = 1, times.evidence.lease_began(r.cluster, h)[1] - 1


def _expired(r: Record, over_ms: int, *ended_ms: int) -> None:
    """Let a message count as expired, with this end of its TTL and these events in the log."""
    h, m = r.taken()
    m.ttl_ms, m.deliver_at_ms = 1, over_ms - 1
    r.history.hand_outs.clear()
    place, _ = times.evidence.where(r.node, h.id)
    r.patched(times.evidence, "where", lambda node, one: (place, State.EXPIRED if one == h.id else State.ACKED))
    r.patched(times, "_ended_ms", lambda node, one, event: list(ended_ms))


@planted("TTL, ended", times.in_time)
def ended_before_its_ttl(r: Record) -> None:
    now_ms = r.node.ledger.now_ms
    _expired(r, now_ms, now_ms - 1)


@planted("TTL, written", times.in_time)
def unwritten_end_of_its_ttl(r: Record) -> None:
    now_ms = r.node.ledger.now_ms
    _expired(r, now_ms - 3_001)
    for node in r.cluster.nodes():
        r.patched(node.ledger, "outcome_of", lambda hour, index: (None, False))


@planted("max_wait", times.debounced)
def waited_for_too_long(r: Record) -> None:
    _, m = r.taken()
    m.max_wait_ms, m.deliver_at_ms = 1, (m.deliver_at_ms or 0) + 10_000


@planted("results", promises.results_kept)
def another_result(r: Record) -> None:
    h, _ = r.taken()
    h.result_taken, h.result = True, b"another"


@planted("webhooks, one at a time", leases.calls_apart)
def called_meanwhile(r: Record) -> None:
    h, _ = r.taken()
    h.consumer, h.ended = CONSUMER, LATER
    r.again(h, answered=LATER - 1)


@planted("webhooks, Retry-After", leases.calls_apart)
def called_before_retry_after(r: Record) -> None:
    h, _ = r.taken()
    h.consumer, h.ended, h.retry_after_ms = CONSUMER, h.answered, 2_000
    r.again(h, answered=h.answered + 1.9)


@planted("I16 fenced leader, grant", leases.fenced)
def committed_by_another(r: Record) -> None:
    key, (at, now_ms, term) = next(iter(r.cluster.grants.items()))
    r.cluster.grants[key] = at, now_ms, term + 1


@planted("I16 fenced leader, interval", leases.fenced)
def handed_out_after_its_term(r: Record) -> None:
    h, _ = r.taken()
    r.cluster.sync = "interval"
    del r.cluster.grants[h.term, h.seq]
    r.cluster.term_began[h.leading + 1] = 0.0


# Message groups


def _grouped(r: Record) -> tuple[HandOut, HandOut]:
    """Hand-outs of two messages of one group, the first of which is earlier in every way."""
    h, m, g, n = r.two()
    r.cluster.workload = replace(r.cluster.workload, group_concurrency=1, group_rate=5.0)
    for one, message in ((h, m), (g, n)):
        message.group, message.topic, message.client_key, message.ttl_ms = (
            "of two",
            r.cluster.workload.in_order,
            None,
            0,
        )
        message.rescheduled = message.unsure = False
        message.cancel_invoked = one.nack_invoked = one.extend_invoked = None
        r.cluster.grants.pop((one.term, one.seq), None)
    r.history.hand_outs, r.history.rated = [h, g], 0.0
    h.deliver_at_ms = m.deliver_at_ms = h.now_ms
    h.answered, g.answered = 10.0, 11.0
    m.stored, g.now_ms = 1.0, h.now_ms + 1_000
    g.deliver_at_ms = n.deliver_at_ms = g.now_ms
    return h, g


@planted("G2 groups apart", grouporder.groups_apart)
def two_of_a_group(r: Record) -> None:
    h, _ = _grouped(r)
    h.ack_invoked, h.until_ms = None, h.now_ms + 5_000


@planted("G3 groups in order", grouporder.groups_in_order)
def out_of_order(r: Record) -> None:
    h, _ = _grouped(r)
    h.ack_invoked = 12.0


@planted("G6 groups in runs", grouporder.groups_in_runs)
def more_than_asked_for(r: Record) -> None:
    h, g = _grouped(r)
    g.term, g.seq = h.term, h.seq


@planted("G5 groups in pace", grouporder.groups_in_pace)
def too_fast(r: Record) -> None:
    h, g = _grouped(r)
    g.now_ms = g.deliver_at_ms = h.now_ms + 199


@planted("G4 groups released", grouporder.groups_released)
def found_by_the_walk(r: Record) -> None:
    leader = r.cluster.leader()
    assert leader is not None
    r.patched(type(leader.delivery.groups), "wrong", 1)


@planted("G4 groups released", grouporder.groups_released)
def room_for_a_blocked_one(r: Record) -> None:
    group = SimpleNamespace(blocked=1, heads=[], limit=1)
    r.patched(r.node.ledger, "tables", SimpleNamespace(range=lambda *_: [(b"", b"")]))
    r.patched(grouporder, "unpack_group", lambda stored: group)
    r.patched(grouporder, "is_live", lambda ledger, key: True)


@planted("G1 groups")
def miscounted_groups(r: Record) -> None:
    r.patched(r.node.ledger, "grouped_dead", -1)
    r.cluster._check_groups(1, r.node)


# Nodes


@planted("leaderless")
def nobody_is_elected(r: Record) -> None:
    watch, now = r.cluster.leaderless, r.cluster.world.now
    r.patched(type(r.node.raft), "is_leader", False)
    watch.look(r.cluster.rafts(), r.cluster._undisturbed)
    watch._since, watch._looked = now - LEADERLESS_S - 0.1, now
    watch.look(r.cluster.rafts(), r.cluster._undisturbed)


@planted("forgotten", promises.nothing_forgotten)
def found_by_the_sweeper(r: Record) -> None:
    r.patched(type(r.node.delivery), "sweeper_found", 1)


@planted("forgotten, localIndex", promises.nothing_forgotten)
def local_index_wrong(r: Record) -> None:
    r.patched(r.node.delivery, "wrong_cursors", 1)


@planted("forgotten", promises.nothing_forgotten)
def broken_link(r: Record) -> None:
    r.patched(r.node.delivery, "damaged_links", 1)


@planted("S5 schedules, overdue", promises.schedules_fired)
def overdue(r: Record) -> None:
    r.patched(promises, "agenda", lambda *_: [(b"", 1, "s")])
    r.patched(r.cluster.leader().ledger, "schedules", SimpleNamespace(count=1))  # type: ignore[union-attr]


@planted("alerts", promises.alerted)
def untold_deaths(r: Record) -> None:
    r.cluster.receiver = SimpleNamespace(alerts=[(1, 2, 1)])  # type: ignore[assignment]


@planted("alerts", promises.alerted)
def miscounted_deaths(r: Record) -> None:
    r.cluster.receiver = SimpleNamespace(alerts=[(0, 2, 1)])  # type: ignore[assignment]


@planted("alerts", promises.alerted)
def untold_but_counted(r: Record) -> None:
    for node in r.cluster.nodes():
        r.patched(node.ledger.topic(r.cluster.workload.limited), "alerted", 1 << 20)


@planted("I15 liveness")
def never_drained(r: Record) -> None:
    promises.converged(r.cluster, False, 1.0)


@planted("I12 divergence, replicas", replicas.diverged)
def another_state(r: Record) -> None:
    r.patched(r.node.ledger, "chain", 0)


@planted("I12 divergence, states")
def another_digest(r: Record) -> None:
    r.cluster.oracles._compare(-48, r.node)
    r.patched(r.cluster.nodes()[1].ledger, "sweep", (9, 9))
    r.cluster.oracles._compare(-48, r.cluster.nodes()[1])


@planted("I2 conservation", replicas.conserved)
def miscounted(r: Record) -> None:
    r.patched(r.node.ledger, "key_count", -1)


@planted("I2 conservation", replicas.conserved)
def miscounted_in_memory(r: Record) -> None:
    r.patched(r.node.group_commit, "inflight", 1)


@planted("I2 conservation")
def miscounted_in_a_run(r: Record) -> None:
    r.patched(r.node.ledger, "key_count", -1)
    r.cluster.oracles._recount(96, r.node)


@planted("one per key", replicas.one_per_key)
def found_by_no_key(r: Record) -> None:
    r.patched(replicas, "found_by_key_of", lambda ledger, first_id: 1)
    for node in r.cluster.nodes():
        r.patched(node.ledger, "outcome_of", lambda hour, index: (None, False))


def _measured(r: Record, name: str, values: Any) -> None:
    measured = replicas.measured
    r.patched(replicas, "measured", lambda node: measured(node) | {name: values})


@planted("I18 metrics honesty", replicas.honest)
def too_many_published(r: Record) -> None:
    _measured(r, "published_messages_total", 1 << 20)


@planted("I18 metrics honesty", replicas.honest)
def too_few_published(r: Record) -> None:
    _measured(r, "published_messages_total", 0)


@planted("I18 metrics honesty", replicas.honest)
def too_many_acked(r: Record) -> None:
    _measured(r, "settled_messages_total", {("acked",): 1 << 20})


@planted("I18 metrics honesty, waiting", replicas.honest)
def fewer_waiting(r: Record) -> None:
    _measured(r, "messages", {(name,): -1 for name in ("waiting", "blocked", "leased")})


@planted("reads, listed")
def unlisted(r: Record) -> None:
    entries = list(views._entries(r.node.ledger))
    views._listed(r.cluster, r.node, entries[1:])


@planted("reads, counted")
def uncounted(r: Record) -> None:
    r.patched(views, "DueCounts", lambda replica: SimpleNamespace(count=lambda *_: iter([([60_000], [1])])))
    r.patched(views, "whole", next)
    views._counted(r.cluster, r.node, [])


@planted("reads, described")
def described_otherwise(r: Record) -> None:
    for message in r.history.messages:
        message.tags = ("other",)
    views._described(r.cluster, r.node)


@planted("reads, described")
def described_for_another_time(r: Record) -> None:
    def moved(*of: Any, **more: Any) -> Any:
        found = describe(*of, **more)
        return found and replace(found, history=[], state=State.SCHEDULED, deliver_at_ms=found.deliver_at_ms + 1)

    describe = views.describe
    r.patched(views, "describe", moved)
    r.patched(r.history, "orders", [])
    views._described(r.cluster, r.node)


@planted("reads, quorum")
def left_with_itself(r: Record) -> None:
    r.patched(views, "others_left", lambda node, without: [without])
    views.may_leave(r.cluster, r.node, "n2")


@planted("reads, quorum")
def left_with_a_stranger(r: Record) -> None:
    r.patched(views, "others_left", lambda node, without: ["stranger"])
    views.may_leave(r.cluster, r.node, "n2")


def _bounded(r: Record, **quota: int) -> None:
    topic = next(topic for topic in r.node.ledger.topics.all if topic.pending)
    r.patched(topic, "settings", replace(topic.settings, **quota))
    r.cluster.oracles._look_at_quotas(r.node, {topic.number: (0, 0)})


@planted("quotas")
def too_many_messages(r: Record) -> None:
    _bounded(r, max_messages=0, max_bytes=1 << 30)


@planted("quotas")
def too_many_bytes(r: Record) -> None:
    _bounded(r, max_messages=1 << 20, max_bytes=1)


@planted("what leaders count, majority")
def majority_of_one(r: Record) -> None:
    r.cluster.oracles._look_at_majority(r.node, [], True)


# Jobs, subscriptions, unique keys


@planted("J1 jobs, counts", promises.jobs_once)
def miscounted_job(r: Record) -> None:
    counts = {"done": 2, "leased": 0, "settled": 0, "moved": 0, "refused": 0}
    job = SimpleNamespace(number=1, spec=JobSpec("cancel", "t"), cursor=LAST, **counts)
    r.patched(r.node.ledger, "jobs", {1: job})
    r.cluster.judged[1] = {1, 2, 3}


@planted("J1 jobs, twice")
def judged_twice(r: Record) -> None:
    for expected, cursor, some in (((0, 0), (1, 0), [1, 2]), ((1, 0), (2, 0), [2])):
        r.cluster._note_step(JobStep(7, expected, cursor, some), r.node)


@planted("J2 jobs, complete")
def left_over(r: Record) -> None:
    r.patched(cluster_module, "left_over", lambda ledger, job: [1])
    r.patched(r.node.ledger, "jobs", {7: None})
    r.cluster._note_step(JobStep(7, (0, 0), LAST, []), r.node)


def _event(r: Record) -> tuple[FannedOut, set[str]]:
    """An event with copies, and their queues."""
    ledger = r.node.ledger
    for sent in r.history.fanned_out:
        ids = (sent.id, *fanout.copies_of(ledger, sent.id)) if sent.id else ()
        places = [place for one in ids if (place := fanout.find_entry(ledger, one)) is not None]
        if len(places) > 1:
            r.history.fanned_out = [sent]
            return sent, {ledger.topics[int(place.rows["topic"][0])].name for place in places}
    raise LookupError("the seed has no such event: choose another")


@planted("F1 fan-out, copies", promises.fanned_out)
def two_copies(r: Record) -> None:
    _event(r)
    copies_of = fanout.copies_of
    r.patched(fanout, "copies_of", lambda *of: 2 * copies_of(*of))


@planted("F1 fan-out, copies", promises.fanned_out)
def no_copy(r: Record) -> None:
    _event(r)[0].queues.add("events~missing")


@planted("F1 fan-out, copies", promises.fanned_out)
def copy_that_is_not_meant(r: Record) -> None:
    sent, queues = _event(r)
    sent.queues -= queues
    sent.unsure -= queues


def _in_state(r: Record, state: State) -> FannedOut:
    sent, queues = _event(r)
    sent.queues, sent.acked, sent.cancel_invoked = set(queues), set(queues), False
    r.patched(fanout, "state_of", lambda *_: state)
    return sent


@planted("F1 fan-out, copies", promises.fanned_out)
def acked_and_pending(r: Record) -> None:
    _in_state(r, State.READY)


@planted("F1 fan-out, copies", promises.fanned_out)
def cancelled_by_nobody(r: Record) -> None:
    _in_state(r, State.CANCELLED).acked.clear()


@planted("F1 fan-out, copies", promises.fanned_out)
def dropped_and_not_counted(r: Record) -> None:
    sent = next(sent for sent in r.history.fanned_out if sent.id and "red" not in sent.tags)
    r.history.fanned_out = [sent]
    sent.tags = ("red",)
    r.patched(r.node.ledger.topic("events~red"), "dropped", 0)


CALLBACK = np.dtype([("topic", "u4"), ("first_id", "u8"), ("index", "u4"), ("offset", "u4"), ("size", "u4")])


def _called_back(r: Record, acked: int, *bodies: bytes) -> None:
    """Check a node with this number of acks that ask for callbacks, and with callbacks that have these bodies."""
    rows = np.array([(1, pack_id(0, 7, n), n, n, 0) for n in range(len(bodies))], CALLBACK)
    events = SimpleNamespace(settled=Counter({Event.ACKED: acked}))
    topics = {fanout.TOPIC: events, fanout.OUTCOMES: SimpleNamespace(number=1, published=len(bodies))}
    store = SimpleNamespace(
        hours=lambda: [7], count=lambda hour: len(rows), entries=lambda hour, some: rows[some],
        record=lambda hour, offset, size: bodies[offset],
    )  # fmt: skip
    r.patched(fanout, "decode_record", lambda body: SimpleNamespace(body=body))
    ledger = SimpleNamespace(topic=topics.get, store=store, group=0)
    fanout.check_callbacks(r.history, SimpleNamespace(ledger=ledger))  # type: ignore[arg-type]


def test_a_callback_for_each_ack_is_no_violation(record: Record) -> None:
    _called_back(record, 2, b'{"id": "1"}', b'{"id": "2"}')


@planted("C1 callbacks")
def callback_too_many(r: Record) -> None:
    _called_back(r, 1, b'{"id": "1"}', b'{"id": "2"}')


@planted("C1 callbacks")
def callback_missing(r: Record) -> None:
    _called_back(r, 2, b'{"id": "1"}')


@planted("C1 callbacks")
def called_back_twice(r: Record) -> None:
    _called_back(r, 2, b'{"id": "1"}', b'{"id": "1"}')


def _unique(r: Record, *, duplicate: bool, until_ms: int, known: State | None = None) -> None:
    """Commit a publish of a key whose period has this end after the present time."""
    hashed = np.zeros(1, "V16")[0]
    command = SimpleNamespace(
        client_keys=np.array([(0, hashed)], [("row", "u4"), ("hash", "V16")]), keys=[], topics=["t"],
        uniques=np.array([(0, 10)], [("row", "u4"), ("for_ms", "u4")]), rows={"topic": [0]},
    )  # fmt: skip
    result = PublishResult.__new__(PublishResult)
    result.ids, result.codes, result.duplicate = np.array([5]), np.array([RowCode.OK]), np.array([duplicate])
    model = Uniques(r.cluster.decide)
    model._periods = {bytes(6) + hashed.tobytes(): (4, 100 + until_ms)}
    r.patched(uniques, "decode", lambda kind, body: command)
    r.patched(uniques, "describe", lambda ledger, one: None)
    topic = SimpleNamespace(number=0, lives=0)
    model.committed(memoryview(b""), result, SimpleNamespace(now_ms=100, known_topic=lambda name: topic))  # type: ignore[arg-type]


@planted("U1 unique, stored")
def stored_within_the_period(r: Record) -> None:
    _unique(r, duplicate=False, until_ms=1)


@planted("U1 unique, dropped")
def dropped_for_another(r: Record) -> None:
    _unique(r, duplicate=True, until_ms=1)


@planted("U1 unique, dropped")
def dropped_after_the_period(r: Record) -> None:
    _unique(r, duplicate=True, until_ms=0)


@planted("D1 delays")
def due_at_once_in_a_topic_with_a_delay(r: Record) -> None:
    model = OwnDelays(r.cluster.decide)
    model.begin(SimpleNamespace(topics=SimpleNamespace(all=[SimpleNamespace(name="t", config={"delay_ms": 300})])))  # type: ignore[arg-type]
    draft = Draft("t", OWN_DELAY, True, 0, 0, b"", b"x")
    _, _, [(kind, body)] = decode_entry(encode_entry(100, [encode_publish("n1", [draft])]))
    result = PublishResult.__new__(PublishResult)
    result.ids, result.codes, result.duplicate = np.array([5]), np.array([RowCode.OK]), np.array([False])
    result.deliver_at_ms = np.array([100])
    model.committed(kind, body, result, 100)


def _batch(r: Record, key: str, ends: list[tuple[int, Event] | None], *callbacks: int) -> None:
    judge(r.cluster, key, Seen(ends, list(callbacks)), SEALED | ENDED)


@planted("B2 batches, without")
def callback_of_a_batch_with_a_pending_member(r: Record) -> None:
    _batch(r, "complete-1", [(5, Event.ACKED), None], 7)


@planted("B2 batches, without")
def success_of_a_batch_with_a_dead_member(r: Record) -> None:
    _batch(r, "success-1", [(5, Event.ACKED), (6, Event.DEAD)], 7)


@planted("B2 batches, once")
def two_callbacks_of_a_batch(r: Record) -> None:
    _batch(r, "death-1", [(5, Event.DEAD)], 5, 5)


@planted("B2 batches, once")
def no_callback_of_a_batch(r: Record) -> None:
    _batch(r, "complete-1", [(5, Event.CANCELLED)])


@planted("B2 batches, last member")
def callback_before_the_last_member(r: Record) -> None:
    _batch(r, "complete-1", [(5, Event.ACKED), (9, Event.ACKED)], 8)


# Schedules


class Fired:
    """A schedule with messages that are filed ahead of their times, and the model that followed it."""

    def __init__(self, r: Record, **spec: Any) -> None:
        self.owner, self.table = Owner(), Timetable(r.cluster)
        self.owner.put(every(**spec))
        found = self.owner.found()
        self.known = self.table.known["s"] = Known(found.state.version, found.stored, False, START_MS)
        firing = self.owner.plan()
        assert firing is not None
        self.firing = firing
        self.owner.fire(firing)

    def fire(self, **changes: Any) -> None:
        self.table._fired(with_fields(self.firing, **changes), self.owner.ledger)

    def times(self, *at_s: float) -> list[tuple[int, int]]:
        return [(START_MS + int(at * 1000), START_MS + int(at * 1000)) for at in at_s]


def test_the_model_of_schedules_agrees(record: Record) -> None:
    Fired(record).fire()
    assert not record.cluster.violations


@planted("S1 schedules")
def made_again(r: Record) -> None:
    fired = Fired(r)
    fired.known.last = fired.firing.last
    fired.fire()


@planted("S1 schedules")
def made_out_of_order(r: Record) -> None:
    fired = Fired(r)
    fired.fire(times=fired.firing.times[::-1])


@planted("S1 schedules")
def remembered_twice(r: Record) -> None:
    fired = Fired(r)
    found = fired.owner.found()
    twice = found._replace(state=with_fields(found.state, ring=2 * found.state.ring))
    r.patched(timetable.schedules, "find", lambda *_: twice)
    fired.table._note_filed("s", fired.owner.ledger)


@planted("S2 schedules, counts")
def made_at_another_time(r: Record) -> None:
    fired = Fired(r)
    fired.fire(times=fired.times(1.5))


@planted("S2 schedules, counts")
def missed_without_need(r: Record) -> None:
    fired = Fired(r)
    fired.fire(times=fired.firing.times[1:], missed=1)


@planted("S2 schedules, counts")
def wrong_next(r: Record) -> None:
    fired = Fired(r)
    fired.fire(next=fired.firing.next + 1)


@planted("S2 schedules, catch-up")
def all_caught_up(r: Record) -> None:
    fired = Fired(r)
    fired.owner.ledger.now_ms += 3_600_000
    fired.fire()


@planted("S2 schedules, overlap")
def beside_a_pending_one(r: Record) -> None:
    _beside(r, Overlap.SKIP)


@planted("S2 schedules, wait")
def two_that_wait(r: Record) -> None:
    _beside(r, Overlap.WAIT)


def _beside(r: Record, overlap: Overlap) -> None:
    fired = Fired(r)
    found = fired.owner.found()
    spec = with_fields(found.stored.spec, overlap=overlap)
    r.patched(timetable.schedules, "find", lambda *_: found._replace(stored=with_fields(found.stored, spec=spec)))
    fired.known.stored = with_fields(found.stored, spec=spec)
    fired.fire()


@planted("S4 schedules, version")
def fired_by_an_old_version(r: Record) -> None:
    fired = Fired(r)
    fired.known.version += 1
    fired.fire()


@planted("S4 schedules, version")
def fired_while_paused(r: Record) -> None:
    fired = Fired(r)
    fired.known.paused = True
    fired.fire()


@planted("S4 schedules, version")
def fired_when_deleted(r: Record) -> None:
    fired = Fired(r)
    del fired.table.known["s"]
    fired.fire()


@planted("S4 schedules, cancelled")
def still_filed(r: Record) -> None:
    fired = Fired(r)
    fired.fire()
    fired.table._cancelled("s", fired.owner.ledger)


@planted("S4 schedules, cancelled")
def still_blocked(r: Record) -> None:
    fired = Fired(r)
    fired.fire()
    r.patched(timetable, "state_of", lambda *_: State.BLOCKED)
    fired.table._cancelled("s", fired.owner.ledger)


# Raft


class FakeRaft:
    """What LogSafety.look reads of a node."""

    def __init__(self, **other: Any) -> None:
        self.is_leader, self.term, self.commit_index, self.last_index, self.applied_index = False, 1, 5, 9, 5
        self.applier = SimpleNamespace(applied_term=1)
        self.journal = SimpleNamespace(synced_index=9, base_index=0, last_index=9, term_at=lambda at: 1)
        vars(self).update(other)


def _look(r: Record, raft: FakeRaft, name: str = "n1") -> None:
    r.cluster.safety.look({name: raft})  # type: ignore[dict-item]


def test_a_sound_log_is_no_violation(record: Record) -> None:
    _look(record, FakeRaft())
    assert not record.cluster.violations


@planted("I13 log safety, leaders")
def two_leaders(r: Record) -> None:
    r.patched(r.cluster.safety, "leaders", {1: "n2"})
    _look(r, FakeRaft(is_leader=True))


@planted("I13 log safety, commit index back")
def commit_index_back(r: Record) -> None:
    raft = FakeRaft()
    _look(r, raft)
    raft.commit_index -= 1
    _look(r, raft)


@planted("I13 log safety, commit index ahead")
def commit_index_ahead(r: Record) -> None:
    _look(r, FakeRaft(commit_index=10))


@planted("I13 log safety, applied entry")
def another_entry_applied(r: Record) -> None:
    _look(r, FakeRaft(applier=SimpleNamespace(applied_term=2)))


@planted("I14 durability, applied")
def applied_before_its_sync(r: Record) -> None:
    raft = FakeRaft()
    raft.journal.synced_index = 4
    _look(r, raft)


@planted("I13 log safety, votes")
def two_votes(r: Record) -> None:
    r.patched(r.cluster.safety, "_promised", {"n1": (99, "n2")})
    r.cluster.safety._vote("n1", 99, "n3")


def _reopened(r: Record, term: int, voted_for: str) -> None:
    r.patched(r.cluster.safety, "_answered", {})
    r.patched(r.cluster.safety, "_promised", {"n1": (99, "n2")})
    r.cluster.safety.reopened("n1", SimpleNamespace(term=term, voted_for=voted_for))  # type: ignore[arg-type]


@planted("I13 log safety, vote on disk")
def vote_in_an_old_term(r: Record) -> None:
    _reopened(r, 98, "n2")


@planted("I13 log safety, vote on disk")
def vote_for_another(r: Record) -> None:
    _reopened(r, 99, "n3")


@planted("I13 log safety, term on disk")
def term_on_disk(r: Record) -> None:
    r.patched(r.cluster.safety, "_promised", {})
    r.patched(r.cluster.safety, "_answered", {"n1": 99})
    r.cluster.safety.reopened("n1", SimpleNamespace(term=98))  # type: ignore[arg-type]


@planted("I13 log safety, term")
def term_back(r: Record) -> None:
    journal = r.node.raft.journal
    r.cluster.terms["n1"] = journal.term + 1
    r.cluster._watch_votes("n1", journal)


@planted("I13 log safety, members")
def another_list(r: Record) -> None:
    r.patched(r.node.raft.membership, "applied_list", (77, ()))
    r.cluster._watch_members("n1", r.node.raft)


@planted("I14 durability, restart")
def lost_after_a_restart(r: Record) -> None:
    machine = SimpleNamespace(name="n1", durable=max(r.cluster.applied))
    journal = SimpleNamespace(base_index=0, last_index=machine.durable - 1)
    r.cluster._look_at_journal(machine, journal)  # type: ignore[arg-type]


@planted("I14 durability, restart")
def replaced_after_a_restart(r: Record) -> None:
    machine = SimpleNamespace(name="n1", durable=max(r.cluster.applied))
    journal = SimpleNamespace(base_index=0, last_index=machine.durable, term_at=lambda at: 0)
    r.cluster._look_at_journal(machine, journal)  # type: ignore[arg-type]


@planted("I14 durability, majority")
def on_no_majority(r: Record) -> None:
    beyond = max(raft.last_index for raft in r.cluster.rafts()) + 1
    entry = encode_entry(r.node.ledger.now_ms, [])
    r.patched(r.cluster.machines["n1"], "had", beyond)
    r.cluster._committed(beyond, r.node.raft.term, entry, [], r.node)


@planted("I17 fail-stop, own error")
def own_error(r: Record) -> None:
    r.cluster._fatal(SimpleNamespace(name="n1", failed_before=0), OSError("of nobody"))  # type: ignore[arg-type]


@planted("I17 fail-stop, failed sync")
def goes_on(r: Record) -> None:
    machine = SimpleNamespace(name="n1", disk=SimpleNamespace(failed_syncs=1))
    process = SimpleNamespace(failed_before=0, failed_at=-LATER, runtime=SimpleNamespace(paused=False))
    r.cluster._watch_syncs(machine, process)  # type: ignore[arg-type]


@planted("campaigns")
def asks_too_soon(r: Record) -> None:
    safety, process = r.cluster.safety, SimpleNamespace(name="n1")
    heard = SimpleNamespace(leader="n2", term=1, at=r.cluster.world.now, called=0, agreed={})
    r.patched(safety, "_heard", SimpleNamespace(get=lambda *_: heard))
    safety._campaign(process, messages.PRE_VOTE, 2)  # type: ignore[arg-type]


@planted("campaigns, pre-votes")
def asks_without_pre_votes(r: Record) -> None:
    process = SimpleNamespace(name="n1", receiver=r.node.raft)
    r.patched(r.cluster.safety, "_heard", SimpleNamespace(get=lambda key, default: default))
    r.cluster.safety._asked_before(process, 99)  # type: ignore[arg-type]


@planted("what leaders count")
def counted_ahead(r: Record) -> None:
    leader = r.cluster.leader()
    assert leader is not None
    process = r.cluster.process(leader.name)
    assert process is not None
    peer = next(iter(leader.raft.peers.values()))
    r.patched(peer, "counted", leader.raft.last_index + 1)
    r.cluster.safety._counted(process.network, peer.name)


# The tests


def noticed(record: Record, plant: Plant, check: Check | None) -> str:
    """Name of the branch that notices the violation."""
    try:
        plant(record)
        if check is not None:
            check(record.cluster)
        record.cluster.raise_first()
    except Violation as violation:
        return violation.invariant
    return "none"


@pytest.mark.parametrize(("branch", "plant", "check"), [pytest.param(*case, id=case[1].__name__) for case in CASES])
def test_a_violation_is_noticed_by_its_branch(branch: str, plant: Plant, check: Check | None, record: Record) -> None:
    if check is not None:
        check(record.cluster)  # without the violation it holds
    assert noticed(record, plant, check) == branch


#: Branches that are checked when a client gets an answer, or an entry is applied: only deliberate bugs break them.
IN_PASSING = {
    "backup", "hang-ups", "reads", "stale read", "F1 fan-out, hand-outs", "I12 divergence, entries",
    "I12 divergence, results", "I14 durability, compacted", "I2 conservation, log since checkpoint",
    "I2 conservation, checkpoint", "S1 schedules, triggers", "J3 transfers, once", "J3 transfers, moved",
    "J3 transfers, rights",
}  # fmt: skip


def test_every_branch_has_a_violation() -> None:
    assert {branch for branch, _, _ in CASES} | IN_PASSING == set(CHECKED)
