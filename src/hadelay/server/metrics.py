"""Every metric of a node, read at each scrape. http/metrics.py writes them as Prometheus text.

docs/reference/metrics.md is made from the tables here, and the dashboard and the alerts in cluster/ are checked against
them. Sums over topics are made in slices, and only the busiest topics get series of their own, so that the cost of a
scrape is bounded with a million topics (ADR 130).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

from hadelay.api.service import Family, Histogram, Measured, Values
from hadelay.ledger.jobs.bulk import queued
from hadelay.ledger.jobs.bulkjob import JOB_COUNTS
from hadelay.ledger.topics.topics import TopicState
from hadelay.ledger.views.fill import fill_ratios
from hadelay.model import Event
from hadelay.server.delivery.lateness import LATENESS_BUCKETS_MS
from hadelay.server.node import Node
from hadelay.server.patrol import METRICS as PATROL
from hadelay.server.service.attention import counts_of
from hadelay.server.webhooks.pool import GONE, Webhooks
from hadelay.timing import zones

#: Label of the series that has the sums of all topics without series of their own; no topic can have this name.
OTHER = "(other)"
#: Names of the limits that stop hand-outs, refuse publishes, or refuse polls.
CAUSES = (
    "paused", "rate", "catch_up_rate", "concurrency", "publish_rate", "max_messages", "max_bytes", "filters",
    "group_rate",
)  # fmt: skip
#: Outcomes of callbacks (messages about the end of another message or of a batch): values of the label `outcome`.
CALLBACKS = ("filed", "over_quota", "lost")
#: Outcomes of occurrences of schedules, as values of the label `outcome`.
OCCURRENCES = ("made", "missed", "overlapped", "refused")
#: Final outcomes of messages, each with its event; only a dead message may get another one, after a redrive.
OUTCOMES = {
    "acked": Event.ACKED, "cancelled": Event.CANCELLED, "expired": Event.TTL_EXPIRED, "dead": Event.DEAD,
    "redriven": Event.REDRIVEN, "transferred": Event.TRANSFERRED,
}  # fmt: skip
#: Time in seconds after which a scrape lets other tasks of the event loop run.
_SLICE_S = 0.0005
#: Number of topics that a scrape reads before it looks at its running time again.
_FEW = 32


@dataclass(slots=True)
class _Topics:
    """Sums of counters and of gauges over a set of topics."""

    count: int = 0
    paused: int = 0
    disabled: int = 0
    with_deaths: int = 0
    published: int = 0
    dropped: int = 0
    waiting: int = 0
    blocked: int = 0
    retrying: int = 0
    leased: int = 0
    dead: int = 0
    bytes: int = 0
    ready: int = 0
    #: Cluster time at which the oldest ready message fell due; 0: none is ready.
    oldest_ms: int = 0
    settled: list[int] = field(default_factory=lambda: [0] * len(OUTCOMES))

    def add(self, topic: TopicState, ready: int, oldest_ms: int) -> None:
        self.published += topic.published
        self.dropped += topic.dropped
        self.settled = [n + topic.settled[event] for n, event in zip(self.settled, OUTCOMES.values(), strict=True)]
        self.with_deaths += topic.settled[Event.DEAD] > 0
        # Include deleted topics in these gauges: leases of their messages may still run.
        self.waiting += topic.waiting
        self.blocked += topic.blocked
        self.retrying += topic.retrying
        self.leased += topic.leased
        self.dead += topic.dead
        self.bytes += topic.bytes
        # Limit the count of ready messages to those that wait: the delivery loop may be ahead of the applied entries,
        # or behind them.
        self.ready += min(ready, topic.waiting)
        if ready and not 0 < self.oldest_ms <= oldest_ms:
            self.oldest_ms = oldest_ms
        if topic.exists:
            paused = topic.settings.paused
            self.count += 1
            self.paused += paused
            self.disabled += paused and topic.settings.paused_reason == GONE

    def rest(self, some: _Topics) -> _Topics:
        """Gauges of the topics without series of their own: the sums of all topics minus `some`, the sums of the topics
        with series."""
        names = ("waiting", "blocked", "retrying", "leased", "dead", "bytes", "ready")
        return _Topics(**{name: max(0, getattr(self, name) - getattr(some, name)) for name in names})

    def states(self) -> dict[str, int]:
        return {
            "scheduled": self.waiting - self.ready, "ready": self.ready, "leased": self.leased, "dead": self.dead,
        } | ({"blocked": self.blocked} if self.blocked else {})  # fmt: skip


def _by(values: dict[str, float]) -> dict[tuple[str, ...], float]:
    """Series of a metric that has one label. values: value of the label → value of the series."""
    return {(label,): value for label, value in values.items()}


def _per_topic(scrape: _Scrape) -> None:
    """Reader for metrics per topic in `_OF_NODE`. It returns None, because NodeMetrics collects these values itself."""


class _Scrape:
    """Input for the functions in `_OF_NODE` that read metrics: a node, and sums over all its topics."""

    def __init__(self, node: Node, webhooks: Webhooks | None, topics: _Topics) -> None:
        self.node, self.webhooks, self.topics, self.now = node, webhooks, topics, node.runtime.monotonic()
        self.raft, self.stats, self.checkpoints = node.raft, node.raft.stats, node.checkpoints
        self.loop, self.queue, self.hours = node.delivery, node.group_commit, node.storage.hours
        self.throttled = Counter(node.delivery.throttled()) + node.group_commit.refusals.counts

    def age(self, at_ms: int) -> float:
        """Time in seconds from `at_ms` to the present cluster time; 0 if at_ms is 0."""
        return max(0, self.node.now_ms() - at_ms) / 1000 if at_ms else 0

    def backup_age(self) -> float | None:
        last = next((row for row in self.node.logbook.backups() if row.outcome == "complete"), None)
        return None if last is None else self.age(last.at_ms)

    def lateness(self) -> Histogram:
        late = self.loop.lateness
        return Histogram([ms / 1000 for ms in LATENESS_BUCKETS_MS], late.counts, late.sum_ms / 1000)

    def syncs(self) -> Histogram:
        """Histogram of journal syncs, from Raft's counts by upper bound; the last bound is infinite."""
        counts = self.stats.sync_buckets
        *bounds, beyond = sorted(counts)
        return Histogram(bounds, [counts[bound] for bound in (*bounds, beyond)], self.stats.sync_seconds)

    def queues(self) -> Values:
        return _by({
            "publishes": self.queue.waiting_publishes, "commands": self.queue.waiting_commands,
            "proposals": len(self.raft.applier.waiters), "receives": self.loop.waiting_polls(),
            "ready_window": self.loop.window_size(), "webhooks": self.webhooks.pool.queued if self.webhooks else 0,
        })  # fmt: skip

    def bulk_jobs(self) -> dict[str, float]:
        """Number of jobs that have not ended, by state."""
        ledger = self.node.ledger
        found = Counter(queued(ledger, job) for job in ledger.jobs.values() if not job.ended_ms)
        return {"running": found[False], "queued": found[True]}

    def buffers(self) -> Values:
        return _by({
            "publish_queue": self.queue.queued_bytes,
            "replication": sum(peer.in_flight_bytes for peer in self.raft.peers.values()),
            "far_hours": self.hours.far_bytes, "tables": self.node.storage.tables.overlay_bytes,
        })  # fmt: skip


