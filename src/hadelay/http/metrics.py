"""Writes /metrics in Prometheus' text format 0.0.4, in slices, which prometheus-client cannot (ADR 130).
docs/reference/metrics.md lists every family."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path

from hadelay.api.service import Family, Histogram, Values
from hadelay.http.bodies import RequestTurns
from hadelay.http.forwarding.forwarder import Forwarder
from hadelay.platform.tls import Certificates
from hadelay.server.service.node import NodeService
from hadelay.version import VERSION

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Limits of one slice of writing: lines of a metric family, and seconds.
_LINES = 200
_SLICE_S = 0.0005
#: Interval at which the event loop's delay is measured, and bounds of the histogram's buckets, in seconds.
_LOOK_S = 0.1
_DELAYS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

#: Metric families of the HTTP layer, in the order of the page; the node's families come first.
FAMILIES = (
    Family("hadelay_http_requests_total", "counter", "Answers by route and status", ("route", "code")),
    Family(
        "hadelay_http_denied_total", "counter",
        "Requests refused for who asked: no_token, malformed, unknown, expired or bootstrap token, scope, cross_site, "
        "or foreign_host",
        ("reason",),
    ),
    Family("hadelay_http_connections", "gauge", "Open connections of clients"),
    Family("hadelay_http_waiting_receives", "gauge", "Receives that wait on this node; 10,000 at most"),
    Family(
        "hadelay_forwarded_requests_total", "counter",
        "Requests for topics of other shards, by outcome: answered; repeated, since the first try broke; unreachable "
        "(503, nothing happened); unknown (504)",
        ("outcome",),
    ),
    Family("hadelay_forward_connections", "gauge", "Open connections to nodes of other shards"),
    Family("hadelay_http_reading_bytes", "gauge", "Bodies on their way in, or not yet answered; 64 MiB at most"),
    Family(
        "hadelay_http_slice_max_bytes", "gauge",
        "Most work that a large request did in one turn of the loop: bytes, an item counting as 256; 262,144 at most",
    ),
    Family(
        "hadelay_loop_delay_seconds", "histogram",
        "How late a timer of the event loop was, ten times a second: what keeps it busy delays everything",
    ),
    Family(
        "hadelay_certificate_expiry_timestamp_seconds", "gauge",
        "When this node's certificate is over, Unix time: of the node link (raft) and of HTTPS (http)", ("section",),
    ),
    Family("hadelay_build_info", "gauge", "1; the version that runs, and the node's name", ("version", "node")),
    Family("process_cpu_seconds_total", "counter", "User and system CPU time"),
    Family("process_resident_memory_bytes", "gauge", "Resident memory, mapped files included"),
    Family("process_virtual_memory_bytes", "gauge", "Address space; the LMDB map counts in full"),
    Family("process_start_time_seconds", "gauge", "When the process began, Unix time"),
    Family("process_open_fds", "gauge", "Open file descriptors"),
    Family("process_max_fds", "gauge", "Most file descriptors that it may open"),
)  # fmt: skip


class Metrics:
    def __init__(self, service: NodeService, denied: Counter[str], turns: RequestTurns, forwarder: Forwarder) -> None:
        """denied: numbers of refused requests by reason, such as a missing token or a missing right."""
        self.service, self.denied, self.turns, self.forwarder = service, denied, turns, forwarder
        #: (route, status) → number of answers
        self.requests: Counter[tuple[str, int]] = Counter()
        self.delays = Histogram.of(_DELAYS_S)
        self.certificates: list[Certificates] = []
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Measure the event loop's delay from now on, until `stop`."""
        loop = asyncio.get_running_loop()
        due = loop.time() + _LOOK_S

        def look() -> None:
            self.delays.observe(max(0.0, loop.time() - due))
            self.watch()

        self._timer = loop.call_at(due, look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def exposition(self, connections: int, receives: int, reading: int) -> bytes:
        values: tuple[Values, ...] = (
            {(route, str(code)): count for (route, code), count in sorted(self.requests.items())},
            {(reason,): count for reason, count in sorted(self.denied.items())},
            connections,
            receives,
            {(outcome,): count for outcome, count in self.forwarder.counts.items() if count},
            self.forwarder.connections,
            reading,
            self.turns.largest,
            self.delays,
            {(one.section,): one.expires_s for one in self.certificates},
            {(VERSION, self.service.node): 1},
            *_process(),
        )
        parts: list[bytes] = []
        until = 0.0
        for family, value in [*await self.service.metrics(), *zip(FAMILIES, values, strict=True)]:
            for part in lines(family, value):
                parts.append(part.encode())
                if time.monotonic() >= until:
                    await asyncio.sleep(0)
                    until = time.monotonic() + _SLICE_S
        return b"".join(parts)


def lines(family: Family, values: Values) -> Iterator[str]:
    """Text of one metric family, some whole lines at a time; nothing for a family without values."""
    name = family.name
    if isinstance(values, dict) and not values:
        return
    yield f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"
    if isinstance(values, Histogram):
        # Read all counts in one slice: they may change between slices.
        counts = list(accumulate(values.counts))
        rows = zip((*map(str, values.bounds), "+Inf"), counts, strict=True)
        buckets = "".join([f'{name}_bucket{{le="{bound}"}} {count}\n' for bound, count in rows])
        yield f"{buckets}{name}_sum {values.sum}\n{name}_count {counts[-1]}\n"
    elif isinstance(values, dict):
        form = f"{name}{{" + ",".join(f'{label}="%s"' for label in family.labels) + "} %s\n"
        items = iter(list(values.items()))  # a copy: the mapping may change between slices
        while some := list(islice(items, _LINES)):
            yield "".join([form % (*map(_escaped, texts), value) for texts, value in some])
    else:
        yield f"{name} {values}\n"


@lru_cache(4_096)
def _escaped(text: str) -> str:
    """Escape a label value. Cached, because each family repeats the names of topics."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _process() -> tuple[float, ...]:
    """Values of the families `process_…`, whose names are those of every Prometheus client. Linux only."""
    times = os.times()
    size, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
    page = resource.getpagesize()
    # Since Linux 6.2 the size of /proc/self/fd is the number of descriptors; listing them takes milliseconds.
    open_fds = os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))
    max_fds = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return times.user + times.system, resident * page, size * page, _STARTED_S, open_fds, max_fds


def _started() -> float:
    """Start of the process, Unix time. /proc/stat, which has the boot time, may be hidden (ProcSubset=pid)."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + int(ticks) / os.sysconf("SC_CLK_TCK")


#: Start of the process, computed once: after a step of the wall clock, a second result would look like another process.
_STARTED_S = _started()
