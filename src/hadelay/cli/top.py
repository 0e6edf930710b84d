"""`hadelay top`: a live view of the cluster. Rates come from two samples of each node's /metrics."""

import sys
import time
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

from hadelay.cli.output import Remote, cell, clean, emit_json, say, table_lines, with_shard
from hadelay.cli.remote import call, call_member
from hadelay.errors import BadRequest, HadelayError

#: Minimum number of observations in a histogram bucket for interpolating a quantile within the bucket.
_MANY = 30
_TOPICS = ("topic", "scheduled", "ready", "leased", "retrying", "dead", "oldest_ready_age_ms", "late_p99_ms")
_NODES = ("node", "role", "lag", "cpu", "memory_mb", "sync_p99_ms", "loop_p99_ms", "clock_ms", "connections", "detail")
#: Free disk space, in bytes, below which a warning is shown; the same as in the alert HadelayDiskFull.
_LITTLE = 1 << 30
#: Sample of a node's metrics: name with labels, as in /metrics → value.
Sample = dict[str, float]


def top(*, interval: float = 2, once: bool = False, topics: int = 20, remote: Remote = Remote()) -> None:
    """Show nodes, leader, rates, lateness and the fullest topics, until Ctrl-C. With -o json: a line per update.

    Args:
        interval: Seconds between updates; rates are averages of this time.
        once: Print one update and end.
        topics: Number of topics: first those with most ready messages, then those with most scheduled ones.
    """
    if not 0.1 <= interval <= 3600:
        raise BadRequest(f"--interval {interval}: expected 0.1 to 3600 seconds")
    if topics < 0:
        raise BadRequest(f"--topics {topics}: expected 0 or more")
    looks = _looks(remote, interval, topics)
    if once or remote.output == "json" or not sys.stdout.isatty():
        for look in islice(looks, 1 if once else None):
            if remote.output == "json":
                emit_json(look)
            else:
                say(_render(look))
        return
    from rich.live import Live
    from rich.text import Text

    with Live(Text(clean(_render(next(looks)))), screen=True, auto_refresh=False) as live:
        for look in looks:
            live.update(Text(clean(_render(look))), refresh=True)


def _looks(remote: Remote, interval: float, topics: int) -> Iterator[dict[str, Any]]:
    _, samples = _look(remote)
    while True:
        began = time.monotonic()
        time.sleep(interval)
        before = samples
        cluster, samples = _look(remote)
        seconds = time.monotonic() - began
        fullest, missing = _fullest(remote, topics)
        yield {
            "cluster": cluster["cluster_id"],
            "time": cluster["time"],
            "leader": cluster["leader"],
            "term": cluster["term"],
            "rates": _rates(before, samples, cluster["leader"], seconds),
            "nodes": [_node(m, before.get(m["name"]), samples.get(m["name"]), seconds) for m in cluster["members"]],
            "topics": fullest,
            **({"missing": missing} if missing else {}),
        }


def _look(remote: Remote) -> tuple[dict[str, Any], dict[str, Sample]]:
    cluster = call(remote, "GET", "/v1/cluster", needs="members", query={"stale": True})
    samples = {}
    for member in cluster["members"]:
        try:
            text = call_member(remote, member, "GET", "/metrics", decode=bytes.decode, timeout_s=5)
        except (HadelayError, OSError):
            continue
        samples[member["name"]] = _parse(text)
    return cluster, samples


def _parse(text: str) -> Sample:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


def _rates(before: dict[str, Sample], now: dict[str, Sample], leader: str | None, seconds: float) -> dict[str, Any]:
    """Rates per second between two samples of the metrics; None if a node's or the leader's sample is missing."""
    both = [(before[name], now[name]) for name in now if name in before]
    requests = sum(
        value - first.get(series, 0)
        for first, second in both
        for series, value in second.items()
        if series.startswith("hadelay_http_requests_total{")
    )
    first, last = before.get(leader or ""), now.get(leader or "")

    def rate(series: str) -> float | None:
        return None if not first or not last else max(0.0, last.get(series, 0) - first.get(series, 0)) / seconds

    return {
        "published": rate("hadelay_published_messages_total"), "handed_out": rate("hadelay_handed_out_messages_total"),
        "acked": rate('hadelay_settled_messages_total{outcome="acked"}'),
        "dead": rate('hadelay_settled_messages_total{outcome="dead"}'),
        "requests": requests / seconds if both else None,
        "late_p50_ms": _late(0.5, first, last), "late_p99_ms": _late(0.99, first, last),
        "commit_p99_ms": _quantile(0.99, "hadelay_commit_duration_seconds", first, last),
    }  # fmt: skip


