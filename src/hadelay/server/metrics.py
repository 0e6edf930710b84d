"""What /metrics shows of a node, read when somebody scrapes; http/metrics.py writes it as Prometheus' text.

Nothing is counted for it but plain ints. Sums over topics are made in slices of two milliseconds, and only the busiest
topics get series of their own: what a million topic names cost a scrape is bounded (ADR 130).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hadelay.api.metrics import Histogram, Measured, Values
from hadelay.ledger.topics import Topic
from hadelay.model import Event
from hadelay.server.delivery.lateness import LATENESS_BUCKETS_MS
from hadelay.server.families import FAMILIES, OTHER
from hadelay.server.webhooks.pool import GONE

if TYPE_CHECKING:
    from hadelay.server.node import Node

#: What stops hand-outs, refuses publishes, and refuses polls.
CAUSES = (
    "paused", "rate", "catch_up_rate", "concurrency", "publish_rate", "max_messages", "max_bytes", "filters",
)  # fmt: skip
#: How messages end; a dead one may be redriven.
OUTCOMES = {
    "acked": Event.ACKED, "cancelled": Event.CANCELLED, "expired": Event.TTL_EXPIRED, "dead": Event.DEAD,
    "redriven": Event.REDRIVEN,
}  # fmt: skip
#: The longest time that a scrape keeps the others on the loop waiting, roughly.
_SLICE_S = 0.0005
#: Topics looked at between two looks at the clock: half a millisecond. What is ready and quantiles cost less,
#: the more are looked at together.
_FEW = 32


@dataclass(slots=True)
class _Topics:
    """Sums over all topics, and series of some."""

    count: int = 0
    paused: int = 0
    disabled: int = 0
    with_deaths: int = 0
    published: int = 0
    waiting: int = 0
    leased: int = 0
    dead: int = 0
    bytes: int = 0
    ready: int = 0
    #: Cluster time at which the oldest ready message fell due; 0: none is ready.
    oldest_ms: int = 0
    settled: list[int] = field(default_factory=lambda: [0] * len(OUTCOMES))

    def add(self, topic: Topic, ready: int, oldest_ms: int) -> None:
        self.published += topic.published
        self.settled = [n + topic.settled[event] for n, event in zip(self.settled, OUTCOMES.values(), strict=True)]
        self.with_deaths += topic.settled[Event.DEAD] > 0
        # Leases of a deleted topic may still run.
        self.waiting += topic.waiting
        self.leased += topic.leased
        self.dead += topic.dead
        self.bytes += topic.bytes
        # The leader's count may be ahead of what is applied, or behind.
        self.ready += min(ready, topic.waiting)
        if ready and not 0 < self.oldest_ms <= oldest_ms:
            self.oldest_ms = oldest_ms
        if topic.exists:
            paused = topic.settings.paused
            self.count += 1
            self.paused += paused
            self.disabled += paused and topic.settings.paused_reason == GONE

    def rest(self, some: _Topics) -> _Topics:
        """Gauges of what is not among `some`; the age is that of all."""
        names = ("waiting", "leased", "dead", "bytes", "ready")
        return _Topics(**{name: max(0, getattr(self, name) - getattr(some, name)) for name in names})

    def states(self) -> dict[str, int]:
        return {
            "scheduled": self.waiting - self.ready, "ready": self.ready, "leased": self.leased, "dead": self.dead,
        }  # fmt: skip


class NodeMetrics:
    """One per node. Which topics have series of their own changes only when one of them is deleted: a counter that
    moved from row to row would look like a burst."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._shown: dict[int, None] = {}

    def collect(self) -> Generator[None, None, Measured]:
        """Yields after each slice; server.reading.Reader.in_slices drives it."""
        totals, ready = yield from self._totals()
        values = _of_topics(totals) | _of_raft(self._node) | _of_server(self._node)
        if self._node.leading:
            values["ready_messages"] = totals.ready
            values["oldest_ready_age_seconds"] = self._age(totals.oldest_ms)
            values |= yield from self._series(totals, ready)
        return [(family, values[name]) for name, family in FAMILIES.items() if name in values]

    def _age(self, at_ms: int) -> float:
        node = self._node
        return max(0, node.clock.read(node.runtime.monotonic()) - at_ms) / 1000 if at_ms else 0

    def _totals(self) -> Generator[None, None, tuple[_Topics, dict[int, tuple[int, int]]]]:
        """And what is ready of each topic that has something ready."""
        node, topics, shown, found = self._node, self._node.ledger.topics.all, self._shown, _Topics()
        monotonic = node.runtime.monotonic
        most = node.config.limits.metrics_topics if node.leading else 0
        room, ready = most - len(shown), dict[int, tuple[int, int]]()
        best: list[tuple[int, int]] = []
        until = monotonic() + _SLICE_S
        for start in range(0, len(topics), _FEW):
            if monotonic() >= until:
                yield
                until = monotonic() + _SLICE_S
            few = topics[start : start + _FEW]
            ready |= node.dispatcher.ready_counts(topic.number for topic in few)
            for topic in few:
                found.add(topic, *ready.get(topic.number, (0, 0)))
                if not topic.exists:
                    shown.pop(topic.number, None)
                elif room > 0 and topic.number not in shown:
                    # Those with the most messages so far, and of equals the one that was made first.
                    heapq.heappush(best, (topic.published, -topic.number))
                    if len(best) > room:
                        heapq.heappop(best)
        for _, number in sorted(best, reverse=True):
            if len(shown) < most:  # another scrape may have chosen meanwhile
                shown[-number] = None
        return found, ready

    def _series(self, totals: _Topics, ready: dict[int, tuple[int, int]]) -> Generator[None, None, dict[str, Values]]:
        node, numbers, some = self._node, list(self._shown), _Topics()
        monotonic, lateness = node.runtime.monotonic, node.dispatcher.lateness
        columns: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in _OF_TOPIC}
        states, sizes, ages, late, published, settled = columns.values()
        others = totals.count > len(numbers)
        until = 0.0
        for start in range(0, len(numbers), _FEW):
            if monotonic() >= until:
                yield
                until = monotonic() + _SLICE_S
            few = numbers[start : start + _FEW]
            recent = lateness.recent(node.clock.read(monotonic()), few)
            for number in few:
                topic, at = node.ledger.topics[number], ready.get(number, (0, 0))
                one, name = _Topics(), topic.name
                one.add(topic, *at)
                if others:
                    some.add(topic, *at)
                states |= {(name, state): count for state, count in one.states().items()}
                ages[name,], sizes[name,], published[name,] = self._age(one.oldest_ms), one.bytes, one.published
                settled |= {(name, outcome): n for outcome, n in zip(OUTCOMES, one.settled, strict=True)}
                if number in recent:
                    _, late[name, "0.5"], late[name, "0.99"], late[name, "1"] = recent[number]
        if others:
            rest = totals.rest(some)
            states |= {(OTHER, state): count for state, count in rest.states().items()}
            sizes[OTHER,] = rest.bytes
        columns["topic_lateness_seconds"] = {key: ms / 1000 for key, ms in late.items()}
        return dict(columns)


