"""Write cluster/grafana/hadelay.json: `make docs`. A test compares, and matches every expression with what nodes show.

A row per question that somebody has who looks at it: is it on time, how much is there, which topics, does the cluster
agree, what do the machines do. `$job` is a cluster. Import it in Grafana, or give it to its provisioning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).resolve().parent.parent / "cluster" / "grafana" / "hadelay.json"
JOB = '{job="$job"}'
WINDOW = "[$__rate_interval]"


class Panel(NamedTuple):
    title: str
    kind: str
    unit: str
    #: (expression, legend)
    queries: tuple[tuple[str, str], ...]
    text: str
    #: From where on it is orange, and red.
    thresholds: tuple[float, ...] = ()


def rate(name: str, labels: str = "") -> str:
    return f'rate(hadelay_{name}{{job="$job"{"," if labels else ""}{labels}}}{WINDOW})'


def quantile(part: float, name: str, by: str = "") -> str:
    labels = ", ".join(("le", by)) if by else "le"
    return f"histogram_quantile({part}, sum by ({labels}) ({rate(f'{name}_bucket')}))"


def led(expression: str) -> str:
    """Of the leader alone. Counters that are the cluster's jump where a node replays its journal or fills itself."""
    return f"sum({expression} and on (job, instance) {value('raft_is_leader')} == 1)"


def value(name: str) -> str:
    return f"hadelay_{name}{JOB}"


def quantiles(name: str) -> tuple[tuple[str, str], ...]:
    return tuple((quantile(part, name), f"p{part * 100:g}") for part in (0.5, 0.99, 0.999))


