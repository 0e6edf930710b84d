"""Samples of this node's counters for the charts of the last hour, in bounded memory (ADR 231).

A sample costs a pass over the topics, in slices. The more it costs, the rarer samples are, so that all of them together
take at most a hundredth of the processor's time.
"""

import asyncio
import time
from collections import OrderedDict, deque
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from hadelay.api.text import format_instant
from hadelay.console.owntime import OwnTime
from hadelay.errors import HadelayError
from hadelay.server.service.node import NodeService
from hadelay.server.service.overview import Recent, TopicCounts, Totals

log = structlog.get_logger("hadelay")

#: Time between two samples in seconds, and number of samples that are kept: together an hour.
EVERY_S, KEPT = 10.0, 360
#: Limits of the number of topics with samples of their own: the busiest topics, and topics whose pages were viewed
#: last.
BUSIEST, LOOKED_AT = 200, 50
#: Number of samples after which the busiest topics are selected again.
_CHOOSE = 30
#: Time in seconds for which callers share one reading of the counters; length in seconds of the period over which rates
#: are computed.
_FRESH_S, _WINDOW_S = 1.8, 10.0
#: Pause after reading the counters: this multiple of its CPU time, so 100 means at most 1 % of a CPU. While somebody
#: looks at a page, the pause is half of that.
_PAUSE = 100
#: Number of samples in a minute, the first and the last included.
_MINUTE = 7
_NOTHING = Recent(0, 0, 0, 0, 0, 0)


class Look(NamedTuple):
    """Message counters, and rates per second over 10 s. recent: numbers of ready messages and lateness, as the leader
    reports them; None without a leader."""

    totals: Totals
    recent: Recent | None
    published_s: float
    acked_s: float
    died_s: float


class _Ring:
    """The last samples of some counters, in bounded memory. A row has the time in Unix ms, and a column for each
    counter."""

    def __init__(self, columns: int) -> None:
        self._rows: NDArray[np.int64] = np.zeros((KEPT, columns + 1), np.int64)
        self._count = 0

    def add(self, at_ms: int, values: tuple[int, ...]) -> None:
        self._rows[self._count % KEPT] = (at_ms, *values)
        self._count += 1

    def rows(self) -> NDArray[np.int64]:
        """Samples in the order of their times."""
        if self._count <= KEPT:
            return self._rows[: self._count]
        return np.roll(self._rows, -(self._count % KEPT), axis=0)