_Kind = Literal["counter", "gauge", "histogram"]
_TOPIC, _PEER = ("topic",), ("peer",)
#: Metrics as (name, kind, labels, help, reader), in the order of the page /metrics. A reader returns None if only the
#: leader knows the value.
_OF_NODE: list[tuple[str, _Kind, tuple[str, ...], str, Callable[[_Scrape], Values | None]]] = [
    ("delivery_lateness_seconds", "histogram", (),
     "How long after its deliver_at a message was handed out: the promise. Counted by the node that led",
     lambda s: s.lateness()),
    ("delivery_delay_seconds", "histogram", (),
     "How long a message was due while a receive waited for it: the cluster's own part of the lateness. First "
     "attempts, of topics without limits. Counted by the node that led", lambda s: s.loop.delays.histogram),
    ("delivery_lateness_max_seconds", "gauge", (),
     "The largest lateness of a message that this node handed out in the last five minutes, as the leader",
     lambda s: s.loop.lateness.max_ms(s.node.now_ms()) / 1000),
    ("handout_delay_seconds", "histogram", (),
     "From when a message was granted, and due, until its consumer's answer was written or its webhook was called",
     lambda s: s.loop.handout_delays.histogram),
    ("oldest_ready_age_seconds", "gauge", (),
     "How long the message that waits longest for a consumer has been due; 0 when none waits. Leader only",
     lambda s: s.age(s.topics.oldest_ms) if s.node.leading else None),
    ("ready_messages", "gauge", (), "Messages that are due and that nobody has. Leader only",
     lambda s: s.topics.ready if s.node.leading else None),
    ("messages", "gauge", ("state",),
     "Messages that are kept: waiting (scheduled and ready), blocked by their groups, leased, dead. The same on every "
     "node",
     lambda s: _by({
         "waiting": s.topics.waiting, "blocked": s.topics.blocked, "leased": s.topics.leased, "dead": s.topics.dead,
     })),
    ("retrying_messages", "gauge", (), "Messages that wait after a failed attempt. The same on every node",
     lambda s: s.topics.retrying),
    ("pending_bytes", "gauge", (), "Size of the records of what waits or is leased. The same on every node",
     lambda s: s.topics.bytes),
    ("topics", "gauge", (), "Topics that exist. The same on every node", lambda s: s.topics.count),
    ("topics_paused", "gauge", (), "Topics that hand out nothing because somebody paused them, or a webhook's 410",
     lambda s: s.topics.paused),
    ("topics_expired_total", "counter", (),
     "Topics that ended because nobody used them for their expires_after, since this node started",
     lambda s: s.node.ledger.topics_expired),
    ("topics_with_deaths", "gauge", (),
     "Topics, deleted ones too, in which a message ever became a dead letter. The same on every node",
     lambda s: s.topics.with_deaths),
    ("published_messages_total", "counter", (), "Messages ever published. The same on every node",
     lambda s: s.topics.published),
    ("handed_out_messages_total", "counter", (), "Messages handed out by this node as the leader, repeats too",
     lambda s: s.loop.handed_out),
    ("settled_messages_total", "counter", ("outcome",),
     "Messages that ended; redriven and transferred ones began anew. The same on every node",
     lambda s: _by(dict(zip(OUTCOMES, s.topics.settled, strict=True)))),
    ("copies_dropped_total", "counter", (),
     "Copies that full subscriptions with on_full drop did not get. The same on every node",
     lambda s: s.topics.dropped),
    ("throttled_total", "counter", ("cause",),
     "Hand-outs, publishes and polls that a limit stopped, by its name (howto/flow)",
     lambda s: _by({cause: s.throttled[cause] for cause in CAUSES})),
    ("table_fill_ratio", "gauge", ("table",),
     "Rows of tables that all tenants share, by table, as a part of their limit. At 1, new rows are refused; further "
     "failure reasons share one row. The same on every node",
     lambda s: _by(fill_ratios(s.node.ledger))),
    ("bulk_jobs", "gauge", ("state",), "Bulk jobs that are running, or queued behind another. The same on every node",
     lambda s: _by(s.bulk_jobs())),
    ("bulk_messages_total", "counter", ("outcome",),
     "Messages that bulk jobs of this leader came to: done (changed), leased, settled, moved, refused",
     lambda s: _by({name: s.loop.bulk_counts[name] for name in JOB_COUNTS})),
    ("schedules", "gauge", (), "Schedules. The same on every node", lambda s: s.node.ledger.schedules.count),
    ("schedules_finished_total", "counter", (),
     "Schedules that ended by themselves (end, max_occurrences, last time of at) since this node started",
     lambda s: s.node.ledger.schedules_finished),
    ("schedule_occurrences_total", "counter", ("outcome",),
     "Occurrences of schedules that this node fired: made, missed, overlapped, refused",
     lambda s: _by({outcome: s.loop.occurrences[outcome] for outcome in OCCURRENCES})),
    ("schedule_delay_seconds", "gauge", (),
     "How long the next schedule has waited to be fired: above 0 for long, more are due than 2,000 per second. Leader",
     lambda s: s.loop.schedule_delay_ms() / 1000),
    ("schedules_invalid", "gauge", (), "Schedules in unknown time zones. Leader", lambda s: s.loop.invalid_schedules()),
    ("tzdata_behind", "gauge", (),
     "1 if this node's time zone data are older than those of a leader before: upgrade it",
     lambda s: float(s.node.ledger.schedules.tzdata > zones.VERSION)),
    ("sweeper_found_messages_total", "counter", (),
     "Messages that were due and forgotten until the sweeper looked: a bug unless 0", lambda s: s.loop.sweeper_found),
    ("local_index_wrong_total", "counter", (), "Wrong localIndexes that the sweeper found: a bug unless 0",
     lambda s: s.loop.wrong_cursors),
    ("oldest_blocked_age_seconds", "gauge", (),
     "How long the message that waits longest behind the first ones of its group has been due. Leader only",
     lambda s: s.age(s.loop.groups.waits_since_ms()) if s.node.leading else None),
    ("groups_wrong", "gauge", (),
     "Message groups in which blocked messages wait for nothing: a bug unless 0. Leader only",
     lambda s: s.loop.groups.wrong if s.node.leading else None),
    ("damaged_links_total", "counter", (), "Index entries or records with a wrong checksum that were mended",
     lambda s: s.loop.damaged_links),
    ("tag_checks_total", "counter", (),
     "Records read because the mask of their tags fitted. This term of the leader", lambda s: s.loop.tag_checks()[0]),
    ("tag_false_positives_total", "counter", (), "Of tag_checks_total, those whose tags did not match after all",
     lambda s: s.loop.tag_checks()[1]),
    ("idempotency_keys_dropped_early_total", "counter", (),
     "Idempotency keys forgotten within their window: limits.idempotency_keys is too low",
     lambda s: s.node.ledger.keys_dropped_early),
    ("unique_keys", "gauge", (),
     "Keys with unique_for that are remembered, at most half of limits.idempotency_keys. The same on every node",
     lambda s: s.node.ledger.unique_count),
    ("message_batches", "gauge", (),
     "Batches, at most 100,000, with ended ones, which are kept for 7 days. The same on every node",
     lambda s: s.node.ledger.batches.count),
    ("callbacks_total", "counter", ("outcome",),
     "Callbacks that this node applied since it started: filed; over_quota, filed though their topic was full; lost, "
     "because their topic could not be created or its hour was full",
     lambda s: _by({outcome: s.node.ledger.callbacks[outcome] for outcome in CALLBACKS})),
    ("topic_messages", "gauge", (*_TOPIC, "state"),
     "A topic's messages: scheduled, ready, leased, dead; blocked by their groups, if any. Leader only", _per_topic),
    ("topic_retrying_messages", "gauge", _TOPIC,
     "A topic's messages that wait after a failed attempt, as part of those that wait or are blocked. Leader only",
     _per_topic),
    ("topic_pending_bytes", "gauge", _TOPIC, "Size of the records of what waits or is leased. Leader only", _per_topic),
    ("topic_oldest_ready_age_seconds", "gauge", _TOPIC,
     "How long the topic's message that waits longest has been due. Leader only", _per_topic),
    ("topic_oldest_blocked_age_seconds", "gauge", _TOPIC,
     "How long the topic's message that waits longest behind the first ones of its group has been due. Leader only",
     _per_topic),
    ("topic_lateness_seconds", "gauge", (*_TOPIC, "quantile"),
     "Lateness of the topic's messages over the last five minutes: 0.5, 0.99, and 1 for the largest. Leader only",
     _per_topic),
    ("topic_published_messages_total", "counter", _TOPIC, "Messages ever published to the topic. Leader only",
     _per_topic),
    ("topic_settled_messages_total", "counter", (*_TOPIC, "outcome"),
     "As settled_messages_total, of one topic. Leader only", _per_topic),
    ("commit_duration_seconds", "histogram", (),
     "From when a batch of commands left this node's queue until a majority had it and it was applied here",
     lambda s: s.queue.commits),
    ("log_fsync_duration_seconds", "histogram", (), "Syncs of the Raft journal", lambda s: s.syncs()),
    ("log_fsync_pending_seconds", "gauge", (), "How long the journal's sync that is under way has taken so far",
     lambda s: 0 if (started := s.raft.journal.sync_started) is None else s.now - started),
    ("log_bytes", "gauge", (), "Raft journal kept on disk", lambda s: s.raft.journal.size_bytes),
    ("raft_is_leader", "gauge", (), "1: this node leads, knows the time, and hands out",
     lambda s: int(bool(s.node.leading))),
    ("raft_has_leader", "gauge", (), "1: this node knows a leader", lambda s: int(s.raft.leader is not None)),
    ("raft_admitted", "gauge", (), "0: a new incarnation, which neither votes nor counts yet",
     lambda s: int(s.raft.journal.admitted)),
    ("raft_is_voter", "gauge", (), "1: this node votes; 0: a learner, which fills itself, or no member (any more)",
     lambda s: int(s.raft.membership.votes)),
    ("raft_voters", "gauge", (), "Members that vote, as this node knows them", lambda s: len(s.raft.membership.voters)),
    ("raft_term", "gauge", (), "Raft term", lambda s: s.raft.term),
    ("raft_last_index", "gauge", (), "Last entry in this node's journal", lambda s: s.raft.last_index),
    ("raft_synced_index", "gauge", (), "Last entry on this node's disk", lambda s: s.raft.journal.synced_index),
    ("raft_commit_index", "gauge", (), "Last entry known to be committed", lambda s: s.raft.commit_index),
    ("raft_applied_index", "gauge", (), "Last entry that this node has applied", lambda s: s.raft.applied_index),
    ("raft_leader_changes_total", "counter", (), "Leaders that this node has seen come",
     lambda s: s.stats.leader_changes),
    ("raft_elections_total", "counter", (), "Elections that this node has asked for", lambda s: s.stats.elections),
    ("raft_proposals_total", "counter", (), "Entries that this node has proposed as the leader",
     lambda s: s.stats.proposals),
    ("raft_peer_up", "gauge", _PEER, "1: the link to that node is there",
     lambda s: _by({peer.name: int(peer.up) for peer in s.raft.peers.values()})),
    ("raft_links_refused_total", "counter", ("reason",),
     "Connections refused on the node link: crowded (too many before HELLO), silent, hello (a stranger), "
     "tls, frame (unreadable), by_peer (the other side refused), accept (no descriptor)",
     lambda s: _by(dict(sorted(s.raft.network.refused.items())))),
    ("raft_peer_lag_entries", "gauge", _PEER, "Committed entries that node is not known to have. Leader only",
     lambda s: _by({p.name: max(0, s.raft.commit_index - p.match) for p in s.raft.peers.values()})
     if s.raft.is_leader else None),
    ("raft_peer_rtt_seconds", "gauge", _PEER, "Round trip to that node, smoothed. Leader only",
     lambda s: _by({p.name: p.rtt for p in s.raft.peers.values()}) if s.raft.is_leader else None),
    ("batches_total", "counter", (), "Batches of commands that left this node's queue", lambda s: s.queue.batches),
    ("queue_length", "gauge", ("queue",),
     "What waits: publishes and commands to leave this node, proposals for their commit, receives for a message, "
     "ready_window entries in memory, webhooks fetched messages for their call", lambda s: s.queues()),
    ("buffer_bytes", "gauge", ("buffer",),
     "Memory that grows with load, each up to a limit: publish_queue, replication (sent, not answered), "
     "far_hours and tables (until the next checkpoint)", lambda s: s.buffers()),
    ("checkpoints_total", "counter", (), "Checkpoints made", lambda s: s.checkpoints.count),
    ("checkpoint_duration_seconds", "histogram", (), "From the beginning of a checkpoint until it was durable",
     lambda s: s.checkpoints.durations),
    ("checkpoint_age_seconds", "gauge", (), "Since the last checkpoint was durable, or the process began",
     lambda s: s.now - s.checkpoints.finished),
    ("checkpoint_replay_bytes", "gauge", (), "Applied since the last checkpoint: what a restart replays",
     lambda s: s.checkpoints.bytes_since),
    ("backup_age_seconds", "gauge", (),
     "Since the last complete backup that this node served, or learned of since it started; absent without one",
     lambda s: s.backup_age()),
    ("snapshots_sent_total", "counter", (), "Snapshots offered to followers that were too far behind for entries",
     lambda s: s.stats.snapshots_sent),
    ("snapshots_installed_total", "counter", (), "Snapshots installed here", lambda s: s.stats.snapshots_installed),
    ("snapshot_sent_bytes_total", "counter", (), "Bytes of snapshots sent to followers",
     lambda s: s.stats.snapshot_sent_bytes),
    ("snapshot_received_bytes_total", "counter", (), "Bytes of snapshots received",
     lambda s: s.stats.snapshot_received_bytes),
    ("snapshot_installing", "gauge", (), "1: this node is pulling a snapshot, and serves nothing of its own",
     lambda s: int(s.raft.applier.installing)),
    ("records_read_total", "counter", ("source",),
     "Records read for receives and webhooks: memory, or disk (in a thread, since memory did not have them)",
     lambda s: _by({source: s.node.reader.counts[source] for source in ("memory", "disk")})),
    ("hour_files", "gauge", (), "Hours that have files", lambda s: s.hours.totals()[0]),
    ("hour_bytes", "gauge", ("file",),
     "Size of all hours' files, by kind: log (records), idx (index), dsp (events)",
     lambda s: _by(dict(zip(("log", "idx", "dsp"), s.hours.totals()[1:], strict=True)))),
    ("disk_free_bytes", "gauge", (), "Free on the fuller of the disks of data and journal; publishing stops (507) "
     "below storage.min_free_bytes, on any node", lambda s: s.checkpoints.free_bytes),
    ("clock_ready", "gauge", (), "1: cluster time is known", lambda s: int(s.node.clock.ready)),
    ("clock_alarms", "gauge", (), "What is wrong with the clocks: no majority agrees, or some are too far off",
     lambda s: len(s.node.clock.alarms)),
    ("clock_skew_seconds", "gauge", _PEER,
     "A node's wall clock less cluster time, this node's included; the alarm is at 250 ms",
     lambda s: _by({name: ms / 1000 for name, ms in sorted(s.node.clock.skews(s.now).items())})),
    ("shard_map_prepared", "gauge", (), "1: a change of the shard map is under way, or stopped half-way",
     lambda s: int(s.node.ledger.shards.prepared is not None)),
    ("shard_suspended", "gauge", (), "1: the shard was restored, and creates no topics until it has the map again",
     lambda s: int(s.node.ledger.shards.suspended)),
    ("attention", "gauge", ("kind",),
     "Rows of the report of what needs attention, by kind (GET /v1/attention). Leader only",
     lambda s: None if (counts := counts_of(s.node)) is None else _by(counts)),
    ("webhook_topics_disabled", "gauge", (), "Topics paused because their webhook answered 410",
     lambda s: s.topics.disabled),
    *((name, kind, (), text, lambda s, of=of: of(s.node.patrol)) for name, kind, text, of in PATROL),
]  # fmt: skip
_OF_WEBHOOKS: list[tuple[str, _Kind, tuple[str, ...], str, Callable[[Webhooks], Values]]] = [
    ("webhook_calls_total", "counter", ("outcome",), "Calls to webhooks by what came of them: 2xx, 5xx, timeout, …",
     lambda w: _by(dict(sorted(w.pool.outcomes.items())))),
    ("webhook_call_duration_seconds", "histogram", (), "Durations of the calls", lambda w: w.pool.durations),
    ("webhook_calls_in_flight", "gauge", (), "Calls under way", lambda w: w.pool.in_flight),
    ("webhook_leases_lost_total", "counter", (),
     "Calls whose lease had ended before their outcome was committed: made again", lambda w: w.pool.reports.lost),
    ("alerts_sent_total", "counter", (), "Calls that reported dead letters", lambda w: w.alerts.sent),
    ("alerts_failed_total", "counter", (), "Such calls that failed; they are repeated", lambda w: w.alerts.failed),
]  # fmt: skip
FAMILIES = {row[0]: Family(f"hadelay_{row[0]}", row[1], row[3], row[2]) for row in (*_OF_NODE, *_OF_WEBHOOKS)}
_OF_TOPIC = [name for name, family in FAMILIES.items() if family.labels[:1] == _TOPIC]


