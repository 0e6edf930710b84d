"""Job: a verdict on the delivery of every due message. A message that moved is judged once, by its first id.

Each task collects facts per entry, in numpy: status, number of hand-outs, early or late. A message that never moved is
judged at once; the entries of the few others are grouped and judged afterwards. tests/pipeline/exact_oracle.py computes
the same verdicts in SQL.

A grant may be committed up to 100 ms before its messages are due, but their hand-out is deferred until then (ADR 0092):
the time of a hand-out is the later one of its event and deliver_at.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hadelay.codec.formats import handout_delay_ms
from hadelay.model import DEAD_HOURS, HOUR_MS, NONE32, Event
from hadelay.pipeline import tasks
from hadelay.pipeline.archived import open_hours
from hadelay.pipeline.arrow import hour_ints, ids, instants, named, without, write_parquet
from hadelay.pipeline.check import SUFFIXES, check
from hadelay.pipeline.hourfiles import HourFiles, Listing, NameMap, Rows, Store, events_of, usable
from hadelay.pipeline.jobs import VERDICTS, JobSummary, ReconcileOptions
from hadelay.pipeline.page import ROWS
from hadelay.pipeline.schema import hour_int
from hadelay.pipeline.stores import listing as list_hours
from hadelay.pipeline.stores import refuse_empty
from hadelay.pipeline.verdictpage import report

#: Statuses of an entry, worst last. A message with several entries has the status of the worst one.
MOVED, GONE, ACKED, CANCELLED, EXPIRED, DEAD, PENDING, UNACKED, LOST = range(9)
OK, UNDELIVERED, DUPLICATE, EARLY, LATE, ORPHAN = map(
    VERDICTS.index, ("ok", "undelivered", "duplicate", "early", "late", "orphan")
)
#: Verdicts that tell of a problem: the job lists the messages with such a verdict.
OFFENDING = (UNDELIVERED, DUPLICATE, EARLY, LATE, ORPHAN, VERDICTS.index("unacked"))
#: Verdict of each status, if no rule on lateness, earliness or duplicates applies.
_OF_STATUS = ("gone", "gone", "ok", "cancelled", "expired", "dead", "pending", "unacked", "undelivered")
OF_STATUS = np.array([VERDICTS.index(name) for name in _OF_STATUS], np.uint8)
#: Maximum time, in ms, by which a grant may be committed before deliver_at; an earlier grant counts as early.
AHEAD_MS = 100
#: Minimum time, in ms, from the end of an hour to the deletion of its files. Files of dead letters may be deleted at
#: the end of their hour.
RETIRED_MS = 2 * HOUR_MS
_NEVER = np.iinfo(np.int64).min
#: Number of entries per task that judges messages that moved to another hour.
_MOVED_AT_ONCE = 1 << 20
#: Number of rows per piece of a result; Spark moves ten pieces at a time.
_ROWS_AT_ONCE = 1 << 16
#: Number of rows with problems that a task sends to the driver at a time.
_SENT_AT_ONCE = 1 << 20
_OFFENDS = np.isin(np.arange(len(VERDICTS)), OFFENDING)
#: Facts about entries, as columns: name of a field of FACTS → array.
Columns = dict[str, npt.NDArray[Any]]
#: (hour of the message's first entry, topic, verdict) → number of messages.
Counts = Counter[tuple[int, int, int]]
_STATUS_OF_EVENT = np.array(
    [PENDING, UNACKED, ACKED, PENDING, PENDING, EXPIRED, CANCELLED, MOVED, MOVED, MOVED], np.uint8
)
_HOME = np.uint64((1 << 56) - 1)

#: Layout of the facts about an entry, or about a message with several entries.
FACTS = np.dtype(
    [
        ("first_id", "<u8"), ("hour", "<u4"), ("entry", "<u4"), ("topic", "<u4"), ("status", "u1"), ("early", "?"),
        ("deliver_at_ms", "<i8"), ("late_ms", "<i8"),  # late_ms: lateness of the last hand-out; -1: none
        ("leases", "<u4"), ("excused", "<u4"),  # excused: nacks and redrives; each allows one more lease
        ("to_hour", "<u4"), ("to_entry", "<u4"), ("live", "<u4"), ("verdict", "u1"),
    ]
)  # fmt: skip


class Rule(NamedTuple):
    as_of_ms: int
    late_ms: int
    grace_ms: int
    #: Hours whose messages are checked (by the message's first entry); None: all hours, also deleted ones.
    homes: frozenset[int] | None
    #: Whether to omit damaged or misplaced rows, instead of raising DamagedFile.
    skip: bool = False
    #: Whether to check the CRCs of rows.
    verify: bool = False
    #: Mask of the selected topics by topic number, as NameMap.topic_mask returns it; None: all topics.
    topics: npt.NDArray[np.bool_] | None = None


class Judged(NamedTuple):
    #: Facts (FACTS rows) of the messages with problems.
    offending: Rows
    counts: Counts
    #: Facts (FACTS rows) of the entries of messages that moved to another hour.
    moving: Rows


class EntryRange(NamedTuple):
    """Entries [start, stop) of an hour."""

    files: HourFiles
    start: int
    stop: int


def run(spark: Any, options: ReconcileOptions, progress: tasks.Progress = tasks.silent) -> JobSummary:
    """Reconcile the selected hours. progress counts checked files and judged hours; moved messages may add hours."""
    store = open_hours(options.source, options.archive)
    listing = list_hours(store, options.source)
    refuse_empty(options.source, listing, store.names())
    rule = rule_of(listing, options, store.names())
    listed = {files.hour: files for files in listing.hours}
    counts, kept, moved = Counts(), list[tasks.Kept[Judged]](), 0
    try:
        todo, done = set(listed) if rule.homes is None else set(rule.homes), set[int]()
        while todo:
            kept.append(_judge_hours(spark, store, [listed[hour] for hour in sorted(todo)], rule, options, progress))
            done |= todo
            todo = set()
            for some, moving in kept[-1].describe(_brief):
                counts += some
                moved += moving.total()
                todo |= moving.keys() & listed.keys() - done
        groups = 1 if spark is None else max(tasks.cores(spark), -(-moved // _MOVED_AT_ONCE))
        conclude_of = partial(conclude, listed=frozenset(listed), rule=rule)
        kept.append(tasks.regroup(spark, kept, partial(by_message, groups), conclude_of, groups))
        for some, _ in kept[-1].describe(_brief):
            counts += some
        offending = sum(count for (_, _, verdict), count in counts.items() if verdict in OFFENDING)
        parts = -(-offending // _SENT_AT_ONCE)
        found = (rows for results in kept for rows in results.stream(_offending, parts))
        return summarise(counts, found, store.names(), listing, rule, options)
    finally:
        for results in kept:
            results.free()


def rule_of(listing: Listing, options: ReconcileOptions, names: NameMap) -> Rule:
    homes, source = None, options.source
    if source.hour_from or source.hour_to:
        homes = frozenset(f.hour for f in listing.hours if f.hour < DEAD_HOURS and source.takes(f.hour))
    skip, topics = source.on_torn == "skip", names.topic_mask(source.topics)
    return Rule(listing.as_of_ms, options.late_ms, options.grace_ms, homes, skip, source.verify, topics)


def _judge_hours(
    spark: Any,
    store: Store,
    hours: Sequence[HourFiles],
    rule: Rule,
    options: ReconcileOptions,
    progress: tasks.Progress,
) -> tasks.Kept[Judged]:
    # Split large hours to use all cores; at most one part per core, because each part reads all events.
    most = -(-tasks.cores(spark) // max(len(hours), 1))
    parts = [part for f in hours for part in split(f, min(most, -(-f.entries // options.source.split_rows)))]
    files = len(hours) * len(SUFFIXES) if options.check else 0
    total = files + len(parts)
    if options.check:
        check(spark, store, hours, options.source, progress=lambda done, _: progress(done, total))
    work = partial(in_pieces, store, rule=rule)
    return tasks.keep(spark, work, parts, lambda done, _: progress(files + done, total))


def _brief(judged: Judged) -> tuple[Counts, Counter[int]]:
    """Summary of a result: (number of messages by verdict, number of entries of moved messages by target hour)."""
    return judged.counts, Counter(judged.moving["to_hour"].tolist())


def _offending(judged: Judged) -> Iterator[Rows]:
    for at in range(0, len(judged.offending), _ROWS_AT_ONCE):
        yield judged.offending[at : at + _ROWS_AT_ONCE]


def split(files: HourFiles, parts: int) -> list[EntryRange]:
    """Split an hour's entries into parts of equal size, one at least."""
    bounds = [files.entries * n // max(parts, 1) for n in range(max(parts, 1) + 1)]
    return [EntryRange(files, start, stop) for start, stop in pairwise(bounds)]


def in_pieces(store: Store, part: EntryRange, *, rule: Rule) -> Iterator[Judged]:
    """Judge a range of entries, and yield the result in pieces of up to _ROWS_AT_ONCE rows."""
    whole = judge(store, part, rule=rule)
    for at in range(0, max(len(whole.offending), len(whole.moving), 1), _ROWS_AT_ONCE):
        some = slice(at, at + _ROWS_AT_ONCE)
        yield Judged(whole.offending[some], whole.counts if at == 0 else Counter(), whole.moving[some])


def judge(store: Store, part: EntryRange, *, rule: Rule) -> Judged:
    hour = part.files.hour
    facts, orphans = entry_facts(store, part, rule)
    first = facts["first_id"] & _HOME
    mine = first == facts["entry"] | np.uint64(hour << 32)
    stays = mine & (facts["status"] != MOVED)
    moving = ~stays
    if rule.homes is not None:
        moving &= np.isin(first >> np.uint64(32), np.array(sorted(rule.homes), np.uint64))
        if hour not in rule.homes:
            stays, orphans = np.zeros_like(stays), orphans[:0]
    facts["verdict"] = found = verdicts(facts, rule)
    topics = facts["topic"]
    counts = _count([hour], 0, *((topics, found) if stays.all() else (topics[stays], found[stays])))
    if len(orphans):
        counts[hour, -1, ORPHAN] = len(orphans)
    lost = np.zeros(len(orphans), FACTS)
    lost["hour"], lost["entry"], lost["verdict"] = hour, orphans, ORPHAN
    return Judged(np.concatenate([_table(facts, stays & _OFFENDS[found]), lost]), counts, _table(facts, moving))


def entry_facts(store: Store, part: EntryRange, rule: Rule) -> tuple[Columns, npt.NDArray[np.uint32]]:
    """Collect the facts about a range of an hour's entries: (facts as columns, numbers of missing entries that events
    refer to). Missing entries are reported only with the range that begins at entry 0."""
    files, n = part.files, part.stop - part.start
    index, there = usable(store, files, "idx", part.start, part.stop, verify=rule.verify, skip=rule.skip)
    facts: Columns = {name: np.ascontiguousarray(index[name]) for name in ("first_id", "topic", "deliver_at_ms")}
    facts["hour"] = np.broadcast_to(np.uint32(files.hour), n)
    facts["entry"] = np.arange(part.start, part.stop, dtype=np.uint64)
    facts |= {name: np.zeros(n, np.uint32) for name in ("leases", "excused", "to_hour", "to_entry")}
    # More columns of `facts`. codes: number of the last event's type. granted: ms from the due time to the last grant.
    # delay: ms from the grant to the hand-out.
    facts |= {"codes": np.zeros(n, np.uint8), "early": np.zeros(n, np.bool_)}
    facts |= {"granted": np.full(n, _NEVER), "delay": np.zeros(n, np.int64)}
    orphans = [np.zeros(0, np.uint32)]
    for at, events, missing in events_of(store, files, part.start, part.stop, verify=rule.verify, skip=rule.skip):
        _add_events(facts, at, events)
        if part.start == 0:
            orphans.append(missing)
    codes, granted = facts.pop("codes"), facts.pop("granted")
    late = np.where(granted == _NEVER, -1, np.maximum(granted + facts.pop("delay"), 0))
    status = _STATUS_OF_EVENT[codes]
    waits = status == PENDING
    if files.hour >= DEAD_HOURS:
        status[waits] = DEAD
    else:
        status[waits & (facts["deliver_at_ms"] + rule.grace_ms <= rule.as_of_ms)] = LOST
    facts |= {"status": status, "late_ms": late, "live": status != MOVED}
    if there is not None:
        orphans.append((part.start + np.flatnonzero(~there & (codes > 0))).astype(np.uint32))
        facts = {name: values[there] for name, values in facts.items()}
    if rule.topics is not None:
        mine = rule.topics[np.minimum(facts["topic"], len(rule.topics) - 1)]
        facts = {name: values[mine] for name, values in facts.items()}
    return facts, np.unique(np.concatenate(orphans))


def _add_events(facts: Columns, at: npt.NDArray[np.intp], events: Rows) -> None:
    """Add events to the facts of their entries. at: position of each event's entry."""
    kind, one = np.minimum(events["event"], len(_STATUS_OF_EVENT) - 1), np.uint32(1)
    np.maximum.at(facts["codes"], at, kind)
    leased = np.flatnonzero(kind == Event.LEASED)
    who = at[leased]
    np.add.at(facts["leases"], who, one)
    late_ms = events["at_ms"][leased] - facts["deliver_at_ms"][who]
    np.maximum.at(facts["granted"], who, late_ms)
    np.maximum.at(facts["delay"], at, handout_delay_ms(events))
    facts["early"][who[late_ms < -AHEAD_MS]] = True
    np.add.at(facts["excused"], at[(kind == Event.NACKED) | (kind == Event.REDRIVEN)], one)
    moved = kind >= Event.MOVED
    facts["to_hour"][at[moved]] = events["other_hour"][moved]
    facts["to_entry"][at[moved]] = events["consumer"][moved]


def _table(facts: Columns, which: npt.NDArray[np.bool_]) -> Rows:
    found = np.zeros(np.count_nonzero(which), FACTS)
    for name in FACTS.names or () if len(found) else ():
        found[name] = facts[name][which]
    return found


def verdicts(facts: Rows | Columns, rule: Rule) -> npt.NDArray[np.uint8]:
    """Verdict of each message: a loss first, then violations (early, duplicate), then the outcome."""
    found: npt.NDArray[np.uint8] = OF_STATUS[facts["status"]]
    found[(found == OK) & (facts["late_ms"] > rule.late_ms)] = LATE
    lost = facts["status"] == LOST
    found[~lost & ((facts["leases"] > facts["excused"] + 1) | (facts["live"] > 1))] = DUPLICATE
    found[~lost & facts["early"]] = EARLY
    return found


def by_message(groups: int, judged: Judged) -> Iterator[tuple[int, Rows]]:
    """Group the entries of moved messages: yields (group number, entries). A message's entries are in one group."""
    group = (judged.moving["first_id"] % np.uint64(groups)).astype(np.intp)
    for n in np.unique(group).tolist():
        yield n, judged.moving[group == n]


def conclude(pieces: list[Rows], *, listed: frozenset[int], rule: Rule) -> Judged:
    """Judge moved messages by all their entries. listed: hours that have files."""
    moving = np.concatenate([np.zeros(0, FACTS), *pieces])
    if not len(moving):
        return Judged(moving, Counter(), moving)
    own = moving["hour"].astype(np.uint64) << np.uint64(32) | moving["entry"]
    target = moving["to_hour"].astype(np.uint64) << np.uint64(32) | moving["to_entry"]
    broken = np.flatnonzero((moving["status"] == MOVED) & ~np.isin(target, own))
    for hour in np.unique(moving["to_hour"][broken]).tolist():
        # Messages moved to a missing hour are settled if the hour was old enough to be deleted, else lost.
        deleted_ms = (hour % DEAD_HOURS + 1) * HOUR_MS + (0 if hour >= DEAD_HOURS else RETIRED_MS)
        gone = hour not in listed and deleted_ms <= rule.as_of_ms
        moving["status"][broken[moving["to_hour"][broken] == hour]] = GONE if gone else LOST
    moving = moving[np.lexsort((moving["entry"], moving["hour"], moving["first_id"]))]
    firsts = np.flatnonzero(np.r_[True, moving["first_id"][1:] != moving["first_id"][:-1]])
    whole = moving[firsts]
    for name in ("leases", "excused", "live"):
        whole[name] = np.add.reduceat(moving[name], firsts)
    for name in ("status", "late_ms"):
        whole[name] = np.maximum.reduceat(moving[name], firsts)
    whole["early"] = np.logical_or.reduceat(moving["early"], firsts)
    whole["hour"] = (whole["first_id"] & _HOME) >> np.uint64(32)
    whole["verdict"] = verdicts(whole, rule)
    hours, at = np.unique(whole["hour"], return_inverse=True)
    counts = _count(hours.tolist(), at, whole["topic"], whole["verdict"])
    return Judged(whole[_OFFENDS[whole["verdict"]]], counts, moving[:0])


def _count(
    hours: list[int], hour_at: npt.NDArray[np.intp] | int, topics: npt.NDArray[np.uint32], found: npt.NDArray[np.uint8]
) -> Counts:
    """Count messages per (hour, topic, verdict). hour_at: each message's position in `hours`."""
    width, height = len(VERDICTS), int(topics.max(initial=0)) + 1
    totals = np.bincount((hour_at * height + topics.astype(np.int64)) * width + found)
    return Counter(
        {
            (hours[n // width // height], n // width % height, n % width): int(totals[n])
            for n in np.flatnonzero(totals).tolist()
        }
    )


def summarise(
    counts: Counts,
    offending: Iterable[Rows],
    names: NameMap,
    listing: Listing,
    rule: Rule,
    options: ReconcileOptions,
) -> JobSummary:
    """Make the job's summary. counts: number of messages by hour, topic number (-1: unknown topic) and verdict.
    offending: FACTS rows of the messages with problems, in pieces; read only if they are written to a file."""
    table: list[dict[str, Any]] = [
        {"hour": hour_int(hour), "topic": names.topic(topic), "verdict": VERDICTS[verdict], "count": count}
        for (hour, topic, verdict), count in sorted(counts.items())
    ]
    totals = {name: sum(row["count"] for row in table if row["verdict"] == name) for name in VERDICTS}
    hours, messages = len(listing.hours if rule.homes is None else rule.homes), sum(totals.values()) - totals["orphan"]
    summary = JobSummary(
        "reconcile",
        as_of_ms=listing.as_of_ms,
        engine="fast",
        hours=hours,
        messages=messages,
        verdicts=totals,
        table=table,
        offending=sum(totals[VERDICTS[verdict]] for verdict in OFFENDING),
        failed=any(totals[name] for name in options.failing),
    )
    verdicts = ", ".join(f"{count:,} {name}" for name, count in totals.items() if count) or "nothing to judge"
    said = f"{messages:,} messages of {hours:,} hours: {verdicts}"
    if options.out:
        first: list[dict[str, Any]] = []
        tables = _keep_first(first, (_shown(some, names.topics) for some in chain([np.zeros(0, FACTS)], offending)))
        write_parquet(options.out, "offending.parquet", tables)
        summary.write(options.out, report(summary, said, [VERDICTS[verdict] for verdict in OFFENDING], first))
    return summary.show(table, "hour topic verdict count", said, failed=summary["failed"])


def _keep_first(first: list[dict[str, Any]], tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the tables, and add their first rows to `first`, for the report."""
    for found in tables:
        first += found.slice(0, ROWS - len(first)).to_pylist()
        yield found


def _shown(offending: Rows, topics: list[str]) -> pa.Table:
    """Messages with problems as an Arrow table, for people."""
    orphan, late = offending["verdict"] == ORPHAN, offending["late_ms"]
    return pa.table(
        {
            "verdict": named(VERDICTS, offending["verdict"]),
            "id": without(ids(offending["first_id"]), orphan),
            "hour": pa.array(hour_ints(offending["hour"])),
            "entry": pa.array(offending["entry"].astype(np.int64)),
            "topic": named(topics, np.where(orphan, NONE32, offending["topic"])),
            "deliver_at": instants(offending["deliver_at_ms"]),
            "hand_outs": pa.array(offending["leases"].astype(np.int32)),
            "late_ms": pa.array(late, mask=late < 0),
        }
    )