class Sampler:
    def __init__(self, service: NodeService) -> None:
        self._service = service
        self._task: asyncio.Task[None] | None = None
        #: Samples over all topics: published, acked, died, pending, dead; p50, p99, max lateness in ms (−1: unknown).
        self._ring = _Ring(8)
        self._topics: dict[str, _Ring] = {}
        self._looked_at: OrderedDict[str, None] = OrderedDict()
        self._looks: deque[tuple[float, Totals]] = deque(maxlen=16)
        self._looking: asyncio.Task[Look] | None = None
        self._looked = self._cost_s = 0.0
        #: Name of the node that led at the last sample.
        self._leader: str | None = None
        self._samples = 0

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        due = 0.0
        while True:
            began = time.monotonic()
            try:
                if began >= due:
                    due = began + EVERY_S
                    await self._sample()
                    due = began + max(EVERY_S, _PAUSE * self._cost_s)
            except HadelayError:
                pass  # no leader, or the node is not ready: the chart has a gap
            except Exception as error:
                log.warning("console_sample_failed", error=repr(error))
                due = time.monotonic() + 6 * EVERY_S
            await asyncio.sleep(1.0)

    async def _sample(self) -> None:
        look = await self.look()
        totals, late = look.totals, look.recent
        # A new leader has measured nothing yet: the chart has a gap.
        leader, self._leader = self._leader, self._service.leader_name
        handed_out = late is not None and late.handed_out and leader == self._leader
        lateness = (late.p50_ms, late.p99_ms, late.max_ms) if late is not None and handed_out else (-1, -1, -1)
        pending = totals.waiting + totals.leased
        self._ring.add(totals.at_ms, (totals.published, totals.acked, totals.died, pending, totals.dead, *lateness))
        if self._samples % _CHOOSE == 0 or len(self._topics) < min(BUSIEST, totals.topics):
            names = [*await self._service.overview.busiest(BUSIEST), *self._looked_at]
            self._topics = {name: self._topics.get(name) or _Ring(5) for name in names}
        self._samples += 1
        for name, ring in self._topics.items():
            counts = self._service.overview.counts(name)
            if counts is not None:
                ring.add(totals.at_ms, counts)

    async def look(self) -> Look:
        """Return the current counters; calls within about two seconds share one reading. Raises HadelayError."""
        now = time.monotonic()
        task = self._looking
        if task is None or (task.done() and now - self._looked >= max(_FRESH_S, _PAUSE / 2 * self._cost_s)):
            self._looked = now
            task = self._looking = asyncio.create_task(self._read())
        return await asyncio.shield(task)

    async def _read(self) -> Look:
        own = OwnTime()
        totals = await own.of(self._service.overview.totals())
        began, recent = time.monotonic(), None
        with suppress(HadelayError):
            recent = await self._service.overview.recent()
        now = time.monotonic()
        # The leader's work for its report is part of the cost: the time until the report came is an upper bound. A
        # report that did not come cost no work.
        self._cost_s = min(0.6, own.spent_s + (0.0 if recent is None else now - began))
        self._looks.append((now, totals))
        before_s, before = next(((at, one) for at, one in self._looks if now - at <= _WINDOW_S), (now, totals))
        seconds = max(now - before_s, 1e-9)
        rates = (
            (getattr(totals, name) - getattr(before, name)) / seconds if before is not totals else 0.0
            for name in ("published", "acked", "died")
        )
        return Look(totals, recent, *rates)

    def looked_at(self, topic: str) -> None:
        """Keep samples of a topic whose page somebody has open."""
        self._looked_at[topic] = None
        self._looked_at.move_to_end(topic)
        while len(self._looked_at) > LOOKED_AT:
            self._looked_at.popitem(last=False)
        if topic not in self._topics and len(self._topics) < BUSIEST + LOOKED_AT:
            self._topics[topic] = _Ring(5)

    def charts(self) -> dict[str, Any]:
        """Data of the overview's charts: `at`, Unix times in s; and under each chart's name a list of series."""
        rows = self._ring.rows()
        at, published, acked, died, pending, dead, *late = rows.T if len(rows) else np.zeros((9, 0), np.int64)
        return with_gaps({
            "at": _seconds(at[1:]),
            "rates": [_rates(at, published), _rates(at, acked)],
            "lateness": [[None if ms < 0 else ms for ms in column[1:].tolist()] for column in late],
            "pending": [pending[1:].tolist(), dead[1:].tolist()],
            "deaths": [_rates(at, died)],
        })  # fmt: skip

    def topic_charts(self, topic: str) -> dict[str, Any]:
        ring = self._topics.get(topic)
        rows = ring.rows() if ring is not None else np.zeros((0, 6), np.int64)
        at, published, acked, died, pending, retrying = rows.T if len(rows) else np.zeros((6, 0), np.int64)
        return with_gaps({
            "at": _seconds(at[1:]),
            "rates": [_rates(at, published), _rates(at, acked)],
            "pending": [pending[1:].tolist(), retrying[1:].tolist()],
            "deaths": [_rates(at, died)],
        })  # fmt: skip

    def per_minute(self, topic: str) -> TopicCounts | None:
        """Change of a topic's counters per minute, by the samples of the last minute; None without two samples."""
        ring = self._topics.get(topic)
        if ring is None or len(rows := ring.rows()[-_MINUTE:]) < 2:
            return None
        changes = (rows[-1] - rows[0])[1:] * 60_000 / max(1, int(rows[-1][0] - rows[0][0]))
        return TopicCounts(*map(round, changes.tolist()))

    @property
    def last(self) -> str:
        """Time of the last sample, "" without one."""
        rows = self._ring.rows()
        return format_instant(int(rows[-1][0])) if len(rows) else ""


def last_point(charts: dict[str, Any]) -> dict[str, Any] | None:
    """The newest point of each series."""
    if not charts["at"]:
        return None
    return {name: rows[-1] if name == "at" else [row[-1] for row in rows] for name, rows in charts.items()}


def with_gaps(charts: dict[str, Any]) -> dict[str, Any]:
    """Add a point without values to the charts wherever samples are missing, so that their lines have a gap there."""
    at: list[float] = charts["at"]
    steps = np.diff(at)
    if not len(steps):
        return charts
    for n in reversed(np.flatnonzero(steps > 3 * max(EVERY_S, float(np.median(steps)))).tolist()):
        at.insert(n + 1, round((at[n] + at[n + 1]) / 2, 3))
        for name, series in charts.items():
            for row in series if name != "at" else ():
                row.insert(n + 1, None)
    return charts


def _seconds(at: NDArray[np.int64]) -> list[float]:
    return (at / 1000).round(3).tolist()  # type: ignore[no-any-return]


def _rates(at: NDArray[np.int64], counter: NDArray[np.int64]) -> list[float]:
    """Rate per second between each sample and the one before; 0 where a counter fell (a restored cluster)."""
    if len(at) < 2:
        return []
    found = np.diff(counter) / np.maximum(np.diff(at) / 1000, 1e-3)
    return np.maximum(found, 0).round(2).tolist()  # type: ignore[no-any-return]