_OF_TOPIC = [name for name, family in FAMILIES.items() if family.labels[:1] == ("topic",)]


def _of_topics(found: _Topics) -> dict[str, Values]:
    return {
        "messages": _by({"waiting": found.waiting, "leased": found.leased, "dead": found.dead}),
        "pending_bytes": found.bytes,
        "topics": found.count,
        "topics_paused": found.paused,
        "topics_with_deaths": found.with_deaths,
        "webhook_topics_disabled": found.disabled,
        "published_messages_total": found.published,
        "settled_messages_total": _by(dict(zip(OUTCOMES, found.settled, strict=True))),
    }


def _of_raft(node: Node) -> dict[str, Values]:
    raft, stats, journal, now = node.raft, node.raft.stats, node.raft.journal, node.runtime.monotonic()
    values: dict[str, Values] = {
        "log_fsync_duration_seconds": _histogram(stats.sync_buckets, stats.sync_seconds),
        "log_fsync_pending_seconds": 0 if journal.sync_started is None else now - journal.sync_started,
        "log_bytes": journal.size_bytes,
        "raft_is_leader": int(bool(node.leading)),
        "raft_has_leader": int(raft.leader is not None),
        "raft_admitted": int(journal.admitted),
        "raft_is_voter": int(raft.membership.votes),
        "raft_voters": len(raft.membership.voters),
        "raft_term": raft.term,
        "raft_last_index": raft.last_index,
        "raft_synced_index": raft.synced_index,
        "raft_commit_index": raft.commit_index,
        "raft_applied_index": raft.applied_index,
        "raft_leader_changes_total": stats.leader_changes,
        "raft_elections_total": stats.elections,
        "raft_proposals_total": stats.proposals,
        "raft_links_refused_total": _by(dict(sorted(raft.network.refused.items()))),
        "raft_peer_up": _by({peer.name: int(peer.up) for peer in raft.peers.values()}),
        "snapshots_sent_total": stats.snapshots_sent,
        "snapshots_installed_total": stats.snapshots_installed,
        "snapshot_sent_bytes_total": stats.snapshot_sent_bytes,
        "snapshot_received_bytes_total": stats.snapshot_received_bytes,
        "snapshot_installing": int(raft.applier.installing),
    }
    if raft.is_leader:
        peers = raft.peers.values()
        values["raft_peer_lag_entries"] = _by({p.name: max(0, raft.commit_index - p.match) for p in peers})
        values["raft_peer_rtt_seconds"] = _by({p.name: p.rtt for p in peers})
    return values