ROWS: dict[str, tuple[Panel, ...]] = {
    "Is it on time?": (
        Panel("Late by the cluster, p99", "stat", "s", ((quantile(0.99, "delivery_delay_seconds"), ""),),
              "How long a message was due while a receive waited for it. HadelayLate looks at this.", (0.05, 0.5)),
        Panel("Waits longest", "stat", "s", ((f"max({value('oldest_ready_age_seconds')})", ""),),
              "How long the oldest message that is due has waited for a consumer.", (10, 300)),
        Panel("Ready", "stat", "short", ((f"max({value('ready_messages')})", ""),),
              "Messages that are due and that nobody has. A consumer takes them, not the cluster."),
        Panel("Waiting", "stat", "short", (('max(hadelay_messages{job="$job",state="waiting"})', ""),),
              "Messages scheduled or ready."),
        Panel("Leader", "stat", "short", ((f"sum({value('raft_is_leader')})", ""),),
              "1. For a moment 0 when the leader changes.", ()),
        Panel("Nodes", "stat", "short", (('sum(up{job="$job"})', ""),), "Nodes that answer Prometheus."),
        Panel("Lateness", "timeseries", "s", (
            *quantiles("delivery_lateness_seconds"),
            (quantile(0.99, "delivery_delay_seconds"), "p99, the cluster's part"),
        ), "Late because nobody asked, or because of the cluster? Its part is how long a receive waited meanwhile."),
        Panel("Lateness, all of it", "heatmap", "s",
              ((f"sum by (le) ({rate('delivery_lateness_seconds_bucket')})", "{{le}}"),),
              "How many messages a second were how late."),
    ),
    "How much?": (
        Panel("Messages a second", "timeseries", "ops", (
            (led(rate("published_messages_total")), "published"),
            (f"sum({rate('handed_out_messages_total')})", "handed out"),
            (led(rate("settled_messages_total")).replace("sum(", "sum by (outcome) (", 1), "{{outcome}}"),
        ), "What comes in, what goes out, and how it ends."),
        Panel("Messages kept", "timeseries", "short", (
            (f"max by (state) ({value('messages')})", "{{state}}"), (f"max({value('ready_messages')})", "ready"),
        ), "Waiting is scheduled and ready."),
        Panel("Answers", "timeseries", "reqps",
              ((f"sum by (route, code) ({rate('http_requests_total')})", "{{route}} {{code}}"),),
              "By route and status. 429: a limit; 503: no leader, or too much at once; 507: no disk left."),
        Panel("Stopped by limits", "timeseries", "ops", ((f"sum by (cause) ({rate('throttled_total')})", "{{cause}}"),),
              "Hand-outs, publishes and polls that a topic's limit stopped."),
    ),
    "Which topics?": (
        Panel("Ready, by topic", "timeseries", "short",
              (('topk(10, hadelay_topic_messages{job="$job",state="ready"})', "{{topic}}"),),
              "The ten with most. (other): topics without series of their own."),
        Panel("Waits longest, by topic", "timeseries", "s",
              (('topk(10, hadelay_topic_oldest_ready_age_seconds{job="$job"} > 0)', "{{topic}}"),),
              "How long the topic's oldest message that is due has waited for a consumer; the ten longest."),
        Panel("Lateness p99, by topic", "timeseries", "s",
              (('topk(10, hadelay_topic_lateness_seconds{job="$job",quantile="0.99"})', "{{topic}}"),),
              "Over five minutes; the ten latest."),
        Panel("Published, by topic", "timeseries", "ops",
              ((f"topk(10, {rate('topic_published_messages_total')})", "{{topic}}"),), "The ten busiest."),
        Panel("Dead letters, by topic", "timeseries", "short",
              (('topk(10, hadelay_topic_messages{job="$job",state="dead"} > 0)', "{{topic}}"),),
              "Messages that failed for the last time, and are kept."),
    ),
    "Does the cluster agree?": (
        Panel("Commit", "timeseries", "s", quantiles("commit_duration_seconds"),
              "From leaving a node's queue until a majority had it."),
        Panel("Sync of the journal, p99", "timeseries", "s",
              ((quantile(0.99, "log_fsync_duration_seconds", "instance"), "{{instance}}"),),
              "What the disk takes. Every answer to a publish waits for two of them, in parallel."),
        Panel("Who leads, who votes", "timeseries", "short",
              ((f"{value('raft_is_leader')} + {value('raft_is_voter')}", "{{instance}}"),),
              "2 leads, 1 votes, 0 is a learner, or was removed."),
        Panel("Entries behind", "timeseries", "short", (
            (value("raft_peer_lag_entries"), "{{peer}}"),
            (f"{value('raft_commit_index')} - {value('raft_applied_index')}", "{{instance}} applies"),
        ), "Committed entries that a follower lacks, as the leader sees it; and that a node has yet to apply."),
        Panel("Round trip", "timeseries", "s", ((value("raft_peer_rtt_seconds"), "{{peer}}"),), "Leader to follower."),
        Panel("Clocks", "timeseries", "s", ((value("clock_skew_seconds"), "{{peer}}, seen by {{instance}}"),),
              "Wall clock less cluster time. The alarm is at 0.25 s."),
    ),
    "What do the machines do?": (
        Panel("Processor", "timeseries", "percentunit",
              ((f'rate(process_cpu_seconds_total{{job="$job"}}{WINDOW})', "{{instance}}"),),
              "Of one core: a node hands out on one."),
        Panel("Event loop late, p99", "timeseries", "s",
              ((quantile(0.99, "loop_delay_seconds", "instance"), "{{instance}}"),),
              "How long what is due waits for what runs."),
        Panel("Memory", "timeseries", "bytes", (
            (f"process_resident_memory_bytes{JOB}", "{{instance}}"),
            (value("buffer_bytes"), "{{buffer}}, {{instance}}"),
        ), "Resident, mapped files included; and the buffers that grow with load."),
        Panel("Queues", "timeseries", "short", ((f"max by (queue) ({value('queue_length')})", "{{queue}}"),),
              "The longest of any node."),
        Panel("Disk", "timeseries", "bytes", (
            (value("disk_free_bytes"), "free, {{instance}}"), (value("log_bytes"), "journal, {{instance}}"),
            (f"max by (file) ({value('hour_bytes')})", "hours, {{file}}"),
        ), "Publishing stops below storage.min_free_bytes."),
        Panel("Checkpoints", "timeseries", "s", (
            (quantile(0.99, "checkpoint_duration_seconds", "instance"), "p99, {{instance}}"),
            (value("checkpoint_age_seconds"), "age, {{instance}}"),
        ), "How long they take, and how long ago the last one was. None is made when nothing changes."),
        Panel("Snapshots", "timeseries", "Bps", (
            (rate("snapshot_sent_bytes_total"), "sent, {{instance}}"),
            (rate("snapshot_received_bytes_total"), "received, {{instance}}"),
        ), "Files for a node that was away for too long, or is new."),
        Panel("Connections", "timeseries", "short", (
            (value("http_connections"), "{{instance}}"), (value("http_waiting_receives"), "receives, {{instance}}"),
            (f"process_open_fds{JOB}", "descriptors, {{instance}}"),
        ), "Of clients; receives that wait; descriptors."),
    ),
    "Webhooks": (
        Panel("Calls", "timeseries", "ops",
              ((f"sum by (outcome) ({rate('webhook_calls_total')})", "{{outcome}}"),), "By what came of them."),
        Panel("How long they take", "timeseries", "s", quantiles("webhook_call_duration_seconds"), "Until the answer."),
        Panel("Under way", "timeseries", "short", ((f"sum({value('webhook_calls_in_flight')})", "calls"),),
              "webhooks.max_calls at most."),
        Panel("Alerts of dead letters", "timeseries", "ops", (
            (f"sum({rate('alerts_sent_total')})", "sent"), (f"sum({rate('alerts_failed_total')})", "failed"),
        ), "Calls to a topic's alert, or to webhooks.alert_url."),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    return {
        "uid": "hadelay",
        "title": "hadelay",
        "tags": ["hadelay"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
                {
                    "name": "job",
                    "type": "query",
                    "label": "Cluster",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": "label_values(hadelay_raft_term, job)",
                    "refresh": 2,
                },
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for title, panels in ROWS.items():
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": _at(0, top, 24, 1),
        }
        number, left, top, height = number + 1, 0, top + 1, 0
        for panel in panels:
            width, tall = (4, 4) if panel.kind == "stat" else (12, 8)
            if left + width > 24 or (height and tall != height):
                left, top = 0, top + height
            height = tall
            yield {"id": number, "gridPos": _at(left, top, width, tall), **_panel(panel)}
            number, left = number + 1, left + width
        top += height


def _at(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": w, "h": h}


def _panel(panel: Panel) -> dict[str, Any]:
    steps = [{"color": "green", "value": None}]
    steps += [{"color": color, "value": at} for color, at in zip(("orange", "red"), panel.thresholds, strict=False)]
    form = "heatmap" if panel.kind == "heatmap" else "time_series"
    found: dict[str, Any] = {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "targets": [
            {"refId": chr(ord("A") + n), "expr": expression, "legendFormat": legend, "format": form}
            for n, (expression, legend) in enumerate(panel.queries)
        ],
    }
    if panel.kind == "stat":
        found["options"] = {"colorMode": "value", "reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "heatmap":
        found["options"] = {"calculate": False, "yAxis": {"unit": panel.unit}}
    return found


def text() -> str:
    """A line per panel: what changed can be seen."""
    found = dashboard()
    panels = ",\n".join(json.dumps(panel, ensure_ascii=False) for panel in found.pop("panels"))
    return f'{json.dumps(found, ensure_ascii=False)[:-1]}, "panels": [\n{panels}\n]}}\n'


def main() -> None:
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(text())


if __name__ == "__main__":
    main()
