"""The search for the messages that a bulk job may change: read-only, outside of apply, in slices."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hadelay.codec.formats import I64, REASON, Mask, Rows
from hadelay.codec.jobcommands import LAST, ON_DEAD, JobCursor, JobSpec
from hadelay.codec.linking import INDEX_CRC
from hadelay.codec.meta import has_all, mask_of, unpack
from hadelay.ledger.hours import retries
from hadelay.ledger.hours.chain import NO_ROWS
from hadelay.ledger.hours.transitions import FLAG_KEYED, FLAG_ROUTED, failures_of
from hadelay.ledger.jobs.bulkjob import generations
from hadelay.ledger.messages import fills
from hadelay.ledger.state import Ledger
from hadelay.ledger.views.listing import states_of
from hadelay.model import DEAD_HOURS, HOUR_MS, NONE32, PENDING, Event, State
from hadelay.words import error_group

#: Number of entries that a scan looks at in one slice: one or two milliseconds, also where every message has a TTL.
SLICE = 2_048
#: Number above all generations: with it as the limit of each topic, a count of messages before a job begins leaves out
#: no generation.
EVERY_GENERATION = 1 << 16
_STATES = tuple(State)


def new_due_ms(spec: JobSpec, began_ms: int, due_ms: I64) -> I64:
    """New due times of messages due at `due_ms`, as a job with the action reschedule or deliver_now gives them; a time
    in the past means now."""
    if spec.shift_ms is not None:
        return due_ms + np.int64(spec.shift_ms)
    if spec.at_ms is not None:
        return np.full(len(due_ms), spec.at_ms, np.int64)
    return np.full(len(due_ms), began_ms + (spec.delay_ms or 0), np.int64)


def passes(spec: JobSpec, meta: bytes | memoryview) -> bool:
    """Whether the specification of a job selects messages with this meta map."""
    known = unpack(meta)
    if spec.group not in ("", known.group) or spec.schedule not in ("", known.sch):
        return False
    return set(spec.tags) <= set(known.tags) and (known.key or "").startswith(spec.key_prefix)


def reads_records(spec: JobSpec) -> bool:
    """Whether records must be read to select messages: the index has no client keys, and tags only as inexact masks."""
    return bool(spec.tags or spec.key_prefix or spec.group or spec.schedule)


@dataclass(slots=True)
class JobScan:
    """Search for the messages that a job may change, from its cursor on. For a filter by tags, client key, group or
    schedule, it finds too many messages: the caller then checks the records (`passes`)."""

    ledger: Ledger
    spec: JobSpec
    #: Topic number → generation: the job may change entries of lower generations.
    topics: Mapping[int, int]
    began_ms: int
    #: Next entry to look at; LAST when all entries were looked at.
    cursor: JobCursor = (0, 0)
    _mask: int = field(init=False)
    _ids: NDArray[np.uint64] = field(init=False)
    #: Cache: (event, number of the reason) of a last failure → whether the job's filter selects messages with it.
    _errors: dict[tuple[Event | None, int], bool] = field(init=False, default_factory=dict)
    _fills: bool = field(init=False)
    #: Whether the job is only for messages that wait for a retry.
    _retries: bool = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self._mask, self._fills = mask_of(spec.tags), spec.action == "fill"
        self._retries = spec.retrying or (bool(spec.error) and spec.action not in ON_DEAD)
        self._ids = np.array(self.spec.ids, np.uint64)

    def step(self, now_ms: int) -> tuple[int, Rows]:
        """Look at one slice of an hour's entries, and move the cursor behind it; returns (hour, INDEX rows that the job
        may change, with leased ones). Raises DamagedFile if such a row fails its checksum; the cursor then stays where
        it was."""
        store, (hour, start) = self.ledger.store, self.cursor
        if not self._has(hour) or start >= store.count(hour):
            following = next((h for h in store.hours() if h > hour and self._has(h)), None)
            if following is None:
                self.cursor = LAST
                return 0, NO_ROWS
            hour, start = following, 0
        # With a filter by error, a slice is smaller: the last error of each message has to be looked up in a table.
        end = min(start + (SLICE // 4 if self.spec.error else SLICE), store.count(hour))
        rows = self._meant(hour, start, end, now_ms)
        self.cursor = (hour, end)
        return hour, rows

    def progress(self) -> float:
        """Share of the entries that the scan has looked at, from 0 to 1."""
        hours = [hour for hour in self.ledger.store.hours() if self._spans(hour)]
        counts = [self.ledger.store.count(hour) for hour in hours]
        at_hour, index = self.cursor
        before = [count if hour < at_hour else min(index, count) for hour, count in zip(hours, counts, strict=True)]
        looked = sum(n for hour, n in zip(hours, before, strict=True) if hour <= at_hour)
        return looked / sum(counts) if any(counts) else 1.0

    def _has(self, hour: int) -> bool:
        """Whether the hour may have open messages that the job may change."""
        if not self._spans(hour):
            return False
        hour_state = self.ledger.hours.get(hour) if self._fills or self._retries else None
        if self._retries:
            return hour_state is not None and bool(hour_state.retrying or hour_state.leased)
        return self.ledger.open_entries(hour) > 0 or (hour_state is not None and bool(hour_state.unfilled))

    def _spans(self, hour: int) -> bool:
        spec = self.spec
        if hour >= DEAD_HOURS or spec.action in ON_DEAD:
            return hour >= DEAD_HOURS and spec.action in ON_DEAD
        # An entry's hour is never before its due time, but may be after it: a message filed late, or moved by CARRY.
        late = spec.to_ms is not None and hour > max((spec.to_ms - 1) // HOUR_MS, self.ledger.now_hour)
        return not late and (spec.from_ms is None or hour >= spec.from_ms // HOUR_MS)

    def _meant(self, hour: int, start: int, end: int, now_ms: int) -> Rows:
        store = self.ledger.store
        if store.mapped(hour):
            rows = store.index_view(hour)[start:end]
        else:
            rows = store.entries(hour, slice(start, end), verify=False)
        at = np.flatnonzero(self._fits(rows, now_ms))
        some = rows.take(at)
        if len(some) and len(bad := INDEX_CRC.bad(some)):
            store.entries(hour, (at[bad] + start).astype(np.uint32))  # raises DamagedFile, with the damaged entry
        if self._fills:
            return some[fills.open_for(self.ledger, self.topics, hour, some, now_ms)]
        codes = states_of(self.ledger, hour, some, now_ms)
        wanted = np.zeros(len(_STATES) + 1, np.bool_)
        meant = {State.DEAD} if hour >= DEAD_HOURS else PENDING
        wanted[[code for code, state in enumerate(_STATES) if state in meant]] = True
        found: Rows = some[wanted[codes]]
        if self.spec.error:
            found = found[np.array([self._failed_so(first_id) for first_id in found["first_id"].tolist()], np.bool_)]
        return found

    def _failed_so(self, first_id: int) -> bool:
        """Whether the last error of the message is in the same group of errors (words.error_group) as the error of the
        job's filter."""
        failures = failures_of(self.ledger, first_id)
        event, reason = (failures[-1][1], failures[-1][3]) if failures else (None, NONE32)
        if (known := self._errors.get((event, reason))) is None:
            text = None if reason == NONE32 else self.ledger.names.name(REASON, reason)
            group = error_group(None if event is None else event.name.lower(), text)
            known = self._errors[event, reason] = group == error_group(None, self.spec.error)
        return known

    def _fits(self, rows: Rows, now_ms: int) -> Mask:
        spec, due = self.spec, rows["deliver_at_ms"]
        limits = generations(self.topics, len(self.ledger.topics.all))
        fits = rows["generation"] < limits.take(rows["topic"], mode="clip")
        if self._fills:
            to = self.ledger.topic(spec.subscription)
            fits &= rows["flags"] & np.uint16(FLAG_ROUTED) == 0
            return fits if to is None or to.filter is None else fits & to.filter.may(rows["tag_mask"])
        if spec.tags:
            fits &= has_all(rows["tag_mask"], self._mask)
        if spec.key_prefix:
            # Keep routed letters, too: a dead letter routed here from another topic has its client key in the record
            # only.
            fits &= rows["flags"] & np.uint16(FLAG_KEYED | FLAG_ROUTED) != 0
        if spec.from_ms is not None:
            fits &= due >= spec.from_ms
        if spec.to_ms is not None:
            fits &= due < spec.to_ms
        if spec.ids:
            fits &= np.isin(rows["first_id"], self._ids)
        if self._retries:
            fits &= retries.failed(rows)
        if spec.action in ON_DEAD:
            fits &= due <= self.began_ms  # for dead letters, `due` is the time of death
        elif spec.action not in ("cancel", "transfer"):
            fits &= (due > now_ms) | (new_due_ms(spec, self.began_ms, due) > now_ms)
        return np.asarray(fits)