class NodeMetrics:
    """Metrics of one node. Once a topic has its own series, it keeps them until it is deleted: a counter whose series
    ended and began again would look like a burst."""

    def __init__(self, node: Node, webhooks: Webhooks | None = None) -> None:
        self._node, self._webhooks = node, webhooks
        self._shown: dict[int, None] = {}

    def collect(self) -> Generator[None, None, Measured]:
        """Collect all metrics, in slices: the generator yields after each slice, and VerifiedReader.in_slices drives
        it."""
        totals, ready = yield from self._totals()
        scrape = _Scrape(self._node, self._webhooks, totals)
        values: dict[str, Values | None] = {name: read(scrape) for name, *_, read in _OF_NODE}
        if self._webhooks is not None:
            values |= {name: read(self._webhooks) for name, *_, read in _OF_WEBHOOKS}
        if self._node.leading:
            values |= yield from self._series(scrape, ready)
        return [(family, value) for name, family in FAMILIES.items() if (value := values.get(name)) is not None]

    def _totals(self) -> Generator[None, None, tuple[_Topics, dict[int, tuple[int, int]]]]:
        """Compute sums over all topics. Also returns, for each topic with ready messages, by number: the count of these
        messages, and the time since which the oldest is due."""
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
            ready |= node.delivery.ready_counts(topic.number for topic in few)
            for topic in few:
                found.add(topic, *ready.get(topic.number, (0, 0)))
                if not topic.exists:
                    shown.pop(topic.number, None)
                elif room > 0 and topic.number not in shown:
                    # The topics with the most published messages get series of their own; of topics with equal numbers,
                    # the older one.
                    heapq.heappush(best, (topic.published, -topic.number))
                    if len(best) > room:
                        heapq.heappop(best)
        for _, number in sorted(best, reverse=True):
            if len(shown) < most:  # check the limit again: a concurrent scrape may have added topics
                shown[-number] = None
        return found, ready

    def _series(self, scrape: _Scrape, ready: dict[int, tuple[int, int]]) -> Generator[None, None, dict[str, Values]]:
        node, numbers, some = self._node, list(self._shown), _Topics()
        monotonic, lateness = node.runtime.monotonic, node.delivery.lateness
        columns: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in _OF_TOPIC}
        states, retrying, sizes, ages, blocked, late, published, settled = columns.values()
        others = scrape.topics.count > len(numbers)
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
                ages[name,], sizes[name,], published[name,] = scrape.age(one.oldest_ms), one.bytes, one.published
                retrying[name,] = one.retrying
                if topic.blocked:
                    blocked[name,] = scrape.age(scrape.loop.groups.waits_since_ms(number))
                settled |= {(name, outcome): n for outcome, n in zip(OUTCOMES, one.settled, strict=True)}
                if number in recent:
                    _, late[name, "0.5"], late[name, "0.99"], late[name, "1"] = recent[number]
        if others:
            rest = scrape.topics.rest(some)
            states |= {(OTHER, state): count for state, count in rest.states().items()}
            sizes[OTHER,], retrying[OTHER,] = rest.bytes, rest.retrying
        columns["topic_lateness_seconds"] = {key: ms / 1000 for key, ms in late.items()}
        return dict(columns)
