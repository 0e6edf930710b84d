"""Plain numbers for /metrics, read when somebody scrapes. http/metrics.py turns them into Prometheus' text."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hadelay.core.dispatch import LATENESS_BUCKETS_MS
from hadelay.model import Event
from hadelay.server.api import Histogram, MetricsView
from hadelay.server.webhooks.pool import DURATIONS_S

#: What stops hand-outs, refuses publishes, and refuses polls.
CAUSES = (
    "paused", "rate", "catch_up_rate", "concurrency", "publish_rate", "max_messages", "max_bytes", "filters",
)  # fmt: skip

if TYPE_CHECKING:
    from hadelay.server.node import Node


def node_metrics(node: Node) -> MetricsView:
    """Lateness, syncs, Raft, counts over all topics, sweeper. Per-topic numbers are GET /v1/topics' business."""
    raft, state, dispatcher = node.raft, node.state, node.dispatcher
    topics = state.topics.all
    published = sum(t.published for t in topics)
    values = {
        "raft_is_leader": float(bool(node.leading)),
        "raft_has_leader": float(raft.leader is not None),
        "raft_term": raft.term,
        "raft_commit_index": raft.commit_index,
        "raft_applied_index": raft.applied_index,
        "raft_synced_index": raft.synced_index,
        "raft_leader_changes_total": raft.stats.leader_changes,
        "raft_elections_total": raft.stats.elections,
        "raft_proposals_total": raft.stats.proposals,
        "published_messages_total": published,
        "settled_messages_total": sum(sum(t.settled) for t in topics),
        "acked_messages_total": sum(t.settled[Event.ACKED] for t in topics),
        "handed_out_messages_total": dispatcher.handed_out,
        "sweeper_found_messages_total": dispatcher.sweeper_found,
        "damaged_links_total": dispatcher.damaged_links,
        "publish_queue_bytes": node.batcher.queued_bytes,
        "batches_total": node.batcher.batches,
        "checkpoints_total": node.checkpoints.count,
        "idempotency_keys_dropped_early_total": state.keys_dropped_early,
        "clock_ready": float(node.clock.ready),
        "clock_alarms": len(node.clock.alarms),
    }
    pending = {"waiting": sum(t.waiting for t in topics), "leased": sum(t.leased for t in topics)}
    calls = node.push.pool
    values |= {"webhook_calls_in_flight": calls.in_flight, "webhook_topics_disabled": calls.disabled}
    values["webhook_leases_lost_total"] = calls.reports.lost
    values |= {"alerts_sent_total": node.push.alerts.sent, "alerts_failed_total": node.push.alerts.failed}
    limited = Counter(dispatcher.throttled()) + node.batcher.refused
    values["tag_checks_total"], values["tag_false_positives_total"] = dispatcher.tag_checks()
    syncs = raft.stats.sync_buckets
    return MetricsView(
        values=values,
        labelled={
            "messages": ("state", {name: float(count) for name, count in pending.items()}),
            "throttled_total": ("cause", {name: float(limited[name]) for name in CAUSES}),
            "webhook_calls_total": ("outcome", {name: float(count) for name, count in sorted(calls.outcomes.items())}),
        },
        histograms={
            "delivery_lateness_seconds": Histogram(
                [ms / 1000 for ms in LATENESS_BUCKETS_MS], dispatcher.lateness_counts, dispatcher.lateness_sum_ms / 1000
            ),
            "webhook_call_duration_seconds": Histogram(DURATIONS_S, calls.durations, calls.seconds),
            "log_fsync_duration_seconds": _plain(syncs, raft.stats.sync_seconds),
        },
    )


def _plain(counts: dict[float, int], seconds: float) -> Histogram:
    """A Histogram out of `bound → how many took no longer, and longer than the bound before`; the last is infinite."""
    *bounds, beyond = sorted(counts)
    return Histogram(bounds, [counts[bound] for bound in (*bounds, beyond)], seconds)