def _late(part: float, before: Sample | None, now: Sample | None) -> float | None:
    """Quantile `part` (0 to 1) of the lateness between two samples, in ms, but at most the node's largest lateness."""
    found = _quantile(part, "hadelay_delivery_lateness_seconds", before, now)
    most = (now or {}).get("hadelay_delivery_lateness_max_seconds")
    return found if found is None or most is None else min(found, round(most * 1000, 1))


def _quantile(part: float, name: str, before: Sample | None, now: Sample | None) -> float | None:
    """A quantile, in ms, of the observations between two samples; None without any. Interpolates like Prometheus, but
    takes the upper bound of a bucket with few observations, where interpolation would be a guess."""
    if not before or not now:
        return None
    head = f'{name}_bucket{{le="'
    counts = [
        (float(series[len(head) : -2]), value - before.get(series, 0))
        for series, value in now.items()
        if series.startswith(head)
    ]
    if not counts or counts[-1][1] <= 0:
        return None
    rank = part * counts[-1][1]
    for (low, below), (high, upto) in pairwise([(0.0, 0.0), *counts]):
        if upto >= rank:
            if high == float("inf"):
                high = low
            elif upto - below >= _MANY:
                high = low + (high - low) * (rank - below) / (upto - below)
            return round(high * 1000, 1)
    return None


def _node(member: dict[str, Any], before: Sample | None, now: Sample | None, seconds: float) -> dict[str, Any]:
    row: dict[str, Any] = {"node": member["name"], "role": member["role"], "lag": member["lag"]}
    drained = ["drained"] if member.get("drained") else []
    if now is None:
        return row | {"detail": "does not answer"}
    row |= {
        "memory_mb": round(now["process_resident_memory_bytes"] / 1e6, 1), "clock_ms": member["clock_skew_ms"],
        "connections": int(now["hadelay_http_connections"]), "detail": ", ".join([*drained, *_trouble(now)]),
    }  # fmt: skip
    if before is None:
        return row
    cpu = (now["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / seconds
    return row | {
        "cpu": f"{max(0.0, cpu):.0%}",
        "sync_p99_ms": _quantile(0.99, "hadelay_log_fsync_duration_seconds", before, now),
        "loop_p99_ms": _quantile(0.99, "hadelay_loop_delay_seconds", before, now),
    }


def _trouble(now: Sample) -> Iterator[str]:
    if not now["hadelay_raft_has_leader"]:
        yield "knows no leader"
    if not now["hadelay_raft_admitted"]:
        yield "does not vote yet"
    if now["hadelay_disk_free_bytes"] < _LITTLE:
        yield "disk nearly full"
    if now["hadelay_snapshot_installing"]:
        yield "installs a snapshot"
    if not now["hadelay_clock_ready"]:
        yield "does not know the time"
    elif now["hadelay_clock_alarms"]:
        yield "clock alarm"


def _fullest(remote: Remote, most: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Returns (fullest topics of all shards, shards that do not answer)."""
    try:
        answer = call(remote, "GET", "/v1/topics", needs="topics", query={"partial": True})
    except (HadelayError, OSError):
        answer = call(remote, "GET", "/v1/topics", needs="topics", query={"stale": True, "partial": True})
    found, missing = answer["topics"], answer.get("missing", [])
    found.sort(key=lambda topic: (-topic["ready"], -topic["scheduled"], topic["topic"]))
    rows = [{name: topic.get(name) for name in with_shard(_TOPICS, found)} for topic in found[:most]]
    for row, topic in zip(rows, found, strict=False):
        row["retrying"] = topic.get("retrying", 0)
        row["late_p99_ms"] = topic["lateness"] and topic["lateness"]["p99_ms"]
    return rows, missing


def _render(look: dict[str, Any]) -> str:
    rates = (f"{name.replace('_', ' ')} {_rate(value)}" for name, value in look["rates"].items())
    return "\n".join([
        f"{cell(look['cluster'])}  {look['time']}  leader {look['leader'] or 'unknown'}, term {look['term']}",
        "  ".join(rates), "", *table_lines(look["nodes"], _NODES), "",
        *table_lines(look["topics"], with_shard(_TOPICS, look["topics"])),
        *(f"shard {shard} does not answer: its topics are left out" for shard in look.get("missing", ())),
    ])  # fmt: skip


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}"