def _of_server(node: Node) -> dict[str, Values]:
    dispatcher, group_commit, storage, calls = node.dispatcher, node.group_commit, node.storage, node.webhooks.pool
    checkpoints, now = node.checkpoints, node.runtime.monotonic()
    limited = Counter(dispatcher.throttled()) + group_commit.refusals.counts
    checked, in_vain = dispatcher.tag_checks()
    hours, *sizes = storage.hours.totals()
    replication = sum(peer.in_flight_bytes for peer in node.raft.peers.values())
    return {
        "delivery_lateness_seconds": Histogram(
            [ms / 1000 for ms in LATENESS_BUCKETS_MS], dispatcher.lateness.counts, dispatcher.lateness.sum_ms / 1000
        ),
        "delivery_delay_seconds": dispatcher.delays.histogram,
        "delivery_lateness_max_seconds": dispatcher.lateness.max_ms(node.clock.read(now)) / 1000,
        "handout_delay_seconds": dispatcher.handouts.delays,
        "handed_out_messages_total": dispatcher.handed_out,
        "throttled_total": _by({cause: limited[cause] for cause in CAUSES}),
        "sweeper_found_messages_total": dispatcher.sweeper_found,
        "damaged_links_total": dispatcher.damaged_links,
        "tag_checks_total": checked,
        "tag_false_positives_total": in_vain,
        "idempotency_keys_dropped_early_total": node.ledger.keys_dropped_early,
        "commit_duration_seconds": group_commit.commits,
        "batches_total": group_commit.batches,
        "queue_length": _by({
            "publishes": group_commit.waiting_publishes, "commands": group_commit.waiting_commands,
            "proposals": node.raft.applier.waiting, "receives": dispatcher.waiting_polls(),
            "ready_window": dispatcher.window_size(), "webhooks": calls.queued,
        }),
        "buffer_bytes": _by({
            "publish_queue": group_commit.queued_bytes, "replication": replication,
            "far_hours": storage.hours.far_bytes, "tables": storage.tables.overlay_bytes,
        }),
        "checkpoints_total": checkpoints.count,
        "checkpoint_duration_seconds": checkpoints.durations,
        "checkpoint_age_seconds": now - checkpoints.finished,
        "checkpoint_replay_bytes": checkpoints.bytes_since,
        "records_read_total": _by({source: node.reader.counts[source] for source in ("memory", "disk")}),
        "hour_files": hours,
        "hour_bytes": _by(dict(zip(("log", "idx", "dsp"), sizes, strict=True))),
        "disk_free_bytes": checkpoints.free_bytes,
        "clock_ready": int(node.clock.ready),
        "clock_alarms": len(node.clock.alarms),
        "clock_skew_seconds": _by({name: ms / 1000 for name, ms in sorted(node.clock.skews(now).items())}),
        "webhook_calls_total": _by(dict(sorted(calls.outcomes.items()))),
        "webhook_call_duration_seconds": calls.durations,
        "webhook_calls_in_flight": calls.in_flight,
        "webhook_leases_lost_total": calls.reports.lost,
        "alerts_sent_total": node.webhooks.alerts.sent,
        "alerts_failed_total": node.webhooks.alerts.failed,
    }  # fmt: skip


def _by(values: dict[str, float]) -> dict[tuple[str, ...], float]:
    """Of a family with one label."""
    return {(label,): value for label, value in values.items()}


def _histogram(counts: dict[float, int], seconds: float) -> Histogram:
    """Out of `bound → how many took no longer, and longer than the bound before`; the last is infinite."""
    *bounds, beyond = sorted(counts)
    return Histogram(bounds, [counts[bound] for bound in (*bounds, beyond)], seconds)
